"""An event loop on which waiting takes no time: when nothing else is left to do, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """*start* is the time, in seconds, that its clock begins with.

    It waits in real time while a thread works for it, while it watches a connection, and `while_busy`. What is run in
    an executor of one thread, where only the order counts, is run at once, so that runs repeat step by step.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._offset = 0.0
        self._busy = 0
        selector = _JumpingSelector()
        super().__init__(selector)
        self._offset = start - super().time()
        selector.loop = self

    def time(self) -> float:
        return super().time() + self._offset

    def jump(self, seconds: float) -> None:
        self._offset += seconds

    @property
    def may_jump(self) -> bool:
        return not self._busy

    @contextmanager
    def while_busy(self) -> Iterator[None]:
        """Something works for the loop elsewhere, in a way that it does not see."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        if getattr(executor, "_max_workers", None) == 1:
            return self._done(func, *args)
        future = super().run_in_executor(executor, func, *args)
        self._busy += 1
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: asyncio.Future[Any]) -> None:
        self._busy -= 1

    def _done(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.DefaultSelector):
    loop: VirtualLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        own_pipe_alone = len(self.get_map()) == 1
        if timeout is None or timeout <= 0 or self.loop is None or not (self.loop.may_jump and own_pipe_alone):
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.loop.jump(timeout)
        return ready
