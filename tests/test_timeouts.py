"""``timeout=``: what takes too long fails, is retried, or is in doubt, by its effect; what comes late is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dalsegno import (
    ActionError,
    Agent,
    DefinitionError,
    DidNotHappen,
    Happened,
    InputEvent,
    Operator,
    OutputEvent,
    RetryPolicy,
    RunnerContext,
    Unknown,
    action,
    current_call,
)
from tests.helpers import PATIENCE, Scripted, Tools, World, crashed, for_ever, run, until
from tests.test_parking import resolve

SHORT = 0.02
AT_ONCE = RetryPolicy(attempts=3, backoff=0)
HARMLESS: list[Any] = ["read", "idempotent"]


class Threads:
    """A sync tool that stays in its thread until the test lets it go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.attempts: list[int] = []
        self.late: list[int] = []
        self.quick_from = math.inf
        self.raises: BaseException | None = None

    def end(self) -> None:
        """Let them go, and wait until they are gone."""
        self.go.set()
        for thread in threading.enumerate():
            if thread.name.startswith("dalsegno-call"):
                thread.join(PATIENCE)

    def ask(self, what: Any) -> str:
        attempt = current_call().attempt
        self.attempts.append(attempt)
        if attempt < self.quick_from:
            self.go.wait(PATIENCE)
            self.late.append(current_call().attempt)
            if self.raises is not None:
                raise self.raises
        return f"answer {attempt} to {what}"


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.go.set()


def calls(function: Any, **options: Any) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(function, value, **options)

    return Scripted(body)


# --- read and idempotent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", HARMLESS)
def test_a_harmless_call_that_takes_too_long_fails_and_says_which_and_how_long(
    world: World, tools: Tools, effect: Any
) -> None:
    tools.hang_on = {"a"}
    with pytest.raises(
        ActionError, match=r"TimeoutError: the call tests.helpers:Tools.call did not end within"
    ) as caught:
        run(world.runner(calls(tools.call, effect=effect, timeout=SHORT)), ["a"], world.out)
    assert type(caught.value.__cause__) is TimeoutError
    assert "its timeout of 0.02 s" in str(caught.value)
    tools.hang_on = set()
    run(world.runner(calls(tools.call, effect=effect, timeout=PATIENCE)), ["a"], world.out)
    assert world.outputs() == ["done a"]
    assert tools.made == ["a", "a"]


@pytest.mark.parametrize("effect", HARMLESS)
def test_a_timeout_that_was_caught_replays_without_a_call(world: World, tools: Tools, effect: Any) -> None:
    seen: list[str] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        try:
            await ctx.durable_execute(tools.call, "slow", effect=effect, timeout=SHORT)
        except TimeoutError as error:
            seen.append(str(error))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    tools.hang_on = {"slow", "end"}
    crashed(world.runner(Scripted(body)), [1], world.out, when=lambda: "end" in tools.hanging)
    tools.hang_on = set()
    run(world.runner(Scripted(body)), [1], world.out)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert tools.made == ["slow", "end", "end"]


@pytest.mark.parametrize("effect", HARMLESS)
def test_the_limit_is_for_each_attempt_and_is_retried_if_the_policy_covers_it(world: World, effect: Any) -> None:
    attempts: list[int] = []

    async def slow_at_first(what: Any) -> str:
        attempts.append(current_call().attempt)
        if len(attempts) < 3:
            await for_ever()
        return f"done {what}"

    options = {"name": "slow", "effect": effect, "timeout": SHORT}
    run(world.runner(calls(slow_at_first, retry=AT_ONCE, **options)), ["a"], world.out)
    assert (attempts, world.outputs()) == ([1, 2, 3], ["done a"])
    attempts.clear()
    only_keys = RetryPolicy(retry_on=KeyError)
    with pytest.raises(ActionError, match="TimeoutError"):
        run(world.runner(calls(slow_at_first, retry=only_keys, **options), "other"), ["a"])
    assert attempts == [1]


