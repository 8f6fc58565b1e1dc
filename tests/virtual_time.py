"""A clock that tests set, in place of the real one: waits are noted and take no time, or never end."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dalsegno.core.environment import Environment
from tests.helpers import for_ever


class VirtualTime:
    """What every runner of a test takes for the clock, once `install` was called."""

    def __init__(self) -> None:
        self.present = datetime(2026, 3, 1, 12, tzinfo=UTC)
        self.waits: list[float] = []
        """Each wait that was begun, in seconds, by all runners."""
        self.held = False
        """Whether waits never end."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
        monkeypatch.setattr("dalsegno.runners.local.Environment", self._environment)
        return self

    def _environment(self, *args: Any, **options: Any) -> Environment:
        environment = Environment(*args, **options)
        environment.clock = lambda: self.present
        environment.sleep = self._sleep
        return environment

    def advance(self, seconds: float) -> None:
        self.present += timedelta(seconds=seconds)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if self.held:
            await for_ever()
        self.advance(seconds)
        await asyncio.sleep(0)
