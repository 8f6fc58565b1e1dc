"""Values of every kind in every place where a value can be: the same value and type in the first run and a replay."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import pydantic
import pytest

from dalsegno import Agent, Event, Happened, InputEvent, OutputEvent, RunnerContext, action, register
from dalsegno.runners.sinks import CallableSink
from tests.helpers import Tools, World, crashed, run
from tests.test_parking import retry


@register
class Colour(Enum):
    RED = 1


@register
class Level(IntEnum):
    HIGH = 3


@register
class Word(StrEnum):
    YES = "yes"


@register
class Pair(NamedTuple):
    a: int
    b: Any


@register
@dataclass(frozen=True)
class Price:
    amount: Decimal
    colour: Colour


@register
class Answer(pydantic.BaseModel):
    text: str
    scores: dict[int, float] = {}


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False, 1, 0, 1.0, 0.0, -0.0],
    "big integers": [2**53 + 1, 2**63, 2**70, -(2**70), 10**100],
    "floats": [math.nan, math.inf, -math.inf, 5e-324, 0.1],
    "texts": ["", "\0", "a\0b", "\ud800", "\udfff x", "e\u0301", "é", "😀", "\u2028"],
    "bytes": [b"", b"\xff\0", "é".encode()],
    "tuples": (1, (2, ()), [3]),
    "sets": [{1, "1", (1,)}, frozenset({b"a"}), set()],
    "keys": {1: "a", "1": "b", None: "c", (1, 2): "d", 2.5: "e", b"x": "f", date(2024, 1, 1): "g"},
    "decimals": [Decimal("1.50"), Decimal("1.5"), Decimal("-0"), Decimal("1E+3"), Decimal("Infinity")],
    "times": [
        datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=45))),
        datetime(2024, 1, 2),
        *(date(2024, 2, 29), time(1, 2, 3), timedelta(days=-1, microseconds=1)),
    ],
    "enums": [Colour.RED, Level.HIGH, Word.YES],
    "classes": [Price(Decimal("1.50"), Colour.RED), Pair(1, (2,)), Answer(text="t", scores={1: 0.5}), UUID(int=7)],
    "like an envelope": [{"$": "tuple", "v": [1]}, {"$": 1}, {"$": {"$": "x"}}],
    "large": "x" * 1_000_000,
}


def exact(value: Any) -> Any:
    """What is equal for values that are equal, of the same types all the way down, and in the same order."""
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, Decimal):
        return Decimal, str(value)
    if isinstance(value, datetime):
        return datetime, value.isoformat(), value.utcoffset()
    if isinstance(value, Enum):
        return type(value), value.name, id(value)
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(exact, value)))
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    if isinstance(value, (Price, Answer)):
        return type(value), exact(vars(value))
    return type(value), value


def same_items(one: Any, other: Any) -> bool:
    return sorted(map(repr, one[1])) == sorted(map(repr, other[1]))


class Carried(Event):
    value: Any


class Refused(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__("refused")
        self.value = value


class Everywhere(Agent):
    """Puts the value wherever one can be, and notes where it saw what."""

    def __init__(self, tools: Tools, value: Any) -> None:
        self.tools = tools
        self.value = value
        self.seen: list[tuple[str, Any]] = []

    def saw(self, where: str, value: Any) -> None:
        self.seen.append((where, exact(value)))

    async def give(self, value: Any, *, by_name: Any) -> Any:
        self.saw("argument", value)
        self.saw("keyword argument", by_name)
        self.tools.made.append("give")
        return self.value

    async def refuse(self) -> None:
        self.tools.made.append("refuse")
        raise Refused(self.value)

    async def vanish(self, value: Any) -> Any:
        return await self.tools.call("vanish")

    async def find(self, value: Any) -> Happened:
        self.saw("argument of reconcile", value)
        return Happened(self.value)

    @action(InputEvent)
    async def first(self, event: InputEvent, ctx: RunnerContext) -> None:
        self.saw("input", event.input)
        self.saw("key", ctx.key)
        result = await ctx.durable_execute(self.give, event.input, by_name=event.input, effect="read")
        self.saw("result", result)
        try:
            await ctx.durable_execute(self.refuse, effect="read")
        except Refused as error:
            self.saw("exception", error.value)
        found = await ctx.durable_execute(self.vanish, event.input, reconcile=self.find)
        self.saw("result of reconcile", found)
        ctx.short_term_memory.set(("a name", "\0 \ud800"), result)
        ctx.sensory_memory.set("value", result)
        ctx.send_event(Carried(value=result))

    @action(Carried)
    async def second(self, event: Carried, ctx: RunnerContext) -> None:
        self.saw("event", event.value)
        self.saw("short-term memory", ctx.short_term_memory.get(("a name", "\0 \ud800")))
        self.saw("sensory memory", ctx.sensory_memory.get("value"))
        await ctx.durable_execute(self.tools.call, "end", effect="idempotent")
        ctx.send_event(OutputEvent(output=event.value))


PLACES = {
    *("input", "key", "argument", "keyword argument", "result", "exception", "argument of reconcile"),
    *("result of reconcile", "event", "short-term memory", "sensory memory", "output", "memory of the key"),
}


def itself(value: Any) -> Any:
    return value


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_the_same_in_every_place_live_and_after_crashes(world: World, tools: Tools, name: str) -> None:
    agent = Everywhere(tools, VALUES[name])

    def output(value: Any) -> None:
        agent.saw("output", value)

    for hangs_in in ("vanish", "end", "end"):
        tools.hanging.clear()
        tools.hang_on = {hangs_in}
        crashed(
            world.runner(agent),
            [VALUES[name]],
            CallableSink(output),
            key=itself,
            when=lambda hangs_in=hangs_in: hangs_in in tools.hanging,  # type: ignore[misc]
        )
    tools.hang_on.clear()
    runner = world.runner(agent)
    run(runner, [VALUES[name]], CallableSink(output), key=itself)
    ((key, memory),) = runner.memories()
    agent.saw("key", key)
    agent.saw("memory of the key", memory["a name"]["\0 \ud800"])
    expected = exact(VALUES[name])
    keys = [value for where, value in agent.seen if where == "key"]
    assert keys == [keys[0]] * 3
    if isinstance(VALUES[name], dict):  # a key has one order, that of its canonical form
        agent.seen = [
            (where, expected if where == "key" and same_items(value, expected) else value)
            for where, value in agent.seen
        ]
    assert [where for where, value in agent.seen if value != expected] == []
    assert {where for where, _ in agent.seen} == PLACES
    assert {what: tools.count(what) for what in ("give", "refuse", "vanish")} == {"give": 1, "refuse": 1, "vanish": 1}


def test_what_tells_values_apart_is_not_too_kind() -> None:
    different = [1, 1.0, True, 0.0, -0.0, "1", b"1", (1,), [1], {1}, frozenset({1}), {1: 1}, Level.HIGH, 3, Pair(1, 2)]
    different += [(1, 2), OrderedDict({1: 1}), Decimal("1.5"), Decimal("1.50"), Word.YES, "yes", None, False, 0]
    assert len({repr(exact(value)) for value in different}) == len(different)
    assert exact(math.nan) == exact(math.nan)


def test_values_of_two_messages_side_by_side_are_not_shared(world: World, tools: Tools) -> None:
    """What one message does to a value that it was given is not seen by another, nor by its own replay."""
    shared: dict[str, list[int]] = {"list": []}
    tools.results["a"] = shared
    outputs: list[Any] = []

    class Appends(Agent):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            found = await ctx.durable_execute(tools.call, "a", effect="read")
            for holder in (found, event.input):
                holder["list"].append(ctx.message_id)
            await asyncio.sleep(0)
            await ctx.durable_execute(tools.call, "end", effect="idempotent")
            ctx.send_event(OutputEvent(output=[found, event.input]))

    def sink(value: Any) -> None:
        outputs.append(value)

    records = [shared, shared]
    tools.hang_on = {"end"}
    crashed(world.runner(Appends()), records, sink, key=lambda _: len(outputs), when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(Appends()), records, sink, key=lambda _: len(outputs))
    assert outputs == [[{"list": ["0"]}, {"list": ["0"]}], [{"list": ["1"]}, {"list": ["1"]}]]
    assert shared == {"list": []}


def test_a_key_has_one_order_in_its_first_run_and_when_it_comes_back_from_a_checkpoint(
    world: World, tools: Tools
) -> None:
    """A parked message comes back with its key as the checkpoint holds it; what is made of the key must not change."""
    source = [{"key": {"b": 1, "a": [2]}}]
    tools.fail_on["end"] = ConnectionError("down")
    seen: list[Any] = []

    class Lists(Agent):
        @action(InputEvent)
        async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
            seen.append(list(ctx.key.items()))
            ctx.key["a"].append("changed in place")
            await ctx.durable_execute(tools.call, str(seen[-1][0]), effect="read")
            await ctx.durable_execute(tools.call, "end", effect="read")

    assert len(run(world.runner(Lists(), on_failure="park"), source, key="key").parked) == 1
    tools.fail_on.clear()
    assert retry(world, {"a": [2], "b": 1})
    report = run(world.runner(Lists(), on_failure="park"), source, key="key")
    assert (report.parked, report.messages) == ([], 1)
    assert [[(name, value if name == "b" else value[:1]) for name, value in items] for items in seen] == [
        [("a", [2]), ("b", 1)]
    ] * 2
    assert source == [{"key": {"b": 1, "a": [2]}}]
