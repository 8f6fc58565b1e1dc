"""Faults that systems of this kind have had, each as what must hold instead; more of them lie by their subject."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dalsegno import (
    ActionError,
    AesGcmCipher,
    Agent,
    DivergenceError,
    Event,
    FencedError,
    InputEvent,
    OutputEvent,
    RecordError,
    RestoreError,
    RunnerContext,
    StoreError,
    action,
    register,
)
from dalsegno.core import codec
from dalsegno.core.identity import fingerprint
from dalsegno.core.records import Record
from dalsegno.stores.base import Covered
from dalsegno.stores.memory import MemoryStore
from tests.helpers import STORES, Scripted, SpyStore, Tools, World, crashed, run, until


def crash_in(world: World, tools: Tools, agent: Agent, what: Any, source: Any = (1,), **options: Any) -> None:
    tools.hang_on.add(what)
    crashed(world.runner(agent), list(source), world.out, when=lambda: what in tools.hanging, **options)
    tools.hang_on.clear()


def calls(tools: Tools, *names: Any, effect: Any = "idempotent") -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [await ctx.durable_execute(tools.call, name, effect=effect) for name in names]

    return Scripted(body)


# --- outcomes and exceptions ----------------------------------------------------------------------------------------


def test_an_error_that_leaves_the_action_is_tried_again_and_a_caught_one_replays(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        caught = None
        try:
            await ctx.durable_execute(tools.call, "caught", effect="read")
        except ConnectionError as error:
            caught = str(error)
        return [caught, await ctx.durable_execute(tools.call, "left", effect="read")]

    tools.fail_on = {"caught": ConnectionError("down"), "left": ConnectionError("down too")}
    for _ in range(3):
        with pytest.raises(ActionError, match="down too"):
            run(world.runner(Scripted(body)), [1], world.out)
    tools.fail_on = {}
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [["down", "done left"]]
    assert tools.count("left") == 4
    assert tools.count("caught") == 1


class RateLimited(Exception):
    def __init__(self, message: str, *, response: Any, body: object) -> None:
        super().__init__(message)
        self.response = response
        self.body = body
        self.status_code = 429


def test_an_exception_with_required_keyword_arguments_is_the_same_in_the_replay(world: World, tools: Tools) -> None:
    seen: list[Any] = []
    tools.fail_on["a"] = RateLimited("slow down", response=object(), body={"retry": 3})

    async def body(value: Any, ctx: RunnerContext) -> None:
        try:
            await ctx.durable_execute(tools.call, "a")
        except RateLimited as error:
            seen.append((str(error), error.status_code, error.body, repr(error.response)))
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    crash_in(world, tools, Scripted(body), "end")
    run(world.runner(Scripted(body)), [1], world.out)
    assert seen[0] == seen[1]
    assert seen[0][:3] == ("slow down", 429, {"retry": 3})
    assert tools.count("a") == 1


def test_a_crash_in_a_call_is_never_stored_as_its_outcome(world: World, tools: Tools) -> None:
    store = world.store()
    tools.hang_on.add("a")
    crashed(world.runner(calls(tools, "a"), store=store), [1], world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    assert store.kinds() == ["requested"]
    run(world.runner(calls(tools, "a")), [1], world.out)
    assert world.outputs() == [["done a"]]


def test_empty_results_replay_and_none_runs_again(world: World, tools: Tools) -> None:
    empty: dict[int, Any] = {0: None, 1: False, 2: 0, 3: "", 4: [], 5: {}, 6: ()}
    tools.results = dict(empty)
    crash_in(world, tools, calls(tools, *empty, "end"), "end")
    run(world.runner(calls(tools, *empty, "end")), [1], world.out)
    assert world.outputs() == [[None, False, 0, "", [], {}, [], "done end"]]
    assert [tools.count(n) for n in empty] == [1] * len(empty)


def test_a_result_that_cannot_be_recorded_is_an_error_before_anything_else_happens(
    world: World, tools: Tools, tmp_path: Path
) -> None:
    with (tmp_path / "open").open("w") as file:
        for unrecordable in ((n for n in (1,)), file, threading.Lock()):
            tools.results["a"] = unrecordable
            with pytest.raises(ActionError, match=r"Tools\.call was made.*result"):
                run(world.runner(calls(tools, "a", "b", effect="read")), [1], world.out)
    assert set(tools.made) == {"a"}
    assert world.outputs() == []


def test_after_the_store_is_back_what_was_recorded_is_not_executed_again(world: World, tools: Tools) -> None:
    store = world.store()

    async def fail(records: Sequence[Record]) -> None:
        if any(json.loads(record.body).get("call") == 2 for record in records):
            raise OSError("the store is away")

    store.before_put = fail
    agent = calls(tools, "a", "b", "c")
    with pytest.raises(StoreError):
        run(world.runner(agent, store=store), [1], world.out)
    assert tools.made == ["a", "b"]
    assert world.outputs() == []
    run(world.runner(agent), [1], world.out)
    assert world.outputs() == [["done a", "done b", "done c"]]
    assert tools.count("a") == tools.count("c") == 1


# --- identity and matching ------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
import dalsegno
from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, action

folder = Path(sys.argv[1])

class Kind(Enum):
    A = 1

@dalsegno.register
@dataclass
class Answer:
    text: str
    kind: Kind

class Refused(Exception):
    pass

def executed(what):
    with (folder / "executed").open("a") as file:
        file.write(what + "\\n")

async def ask(question: str) -> Answer:
    executed("ask")
    return Answer(question, Kind.A)

def refuse():
    executed("refuse")
    raise Refused("no")

async def last():
    executed("last")
    if len(sys.argv) > 2:
        import os
        os._exit(9)

class Mine(Agent):
    @action(InputEvent)
    async def act(self, event, ctx):
        answer = await ctx.durable_execute(ask, event.input, effect="read")
        try:
            await ctx.durable_execute(refuse)
        except Refused as error:
            text = str(error)
        await ctx.durable_execute(last, effect="idempotent")
        assert isinstance(answer, Answer) and answer == Answer("q", Kind.A) and answer.kind is Kind.A
        ctx.send_event(OutputEvent(output=[answer.text, text]))

if __name__ == "__main__":
    LocalRunner(Mine(), job="j", store=f"sqlite:///{folder}/s.db").run(["q"], folder / "out.jsonl")
"""


