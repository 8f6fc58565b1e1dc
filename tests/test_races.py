"""Calls in flight together: whatever ends first in a replay, the action sees what it saw in the first run.

An action writes down what it sees, in order, and gives that to a call (`decide`), so that a replay that sees anything
else is a divergence. A run is cut off after so many records, the next one is given other delays and is cut off before
its last record, and the one after that must play back all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno import DidNotHappen, RetryPolicy, RunnerContext, RunReport
from dalsegno.core import codec
from dalsegno.core.decisions import WAIT, Signalled
from dalsegno.core.records import Record, dump_body, fold
from dalsegno.core.transitions import CallStatus
from dalsegno.errors import ActionError, DivergenceError, RecordError
from dalsegno.operate.views import message_json
from dalsegno.stores.base import Decision, TaskActionStore
from tests.helpers import STORES, Scripted, SpyStore, World, crashed, for_ever, run

LONG = 60
"""Turns of the event loop that are long beside those in which an action reacts."""


class CutStore(SpyStore):
    """Writes at most *most* records, and none from the end of the action on, and hangs."""

    def __init__(self, inner: TaskActionStore, most: int) -> None:
        super().__init__(inner)
        self.most = most
        self.cut = False

    async def put(self, records: Sequence[Record]) -> None:
        kinds = [json.loads(record.body)["kind"] for record in records]
        left = min(self.most - self.kept, (*kinds, "done").index("done"))
        if left > 0:
            await super().put(records[:left])
        if len(records) > left:
            self.cut = True
            await for_ever()


class Racer:
    """Tools whose calls take as many turns of the event loop as the test says."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.turns: dict[Any, int] = {}
        self.fails: set[Any] = set()
        self.hangs: set[Any] = set()
        self.seen: list[list[Any]] = []
        self.drawn = itertools.count()

    async def call(self, what: Any) -> Any:
        self.made.append(f"call {[what]}")
        await self._take(what)
        if what in self.fails:
            raise KeyError(what)
        return f"done {what}"

    def call_sync(self, what: Any) -> Any:
        self.made.append(f"call_sync {[what]}")
        return f"done {what}"

    async def draw(self) -> int:
        number = next(self.drawn)
        self.made.append("draw []")
        await self._take(number)
        return number

    async def decide(self, seen: list[str]) -> None:
        self.made.append(f"decide {[seen]}")

    async def did_not(self, what: Any) -> DidNotHappen:
        return DidNotHappen()

    async def _take(self, what: Any) -> None:
        if what in self.hangs:
            await for_ever()
        for _ in range(self.turns.get(what, 0)):
            await asyncio.sleep(0)

    def ask(self, ctx: RunnerContext, what: Any, effect: Any = "read", **options: Any) -> Any:
        if effect == "once":
            options["reconcile"] = self.did_not
        return ctx.durable_execute(self.call, what, effect=effect, **options)


Race = Callable[[RunnerContext, Racer, list[Any]], Awaitable[None]]
"""An action that appends to the list what it sees."""


