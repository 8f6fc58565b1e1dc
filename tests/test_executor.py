"""The promises of the design, kept by the executor over each store, with crashes inside one process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import orjson
import pydantic
import pytest

from dalsegno import (
    ActionError,
    Agent,
    CodecError,
    DefinitionError,
    DidNotHappen,
    DivergenceError,
    Event,
    FencedError,
    Happened,
    InputEvent,
    OutputEvent,
    RecordError,
    RunnerContext,
    StoreError,
    action,
    register,
)
from dalsegno.core.records import Record
from dalsegno.stores.memory import MemoryStore
from tests.helpers import STORES, Scripted, SpyStore, Tools, World, crash, crashed, for_ever, run, until

EFFECTS = ["read", "idempotent", "once"]


def replayed(world: World, tools: Tools, body: Any) -> tuple[Any, Any]:
    """What *body* returns in the first run, and in a replay from its record after a crash."""
    returned: list[Any] = []

    async def and_crash(value: Any, ctx: RunnerContext) -> None:
        returned.append(await body(value, ctx))
        await ctx.durable_execute(tools.call, "the end", effect="idempotent")

    tools.hang_on.add("the end")
    crashed(world.runner(Scripted(and_crash)), [1], when=lambda: "the end" in tools.hanging)
    tools.hang_on.clear()
    run(world.runner(Scripted(and_crash)), [1])
    first, second = returned
    return first, second


# --- P3: live equals replay -----------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    a: int
    b: str


@register
@dataclass
class Point:
    x: float
    tags: set[str]


class Model(pydantic.BaseModel):
    name: str
    inner: list[int] = []


register(Colour)
register(Pair)
register(Model)

VALUES: list[Any] = [
    *(None, False, True, 0, 0.0, -0.0, "", [], {}, (), b"", set(), frozenset()),
    *(2**70, -(2**63) - 1, float("inf"), 1e308, "\0", "\ud800", "😀", "x" * 100_000, b"\xff\0"),
    *((1, (2,)), {1: "a", "1": "b", None: 3}, {"$": "tuple", "v": []}, {(1, 2): {3}}, [[], [None]]),
    *(Decimal("1.10"), UUID(int=7), Colour.RED, Pair(1, "b"), Point(1.5, {"t"}), Model(name="m", inner=[1])),
    *(datetime(2024, 2, 29, tzinfo=UTC), timedelta(microseconds=1)),
]


@pytest.mark.parametrize("effect", EFFECTS)
def test_results_come_back_equal_and_of_the_same_type_and_are_not_asked_for_again(
    world: World, tools: Tools, effect: Any
) -> None:
    tools.results = dict(enumerate(VALUES))

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [await ctx.durable_execute(tools.call, n, effect=effect) for n in range(len(VALUES))]

    first, second = replayed(world, tools, body)
    assert first == second == VALUES
    for live, later, given in zip(first, second, VALUES, strict=True):
        assert type(live) is type(later) is type(given)
    assert tools.made == [*range(len(VALUES)), "the end", "the end"]


def test_what_a_call_returns_is_the_decoded_record_in_the_first_run_too(world: World, tools: Tools) -> None:
    shared: list[int] = []
    tools.results["a"] = {"left": shared, "right": shared}

    async def body(value: Any, ctx: RunnerContext) -> Any:
        found = await ctx.durable_execute(tools.call, "a")
        found["left"].append(1)
        return found

    first, second = replayed(world, tools, body)
    assert first == second == {"left": [1], "right": []}
    assert shared == []


def test_a_callee_that_changes_its_arguments_changes_neither_the_callers_nor_the_record(
    world: World, tools: Tools
) -> None:
    async def greedy(items: list[int], *, more: dict[str, Any]) -> int:
        tools.made.append("greedy")
        items.append(len(items))
        more["x"] = object()
        return len(items)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        items, more = [1], {"a": [2]}
        n = await ctx.durable_execute(greedy, items, more=more, effect="read", name="greedy")
        m = await ctx.durable_execute(greedy, items, more=more, effect="idempotent", name="greedy")
        return n, m, items, more

    first, second = replayed(world, tools, body)
    assert first == second == (2, 2, [1], {"a": [2]})
    assert tools.made.count("greedy") == 2


class KeywordOnly(Exception):
    def __init__(self, *, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


def _errors() -> list[Exception]:
    caused = ValueError("outer")
    caused.__cause__ = KeyError("inner")
    noted = RuntimeError("with a note")
    noted.add_note("the note")
    return [
        TimeoutError("slow"),
        KeywordOnly(status=429, body={"retry": 3}),
        OSError(2, "no such file", "name"),
        KeyError("k"),
        StopIteration(3),
        StopAsyncIteration(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError(1), KeywordOnly(status=1, body={})]),
        caused,
        noted,
        Exception(),
        Exception(None, "\ud800"),
    ]


def as_seen(error: BaseException) -> tuple[Any, ...]:
    members = [as_seen(member) for member in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    fields = [getattr(error, name, None) for name in ("errno", "filename", "reason", "value", "__notes__")]
    return type(error), str(error), repr(error.args), repr(error.__cause__), fields, vars(error), members


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("sync", [False, True])
def test_a_caught_exception_replays_as_the_same_exception_without_a_call(
    world: World, tools: Tools, effect: Any, sync: bool
) -> None:
    errors = _errors()
    tools.fail_on = dict(enumerate(errors))

    async def body(value: Any, ctx: RunnerContext) -> Any:
        seen = []
        for n in range(len(errors)):
            try:
                await ctx.durable_execute(tools.call_sync if sync else tools.call, n, effect=effect)
            except Exception as error:
                seen.append(as_seen(error))
        return seen

    first, second = replayed(world, tools, body)
    assert first == second
    # Python itself lets no coroutine raise a StopIteration.
    errors[4] = RuntimeError("coroutine raised StopIteration")
    assert [seen[:3] for seen in first] == [(type(error), str(error), repr(error.args)) for error in errors]
    assert tools.made.count(0) == 1


@pytest.mark.parametrize("effect", EFFECTS)
def test_an_exception_that_leaves_the_action_is_no_history_and_the_call_is_tried_again(
    world: World, tools: Tools, effect: Any
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, "a", effect=effect)

    for attempt in (1, 2):
        tools.fail_on["a"] = TimeoutError(f"outage {attempt}")
        with pytest.raises(ActionError, match=f"key None, message '0', action 'act': TimeoutError: outage {attempt}"):
            run(world.runner(Scripted(body)), [1], world.out)
    tools.fail_on.clear()
    report = run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made == ["a"] * 3
    assert world.outputs() == ["done a"]
    assert report.parked == []


def test_what_made_the_action_fail_is_its_cause(world: World, tools: Tools) -> None:
    tools.fail_on["a"] = KeywordOnly(status=500, body={"x": 1})

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "a")

    with pytest.raises(ActionError) as caught:
        run(world.runner(Scripted(body)), [1])
    assert isinstance(caught.value.__cause__, KeywordOnly)
    assert caught.value.__cause__.status == 500


# --- what cannot be recorded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unrecordable", [object(), (n for n in [1]), open, {"a": [1, {2: object()}]}, 1j, Tools()])
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("swallow", [(), Exception, BaseException])
def test_a_result_that_cannot_be_recorded_fails_the_message_whatever_the_action_catches(
    tmp_path: Path, tools: Tools, unrecordable: Any, effect: Any, swallow: Any
) -> None:
    world = World("memory", tmp_path)
    tools.results["a"] = unrecordable

    async def body(value: Any, ctx: RunnerContext) -> Any:
        with contextlib.suppress(swallow):
            await ctx.durable_execute(tools.call, "a", effect=effect)
        await ctx.durable_execute(tools.call, "b", effect=effect)
        return "went on"

    with pytest.raises(
        ActionError, match=r"call tests\.helpers:Tools\.call was made, but .* cannot be recorded.*result"
    ):
        run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made == ["a"]
    assert world.outputs() == []


def test_the_error_names_the_path_and_type_of_what_cannot_be_recorded(world: World, tools: Tools) -> None:
    tools.results["a"] = {"choices": [1, Tools()]}

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "a")

    with pytest.raises(ActionError, match=r"result\['choices'\]\[1\].*Tools") as caught:
        run(world.runner(Scripted(body)), [1])
    assert isinstance(caught.value.__cause__, CodecError)


def test_a_once_call_whose_result_was_lost_is_not_made_again(world: World, tools: Tools) -> None:
    tools.results["a"] = object()

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, "a")

    with pytest.raises(ActionError):
        run(world.runner(Scripted(body)), [1], world.out)
    tools.results.clear()
    report = run(world.runner(Scripted(body)), [1], world.out)
    assert len(report.parked) == 1
    assert tools.made == ["a"]


def test_an_argument_that_cannot_be_recorded_is_found_before_the_call(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, ["a", object()])

    with pytest.raises(ActionError, match=r"Tools\.call was not made.*args\[0\]\[1\]"):
        run(world.runner(Scripted(body)), [1])
    assert tools.made == []


def test_an_event_that_cannot_be_recorded_fails_where_it_is_sent(world: World) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.send_event(OutputEvent(output={"a": object()}))

    with pytest.raises(ActionError, match=r"OutputEvent\.output\['a'\]"):
        run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == []


# --- callees and actions of every kind ------------------------------------------------------------------------------


async def plain_async(x: int) -> int:
    return x + 1


def plain_sync(x: int) -> int:
    return x + 1


def returns_a_coroutine(x: int) -> Any:
    return plain_async(x)


def returns_a_task(x: int) -> Any:
    return plain_async(x)


@functools.wraps(plain_async)
def wrapped(*args: Any) -> Any:
    return plain_async(*args)


class CallableObject:
    def __call__(self, x: int) -> int:
        return x + 1


class AsyncCallableObject:
    async def __call__(self, x: int) -> int:
        return x + 1


class Methods:
    async def method(self, x: int) -> int:
        return x + 1

    @classmethod
    def of_class(cls, x: int) -> int:
        return x + 1

    @staticmethod
    async def static(x: int) -> int:
        return x + 1


def closure(y: int) -> Callable[[int], int]:
    def inner(x: int) -> int:
        return x + y

    return inner


NAMED: list[Callable[..., Any]] = [plain_async, plain_sync, returns_a_coroutine, wrapped]
NAMED += [Methods().method, Methods.of_class, Methods.static]
NAMELESS: list[Callable[..., Any]] = [
    lambda x: x + 1,
    lambda x: plain_async(x),
    functools.partial(plain_sync),
    functools.partial(plain_async),
    closure(1),
    CallableObject(),
    AsyncCallableObject(),
    int.__add__.__get__(1),
]


def test_every_kind_of_callee_is_awaited_recorded_and_played_back(tmp_path: Path, tools: Tools) -> None:
    world = World("memory", tmp_path)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        results = [await ctx.durable_execute(function, n) for n, function in enumerate(NAMED)]
        for n, function in enumerate(NAMELESS):
            results.append(await ctx.durable_execute(function, n, name=f"call-{n}"))
        return results

    first, second = replayed(world, tools, body)
    assert first == second == [*range(1, len(NAMED) + 1), *range(1, len(NAMELESS) + 1)]


@pytest.mark.parametrize("number", range(len(NAMELESS) - 1))
def test_a_callee_without_a_stable_name_needs_one(tmp_path: Path, number: int) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(NAMELESS[number], 1)

    with pytest.raises(ActionError, match=r"give the call one, as in ctx\.durable_execute\(\.\.\., name=") as caught:
        run(World("memory", tmp_path).runner(Scripted(body)), [1])
    assert isinstance(caught.value.__cause__, DefinitionError)


@pytest.mark.parametrize("wrong", [None, 3, "print", plain_sync(1)])
def test_what_is_no_function_is_told_how_to_call(tmp_path: Path, wrong: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(wrong)

    with pytest.raises(ActionError, match="pass the function itself and its arguments after it"):
        run(World("memory", tmp_path).runner(Scripted(body)), [1])


def test_calling_the_function_instead_of_passing_it_says_so(tmp_path: Path) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        coroutine = plain_async(1)
        try:
            await ctx.durable_execute(coroutine)  # type: ignore[call-overload]
        finally:
            coroutine.close()

    with pytest.raises(ActionError, match="pass the function itself and its arguments after it"):
        run(World("memory", tmp_path).runner(Scripted(body)), [1])


async def named_like_options(effect: str, name: str = "n", reconcile: str = "r", kwargs: str = "k") -> list[str]:
    return [effect, name, reconcile, kwargs]


def test_parameters_that_are_named_like_options_are_never_mixed_up(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        given = {"effect": "E", "name": "N", "reconcile": "R", "kwargs": "K"}
        return [
            await ctx.durable_execute(named_like_options, "e"),
            await ctx.durable_execute(named_like_options, "e", "n2", effect="idempotent"),
            await ctx.durable_execute(named_like_options, effect="read", name="a name", kwargs=given),
        ]

    first, second = replayed(world, tools, body)
    assert first == second == [["e", "n", "r", "k"], ["e", "n2", "r", "k"], ["E", "N", "R", "K"]]


@pytest.mark.parametrize("option", [{"effect": "read"}, {"name": "x"}])
def test_an_option_that_could_be_an_argument_is_refused(tmp_path: Path, option: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(named_like_options, **option)

    with pytest.raises(
        ActionError, match=r"is an option of durable_execute and a parameter of .* pass the function's in"
    ):
        run(World("memory", tmp_path).runner(Scripted(body)), [1])


def test_one_method_of_two_objects_needs_names_because_one_could_get_the_others_answer(
    world: World, tools: Tools
) -> None:
    email, refund = Tools(), Tools()

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(email.call, 1)
        await ctx.durable_execute(refund.call, 1)

    with pytest.raises(ActionError, match="is called on two objects"):
        run(world.runner(Scripted(body)), [1])
    assert refund.made == []


@pytest.mark.parametrize("first_ready", ["email", "refund"])
def test_two_tools_of_one_class_with_names_keep_their_own_answers(world: World, tools: Tools, first_ready: str) -> None:
    email, refund = Tools(), Tools()
    email.results[1], refund.results[1] = "mailed", "refunded"
    tools.delays[first_ready] = 0.03

    async def body(value: Any, ctx: RunnerContext) -> Any:
        async def use(tool: Tools, name: str) -> Any:
            await ctx.durable_execute(tools.call, name, effect="read")
            return await ctx.durable_execute(tool.call, 1, effect="read", name=name)

        return await asyncio.gather(use(email, "email"), use(refund, "refund"))

    first, second = replayed(world, tools, body)
    assert first == second == ["mailed", "refunded"]


class SyncAgent(Agent):
    """A plain ``def`` as an action."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @action(InputEvent)
    def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        a = ctx.durable_execute_sync(self.tools.call_sync, "a")
        try:
            ctx.durable_execute_sync(self.tools.call, "b", effect="read")
        except TimeoutError as error:
            a = f"{a} {error}"
        ctx.short_term_memory.set("a", a)
        c = ctx.durable_execute_sync(self.tools.call, "c", effect="idempotent")
        ctx.send_event(OutputEvent(output=[a, c]))


