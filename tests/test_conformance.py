"""What any engine with durable agents must keep, as its users see it, over each store of this process.

Keys in order and side by side, whole records of finished actions, replays that run nothing twice, checkpoints that
cover what is finished and nothing else, stores that fail and close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dalsegno import Agent, Event, InputEvent, OutputEvent, RunnerContext, action
from dalsegno.core.records import Record
from tests.helpers import Tools, World, crash, crashed, for_ever, run

# --- what a checkpoint covers ---------------------------------------------------------------------------------------


class Counted(Event):
    pass


class TwoSteps(Agent):
    """Counts in its first action, and makes a call in its second one."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @action(InputEvent)
    async def count(self, event: InputEvent, ctx: RunnerContext) -> None:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        ctx.sensory_memory.set("seen", event.input)
        ctx.send_event(Counted())

    @action(Counted)
    async def call(self, event: Counted, ctx: RunnerContext) -> None:
        await self.tools.call(("ran", ctx.key))
        answer = await ctx.durable_execute(self.tools.call, ctx.sensory_memory.get("seen"), effect="idempotent")
        ctx.send_event(OutputEvent(output=[answer, ctx.short_term_memory.get("n")]))


def itself(value: Any) -> Any:
    return value


def test_a_checkpoint_does_not_hold_the_memory_of_a_message_that_is_in_flight(world: World, tools: Tools) -> None:
    """Not even that of its actions that are done: a replay begins anew, over the memory from before the message."""
    tools.hang_on.add("a")
    store = world.store()
    crashed(
        world.runner(TwoSteps(tools), store=store, checkpoint_interval=0.001),
        ["a", "b"],
        world.out,
        key=itself,
        when=lambda: "a" in tools.hanging and any(covered.messages for covered in store.pruned),
    )
    tools.hang_on.clear()
    assert dict(world.runner(TwoSteps(tools)).memories()) == {"b": {"n": 1}}
    runner = world.runner(TwoSteps(tools))
    run(runner, ["a", "b"], world.out, key=itself)
    assert dict(runner.memories()) == {"a": {"n": 1}, "b": {"n": 1}}
    assert world.outputs() == [["done b", 1], ["done a", 1]]


def test_a_message_is_finished_only_when_its_record_is_durable(world: World, tools: Tools) -> None:
    """Until then its output has not left, its memory is in no checkpoint, and a crash repeats it whole."""
    seen: list[Any] = []

    class NoCalls(Agent):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            tools.made.append(event.input)
            ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
            ctx.send_event(OutputEvent(output=event.input))

    store = world.store()
    runner = world.runner(NoCalls(), store=store, checkpoint_interval=0.001)

    async def hang(records: Sequence[Record]) -> None:
        seen.append((world.outputs(), dict(runner.memories())))
        await for_ever()

    store.before_put = hang
    asyncio.run(crash(runner, ["a"], world.out, when=lambda: bool(seen)))
    assert seen == [([], {})]
    again = world.runner(NoCalls())
    run(again, ["a"], world.out)
    assert tools.made == ["a", "a"]
    assert world.outputs() == ["a"]
    assert dict(again.memories()) == {None: {"n": 1}}


# --- what a replay runs ---------------------------------------------------------------------------------------------

KEYS = ["a", "a_b", "a%", "a/b", "1", 1, True, None, ("a",), "", "\0", "é 😀"]


class Told(Event):
    what: Any


class Teller(Agent):
    """Three actions for each message, two of them for equal events; what runs outside durable calls is counted too."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @action(InputEvent)
    async def tell(self, event: InputEvent, ctx: RunnerContext) -> None:
        n = event.input["n"]
        self.tools.call_sync(("tell", n))
        await ctx.durable_execute(self.tools.call, ("asked", n), effect="read")
        for _ in range(2):
            ctx.send_event(Told(what=n))

    @action(Told)
    async def hear(self, event: Told, ctx: RunnerContext) -> None:
        memory = ctx.short_term_memory
        memory.set("heard", [*memory.get("heard", []), event.what])
        self.tools.call_sync(("hear", event.what))
        await ctx.durable_execute(self.tools.call, ("noted", event.what), effect="idempotent")
        ctx.send_event(OutputEvent(output=[event.what, len(memory.get("heard"))]))

    @action(InputEvent)
    async def end(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(self.tools.call, ("end", event.input["n"]), effect="idempotent")


@pytest.mark.parametrize("crashes", [1, 2])
def test_no_action_that_is_done_is_run_again_whatever_came_since_the_checkpoint(
    world: World, tools: Tools, crashes: int
) -> None:
    """Many messages, keys and actions; the last message of each key hangs in a call of its third action."""
    records = [{"k": key, "n": 100 * number + turn} for turn in range(3) for number, key in enumerate(KEYS)]
    lasts = {("noted", record["n"]) for record in records[-len(KEYS) :]}
    for _ in range(crashes):
        tools.hanging.clear()
        tools.hang_on |= lasts
        crashed(
            world.runner(Teller(tools), max_in_flight=50),
            records,
            world.out,
            key="k",
            when=lambda: tools.hanging == lasts,
        )
    tools.hang_on.clear()
    runner = world.runner(Teller(tools))
    run(runner, records, world.out, key="k")
    half_done = {record["n"] for record in records[-len(KEYS) :]}
    for n in (record["n"] for record in records):
        assert tools.count(("tell", n)) == tools.count(("asked", n)) == tools.count(("end", n)) == 1
        # The first of its two equal events found the crashes; code outside of its durable call ran again.
        again = crashes if n in half_done else 0
        assert tools.count(("hear", n)) == tools.count(("noted", n)) == 2 + again
    assert sorted(world.outputs()) == sorted(
        [100 * number + turn, 2 * turn + time + 1]
        for number in range(len(KEYS))
        for turn in range(3)
        for time in range(2)
    )
    assert sorted(memory["heard"] for _, memory in runner.memories()) == [
        [100 * number + turn for turn in range(3) for _ in range(2)] for number in range(len(KEYS))
    ]
    assert world.recorded() == {}