@pytest.mark.slow
def test_a_single_file_script_replays_in_another_process(tmp_path: Path) -> None:
    """With another hash seed, and imported as a module in place of run as a script."""
    script = tmp_path / "my_agent.py"
    script.write_text(SCRIPT)

    def python(*args: str, seed: str) -> int:
        path = os.pathsep.join([str(Path(__file__).parents[1] / "src"), str(tmp_path)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=environment, timeout=60, check=False
        ).returncode

    assert python(str(script), str(tmp_path), "crash", seed="1") == 9
    assert python(str(script), str(tmp_path), "crash", seed="2") == 9
    imported = f"import sys; sys.argv=['', {str(tmp_path)!r}]; import my_agent as m; from dalsegno import LocalRunner; "
    imported += (
        f"LocalRunner(m.Mine(), job='j', store='sqlite:///{tmp_path}/s.db').run(['q'], {str(tmp_path / 'out.jsonl')!r})"
    )
    assert python("-c", imported, seed="3") == 0
    assert (tmp_path / "executed").read_text().split() == ["ask", "refuse", "last", "last", "last"]
    assert json.loads((tmp_path / "out.jsonl").read_text()) == ["q", "no"]


def test_the_fingerprint_is_taken_before_the_call_that_changes_its_arguments(world: World, tools: Tools) -> None:
    async def sorts(items: list[int]) -> list[int]:
        tools.made.append("sort")
        items.sort()
        return items

    async def body(value: Any, ctx: RunnerContext) -> Any:
        items = [3, 1, 2]
        first = await ctx.durable_execute(sorts, items, effect="read", name="sort")
        return [items, first, await ctx.durable_execute(tools.call, "end", effect="idempotent")]

    crash_in(world, tools, Scripted(body), "end")
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [[[3, 1, 2], [1, 2, 3], "done end"]]
    assert tools.count("sort") == 1


def test_equal_values_have_equal_fingerprints_whatever_their_order_and_sharing() -> None:
    shared = [1]
    pairs: list[tuple[Any, Any]] = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([shared, shared], [[1], [1]]),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        ({(1, 2): 3, None: 4}, {None: 4, (1, 2): 3}),
    ]
    for left, right in pairs:
        assert fingerprint(codec.to_tree(left)) == fingerprint(codec.to_tree(right))
    different: list[Any] = [1, 1.0, True, "1", [1], (1,), {1}, None, b"1", {"1": None}]
    assert len({fingerprint(codec.to_tree(value)) for value in different}) == len(different)


class Ping(Event):
    n: int


