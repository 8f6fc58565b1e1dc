"""Retries: failed attempts are history; a restart repeats neither them nor their waits, and goes on counting."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno import (
    ActionError,
    Agent,
    DefinitionError,
    DidNotHappen,
    Happened,
    InputEvent,
    OutputEvent,
    RecordError,
    RetryPolicy,
    RunnerContext,
    Unknown,
    action,
    current_call,
)
from dalsegno.core.records import CallState, Record, dump_body, fold
from dalsegno.core.transitions import CallStatus
from tests.helpers import Scripted, Tools, World, crash, crashed, for_ever, run, until
from tests.test_parking import retry, signal
from tests.virtual_time import VirtualTime

EFFECTS: list[Any] = ["read", "idempotent", "once"]
POLICY = RetryPolicy(attempts=3, backoff=8, jitter=0)


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime().install(monkeypatch)


class Flaky:
    """A tool whose first *failures* calls, in all processes, raise."""

    def __init__(self, failures: float, error: Callable[[], BaseException] = lambda: ConnectionError("down")) -> None:
        self.failures = failures
        self.error = error
        self.attempts: list[int] = []
        self.keys: set[str] = set()
        self.hang_in: int | None = None
        self.hanging = False

    async def ask(self, what: Any) -> Any:
        call = current_call()
        self.attempts.append(call.attempt)
        self.keys.add(call.idempotency_key)
        if len(self.attempts) == self.hang_in:
            self.hanging = True
            await for_ever()
        if len(self.attempts) <= self.failures:
            raise self.error()
        return f"done {what}"


def asks(flaky: Flaky, *, retry: RetryPolicy | None = POLICY, **options: Any) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(flaky.ask, value, retry=retry, **options)

    return Scripted(body)


# --- without a crash ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_call_that_fails_is_made_again_after_its_back_off(world: World, time: VirtualTime, effect: Any) -> None:
    flaky, store = Flaky(2), world.store()
    run(world.runner(asks(flaky, effect=effect), store=store), ["a"], world.out)
    assert world.outputs() == ["done a"]
    assert flaky.attempts == [1, 2, 3]
    assert len(flaky.keys) == 1
    assert time.waits == [8, 16]
    requested = [] if effect == "read" else ["requested"]
    assert store.kinds() == [*requested, "failed", *requested, "failed", *requested, "completed", "done"]


def test_a_failed_attempt_of_a_read_call_says_what_was_called(world: World) -> None:
    store = world.store()
    run(world.runner(asks(Flaky(1), effect="read"), store=store), ["a"], world.out)
    failed, completed, _ = store.bodies()
    assert (failed["call"], failed["name"], failed["args"]) == (0, "tests.test_retry:Flaky.ask", ["a"])
    assert (failed["effect"], failed["alone"], failed["attempt"]) == ("read", True, 1)
    assert failed["retry_at"] == "2026-03-01T12:00:08+00:00"
    assert "error" in failed
    assert (completed["call"], completed["result"]) == (0, "done a")


def test_what_is_not_covered_is_not_retried(world: World, time: VirtualTime) -> None:
    policies: list[Any] = [OSError, (OSError, KeyError), lambda error: "busy" in str(error)]
    for number, retry_on in enumerate(policies):
        flaky = Flaky(math.inf, lambda: ValueError("no"))
        with pytest.raises(ActionError, match="ValueError: no"):
            run(world.runner(asks(flaky, retry=RetryPolicy(retry_on=retry_on)), f"job {number}"), ["a"], world.out)
        assert flaky.attempts == [1]
    assert time.waits == []


def test_a_predicate_sees_what_was_raised(world: World) -> None:
    seen: list[Exception] = []

    def is_busy(error: Exception) -> bool:
        seen.append(error)
        return "busy" in str(error)

    flaky = Flaky(1, lambda: RuntimeError("busy"))
    run(world.runner(asks(flaky, retry=RetryPolicy(retry_on=is_busy))), ["a"], world.out)
    assert world.outputs() == ["done a"]
    assert [str(error) for error in seen] == ["busy"]


def test_a_predicate_that_raises_fails_the_action_and_names_itself(world: World) -> None:
    def wrong(error: Exception) -> bool:
        raise KeyError("status")

    flaky = Flaky(math.inf)
    with pytest.raises(ActionError, match=r"ask raised ConnectionError\('down'\), and retry_on raised KeyError"):
        run(world.runner(asks(flaky, retry=RetryPolicy(retry_on=wrong))), ["a"], world.out)
    assert flaky.attempts == [1]


@pytest.mark.parametrize("effect", EFFECTS)
def test_signals_are_never_retried_nor_recorded(world: World, effect: Any) -> None:
    store = world.store()
    flaky = Flaky(1, lambda: asyncio.CancelledError())
    with pytest.raises(ActionError, match="CancelledError"):
        run(world.runner(asks(flaky, effect=effect), store=store), ["a"], world.out)
    assert flaky.attempts == [1]
    assert "failed" not in store.kinds()


def test_a_plain_def_action_has_retries_too(world: World) -> None:
    made: list[int] = []

    def ask() -> int:
        made.append(current_call().attempt)
        if len(made) < 3:
            raise ConnectionError("down")
        return len(made)

    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            ctx.send_event(OutputEvent(output=ctx.durable_execute_sync(ask, name="ask", retry=POLICY)))

    run(world.runner(Plain()), [1], world.out)
    assert (made, world.outputs()) == ([1, 2, 3], [3])


def test_one_attempt_is_no_retry(world: World, time: VirtualTime) -> None:
    flaky = Flaky(math.inf)
    with pytest.raises(ActionError, match="down"):
        run(world.runner(asks(flaky, retry=RetryPolicy(attempts=1))), ["a"], world.out)
    assert (flaky.attempts, time.waits) == ([1], [])


# --- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("effect", "boundary"),
    [("read", n) for n in range(1, 5)] + [(effect, n) for effect in ("idempotent", "once") for n in range(1, 8)],
)
def test_a_crash_at_any_record_of_fail_fail_ok_repeats_neither_attempts_nor_waits(
    world: World, time: VirtualTime, effect: Any, boundary: int, when: str
) -> None:
    flaky, store, reached = Flaky(2), world.store(), asyncio.Event()
    records = 0

    async def hang(batch: Sequence[Record]) -> None:
        nonlocal records
        records += len(batch)
        if records >= boundary:
            reached.set()
            await for_ever()

    setattr(store, f"{when}_put", hang)
    reconcile = (lambda what: DidNotHappen()) if effect == "once" else None
    agent = asks(flaky, effect=effect, reconcile=reconcile)
    crashed(world.runner(agent, store=store, linger=0), ["a"], world.out, when=reached.is_set)
    recorded = len(time.waits)
    run(world.runner(agent), ["a"], world.out)
    assert world.outputs() == ["done a"]
    assert len(time.waits) == 2 >= recorded
    assert sum(time.waits) <= 8 + 16
    assert len(flaky.attempts) <= 4
    if effect != "read":  # whose attempts are on record when they fail
        assert all(first < second for first, second in pairwise(flaky.attempts))
    assert len(flaky.keys) == 1


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_restart_during_a_back_off_waits_only_what_is_left_and_goes_on_counting(
    world: World, time: VirtualTime, effect: Any
) -> None:
    flaky, store = Flaky(2), world.store()
    time.held = True
    crashed(
        world.runner(asks(flaky, effect=effect), store=store),
        ["a"],
        world.out,
        when=lambda: bool(time.waits) and "failed" in store.kinds(),
    )
    time.held = False
    time.advance(5)
    run(world.runner(asks(flaky, effect=effect)), ["a"], world.out)
    assert time.waits == [8, 3, 16]
    assert flaky.attempts == [1, 2, 3]
    assert world.outputs() == ["done a"]


def test_a_back_off_that_is_over_is_not_waited_for(world: World, time: VirtualTime) -> None:
    flaky, store = Flaky(1), world.store()
    time.held = True
    crashed(world.runner(asks(flaky), store=store), ["a"], world.out, when=lambda: "failed" in store.kinds())
    time.advance(3600)
    run(world.runner(asks(flaky)), ["a"], world.out)
    assert time.waits == [8]
    assert world.outputs() == ["done a"]


def test_a_clock_that_was_set_back_makes_no_wait_longer_than_the_policy_has_any(
    world: World, time: VirtualTime
) -> None:
    flaky, store = Flaky(1), world.store()
    time.held = True
    crashed(world.runner(asks(flaky), store=store), ["a"], world.out, when=lambda: "failed" in store.kinds())
    time.held = False
    time.advance(-86_400)
    run(world.runner(asks(flaky)), ["a"], world.out)
    assert time.waits == [8, 60]


def test_a_policy_that_is_gone_from_the_code_is_not_waited_for(world: World, time: VirtualTime) -> None:
    flaky, store = Flaky(1), world.store()
    time.held = True
    crashed(world.runner(asks(flaky), store=store), ["a"], world.out, when=lambda: "failed" in store.kinds())
    run(world.runner(asks(flaky, retry=None)), ["a"], world.out)
    assert flaky.attempts == [1, 2]
    assert time.waits == [8]


@pytest.mark.parametrize("effect", EFFECTS)
def test_exhausted_attempts_leave_one_in_each_later_run(world: World, time: VirtualTime, effect: Any) -> None:
    flaky = Flaky(math.inf)
    for attempts in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
        with pytest.raises(ActionError, match="down"):
            run(world.runner(asks(flaky, effect=effect)), ["a"], world.out)
        assert flaky.attempts == attempts
    assert time.waits == [8, 16]
    flaky.failures = 0
    run(world.runner(asks(flaky, effect=effect)), ["a"], world.out)
    assert flaky.attempts == [1, 2, 3, 4, 5, 6]
    assert world.outputs() == ["done a"]


def test_attempts_that_were_added_are_made(world: World) -> None:
    flaky = Flaky(5)
    with pytest.raises(ActionError):
        run(world.runner(asks(flaky)), ["a"], world.out)
    run(world.runner(asks(flaky, retry=RetryPolicy(attempts=6, jitter=0))), ["a"], world.out)
    assert flaky.attempts == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_an_attempt_that_a_crash_cuts_off_is_made_again_and_is_no_failure(world: World, effect: Any) -> None:
    flaky, store = Flaky(3), world.store()
    flaky.hang_in = 2
    crashed(
        world.runner(asks(flaky, effect=effect), store=store),
        ["a"],
        world.out,
        when=lambda: flaky.hanging and "failed" in store.kinds(),
    )
    run(world.runner(asks(flaky, effect=effect)), ["a"], world.out)
    assert world.outputs() == ["done a"]
    assert flaky.attempts == ([1, 2, 2, 3] if effect == "read" else [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("answer", "attempts"),
    [(Happened("found"), [1, 2]), (DidNotHappen(), [1, 2, 3]), (Unknown(), [1, 2]), (None, [1, 2])],
)
def test_a_once_attempt_that_a_crash_cuts_off_is_in_doubt(world: World, answer: Any, attempts: list[int]) -> None:
    flaky, asked = Flaky(1), []

    async def find(what: Any) -> Any:
        asked.append(current_call().attempt)
        return answer if asked[-1] == 2 else DidNotHappen()

    flaky.hang_in = 2
    agent = asks(flaky, reconcile=find if answer is not None else None)
    crashed(world.runner(agent), ["a"], world.out, when=lambda: flaky.hanging)
    report = run(world.runner(agent), ["a"], world.out)
    assert flaky.attempts == attempts
    settled = isinstance(answer, (Happened, DidNotHappen))
    assert len(report.parked) == (0 if settled else 1)
    assert world.outputs() == ([answer.result if isinstance(answer, Happened) else "done a"] if settled else [])


def test_a_reconcile_is_asked_before_each_further_attempt(world: World) -> None:
    """Whoever gives one says that a failure of the call is not the last word."""
    flaky, asked = Flaky(2), []

    def find(what: Any) -> Any:
        asked.append(current_call().attempt)
        return DidNotHappen() if len(asked) == 1 else Happened("it did after all")

    run(world.runner(asks(flaky, reconcile=find)), ["a"], world.out)
    assert (flaky.attempts, asked) == ([1, 2], [1, 2])
    assert world.outputs() == ["it did after all"]


FAILED = {
    "v": 1,
    "kind": "failed",
    "task": {"action": "act", "event": "InputEvent", "sender": "", "index": 0, "content": "c"},
    "call": 0,
    "name": "ask",
    "args_digest": "d",
    "effect": "read",
    "args": [],
    "attempt": 1,
    "error": None,
    "retry_at": "2026-03-01T12:00:08+00:00",
}


def fold_failed(**changed: Any) -> CallState:
    body = {name: value for name, value in (FAILED | changed).items() if value != "left out"}
    (state,) = fold([Record(b"null", "0", "t", dump_body(body))])
    return state.calls[0]


def test_a_failed_attempt_may_be_the_first_record_of_a_call() -> None:
    state = fold_failed()
    assert (state.status, state.failures, state.attempt) == (CallStatus.FAILED, 1, 1)
    assert state.retry_at == datetime(2026, 3, 1, 12, 0, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    "damaged", [{"retry_at": "soon"}, {"retry_at": 5}, {"retry_at": "2026-03-01T12:00:08"}, {"name": "left out"}]
)
def test_a_damaged_record_of_a_failed_attempt_is_refused(damaged: Any) -> None:
    with pytest.raises(RecordError):
        fold_failed(**damaged)


# --- what the action sees -------------------------------------------------------------------------------------------


class RateLimited(Exception):
    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_final_failure_that_was_caught_replays_as_the_same_exception(
    world: World, tools: Tools, time: VirtualTime, effect: Any
) -> None:
    flaky = Flaky(math.inf, lambda: RateLimited("slow down", status=429))
    seen: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        try:
            await ctx.durable_execute(flaky.ask, value, effect=effect, retry=POLICY)
        except RateLimited as error:
            seen.append((str(error), error.status))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    tools.hang_on = {"end"}
    crashed(world.runner(Scripted(body)), ["a"], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert seen == [("slow down", 429)] * 2
    assert flaky.attempts == [1, 2, 3]
    assert time.waits == [8, 16]


def test_live_equals_replay_for_what_succeeds_after_failures(world: World, tools: Tools) -> None:
    flaky, seen = Flaky(2), []

    async def body(value: Any, ctx: RunnerContext) -> None:
        seen.append(await ctx.durable_execute(flaky.ask, (1, {2}), effect="read", retry=POLICY))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    tools.hang_on = {"end"}
    crashed(world.runner(Scripted(body)), ["a"], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert seen == ["done (1, {2})"] * 2
    assert flaky.attempts == [1, 2, 3]


@pytest.mark.parametrize("crashes_in", [None, 2, 4, 5])
def test_retries_side_by_side_keep_their_own_counts(world: World, crashes_in: int | None) -> None:
    made: dict[Any, list[int]] = {}
    count = 0
    hanging = asyncio.Event()

    async def ask(what: int) -> Any:
        nonlocal count
        count += 1
        made.setdefault(what, []).append(current_call().attempt)
        if count == crashes_in:
            hanging.set()
            await for_ever()
        if len(made[what]) <= what:
            raise ConnectionError(f"down {what}")
        return what

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await asyncio.gather(
            *(ctx.durable_execute(ask, n, effect="idempotent", name="ask", retry=POLICY) for n in range(3))
        )

    if crashes_in:
        crashed(world.runner(Scripted(body)), [1], world.out, when=hanging.is_set)
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [[0, 1, 2]]
    assert all(attempts == sorted(set(attempts)) for attempts in made.values())


# --- what ends a back-off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_runner_that_stops_does_not_sit_out_a_back_off(world: World, time: VirtualTime, effect: Any) -> None:
    flaky = Flaky(1)

    async def stopped() -> None:
        runner = world.runner(asks(flaky, effect=effect))
        running = asyncio.ensure_future(runner.run_async(["a"], world.out))
        await until(lambda: time.waits)
        runner.stop()
        async with asyncio.timeout(5):
            report = await running
        assert report.stopped_by == "stop()"

    time.held = True
    asyncio.run(stopped())
    assert flaky.attempts == [1]
    time.held = False
    time.advance(6)
    run(world.runner(asks(flaky, effect=effect)), ["a"], world.out)
    assert flaky.attempts == [1, 2]
    assert time.waits == [8, 2]
    assert world.outputs() == ["done a"]


def test_a_runner_that_stops_while_an_attempt_fails_makes_no_further_one(world: World, time: VirtualTime) -> None:
    flaky = Flaky(1)
    runner: Any = None

    async def ask(what: Any) -> Any:
        runner.stop()
        return await flaky.ask(what)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(ask, value, name="ask", retry=POLICY)

    runner = world.runner(Scripted(body))
    run(runner, ["a"], world.out)
    assert (flaky.attempts, time.waits) == ([1], [])
    run(world.runner(asks(flaky, name="ask")), ["a"], world.out)
    assert time.waits == [8]


def test_a_doubt_beside_it_ends_a_back_off_at_once(world: World, tools: Tools, time: VirtualTime) -> None:
    flaky = Flaky(1)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.durable_execute(tools.call, "doubtful"))
            asked = group.create_task(ctx.durable_execute(flaky.ask, value, effect="read", retry=POLICY))
        return asked.result()

    tools.hang_on, time.held = {"doubtful"}, True
    crashed(world.runner(Scripted(body)), ["a"], world.out, when=lambda: bool(tools.hanging and time.waits))
    report = run(world.runner(Scripted(body)), ["a"], world.out)
    assert len(report.parked) == 1
    assert flaky.attempts == [1]


def test_a_message_that_waits_for_a_signal_is_set_aside_without_sitting_out_a_back_off(
    world: World, time: VirtualTime
) -> None:
    flaky = Flaky(1)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        asking = asyncio.ensure_future(ctx.durable_execute(flaky.ask, value, effect="read", retry=POLICY))
        await until(lambda: time.waits or len(flaky.attempts) > 1)
        return [await ctx.wait_for("approval"), await asking]

    time.held = True
    assert len(run(world.runner(Scripted(body)), ["a"], world.out).parked) == 1
    time.held = False
    assert signal(world, None, "yes")
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert world.outputs() == [["yes", "done a"]]
    assert flaky.attempts == [1, 2]
    assert time.waits == [8, 8]


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_message_that_is_parked_because_it_failed_has_one_attempt_when_it_is_retried(
    world: World, time: VirtualTime, effect: Any
) -> None:
    flaky = Flaky(3)
    report = run(world.runner(asks(flaky, effect=effect), on_failure="park"), ["a"], world.out)
    assert len(report.parked) == 1
    assert flaky.attempts == [1, 2, 3]
    assert retry(world, None)
    run(world.runner(asks(flaky, effect=effect), on_failure="park"), ["a"], world.out)
    assert flaky.attempts == [1, 2, 3, 4]
    assert world.outputs() == ["done a"]


def test_an_action_that_ends_does_not_wait_for_a_back_off_that_nobody_awaits(world: World, time: VirtualTime) -> None:
    flaky, strays = Flaky(math.inf), []

    async def body(value: Any, ctx: RunnerContext) -> str:
        strays.append(asyncio.ensure_future(ctx.durable_execute(flaky.ask, value, effect="read", retry=POLICY)))
        await until(lambda: time.waits)
        return "over"

    async def bounded() -> None:
        async with asyncio.timeout(5):
            await world.runner(Scripted(body)).run_async(["a"], world.out)
        (result,) = await asyncio.gather(*strays, return_exceptions=True)
        assert isinstance(result, RuntimeError)

    time.held = True
    asyncio.run(bounded())
    assert world.outputs() == ["over"]
    assert flaky.attempts == [1]


def test_a_time_limit_of_the_action_ends_a_back_off(world: World, time: VirtualTime) -> None:
    flaky = Flaky(1)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        try:
            async with asyncio.timeout(0.01):
                return await ctx.durable_execute(flaky.ask, value, effect="read", retry=POLICY)
        except TimeoutError:
            return "took too long"

    time.held = True
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert world.outputs() == ["took too long"]
    assert flaky.attempts == [1]


@pytest.mark.parametrize("crashes", [1, 3])
def test_crash_after_crash_in_a_back_off_waits_once_in_all(world: World, time: VirtualTime, crashes: int) -> None:
    flaky = Flaky(1)
    time.held = True
    for number in range(crashes):
        store = world.store()

        async def once(store: Any = store, number: int = number) -> None:
            done = (lambda: "failed" in store.kinds()) if number == 0 else (lambda: len(time.waits) > number)
            await crash(world.runner(asks(flaky), store=store), ["a"], world.out, when=done)

        asyncio.run(once())
        time.advance(2)
    time.held = False
    run(world.runner(asks(flaky)), ["a"], world.out)
    assert time.waits == [8, 6, 4, 2][: crashes + 1]
    assert flaky.attempts == [1, 2]


# --- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"attempts": 0}, "attempts=0"),
        ({"attempts": True}, "attempts=True"),
        ({"attempts": 2.0}, "attempts=2.0"),
        ({"backoff": -1}, "backoff=-1"),
        ({"backoff": math.nan}, "backoff=nan"),
        ({"backoff": "1"}, "backoff='1'"),
        ({"max_backoff": math.inf}, "max_backoff=inf"),
        ({"factor": 0.5}, "factor=0.5"),
        ({"factor": math.inf}, "factor=inf"),
        ({"jitter": 1.1}, "jitter=1.1"),
        ({"jitter": -0.1}, "jitter=-0.1"),
        ({"retry_on": ()}, r"retry_on=\(\)"),
        ({"retry_on": BaseException}, "retry_on=.*BaseException"),
        ({"retry_on": asyncio.CancelledError}, "retry_on=.*CancelledError"),
        ({"retry_on": (OSError, KeyboardInterrupt)}, "retry_on=.*KeyboardInterrupt"),
        ({"retry_on": int}, "retry_on=.*int"),
        ({"retry_on": 429}, "retry_on=429"),
        ({"retry_on": None}, "retry_on=None"),
    ],
)
def test_a_wrong_policy_is_refused_where_it_is_written(wrong: Any, named: str) -> None:
    with pytest.raises(DefinitionError, match=rf"^RetryPolicy\({named}"):
        RetryPolicy(**wrong)


@pytest.mark.parametrize("wrong", [3, True, False, "3", RetryPolicy, {"attempts": 3}])
def test_what_is_no_policy_is_refused_before_anything_is_called(world: World, wrong: Any) -> None:
    flaky = Flaky(0)
    with pytest.raises(ActionError, match=r"is no RetryPolicy: write retry=RetryPolicy\(attempts=3\)"):
        run(world.runner(asks(flaky, retry=wrong)), ["a"], world.out)
    assert flaky.attempts == []


@given(
    backoff=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    jitter=st.floats(0, 1),
    longest=st.floats(0, 1e6),
    failures=st.integers(1, 10_000),
)
def test_no_wait_is_negative_or_longer_than_the_longest(
    backoff: float, factor: float, jitter: float, longest: float, failures: int
) -> None:
    policy = RetryPolicy(backoff=backoff, factor=factor, jitter=jitter, max_backoff=longest)
    assert 0 <= policy.wait(failures) <= policy.longest_wait * (1 + 1e-9)


def test_waits_grow_by_the_factor_and_jitter_spreads_them() -> None:
    assert [RetryPolicy(jitter=0).wait(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [RetryPolicy(jitter=0, factor=1, backoff=5).wait(n) for n in (1, 2, 99)] == [5, 5, 5]
    waits = {RetryPolicy(jitter=0.5).wait(1) for _ in range(50)}
    assert len(waits) > 1
    assert all(0.5 <= wait <= 1.5 for wait in waits)


def test_a_function_with_a_parameter_of_the_same_name_is_not_misunderstood(world: World) -> None:
    async def ask(retry: int = 0) -> int:
        return retry

    async def body(value: Any, ctx: RunnerContext) -> Any:
        with pytest.raises(DefinitionError, match=r"pass the function's in kwargs=\{'retry': \.\.\.\}"):
            ctx.durable_execute(ask, retry=5, name="ask")  # type: ignore[call-overload]
        return await ctx.durable_execute(ask, name="ask", retry=POLICY, kwargs={"retry": 5})

    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [5]
    assert json.loads(world.out.read_text()) == 5
