"""`ctx.patched`: a deployed agent is changed while messages are in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dalsegno import ActionError, Agent, InputEvent, OutputEvent, RunnerContext, action
from tests.helpers import Scripted, Tools, World, run
from tests.test_divergence import killed_in


def scripted(tools: Tools, script: str) -> Scripted:
    """Letters are calls; ``[p:new|old]`` takes the new path if the change p is patched in, else the old one."""

    async def calls(ctx: RunnerContext, letters: str) -> list[Any]:
        return [await ctx.durable_execute(tools.call, what, effect="idempotent") for what in letters]

    async def body(value: Any, ctx: RunnerContext) -> list[Any]:
        made: list[Any] = []
        for part in script.replace("[", " [").replace("]", "] ").split():
            if part.startswith("["):
                name, paths = part[1:-1].split(":")
                new, old = paths.split("|")
                part = new if ctx.patched(name) else old
            made += await calls(ctx, part)
        return made

    return Scripted(body)


def made(world: World) -> str:
    ((output),) = world.outputs()
    return "".join(each.removeprefix("done ") for each in output)


@pytest.mark.parametrize(
    ("before", "killed", "after", "wanted"),
    [
        ("", "", "[p:xy|a]b", "xyb"),  # a message that begins with the changed code
        ("abc", "b", "[p:x|a]bc", "abc"),  # the change lies before what is recorded
        ("abc", "b", "a[p:x|]bc", "abc"),
        ("abc", "b", "ab[p:x|c]", "abx"),  # the change lies behind it
        ("abc", "c", "ab[p:x|c]", "abc"),
        ("abc", "c", "abc[p:x|]", "abcx"),
        ("ab", "b", "[p:x|]a[p:x|]b[p:x|]", "ab"),  # one answer in all places
        ("ab", "b", "[p:x|]ab[q:y|]", "aby"),  # two changes
        ("abc", "c", "[p:x|][q:y|]a[r:|b]c", "abc"),
    ],
)
def test_a_message_in_flight_takes_the_old_path_where_it_is_recorded_and_the_new_one_elsewhere(
    world: World, tools: Tools, before: str, killed: str, after: str, wanted: str
) -> None:
    if before:
        killed_in(world, tools, scripted(tools, before), killed)
    executed = [*tools.made]
    run(world.runner(scripted(tools, after)), ["input"], world.out)
    assert made(world) == wanted
    assert "".join(tools.made[len(executed) :]) == wanted[len(executed) - 1 if executed else 0 :]


@pytest.mark.parametrize("crash_in", "abxc")
def test_the_answer_is_the_same_in_every_replay(world: World, tools: Tools, crash_in: str) -> None:
    changed = scripted(tools, "a[p:x|y]bc")
    killed_in(world, tools, changed, crash_in)
    run(world.runner(changed), ["input"], world.out)
    assert made(world) == "axbc"
    assert sorted(tools.made) == sorted("axbc" + crash_in)


def test_the_old_path_is_kept_to_over_several_restarts(world: World, tools: Tools) -> None:
    killed_in(world, tools, scripted(tools, "abcd"), "b")
    changed = scripted(tools, "a[p:x|]bc[p:x|]d[q:y|]")
    for crash_in in "cdy":
        killed_in(world, tools, changed, crash_in)
    run(world.runner(changed), ["input"], world.out)
    assert made(world) == "abcdy"
    assert "".join(tools.made) == "ab" + "bc" + "cd" + "dy" + "y"


def test_the_last_step_of_a_change_is_to_take_the_question_out(world: World, tools: Tools) -> None:
    """A message in flight that took the new path fits code that has no other."""
    killed_in(world, tools, scripted(tools, "a[p:x|y]b"), "b")
    run(world.runner(scripted(tools, "axb")), ["input"], world.out)
    assert made(world) == "axb"


def test_it_may_be_asked_in_strands(world: World, tools: Tools) -> None:
    def together(asks: bool) -> Scripted:
        async def strand(ctx: RunnerContext, what: str) -> Any:
            if asks and ctx.patched("loud"):
                what = what.upper()
            return await ctx.durable_execute(tools.call, what, effect="idempotent")

        async def body(value: Any, ctx: RunnerContext) -> list[Any]:
            return [*await asyncio.gather(*(strand(ctx, what) for what in "abc")), await strand(ctx, "d")]

        return Scripted(body)

    killed_in(world, tools, together(asks=False), "d")
    run(world.runner(together(asks=True)), ["input"], world.out)
    assert made(world) == "abcd"
    run(world.runner(together(asks=True), job="new"), ["input"], world.folder / "new.jsonl")
    assert tools.made[-4:] == ["A", "B", "C", "D"]


def test_a_plain_action_may_ask_too(world: World, tools: Tools) -> None:
    class Plain(Agent):
        def __init__(self, asks: bool) -> None:
            self.asks = asks

        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            first = ctx.durable_execute_sync(tools.call, "a", effect="idempotent")
            new = self.asks and ctx.patched("shorter")
            rest = [] if new else [ctx.durable_execute_sync(tools.call, "b", effect="idempotent")]
            ctx.send_event(OutputEvent(output=[first, *rest]))

    killed_in(world, tools, Plain(asks=False), "b")
    run(world.runner(Plain(asks=True)), ["input", "another"], world.out)
    assert world.outputs() == [["done a", "done b"], ["done a"]]


@pytest.mark.parametrize("name", ["", 7, None, "\ud800"])
def test_a_change_needs_a_name(world: World, name: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.patched(name)

    with pytest.raises(ActionError, match=r"the name of the change in ctx\.patched"):
        run(world.runner(Scripted(body)), ["input"])


def test_it_is_recorded_once_for_an_action_task(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> list[bool]:
        return [ctx.patched("p"), ctx.patched("q"), ctx.patched("p")]

    store = world.store()
    run(world.runner(Scripted(body), store=store), ["input"], world.out)
    assert world.outputs() == [[True, True, True]]
    assert store.kinds() == ["patched", "patched", "done"]
