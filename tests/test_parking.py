"""Messages that cannot go on until somebody decides: they wait, are in doubt, fail, or kill the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dalsegno import ActionError, Agent, DefinitionError, InputEvent, LocalRunner, OutputEvent, RunnerContext, action
from dalsegno.core import codec
from dalsegno.core.decisions import Answer, Resolved, Retried, Signalled
from dalsegno.core.identity import key_bytes
from dalsegno.core.records import TaskActionState, fold
from dalsegno.runners import checkpoints, inbox, parking
from dalsegno.stores.base import Decision
from tests.helpers import PATIENCE, Scripted, Tools, World, crashed, run, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_LISTEN_SECONDS", 0.01)


def state_of(world: World, key: Any) -> TaskActionState:
    """The action task of *key* that is parked, as an outsider sees it."""
    with world.store().inspect() as inspector:
        (state,) = [state for state in fold(inspector.records("job", key_bytes(key))) if state.parked]
    return state


def decide(world: World, state: TaskActionState, answer: Answer) -> bool:
    with world.store().inspect() as inspector:
        return inspector.decide("job", Decision(state.key, state.message, answer.target, answer.body))


def signal(world: World, key: Any, value: Any) -> bool:
    state = state_of(world, key)
    assert state.parked is not None
    assert state.parked.call is not None
    return decide(world, state, Signalled(state.task, state.parked.call, codec.to_tree(value)))


def retry(world: World, key: Any) -> bool:
    state = state_of(world, key)
    return decide(world, state, Retried(state.task, state.failures))


def resolve(world: World, key: Any, *, happened: bool, result: Any = None) -> bool:
    state = state_of(world, key)
    assert state.parked is not None
    assert state.parked.call is not None
    call = state.calls[state.parked.call]
    return decide(world, state, Resolved(state.task, call.number, call.attempt, happened, codec.to_tree(result)))


def asking(tools: Tools, **options: Any) -> Any:
    """Asks for approval of the messages of key "a"; the others need none."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, ("before", value["id"]), effect="idempotent")
        decision = await ctx.wait_for("approve", **options) if value["ask"] else "-"
        await ctx.durable_execute(tools.call, ("after", value["id"]), effect="idempotent")
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        return [value["id"], decision, n]

    return Scripted(body)


def ask(*ids: int, key: str = "a", asked: bool = True) -> list[dict[str, Any]]:
    return [{"id": n, "key": key, "ask": asked} for n in ids]


# Waiting for a signal.


def test_a_message_waits_for_its_signal_and_other_keys_go_on(world: World, tools: Tools) -> None:
    source = ask(1) + ask(2, asked=False) + ask(3, key="b", asked=False)
    report = run(world.runner(asking(tools)), source, world.out, key="key")
    assert [(parked.key, parked.message_id, parked.why) for parked in report.parked] == [("a", "0", "waiting")]
    assert "waits for the signal 'approve'" in report.parked[0].reason
    assert report.waiting == 1
    assert world.outputs() == [[3, "-", 1]]

    assert signal(world, "a", {"by": ("Ann", None)})
    report = run(world.runner(asking(tools)), source, world.out, key="key")
    assert (report.parked, report.waiting) == ([], 0)
    assert world.outputs() == [[3, "-", 1], [1, {"by": ["Ann", None]}, 1], [2, "-", 2]]
    assert sorted(tools.made) == [("after", 1), ("after", 2), ("after", 3), ("before", 1), ("before", 2), ("before", 3)]
    assert run(world.runner(asking(tools)), source, world.out, key="key").messages == 0


def test_the_action_gets_the_very_value_that_was_sent(world: World) -> None:
    got: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> Any:
        got.append(await ctx.wait_for("it"))

    run(world.runner(Scripted(body)), [1], key=None)
    assert signal(world, None, ("Ann", {1: 2.5}, b"x"))
    run(world.runner(Scripted(body)), [1], key=None)
    assert got == [("Ann", {1: 2.5}, b"x")]


def test_a_second_answer_is_refused_before_and_after_the_first_is_taken_up(world: World, tools: Tools) -> None:
    run(world.runner(asking(tools)), ask(1), world.out, key="key")
    state = state_of(world, "a")
    assert state.parked is not None
    assert state.parked.call is not None
    yes, no = (Signalled(state.task, state.parked.call, value) for value in ("yes", "no"))
    assert decide(world, state, yes)
    assert not decide(world, state, no)
    assert not decide(world, state, yes)
    run(world.runner(asking(tools)), ask(1), world.out, key="key")
    assert world.outputs() == [[1, "yes", 1]]


