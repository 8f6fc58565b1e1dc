"""Waits that can be cut short: between two attempts of a call, and in ``ctx.sleep``.

A wait is *until* a moment, which is recorded, so that after a restart only what is left of it is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from dalsegno.errors import DefinitionError
from dalsegno.retry import is_number

Clock = Callable[[], datetime]
"""Gives the present moment, with its time zone."""
Sleep = Callable[[float], Awaitable[None]]
"""Waits that many seconds."""

_STEP = 60.0
"""The clock is asked anew after as many seconds, as the machine itself may have been asleep."""


class Pauses:
    """The waits that are going on, each with its owner."""

    __slots__ = ("_sleeping",)

    def __init__(self) -> None:
        self._sleeping: dict[asyncio.Future[None], object] = {}

    def cut(self, owner: object = None) -> None:
        """End all waits now, or those of *owner*."""
        for sleeping, whose in self._sleeping.items():
            if owner is None or whose is owner:
                sleeping.cancel()

    async def until(self, due: datetime, longest: float, clock: Clock, sleep: Sleep, owner: object) -> None:
        """Return when *clock* shows *due*, after *longest* seconds, or when the waits are cut.

        *longest* is for a clock that was set back since *due* was computed.
        """
        while (left := min((due - clock()).total_seconds(), longest)) > 0:
            step = min(left, _STEP)
            longest -= step
            sleeping = asyncio.ensure_future(sleep(step))
            self._sleeping[sleeping] = owner
            try:
                await asyncio.wait([sleeping])
            finally:
                del self._sleeping[sleeping]
                cut = sleeping.cancelled()
                sleeping.cancel()
            if cut:
                return
            sleeping.result()


def after(clock: Clock, seconds: float) -> datetime:
    """The moment that is *seconds* from now, in UTC."""
    return clock().astimezone(UTC) + timedelta(seconds=seconds)


def seconds_of(duration: object, where: str) -> float:
    """A duration as seconds; raises `DefinitionError` for what is none, with *where* it was given."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not is_number(seconds, 0, _LONGEST):
        raise DefinitionError(
            f"{where}: {duration!r} is no duration; give a number of seconds or a timedelta, from 0 to 100 years"
        )
    return float(seconds)


_LONGEST = 100 * 366 * 86_400
