"""Cancellations that do not come from the runner end the run with an error, not as if its input were finished.

And the context of an action is not for the functions that it calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dalsegno import ActionError, DalSegnoError, RunnerContext
from tests.helpers import Scripted, Tools, World, run


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("in_call", [True, False])
def test_a_cancelled_action_ends_the_run_with_an_error_and_the_next_run_does_the_rest(
    world: World, tools: Tools, keyed: bool, in_call: bool
) -> None:
    cancels = True

    async def cancelled(what: Any) -> Any:
        if cancels and what == 3:
            task = next(task for task in asyncio.all_tasks() if task is asyncio.current_task())
            task.cancel()
            await asyncio.sleep(0)
        return what

    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, value["n"], effect="once")
        if in_call:
            return await ctx.durable_execute(cancelled, value["n"], effect="read", name="cancelled")
        return await cancelled(value["n"])

    source = [{"n": n} for n in range(6)]
    key = "n" if keyed else None
    with pytest.raises(DalSegnoError, match=r"cancelled by other code while it was running the actions of key .*'3'"):
        run(world.runner(Scripted(body)), source, world.out, key=key)
    cancels = False
    report = run(world.runner(Scripted(body)), source, world.out, key=key)
    assert report.stopped_by is None
    assert sorted(world.outputs()) == [0, 1, 2, 3, 4, 5]
    assert sorted(tools.made) == [0, 1, 2, 3, 4, 5]


def test_a_source_that_is_cancelled_ends_the_run_with_an_error(world: World, tools: Tools) -> None:
    cancels = True

    async def source() -> AsyncIterator[Any]:
        for n in range(6):
            yield n
            if cancels and n == 3:
                raise asyncio.CancelledError

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect="once")

    with pytest.raises(DalSegnoError, match="cancelled by other code while it was reading an async iterable"):
        run(world.runner(Scripted(body)), source(), world.out)
    cancels = False
    run(world.runner(Scripted(body)), source(), world.out)
    assert sorted(tools.made) == [0, 1, 2, 3, 4, 5]
    assert len(world.outputs()) == 6


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda ctx: ctx.short_term_memory.set("n", 1), "ctx.short_term_memory"),
        (lambda ctx: ctx.short_term_memory.get("n"), "ctx.short_term_memory"),
        (lambda ctx: ctx.sensory_memory.set("n", 1), "ctx.sensory_memory"),
        (lambda ctx: ctx.send_event(None), r"ctx\.send_event"),
        (lambda ctx: ctx.patched("p"), r"ctx\.patched"),
    ],
)
@pytest.mark.parametrize("threaded", [True, False])
def test_a_called_function_may_not_use_the_context_as_a_replay_would_lose_that(
    world: World, use: Any, named: str, threaded: bool
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        def callee() -> None:
            use(ctx)

        async def async_callee() -> None:
            use(ctx)

        await ctx.durable_execute(callee if threaded else async_callee, effect="read", name="callee")

    with pytest.raises(ActionError, match=f"{named}.* is used inside the function of a durable call"):
        run(world.runner(Scripted(body)), [1], world.out)
