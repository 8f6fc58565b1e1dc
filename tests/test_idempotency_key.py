"""The idempotency key reaches whoever asks for it, and is part of nothing that is recorded."""

from __future__ import annotations

import asyncio
import functools
import re
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno import (
    ActionError,
    Agent,
    DefinitionError,
    Happened,
    IdempotencyKey,
    InputEvent,
    LocalRunner,
    OutputEvent,
    RetryPolicy,
    RunnerContext,
    action,
    current_call,
)
from dalsegno import IdempotencyKey as Renamed
from tests.helpers import Scripted, Tools, World, crashed, run

if TYPE_CHECKING:
    from dalsegno import IdempotencyKey as IdempotencyKeyOfTheChecker  # noqa: F401


def outputs(body: Any) -> Any:
    """What the one message of a job with the action *body* puts out."""
    found: list[Any] = []
    run(LocalRunner(Scripted(body), job="job", store="memory://"), [1], found.append)
    return found[0] if found else None


HEX = re.compile(r"[0-9a-f]{32}")


# --- ways to get it -------------------------------------------------------------------------------------------------


async def by_name(order: str, idempotency_key: str = "") -> list[str]:
    return [order, idempotency_key, current_call().idempotency_key]


async def by_keywords(order: str, **more: Any) -> list[str]:
    return [order, more["idempotency_key"], current_call().idempotency_key]


async def by_mark(order: str, key: IdempotencyKey) -> list[str]:
    return [order, key, current_call().idempotency_key]


async def by_mark_first(key: Renamed, *, order: str) -> list[str]:
    return [order, key, current_call().idempotency_key]


def by_mark_in_a_thread(order: str, *, key: Optional[IdempotencyKey] = None) -> list[str | None]:  # noqa: UP045
    return [order, key, current_call().idempotency_key]


def by_union(order: str, key: IdempotencyKey | None = None) -> list[str | None]:
    return [order, key, current_call().idempotency_key]


def by_annotated(order: str, key: Annotated[IdempotencyKey, "a header"]) -> list[str]:
    return [order, key, current_call().idempotency_key]


def by_metadata(order: str, key: Annotated[str, IdempotencyKey]) -> list[str]:
    return [order, key, current_call().idempotency_key]


def by_what_only_the_checker_sees(order: str, key: typing.Union[IdempotencyKey, Missing]) -> list[str]:  # type: ignore[name-defined] # noqa: F821, UP007
    return [order, key, current_call().idempotency_key]


class Service:
    async def by_method(self, order: str, key: IdempotencyKey) -> list[str]:
        return [order, key, current_call().idempotency_key]

    @classmethod
    def by_classmethod(cls, order: str, key: IdempotencyKey) -> list[str]:
        return [order, key, current_call().idempotency_key]


def unquoted(order: str, key: str) -> list[str]:
    return [order, key, current_call().idempotency_key]


unquoted.__annotations__["key"] = IdempotencyKey | None

MARKED: list[Callable[..., Any]] = [
    by_mark,
    by_mark_in_a_thread,
    by_union,
    by_annotated,
    by_metadata,
    by_what_only_the_checker_sees,
    Service().by_method,
    Service.by_classmethod,
    unquoted,
    functools.partial(by_mark),
]