class Echo(Agent):
    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @action(InputEvent)
    async def begin(self, event: InputEvent, ctx: RunnerContext) -> None:
        ctx.send_event(Ping(n=1))
        await ctx.durable_execute(self.tools.call, "begin", effect="idempotent")
        ctx.send_event(Ping(n=1))

    @action(Ping)
    async def ping(self, event: Ping, ctx: RunnerContext) -> None:
        count = ctx.short_term_memory.get("pings", 0) + 1
        ctx.short_term_memory.set("pings", count)
        ctx.send_event(OutputEvent(output=await ctx.durable_execute(self.tools.call, f"ping {count}", effect="read")))
        await ctx.durable_execute(self.tools.call, f"end {count}", effect="idempotent")


@pytest.mark.parametrize("crashes_in", [None, "begin", "end 1", "end 2"])
def test_two_equal_events_run_twice_and_none_is_lost_across_a_crash(
    world: World, tools: Tools, crashes_in: str | None
) -> None:
    if crashes_in:
        crash_in(world, tools, Echo(tools), crashes_in)
    runner = world.runner(Echo(tools))
    run(runner, [1], world.out)
    assert world.outputs() == ["done ping 1", "done ping 2"]
    assert tools.count("ping 1") == tools.count("ping 2") == 1
    assert dict(runner.memories()) == {None: {"pings": 2}}


def test_identities_are_structural_and_the_same_in_every_run(tmp_path: Path, tools: Tools) -> None:
    identities = []
    for n, kind in enumerate((*STORES, "memory")):
        folder = tmp_path / str(n)
        folder.mkdir()
        store = World(kind, folder).store()
        run(World(kind, folder).runner(Echo(tools), store=store), [1, 2], folder / "out.jsonl")
        identities.append(sorted((r.key, r.message, r.task, r.body) for batch in store.batches for r in batch))
    counts = [len(found) for found in identities]
    assert counts[0] == counts[1] == counts[2]
    assert [[i[:3] for i in found] for found in identities[1:]] == [[i[:3] for i in identities[0]]] * 2


def test_a_plain_wrapper_of_a_coroutine_function_is_awaited_and_runs_once(world: World, tools: Tools) -> None:
    def wrapper(what: str) -> Any:
        return tools.call(what)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        one = await ctx.durable_execute(wrapper, "a", name="wrapped", effect="read")
        two = await ctx.durable_execute(lambda: tools.call("b"), name="lambda", effect="read")
        return [one, two, await ctx.durable_execute(tools.call, "end", effect="idempotent")]

    crash_in(world, tools, Scripted(body), "end")
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [["done a", "done b", "done end"]]
    assert tools.made == ["a", "b", "end", "end"]