def test_a_quick_call_and_its_own_timeout_error_are_as_without_a_limit(world: World, tools: Tools) -> None:
    tools.fail_on = {"a": TimeoutError("the server says so")}
    with pytest.raises(ActionError, match="TimeoutError: the server says so"):
        run(world.runner(calls(tools.call, timeout=PATIENCE)), ["a"], world.out)
    tools.fail_on = {}
    run(world.runner(calls(tools.call, timeout=PATIENCE)), ["a"], world.out)
    assert world.outputs() == ["done a"]


def test_a_function_that_cleans_up_is_let_to_and_an_error_of_it_is_the_cause(world: World) -> None:
    async def cleans_up(what: Any) -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0)
            raise OSError("connection lost while closing")

    with pytest.raises(ActionError, match="TimeoutError") as caught:
        run(world.runner(calls(cleans_up, name="cleans up", effect="read", timeout=SHORT)), ["a"])
    error = caught.value.__cause__
    assert isinstance(error, TimeoutError)
    assert isinstance(error.__cause__, OSError)


def test_a_result_in_spite_of_the_cancellation_is_the_result(world: World) -> None:
    async def saves_itself(what: Any) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await for_ever()
        return "what there is so far"

    run(world.runner(calls(saves_itself, name="saves itself", timeout=SHORT)), ["a"], world.out)
    assert world.outputs() == ["what there is so far"]


