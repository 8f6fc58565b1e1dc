"""The time limit of one attempt of a call (``timeout=``).

A coroutine that takes too long is cancelled. Nothing can end a function that runs in a thread: its result comes too
late and is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Watched:
    """A function that is called in a thread, and what the event loop knows of it."""

    __slots__ = ("_ended", "_function", "_turn")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._turn = [None]  # whoever takes this out, which only one can: the thread that starts, or who gives up
        self._ended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._take_turn():
            return None
        try:
            return self._function(*args, **kwargs)
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

    *error* is what the action gets if the call turns out not to have happened; *runs* says whether the function still
    runs in its thread.
    """

    def __init__(self, error: TimeoutError, runs: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.runs = runs


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
    raise OutOfTime(late, watched is not None and watched.runs)
