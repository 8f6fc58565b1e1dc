"""``ctx.gather``: calls side by side, at most so many at a time.

All of them begin, in the order of the arguments, whatever becomes of the others, and all of them end before the first
exception, in the order of the arguments, is raised. So which calls are made and what the caller gets depends on
nothing but what the calls themselves return or raise: neither on which of them ends first nor on when one fails. That
is what a replay needs, where recorded calls end at once. And no call is cut off, and so in doubt, because another one
failed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dalsegno.errors import DefinitionError

Item = Awaitable[Any] | Callable[[], Awaitable[Any]]


def check(items: Sequence[Any], limit: object) -> None:
    """Raises `DefinitionError` for what cannot be gathered, and closes the coroutines, which then never run."""
    try:
        if limit is not None and (type(limit) is not int or limit < 1):
            raise DefinitionError(
                f"ctx.gather(..., limit={limit!r}): give the number of calls that may be in flight, a whole number "
                "from 1 on, or None for no limit"
            )
        for number, item in enumerate(items):
            if not (inspect.isawaitable(item) or callable(item)):
                raise DefinitionError(
                    f"ctx.gather takes awaitables, as in ctx.gather(ctx.durable_execute(...), ...), and functions "
                    f"without arguments that return one, but argument {number} is {item!r}; write a * before a list"
                )
            if isinstance(item, asyncio.Future) and limit is not None:
                raise DefinitionError(
                    f"ctx.gather(..., limit={limit}): argument {number} is a task, which runs already, so it cannot "
                    "wait for its turn; pass the coroutine itself"
                )
        if len({id(item) for item in items if inspect.iscoroutine(item)}) < sum(map(inspect.iscoroutine, items)):
            raise DefinitionError("ctx.gather was given the same coroutine twice, and it can only run once")
    except DefinitionError:
        _close(items)
        raise


async def gather(items: Sequence[Item], limit: int | None) -> list[Any]:
    """The results of *items* in their order, at most *limit* of them in flight.

    When it is cancelled, those in flight are cancelled and the others never begin.
    """
    tasks: list[asyncio.Future[Any]] = []
    running: set[asyncio.Future[Any]] = set()
    try:
        for item in items:
            while limit is not None and len(running) >= limit:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            tasks.append(_begin(item))
            running.add(tasks[-1])
        if running:
            await asyncio.wait(running)
    except asyncio.CancelledError:
        _close(items[len(tasks) :])
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task in tasks:
            task.cancelled() or task.exception()  # looked at, so that nobody complains that it was not
        raise
    raise_first(tasks)
    return [task.result() for task in tasks]


def raise_first(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Raise what the first of *tasks* raised, but before all else what must not be caught."""
    errors = [task.exception() for task in tasks if not task.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, Exception):
            raise error
    for task in tasks:
        if task.cancelled() or task.exception() is not None:
            task.result()


def _begin(item: Item) -> asyncio.Future[Any]:
    return asyncio.ensure_future(item if inspect.isawaitable(item) else _called(item))


async def _called(function: Any) -> Any:
    awaitable = function()
    if not inspect.isawaitable(awaitable):
        raise DefinitionError(
            f"ctx.gather called {function!r}, which returned {awaitable!r} and nothing to await: pass a function that "
            "returns an awaitable, as in lambda: ctx.durable_execute(...)"
        )
    return await awaitable


def _close(items: Sequence[Any]) -> None:
    for item in items:
        if inspect.iscoroutine(item):
            item.close()