@pytest.mark.parametrize("missing", ["a", "b", "c"])
def test_after_two_of_three_gathered_calls_only_the_missing_one_runs_and_results_keep_their_order(
    world: World, tools: Tools, missing: str
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await asyncio.gather(*(ctx.durable_execute(tools.call, n, effect="read") for n in "abc"))

    store = world.store()
    tools.hang_on.add(missing)
    tools.delays = {"a": 0.02, "b": 0.01}
    crashed(world.runner(Scripted(body), store=store), [1], world.out, when=lambda: store.kinds().count("called") == 2)
    tools.hang_on.clear()
    tools.delays = {"b": 0.02, "c": 0.01}
    run(world.runner(Scripted(body)), [1], world.out)
    assert world.outputs() == [["done a", "done b", "done c"]]
    assert sorted(tools.made) == sorted(["a", "b", "c", missing])


def test_a_tool_never_gets_the_answer_of_another_instance_of_its_class(world: World) -> None:
    email, refund = Tools(), Tools()

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(email.call, "order 7")
        await ctx.durable_execute(refund.call, "order 7")

    with pytest.raises(ActionError, match="is called on two objects"):
        run(world.runner(Scripted(body)), [1])

    async def named(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(email.call, "order 7", name="email")
        await ctx.durable_execute(refund.call, "order 7", name="refund")

    run(world.runner(Scripted(named), "named"), [1])
    assert refund.made == ["order 7"]


def test_several_actions_of_a_message_are_no_divergence_and_later_messages_keep_their_records(
    world: World, tools: Tools
) -> None:
    class Several(Agent):
        @action(InputEvent)
        async def one(self, event: InputEvent, ctx: RunnerContext) -> None:
            await ctx.durable_execute(tools.call, f"one {event.input}", effect="idempotent")

        @action(InputEvent)
        async def two(self, event: InputEvent, ctx: RunnerContext) -> None:
            await ctx.durable_execute(tools.call, f"two {event.input}", effect="idempotent")

    tools.hang_on = {"two 0"}
    records = [{"k": n % 2, "n": n} for n in range(4)]

    class OfField(Several, name="Several"):
        @action(InputEvent)
        async def one(self, event: InputEvent, ctx: RunnerContext) -> None:
            event.input = event.input["n"]
            await super().one(event, ctx)

        @action(InputEvent)
        async def two(self, event: InputEvent, ctx: RunnerContext) -> None:
            event.input = event.input["n"]
            await super().two(event, ctx)

    crashed(
        world.runner(OfField()),
        records,
        world.out,
        key="k",
        when=lambda: "two 3" in tools.made and "two 0" in tools.hanging,
    )
    tools.hang_on.clear()
    run(world.runner(OfField()), records, world.out, key="k")
    assert tools.count("one 0") == 1
    assert tools.count("two 0") == 2
    assert tools.count("one 1") == tools.count("two 1") == tools.count("one 3") == 1


def test_changed_code_stops_with_expected_and_found_before_anything_executes(world: World, tools: Tools) -> None:
    crash_in(world, tools, calls(tools, "a", "b", "c"), "c")
    for changed in (["x", "a", "b", "c"], ["a", "c"], ["b", "a", "c"], ["a", "B", "c"], ["a", "b", "x"], ["a", "b"]):
        with pytest.raises(DivergenceError, match=r"Expected the recorded call|The record has the call"):
            run(world.runner(calls(tools, *changed)), [1], world.out)
    assert tools.made == ["a", "b", "c"]
    assert world.outputs() == []
    run(world.runner(calls(tools, "a", "b", "c")), [1], world.out)
    assert tools.made == ["a", "b", "c", "c"]


def test_an_argument_that_changes_by_itself_is_reported_and_not_charged_twice(world: World, tools: Tools) -> None:
    numbers = iter(range(100))

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, ("now", next(numbers)), effect="read")
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    crash_in(world, tools, Scripted(body), "end")
    with pytest.raises(DivergenceError, match=r"Expected .*'now', 0.*found .*'now', 1"):
        run(world.runner(Scripted(body)), [1], world.out)
    assert tools.made == [("now", 0), "end"]


# --- keys and scope -------------------------------------------------------------------------------------------------

ODD_KEYS: list[Any] = [
    *("", " ", "_", ":", "*", "%", "'", '"', "\\", "/", "[", "]", "{", "}", "a_b", "a%", "../x", "\n", "\0", "\ud800"),
    *("é", "e\u0301", "😀", "ключ", "a" * 5000, "null", "None", "-1", "--"),
    *(None, True, False, 0, 1, 1.0, "1", "True", ("a",), "('a',)", ["a"], b"a", {"a": 1}, {1: "a"}, 2**70, -0.0, 0.0),
    *(float("inf"), Decimal("1"), datetime(2024, 1, 1, tzinfo=UTC), timedelta(1), frozenset({1})),
]


def test_every_key_gets_back_its_own(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        assert type(ctx.key) is type(value["k"])
        await ctx.durable_execute(tools.call, value["n"], effect="read")
        memory = ctx.short_term_memory
        memory.set("seen", [*memory.get("seen", []), value["n"]])
        return value["n"]

    records = [{"k": key, "n": number} for number, key in enumerate(ODD_KEYS)]
    more = [{"k": key, "n": number + 1000} for number, key in enumerate(ODD_KEYS)]
    last = {"k": "the last", "n": "end"}
    tools.hang_on.add("end")
    crashed(
        world.runner(Scripted(body)),
        [*records, *more, last],
        world.out,
        key="k",
        when=lambda: bool(tools.hanging) and len(world.outputs()) == 2 * len(ODD_KEYS),
    )
    tools.hang_on.clear()
    runner = world.runner(Scripted(body))
    run(runner, [*records, *more, last], world.out, key="k")
    assert sorted(map(str, world.outputs())) == sorted(
        [str(n) for n in range(len(ODD_KEYS))] + [str(n + 1000) for n in range(len(ODD_KEYS))] + ["end"]
    )
    memories = [memory["seen"] for key, memory in runner.memories() if key != "the last"]
    assert sorted(memories) == [[n, n + 1000] for n in range(len(ODD_KEYS))]
    assert all(tools.count(n) == 1 for n in range(len(ODD_KEYS)))
    assert asyncio.run(world.recorded_async()) == {}


def test_jobs_in_one_store_never_meet(world: World, tools: Tools) -> None:
    for job in ("one", "two", "ONE", "one ", "öne"):
        run(world.runner(calls(tools, "a"), job), [1], world.folder / f"{job}.jsonl")
    assert tools.made == ["a"] * 5
    tools.hang_on.add("b")
    crashed(world.runner(calls(tools, "a", "b"), "x"), [1], when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(calls(tools, "a", "b"), "y"), [1])
    assert tools.made[5:] == ["a", "b", "a", "b"]


def test_another_agent_does_not_get_the_jobs_answers(world: World, tools: Tools) -> None:
    crash_in(world, tools, calls(tools, "a", "b"), "b")

    class Another(Scripted):
        pass

    with pytest.raises(RestoreError, match="belongs to the agent 'Scripted', but 'Another' was given"):
        run(world.runner(Another(calls(tools, "a", "b").body)), [1], world.out)
    assert tools.made == ["a", "b"]


def test_of_two_processes_with_one_job_only_one_goes_on(tmp_path: Path, tools: Tools) -> None:
    world = World("memory", tmp_path)

    async def main() -> None:
        tools.hang_on.add("a")
        loser = asyncio.ensure_future(world.runner(calls(tools, "a", "b", effect="read")).run_async([1]))
        await until(lambda: tools.hanging)
        MemoryStore(world.jobs).take_over("job")
        tools.hang_on.clear()
        winner = world.runner(calls(tools, "a", "b", effect="read"), checkpoints=tmp_path / "winner.db")
        await winner.run_async([1], world.out)
        loser.cancel()
        await asyncio.wait([loser])

    asyncio.run(main())
    assert world.outputs() == [["done a", "done b"]]


def test_the_loser_stops_with_a_clear_error(tmp_path: Path, tools: Tools) -> None:
    world = World("memory", tmp_path)

    async def body(value: Any, ctx: RunnerContext) -> None:
        MemoryStore(world.jobs).take_over("job")
        await ctx.durable_execute(tools.call, "a")

    with pytest.raises(FencedError, match="no longer owns its job"):
        run(world.runner(Scripted(body)), [1])
    assert tools.made == []


# --- values and memory ----------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


@register
@dataclass(frozen=True)
class Price:
    amount: Decimal
    colour: Colour


def test_values_keep_their_types_in_results_arguments_events_memory_and_keys(world: World, tools: Tools) -> None:
    rich = {
        "tuple": (1, (2,)),
        "set": {1, 2},
        "bytes": b"\xff",
        3: "int key",
        "price": Price(Decimal("1.50"), Colour.RED),
        "when": datetime(2024, 1, 2, tzinfo=UTC),
        "big": 2**70,
    }
    seen: list[Any] = []
    tools.results["a"] = rich

    class Rich(Agent):
        @action(InputEvent)
        async def one(self, event: InputEvent, ctx: RunnerContext) -> None:
            result = await ctx.durable_execute(tools.call, "a")
            seen.append((event.input, ctx.key, result))
            ctx.short_term_memory.set("rich", result)
            ctx.send_event(Carried(value=result))

        @action(Carried)
        async def two(self, event: Carried, ctx: RunnerContext) -> None:
            seen.append((event.value, ctx.short_term_memory.get("rich"), "second"))
            await ctx.durable_execute(tools.call, "end", effect="idempotent")

    crash_in(world, tools, Rich(), "end", [rich], key=lambda value: value["price"])
    runner = world.runner(Rich())
    run(runner, [rich], world.out, key=lambda value: value["price"])
    assert seen == [(rich, rich["price"], rich), (rich, rich, "second"), (rich, rich, "second")]
    assert dict(runner.memories()) == {rich["price"]: {"rich": rich}}


class Carried(Event):
    value: Any


def test_the_memory_tree_after_a_replay_is_that_of_the_first_run(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        memory = ctx.short_term_memory
        if value == 0:
            memory.create_object("empty")
            memory.set("none", None)
            memory.set("gone", 1)
        if value == 1:
            memory.delete("gone")
            memory.create_object("more.empty")
        if value == 2:
            await ctx.durable_execute(tools.call, "end", effect="idempotent")
            return [memory.fields(), "gone" in memory, memory.get("none", "default"), memory.get("more").fields()]
        return None

    crash_in(world, tools, Scripted(body), "end", range(3))
    runner = world.runner(Scripted(body))
    run(runner, range(3), world.out)
    assert world.outputs() == [[["empty", "none", "more"], False, None, ["empty"]]]
    assert dict(runner.memories()) == {None: {"empty": {}, "none": None, "more": {"empty": {}}}}


def test_writes_of_a_half_done_action_are_applied_once_although_checkpoints_were_taken(
    world: World, tools: Tools
) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        await ctx.durable_execute(tools.call, "a", effect="idempotent")

    tools.hang_on.add("a")
    for _ in range(3):
        tools.hanging.clear()
        store = world.store()
        crashed(
            world.runner(Scripted(body), store=store, checkpoint_interval=0.001),
            [1, 2],
            key=lambda value: None if value == 1 else value,
            when=lambda store=store: bool(tools.hanging) and (bool(store.pruned) or "done" not in store.kinds()),  # type: ignore[misc]
        )
    tools.hang_on.clear()
    runner = world.runner(Scripted(body))
    run(runner, [1, 2], key=lambda value: None if value == 1 else value)
    assert dict(runner.memories()) == {None: {"n": 1}, 2: {"n": 1}}


@pytest.mark.parametrize("odd", ["\0", "a\0b", "\ud800", "\udfff x", "😀", "x" * 1_000_000])
def test_odd_and_large_text_goes_everywhere_and_the_tool_runs_once(world: World, tools: Tools, odd: str) -> None:
    tools.results["a"] = odd

    async def body(value: Any, ctx: RunnerContext) -> None:
        found = await ctx.durable_execute(tools.call, "a")
        assert found == odd == ctx.key == value
        ctx.short_term_memory.set((odd[:1000], "x"), found)
        await ctx.durable_execute(tools.call, ("b", odd), effect="read")
        await ctx.durable_execute(tools.call, "end", effect="idempotent")

    crash_in(world, tools, Scripted(body), "end", [odd], key=lambda value: value)
    runner = world.runner(Scripted(body))
    run(runner, [odd], key=lambda value: value, sink=world.out)
    assert dict(runner.memories()) == {odd: {odd[:1000]: {"x": odd}}}
    assert tools.count("a") == 1


def test_records_are_text_and_loading_one_runs_and_imports_nothing(world: World, tools: Tools) -> None:
    crash_in(world, tools, calls(tools, "a", "b"), "b")
    ran = world.folder / "ran"

    class Attack:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    assert "antigravity" not in sys.modules
    error = {"$": "exc", "t": "antigravity:Error", "args": [], "state": {}, "str": ""}
    for states in asyncio.run(world.recorded_async()).values():
        for state in states:
            body = json.dumps({"v": 1, "kind": "completed", "call": 1, "error": error}).encode()
            world.add_records([Record(state.key, state.message, state.task, body)])
    with pytest.raises(ActionError, match=r"antigravity:Error.* is not loaded in this process"):
        run(world.runner(calls(tools, "a", "b")), [1], world.out)
    assert "antigravity" not in sys.modules
    world.add_records([Record(b"null", "9", "t", pickle.dumps(Attack()))])
    with pytest.raises(RecordError, match="damaged"):
        run(world.runner(calls(tools, "a", "b")), [1], world.out)
    assert not ran.exists()


def stored(world: World) -> bytes:
    """Every byte that the store and the checkpoints keep."""
    records = [record.body for job in world.jobs.values() for kept in job.records.values() for record in kept.values()]
    return b"".join([*records, *(path.read_bytes() for path in world.folder.glob("*.db*"))])


@pytest.mark.parametrize("way", ["encrypted", "fetched by the callee", "neither"])
def test_with_the_documented_ways_an_injected_secret_is_not_in_the_store_and_replay_works(
    world: World, tools: Tools, way: str
) -> None:
    secret = "sk-injected-and-hidden-from-the-model"
    used: list[str] = []

    def search(question: str, api_key: str) -> str:
        used.append(api_key)
        return f"answer to {question}"

    def search_by_itself(question: str) -> str:
        return search(question, secret)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if way == "fetched by the callee":
            answer = await ctx.durable_execute(search_by_itself, value, name="search")
        else:
            answer = await ctx.durable_execute(search, value, api_key=secret, name="search")
        return [answer, await ctx.durable_execute(tools.call, "end", effect="idempotent")]

    cipher = AesGcmCipher(bytes(32)) if way == "encrypted" else None
    tools.hang_on.add("end")
    crashed(world.runner(Scripted(body), cipher=cipher), ["q"], world.out, when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    assert (b"answer to" in stored(world)) is (way != "encrypted")
    assert (secret.encode() in stored(world)) is (way == "neither")
    run(world.runner(Scripted(body), cipher=cipher), ["q"], world.out)
    assert world.outputs() == [["answer to q", "done end"]]
    assert used == [secret]
    # What is deleted in the end stays readable in free pages of a file, so it must never have been there.
    if way != "neither":
        assert secret.encode() not in stored(world)


# --- stores ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_threads_of_actions_beside_a_long_reader_lose_nothing(tmp_path: Path, tools: Tools) -> None:
    world = World("sqlite", tmp_path)
    reader = """
        import sqlite3, sys, time
        end = time.monotonic() + 60
        while time.monotonic() < end:
            connection = sqlite3.connect(sys.argv[1], timeout=30)
            connection.execute("BEGIN")
            try:
                connection.execute("SELECT count(*), sum(length(body)) FROM records").fetchone()
                print("read", flush=True)
                time.sleep(0.02)
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):
                    raise
            connection.close()
    """
    run(world.runner(calls(tools, "first")), [0])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(reader), str(tmp_path / "store.db")], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()

        class InThreads(Agent):
            @action(InputEvent)
            def act(self, event: InputEvent, ctx: RunnerContext) -> None:
                ctx.durable_execute_sync(tools.call_sync, event.input)

        tools.made.clear()
        report = run(world.runner(InThreads(), "threads", max_in_flight=8), range(400), key=lambda n: n % 40)
        assert process.poll() is None, "the reader did not fail either"
    finally:
        process.kill()
        process.communicate()
    assert report.messages == 400
    assert sorted(tools.made) == list(range(400))


def test_an_action_of_200_calls_writes_bytes_and_takes_time_in_proportion(world: World, tools: Tools) -> None:
    store = world.store()
    moments: list[float] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        for n in range(200):
            await ctx.durable_execute(tools.call, n, effect="idempotent")
            moments.append(time.perf_counter())

    tools.results = dict.fromkeys(range(200), "x" * 20000)
    run(world.runner(Scripted(body), store=store), [1])
    written = sum(len(record.body) for batch in store.batches for record in batch)
    assert 4_000_000 < written < 4_400_000
    early = sorted(after - before for before, after in pairwise(moments[:100]))
    late = sorted(after - before for before, after in pairwise(moments[100:]))
    assert late[49] < 5 * early[49] + 0.002


def test_claiming_and_pruning_one_key_does_not_read_the_records_of_others(tmp_path: Path, tools: Tools) -> None:
    """With 3,000 keys that all have records, a look-up and a prune use the index."""
    world = World("sqlite", tmp_path)
    records = [Record(b'"k%d"' % n, "0", "t", b"{}") for n in range(3000)]
    world.add_records(records)
    with sqlite3.connect(tmp_path / "store.db") as connection:
        for query in (
            "SELECT body FROM records WHERE job = 1 AND key = ?",
            "SELECT n FROM records WHERE job = 1 AND key = ? AND message = '0'",
        ):
            plan = connection.execute(f"EXPLAIN QUERY PLAN {query}", (b'"k1"',)).fetchall()
            assert all("SCAN" not in row[3] for row in plan)
    connection.close()


@pytest.mark.parametrize("error", [StoreError("unreachable"), OSError("no route")])
def test_without_its_store_nothing_is_processed(world: World, tools: Tools, error: Exception) -> None:
    store = world.store()

    def fail() -> None:
        raise error

    store.before_open = fail
    with pytest.raises(type(error)):
        run(world.runner(calls(tools, "a"), store=store), [1], world.out)
    assert tools.made == []
    assert not world.out.exists()


def test_a_history_that_cannot_be_read_is_not_taken_for_none(world: World, tools: Tools) -> None:
    crash_in(world, tools, calls(tools, "a", "b"), "b")

    class Forgetful(SpyStore):
        async def claim(self, key: bytes) -> Any:
            raise StoreError("cannot read")

    with pytest.raises(StoreError, match="cannot read"):
        run(world.runner(calls(tools, "a", "b"), store=Forgetful(world.store().inner)), [1], world.out)
    assert tools.made == ["a", "b"]


# --- checkpoints, retention -----------------------------------------------------------------------------------------


def test_a_checkpoint_prunes_what_it_covers_and_nothing_that_is_in_flight(world: World, tools: Tools) -> None:
    store = world.store()
    records = [{"k": n, "n": n} for n in range(10)]

    async def body(value: Any, ctx: RunnerContext) -> None:
        await ctx.durable_execute(tools.call, value["n"], effect="idempotent")
        if value["n"] == 5:
            await ctx.durable_execute(tools.call, "slow", effect="idempotent")

    tools.hang_on.add("slow")
    crashed(
        world.runner(Scripted(body), store=store, checkpoint_interval=0.01),
        records,
        world.out,
        key="k",
        when=lambda: sum(len(covered.messages) for covered in store.pruned) == 9 and bool(tools.hanging),
    )
    tools.hang_on.clear()
    recorded = asyncio.run(world.recorded_async())
    assert list(recorded) == [b"5"]
    run(world.runner(Scripted(body)), records, world.out, key="k")
    assert tools.count("slow") == 2
    assert all(tools.count(n) == 1 for n in range(10))


def test_nothing_is_pruned_before_the_checkpoint_is_complete(world: World, tools: Tools) -> None:
    store = world.store()
    committed: list[int] = []
    runner = world.runner(calls(tools, "a"), store=store, checkpoint_interval=0.001)
    commit = runner._checkpoints.commit

    def note(checkpoint: Any) -> None:
        commit(checkpoint)
        committed.append(checkpoint.number)

    runner._checkpoints.commit = note  # type: ignore[method-assign]
    too_early: list[int] = []

    def look(covered: Covered) -> None:
        if covered.checkpoint not in committed:
            too_early.append(covered.checkpoint)

    store.before_prune = look
    run(runner, range(50), world.out)
    assert store.pruned
    assert too_early == []


@pytest.mark.slow
def test_after_2000_messages_what_is_kept_is_bounded_by_the_uncovered_window(world: World, tools: Tools) -> None:
    """With a checkpoint every 100 messages at least."""
    store = world.store()

    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.short_term_memory.set("n", value)
        if value % 100 == 0:
            seen = len(store.pruned)
            await until(lambda: not value or len(store.pruned) > seen)
        await ctx.durable_execute(tools.call, value, effect="read")

    runner = world.runner(Scripted(body), store=store, checkpoint_interval=0.02, max_in_flight=4)
    report = run(runner, range(2001))
    assert report.messages == 2001
    per_message = 2
    assert sum(map(len, store.batches)) == 2001 * per_message
    assert store.most_kept <= 250 * per_message
    assert store.kept == 0
    assert asyncio.run(world.recorded_async()) == {}
    with sqlite3.connect(world.checkpoints()) as connection:
        counts = {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("checkpoint", "memory", "inbox", "bad_input")
        }
    connection.close()
    assert counts == {"checkpoint": 1, "memory": 1, "inbox": 0, "bad_input": 0}


# --- engine ---------------------------------------------------------------------------------------------------------


def test_waiting_for_a_slow_call_keeps_no_core_busy(world: World, tools: Tools) -> None:
    tools.delays["a"] = 0.8
    run(world.runner(calls(tools, "b")), [0])
    busy, begun = time.process_time(), time.perf_counter()
    run(world.runner(calls(tools, "a"), "another"), [1])
    assert (time.process_time() - busy) / (time.perf_counter() - begun) < 0.1


def test_replayed_calls_are_not_counted_as_new_and_their_usage_is_kept(world: World, tools: Tools) -> None:
    tools.results["a"] = {"text": "hi", "usage": {"tokens": 12}}
    crash_in(world, tools, calls(tools, "a", "b"), "b")
    report = run(world.runner(calls(tools, "a", "b")), [1], world.out)
    assert (report.calls_executed, report.calls_replayed) == (1, 1)
    assert world.outputs()[0][0]["usage"] == {"tokens": 12}


def test_outputs_of_replayed_messages_are_in_the_file_once(world: World, tools: Tools) -> None:
    for what in (3, 6, 9):
        tools.hanging.clear()
        tools.hang_on = {what}
        crashed(world.runner(each(tools)), range(10), world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(each(tools)), range(10), world.out)
    assert world.outputs() == list(range(10))


def each(tools: Tools) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, value, effect="idempotent")
        return value

    return Scripted(body)


def test_a_sink_that_is_not_transactional_gets_the_same_ids_again(world: World, tools: Tools) -> None:
    from dalsegno.runners.sinks import CallableSink

    got: list[tuple[Any, str]] = []

    def sink(value: Any, output_id: str) -> None:
        got.append((value, output_id))

    tools.hang_on = {5}
    crashed(world.runner(each(tools)), range(6), CallableSink(sink, with_id=True), when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(each(tools)), range(6), CallableSink(sink, with_id=True))
    assert len(got) == 11
    assert len(set(got)) == 6
    assert len({output_id for _, output_id in got}) == 6


def test_only_durable_calls_are_kept_from_happening_again(world: World, tools: Tools) -> None:
    """What an action does outside of one happens again on re-entry; this is how it is documented."""
    outside: list[int] = []

    async def body(value: Any, ctx: RunnerContext) -> None:
        outside.append(1)
        await ctx.durable_execute(tools.call, "a", effect="read")
        await ctx.durable_execute(tools.call, "b", effect="idempotent")

    crash_in(world, tools, Scripted(body), "b")
    run(world.runner(Scripted(body)), [1], world.out)
    assert len(outside) == 2
    assert tools.count("a") == 1