async def first_wins(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    tasks = {asyncio.create_task(racer.ask(ctx, what, "once"), name=what) for what in "abc"}
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    seen.append(sorted(task.get_name() for task in done))
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
    seen.append(sorted(task.get_name() for task in tasks if task.cancelled()))


async def losers_are_not_awaited(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    tasks = {asyncio.create_task(racer.ask(ctx, what), name=what) for what in "abc"}
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    seen.append(sorted(task.get_name() for task in done))
    for task in others:
        task.cancel()
    await decide(ctx, racer, seen)


async def losers_go_on(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    left = {asyncio.create_task(racer.ask(ctx, what), name=what) for what in "abcd"}
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        seen.append(sorted(task.get_name() for task in done))
        await decide(ctx, racer, seen)


async def as_they_complete(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    seen.extend([await done for done in asyncio.as_completed([racer.ask(ctx, what) for what in "abcd"])])


async def timed_out(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    for effect in ("read", "idempotent", "once"):
        try:
            async with asyncio.timeout(0.02):
                await racer.ask(ctx, "slow", effect)
        except TimeoutError:
            seen.append("late")
        seen.append(await racer.ask(ctx, "a", "idempotent"))


async def timed_out_beside_others(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    async def limited() -> str:
        try:
            async with asyncio.timeout(0.02):
                return str(await racer.ask(ctx, "slow", "once"))
        except TimeoutError:
            return "late"

    async def two() -> list[Any]:
        return [await racer.ask(ctx, what) for what in "bc"]

    seen += await asyncio.gather(limited(), racer.ask(ctx, "a"), two())


async def in_time(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    async with asyncio.timeout(30):
        seen += await asyncio.gather(racer.ask(ctx, "a"), racer.ask(ctx, "b"))


async def group_fails(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for what in ("a", "fails", "b"):
                group.create_task(watched(racer.ask(ctx, what, "idempotent"), seen))
    except* KeyError as errors:
        seen.append(str(errors.exceptions))
    await decide(ctx, racer, seen)
    seen.append(await racer.ask(ctx, "c"))


async def limited(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    calls = [watched(racer.ask(ctx, what), seen) for what in "abcde"]
    seen.append(await ctx.gather(*calls, limit=2))


async def another_after_the_first(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    left = {asyncio.create_task(racer.ask(ctx, what), name=what) for what in "ab"}
    more = iter("cde")
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        seen.append(sorted(task.get_name() for task in done))
        what = next(more, None)
        if what is not None:
            left.add(asyncio.create_task(racer.ask(ctx, what, "idempotent"), name=what))


async def in_threads(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    calls = [ctx.durable_execute(racer.call_sync, what, effect="read") for what in "abcd"]
    seen.extend([await done for done in asyncio.as_completed(calls)])


async def equal_calls(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    async def twice() -> list[int]:
        return [await ctx.durable_execute(racer.draw, effect="read") for _ in range(2)]

    seen += await asyncio.gather(twice(), twice(), ctx.durable_execute(racer.draw, effect="read"))


async def beside_the_action(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    async def beside() -> None:
        for what in "xyz":
            seen.append(await racer.ask(ctx, what))

    task = asyncio.create_task(beside())
    for what in "abc":
        seen.append(await racer.ask(ctx, what, "idempotent"))
    await task


async def sleeps_beside(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    tasks = {
        asyncio.create_task(ctx.sleep(0.02), name="sleep"),
        asyncio.create_task(racer.ask(ctx, "a"), name="a"),
        asyncio.create_task(racer.ask(ctx, "slow", "once"), name="slow"),
    }
    while len(tasks) > 1:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        seen.append(sorted(task.get_name() for task in done))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def sleep_is_cut_short(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    sleeping = asyncio.create_task(ctx.sleep(0.1))
    asking = asyncio.create_task(racer.ask(ctx, "a"))
    await asyncio.wait({sleeping, asking}, return_when=asyncio.FIRST_COMPLETED)
    seen.append((sleeping.done(), asking.done()))
    sleeping.cancel()
    await decide(ctx, racer, seen)
    try:
        async with asyncio.timeout(0.01):
            await ctx.sleep(30)
    except TimeoutError:
        seen.append("awake")


async def shielded(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    asking = asyncio.create_task(watched(racer.ask(ctx, "a"), seen))
    other = asyncio.create_task(watched(racer.ask(ctx, "b"), seen))
    waiting = asyncio.ensure_future(asyncio.shield(asking))
    await other
    waiting.cancel()
    seen.append(await asking)
    seen += await asyncio.gather(asking, other)


async def nested(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    async def pair(one: str, two: str) -> list[Any]:
        return await ctx.gather(watched(racer.ask(ctx, one), seen), watched(racer.ask(ctx, two), seen))

    async def pairs() -> Any:
        return await asyncio.gather(watched(pair("a", "b"), seen), watched(pair("c", "d"), seen))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pairs()), group.create_task(watched(pair("e", "f"), seen))]
    seen.append([task.result() for task in tasks])


async def retried(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    again = RetryPolicy(attempts=2, backoff=0)
    left = {asyncio.create_task(racer.ask(ctx, what, retry=again), name=what) for what in ("fails", "a", "b", "slow")}
    while len(left) > 1:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        seen.append(sorted((task.get_name(), str(task.exception())) for task in done))
    for task in left:
        task.cancel()


async def failures_in_order(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    async def attempt(what: str) -> None:
        try:
            seen.append(await racer.ask(ctx, what, "once"))
        except KeyError:
            seen.append(f"failed {what}")

    await asyncio.gather(*(attempt(what) for what in ("a", "fails", "b", "fails too")))


async def watched(awaitable: Awaitable[Any], seen: list[Any]) -> Any:
    """Writes down when it ended, and how."""
    try:
        result = await awaitable
    except BaseException as error:
        seen.append(type(error).__name__)
        raise
    seen.append(result)
    return result


async def decide(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
    await ctx.durable_execute(racer.decide, [str(one) for one in seen], effect="idempotent", name="decide")


RACES: list[Race] = [
    first_wins,
    losers_are_not_awaited,
    losers_go_on,
    as_they_complete,
    timed_out,
    timed_out_beside_others,
    in_time,
    group_fails,
    limited,
    another_after_the_first,
    in_threads,
    equal_calls,
    beside_the_action,
    sleeps_beside,
    sleep_is_cut_short,
    shielded,
    nested,
    retried,
    failures_in_order,
]

FORTH = {"a": 0, "b": LONG, "c": 2 * LONG, "d": 3 * LONG, "x": 10, "y": 10, "fails": LONG, "fails too": 1}
BACK = {"a": 3 * LONG, "b": 2 * LONG, "c": LONG, "d": 0, "x": LONG, "fails": 0, "fails too": 2 * LONG}
AT_ONCE: dict[str, int] = {}
CLOSE = {"a": 3, "b": 1, "c": 2, "d": 9, "x": 2, "e": 17, 0: 3, 2: 1, 3: 20}


def racing(race: Race, racer: Racer) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        seen: list[Any] = []
        racer.seen.append(seen)
        await race(ctx, racer, seen)
        await decide(ctx, racer, seen)
        return [str(one) for one in seen]

    return Scripted(body)


def racers(turns: dict[Any, int]) -> Racer:
    racer = Racer()
    racer.turns, racer.fails, racer.hangs = turns, {"fails", "fails too"}, {"slow"}
    return racer


def records_of(race: Race, turns: dict[Any, int], folder: Path) -> int:
    """How many records a run without a crash writes."""
    world = World("memory", folder)
    store = world.store()
    run(world.runner(racing(race, racers(turns)), store=store), [1])
    return len(store.bodies())


ALL = 10_000


def cut_off(world: World, agent: Scripted, most: int = ALL, **options: Any) -> CutStore:
    """Run until *most* records are written, or all but the last one."""
    store = CutStore(world.store().inner, most)
    crashed(world.runner(agent, store=store, **options), [1], world.out, when=lambda: store.cut)
    return store


def settled(world: World) -> Counter[str]:
    """The calls that are not to be made again."""
    return Counter(
        f"{call.name.rpartition('.')[2]} {codec.from_tree(call.args)}"
        for states in world.recorded().values()
        for state in states
        for call in state.calls.values()
        if call.status in (CallStatus.COMPLETED, CallStatus.ABANDONED)
    )


def check_replay(
    world: World,
    race: Race,
    live: dict[Any, int],
    again: dict[Any, int],
    cuts: Sequence[int] = (ALL,),
    racer: Racer | None = None,
) -> None:
    """Runs that are cut off, in turn with *live* and *again*, one that writes all, and one that only plays back."""
    racer = racer or racers(live)
    agent = racing(race, racer)
    known: Counter[str] = Counter()
    for most, turns in zip((*cuts, ALL), itertools.cycle((live, again)), strict=False):
        racer.turns, made = turns, len(racer.made)
        cut_off(world, agent, most)
        known, before = settled(world), known
        if most == ALL:
            for what, count in Counter(racer.made[made:]).items():
                attempts = 2 if race is retried else 1
                assert count <= attempts * (known[what] - before[what]), f"{what} was on record"
    made = len(racer.made)
    racer.turns = live
    run(world.runner(agent), [1], world.out)
    assert len(racer.made) == made, "all of it is on record"
    assert racer.seen[-1] == racer.seen[-2]
    assert world.outputs() == [[str(one) for one in racer.seen[-1]]]


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
@pytest.mark.parametrize(("live", "again"), [(FORTH, BACK), (BACK, AT_ONCE), (CLOSE, FORTH), (AT_ONCE, CLOSE)])
def test_a_race_replays_as_it_was_whatever_ends_first(
    race: Race, live: dict[Any, int], again: dict[Any, int], world: World
) -> None:
    check_replay(world, race, live, again)


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
@pytest.mark.parametrize(("live", "again"), [(FORTH, BACK), (CLOSE, AT_ONCE)])
def test_a_race_goes_on_after_a_crash_at_any_record(
    race: Race, live: dict[Any, int], again: dict[Any, int], tmp_path: Path
) -> None:
    for most in range(1, records_of(race, live, tmp_path) - 1):
        folder = tmp_path / str(most)
        folder.mkdir()
        check_replay(World(STORES[most % 2], folder), race, live, again, [most])


# --- what is on record ----------------------------------------------------------------------------------------------


def scripted(body: Any, racer: Racer) -> Scripted:
    async def act(value: Any, ctx: RunnerContext) -> Any:
        return await body(ctx, racer)

    return Scripted(act)


def orders(store: SpyStore) -> dict[str, list[int] | None]:
    """The order of each outcome, by what was called."""
    names: dict[int, str] = {}
    found: dict[str, list[int] | None] = {}
    for body in store.bodies():
        if "args" in body:
            names[body["call"]] = str(*codec.from_tree(body["args"]))
        if {"result", "error"} & set(body) or body["kind"] == "abandoned":
            found[names[body["call"]]] = body.get("order")
    return found


def test_calls_that_are_awaited_one_after_the_other_have_no_order(world: World) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> None:
        for effect in ("read", "idempotent", "once"):
            await racer.ask(ctx, effect, effect)

    store = world.store()
    run(world.runner(scripted(body, racers({})), store=store), [1])
    assert orders(store) == {"read": None, "idempotent": None, "once": None}


def test_outcomes_that_reached_the_action_together_say_so(world: World) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> None:
        await asyncio.gather(*(racer.ask(ctx, what) for what in "abc"))
        await racer.ask(ctx, "alone, a moment later")
        await racer.ask(ctx, "alone")

    store = world.store()
    run(world.runner(scripted(body, racers({"c": 4 * LONG})), store=store), [1])
    found = orders(store)
    assert found.pop("alone") is None
    turns = {what: order and order[:3] for what, order in found.items()}
    assert turns == {"a": [1, 0, 1], "b": [1, 1, 2], "c": [2, 2, 3], "alone, a moment later": [3, 3, 4]}


def test_the_first_call_of_the_action_is_in_the_order_if_another_one_began_beside_it(world: World) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> None:
        beside = asyncio.create_task(racer.ask(ctx, "beside"))
        await racer.ask(ctx, "first", "idempotent")
        await beside

    store = world.store()
    run(world.runner(scripted(body, racers({"first": LONG})), store=store), [1])
    found = orders(store)
    assert [found[what] and found[what][:3] for what in ("beside", "first")] == [[1, 0, 2], [2, 1, 2]]  # type: ignore[index]


def without_order(records: Sequence[Record]) -> list[Record]:
    """As a release wrote them that knew of no order."""
    bodies = [{k: v for k, v in json.loads(record.body).items() if k != "order"} for record in records]
    return [record._replace(body=dump_body(body)) for record, body in zip(records, bodies, strict=True)]


@pytest.mark.parametrize("race", [as_they_complete, limited, in_time, beside_the_action, failures_in_order, nested])
def test_records_without_an_order_replay_as_ever(race: Race, tmp_path: Path) -> None:
    """At once, as each call begins; what the action does not look at, it need not see in order."""
    racer = racers(FORTH)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        seen: list[Any] = []
        await race(ctx, racer, seen)
        await racer.ask(ctx, "end")
        return len(seen)

    agent = Scripted(body)
    first, second = World("memory", tmp_path / "1"), World("memory", tmp_path / "2")
    for world in (first, second):
        world.folder.mkdir()
        run(world.runner(agent), [], world.out)
    store = cut_off(first, agent)
    records = [record for batch in store.batches for record in batch]
    second.add_records(without_order(records))
    made = len(racer.made)
    run(second.runner(agent), [1], second.out)
    assert len(racer.made) == made
    assert len(second.outputs()) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "abandoned", "call": 0},
        {"kind": "abandoned", "call": 0, "order": [1, 0, 1]},
        {"kind": "completed", "call": 0, "result": 1, "order": [1, 0, -1, 0]},
        {"kind": "completed", "call": 0, "result": 1, "order": [1, 0, True, 0]},
        {"kind": "completed", "call": 0, "result": 1, "order": None},
        {"kind": "slept", "call": 0, "order": [1, 0, 1, 0]},
        {"kind": "reopened", "call": 0},
    ],
)
def test_an_order_that_is_none_is_damage(body: dict[str, Any]) -> None:
    header = {"action": "act", "event": "InputEvent", "sender": "", "index": 0, "content": "c"}
    request = {
        "v": 1,
        "kind": "requested",
        "task": header,
        "call": 0,
        "name": "x",
        "args_digest": "d",
        "effect": "once",
    }
    records = [Record(b"1", "0", "t", dump_body(each)) for each in (request | {"args": []}, {"v": 1} | body)]
    with pytest.raises(RecordError):
        fold(records)


# --- abandoned calls ------------------------------------------------------------------------------------------------


def test_an_abandoned_call_is_shown_as_such_and_asks_nobody_anything(world: World) -> None:
    racer = racers({})
    store = cut_off(world, racing(first_wins, racer))
    records = [record for batch in store.batches for record in batch]
    shown = message_json(b"null", "0", records, [])
    assert (shown["state"], shown["questions"]) == ("in-flight", [])
    assert {call["status"] for call in shown["tasks"][0]["calls"]} <= {"completed", "abandoned"}


def slow_with_a_limit(limit: float | None) -> Any:
    async def body(ctx: RunnerContext, racer: Racer) -> str:
        try:
            async with asyncio.timeout(limit):
                await racer.ask(ctx, "slow", "once")
        except TimeoutError:
            pass
        await racer.ask(ctx, "after", "idempotent")
        return "late"

    return body


@pytest.mark.slow
def test_an_abandoned_call_that_is_no_longer_cancelled_is_a_divergence(world: World) -> None:
    racer = racers({})
    cut_off(world, scripted(slow_with_a_limit(0.01), racer))
    made = list(racer.made)
    with pytest.raises(DivergenceError) as caught:
        run(world.runner(scripted(slow_with_a_limit(None), racer)), [1], world.out)
    message = str(caught.value)
    for part in ("job 'job', key None, message '0', action 'act'", "Racer.call('slow')", "now goes on waiting for"):
        assert part in message
    assert racer.made == made
    run(world.runner(scripted(slow_with_a_limit(0.01), racer)), [1], world.out)
    assert world.outputs() == ["late"]


def test_a_stop_does_not_wait_until_an_abandoned_call_is_cancelled_again(world: World) -> None:
    racer = racers({})
    cut_off(world, scripted(slow_with_a_limit(0.01), racer))
    started = asyncio.Event()

    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        started.set()
        return await slow_with_a_limit(None)(ctx, racer)

    async def main() -> RunReport:
        runner = world.runner(scripted(body, racer))
        running = asyncio.create_task(runner.run_async([1], world.out))
        await started.wait()
        runner.stop()
        return await running

    assert asyncio.run(main()).stopped_by == "stop()"
    assert world.outputs() == []


@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
def test_what_a_failing_group_cancelled_is_tried_again_if_the_failure_left_the_action(
    world: World, effect: Any
) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(racer.ask(ctx, what, effect)) for what in ("slow", "fails")]
        return [task.result() for task in tasks]

    racer = racers({"fails": LONG})
    with pytest.raises(ActionError, match="TaskGroup"):
        run(world.runner(scripted(body, racer)), [1], world.out)
    racer.fails, racer.hangs = set(), set()
    run(world.runner(scripted(body, racer)), [1], world.out)
    assert Counter(racer.made) == {"call ['slow']": 2, "call ['fails']": 2}
    assert world.outputs() == [["done slow", "done fails"]]


@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
@pytest.mark.parametrize("hangs", [True, False])
def test_so_it_is_if_another_strand_went_on_before_the_failure_left_the_action(
    world: World, effect: Any, hangs: bool
) -> None:
    """Then both are on record, unsure, and are taken back."""

    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        cancelled = asyncio.Event()

        async def slow() -> Any:
            try:
                return await racer.ask(ctx, "slow", effect)
            finally:
                cancelled.set()

        async def beside() -> Any:
            await cancelled.wait()
            return await racer.ask(ctx, "beside", "idempotent")

        after = asyncio.create_task(beside())
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(task) for task in (slow(), racer.ask(ctx, "fails", effect))]
        finally:
            await asyncio.wait([after])
        return [task.result() for task in tasks]

    racer = racers({"fails": LONG, "slow": 0 if hangs else 10 * LONG})
    racer.hangs = {"slow"} if hangs else set()
    store = world.store()
    with pytest.raises(ActionError, match="TaskGroup"):
        run(world.runner(scripted(body, racer), store=store), [1], world.out)
    assert {"abandoned", "reopened"} <= set(store.kinds())
    racer.fails, racer.hangs, racer.turns = set(), set(), {}
    agent = scripted(body, racer)
    cut_off(world, agent)
    run(world.runner(agent), [1], world.out)
    assert Counter(racer.made) == {"call ['slow']": 2, "call ['fails']": 2, "call ['beside']": 1}
    assert world.outputs() == [["done slow", "done fails"]]


@pytest.mark.parametrize("how", ["gather", "alone"])
def test_what_the_runner_cancels_is_not_abandoned_even_if_the_action_cleans_up(world: World, how: str) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        try:
            if how == "alone":
                return [await racer.ask(ctx, "slow")]
            return await asyncio.gather(racer.ask(ctx, "slow"), racer.ask(ctx, "a"))
        finally:
            await racer.ask(ctx, "clean up")

    racer = racers({})
    store = world.store()
    run_until = lambda: any("slow" in what for what in racer.made)  # noqa: E731
    crashed(world.runner(scripted(body, racer), store=store), [1], world.out, when=run_until)
    assert "abandoned" not in store.kinds()
    racer.hangs = set()
    run(world.runner(scripted(body, racer)), [1], world.out)
    assert world.outputs() == [["done slow", "done a"][: 1 + (how == "gather")]]


@pytest.mark.parametrize("within", [True, False])
def test_a_task_that_was_cancelled_before_it_began_is_no_call(world: World, within: bool) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        async def strand() -> Any:
            return await racer.ask(ctx, "never")

        task = asyncio.create_task(strand() if within else racer.ask(ctx, "never"))
        task.cancel()
        return await racer.ask(ctx, "a", "idempotent")

    racer = racers({})
    agent = scripted(body, racer)
    cut_off(world, agent)
    run(world.runner(agent), [1], world.out)
    assert racer.made == ["call ['a']"]
    assert world.outputs() == ["done a"]


# --- code that changed ----------------------------------------------------------------------------------------------


def race_of(names: str, more: str = "") -> Any:
    """Calls side by side, and others when the first of them has ended."""

    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        tasks = [asyncio.create_task(racer.ask(ctx, what, "idempotent"), name=what) for what in names]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = sorted(task.get_name() for task in done)
        await asyncio.gather(*left, *(racer.ask(ctx, what) for what in more))
        await racer.ask(ctx, "end", "idempotent")
        return first

    return body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        (race_of("abc"), race_of("bc"), r"Racer.call\('a'\), which the action has not begun"),
        (race_of("ab", "c"), race_of("ab"), r"Racer.call\('b'\), whose outcome came when 3 calls had begun, .* 2 have"),
    ],
)
def test_code_that_no_longer_begins_a_call_gets_no_other_winner(
    world: World, before: Any, after: Any, part: str
) -> None:
    racer = racers({"b": LONG, "c": 2 * LONG})
    cut_off(world, scripted(before, racer))
    made = list(racer.made)
    with pytest.raises(DivergenceError, match=part) as caught:
        run(world.runner(scripted(after, racer)), [1], world.out)
    assert "job 'job', key None, message '0', action 'act': the code no longer fits the record" in str(caught.value)
    assert racer.made == made
    run(world.runner(scripted(before, racer)), [1], world.out)
    assert world.outputs() == [["a"]]


def test_changed_code_beside_a_call_that_waits_to_be_cancelled_is_named(world: World) -> None:
    def body(what: str) -> Any:
        async def slow(ctx: RunnerContext, racer: Racer) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await racer.ask(ctx, "slow", "once")

        async def act(ctx: RunnerContext, racer: Racer) -> None:
            beside = asyncio.create_task(slow(ctx, racer))
            await racer.ask(ctx, "a", "idempotent")
            await beside
            await racer.ask(ctx, what, "idempotent")
            await racer.ask(ctx, "end", "idempotent")

        return act

    racer = racers({})
    cut_off(world, scripted(body("b"), racer))
    with pytest.raises(DivergenceError, match=r"Expected the recorded call .*'b'.*; found the call .*'c'"):
        run(world.runner(scripted(body("c"), racer)), [1])


@pytest.mark.slow
@pytest.mark.parametrize("again", ["strict", "rerun"])
@pytest.mark.parametrize(
    ("before", "after"), [(race_of("abc"), race_of("bc")), (race_of("ab", "c"), race_of("ab"))], ids=["first", "more"]
)
def test_with_rerun_the_race_goes_on_without_the_lost_call_and_that_replays(
    world: World, before: Any, after: Any, again: Any
) -> None:
    racer = racers({"b": LONG, "c": 2 * LONG})
    cut_off(world, scripted(before, racer))
    made = len(racer.made)
    cut_off(world, scripted(after, racer), on_divergence="rerun")
    assert len(racer.made) == made, "what the code still makes has its answer"
    run(world.runner(scripted(after, racer), on_divergence=again), [1], world.out)
    assert len(racer.made) == made
    assert len(world.outputs()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
def test_with_rerun_an_abandoned_call_that_is_no_longer_cancelled_is_settled_by_its_effect(
    world: World, effect: Any
) -> None:
    def body(limit: float | None) -> Any:
        async def act(ctx: RunnerContext, racer: Racer) -> Any:
            try:
                async with asyncio.timeout(limit):
                    result = await ctx.durable_execute(racer.call, "slow", effect=effect)
            except TimeoutError:
                result = "late"
            await racer.ask(ctx, "after", "idempotent")
            return result

        return act

    racer = racers({})
    cut_off(world, scripted(body(0.05), racer))
    racer.hangs = set()
    made = Counter(racer.made)
    if effect == "once":
        report = run(world.runner(scripted(body(None), racer), on_divergence="rerun"), [1], world.out)
        assert [parked.why for parked in report.parked] == ["in_doubt"]
        assert Counter(racer.made) == made
        return
    cut_off(world, scripted(body(None), racer), on_divergence="rerun")
    assert Counter(racer.made) - made == {"call ['slow']": 1}
    run(world.runner(scripted(body(None), racer)), [1], world.out)
    assert Counter(racer.made) - made == {"call ['slow']": 1}
    assert world.outputs() == ["done slow"]


# --- waiting beside calls -------------------------------------------------------------------------------------------


def test_a_wait_for_a_signal_beside_calls_takes_its_place_among_them(world: World) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        seen: list[Any] = []
        calls = [racer.ask(ctx, "a", "idempotent"), ctx.wait_for("go"), racer.ask(ctx, "b", "idempotent")]
        await asyncio.gather(*(watched(call, seen) for call in calls))
        await decide(ctx, racer, seen)
        return seen

    racer = racers({"b": LONG})
    agent = scripted(body, racer)
    assert [parked.why for parked in run(world.runner(agent), [1], world.out).parked] == ["waiting"]
    ((state,),) = world.recorded().values()
    number = next(call.number for call in state.calls.values() if call.name == WAIT)
    answer = Signalled(state.task, number, "went")
    with world.store().inspect() as inspector:
        assert inspector.decide("job", Decision(state.key, state.message, answer.target, answer.body))
    cut_off(world, agent)
    made = len(racer.made)
    racer.turns = {"a": LONG}
    run(world.runner(agent), [1], world.out)
    assert len(racer.made) == made
    assert sorted(world.outputs()[0]) == ["done a", "done b", "went"]


def test_a_sleep_that_is_over_after_the_restart_does_not_overtake_what_is_on_record(world: World) -> None:
    async def body(ctx: RunnerContext, racer: Racer) -> Any:
        seen: list[Any] = []
        sleeping = asyncio.create_task(ctx.sleep(0.05))
        asking = asyncio.create_task(watched(racer.ask(ctx, "a", "idempotent"), seen))
        await asyncio.wait({sleeping, asking}, return_when=asyncio.FIRST_COMPLETED)
        seen.append((sleeping.done(), asking.done()))
        await sleeping
        await racer.ask(ctx, "end", "idempotent")
        return seen

    racer = racers({})
    agent = scripted(body, racer)
    store = CutStore(world.store().inner, ALL)
    crashed(world.runner(agent, store=store), [1], world.out, when=lambda: "completed" in store.kinds())
    time.sleep(0.06)
    run(world.runner(agent), [1], world.out)
    assert world.outputs() == [["done a", [False, True]]]


# --- any program ----------------------------------------------------------------------------------------------------

STRANDS = 4


class Step(NamedTuple):
    """A call of a strand: what it is called with, and what the strand does when it was seen."""

    what: int
    effect: str
    then: str
    side_by_side: int = 1


steps = st.builds(
    Step,
    what=st.integers(0, 5),  # few, so that some are equal
    effect=st.sampled_from(["read", "idempotent", "once"]),
    then=st.sampled_from(["", "", "", "start", "cancel", "decide", "sleep"]),
    side_by_side=st.sampled_from([1, 1, 2, 3]),
)
programs = st.lists(st.lists(steps, min_size=1, max_size=3), min_size=2, max_size=STRANDS)
delays = st.dictionaries(st.integers(0, 5), st.sampled_from([0, 1, 2, 5, 15, 16, 17, 18, 40, 100]))


def program(strands: list[list[Step]]) -> Race:
    """Strands of calls beside each other; the action takes what they see as it comes, and does what they say."""

    async def race(ctx: RunnerContext, racer: Racer, seen: list[Any]) -> None:
        news: asyncio.Queue[tuple[int, Step | None]] = asyncio.Queue()

        async def strand(number: int) -> None:
            begun.add(number)
            for step in strands[number]:
                calls = [racer.ask(ctx, step.what + n, step.effect) for n in range(step.side_by_side)]
                try:
                    seen.append((number, await (asyncio.gather(*calls) if len(calls) > 1 else calls[0])))
                except KeyError:
                    seen.append((number, "failed"))
                news.put_nowait((number, step))

        def start(number: int) -> None:
            running[number] = asyncio.create_task(strand(number))
            running[number].add_done_callback(lambda task: news.put_nowait((number, None)))

        begun: set[int] = set()
        running: dict[int, asyncio.Task[None]] = {}
        later = iter(range(2, len(strands)))
        start(0)
        start(1)
        try:
            while running:
                number, step = await news.get()
                seen.append((number, step and step.then, news.qsize()))
                if step is None:
                    del running[number]
                elif step.then == "start":
                    for another in itertools.islice(later, 1):
                        start(another)
                elif step.then == "cancel" and begun & set(running):
                    running[max(begun & set(running))].cancel()
                elif step.then == "decide":
                    await decide(ctx, racer, seen)
                elif step.then == "sleep":
                    await ctx.sleep(0.001)
        finally:
            for task in running.values():
                task.cancel()

    return race


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    strands=programs,
    live=delays,
    again=delays,
    failing=st.sets(st.integers(0, 7), max_size=2),
    cuts=st.lists(st.integers(0, 40), max_size=2),
)
def test_any_program_of_strands_replays(
    strands: list[list[Step]], live: dict[Any, int], again: dict[Any, int], failing: set[int], cuts: list[int]
) -> None:
    with TemporaryDirectory() as folder:
        racer = racers(live)
        racer.fails |= failing
        check_replay(World("memory", Path(folder)), program(strands), live, again, [*cuts, ALL], racer)
