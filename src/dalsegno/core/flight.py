"""What of an action task is in flight, and whether the action may go on.

What must not go on (a divergence, a failed write, a call in doubt, a stop) leaves the action as `Unwind`, which no
``except Exception`` catches, and is remembered, so that the action cannot go on even if it catches that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from dalsegno.core.place import Place
from dalsegno.core.records import Park


class Unwind(BaseException):
    """Leaves an action that must not go on. Not an `Exception`, so that the action's own handlers let it pass."""


class Stopped(Exception):
    """The runner is stopping: the action was left at the boundary of a call and is replayed after the restart."""


class SetAside(Exception):
    """The message cannot go on now; the `park` of the action task says why."""


class Unrecordable(BaseException):
    """Carries the reason past the handlers that are for what the callee raises."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


class Flight:
    """The calls and pauses of one action task that are going on, and what becomes of the action."""

    verdict: Exception | None = None
    """Why the action must not go on."""
    ended = False
    park: Park | None = None
    """Why the message has to be set aside, once that is known."""
    until: datetime | None = None
    """When it is to be taken up again, if nobody decides before."""
    calls = 0
    """How many calls are in flight."""
    pauses = 0
    _idle: asyncio.Event | None = None
    _give_back: Callable[[], None] | None = None

    def __init__(self, place: Place) -> None:
        self._place = place
        self._environment = place.environment

    def keeps_back(self, give_back: Callable[[], None]) -> None:
        """Calls may be kept back; *give_back* lets them go on when the action must not, or has ended."""
        self._give_back = give_back

    def enter(self) -> None:
        """A call is in flight, until it has to `leave`."""
        self.calls += 1

    def leave(self) -> None:
        self.calls -= 1
        if not self.calls and self._idle is not None:
            self._idle.set()

    async def settle(self) -> None:
        """Wait until the calls that are in flight are over and recorded."""
        while self.calls:
            if self._idle is None or self._idle.is_set():
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def end(self) -> None:
        """The action has ended: what still runs beside it may end its call, but starts none."""
        self.ended = True
        if self.pauses:
            self._environment.pauses.cut(self)
        if self.calls:
            await self.settle()
        if self._give_back is not None:
            self._give_back()

    def condemn(self, verdict: Exception) -> None:
        """The action must not go on, which it finds out at its next call or at its end."""
        self.verdict = self.verdict or verdict

    async def stop_with(self, verdict: Exception) -> NoReturn:
        """Leave the action, which must not go on, once the calls that are in flight are over and recorded."""
        self.condemn(verdict)
        if self.pauses:
            self._environment.pauses.cut(self)
        if self._give_back is not None:
            self._give_back()
        # In a task group the other calls would be cancelled, and so in doubt, if this one left at once.
        await self.settle()
        raise Unwind

    def check_running(self) -> None:
        """Raise unless the action may use its context."""
        if self.ended:
            raise RuntimeError(
                f"{self._place}: the context was used after its action had ended; await everything that uses it"
            )
        if self.verdict is not None:
            raise Unwind

    def halt(self) -> Exception | None:
        """Why the action must not go on."""
        return self.verdict or (Stopped() if self._environment.stopping else None)

    async def pause(self, due: datetime, longest: float) -> None:
        """Wait until *due*, but not longer than *longest* seconds, and no longer than the action may go on."""
        if self.ended or self.halt() is not None:
            return
        environment = self._environment
        self.pauses += 1
        try:
            await environment.pauses.until(due, longest, environment.clock, environment.sleep, self)
        finally:
            self.pauses -= 1


def is_thrown_away(task: asyncio.Task[Any] | None) -> bool:
    """Whether the coroutine of *task* is closed, as against code in it that raises `GeneratorExit` of its own.

    Nothing can be awaited in it then.
    """
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no event loop runs
        return True


def is_being_cancelled() -> bool:
    """Whether the runner cancels this task, as against an action that raises `CancelledError` of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
