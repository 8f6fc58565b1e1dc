"""What is the outcome of a call and what is none: signals, empty results, what cannot be recorded, failures."""

from __future__ import annotations

import asyncio
import functools
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dalsegno import (
    ActionError,
    Agent,
    DivergenceError,
    Event,
    InputEvent,
    OutputEvent,
    RetryPolicy,
    RunnerContext,
    action,
)
from tests.helpers import Scripted, Tools, World, crashed, run
from tests.test_parking import retry

EFFECTS: list[Any] = ["read", "idempotent", "once"]
OUTCOMES = {"called", "completed", "done"}


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_run_that_is_cancelled_in_a_call_records_the_outcome_of_the_call_beside_it_only(
    world: World, tools: Tools, effect: Any
) -> None:
    """The sibling had its answer; the cut-off call has none, and is handled by its effect in the next run."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        calls = [ctx.durable_execute(tools.call, what, effect=effect) for what in ("answers", "hangs")]
        return await asyncio.gather(*calls)

    store = world.store()
    tools.hang_on.add("hangs")
    crashed(
        world.runner(Scripted(body), store=store),
        [1],
        world.out,
        when=lambda: bool(tools.hanging) and bool(OUTCOMES & set(store.kinds())),
    )
    tools.hang_on.clear()
    finished = [recorded for recorded in store.bodies() if recorded["kind"] in OUTCOMES]
    assert [recorded["result"] for recorded in finished] == ["done answers"]
    report = run(world.runner(Scripted(body)), [1], world.out)
    assert tools.count("answers") == 1
    if effect == "once":
        assert [parked.why for parked in report.parked] == ["in_doubt"]
        assert tools.count("hangs") == 1
    else:
        assert world.outputs() == [["done answers", "done hangs"]]
        assert tools.count("hangs") == 2


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_stop_during_a_call_lets_it_end_and_records_what_it_returned(world: World, tools: Tools, effect: Any) -> None:
    """Shutting down is no outcome either: what follows was not started, and is not failed."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        first = await ctx.durable_execute(stops_the_run, effect=effect, name="stops")
        return [first, await ctx.durable_execute(tools.call, "second", effect=effect)]

    async def stops_the_run() -> str:
        tools.made.append("first")
        runner.stop()
        await asyncio.sleep(0)
        return "done first"

    store = world.store()
    runner = world.runner(Scripted(body), store=store)
    report = run(runner, [1], world.out)
    assert report.stopped_by == "stop()"
    assert tools.made == ["first"]
    assert not {"failed", "done"} & set(store.kinds())
    runner = world.runner(Scripted(body))
    run(runner, [1], world.out)
    assert world.outputs() == [["done first", "done second"]]
    assert tools.made == ["first", "second"]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_a_signal_out_of_a_call_is_recorded_as_no_outcome_whatever_its_effect(
    world: World, tools: Tools, effect: Any, signal: type[BaseException]
) -> None:
    tools.fail_on["a"] = signal()

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, "a", effect=effect)

    store = world.store()
    with pytest.raises((ActionError, signal)):
        run(world.runner(Scripted(body), store=store), [1], world.out)
    assert not OUTCOMES & set(store.kinds())
    assert "failed" not in store.kinds()
    tools.fail_on.clear()
    report = run(world.runner(Scripted(body)), [1], world.out)
    if effect == "once":
        assert [parked.why for parked in report.parked] == ["in_doubt"]
        assert tools.made == ["a"]
    else:
        assert world.outputs() == ["done a"]
        assert tools.made == ["a", "a"]


# --- empty results --------------------------------------------------------------------------------------------------

EMPTY: list[Any] = [None, False, 0, 0.0, "", b"", [], (), {}, set(), frozenset(), timedelta(0)]


class AsyncEmpty(Agent, name="Empty"):
    def __init__(self, tools: Tools, effect: Any) -> None:
        self.tools, self.effect, self.seen = tools, effect, list[list[Any]]()

    @action(InputEvent)
    async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        self.seen.append([])
        for n in range(len(EMPTY)):
            self.seen[-1].append(await ctx.durable_execute(self.tools.call, n, effect=self.effect))
        await ctx.durable_execute(self.tools.call, "end", effect="idempotent")