def test_a_plain_action_is_as_durable_as_an_async_one(world: World, tools: Tools) -> None:
    tools.fail_on["b"] = TimeoutError("slow")
    tools.hang_on.add("c")
    crashed(world.runner(SyncAgent(tools)), [1], world.out, when=lambda: "c" in tools.hanging)
    tools.hang_on.clear()
    runner = world.runner(SyncAgent(tools))
    run(runner, [1], world.out)
    assert tools.made == ["a", "b", "c", "c"]
    assert world.outputs() == [["done a slow", "done c"]]
    assert dict(runner.memories()) == {None: {"a": "done a slow"}}


def test_plain_actions_and_plain_callees_do_not_wait_for_each_others_threads(world: World, tools: Tools) -> None:
    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            ctx.durable_execute_sync(tools.call_sync, event.input)

    for bound in (1, 4):
        run(world.runner(Plain(), f"{bound}", max_in_flight=bound), range(20), key=lambda n: n)
    assert sorted(tools.made) == sorted([*range(20), *range(20)])


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_call_that_was_never_awaited_is_an_error_not_a_call_that_never_ran(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> str:
        ctx.durable_execute(tools.call, "a")  # type: ignore[unused-coroutine]
        return "out"

    with pytest.raises(ActionError, match=r"Tools\.call, \.\.\.\) was never awaited.*write await before it"):
        run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made == []
    assert world.outputs() == []


# --- calls beside each other ----------------------------------------------------------------------------------------


async def gathered(ctx: RunnerContext, tools: Tools, effect: Any) -> list[Any]:
    return await asyncio.gather(*(ctx.durable_execute(tools.call, n, effect=effect) for n in "abc"))


async def grouped(ctx: RunnerContext, tools: Tools, effect: Any) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ctx.durable_execute(tools.call, n, effect=effect)) for n in "abc"]
    return [task.result() for task in tasks]


