"""What any engine with durable agents must keep, as its users see it, over each store of this process.

Keys in order and side by side, whole records of finished actions, replays that run nothing twice, checkpoints that
cover what is finished and nothing else, stores that fail and close.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest

from dalsegno import (
    ActionError,
    Agent,
    DivergenceError,
    Event,
    Happened,
    InputEvent,
    OutputEvent,
    RunnerContext,
    StoreError,
    action,
)
from dalsegno.core import codec
from dalsegno.core.records import Record
from dalsegno.runners.sources import IterableSource, SourceItem
from dalsegno.stores.base import Covered
from tests.helpers import Scripted, Tools, World, crash, crashed, for_ever, run, until

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


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_a_finished_action_is_recorded_whole_with_what_triggered_it(world: World, tools: Tools) -> None:
    """Each action task: its action and event, its calls with their results, memory updates, events, that it is done."""
    tools.hang_on.add(("end", 1))
    crashed(world.runner(Teller(tools)), [{"k": "a", "n": 1}], key="k", when=lambda: bool(tools.hanging))
    tools.hang_on = {("noted", 1)}
    tools.hanging.clear()
    crashed(world.runner(Teller(tools)), [{"k": "a", "n": 1}], key="k", when=lambda: bool(tools.hanging))
    ((key, states),) = world.recorded().items()
    assert key == b'"a"'
    assert [(state.action, state.event_type, state.index, state.done) for state in states] == [
        ("tell", "InputEvent", 0, True),
        ("end", "InputEvent", 0, True),
        ("hear", "Told", 0, False),
    ]
    told, ended, heard = states
    assert told.content is not None
    assert (heard.sender, ended.sender, told.sender) == (told.task, "", "")
    assert [codec.from_tree(tree) for tree in told.events] == [Told(what=1), Told(what=1)]
    assert [(call.name, call.result) for call in told.calls.values()] == [
        ("tests.helpers:Tools.call", "done ('asked', 1)")
    ]
    assert [call.status for call in heard.calls.values()] == ["requested"]
    assert (told.short_term, heard.short_term, heard.events) == ([], [], [])
    tools.hang_on = {("noted", 2)}
    tools.hanging.clear()
    crashed(
        world.runner(Teller(tools)),
        [{"k": "a", "n": 1}, {"k": "a", "n": 2}],
        key="k",
        when=lambda: bool(tools.hanging),
    )
    first = [state for state in world.recorded()[b'"a"'] if state.message == "0"]
    assert [(state.action, state.done, state.last) for state in first] == [
        *(("tell", True, False), ("end", True, False), ("hear", True, False), ("hear", True, True))
    ]
    assert [update["path"] for state in first for update in state.short_term] == [["heard"], ["heard"]]


def test_nothing_is_recorded_of_a_call_before_it_is_awaited(world: World, tools: Tools) -> None:
    seen: list[list[str]] = []
    store = world.store()

    async def body(value: Any, ctx: RunnerContext) -> Any:
        late = ctx.durable_execute(tools.call, "late", effect="idempotent")
        first = await ctx.durable_execute(tools.call, "first", effect="idempotent")
        await ctx.durable_execute(tools.call, "second", effect="idempotent")
        seen.append([recorded["args"][0] for recorded in store.bodies() if recorded["kind"] == "requested"])
        return [first, await late]

    run(world.runner(Scripted(body), store=store), [1], world.out)
    assert seen == [["first", "second"]]
    assert tools.made == ["first", "second", "late"]
    assert world.outputs() == [["done first", "done late"]]


def test_the_request_of_a_call_that_can_be_reconciled_is_durable_before_it_is_made(world: World, tools: Tools) -> None:
    store = world.store()
    seen: list[list[str]] = []

    async def send(what: str) -> str:
        seen.append(store.kinds())
        return f"sent {what}"

    async def find(what: str) -> Happened:
        raise AssertionError("not asked in the first run")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(send, "a", name="send", reconcile=find)

    run(world.runner(Scripted(body), store=store), [1], world.out)
    assert seen == [["requested"]]
    assert store.kinds() == ["requested", "completed", "done"]


def test_played_back_and_reconciled_calls_of_one_action_keep_their_order(world: World, tools: Tools) -> None:
    asked: list[str] = []

    async def find(what: str) -> Happened:
        asked.append(what)
        return Happened(f"found {what}")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [
            await ctx.durable_execute(tools.call, "read", effect="read"),
            await ctx.durable_execute(tools.call, "sent", reconcile=find),
            await ctx.durable_execute(tools.call, "in doubt", reconcile=find),
            await ctx.durable_execute(tools.call, "after", reconcile=find),
        ]

    tools.hang_on.add("in doubt")
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    report = run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [["done read", "done sent", "found in doubt", "done after"]]
    assert tools.made == ["read", "sent", "in doubt", "after"]
    assert asked == ["in doubt"]
    assert report.calls_replayed == 2


# --- what a call is -------------------------------------------------------------------------------------------------


def takes(a: Any = None, b: Any = None) -> list[Any]:
    return [a, b]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((2, 1), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2}), ((1,), {}), ((), {}), ((True, 2), {}), (("1", 2), {})],
)
def test_order_names_and_types_of_arguments_are_part_of_a_call(
    world: World, tools: Tools, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def calling(*args: Any, **kwargs: Any) -> Scripted:
        async def body(value: Any, ctx: RunnerContext) -> Any:
            found = await ctx.durable_execute(takes, *args, **kwargs, effect="read")
            await ctx.durable_execute(tools.call, "end", effect="idempotent")
            return found

        return Scripted(body)

    tools.hang_on.add("end")
    crashed(world.runner(calling(1, 2)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    with pytest.raises(DivergenceError, match=r"Expected the recorded call .*takes\(1, 2\); found the call .*takes\("):
        run(world.runner(calling(*args, **kwargs)), [1], world.out)
    run(world.runner(calling(1, 2)), [1], world.out)
    assert world.outputs() == [[1, 2]]


def test_the_order_of_named_arguments_is_no_part_of_a_call(world: World, tools: Tools) -> None:
    order = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]

    async def body(value: Any, ctx: RunnerContext) -> Any:
        found = await ctx.durable_execute(takes, kwargs=order.pop(), effect="read")
        await ctx.durable_execute(tools.call, "end", effect="idempotent")
        return found

    tools.hang_on.add("end")
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [[1, 2]]


# --- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_messages_calls_and_events_play_back_in_the_order_of_their_numbers(world: World, tools: Tools) -> None:
    """Thirteen of each, so that order as text would be another one."""

    counting = itertools.count()

    async def draw() -> int:
        tools.made.append("drawn")
        return next(counting)

    class Many(Agent):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            found = [await ctx.durable_execute(draw, name="draw", effect="read") for _ in range(13)]
            for n in range(13):
                ctx.send_event(Told(what=[n, found]))

        @action(Told)
        async def hear(self, event: Told, ctx: RunnerContext) -> None:
            n, found = event.what
            ctx.short_term_memory.set("seen", [*ctx.short_term_memory.get("seen", []), [ctx.message_id, n]])
            await ctx.durable_execute(tools.call, f"{ctx.message_id} {n}", effect="idempotent")
            ctx.send_event(OutputEvent(output=[ctx.message_id, n, found]))

    tools.hang_on.add("12 12")
    for _ in range(2):
        tools.hanging.clear()
        crashed(world.runner(Many()), range(13), world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    runner = world.runner(Many())
    run(runner, range(13), world.out)
    order = [[str(message), n] for message in range(13) for n in range(13)]
    assert [output[:2] for output in world.outputs()] == order
    assert dict(runner.memories()) == {None: {"seen": order}}
    for message in range(13):
        (drawn,) = {tuple(output[2]) for output in world.outputs() if output[0] == str(message)}
        assert list(drawn) == list(range(drawn[0], drawn[0] + 13))
    assert tools.count("drawn") == 13 * 13
    assert tools.count("12 12") == 3


class FarOn(IterableSource):
    """As a topic that had *before* records, of which the log has dropped the first ones."""

    def __init__(self, records: Iterable[object], before: int) -> None:
        super().__init__(records)
        self.before = before

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        items = await super().open(position)

        async def moved() -> AsyncIterator[SourceItem]:
            async for item in items:
                yield SourceItem(item.ordinal + self.before, item.value, item.position)

        return moved()


@pytest.mark.parametrize("before", [7, 97, 2**31 - 3, 2**32 - 3, 2**53 - 3, 2**63 - 10])
def test_messages_with_numbers_of_any_size_replay_in_order(world: World, tools: Tools, before: int) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        ctx.short_term_memory.set("seen", [*ctx.short_term_memory.get("seen", []), value])
        await ctx.durable_execute(tools.call, value, effect="idempotent")
        return [ctx.message_id, value]

    for hangs_on in (3, 5):
        tools.hang_on = {hangs_on}
        tools.hanging.clear()
        crashed(
            world.runner(Scripted(body), checkpoint_interval=0.001 if hangs_on == 5 else 3600),
            FarOn(range(6), before),
            world.out,
            when=lambda: bool(tools.hanging),
        )
    tools.hang_on.clear()
    runner = world.runner(Scripted(body))
    run(runner, FarOn(range(6), before), world.out)
    assert world.outputs() == [[str(before + n), n] for n in range(6)]
    assert dict(runner.memories()) == {None: {"seen": [*range(6)]}}
    assert {n: tools.count(n) for n in range(6)} == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 2}
    assert world.recorded() == {}


# --- checkpoints that do not come about -----------------------------------------------------------------------------


def test_a_checkpoint_that_fails_prunes_nothing_and_the_next_run_goes_on(world: World, tools: Tools) -> None:
    store = world.store()
    runner = world.runner(TwoSteps(tools), store=store)
    commit = runner._checkpoints.commit

    def fail(checkpoint: Any) -> None:
        if checkpoint.number:
            raise OSError("no room for a checkpoint")
        commit(checkpoint)

    runner._checkpoints.commit = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no room"):
        run(runner, ["a", "b"], world.out, key=itself)
    assert [covered for covered in store.pruned if covered.messages] == []
    assert sorted(world.recorded()) == [b'"a"', b'"b"']
    again = world.runner(TwoSteps(tools))
    report = run(again, ["a", "b"], world.out, key=itself)
    assert report.calls_executed == 0
    assert sorted(world.outputs()) == [["done a", 1], ["done b", 1]]
    assert dict(again.memories()) == {"a": {"n": 1}, "b": {"n": 1}}
    assert world.recorded() == {}


def test_a_later_checkpoint_covers_what_an_earlier_one_did_not_get_to_prune(world: World, tools: Tools) -> None:
    """A completed checkpoint settles all before it, whether or not the end of each was heard of."""
    store = world.store()

    def fail(covered: Covered) -> None:
        raise StoreError("not now")

    store.before_prune = fail
    with pytest.raises(StoreError, match="not now"):
        run(world.runner(TwoSteps(tools), store=store), ["a", "b"], world.out, key=itself)
    assert sorted(world.recorded()) == [b'"a"', b'"b"']
    run(world.runner(TwoSteps(tools)), ["a", "b", "c"], world.out, key=itself)
    assert world.recorded() == {}
    assert sorted(world.outputs()) == [["done a", 1], ["done b", 1], ["done c", 1]]
    assert tools.made.count("a") == tools.made.count("b") == 1


# --- keys side by side ----------------------------------------------------------------------------------------------


def test_calls_of_many_keys_are_in_flight_at_the_same_time(world: World, tools: Tools) -> None:
    """Fifteen messages of five keys: each key's first call waits for all the others' first calls to have begun."""
    together = 5
    begun: set[Any] = set()

    async def meet(key: Any, n: int) -> str:
        begun.add((key, n))
        await until(lambda: len({found for found in begun if found[1] == n}) == together)
        return f"{key}{n}"

    async def body(value: Any, ctx: RunnerContext) -> Any:
        first = await ctx.durable_execute(meet, ctx.key, value["n"], name="meet", effect="read")
        return await ctx.durable_execute(tools.call, first, effect="idempotent")

    source = [{"k": key, "n": n} for n in range(3) for key in "abcde"]
    run(world.runner(Scripted(body)), source, world.out, key="k")
    outputs = world.outputs()
    for key in "abcde":
        assert [output for output in outputs if output[5] == key] == [f"done {key}{n}" for n in range(3)]


def test_a_failing_action_stops_those_after_it_and_changes_no_memory(world: World, tools: Tools) -> None:
    class Fails(TwoSteps, name="TwoSteps"):
        @action(Counted)
        async def call(self, event: Counted, ctx: RunnerContext) -> None:
            ctx.short_term_memory.set("half", True)
            ctx.send_event(OutputEvent(output="half"))
            await super().call(event, ctx)

        @action(Counted)
        async def next(self, event: Counted, ctx: RunnerContext) -> None:
            await self.tools.call("next")

    tools.fail_on["a"] = ConnectionError("down")
    runner = world.runner(Fails(tools))
    with pytest.raises(ActionError, match="down"):
        run(runner, ["a"], world.out, key=itself)
    assert tools.count("next") == 0
    assert (dict(runner.memories()), world.outputs()) == ({}, [])
    tools.fail_on.clear()
    again = world.runner(Fails(tools))
    run(again, ["a"], world.out, key=itself)
    assert (dict(again.memories()), world.outputs()) == ({"a": {"n": 1, "half": True}}, ["half", ["done a", 1]])
    assert tools.count("next") == 1
