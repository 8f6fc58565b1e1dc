"""Time, chance, waits and calls side by side: the same in every replay."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno import (
    ActionError,
    Agent,
    DefinitionError,
    DivergenceError,
    InputEvent,
    LocalRunner,
    RetryPolicy,
    RunnerContext,
    action,
)
from tests.helpers import Scripted, Tools, World, crashed, for_ever, run, until
from tests.virtual_time import VirtualTime


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime().install(monkeypatch)


# --- now, random, uuid ----------------------------------------------------------------------------------------------


def test_what_is_recorded_is_the_same_in_the_replay(world: World, tools: Tools, time: VirtualTime) -> None:
    seen: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        seen.append([await ctx.now(), await ctx.random(), await ctx.uuid(), await ctx.random(), await ctx.now()])
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    tools.hang_on = {"end"}
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    time.advance(999)
    run(world.runner(Scripted(body)), [1], world.out)
    assert seen[0] == seen[1]
    now, number, uuid, other, _ = seen[1]
    assert now == datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert (now.tzinfo, now.utcoffset()) == (UTC, timedelta(0))
    assert type(number) is float
    assert 0 <= number < 1
    assert number != other
    assert type(uuid) is UUID
    assert uuid.version == 4
    assert [type(value) for value in seen[0]] == [type(value) for value in seen[1]]


def test_they_are_read_calls_with_names_of_their_own(world: World) -> None:
    store = world.store()

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.now()
        await ctx.random()
        await ctx.uuid()
        await ctx.sleep(0)

    run(world.runner(Scripted(body), store=store), [1])
    assert [(body["name"], body["effect"]) for body in store.bodies()[:-2]] == [
        (f"dalsegno.{what}", "read") for what in ("now", "random", "uuid", "sleep")
    ]
    assert store.kinds() == ["called"] * 4 + ["slept", "done"]


def test_the_clock_is_the_real_one_unless_a_test_sets_it(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        before = datetime.now(UTC)
        assert before <= await ctx.now() <= datetime.now(UTC)

    run(world.runner(Scripted(body)), [1])


@pytest.mark.parametrize("recorded", [True, False])
def test_arguments_made_of_them_match_in_the_replay_and_of_others_are_found(
    world: World, tools: Tools, recorded: bool
) -> None:
    """What is not recorded is a divergence, found before anything is executed twice."""

    async def body(value: Any, ctx: RunnerContext) -> None:
        made_of = [await ctx.uuid(), await ctx.now(), await ctx.random()] if recorded else [random.random()]
        await ctx.durable_execute(tools.call, f"pay {made_of}", effect="idempotent")
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    tools.hang_on = {"end"}
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    if recorded:
        run(world.runner(Scripted(body)), [1], world.out)
    else:
        with pytest.raises(DivergenceError, match="pay"):
            run(world.runner(Scripted(body)), [1], world.out)
    assert sum(str(what).startswith("pay") for what in tools.made) == 1


def test_one_that_is_not_awaited_is_an_error(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        forgotten = ctx.now()
        assert asyncio.iscoroutine(forgotten)

    with pytest.raises(ActionError, match=r"dalsegno\.now, \.\.\.\) was never awaited"):
        run(world.runner(Scripted(body)), [1])


@pytest.mark.parametrize("what", ["now", "random", "uuid", "sleep", "gather"])
def test_a_plain_def_action_is_told_what_to_do(world: World, what: str) -> None:
    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            if what == "gather":
                asyncio.run(ctx.gather())
            getattr(ctx, what)(*[1][: what == "sleep"])

    with pytest.raises(ActionError, match=rf"ctx\.{what}\(\.\.\.\) must be awaited.*declare it with async def"):
        run(world.runner(Plain()), [1])


# --- sleep ----------------------------------------------------------------------------------------------------------


def sleeps(duration: Any, tools: Tools) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.sleep(duration)
        return await ctx.durable_execute(tools.call, "end", effect="idempotent")

    return Scripted(body)


def test_the_wake_up_time_is_durable_before_it_sleeps(world: World, tools: Tools, time: VirtualTime) -> None:
    store = world.store()
    time.held = True
    crashed(world.runner(sleeps(60, tools), store=store, linger=3600), [1], world.out, when=lambda: bool(time.waits))
    (slept,) = store.bodies()
    assert (slept["name"], slept["args"]) == ("dalsegno.sleep", [60.0])
    assert "2026-03-01T12:01:00" in str(slept["result"])


def test_a_restart_sleeps_only_what_is_left(world: World, tools: Tools, time: VirtualTime) -> None:
    def has_begun(waits: int) -> bool:
        return len(time.waits) > waits

    time.held = True
    for passed in (10, 20, 0):
        count = len(time.waits)
        crashed(world.runner(sleeps(60, tools)), [1], world.out, when=functools.partial(has_begun, count))
        time.advance(passed)
    time.held = False
    run(world.runner(sleeps(60, tools)), [1], world.out)
    assert time.waits == [60, 50, 30, 30]
    assert tools.made == ["end"]


def test_a_sleep_that_is_over_takes_no_time_in_the_replay(world: World, tools: Tools, time: VirtualTime) -> None:
    tools.hang_on = {"end"}
    crashed(world.runner(sleeps(timedelta(minutes=1), tools)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    run(world.runner(sleeps(timedelta(minutes=1), tools)), [1], world.out)
    assert time.waits == [60]


def test_a_long_sleep_asks_the_clock_again(world: World, tools: Tools, time: VirtualTime) -> None:
    """As the machine itself may have been asleep meanwhile."""
    run(world.runner(sleeps(timedelta(minutes=2, seconds=5), tools)), [1], world.out)
    assert time.waits == [60, 60, 5]


def test_a_clock_that_was_set_back_makes_no_sleep_longer(world: World, tools: Tools, time: VirtualTime) -> None:
    time.held = True
    crashed(world.runner(sleeps(30, tools)), [1], world.out, when=lambda: bool(time.waits))
    time.held = False
    time.advance(-7200)
    run(world.runner(sleeps(30, tools)), [1], world.out)
    assert time.waits == [30, 30]


def test_a_runner_that_stops_does_not_sit_out_a_sleep(world: World, tools: Tools, time: VirtualTime) -> None:
    async def stopped() -> None:
        runner = world.runner(sleeps(60, tools))
        running = asyncio.ensure_future(runner.run_async([1], world.out))
        await until(lambda: time.waits)
        runner.stop()
        async with asyncio.timeout(5):
            await running

    time.held = True
    asyncio.run(stopped())
    assert tools.made == []
    time.held = False
    time.advance(40)
    run(world.runner(sleeps(60, tools)), [1], world.out)
    assert time.waits == [60, 20]
    assert tools.made == ["end"]


def test_other_keys_go_on_while_one_sleeps(world: World, time: VirtualTime, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value == "a":
            await ctx.sleep(60)
        return value

    time.held = True
    crashed(world.runner(Scripted(body)), ["a", "b"], world.out, key=str, when=lambda: world.outputs() == ["b"])
    time.held = False
    run(world.runner(Scripted(body)), ["a", "b"], world.out, key=str)
    assert world.outputs() == ["b", "a"]


def test_calls_go_on_beside_a_sleep_and_replay(world: World, tools: Tools, time: VirtualTime) -> None:
    async def sleep_and_call(ctx: RunnerContext) -> Any:
        await ctx.sleep(60)
        return await ctx.durable_execute(tools.call, "after", effect="idempotent")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await asyncio.gather(
            sleep_and_call(ctx), *(ctx.durable_execute(tools.call, n, effect="idempotent") for n in range(3))
        )

    tools.hang_on = {"after"}
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [["done after", "done 0", "done 1", "done 2"]]
    assert tools.made == [0, 1, 2, "after", "after"]
    assert time.waits == [60]


def test_a_doubt_beside_it_ends_a_sleep(world: World, tools: Tools, time: VirtualTime) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        await asyncio.gather(ctx.sleep(60), ctx.durable_execute(tools.call, "doubtful"))

    tools.hang_on, time.held = {"doubtful"}, True
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: bool(tools.hanging and time.waits))
    assert len(run(world.runner(Scripted(body)), [1], world.out).parked) == 1


@pytest.mark.parametrize(
    "wrong", [-1, -0.001, math.nan, math.inf, "1", None, True, timedelta(seconds=-1), timedelta.max, 10**400]
)
def test_a_wrong_duration_is_refused(world: World, wrong: Any) -> None:
    with pytest.raises(ActionError, match=r"ctx\.sleep\(\.\.\.\): .* is no duration") as caught:
        run(world.runner(sleeps(wrong, Tools())), [1])
    assert isinstance(caught.value.__cause__, DefinitionError)


def test_no_sleep_at_all_takes_no_time(world: World, tools: Tools, time: VirtualTime) -> None:
    run(world.runner(sleeps(0, tools)), [1], world.out)
    assert time.waits == []
    assert tools.made == ["end"]


# --- gather ---------------------------------------------------------------------------------------------------------


class Crowd:
    """A tool that knows how many of its calls are in flight; each one goes on when the test says so, or at once."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.inside = self.most = 0
        self.hang_on: set[Any] = set()
        self.fail_on: set[Any] = set()
        self.delays: dict[Any, int] = {}
        self.hanging: set[Any] = set()

    async def ask(self, what: Any) -> Any:
        self.begun.append(what)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            if what in self.hang_on:
                self.hanging.add(what)
                await for_ever()
            for _ in range(1 + self.delays.get(what, 0)):
                await asyncio.sleep(0)
            if what in self.fail_on:
                raise KeyError(what)
            return f"done {what}"
        finally:
            self.inside -= 1


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def gathers(crowd: Crowd, count: int, limit: int | None, effect: Any = "idempotent") -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        calls = (ctx.durable_execute(crowd.ask, n, effect=effect) for n in range(count))
        try:
            return await ctx.gather(*calls, limit=limit)
        except KeyError as error:
            return [f"failed {error}", await ctx.durable_execute(crowd.ask, "after", effect=effect)]

    return Scripted(body)


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 2), (3, 3), (99, 7), (None, 7)])
def test_no_more_than_the_limit_are_in_flight_and_results_are_in_order(
    world: World, crowd: Crowd, limit: int | None, most: int
) -> None:
    crowd.delays = {0: 40, 1: 3, 3: 20}
    run(world.runner(gathers(crowd, 7, limit, "read")), [1], world.out)
    assert world.outputs() == [[f"done {n}" for n in range(7)]]
    assert crowd.begun == list(range(7))
    assert crowd.most == most