class PlainEmpty(AsyncEmpty, name="Empty"):
    @action(InputEvent)
    def act(self, event: InputEvent, ctx: RunnerContext) -> None:  # type: ignore[override]
        self.seen.append([])
        for n in range(len(EMPTY)):
            self.seen[-1].append(ctx.durable_execute_sync(self.tools.call_sync, n, effect=self.effect))
        ctx.durable_execute_sync(self.tools.call, "end", effect="idempotent")


@pytest.mark.parametrize("kind", [AsyncEmpty, PlainEmpty])
@pytest.mark.parametrize("effect", EFFECTS)
def test_an_empty_result_is_a_result_in_async_and_plain_actions_with_each_effect(
    world: World, tools: Tools, effect: Any, kind: type[AsyncEmpty]
) -> None:
    tools.results = dict(enumerate(EMPTY))
    agent = kind(tools, effect)
    for _ in range(2):
        tools.hanging.clear()
        tools.hang_on.add("end")
        crashed(world.runner(agent), [1], when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    report = run(world.runner(agent), [1])
    assert report.calls_replayed == len(EMPTY)
    assert [tools.count(n) for n in range(len(EMPTY))] == [1] * len(EMPTY)
    for seen in agent.seen:
        assert seen == EMPTY
        assert [type(found) for found in seen] == [type(given) for given in EMPTY]


def test_an_empty_memory_value_input_and_output_are_there(world: World, tools: Tools) -> None:
    outputs: list[Any] = []

    class Empty(Agent):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            ctx.short_term_memory.set("value", event.input)
            await ctx.durable_execute(tools.call, "call", effect="idempotent")
            assert "value" in ctx.short_term_memory
            ctx.send_event(OutputEvent(output=ctx.short_term_memory.get("value", "the default")))

    tools.hang_on.add("call")
    crashed(world.runner(Empty()), EMPTY, outputs.append, when=lambda: "call" in tools.hanging)
    tools.hang_on.clear()
    run(world.runner(Empty()), EMPTY, outputs.append)
    assert outputs == EMPTY
    assert [type(output) for output in outputs] == [type(given) for given in EMPTY]


# --- results that cannot be recorded --------------------------------------------------------------------------------


class Client:
    """As of a provider: it holds a lock and a connection."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def generator() -> Iterator[int]:
    yield 1


async def agenerator() -> Any:
    yield 1


def connected() -> Any:
    with socket.socket() as found:
        return found


def in_database() -> Any:
    connection = sqlite3.connect(":memory:")
    try:
        return connection.execute("SELECT 1")
    finally:
        connection.close()


UNRECORDABLE: list[tuple[Callable[[], Any], str, str]] = [
    (generator, "result", "generator"),
    (agenerator, "result", "async_generator"),
    (lambda: Path(__file__).open(), "result", "TextIOWrapper"),  # noqa: SIM115
    (threading.Lock, "result", "lock"),
    (Client, "result", "Client"),
    (connected, "result", "socket"),
    (in_database, "result", "Cursor"),
    (lambda: {"rows": [1, {"cursor": Client()}]}, "result['rows'][1]['cursor']", "Client"),
    (lambda: (1, [threading.Lock()]), "result[1][0]", "lock"),
    (lambda: map(str, [1]), "result", "map"),
    (lambda: print, "result", "builtin_function_or_method"),
]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize(("make", "path", "kind"), UNRECORDABLE, ids=lambda given: getattr(given, "__name__", given))
def test_a_result_that_cannot_be_recorded_names_function_path_and_type_and_nothing_else_happens(
    world: World, tools: Tools, effect: Any, make: Callable[[], Any], path: str, kind: str
) -> None:
    made: list[Any] = []

    def fetch() -> Any:
        made.append(make())
        return made[-1]

    class Careless(Agent):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            ctx.short_term_memory.set("before", 1)
            ctx.send_event(OutputEvent(output="before"))
            try:
                await ctx.durable_execute(fetch, name="fetch", effect=effect)
            finally:
                await ctx.durable_execute(tools.call, "after", effect=effect)

        @action(InputEvent)
        async def later(self, event: InputEvent, ctx: RunnerContext) -> None:
            await ctx.durable_execute(tools.call, "later", effect=effect)

    store = world.store()
    runner = world.runner(Careless(), store=store)
    with pytest.raises(ActionError) as caught:
        run(runner, [1], world.out)
    if kind == "TextIOWrapper":
        made[0].close()
    message = str(caught.value)
    assert "the call fetch was made, but what it returned cannot be recorded" in message
    assert f"{path} " in message or f"{path}:" in message
    assert kind in message
    assert tools.made == []
    assert world.outputs() == []
    assert dict(runner.memories()) == {}
    assert not OUTCOMES & set(store.kinds())
    assert len(made) == 1


# --- one poison message ---------------------------------------------------------------------------------------------


def test_a_poison_message_has_bounded_attempts_is_parked_in_sight_and_can_be_run_again(
    world: World, tools: Tools
) -> None:
    policy = RetryPolicy(attempts=3, backoff=0.001, jitter=0)
    tools.fail_on["poison"] = ConnectionError("never up")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value["do"], effect="read", retry=policy)

    source: list[Any] = [{"k": key, "do": f"{key} {n}"} for n in range(3) for key in "abcde"]
    source.insert(6, {"k": "c", "do": "poison"})
    for _ in range(3):
        report = run(world.runner(Scripted(body), on_failure="park", max_in_flight=1), source, world.out, key="k")
        assert [(parked.key, parked.message_id, parked.why) for parked in report.parked] == [("c", "6", "failed")]
        assert "never up" in report.parked[0].reason
        assert report.waiting == 2
        assert tools.count("poison") == 3, "a restart alone tries nothing again"
    others = [f"done {record['do']}" for record in source if record["k"] != "c" or record["do"] == "c 0"]
    assert sorted(world.outputs()) == sorted(others)
    del tools.fail_on["poison"]
    assert retry(world, "c")
    report = run(world.runner(Scripted(body), on_failure="park"), source, world.out, key="k")
    assert (report.parked, report.waiting) == ([], 0)
    assert world.outputs()[-3:] == ["done poison", "done c 1", "done c 2"]
    assert tools.count("poison") == 4
    assert all(tools.count(record["do"]) == 1 for record in source if record["do"] != "poison")


# --- callees of every kind ------------------------------------------------------------------------------------------


def callees(tools: Tools) -> dict[str, Callable[..., Any]]:
    async def coroutine_function(what: str) -> Any:
        return await tools.call(what)

    def plain_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @functools.wraps(coroutine_function)
    def wrapped(*args: Any) -> Any:
        return coroutine_function(*args)

    class Plain:
        def __call__(self, what: str) -> Any:
            return tools.call_sync(what)

    class Async:
        async def __call__(self, what: str) -> Any:
            return await tools.call(what)

    class ReturnsCoroutine:
        def __call__(self, what: str) -> Any:
            return tools.call(what)

    class Static:
        @staticmethod
        async def method(what: str) -> Any:
            return await tools.call(what)

    return {
        "coroutine function": coroutine_function,
        "plain decorator": plain_decorator(coroutine_function),
        "decorator that wraps": wrapped,
        "lambda": lambda what: tools.call_sync(what),
        "lambda with a coroutine": lambda what: tools.call(what),
        "partial": functools.partial(tools.call_sync),
        "partial of a coroutine function": functools.partial(coroutine_function),
        "partial of a partial": functools.partial(functools.partial(tools.call)),
        "callable object": Plain(),
        "async callable object": Async(),
        "callable object with a coroutine": ReturnsCoroutine(),
        "static method": Static.method,
        "bound method": tools.call,
    }


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_callee_of_any_kind_runs_once_and_its_awaited_value_is_recorded(
    world: World, tools: Tools, effect: Any
) -> None:
    seen: list[list[Any]] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        seen.append([])
        for name, function in callees(tools).items():
            seen[-1].append(await ctx.durable_execute(function, name, name=name, effect=effect))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    store = world.store()
    tools.hang_on.add("end")
    crashed(world.runner(Scripted(body), store=store), [1], when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    names = list(callees(tools))
    recorded = [found["result"] for found in store.bodies() if found["kind"] in OUTCOMES]
    assert recorded == [f"done {name}" for name in names]
    run(world.runner(Scripted(body)), [1])
    assert seen == [recorded, recorded]
    assert tools.made == [*names, "end", "end"]


def test_tools_of_one_class_that_change_places_after_a_crash_never_get_each_others_answers(
    world: World, tools: Tools
) -> None:
    email, refund = Tools(), Tools()
    by_name = {"email": email, "refund": refund}

    def uses(*names: str) -> Scripted:
        async def body(value: Any, ctx: RunnerContext) -> Any:
            for name in names:
                await ctx.durable_execute(by_name[name].call, "order 7", name=name)
            return await ctx.durable_execute(tools.call, "end", effect="idempotent")

        return Scripted(body)

    tools.hang_on.add("end")
    crashed(world.runner(uses("email", "refund")), [1], world.out, when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    for changed in (["refund", "email"], ["email", "email"], ["refund"]):
        with pytest.raises(DivergenceError, match=r"Expected the recorded call|the record has the call"):
            run(world.runner(uses(*changed)), [1], world.out)
    assert (email.made, refund.made, world.outputs()) == (["order 7"], ["order 7"], [])
    run(world.runner(uses("email", "refund")), [1], world.out)
    assert (email.made, refund.made, world.outputs()) == (["order 7"], ["order 7"], ["done end"])


# --- events ---------------------------------------------------------------------------------------------------------


class Sent(Event):
    when: str


@pytest.mark.parametrize("crashes_in", ["during", "beside", "heard before", "heard beside", "heard after", "end"])
def test_every_event_of_an_action_is_played_back_wherever_it_was_sent(
    world: World, tools: Tools, crashes_in: str
) -> None:
    """Before an await, between two, in a task beside the action, and after the last one."""

    class Sender(Agent):
        @action(InputEvent)
        async def send(self, event: InputEvent, ctx: RunnerContext) -> None:
            async def beside() -> None:
                await ctx.durable_execute(tools.call, "beside", effect="idempotent")
                ctx.send_event(Sent(when="beside"))

            ctx.send_event(Sent(when="before"))
            ctx.send_event(OutputEvent(output="sent before"))
            await ctx.durable_execute(tools.call, "during", effect="idempotent")
            async with asyncio.TaskGroup() as group:
                group.create_task(beside())
            ctx.send_event(Sent(when="after"))
            ctx.send_event(OutputEvent(output="sent after"))

        @action(Sent)
        async def hear(self, event: Sent, ctx: RunnerContext) -> None:
            ctx.send_event(OutputEvent(output=f"heard {event.when}"))
            await ctx.durable_execute(tools.call, f"heard {event.when}", effect="idempotent")

        @action(InputEvent)
        async def end(self, event: InputEvent, ctx: RunnerContext) -> None:
            await ctx.durable_execute(tools.call, "end", effect="idempotent")

    for _ in range(2):
        tools.hanging.clear()
        tools.hang_on.add(crashes_in)
        crashed(world.runner(Sender()), [1], world.out, when=lambda: crashes_in in tools.hanging)
    tools.hang_on.clear()
    run(world.runner(Sender()), [1], world.out)
    assert world.outputs() == ["sent before", "sent after", "heard before", "heard beside", "heard after"]
    made = ["during", "beside", "heard before", "heard beside", "heard after", "end"]
    assert {what: tools.count(what) for what in made} == {what: 3 if what == crashes_in else 1 for what in made}
