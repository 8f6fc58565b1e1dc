"""A recorded outcome that cannot be loaded is no outcome of the call: the action never gets to act on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dalsegno import ActionError, Agent, CodecError, InputEvent, OutputEvent, RunnerContext, action
from dalsegno.core.decisions import Resolved, Signalled
from tests.helpers import Scripted, Tools, World, crashed, run
from tests.test_parking import decide, retry, state_of

UNLOADABLE: dict[str, Any] = {
    "a class that is gone": {"result": {"$": "model", "t": "gone:Answer", "f": {"text": "yes"}}},
    "an unheard-of form": {"result": {"$": "unheard-of", "v": 1}},
    "an exception class that is gone": {
        "error": {"$": "exc", "t": "gone:Refused", "args": [], "state": {}, "str": "refused"}
    },
}


def falling_back(tools: Tools, swallow: Any) -> Scripted:
    """An action as many are: whatever the model does, there is an answer."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        answer = "the fallback"
        with contextlib.suppress(swallow):
            answer = await ctx.durable_execute(tools.call, "ask", effect="idempotent")
        with contextlib.suppress(swallow):
            await ctx.durable_execute(tools.call, "act on it", effect="idempotent")
        await ctx.durable_execute(tools.call, f"send {answer}", effect="idempotent")
        return answer

    return Scripted(body)


def put_in_place(world: World, outcome: dict[str, Any]) -> None:
    """Change the recorded outcome of the first call, as a deployment without its class, or with it, changes it."""
    if world.kind == "memory":
        (job,) = world.jobs.values()
        for records in job.records.values():
            for number, record in records.items():
                records[number] = record._replace(body=with_outcome(record.body, outcome))
        return
    with contextlib.closing(sqlite3.connect(world.folder / "store.db")) as database, database:
        for number, body in database.execute("SELECT n, body FROM records").fetchall():
            database.execute("UPDATE records SET body = ? WHERE n = ?", (with_outcome(body, outcome), number))


def with_outcome(body: bytes, outcome: dict[str, Any]) -> bytes:
    found = json.loads(body)
    if found["kind"] not in ("called", "completed") or found["call"] != 0:
        return body
    return json.dumps(
        {name: value for name, value in found.items() if name not in ("result", "error")} | outcome
    ).encode()


def recorded(world: World, tools: Tools, agent: Agent, hangs_in: str) -> None:
    tools.hang_on.add(hangs_in)
    crashed(world.runner(agent), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()


@pytest.mark.parametrize("swallow", [(), CodecError, Exception, BaseException], ids=str)
@pytest.mark.parametrize("what", UNLOADABLE)
def test_an_action_that_catches_everything_does_not_take_it_for_a_failure_of_the_call(
    world: World, tools: Tools, swallow: Any, what: str
) -> None:
    agent = falling_back(tools, swallow)
    recorded(world, tools, agent, "send done ask")
    put_in_place(world, UNLOADABLE[what])
    made = list(tools.made)
    for _ in range(2):
        with pytest.raises(ActionError, match=r"job 'job', key None, message '0', action 'act'.*Tools\.call") as caught:
            run(world.runner(agent), [1], world.out)
        assert isinstance(caught.value.__cause__, CodecError)
    assert tools.made == made
    assert world.outputs() == []
    put_in_place(world, {"result": "done ask"})
    run(world.runner(agent), [1], world.out)
    assert world.outputs() == ["done ask"]
    assert tools.count("ask") == tools.count("act on it") == 1


async def gathered(calls: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    return await asyncio.gather(*(call() for call in calls), return_exceptions=True)


async def grouped(calls: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    found: list[Any] = []
    with contextlib.suppress(Exception):
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[Any]] = [group.create_task(call()) for call in calls]  # type: ignore[arg-type]
        found += [task.result() for task in tasks]
    return found


@pytest.mark.parametrize("together", [gathered, grouped])
def test_nor_does_one_that_makes_calls_side_by_side(world: World, tools: Tools, together: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        def call(what: str) -> Callable[[], Awaitable[Any]]:
            return lambda: ctx.durable_execute(tools.call, what, effect="read")

        found = await together([call("a"), call("b")])
        return [str(found), await ctx.durable_execute(tools.call, "end", effect="idempotent")]

    recorded(world, tools, Scripted(body), "end")
    put_in_place(world, UNLOADABLE["a class that is gone"])
    with pytest.raises(ActionError, match="gone:Answer"):
        run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made == ["a", "b", "end"]
    assert world.outputs() == []


def test_nor_does_a_plain_action(world: World, tools: Tools) -> None:
    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            answer: Any = "the fallback"
            with contextlib.suppress(Exception):
                answer = ctx.durable_execute_sync(tools.call_sync, "ask", effect="read")
            ctx.durable_execute_sync(tools.call, f"send {answer}", effect="idempotent")
            ctx.send_event(OutputEvent(output=answer))

    recorded(world, tools, Plain(), "send done ask")
    put_in_place(world, UNLOADABLE["a class that is gone"])
    with pytest.raises(ActionError, match="gone:Answer"):
        run(world.runner(Plain()), [1], world.out)
    assert tools.made == ["ask", "send done ask"]
    assert world.outputs() == []


def test_its_message_can_be_set_aside_and_retried_when_the_class_is_there_again(world: World, tools: Tools) -> None:
    agent = falling_back(tools, Exception)
    recorded(world, tools, agent, "send done ask")
    put_in_place(world, UNLOADABLE["a class that is gone"])
    report = run(world.runner(agent, on_failure="park"), [1], world.out)
    assert [(parked.why, "gone:Answer" in parked.reason) for parked in report.parked] == [("failed", True)]
    put_in_place(world, {"result": "done ask"})
    assert retry(world, None)
    run(world.runner(agent, on_failure="park"), [1], world.out)
    assert world.outputs() == ["done ask"]
    assert tools.count("ask") == 1


@pytest.mark.parametrize("question", ["signal", "doubt"])
def test_nor_is_what_a_person_answered_in_a_class_that_is_gone(world: World, tools: Tools, question: str) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        answer: Any = "the fallback"
        with contextlib.suppress(Exception):
            if question == "signal":
                answer = await ctx.wait_for("answer")
            else:
                answer = await ctx.durable_execute(tools.call, "ask", effect="once")
        return await ctx.durable_execute(tools.call, f"send {answer}", effect="idempotent")

    if question == "doubt":
        recorded(world, tools, Scripted(body), "ask")
    assert len(run(world.runner(Scripted(body)), [1], world.out).parked) == 1
    state = state_of(world, None)
    (call,) = state.calls.values()
    value = UNLOADABLE["a class that is gone"]["result"]
    answer = (
        Signalled(state.task, call.number, value)
        if question == "signal"
        else Resolved(state.task, call.number, call.attempt, True, value)
    )
    assert decide(world, state, answer)
    store = world.store()
    with pytest.raises(ActionError, match="gone:Answer"):
        run(world.runner(Scripted(body), store=store), [1], world.out)
    assert "completed" not in store.kinds()
    assert [what for what in tools.made if what != "ask"] == []
    assert world.outputs() == []
