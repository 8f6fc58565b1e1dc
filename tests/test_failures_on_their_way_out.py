"""A failure that leaves the action is no history, also when the action made calls while it was on its way out.

What it did meanwhile is of a path that it need not take again, but is not done twice either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dalsegno import ActionError, RetryPolicy, RunnerContext
from tests.helpers import Scripted, Tools, World, run

Path = Callable[[Tools, RunnerContext, Any], Awaitable[Any]]


async def ask(tools: Tools, ctx: RunnerContext, effect: Any, **options: Any) -> Any:
    return await ctx.durable_execute(tools.call, "ask", effect=effect, **options)


async def tell(tools: Tools, ctx: RunnerContext, what: str = "tell") -> Any:
    return await ctx.durable_execute(tools.call, what, effect="once")


async def with_finally(tools: Tools, ctx: RunnerContext, effect: Any) -> Any:
    try:
        return await ask(tools, ctx, effect)
    finally:
        await tell(tools, ctx)


async def told_and_raised(tools: Tools, ctx: RunnerContext, effect: Any) -> Any:
    try:
        return await ask(tools, ctx, effect)
    except ConnectionError:
        await tell(tools, ctx)
        raise


async def raised_anew(tools: Tools, ctx: RunnerContext, effect: Any) -> Any:
    try:
        return await ask(tools, ctx, effect)
    except ConnectionError:
        await ctx.now()
        await tell(tools, ctx)
        raise RuntimeError("while it was handled")  # noqa: B904


async def kept_and_raised_from(tools: Tools, ctx: RunnerContext, effect: Any) -> Any:
    kept: list[Exception] = []
    answer = None
    try:
        answer = await ask(tools, ctx, effect)
    except ConnectionError as error:
        kept.append(error)
    await tell(tools, ctx)
    if kept:
        raise RuntimeError("late") from kept[0]
    return answer


async def gathered_in_a_group(tools: Tools, ctx: RunnerContext, effect: Any) -> Any:
    errors: list[Exception] = []
    answers: list[Any] = []
    for what in ("first", "ask", "tell"):
        try:
            answers.append(await ctx.durable_execute(tools.call, what, effect=effect))
        except ConnectionError as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("all of them", errors)
    return answers[1]


async def retried(tools: Tools, ctx: RunnerContext, effect: Any) -> Any:
    try:
        return await ask(tools, ctx, effect, retry=RetryPolicy(attempts=1, backoff=0))
    except ConnectionError:
        await tell(tools, ctx)
        raise


PATHS: list[Path] = [with_finally, told_and_raised, raised_anew, kept_and_raised_from, gathered_in_a_group, retried]


def agent(path: Path, tools: Tools, effect: Any) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await path(tools, ctx, effect)

    return Scripted(body)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
@pytest.mark.parametrize("outages", [1, 3])
def test_it_is_tried_again_and_what_was_done_meanwhile_is_not_done_twice(
    world: World, tools: Tools, path: Path, effect: Any, outages: int
) -> None:
    tools.fail_on["ask"] = ConnectionError("down")
    for number in range(outages):
        with pytest.raises(ActionError):
            run(world.runner(agent(path, tools, effect)), ["input"], world.out)
        assert tools.count("ask") == number + 1, "tried in each run"
        assert tools.count("tell") == 1
    tools.fail_on.clear()
    run(world.runner(agent(path, tools, effect)), ["input"], world.out)
    assert world.outputs() == ["done ask"]
    assert tools.count("ask") == outages + 1
    assert tools.count("tell") == 1
    assert tools.count("first") in (0, 1)


def test_a_failure_that_the_action_handled_stays_history_when_something_else_fails(world: World, tools: Tools) -> None:
    tools.fail_on = {"ask": ConnectionError("down"), "end": ValueError("another")}

    async def body(value: Any, ctx: RunnerContext) -> Any:
        try:
            answer = await ask(tools, ctx, "read")
        except ConnectionError:
            answer = await tell(tools, ctx, "fall back")
        await ctx.durable_execute(tools.call, "end", effect="idempotent")
        return answer

    with pytest.raises(ActionError, match="another"):
        run(world.runner(Scripted(body)), ["input"], world.out)
    tools.fail_on.clear()
    run(world.runner(Scripted(body)), ["input"], world.out)
    assert world.outputs() == ["done fall back"]
    assert tools.made == ["ask", "fall back", "end", "end"]


def test_it_is_so_when_the_message_is_parked_and_retried(world: World, tools: Tools) -> None:
    tools.fail_on["ask"] = ConnectionError("down")
    report = run(world.runner(agent(told_and_raised, tools, "read"), on_failure="park"), ["input"], world.out)
    assert [parked.why for parked in report.parked] == ["failed"]
    tools.fail_on.clear()
    runner = world.runner(agent(told_and_raised, tools, "read"), on_failure="park")
    runner.operator().retry(None)
    assert run(runner, ["input"], world.out).parked == []
    assert world.outputs() == ["done ask"]
    assert tools.made == ["ask", "tell", "ask"]
