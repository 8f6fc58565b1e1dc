"""The time limit of one attempt of a call (``timeout=``).

A coroutine that takes too long is cancelled. Nothing can end a function that runs in a thread: its result comes too
late and is dropped, except that of a ``once`` call, for which its message waits (`dalsegno.core.late`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any


class Watched:
    """A function that is called in a thread, and what the event loop knows of it."""

    __slots__ = ("_ended", "_function", "_turn", "outcome")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._turn = [None]  # whoever takes this out, which only one can: the thread that starts, or who gives up
        self._ended = False
        self.outcome: tuple[Any, Exception | None] | None = None
        """What it returned and what it raised, once it has ended; None if it did neither, as when it had to exit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._take_turn():
            return None
        try:
            result = self._function(*args, **kwargs)
            if not inspect.isawaitable(result):
                self.outcome = result, None
            return result
        except Exception as error:
            self.outcome = None, error
            raise
        finally:
            self._ended = True

    def give_up(self) -> bool:
        """Whether the function had not started; then it never does."""
        return self._take_turn()

    @property
    def runs(self) -> bool:
        """Whether it still runs in its thread, once `give_up` said that it had started."""
        return not self._ended

    def _take_turn(self) -> bool:
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True


class OutOfTime(BaseException):
    """An attempt was cut off, so what it raised says nothing; past the handlers for what the callee raises.

    *error* is what the action gets if the call turns out not to have happened; *running* is the function, if it still
    runs in its thread.
    """

    def __init__(self, error: TimeoutError, running: Watched | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.running = running


async def in_time(attempt: Coroutine[Any, Any, Any], seconds: float, name: str, watched: Watched | None) -> Any:
    """What *attempt* returns or raises; raises `OutOfTime` when it was cut off after *seconds*.

    If it returns something in spite of its cancellation, that is its result. *watched* is the function that it calls in
    a thread. If that has not started, it never does, and `TimeoutError` says so.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await attempt
    except Exception as error:
        if not limit.expired():
            raise
        cause = None if type(error) is TimeoutError and isinstance(error.__cause__, asyncio.CancelledError) else error
    if watched is not None and watched.give_up():
        raise TimeoutError(
            f"the call {name} was not begun within its timeout of {seconds:g} s, because all threads were busy"
        )
    late = TimeoutError(f"the call {name} did not end within its timeout of {seconds:g} s")
    late.__cause__ = cause
    raise OutOfTime(late, watched if watched is not None and watched.runs else None)