def test_nothing_to_gather_gives_nothing(world: World, crowd: Crowd) -> None:
    run(world.runner(gathers(crowd, 0, 2)), [1], world.out)
    assert world.outputs() == [[]]


@pytest.mark.parametrize("limit", [1, 2, 3, None])
@pytest.mark.parametrize("hangs", range(6))
def test_a_crash_in_any_of_them_makes_only_the_missing_ones(
    world: World, crowd: Crowd, limit: int | None, hangs: int
) -> None:
    crowd.hang_on = {hangs}
    store = world.store()
    alone = limit == 1

    def stuck() -> bool:
        others = [n for n in range(hangs if alone else 6) if n != hangs]
        return hangs in crowd.hanging and store.kinds().count("completed") == len(others)

    crashed(world.runner(gathers(crowd, 6, limit), store=store), [1], world.out, when=stuck)
    crowd.hang_on = set()
    crowd.delays = {n: 6 - n for n in range(6)}
    run(world.runner(gathers(crowd, 6, limit)), [1], world.out)
    assert world.outputs() == [[f"done {n}" for n in range(6)]]
    assert sorted(crowd.begun) == sorted([*range(6), hangs])


@pytest.mark.parametrize("limit", [1, 2, None])
@pytest.mark.parametrize("failing", [{2}, {1, 4}, {0, 5}, {5}])
def test_all_end_before_the_first_failure_in_order_is_raised_live_as_in_the_replay(
    world: World, crowd: Crowd, limit: int | None, failing: set[int]
) -> None:
    crowd.fail_on, crowd.delays = failing, {min(failing): 9, 3: 20}
    crowd.hang_on = {"after"}
    crashed(world.runner(gathers(crowd, 6, limit)), [1], world.out, when=lambda: bool(crowd.hanging))
    assert crowd.begun == [*range(6), "after"]
    crowd.hang_on = set()
    run(world.runner(gathers(crowd, 6, limit)), [1], world.out)
    assert world.outputs() == [[f"failed {min(failing)}", "done after"]]
    assert crowd.begun == [*range(6), "after", "after"]