@pytest.mark.parametrize("function", MARKED, ids=lambda function: getattr(function, "__name__", "partial"))
def test_a_marked_parameter_gets_the_key(function: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(function, "A1", name="pay")

    order, key, current = outputs(body)
    assert order == "A1"
    assert key == current
    assert HEX.fullmatch(key)


@pytest.mark.parametrize("function", MARKED, ids=lambda function: getattr(function, "__name__", "partial"))
@pytest.mark.parametrize("given_as", ["position", "name"])
def test_an_argument_that_the_caller_gives_wins(function: Any, given_as: str) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        if given_as == "position" and function is not by_mark_in_a_thread:  # where it is a keyword-only one
            return await ctx.durable_execute(function, "A1", "mine", name="pay")
        return await ctx.durable_execute(function, "A1", key="mine", name="pay")

    assert outputs(body)[1] == "mine"


def test_a_marked_parameter_may_come_first_and_be_imported_under_another_name() -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(by_mark_first, order="A1")

    _, key, current = outputs(body)
    assert key == current


@pytest.mark.parametrize("function", [by_name, by_keywords])
def test_the_option_gives_it_under_its_own_name(function: Any) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        kept = await ctx.durable_execute(function, "A1", kwargs={"idempotency_key": "mine"}, idempotency_key=True)
        return [kept, await ctx.durable_execute(function, "A1", idempotency_key=True)]

    (_, mine, _), (_, key, current) = outputs(body)
    assert mine == "mine"
    assert key == current


def test_without_the_option_nothing_is_given() -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(by_name, "A1")

    assert outputs(body)[1] == ""


def test_the_context_knows_it_inside_closures_and_methods_in_threads_and_out() -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        async def closure() -> list[str]:
            return [ctx.idempotency_key, current_call().idempotency_key]

        def in_thread() -> list[str]:
            return [ctx.idempotency_key, current_call().idempotency_key]

        return [
            await ctx.durable_execute(closure, name="closure"),
            await ctx.durable_execute(in_thread, name="in thread"),
        ]

    (a, b), (c, d) = outputs(body)
    assert a == b != c == d


def test_outside_of_a_call_the_context_has_none() -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        with pytest.raises(LookupError, match=r"ctx\.idempotency_key is the key of a durable call"):
            _ = ctx.idempotency_key

    outputs(body)


def test_a_plain_def_action_hands_it_on_too() -> None:
    class Plain(Agent):
        @action(InputEvent)
        def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            ctx.send_event(OutputEvent(output=ctx.durable_execute_sync(by_union, "A1")))

    found: list[Any] = []
    run(LocalRunner(Plain(), job="job", store="memory://"), [1], found.append)
    assert found[0][1] == found[0][2]


# --- it is no argument ----------------------------------------------------------------------------------------------


def test_it_is_neither_recorded_nor_part_of_the_fingerprint(world: World) -> None:
    store = world.store()

    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(by_mark, "A1")
        await ctx.durable_execute(by_name, "A1", idempotency_key=True)
        await ctx.durable_execute(by_name, "A1")

    run(world.runner(Scripted(body), store=store), [1])
    requested = [body for body in store.bodies() if body["kind"] == "requested"]
    assert [body["args"] for body in requested] == [["A1"]] * 3
    assert not any("kwargs" in body for body in requested)
    assert len({body["args_digest"] for body in requested}) == 1


def test_a_reconcile_gets_it_in_the_same_way(world: World, tools: Tools) -> None:
    keys: dict[str, list[Any]] = {}

    async def pay(order: str, key: IdempotencyKey) -> Any:
        keys.setdefault(order, []).append(key)
        return await tools.call(order)

    async def find(order: str, key: IdempotencyKey) -> Happened:
        keys[order].append(key)
        return Happened("found")

    def find_by_option(order: str, idempotency_key: str) -> Happened:
        keys[order].append(idempotency_key)
        return Happened("found")

    def find_without(order: str) -> Happened:
        return Happened("found")

    async def pay_by_option(order: str, idempotency_key: str) -> Any:
        return await pay(order, IdempotencyKey(idempotency_key))

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value == "a":
            return await ctx.durable_execute(pay, value, name="pay", reconcile=find)
        reconcile = find_by_option if value == "b" else find_without
        return await ctx.durable_execute(pay_by_option, value, name="pay", reconcile=reconcile, idempotency_key=True)

    source = ["a", "b", "c"]
    tools.hang_on = set(source)
    crashed(world.runner(Scripted(body)), source, world.out, key=str, when=lambda: len(tools.hanging) == 3)
    report = run(world.runner(Scripted(body)), source, world.out, key=str)
    assert report.parked == []
    assert world.outputs() == ["found"] * 3
    assert [len(keys[order]) for order in source] == [2, 2, 1]
    assert [len(set(keys[order])) for order in source] == [1, 1, 1]


def test_it_is_the_same_in_each_attempt_before_and_after_a_crash(world: World, tools: Tools) -> None:
    keys: list[str] = []

    async def pay(order: str, key: IdempotencyKey) -> Any:
        keys.append(key)
        if len(keys) < 3:
            raise ConnectionError("down")
        return await tools.call(order)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        policy = RetryPolicy(attempts=5, backoff=0)
        return await ctx.durable_execute(pay, value, name="pay", effect="idempotent", retry=policy, timeout=9)

    tools.hang_on = {"a"}
    crashed(world.runner(Scripted(body)), ["a"], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on = set()
    run(world.runner(Scripted(body)), ["a"], world.out)
    assert len(keys) == 4
    assert len(set(keys)) == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(["pay", "refund", "é\u0000\n"]), values), min_size=1, max_size=6),
    messages=st.lists(values, min_size=1, max_size=3),
    job=st.sampled_from(["job", "other job", "日本"]),
)
def test_every_call_has_its_own_key_the_same_in_every_run_and_legal_in_a_header(
    calls: list[tuple[str, Any]], messages: list[Any], job: str
) -> None:
    def keys() -> list[str]:
        made: list[str] = []

        async def note(value: Any, key: IdempotencyKey) -> None:
            made.append(key)

        async def body(value: Any, ctx: RunnerContext) -> None:
            for name, argument in calls:
                await ctx.durable_execute(note, argument, name=name, effect="idempotent")
            await asyncio.gather(*(ctx.durable_execute(note, 1, name="pay", effect="read") for _ in range(2)))

        run(LocalRunner(Scripted(body), job=job, store="memory://"), messages)
        return made

    made = keys()
    assert len(set(made)) == len(made) == len(messages) * (len(calls) + 2)
    assert keys() == made
    assert all(HEX.fullmatch(key) for key in made)


# --- what is refused ------------------------------------------------------------------------------------------------


def positional_only(order: str, key: IdempotencyKey, /) -> None: ...


def takes_none(order: str) -> None: ...


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((takes_none, {"idempotency_key": True}), "it has no such parameter"),
        ((takes_none, {"idempotency_key": 1}), "idempotency_key=1 is not True or False"),
        ((takes_none, {"idempotency_key": None}), "idempotency_key=None is not True or False"),
        ((by_name, {"idempotency_key": "mine"}), r"kwargs=\{'idempotency_key': \.\.\.\}"),
        ((positional_only, {}), "move the / of the signature before it"),
    ],
)
def test_what_cannot_be_meant_is_refused(world: World, call: Any, message: str) -> None:
    function, options = call

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(function, "A1", **options)

    with pytest.raises(ActionError, match=message) as caught:
        run(world.runner(Scripted(body)), [1])
    assert isinstance(caught.value.__cause__, DefinitionError)