@pytest.mark.parametrize("effect", HARMLESS)
def test_the_late_result_of_a_thread_is_dropped(world: World, threads: Threads, tools: Tools, effect: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        answer = await ctx.durable_execute(
            threads.ask, value, effect=effect, timeout=0.2, retry=RetryPolicy(attempts=2, backoff=0)
        )
        threads.go.set()
        await until(lambda: threads.late)
        await asyncio.sleep(0)
        return [answer, await ctx.durable_execute(tools.call, "end", effect="idempotent")]

    threads.quick_from = 2
    store = world.store()
    run(world.runner(Scripted(body), store=store), ["a"], world.out)
    assert world.outputs() == [["answer 2 to a", "done end"]]
    assert threads.attempts == [1, 2]
    assert threads.late == [1]  # to whom it is still the first attempt
    assert sum(kind in ("called", "completed") for kind in store.kinds()) == 2


def test_a_plain_def_action_has_the_limit_too(world: World, threads: Threads) -> None:
    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            try:
                ctx.durable_execute_sync(threads.ask, "a", effect="read", timeout=SHORT)
            except TimeoutError as error:
                ctx.send_event(OutputEvent(output=type(error).__name__))

    run(world.runner(Plain()), [1], world.out)
    assert world.outputs() == ["TimeoutError"]


def test_what_waits_for_a_thread_when_its_time_is_up_never_starts_and_is_in_no_doubt(
    world: World, threads: Threads, tools: Tools
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        blocked = [
            asyncio.ensure_future(ctx.durable_execute(threads.ask, n, effect="read", name="ask")) for n in range(2)
        ]
        await until(lambda: len(threads.attempts) == 2)
        try:
            await ctx.durable_execute(tools.call_sync, "late", timeout=SHORT)
        except TimeoutError as error:
            threads.go.set()
            await asyncio.gather(*blocked)
            return str(error)

    report = run(world.runner(Scripted(body), max_in_flight=1), [1], world.out)
    assert report.parked == []
    (said,) = world.outputs()
    assert "was not begun within its timeout of 0.02 s, because all threads were busy" in said
    assert tools.made == []


# --- once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, Unknown("no log"), OSError("no route")])
def test_a_once_call_that_nobody_can_tell_of_is_parked(world: World, tools: Tools, answer: Any) -> None:
    async def find(what: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    tools.hang_on = {"a"}
    agent = calls(tools.call, timeout=SHORT, retry=AT_ONCE, reconcile=find if answer is not None else None)
    (parked,) = run(world.runner(agent), ["a"], world.out).parked
    assert "the call tests.helpers:Tools.call did not end within its timeout of 0.02 s" in parked.reason
    assert tools.made == ["a"]
    tools.hang_on = set()
    settled = calls(tools.call, timeout=SHORT, reconcile=lambda what: Happened("found"))
    assert run(world.runner(settled), ["a"], world.out).parked == []
    assert world.outputs() == ["found"]
    assert tools.made == ["a"]


@pytest.mark.parametrize("happened", [True, False])
def test_a_once_call_that_took_too_long_is_resolved_by_a_person(world: World, tools: Tools, happened: bool) -> None:
    agent = calls(tools.call, timeout=SHORT, retry=AT_ONCE)
    tools.hang_on = {"a"}
    assert len(run(world.runner(agent), ["a"], world.out).parked) == 1
    assert resolve(world, None, happened=happened, result="receipt 7")
    tools.hang_on = set()
    assert run(world.runner(agent), ["a"], world.out).parked == []
    assert world.outputs() == ["receipt 7" if happened else "done a"]
    assert tools.made == (["a"] if happened else ["a", "a"])


def test_a_once_call_that_happened_all_the_same_has_its_result_at_once(world: World, tools: Tools) -> None:
    store, asked = world.store(), []

    async def find(what: Any) -> Any:
        asked.append((what, current_call().attempt))
        return Happened(("found", 1))

    tools.hang_on = {"a"}
    run(world.runner(calls(tools.call, timeout=SHORT, reconcile=find), store=store), ["a"], world.out)
    assert world.outputs() == [["found", 1]]
    assert asked == [("a", 1)]
    assert [body.get("by") for body in store.bodies()] == [None, "reconcile", None]


def test_a_once_call_that_did_not_happen_has_failed_and_is_not_made_for_ever(world: World, tools: Tools) -> None:
    agent = calls(tools.call, timeout=SHORT, retry=AT_ONCE, reconcile=lambda what: DidNotHappen())
    tools.hang_on = {"a"}
    with pytest.raises(ActionError, match="TimeoutError"):
        run(world.runner(agent), ["a"], world.out)
    assert tools.made == ["a"] * 3
    with pytest.raises(ActionError, match="TimeoutError"):
        run(world.runner(calls(tools.call, timeout=SHORT, reconcile=lambda what: DidNotHappen())), ["a"], world.out)
    assert tools.made == ["a"] * 4
    tools.hang_on = set()
    run(world.runner(agent), ["a"], world.out)
    assert world.outputs() == ["done a"]


def test_a_crash_after_the_limit_while_reconcile_is_asked_leaves_the_call_in_doubt(world: World, tools: Tools) -> None:
    async def find(what: Any) -> Any:
        await tools.call("find")
        return Happened("found")

    agent = calls(tools.call, timeout=SHORT, reconcile=find)
    tools.hang_on = {"a", "find"}
    crashed(world.runner(agent), ["a"], world.out, when=lambda: "find" in tools.hanging)
    tools.hang_on = set()
    run(world.runner(agent), ["a"], world.out)
    assert tools.made == ["a", "find", "find"]
    assert world.outputs() == ["found"]


def test_a_once_call_that_still_runs_in_its_thread_is_parked_and_reconcile_is_not_asked(
    world: World, threads: Threads
) -> None:
    asked: list[Any] = []

    def find(what: Any) -> Any:
        asked.append(what)
        return Happened("found")

    agent = calls(threads.ask, timeout=SHORT, reconcile=find)
    (parked,) = run(world.runner(agent), ["a"], world.out).parked
    assert "may still happen, because it runs in a thread, which nothing can end" in parked.reason
    assert asked == []
    # Run again in the same process, while it still runs.
    (again,) = run(world.runner(agent), ["a"], world.out).parked
    assert again.reason == parked.reason
    assert asked == []
    threads.end()
    run(world.runner(agent), ["a"], world.out)
    assert (asked, world.outputs()) == (["a"], ["found"])
    assert threads.attempts == [1]


def held_in_thread(threads: Threads, **options: Any) -> Scripted:
    """A `once` call that goes on in its thread; the message of key "b" keeps the run from ending."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value == "b":
            return await ctx.wait_for("end")
        try:
            return await ctx.durable_execute(threads.ask, value, timeout=SHORT, **options)
        except ValueError as error:
            return str(error)

    return Scripted(body)


def run_while_held(
    world: World, threads: Threads, agent: Scripted, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Run until "a" is parked, do what happens *meanwhile*, which is taken in, and only then let the thread end."""

    async def main() -> None:
        runner = world.runner(agent)
        running = asyncio.ensure_future(runner.run_async(["a", "b"], world.out, key=lambda value: value, wait=True))

        def is_parked() -> bool:
            return runner._pipeline is not None and {each.key for each in runner._pipeline.parked()} == {"a", "b"}

        await until(is_parked)
        pipeline = runner._pipeline
        assert pipeline is not None
        await asyncio.to_thread(meanwhile)
        await pipeline._parking.take_up()
        await until(lambda: not pipeline._workers)
        assert is_parked()
        threads.go.set()
        await until(world.outputs)
        await runner.operator().signal_async("b", "end", "end")
        async with asyncio.timeout(PATIENCE):
            assert (await running).parked == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_once_call_that_ends_in_its_thread_after_all_has_its_outcome(world: World, threads: Threads) -> None:
    asked: list[Any] = []
    run_while_held(world, threads, held_in_thread(threads, reconcile=asked.append))
    assert world.outputs() == ["answer 1 to a", "end"]
    assert (threads.attempts, asked) == ([1], [])
    run(world.runner(held_in_thread(threads)), ["a", "b"], world.out, key=lambda value: value)
    assert world.outputs() == ["answer 1 to a", "end"]


@pytest.mark.slow
def test_what_a_thread_raises_after_the_limit_is_what_the_action_gets(world: World, threads: Threads) -> None:
    threads.raises = ValueError("no such account")
    run_while_held(world, threads, held_in_thread(threads))
    assert world.outputs() == ["no such account", "end"]
    assert threads.attempts == [1]


@pytest.mark.slow
def test_nobody_can_say_that_a_call_did_not_happen_whose_thread_still_runs(world: World, threads: Threads) -> None:
    """It was true when it was said. Made again, the call would happen twice."""
    run_while_held(world, threads, held_in_thread(threads), lambda: resolve(world, "a", happened=False))
    assert world.outputs() == ["answer 1 to a", "end"]
    assert threads.attempts == [1]


@pytest.mark.slow
def test_what_happened_according_to_a_person_waits_for_the_thread_and_counts(world: World, threads: Threads) -> None:
    answer = functools.partial(resolve, world, "a", happened=True, result="receipt 7")
    run_while_held(world, threads, held_in_thread(threads), answer)
    assert world.outputs() == ["receipt 7", "end"]
    assert threads.attempts == [1]


@pytest.mark.slow
def test_a_thread_that_ends_without_an_outcome_leaves_the_call_to_reconcile(world: World, threads: Threads) -> None:
    threads.raises = SystemExit(3)
    run_while_held(world, threads, held_in_thread(threads, reconcile=lambda what: Happened("found")))
    assert world.outputs() == ["found", "end"]


@pytest.mark.slow
def test_another_answer_about_the_message_does_not_let_the_call_be_reconciled(world: World, threads: Threads) -> None:
    """The message also waits for a signal; when that comes, it is run again, and the thread still runs."""
    asked: list[Any] = []

    def find(what: Any) -> Any:
        asked.append(what)
        return DidNotHappen()

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value == "b":
            return await ctx.wait_for("end")
        async with asyncio.TaskGroup() as group:
            call = group.create_task(ctx.durable_execute(threads.ask, value, timeout=SHORT, reconcile=find))
            await until(lambda: threads.attempts)
            wait = group.create_task(ctx.wait_for("approve"))
        return [call.result(), wait.result()]

    def approve() -> None:
        Operator(job="job", store=world.store()).signal("a", "approve", "yes")

    run_while_held(world, threads, Scripted(body), approve)
    assert world.outputs() == [["answer 1 to a", "yes"], "end"]
    assert (threads.attempts, asked) == ([1], [])


def test_a_failure_that_was_provoked_by_the_limit_is_no_word_of_the_callee(world: World) -> None:
    async def fails_when_cancelled(what: Any) -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            raise ConnectionError("cut off") from None

    (parked,) = run(world.runner(calls(fails_when_cancelled, name="x", timeout=SHORT, retry=AT_ONCE)), ["a"]).parked
    assert "did not end within its timeout" in parked.reason


def test_a_function_in_a_thread_that_returns_a_coroutine_can_be_cut_off(world: World, tools: Tools) -> None:
    def ask(what: Any) -> Any:
        return tools.call(what)

    tools.hang_on = {"a"}
    agent = calls(ask, name="ask", timeout=0.2, reconcile=lambda what: Happened("found"))
    run(world.runner(agent), ["a"], world.out)
    assert world.outputs() == ["found"]


def test_an_other_call_beside_it_ends_before_the_message_is_parked(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.durable_execute(tools.call, "late", timeout=SHORT))
            other = group.create_task(ctx.durable_execute(tools.call, "slow"))
        return other.result()

    tools.hang_on, tools.delays = {"late"}, {"slow": 0.1}
    assert len(run(world.runner(Scripted(body)), [1], world.out).parked) == 1
    assert tools.count("slow") == 1
    states = world.recorded()[b"null"]
    assert sorted(call.status.value for call in states[0].calls.values()) == ["completed", "requested"]


# --- other limits, odd limits ---------------------------------------------------------------------------------------


def test_a_time_limit_of_the_action_around_it_works_as_before(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> str:
        try:
            async with asyncio.timeout(SHORT):
                await ctx.durable_execute(tools.call, "slow", effect="read", timeout=PATIENCE)
        except TimeoutError as error:
            return f"limit of the action: {error}"
        return "no limit"

    tools.hang_on = {"slow"}
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == ["limit of the action: "]


def test_a_crash_or_a_cancellation_of_a_call_with_a_limit_is_not_its_outcome(world: World, tools: Tools) -> None:
    store = world.store()
    tools.hang_on = {"a"}
    agent = calls(tools.call, effect="idempotent", timeout=PATIENCE, retry=AT_ONCE)
    crashed(world.runner(agent, store=store), ["a"], world.out, when=lambda: bool(tools.hanging))
    assert store.kinds() == ["requested"]
    tools.hang_on = set()
    run(world.runner(agent), ["a"], world.out)
    assert world.outputs() == ["done a"]


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, "5", True, False, 0.0, 1e12, [1]])
def test_a_wrong_limit_is_refused_before_anything_is_called(world: World, tools: Tools, wrong: Any) -> None:
    with pytest.raises(
        ActionError, match=r"timeout=.*give the seconds that one attempt of the call may take"
    ) as caught:
        run(world.runner(calls(tools.call, timeout=wrong)), ["a"])
    assert isinstance(caught.value.__cause__, DefinitionError)
    assert tools.made == []


def test_a_function_with_a_timeout_of_its_own_gets_it_through_kwargs(world: World) -> None:
    def fetch(timeout: float) -> float:
        return timeout

    async def body(value: Any, ctx: RunnerContext) -> Any:
        with pytest.raises(DefinitionError, match=r"pass the function's in kwargs=\{'timeout': \.\.\.\}"):
            ctx.durable_execute(fetch, timeout=5, name="fetch")  # type: ignore[unused-coroutine]
        return await ctx.durable_execute(fetch, timeout=PATIENCE, name="fetch", kwargs={"timeout": 5})

    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [5]