def test_a_failure_that_leaves_the_action_is_tried_again_and_the_others_are_not(world: World, crowd: Crowd) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.gather(*(ctx.durable_execute(crowd.ask, n, effect="idempotent") for n in range(4)), limit=2)

    crowd.fail_on = {1}
    with pytest.raises(ActionError, match="KeyError"):
        run(world.runner(Scripted(body)), [1], world.out)
    crowd.fail_on = set()
    run(world.runner(Scripted(body)), [1], world.out)
    assert crowd.begun == [0, 1, 2, 3, 1]
    assert world.outputs() == [[f"done {n}" for n in range(4)]]


def test_functions_begin_when_it_is_their_turn_and_may_do_several_things(world: World, crowd: Crowd) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        async def two(n: int) -> Any:
            return [await ctx.durable_execute(crowd.ask, f"{n}{x}", effect="idempotent") for x in "ab"]

        calls: list[Callable[[], Any]] = [lambda n=n: two(n) for n in range(4)]  # type: ignore[misc]
        return await ctx.gather(*calls, limit=2)

    crowd.hang_on = {"2b"}
    store = world.store()
    crashed(
        world.runner(Scripted(body), store=store),
        [1],
        world.out,
        when=lambda: bool(crowd.hanging) and store.kinds().count("completed") == 7,
    )
    crowd.hang_on = set()
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [[[f"done {n}a", f"done {n}b"] for n in range(4)]]
    assert crowd.begun.count("2b") == 2
    assert len(crowd.begun) == 9
    assert crowd.most <= 2