def test_a_running_job_takes_the_answer_up(world: World, tools: Tools) -> None:
    source = ask(1) + ask(2) + ask(3, asked=False)

    runner = world.runner(asking(tools))

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            running = asyncio.ensure_future(runner.run_async(source, world.out, key="key", wait=True))
            for message, answer in ("0", "first"), ("1", "second"):

                def waits(message: str = message) -> bool:
                    parked = runner._pipeline.parked() if runner._pipeline else []
                    return [found.message_id for found in parked] == [message]

                await until(waits)
                assert await asyncio.to_thread(signal, world, "a", answer)
            report = await running
            assert (report.parked, report.waiting) == ([], 0)

    asyncio.run(main())
    assert world.outputs() == [[1, "first", 1], [2, "second", 2], [3, "-", 3]]
    assert len(tools.made) == 6


def test_nobody_answered_in_time(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        try:
            return await ctx.wait_for("approve", timeout=timedelta(minutes=5))
        except TimeoutError as error:
            return str(error)

    def run_at(minutes: float) -> Any:
        runner = world.runner(Scripted(body))
        runner._clock = lambda: NOW + timedelta(minutes=minutes)
        return run(runner, ask(1), world.out, key="key")

    assert len(run_at(0).parked) == 1
    assert len(run_at(4).parked) == 1, "the time counts from the first time that the action got there"
    assert run_at(5).parked == []
    assert world.outputs() == ["nobody sent the signal 'approve' in time"]


def test_a_wait_that_was_too_late_and_left_the_action_waits_once_more_when_it_is_retried(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.wait_for("approve", timeout=timedelta(minutes=5))

    def parked_at(minutes: float) -> list[str]:
        runner = world.runner(Scripted(body), on_failure="park")
        runner._clock = lambda: NOW + timedelta(minutes=minutes)
        return [parked.why for parked in run(runner, ask(1), world.out, key="key").parked]

    assert parked_at(0) == ["waiting"]
    assert parked_at(6) == ["failed"]
    assert parked_at(7) == ["failed"]
    assert retry(world, "a")
    assert parked_at(8) == ["waiting"]
    assert parked_at(12) == ["waiting"]
    assert signal(world, "a", "at last")
    assert parked_at(13) == []
    assert world.outputs() == ["at last"]


def test_the_time_of_a_waiting_message_comes_while_the_job_runs(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        with pytest.raises(TimeoutError):
            await ctx.wait_for("approve", timeout=0.05)
        return "too late"

    run(world.runner(Scripted(body)), ask(1), world.out, key="key", wait=True)
    assert world.outputs() == ["too late"]


def test_a_wait_without_time_does_not_wait(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        with pytest.raises(TimeoutError):
            await ctx.wait_for("approve", timeout=0)
        return "at once"

    assert run(world.runner(Scripted(body)), ask(1), world.out, key="key").parked == []


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "5", timedelta(seconds=-1)])
def test_a_wrong_time_limit_is_refused(world: World, timeout: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        with pytest.raises(DefinitionError, match="give a number of seconds"):
            await ctx.wait_for("approve", timeout=timeout)

    run(world.runner(Scripted(body)), [1])


@pytest.mark.parametrize("name", ["", 5, None])
def test_a_wrong_name_is_refused(world: World, name: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        with pytest.raises(DefinitionError, match=r"the name of the signal in ctx\.wait_for"):
            await ctx.wait_for(name)

    run(world.runner(Scripted(body)), [1])


def test_a_plain_action_cannot_wait(world: World) -> None:
    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            with pytest.raises(DefinitionError, match="declare it with async def to wait"):
                ctx.wait_for("approve").send(None)

    run(world.runner(Plain()), [1])


def test_waits_one_after_the_other_and_of_one_name_are_several_questions(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [await ctx.wait_for(name) for name in ("one", "two", "one")]

    for answer in "xyz":
        run(world.runner(Scripted(body)), ask(1), world.out, key="key")
        assert signal(world, "a", answer)
    run(world.runner(Scripted(body)), ask(1), world.out, key="key")
    assert world.outputs() == [["x", "y", "z"]]


def test_what_is_in_flight_beside_a_wait_is_recorded_first(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(ctx.durable_execute(tools.call, "beside", effect="idempotent"))
            wait = group.create_task(ctx.wait_for("it"))
        return [call.result(), wait.result()]

    assert len(run(world.runner(Scripted(body)), ask(1), world.out, key="key").parked) == 1
    assert signal(world, "a", 7)
    assert run(world.runner(Scripted(body)), ask(1), world.out, key="key").parked == []
    assert tools.made == ["beside"]
    assert world.outputs() == [["done beside", 7]]


@pytest.mark.parametrize("answered", [False, True])
def test_waiting_survives_crashes_with_and_without_an_answer(world: World, tools: Tools, answered: bool) -> None:
    tools.hang_on.add("after")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        decision = await ctx.wait_for("approve")
        await ctx.durable_execute(tools.call, "after", effect="read")
        return decision

    run(world.runner(Scripted(body)), ask(1), world.out, key="key")
    if answered:
        assert signal(world, "a", "yes")
        crashed(world.runner(Scripted(body)), ask(1), world.out, key="key", when=lambda: tools.count("after") == 1)
        tools.hang_on.clear()
    else:
        runner = world.runner(Scripted(body))
        crashed(runner, ask(1), key="key", wait=True, when=lambda: bool(runner._pipeline and runner._pipeline.parked()))
        tools.hang_on.clear()
        assert signal(world, "a", "yes")
    run(world.runner(Scripted(body)), ask(1), world.out, key="key")
    assert world.outputs() == ["yes"]


def test_stopping_ends_a_run_that_waits(world: World, tools: Tools) -> None:
    async def main() -> None:
        runner = world.runner(asking(tools))
        running = asyncio.ensure_future(runner.run_async(ask(1), world.out, key="key", wait=True))
        await until(lambda: runner._pipeline is not None and runner._pipeline.parked())
        runner.stop()
        async with asyncio.timeout(PATIENCE):
            report = await running
        assert report.stopped_by == "stop()"

    asyncio.run(main())


class Plain(Agent):
    """Asks in a plain ``def``, and again if *twice*."""

    def __init__(self, tools: Tools, *, twice: bool = False, **options: Any) -> None:
        self.tools, self.twice, self.options = tools, twice, options

    @action(InputEvent)
    def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        ctx.durable_execute_sync(self.tools.call_sync, "before", effect="idempotent")
        try:
            answers = [ctx.wait_for_sync("approve", **self.options) for _ in range(1 + self.twice)]
        except TimeoutError as error:
            answers = [str(error)]
        ctx.durable_execute_sync(self.tools.call_sync, "after", effect="idempotent")
        ctx.send_event(OutputEvent(output=answers))


def test_a_plain_def_action_waits_over_restarts_and_for_each_of_its_signals(world: World, tools: Tools) -> None:
    for answer in ({"by": "Ann"}, "again"):
        (parked,) = run(world.runner(Plain(tools, twice=True)), [1], world.out).parked
        assert (parked.why, world.outputs()) == ("waiting", [])
        assert signal(world, None, answer)
    assert run(world.runner(Plain(tools, twice=True)), [1], world.out).parked == []
    assert world.outputs() == [[{"by": "Ann"}, "again"]]
    assert tools.made == ["before", "after"]


def test_a_plain_def_action_that_waits_holds_no_thread(world: World, tools: Tools) -> None:
    """More messages wait than there are threads, and the job goes on all the same."""
    runner = world.runner(Plain(tools), max_in_flight=1)
    assert len(run(runner, range(20), key=lambda n: n).parked) == 20


def test_a_plain_def_action_that_swallows_everything_is_parked_all_the_same(world: World, tools: Tools) -> None:
    class Swallows(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            answer = "none"
            with contextlib.suppress(BaseException):
                answer = ctx.wait_for_sync("approve")
            with contextlib.suppress(BaseException):
                ctx.durable_execute_sync(tools.call_sync, "after")
            ctx.send_event(OutputEvent(output=answer))

    assert len(run(world.runner(Swallows()), [1], world.out).parked) == 1
    assert (tools.made, world.outputs()) == ([], [])
    assert signal(world, None, "yes")
    assert run(world.runner(Swallows()), [1], world.out).parked == []
    assert (tools.made, world.outputs()) == (["after"], ["yes"])


def test_a_plain_def_action_waits_no_longer_than_its_time(world: World, tools: Tools) -> None:
    def run_at(minutes: float) -> Any:
        runner = world.runner(Plain(tools, timeout=300))
        runner._clock = lambda: NOW + timedelta(minutes=minutes)
        return run(runner, [1], world.out)

    assert len(run_at(0).parked) == len(run_at(4.9).parked) == 1
    assert run_at(5).parked == []
    assert world.outputs() == [["nobody sent the signal 'approve' in time"]]


def test_each_kind_of_action_is_told_its_own_way_to_wait(world: World) -> None:
    class WrongInThread(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            asyncio.run(ctx.wait_for("approve"))

    async def wrong(value: Any, ctx: RunnerContext) -> None:
        ctx.wait_for_sync("approve")

    with pytest.raises(ActionError, match=r"plain def, where nothing can be awaited: call ctx\.wait_for_sync"):
        run(world.runner(WrongInThread()), [1])
    with pytest.raises(ActionError, match=r"action 'act' is async: write await ctx\.wait_for"):
        run(world.runner(Scripted(wrong), "other"), [1])


# Those that wait behind.


@pytest.mark.parametrize("interval", [0.001, 3600.0])
def test_many_messages_behind_a_parked_one_come_back_in_order_and_in_chunks(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    monkeypatch.setattr(inbox, "_CHUNK", 7)
    monkeypatch.setattr(inbox, "_SET_ASIDE_IN_MEMORY", 20)
    source = ask(0) + ask(*range(1, 50), asked=False) + ask(50) + ask(*range(51, 70), asked=False)

    async def main() -> None:
        runner = world.runner(asking(tools), checkpoint_interval=interval)
        running = asyncio.ensure_future(runner.run_async(source, world.out, key="key", wait=True))
        for message in "0", "50":

            def waits(message: str = message) -> bool:
                parked = runner._pipeline.parked() if runner._pipeline else []
                return [found.message_id for found in parked] == [message]

            await until(waits)
            await until(lambda: runner._pipeline is None or runner._pipeline.reading.records == 70)
            assert await asyncio.to_thread(signal, world, "a", "go")
        async with asyncio.timeout(PATIENCE):
            report = await running
        assert (report.parked, report.waiting, report.messages) == ([], 0, 70)

    asyncio.run(main())
    assert [output[0] for output in world.outputs()] == [*range(70)]
    assert [output[2] for output in world.outputs()] == [*range(1, 71)]


@pytest.mark.parametrize("ids", [None, "id"])
def test_messages_that_the_reader_has_yet_to_take_from_the_inbox_run_once(world: World, ids: str | None) -> None:
    """A key is taken up while the reader waits for room, with later messages of that key before it."""
    go: asyncio.Event | None = None
    made = []

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value["ask"]:
            await ctx.wait_for("approve")
        if value["key"] == "b" and go is not None:
            await go.wait()
        made.append(value["id"])
        return value["id"]

    of_b = ask(1, key="b") + ask(*range(2, 40), key="b", asked=False)
    source = ask(0) + of_b + ask(40, 41, asked=False)
    run(world.runner(Scripted(body)), source, world.out, key="key", message_id=ids)
    assert world.outputs() == []
    assert signal(world, "b", "go")

    async def main() -> None:
        nonlocal go
        go = asyncio.Event()
        runner = world.runner(Scripted(body), max_in_flight=2)
        running = asyncio.ensure_future(runner.run_async(source, world.out, key="key", message_id=ids, wait=True))
        await until(lambda: runner._pipeline is not None and runner._pipeline._inbox.is_full)
        assert await asyncio.to_thread(signal, world, "a", "go")
        await until(lambda: 0 in made)
        go.set()
        async with asyncio.timeout(PATIENCE):
            report = await running
        assert (report.parked, report.waiting, report.messages) == ([], 0, 42)

    asyncio.run(main())
    assert sorted(made) == [*range(42)]
    assert [number for number in made if number in (0, 40, 41)] == [0, 40, 41]
    assert sorted(world.outputs()) == [*range(42)]


def test_nothing_is_lost_when_a_message_is_parked_while_a_checkpoint_is_written(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the checkpoint being written has in its inbox is not there yet, so it must stay in memory."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    commit = checkpoints.CheckpointFile.commit
    loop: asyncio.AbstractEventLoop
    held = False

    def slow(self: checkpoints.CheckpointFile, checkpoint: checkpoints.Checkpoint) -> None:
        nonlocal held
        if checkpoint.inbox and not held:
            held = True
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(PATIENCE)
        commit(self, checkpoint)

    monkeypatch.setattr(checkpoints.CheckpointFile, "commit", slow)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value["ask"]:
            await ctx.durable_execute(begun.wait, effect="read", name="begun")
            return await ctx.wait_for("approve")
        return value["id"]

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        runner = world.runner(Scripted(body), checkpoint_interval=0.02)
        running = asyncio.ensure_future(
            runner.run_async(ask(0) + ask(1, 2, asked=False), world.out, key="key", wait=True)
        )
        await until(lambda: runner._pipeline is not None and runner._pipeline.parked())
        assert await asyncio.to_thread(signal, world, "a", "yes")
        await until(lambda: runner._pipeline is not None and not runner._pipeline.parked())
        go_on.set()
        async with asyncio.timeout(PATIENCE):
            await running

    asyncio.run(main())
    assert world.outputs() == ["yes", 1, 2]


# In doubt.


def in_doubt(world: World, tools: Tools, source: Any) -> Agent:
    """A job whose message of key "a" is parked in doubt."""
    tools.hang_on.add(("pay", 1))

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [value["id"], await ctx.durable_execute(tools.call, ("pay", value["id"]))]

    agent = Scripted(body)
    crashed(world.runner(agent), source, world.out, key="key", when=lambda: tools.count(("pay", 1)) == 1)
    tools.hang_on.clear()
    report = run(world.runner(agent), source, world.out, key="key")
    assert [(parked.key, parked.why) for parked in report.parked] == [("a", "in_doubt")]
    return agent


@pytest.mark.parametrize("happened", [True, False])
def test_a_call_in_doubt_is_resolved_by_a_person(world: World, tools: Tools, happened: bool) -> None:
    source = ask(1, 2)
    agent = in_doubt(world, tools, source)
    assert resolve(world, "a", happened=happened, result="receipt 7")
    assert not resolve(world, "a", happened=happened, result="receipt 7"), "typed twice"
    report = run(world.runner(agent), source, world.out, key="key")
    assert report.parked == []
    first = "receipt 7" if happened else "done ('pay', 1)"
    assert world.outputs() == [[1, first], [2, "done ('pay', 2)"]]
    assert tools.count(("pay", 1)) == (1 if happened else 2)


def test_a_call_that_is_in_doubt_again_is_another_question(world: World, tools: Tools) -> None:
    source = ask(1)
    agent = in_doubt(world, tools, source)
    assert resolve(world, "a", happened=False)
    tools.hang_on.add(("pay", 1))
    crashed(world.runner(agent), source, world.out, key="key", when=lambda: tools.count(("pay", 1)) == 2)
    tools.hang_on.clear()
    assert len(run(world.runner(agent), source, world.out, key="key").parked) == 1
    assert tools.count(("pay", 1)) == 2
    assert resolve(world, "a", happened=True, result="at last")
    run(world.runner(agent), source, world.out, key="key")
    assert world.outputs() == [[1, "at last"]]
    assert tools.count(("pay", 1)) == 2


def test_what_a_person_says_goes_before_what_reconcile_says(world: World, tools: Tools) -> None:
    asked: list[str] = []

    def find(what: Any) -> Any:
        asked.append(what)
        raise ConnectionError("the provider is down")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, "pay", reconcile=find)

    tools.hang_on.add("pay")
    crashed(world.runner(Scripted(body)), ask(1), world.out, key="key", when=lambda: tools.count("pay") == 1)
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), ask(1), world.out, key="key")
    assert resolve(world, "a", happened=True, result="paid")
    run(world.runner(Scripted(body)), ask(1), world.out, key="key")
    assert (world.outputs(), asked) == (["paid"], ["pay"])


# Failures.


def failing(tools: Tools) -> Agent:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, ("before", value["id"]), effect="idempotent")
        return await ctx.durable_execute(tools.call, value["id"], effect="idempotent")

    return Scripted(body)


def test_a_message_that_fails_is_parked_and_retried(world: World, tools: Tools) -> None:
    source = ask(1, 2) + ask(3, key="b")
    tools.fail_on[1] = ValueError("no such order")
    report = run(world.runner(failing(tools), on_failure="park"), source, world.out, key="key")
    assert [(parked.key, parked.why) for parked in report.parked] == [("a", "failed")]
    assert "ValueError: no such order" in report.parked[0].reason
    assert report.waiting == 1
    assert world.outputs() == ["done 3"]

    # A restart alone tries nothing again.
    report = run(world.runner(failing(tools), on_failure="park"), source, world.out, key="key")
    assert len(report.parked) == 1
    assert tools.count(1) == 1

    # Retried, it fails once more, which is another question.
    assert retry(world, "a")
    assert not retry(world, "a"), "typed twice"
    assert len(run(world.runner(failing(tools), on_failure="park"), source, world.out, key="key").parked) == 1
    assert tools.count(1) == 2
    assert len(run(world.runner(failing(tools), on_failure="park"), source, world.out, key="key").parked) == 1
    assert tools.count(1) == 2

    del tools.fail_on[1]
    assert retry(world, "a")
    report = run(world.runner(failing(tools), on_failure="park"), source, world.out, key="key")
    assert (report.parked, report.waiting) == ([], 0)
    assert world.outputs() == ["done 3", "done 1", "done 2"]
    assert tools.count(("before", 1)) == 1


def test_a_failed_message_is_retried_while_the_job_runs(world: World, tools: Tools) -> None:
    """Something else waits, so that the job does not end."""
    tools.fail_on[1] = ValueError("not yet")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value["key"] == "b":
            return await ctx.wait_for("the end")
        return await ctx.durable_execute(tools.call, value["id"], effect="idempotent")

    async def main() -> None:
        runner = world.runner(Scripted(body), on_failure="park")
        source = ask(1, 2) + ask(9, key="b")
        running = asyncio.ensure_future(runner.run_async(source, world.out, key="key", wait=True))
        await until(lambda: runner._pipeline is not None and len(runner._pipeline.parked()) == 2)
        del tools.fail_on[1]
        assert await asyncio.to_thread(retry, world, "a")
        await until(lambda: runner._pipeline is not None and len(runner._pipeline.parked()) == 1)
        await until(lambda: tools.count(2) == 1)
        assert await asyncio.to_thread(signal, world, "b", "end")
        await running

    asyncio.run(main())
    assert world.outputs() == ["done 1", "done 2", "end"]


@pytest.mark.parametrize("way", ["signal", "retry", "resolve"])
def test_what_was_parked_by_an_earlier_run_and_ends_in_a_later_one_is_over(
    world: World, tools: Tools, way: str
) -> None:
    """Its old place in the inbox of the checkpoint must go with it, although it was parked anew meanwhile."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value["key"] == "b":
            return await ctx.wait_for("the end")
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        await ctx.durable_execute(tools.call, "once", effect="once")
        return [n, await ctx.wait_for("approve") if way == "signal" else "-"]

    def runner() -> LocalRunner:
        return world.runner(Scripted(body), on_failure="park")

    source = ask(1) + ask(9, key="b")
    if way == "resolve":
        tools.hang_on.add("once")
        crashed(runner(), source, world.out, key="key", when=lambda: bool(tools.hanging))
        tools.hang_on.clear()
    if way == "retry":
        tools.fail_on["once"] = ValueError("not yet")
    assert len(run(runner(), source, world.out, key="key").parked) == 2
    tools.fail_on.clear()

    def decide_it() -> bool:
        if way == "signal":
            return signal(world, "a", "-")
        return retry(world, "a") if way == "retry" else resolve(world, "a", happened=True)

    async def decide_while_it_runs() -> None:
        again = runner()
        running = asyncio.ensure_future(again.run_async(source, world.out, key="key", wait=True))
        await until(lambda: again._pipeline is not None and len(again._pipeline.parked()) == 2)
        assert await asyncio.to_thread(decide_it)
        await until(lambda: world.outputs() == [[1, "-"]])
        again.stop()
        await running

    asyncio.run(decide_while_it_runs())
    made = [*tools.made]
    for _ in range(2):
        report = run(runner(), source, world.out, key="key")
        assert [parked.key for parked in report.parked] == ["b"]
        assert (report.messages, tools.made) == (0, made)
    assert world.outputs() == [[1, "-"]]


def test_a_failure_stops_the_job_unless_it_is_to_park(world: World, tools: Tools) -> None:
    tools.fail_on[1] = ValueError("no such order")
    with pytest.raises(ActionError, match="no such order"):
        run(world.runner(failing(tools)), ask(1), world.out, key="key")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_failure": "ignore"}, "on_failure='ignore' is not one of 'stop', 'park'"),
        ({"max_attempts": 2}, "give a whole number from 3 on"),
        ({"max_attempts": True}, "give a whole number from 3 on"),
    ],
)
def test_wrong_options_are_refused(world: World, tools: Tools, options: Any, match: str) -> None:
    with pytest.raises(DefinitionError, match=match):
        world.runner(failing(tools), **options)


# Messages that kill the process.

POISON = """
import os, signal, sys
from pathlib import Path
from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, action

log = Path("log")

class Fragile(Agent):
    @action(InputEvent)
    async def act(self, event, ctx):
        with log.open("a") as file:
            file.write(f"{event.input}\\n")
        if event.input in POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        await ctx.durable_execute(str, event.input, effect="idempotent", name="str")
        ctx.send_event(OutputEvent(output=event.input))

runner = LocalRunner(Fragile(), job="job", max_attempts=3)
report = runner.run(range(40), "out.jsonl", key=lambda n: n % 20)
print(",".join(f"{parked.message_id}:{parked.why}" for parked in report.parked))
"""


def restarted_until_it_ends(script: Path, kills: int) -> subprocess.CompletedProcess[str]:
    """Run *script* in its folder, which is killed by SIGKILL up to so many times, until it ends by itself."""
    for _ in range(kills + 1):
        ended = subprocess.run([sys.executable, script], cwd=script.parent, capture_output=True, text=True, timeout=60)
        if ended.returncode == 0:
            return ended
        assert ended.returncode == -9, ended.stderr
    raise AssertionError(f"killed more than {kills} times")


@pytest.mark.slow
@pytest.mark.parametrize("poison", [[], [7], [7, 3], [19, 39]])
def test_a_message_that_kills_the_process_is_parked_after_so_many_restarts(tmp_path: Path, poison: list[int]) -> None:
    script = tmp_path / "app.py"
    script.write_text(f"POISON = {poison}\n{POISON}")
    ended = restarted_until_it_ends(script, kills=12)
    # Of two messages of one key, the second waits behind the first.
    blamed = [n for n in poison if n - 20 not in poison]
    assert sorted(ended.stdout.strip().split(",")) == (sorted(f"{n}:attempts" for n in blamed) if blamed else [""])
    begun = [int(line) for line in (tmp_path / "log").read_text().split()]
    # Of two, one may only have been about to run when the other one ended the process.
    assert all(begun.count(n) == 3 if len(poison) == 1 else 1 <= begun.count(n) <= 3 for n in blamed)
    outputs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    behind = {n for n in range(40) if n - 20 in blamed}
    assert sorted(outputs) == sorted(set(range(40)) - set(blamed) - behind)


IN_DOUBT = """
import asyncio, os, signal
from pathlib import Path
from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, action

def pay():
    if not Path("paid").exists():
        Path("paid").touch()
        os.kill(os.getpid(), signal.SIGKILL)

class Fragile(Agent):
    @action(InputEvent)
    async def act(self, event, ctx):
        if event.input == "pays":
            await ctx.durable_execute(pay, effect="once")
        else:
            while not runner._pipeline.parked():
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

runner = LocalRunner(Fragile(), job="job", max_attempts=3)
report = runner.run(["pays", "kills"], key=lambda value: value)
print(",".join(sorted(f"{parked.key}:{parked.why}" for parked in report.parked)))
"""


@pytest.mark.slow
def test_a_message_in_doubt_is_not_blamed_for_the_kills_of_others(tmp_path: Path) -> None:
    """It is begun at each restart, and parked again each time before another message ends the process."""
    script = tmp_path / "app.py"
    script.write_text(IN_DOUBT)
    ended = restarted_until_it_ends(script, kills=8)
    assert ended.stdout.strip() == "kills:attempts,pays:in_doubt"


@pytest.mark.slow
def test_without_a_limit_kills_park_nothing(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(f"POISON = [5]\n{POISON}".replace(", max_attempts=3", ""))
    for _ in range(5):
        ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ended.returncode == -9, ended.stderr
    script.write_text(f"POISON = []\n{POISON}".replace(", max_attempts=3", ""))
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "")
