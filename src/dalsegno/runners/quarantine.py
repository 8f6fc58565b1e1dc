"""Who may run beside whom after a crash: a message that may have ended the process runs alone.

So it is the only one to be blamed if the process ends again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Quarantine:
    """Many may be inside at a time, or one alone. Who wants to be alone goes before all that come later."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._inside = 0
        self._alone = 0
        """Those that are alone, or wait to be."""

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        self._alone += alone
        try:
            while self._inside if alone else self._alone:
                self._changed.clear()
                await self._changed.wait()
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1
        finally:
            self._alone -= alone
            self._changed.set()