def test_a_stop_lets_those_in_flight_end_and_begins_no_other(world: World, crowd: Crowd) -> None:
    runner: Any = None

    async def ask(n: int) -> int:
        crowd.begun.append(n)
        if n == 1:
            runner.stop()
        await asyncio.sleep(0)
        return n

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.gather(
            *(ctx.durable_execute(ask, n, name="ask", effect="idempotent") for n in range(6)), limit=2
        )

    runner = world.runner(Scripted(body))
    run(runner, [1], world.out)
    assert crowd.begun == [0, 1]
    run(world.runner(Scripted(body)), [1], world.out)
    assert crowd.begun == [0, 1, 2, 3, 4, 5]
    assert world.outputs() == [[0, 1, 2, 3, 4, 5]]


def test_when_it_is_cancelled_those_in_flight_are_and_the_others_never_begin(world: World, crowd: Crowd) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        calls = [ctx.durable_execute(crowd.ask, n, effect="read") for n in range(5)]
        try:
            async with asyncio.timeout(0.02):
                await ctx.gather(*calls, limit=2)
        except TimeoutError:
            return ["gave up", crowd.inside, await ctx.durable_execute(crowd.ask, "after", effect="read")]

    crowd.hang_on = {0, 1}
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [["gave up", 0, "done after"]]
    assert crowd.begun == [0, 1, "after"]


def test_retries_and_sleeps_keep_their_place_in_it(world: World, time: VirtualTime, crowd: Crowd) -> None:
    failures = 0

    async def flaky(n: int) -> int:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise ConnectionError("down")
        return n

    async def body(value: Any, ctx: RunnerContext) -> Any:
        policy = RetryPolicy(jitter=0)
        return await ctx.gather(
            ctx.durable_execute(flaky, 1, name="flaky", retry=policy), ctx.sleep(5), ctx.random(), limit=1
        )

    run(world.runner(Scripted(body)), [1], world.out)
    assert time.waits == [1, 2, 5]
    assert world.outputs()[0][:2] == [1, None]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_a_wrong_limit_is_refused(world: World, crowd: Crowd, limit: Any) -> None:
    with pytest.raises(ActionError, match=r"ctx\.gather\(\.\.\., limit=.*a whole number from 1 on"):
        run(world.runner(gathers(crowd, 2, limit)), [1])
    assert crowd.begun == []


@pytest.mark.parametrize("wrong", [5, None, ["a list"], lambda: 5])
def test_what_cannot_be_awaited_is_refused(world: World, wrong: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.gather(wrong)

    with pytest.raises(ActionError, match=r"ctx\.gather") as caught:
        run(world.runner(Scripted(body)), [1])
    assert isinstance(caught.value.__cause__, DefinitionError)


@pytest.mark.parametrize("what", ["twice", "task"])
def test_what_cannot_wait_for_its_turn_is_refused(world: World, crowd: Crowd, what: str) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        one = ctx.durable_execute(crowd.ask, 1, effect="read")
        if what == "twice":
            await ctx.gather(one, one)
        else:
            await ctx.gather(asyncio.ensure_future(one), limit=1)

    with pytest.raises(
        ActionError, match="same coroutine twice" if what == "twice" else "is a task, which runs already"
    ):
        run(world.runner(Scripted(body)), [1])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
    failing=st.sets(st.integers(0, 5), max_size=2),
    delays=st.tuples(*[st.dictionaries(st.integers(0, 5), st.integers(0, 12)) for _ in range(2)]),
)
def test_whatever_ends_first_the_replay_gives_the_same_and_makes_nothing_twice(
    count: int, limit: int | None, failing: set[int], delays: tuple[dict[int, int], dict[int, int]]
) -> None:
    """The first run ends in a crash after the gather; other delays in the second."""
    crowd, tools = Crowd(), Tools()
    seen: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        calls = (ctx.durable_execute(crowd.ask, n, effect="read") for n in range(count))
        try:
            seen.append(await ctx.gather(*calls, limit=limit))
        except KeyError as error:
            seen.append(str(error))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    crowd.fail_on, crowd.delays, tools.hang_on = failing, delays[0], {"end"}
    jobs = LocalRunner(Scripted(body), job="job", store="memory://")
    crashed(jobs, [1], when=lambda: bool(tools.hanging))
    crowd.delays, tools.hang_on = delays[1], set()
    run(jobs, [1])
    assert seen[0] == seen[1]
    assert crowd.begun == list(range(count))
