"""What surrounds the action tasks of a process: everything that the core is given from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from dalsegno.core.late import LateCalls
from dalsegno.core.pauses import Pauses
from dalsegno.core.records import Record
from dalsegno.core.watch import Watch


class Log(Protocol):
    """What an action task needs of the group commit."""

    @property
    def crowded(self) -> bool: ...
    def append(self, record: Record, /) -> None: ...
    def check(self) -> None: ...
    async def barrier(self) -> None: ...


@dataclass(slots=True)
class Counters:
    """Durable calls of this process: executed anew, and played back from the record."""

    executed: int = 0
    replayed: int = 0
    diverged: int = 0
    """Messages that went on although the code no longer fitted their record."""


@dataclass(slots=True)
class Environment:
    """What surrounds all action tasks of a process."""

    job: str
    log: Log
    run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Runs a function in a thread, in a copy of the present context; raises what it raises, StopIteration excepted."""
    clock: Callable[[], datetime]
    """The present time, with its zone."""
    counters: Counters = field(default_factory=Counters)
    rerun: bool = False
    """Whether a message goes on where the code no longer fits its record, instead of raising `DivergenceError`."""
    stopping: bool = False
    cancelled: bool = False
    """Whether the runner cancels what runs: an action that is cancelled then has not cancelled anything itself."""
    decisions: dict[tuple[bytes, str], dict[str, bytes]] = field(default_factory=dict)
    """What people decided, by key and id of the message: the body of each decision by its target."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    pauses: Pauses = field(default_factory=Pauses)
    late: LateCalls = field(default_factory=LateCalls)
    watch: Watch | None = None
    check_output: Callable[[Any, str], None] | None = None
    """Raises `DalSegnoError` for an output, with its id, that can never leave."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Asked for once: it is a system call each time."""

    def stop(self) -> None:
        """From now on no call starts, and none is waited for that is only due later."""
        self.stopping = True
        self.pauses.cut()

    async def give_way(self) -> None:
        """Let the event loop do other things, and wait if more is to be recorded than the store keeps up with."""
        if self.log.crowded:
            await self.log.barrier()
        else:
            await asyncio.sleep(0)
