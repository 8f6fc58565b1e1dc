"""The end of a run: everything is closed, whatever fails, and the first failure is the one that is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


async def close_all(failure: BaseException | None, closings: list[Callable[[], Any]]) -> None:
    """Call all of *closings* in order, and await those that are async.

    *failure* is what the run ended with, if it failed. Raises the first failure of a closing, unless the run failed;
    the others become notes of the first failure of all. A signal, as when this is cancelled, goes before errors.
    """
    first = failure
    for close in closings:
        try:
            closed = close()
            if inspect.isawaitable(closed):
                await closed
        except BaseException as error:
            if first is None or (isinstance(first, Exception) and not isinstance(error, Exception)):
                first = error
            elif error is not first:
                first.add_note(f"And then closing failed: {type(error).__name__}: {error}")
    if first is not None and first is not failure:
        raise first