async def as_completed(ctx: RunnerContext, tools: Tools, effect: Any) -> list[Any]:
    return sorted(
        [
            await done
            for done in asyncio.as_completed([ctx.durable_execute(tools.call, n, effect=effect) for n in "abc"])
        ]
    )


@pytest.mark.parametrize("together", [gathered, grouped, as_completed])
@pytest.mark.parametrize("effect", ["read", "idempotent"])
@pytest.mark.parametrize("missing", "abc")
def test_after_a_crash_only_the_missing_one_of_three_calls_runs_whatever_finishes_first(
    world: World, tools: Tools, together: Any, effect: Any, missing: str
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await together(ctx, tools, effect)

    store = world.store()
    others = [n for n in "abc" if n != missing]
    tools.hang_on.add(missing)
    tools.delays = {others[0]: 0.02}

    def recorded() -> bool:
        return sum(kind in ("called", "completed") for kind in store.kinds()) == 2

    crashed(world.runner(Scripted(body), store=store), [1], world.out, when=recorded)
    tools.hang_on.clear()
    tools.delays = {missing: 0.02}
    report = run(world.runner(Scripted(body)), [1], world.out)
    assert sorted(tools.made) == sorted(["a", "b", "c", missing])
    assert world.outputs() == [["done a", "done b", "done c"]]
    assert (report.calls_executed, report.calls_replayed) == (1, 2)


def test_three_equal_calls_beside_each_other_keep_their_own_results(world: World, tools: Tools) -> None:
    numbers = iter(range(10))
    hang = asyncio.Event

    async def draw() -> int:
        number = next(numbers)
        if number == 1:
            tools.hanging.add("draw")
            await for_ever()
        await asyncio.sleep(0.01 * (3 - number))
        return number

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await asyncio.gather(*(ctx.durable_execute(draw, effect="read", name="draw") for _ in range(3)))

    store = world.store()
    crashed(world.runner(Scripted(body), store=store), [1], world.out, when=lambda: store.kinds().count("called") == 2)
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [[0, 3, 2]]
    assert hang is asyncio.Event


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("delay", [0, 0.02])
def test_a_failure_beside_other_calls_that_leaves_the_action_is_tried_again(
    world: World, tools: Tools, effect: Any, delay: float
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await gathered(ctx, tools, effect)

    tools.fail_on["a"] = TimeoutError("outage")
    tools.delays = {"b": delay, "c": 2 * delay}
    with pytest.raises(ActionError, match="outage"):
        run(world.runner(Scripted(body)), [1], world.out)
    tools.fail_on.clear()
    run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made == ["a", "b", "c", "a"]
    assert world.outputs() == [["done a", "done b", "done c"]]


def test_a_failure_in_a_task_group_that_leaves_the_action_is_tried_again(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await grouped(ctx, tools, "read")

    tools.fail_on["b"] = TimeoutError("outage")
    with pytest.raises(ActionError):
        run(world.runner(Scripted(body)), [1], world.out)
    tools.fail_on.clear()
    run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made.count("b") == 2
    assert world.outputs() == [["done a", "done b", "done c"]]


def test_after_a_failure_was_tried_again_a_crash_still_replays(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await gathered(ctx, tools, "read")

    tools.fail_on["a"] = TimeoutError("outage")
    with pytest.raises(ActionError):
        run(world.runner(Scripted(body)), [1])
    tools.fail_on.clear()
    first, second = replayed(world, tools, body)
    assert first == second == ["done a", "done b", "done c"]
    assert tools.made == ["a", "b", "c", "a", "the end", "the end"]


def test_failures_that_were_gathered_replay(world: World, tools: Tools) -> None:
    tools.fail_on = {"a": TimeoutError("a"), "c": KeywordOnly(status=3, body={})}

    async def body(value: Any, ctx: RunnerContext) -> Any:
        found = await asyncio.gather(
            *(ctx.durable_execute(tools.call, n, effect="read") for n in "abc"), return_exceptions=True
        )
        return [as_seen(f) if isinstance(f, BaseException) else f for f in found]

    first, second = replayed(world, tools, body)
    assert first == second
    assert tools.made == ["a", "b", "c", "the end", "the end"]


@pytest.mark.parametrize("slow", ["m1", "bg", "m2"])
def test_work_beside_the_action_replays_although_recorded_calls_take_no_time(
    world: World, tools: Tools, slow: str
) -> None:
    tools.delays[slow] = 0.02

    async def body(value: Any, ctx: RunnerContext) -> Any:
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(ctx.durable_execute(tools.call, "bg", effect="idempotent"))
            one = await ctx.durable_execute(tools.call, "m1", effect="idempotent")
            two = await ctx.durable_execute(tools.call, "m2", effect="idempotent")
            three = await ctx.durable_execute(tools.call, "m3", effect="idempotent")
        return [one, two, three, beside.result()]

    first, second = replayed(world, tools, body)
    assert first == second == ["done m1", "done m2", "done m3", "done bg"]
    assert sorted(tools.made) == ["bg", "m1", "m2", "m3", "the end", "the end"]


def timed_out(tools: Tools, effect: Any, limit: float | None = 0.02) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> str:
        try:
            async with asyncio.timeout(limit):
                return str(await ctx.durable_execute(tools.call, "slow", effect=effect))
        except TimeoutError:
            pass
        await ctx.durable_execute(tools.call, "b", effect="idempotent")
        return "late"

    return Scripted(body)


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_call_that_the_action_cancelled_is_neither_made_again_nor_in_doubt(
    world: World, tools: Tools, effect: Any
) -> None:
    """As soon as it is on record that the action went on without it; it is cancelled in the replay as it was before."""
    tools.hang_on |= {"slow", "b"}
    crashed(world.runner(timed_out(tools, effect)), [1], world.out, when=lambda: "b" in tools.hanging)
    tools.hang_on.clear()
    tools.made.clear()  # whether it was begun in time or not
    report = run(world.runner(timed_out(tools, effect)), [1], world.out)
    assert tools.made == ["b"]
    assert world.outputs() == ["late"]
    assert (report.calls_executed, report.calls_replayed, report.parked) == (1, 1, [])


@pytest.mark.parametrize("effect", EFFECTS)
def test_until_that_is_on_record_a_cancelled_call_is_settled_by_its_effect(
    world: World, tools: Tools, effect: Any
) -> None:
    tools.hang_on.add("slow")
    store = world.store()
    reached = False

    async def hang(records: Sequence[Record]) -> None:
        nonlocal reached
        if any(orjson.loads(record.body)["kind"] == "abandoned" for record in records):
            reached = True
            await for_ever()

    store.before_put = hang
    crashed(world.runner(timed_out(tools, effect), store=store), [1], world.out, when=lambda: reached)
    tools.hang_on.clear()
    tools.made.clear()  # whether it was begun in time or not
    report = run(world.runner(timed_out(tools, effect, limit=None)), [1], world.out)
    assert tools.made == ([] if effect == "once" else ["slow"])
    assert world.outputs() == ([] if effect == "once" else ["done slow"])
    assert len(report.parked) == (effect == "once")


@pytest.mark.parametrize("signal", [asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("sync", [False, True])
def test_a_signal_out_of_a_call_is_never_its_outcome(world: World, tools: Tools, signal: Any, sync: bool) -> None:
    tools.fail_on["a"] = signal

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call_sync if sync else tools.call, "a", effect="idempotent")

    store = world.store()
    with pytest.raises(BaseException):  # noqa: B017, PT011
        run(world.runner(Scripted(body), store=store), [1], world.out)
    assert not {"completed", "called", "done"} & set(store.kinds())
    tools.fail_on.clear()
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == ["done a"]
    assert tools.made == ["a", "a"]


# --- P1, P2, P4: any crash between any two steps --------------------------------------------------------------------


class Scored(Event):
    score: int


class Whole(Agent):
    """Every kind of step: calls of each effect, a caught failure, calls in a group, memory, events, outputs."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    async def reconcile(self, what: str) -> Happened | DidNotHappen:
        return Happened(f"done {what}") if what in self.tools.made else DidNotHappen()

    @action(InputEvent)
    async def score(self, event: InputEvent, ctx: RunnerContext) -> None:
        n = event.input["n"]
        await ctx.durable_execute(self.tools.call, f"read {n}", effect="read")
        try:
            await ctx.durable_execute(self.tools.call, f"fails {n}", effect="read")
        except ValueError:
            ctx.short_term_memory.set("failed", ctx.short_term_memory.get("failed", 0) + 1)
        ctx.send_event(Scored(score=n))
        await ctx.durable_execute(self.tools.call, f"once {n}", reconcile=self.reconcile)
        ctx.sensory_memory.set("n", n)
        ctx.send_event(Scored(score=n))

    @action(Scored)
    async def after(self, event: Scored, ctx: RunnerContext) -> None:
        memory = ctx.short_term_memory
        memory.set("sum", memory.get("sum", 0) + event.score + ctx.sensory_memory.get("n"))
        calls = [ctx.durable_execute(self.tools.call, f"{x} {event.score}", effect="idempotent") for x in "pq"]
        results = await asyncio.gather(*calls)
        ctx.send_event(OutputEvent(output=[*results, memory.get("sum")]))


INPUT = [{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "a", "n": 3}, {"k": "b", "n": 4}]


def whole_run(world: World, tools: Tools, **options: Any) -> tuple[list[Any], dict[Any, Any]]:
    runner = world.runner(Whole(tools), **options)
    run(runner, INPUT, world.out, key="k")
    return sorted(map(str, world.outputs())), dict(runner.memories())


def failing_tools() -> Tools:
    tools = Tools()
    tools.fail_on = {f"fails {n}": ValueError("always") for n in (1, 2, 3, 4)}
    return tools


NO_TIMER = 3600
"""A linger for which batches do not depend on how quick the machine is."""


def count_puts(folder: Path) -> tuple[int, list[Any], dict[Any, Any], list[Any]]:
    folder.mkdir()
    world, tools = World("memory", folder), failing_tools()
    store = world.store()
    outputs, memories = whole_run(world, tools, store=store, max_in_flight=1, linger=NO_TIMER)
    return len(store.batches), outputs, memories, sorted(map(str, tools.made))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("interval", [3600.0, 0.001])
@pytest.mark.parametrize("crashes", [1, 2])
def test_a_crash_at_any_write_of_the_store_changes_nothing(
    tmp_path: Path, moment: str, interval: float, crashes: int
) -> None:
    puts, outputs, memories, made = count_puts(tmp_path / "model")
    assert puts > 10
    missed = 0
    for point in range(puts):
        folder = tmp_path / str(point)
        folder.mkdir()
        world, tools = World(STORES[point % 2], folder), failing_tools()
        for crash_number in range(crashes):
            store = world.store()
            reached = crash_at(store, moment, point if crash_number == 0 else point % 3)
            try:
                crashed(
                    world.runner(
                        Whole(tools), store=store, max_in_flight=1, checkpoint_interval=interval, linger=NO_TIMER
                    ),
                    INPUT,
                    world.out,
                    key="k",
                    when=reached,
                )
            except AssertionError as error:  # the last batches may be others when checkpoints come between
                missed += 1
                if "the run ended before the crash" not in str(error):
                    raise
        assert (point, *whole_run(world, tools)) == (point, outputs, memories)
        assert_made(tools, made, moment, point, crashes)
        assert asyncio.run(world.recorded_async()) == {}, "everything is covered by the last checkpoint"
    assert missed <= 3 * crashes


def crash_at(store: SpyStore, moment: str, point: int) -> Callable[[], bool]:
    """Let put number *point* hang, before or after it does its work."""
    reached = False

    async def hang(records: Sequence[Record]) -> None:
        nonlocal reached
        if len(store.batches) == point + (moment == "after"):
            reached = True
            await for_ever()

    if moment == "before":
        store.before_put = hang
    else:
        store.after_put = hang
    return lambda: reached


def assert_made(tools: Tools, made: list[Any], moment: str, point: int, crashes: int = 1) -> None:
    assert set(map(str, tools.made)) == set(made)
    for what in made:
        extra = tools.count(what) - made.count(what)
        assert extra <= (0 if what.startswith("once") else crashes), f"{what} ran {extra} times more: {moment} {point}"


@pytest.mark.parametrize("swallow", [(), Exception, BaseException])
@pytest.mark.parametrize("error", [OSError("disk full"), StoreError("no store"), FencedError("taken over")])
def test_nothing_goes_on_past_a_failed_write_and_afterwards_nothing_was_lost(
    tmp_path: Path, swallow: Any, error: Exception
) -> None:
    """P5: whichever write fails, and whatever the action catches."""

    class Swallowing(Whole, name="Whole"):
        @action(InputEvent)
        async def score(self, event: InputEvent, ctx: RunnerContext) -> None:
            try:
                await super().score(event, ctx)
            except swallow:
                for what in ("read", "idempotent", "once"):
                    with contextlib.suppress(swallow):
                        await ctx.durable_execute(self.tools.call, f"after the failure, {what}", effect=what)

    puts, outputs, memories, made = count_puts(tmp_path / "model")
    failed = 0
    for point in range(puts):
        folder = tmp_path / str(point)
        folder.mkdir()
        world, tools = World(STORES[point % 2], folder), failing_tools()
        store = world.store()
        made_then: list[Any] = []

        async def fail(
            records: Sequence[Record],
            store: SpyStore = store,
            tools: Tools = tools,
            made_then: list[Any] = made_then,
            point: int = point,
        ) -> None:
            if len(store.batches) >= point:
                made_then.extend(tools.made)
                raise error

        store.before_put = fail
        expected = type(error) if isinstance(error, StoreError) else StoreError
        try:
            run(world.runner(Swallowing(tools), store=store, max_in_flight=1), INPUT, world.out, key="k")
        except expected:
            failed += 1
        else:
            assert len(store.batches) <= point  # records that nobody waits for may share a batch, so there are fewer
        assert not [what for what in tools.made if "after the failure" in str(what)]
        assert not made_then or len(tools.made) <= len(made_then) + 2, "reads that were under way, at most"
        assert whole_run(world, tools) == (outputs, memories)
        assert_made(tools, made, "failing", point)
    assert failed >= puts - 3


def test_a_read_does_not_start_after_a_failed_write(world: World, tools: Tools) -> None:
    store = world.store()
    failed = False

    async def fail(records: Sequence[Record]) -> None:
        nonlocal failed
        failed = True
        raise OSError("disk gone")

    store.before_put = fail

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "a", effect="read")
        await until(lambda: failed)
        await asyncio.sleep(0.001)
        await ctx.durable_execute(tools.call, "b", effect="read")

    with pytest.raises(StoreError, match=r"OSError: disk gone"):
        run(world.runner(Scripted(body), store=store), [1])
    assert tools.made == ["a"]


def test_a_store_that_never_answers_keeps_every_effect_back(world: World, tools: Tools) -> None:
    store = world.store()
    waiting = False

    async def hang(records: Sequence[Record]) -> None:
        nonlocal waiting
        waiting = True
        await for_ever()

    store.before_put = hang

    async def body(value: Any, ctx: RunnerContext) -> str:
        await ctx.durable_execute(tools.call, "a", effect="idempotent")
        return "out"

    async def main() -> None:
        task = asyncio.ensure_future(world.runner(Scripted(body), store=store).run_async([1], world.out))
        await until(lambda: waiting)
        await asyncio.sleep(0.05)
        assert tools.made == []
        assert world.outputs() == []
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


# --- P7: divergence -------------------------------------------------------------------------------------------------


def in_flight(world: World, tools: Tools, calls: str, *, source: Any = ("input",)) -> None:
    """A message of which *calls* are recorded; the last one hangs."""
    tools.hang_on.add(calls[-1])
    crashed(world.runner(Scripted(sequence(tools, calls))), list(source), world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()


def sequence(tools: Tools, calls: str) -> Any:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [await ctx.durable_execute(tools.call, what, effect="idempotent") for what in calls]

    return body


@pytest.mark.parametrize(
    ("change", "calls", "expected", "found"),
    [
        ("inserted first", "xabc", "'a'", "'x'"),
        ("inserted", "axbc", "'b'", "'x'"),
        ("removed first", "bc", "'a'", "'b'"),
        ("removed", "ac", "'b'", "'c'"),
        ("swapped", "bac", "'a'", "'b'"),
        ("edited", "aBc", "'b'", "'B'"),
        ("repeated", "aabc", "'b'", "'a'"),
    ],
)
def test_changed_calls_are_found_before_anything_executes(
    world: World, tools: Tools, change: str, calls: str, expected: str, found: str
) -> None:
    in_flight(world, tools, "abc")
    store = world.store()
    with pytest.raises(DivergenceError) as caught:
        run(world.runner(Scripted(sequence(tools, calls)), store=store), ["input"], world.out)
    message = str(caught.value)
    assert "job 'job', key None, message '0', action 'act'" in message
    assert f"Expected the recorded call tests.helpers:Tools.call({expected})" in message
    assert f"found the call tests.helpers:Tools.call({found})" in message
    assert tools.made == ["a", "b", "c"]
    assert store.batches == []
    run(world.runner(Scripted(sequence(tools, "abc"))), ["input"], world.out)
    assert world.outputs() == [["done a", "done b", "done c"]]
    assert tools.made == ["a", "b", "c", "c"]


def test_calls_removed_from_the_end_are_found(world: World, tools: Tools) -> None:
    in_flight(world, tools, "abc")
    with pytest.raises(DivergenceError, match=r"The record has the call .*'c'.*the action ended without making it"):
        run(world.runner(Scripted(sequence(tools, "ab"))), ["input"], world.out)
    assert world.outputs() == []
    run(world.runner(Scripted(sequence(tools, "abc"))), ["input"], world.out)
    assert world.outputs() == [["done a", "done b", "done c"]]


@pytest.mark.parametrize("swallow", [Exception, BaseException])
def test_a_divergence_cannot_be_swallowed(world: World, tools: Tools, swallow: Any) -> None:
    in_flight(world, tools, "abc")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        for what in ("x", "a", "b", "c", "y"):
            with contextlib.suppress(swallow):
                await ctx.durable_execute(tools.call, what, effect="idempotent")
        return "went on"

    with pytest.raises(DivergenceError):
        run(world.runner(Scripted(body)), ["input"], world.out)
    assert tools.made == ["a", "b", "c"]
    assert world.outputs() == []


def test_an_edited_input_is_found_before_anything_executes(world: World, tools: Tools) -> None:
    in_flight(world, tools, "abc")
    with pytest.raises(DivergenceError, match=r"its content is not what was recorded for it.*the input was edited"):
        run(world.runner(Scripted(sequence(tools, "abc"))), ["Input"], world.out)
    assert tools.made == ["a", "b", "c"]


def test_another_function_of_the_same_arguments_does_not_get_the_answer(world: World, tools: Tools) -> None:
    in_flight(world, tools, "ab")

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call_sync, "a", effect="idempotent")

    with pytest.raises(
        DivergenceError, match=r"Expected .*Tools\.call\('a'\); found the call .*Tools\.call_sync\('a'\)"
    ):
        run(world.runner(Scripted(body)), ["input"], world.out)


def test_a_key_function_that_changed_is_found_before_anything_executes(world: World, tools: Tools) -> None:
    tools.hang_on.add("b")
    source = [{"k": "x", "l": "y"}]
    agent = Scripted(sequence(tools, "ab"))
    crashed(world.runner(agent), source, world.out, key="k", when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    with pytest.raises(DivergenceError, match="message '0' has the key 'y', but was recorded with 'x'"):
        run(world.runner(agent), source, world.out, key="l")
    assert tools.made == ["a", "b"]
    run(world.runner(agent), source, world.out, key="k")
    assert world.outputs() == [["done a", "done b"]]


class First(Event):
    pass


def two_steps(tools: Tools, *, first: str = "first", second: str | None = "second", more: bool = False) -> Agent:
    """An agent of the recorded name ``Two`` whose actions are named as given; *second* None leaves it out."""

    class Two(Agent, name="Two"):
        @action(InputEvent, name=first)
        async def one(self, event: InputEvent, ctx: RunnerContext) -> None:
            await ctx.durable_execute(tools.call, "a", effect="idempotent")
            ctx.send_event(First())

        if more:

            @action(InputEvent)
            async def extra(self, event: InputEvent, ctx: RunnerContext) -> None:
                await ctx.durable_execute(tools.call, "extra", effect="idempotent")

        @action(First, name=second or "other")
        async def two(self, event: First, ctx: RunnerContext) -> None:
            await ctx.durable_execute(tools.call, "b", effect="idempotent")
            await ctx.durable_execute(tools.call, "c", effect="idempotent")

    if second is None:

        class Cut(Agent, name="Two"):
            one = Two.one

        return Cut()
    return Two()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"first": "uno"},
            r"Expected the recorded action 'first' for InputEvent; found the action 'uno'.*name='first'",
        ),
        ({"second": "due"}, r"Expected the recorded action 'second' for First; found the action 'due' for First"),
        ({"more": True}, r"Expected the recorded action 'second' for First; found the action 'extra' for InputEvent"),
        ({"second": None}, r"An event First is recorded, but no action of the code handles it"),
    ],
)
def test_changed_actions_are_found_before_anything_executes(
    world: World, tools: Tools, changed: Any, match: str
) -> None:
    tools.hang_on.add("c")
    crashed(world.runner(two_steps(tools)), ["input"], when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    with pytest.raises(DivergenceError, match=match):
        run(world.runner(two_steps(tools, **changed)), ["input"])
    assert tools.made == ["a", "b", "c"]
    run(world.runner(two_steps(tools)), ["input"])
    assert tools.made == ["a", "b", "c", "c"]


# --- P8: only the owner writes --------------------------------------------------------------------------------------


def test_a_process_that_lost_the_job_records_nothing_and_stops(tmp_path: Path, tools: Tools) -> None:
    """One decision survives; the zombie's answer comes too late."""
    world = World("memory", tmp_path)
    answers = iter(["approve", "reject"])
    go = False

    async def decide() -> str:
        answer = next(answers)
        await until(lambda: answer == "reject" or go)
        return answer

    async def body(value: Any, ctx: RunnerContext) -> Any:
        answer = await ctx.durable_execute(decide, effect="read", name="decide")
        await ctx.durable_execute(tools.call, answer)
        return answer

    async def main() -> None:
        nonlocal go
        zombie = asyncio.ensure_future(world.runner(Scripted(body)).run_async([1]))
        await until(lambda: "job" in world.jobs)
        await asyncio.sleep(0.05)
        MemoryStore(world.jobs).take_over("job")
        runner = world.runner(Scripted(body), checkpoints=tmp_path / "other.db")
        report = await runner.run_async([1], world.out)
        assert report.messages == 1
        go = True
        with pytest.raises(FencedError):
            await zombie

    asyncio.run(main())
    assert tools.made == ["reject"]
    assert world.outputs() == ["reject"]


# --- P10: nothing is read as nothing --------------------------------------------------------------------------------


def a_record(body: bytes, key: bytes = b"null", message: str = "0") -> Record:
    return Record(key, message, "task-1", body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80\x04N.",
        b"{",
        b"null",
        b"{}",
        orjson.dumps({"v": 99, "kind": "done"}),
        orjson.dumps({"v": 1, "kind": "done"}),
        orjson.dumps({"v": 1, "kind": "unheard-of", "task": {"action": "a", "event": "E", "sender": "", "index": 0}}),
    ],
)
def test_a_record_that_cannot_be_read_stops_the_job_and_is_named(world: World, tools: Tools, body: bytes) -> None:
    world.add_records([a_record(body)])
    with pytest.raises(RecordError, match="record of key null, message '0', action task 'task-1'"):
        run(world.runner(Scripted(sequence(tools, "a"))), [1], world.out)
    assert tools.made == []
    assert world.outputs() == []


def test_a_recorded_value_that_cannot_be_loaded_stops_the_message(world: World, tools: Tools) -> None:
    in_flight(world, tools, "ab")
    damaged = [
        Record(state.key, state.message, state.task, b'{"v":1,"kind":"completed","call":1,"result":{"$":"unheard-of"}}')
        for states in asyncio.run(world.recorded_async()).values()
        for state in states
    ]
    world.add_records(damaged)
    with pytest.raises((CodecError, RecordError, ActionError), match="unheard-of"):
        run(world.runner(Scripted(sequence(tools, "ab"))), ["input"], world.out)
    assert tools.made == ["a", "b"]
    assert world.outputs() == []


# --- what is counted ------------------------------------------------------------------------------------------------


def test_executed_and_replayed_calls_are_counted_apart(world: World, tools: Tools) -> None:
    in_flight(world, tools, "abc")
    report = run(world.runner(Scripted(sequence(tools, "abc"))), ["input", "more"], world.out)
    assert (report.calls_executed, report.calls_replayed) == (4, 2)
    assert (report.messages, report.outputs) == (2, 2)


def test_a_stop_leaves_an_action_at_the_boundary_of_a_call(world: World, tools: Tools) -> None:
    """Calls in flight end and are recorded, none begins; the message goes on in the next run."""
    runner = None

    async def body(value: Any, ctx: RunnerContext) -> Any:
        calls = [ctx.durable_execute(tools.call, what) for what in "ab"]
        assert runner is not None
        asyncio.get_running_loop().call_later(0.01, runner.stop)
        tools.delays = {"a": 0.05, "b": 0.05}
        await asyncio.gather(*calls)
        return await ctx.durable_execute(tools.call, "c")

    runner = world.runner(Scripted(body))
    report = run(runner, [1], world.out)
    assert report.stopped_by == "stop()"
    assert tools.made == ["a", "b"]
    runner = world.runner(Scripted(sequence_of_pairs(tools)))
    report = run(runner, [1], world.out)
    assert tools.made == ["a", "b", "c"]
    assert report.parked == []


def sequence_of_pairs(tools: Tools) -> Any:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        await asyncio.gather(*(ctx.durable_execute(tools.call, what) for what in "ab"))
        return await ctx.durable_execute(tools.call, "c")

    return body


@pytest.mark.parametrize("linger", [0.0, 3600.0])
def test_what_a_failing_job_recorded_is_durable_when_the_run_ends(world: World, tools: Tools, linger: float) -> None:
    """Nobody waits for the response of a read, or for a failed attempt; both are still history."""
    tools.fail_on["b"] = TimeoutError("outage")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, "a", effect="read")
        return await ctx.durable_execute(tools.call, "b")

    with pytest.raises(ActionError):
        run(world.runner(Scripted(body), linger=linger), [1], world.out)
    tools.fail_on.clear()
    assert run(world.runner(Scripted(body)), [1], world.out).parked == []
    assert tools.made == ["a", "b", "b"]


def test_the_log_of_a_parked_message_says_why(world: World, tools: Tools, caplog: pytest.LogCaptureFixture) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, "a")

    tools.hang_on.add("a")
    asyncio.run(crash(world.runner(Scripted(body)), [1], when=lambda: bool(tools.hanging)))
    with caplog.at_level(logging.WARNING, "dalsegno"):
        run(world.runner(Scripted(body)), [1])
    assert "message '0' of key None is parked" in caplog.text
