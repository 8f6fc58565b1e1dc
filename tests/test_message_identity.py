"""The identity of messages: ids of their own, what comes again, and sources that bring messages in another order."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shlex
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dalsegno import (
    ActionError,
    AesGcmCipher,
    DefinitionError,
    DivergenceError,
    InputError,
    LocalRunner,
    RestoreError,
    RunnerContext,
)
from dalsegno.core.identity import digest, key_bytes
from dalsegno.inspect import cli
from dalsegno.operate import decide
from dalsegno.operate.lookup import find_key, find_message, key_text, printable
from dalsegno.runners import inbox, recovery
from dalsegno.runners.merged import MergedSource
from dalsegno.runners.sources import IterableSource, Source, SourceItem
from dalsegno.stores.base import Covered
from tests.helpers import Scripted, SpyStore, Tools, World, crashed, for_ever, run, until
from tests.test_faults import ODD_KEYS

ODD_IDS: list[Any] = [
    *("0", "00", "-1", " ", "_", ":", "*", "%", "'", '"', "\\", "/", "a/b", "[", "{", "../x", "\n", "\0", "\ud800"),
    *("é", "e\u0301", "😀", "ключ", "a" * 5000, "null", "None", "deadbeef", "\\ud800", "a\ud800b"),
    *(9, 10, 11, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63)),
]


def retry(world: World, message: str) -> bool:
    with closing(world.store().inspect()) as inspector:
        assert decide.retry(inspector, "job", message).written
    return True


def calling(tools: Tools) -> Scripted:
    """Makes one `idempotent` call for the message, named by its id, and counts the key's messages in memory."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        await ctx.durable_execute(tools.call, ctx.message_id, effect="idempotent")
        return [ctx.message_id, n]

    return Scripted(body)


def of(*ids: Any, key: Any = "k") -> list[dict[str, Any]]:
    return [{"id": each, "k": key} for each in ids]


# --- an id of the user's --------------------------------------------------------------------------------------------


def test_the_id_is_that_field_or_what_the_function_makes_of_it(world: World, tools: Tools) -> None:
    run(world.runner(calling(tools)), of("a", 7), world.out, message_id="id")
    run(
        world.runner(calling(tools), "two"),
        [{"a": 1, "b": 2}],
        world.folder / "two.jsonl",
        message_id=lambda record: f"{record['a']}-{record['b']}",
    )
    assert tools.made == ["a", "7", "1-2"]
    assert world.outputs() == [["a", 1], ["7", 2]]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "the record has no field 'id'; its fields are none"),
        (3, "the record has no field 'id', because it is a int"),
        ({"id": None}, r"the message id is missing: it is None \(null\)"),
        ({"id": ""}, "the message id is missing: it is an empty text"),
        ({"id": True}, "the message id True is a bool: give a string or an int"),
        ({"id": 1.0}, "the message id 1.0 is a float: give a string or an int"),
        ({"id": ["a"]}, r"the message id \['a'\] is a list: give a string or an int"),
    ],
)
def test_a_record_without_an_id_is_bad_input(world: World, tools: Tools, record: Any, reason: str) -> None:
    with pytest.raises(InputError, match=f"record 1: {reason}"):
        run(world.runner(calling(tools)), [record], message_id="id")
    report = run(world.runner(calling(tools)), [record, *of("a")], message_id="id", on_bad_input="skip")
    assert (report.skipped, report.messages, tools.made) == (1, 1, ["a"])


def test_a_function_that_fails_makes_bad_input(world: World, tools: Tools) -> None:
    with pytest.raises(InputError, match="the message_id function raised KeyError: 'x'"):
        run(world.runner(calling(tools)), of("a"), message_id=lambda record: record["x"])


@pytest.mark.parametrize("wrong", [3, ["id"], b"id"])
@pytest.mark.parametrize("option", ["key", "message_id"])
def test_what_names_no_field_is_refused(world: World, tools: Tools, option: str, wrong: Any) -> None:
    with pytest.raises(DefinitionError, match=f"{option}=.*give the name of a field, or a function"):
        run(world.runner(calling(tools)), of("a"), **{option: wrong})


def test_any_text_and_any_number_is_an_id_and_names_its_message_across_a_crash(world: World, tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, value["id"], effect="read")
        await ctx.durable_execute(tools.call, ("end", value["id"]), effect="idempotent")
        return value["id"]

    tools.hang_on = {("end", each) for each in ODD_IDS}
    records = [{"id": each, "k": number} for number, each in enumerate(ODD_IDS)]
    crashed(
        world.runner(Scripted(body)),
        records,
        world.out,
        key="k",
        message_id="id",
        when=lambda: len(tools.hanging) == len(ODD_IDS),
    )
    recorded = [states[0].message for states in world.recorded().values()]
    assert sorted(recorded) == sorted(map(str, ODD_IDS))
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), records, world.out, key="k", message_id="id")
    assert all(tools.count(each) == 1 for each in ODD_IDS)
    assert Counter(map(str, world.outputs())) == Counter(map(str, ODD_IDS))
    assert world.recorded() == {}


def test_ids_go_through_checkpoints_and_order_by_their_place_in_the_input(world: World, tools: Tools) -> None:
    """Twice over a checkpoint with all of them in its inbox: none is lost, and the order is that of the input."""
    ids = ODD_IDS

    async def body(value: Any, ctx: RunnerContext) -> Any:
        seen = [*ctx.short_term_memory.get("seen", []), ctx.message_id]
        ctx.short_term_memory.set("seen", seen)
        await ctx.durable_execute(tools.call, ctx.message_id, effect="read")
        return len(seen)

    tools.hang_on.add(str(ids[0]))
    for _ in range(2):

        async def stopped() -> None:
            runner = world.runner(Scripted(body))
            running = asyncio.ensure_future(runner.run_async(of(*ids), world.out, message_id="id"))
            await until(lambda: runner._pipeline is not None and runner._pipeline.reading.records == len(ids))
            await until(checkpoints(runner, 1))
            running.cancel()
            await asyncio.wait([running])

        asyncio.run(stopped())
    tools.hang_on.clear()
    runner = world.runner(Scripted(body))
    run(runner, of(*ids), world.out, message_id="id")
    assert dict(runner.memories()) == {None: {"seen": [str(each) for each in ids]}}
    assert tools.made == [str(ids[0])] * 2 + [str(each) for each in ids]
    assert world.outputs() == list(range(1, len(ids) + 1))


def test_names_of_tasks_tell_lone_surrogates_from_their_escapes() -> None:
    names = ["\ud800", "\\ud800", "\ud801", "\\\ud800", "?", '"\ud800', "a\ud800", "\ufffd"]
    assert len({digest(name, "", 0, "act") for name in names}) == len(names)


def test_equal_ids_of_two_keys_are_two_messages(world: World, tools: Tools) -> None:
    tools.hang_on.add("7")
    records = [*of(7, key="a"), *of(7, key="b")]
    runner = world.runner(calling(tools))
    crashed(runner, records, world.out, key="k", message_id="id", when=lambda: tools.count("7") == 2)
    tools.hang_on.clear()
    report = run(world.runner(calling(tools)), records, world.out, key="k", message_id="id")
    assert (report.messages, report.repeated) == (2, 0)
    assert world.outputs() == [["7", 1], ["7", 1]]


# --- what comes again -----------------------------------------------------------------------------------------------


def test_a_message_that_comes_again_is_done_once(world: World, tools: Tools) -> None:
    report = run(world.runner(calling(tools)), of("a", "a", "b", "a", "b", "a"), world.out, message_id="id")
    assert (report.messages, report.repeated, report.outputs) == (2, 4, 2)
    assert tools.made == ["a", "b"]
    assert world.outputs() == [["a", 1], ["b", 2]]


def test_a_number_and_its_digits_are_one_id(world: World, tools: Tools) -> None:
    with pytest.raises(InputError, match="the message id '1' of key None came before with other content"):
        run(world.runner(calling(tools)), [{"id": 1}, {"id": "1"}], message_id="id")


@pytest.mark.parametrize("when", ["in flight", "done", "parked"])
def test_an_id_that_comes_again_with_other_content_is_bad_input(world: World, tools: Tools, when: str) -> None:
    if when == "parked":
        tools.fail_on["a"] = ValueError("no")

    async def records() -> AsyncIterator[Any]:
        yield {"id": "a"}
        await until(lambda: bool(tools.made) or when == "in flight")
        yield {"id": "a", "other": True}

    with pytest.raises(InputError, match=r"record 2: the message id 'a' of key None came before with other content"):
        run(world.runner(calling(tools), on_failure="park"), records(), world.out, message_id="id")
    assert tools.made == ["a"]
    report = run(
        world.runner(calling(tools), on_failure="park"),
        [{"id": "a"}, {"id": "a", "other": True}, {"id": "b"}],
        world.out,
        message_id="id",
        on_bad_input="park",
    )
    assert report.set_aside == 1


@pytest.mark.parametrize("crash_at", range(1, 5))
def test_what_comes_again_is_done_once_over_crashes_too(world: World, tools: Tools, crash_at: int) -> None:
    """Four messages, five writes; the process ends after one of them, or in the next one."""
    records = of("a", "b", "a", "c", "b", "a", "d", "d")
    for before in (True, False):
        job, out = f"before {before}", world.folder / f"{before}.jsonl"
        store = world.store()

        async def end(records: Any, store: SpyStore = store) -> None:
            if len(store.batches) >= crash_at:
                await for_ever()

        if before:
            store.before_put = end
        else:
            store.after_put = end
        runner = world.runner(calling(tools), job, store=store, max_in_flight=1)
        crashed(runner, records, out, message_id="id", when=lambda store=store: len(store.batches) >= crash_at)  # type: ignore[misc]
        run(world.runner(calling(tools), job), records, out, message_id="id")
        assert [json.loads(line) for line in out.read_text().splitlines()] == [["a", 1], ["b", 2], ["c", 3], ["d", 4]]
        assert world.recorded(job) == {}


def stream(*steps: Any) -> AsyncIterator[Any]:
    """Records, and functions to wait for."""

    async def records() -> AsyncIterator[Any]:
        for step in steps:
            if callable(step):
                await until(step)
            else:
                yield step

    return records()


def checkpoints(runner: LocalRunner, at_least: int) -> Any:
    """Brings checkpoints about, and waits for them."""

    def taken() -> bool:
        machine = runner._pipeline
        assert machine is not None
        if machine.report.checkpoints >= at_least and not machine._inbox._writing:
            return True
        if not machine._inbox._writing:
            machine._checkpointer.changed()
            machine._checkpointer.due.set()
        return False

    return taken


def test_an_id_is_known_until_a_checkpoint_after_the_one_that_covers_it(world: World, tools: Tools) -> None:
    runner = world.runner(calling(tools))
    (a,) = of("a")

    def finished(count: int) -> Any:
        return lambda: runner._pipeline is not None and runner._pipeline.report.messages == count

    report = run(
        runner,
        stream(a, finished(1), a, checkpoints(runner, 1), a, checkpoints(runner, 3), a, a, finished(2)),
        world.out,
        message_id="id",
    )
    assert (report.messages, report.repeated) == (2, 3)
    assert world.outputs() == [["a", 1], ["a", 2]]
    assert world.recorded() == {}


def test_a_crash_before_the_prune_leaves_nothing_and_the_id_is_still_known(world: World, tools: Tools) -> None:
    store = world.store()

    def fail(covered: Covered) -> None:
        if covered.messages:
            raise OSError("killed")

    store.before_prune = fail
    with pytest.raises(OSError, match="killed"):
        run(world.runner(calling(tools), store=store), of("a"), world.out, message_id="id")
    assert world.recorded() != {}
    report = run(world.runner(calling(tools)), of("a", "a", "b"), world.out, message_id="id")
    assert (report.messages, report.repeated) == (1, 1)
    assert world.outputs() == [["a", 1], ["b", 2]]
    assert world.recorded() == {}


def test_a_new_message_of_an_old_id_keeps_its_records_over_a_crash(world: World, tools: Tools) -> None:
    """What a checkpoint lists as covered must never be taken for the records of the later message."""
    (a,) = of("a")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        await ctx.durable_execute(tools.call, n, effect="read")
        await ctx.durable_execute(tools.call, ("end", n), effect="idempotent")
        return n

    for gap in range(2, 5):
        job = f"gap {gap}"
        out = world.folder / f"{job}.jsonl"
        tools.made.clear()
        tools.hanging.clear()
        tools.hang_on = {("end", 2)}
        runner = world.runner(Scripted(body), job)

        def done(runner: LocalRunner = runner) -> bool:
            return runner._pipeline is not None and runner._pipeline.report.messages == 1

        records = stream(a, done, checkpoints(runner, gap), a, lambda: False)
        crashed(runner, records, out, message_id="id", when=lambda: bool(tools.hanging))
        tools.hang_on.clear()
        run(world.runner(Scripted(body), job), [a, a], out, message_id="id")
        assert out.read_text() == "1\n2\n"
        assert tools.made == [1, ("end", 1), 2, ("end", 2), ("end", 2)]


def test_a_message_that_comes_again_while_its_key_is_parked_is_known_though_not_in_memory(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_SET_ASIDE_IN_MEMORY", 3)
    tools.fail_on["0"] = ValueError("no")
    ids = [str(n) for n in range(20)]
    runner = world.runner(calling(tools), on_failure="park")
    kept: list[int] = []

    def look() -> bool:
        assert runner._pipeline is not None
        assert runner._pipeline._identities.known is not None
        kept.append(len(runner._pipeline._identities.known._contents))
        return True

    report = run(
        runner,
        stream(*of(*ids), parked(runner, 1), checkpoints(runner, 1), look, *of(*ids)),
        world.out,
        message_id="id",
    )
    assert kept == [0]
    assert (report.repeated, report.waiting, len(report.parked)) == (20, 19, 1)
    with pytest.raises(InputError, match="the message id '7' of key None came before with other content"):
        run(
            world.runner(calling(tools), on_failure="park"),
            [*of(*ids, *ids), {"id": "7"}],
            world.out,
            message_id="id",
        )
    tools.fail_on.clear()
    retry(world, "0")
    report = run(world.runner(calling(tools)), [*of(*ids, *ids)], world.out, message_id="id")
    assert world.outputs() == [[each, n + 1] for n, each in enumerate(ids)]
    assert world.recorded() == {}


# --- what no longer fits --------------------------------------------------------------------------------------------


def in_flight(world: World, tools: Tools, records: Any, **options: Any) -> None:
    """Crash while the last message makes its call, without a checkpoint of it."""
    tools.hang_on.add("x")
    crashed(world.runner(calling(tools)), records, world.out, when=lambda: bool(tools.hanging), **options)
    tools.hang_on.clear()


def test_another_content_under_a_recorded_id_is_a_divergence(world: World, tools: Tools) -> None:
    in_flight(world, tools, of("x"), message_id="id")
    with pytest.raises(DivergenceError, match="message 'x': its content is not what was recorded"):
        run(world.runner(calling(tools)), [{"id": "x", "k": "edited"}], world.out, message_id="id")
    assert tools.made == ["x"]


def test_another_key_function_is_found_before_anything_executes(world: World, tools: Tools) -> None:
    in_flight(world, tools, of("x"), key="k", message_id="id")
    with pytest.raises(DivergenceError, match="message 'x' has the key 'x', but was recorded with 'k'"):
        run(world.runner(calling(tools)), of("x"), world.out, key="id", message_id="id")
    assert tools.made == ["x"]


def test_a_recorded_message_that_never_comes_again_is_told(world: World, tools: Tools) -> None:
    in_flight(world, tools, of("x"), message_id="id")
    with pytest.raises(RestoreError, match="message 'x', which is recorded, did not come again"):
        run(world.runner(calling(tools)), of("y"), world.out, message_id="id")
    run(world.runner(calling(tools)), of("y", "x"), world.out, message_id="id")
    assert Counter(tools.made) == {"x": 2, "y": 1}


@pytest.mark.parametrize(("before", "after"), [(None, "id"), ("id", None)])
def test_ids_of_another_kind_are_refused_once_the_job_has_read(
    world: World, tools: Tools, before: str | None, after: str | None
) -> None:
    run(world.runner(calling(tools)), of("x"), world.out, message_id=before)
    with pytest.raises(RestoreError, match="that cannot change once a job has read input"):
        run(world.runner(calling(tools)), of("x", "y"), world.out, message_id=after)
    run(world.runner(calling(tools)), of("x", "y"), world.out, message_id=before)
    assert len(world.outputs()) == 2


@pytest.mark.parametrize(("before", "after"), [(None, "id"), ("id", None)])
def test_ids_of_another_kind_are_refused_while_anything_is_recorded(
    world: World, tools: Tools, before: str | None, after: str | None
) -> None:
    tools.hang_on = {"x", "0"}
    crashed(world.runner(calling(tools)), of("x"), world.out, message_id=before, when=lambda: bool(tools.hanging))
    with pytest.raises(RestoreError, match="that cannot change once a job has read input"):
        run(world.runner(calling(tools)), of("x"), world.out, message_id=after)


def test_before_anything_is_read_the_kind_of_ids_may_be_mended(world: World, tools: Tools) -> None:
    with pytest.raises(InputError, match="no field 'idd'"):
        run(world.runner(calling(tools)), of("x"), world.out, message_id="idd")
    run(world.runner(calling(tools)), of("x"), world.out)
    assert world.outputs() == [["0", 1]]


def test_another_field_is_refused_while_messages_are_in_flight(world: World, tools: Tools) -> None:
    in_flight(world, tools, of("x"), message_id="id")
    with pytest.raises(
        RestoreError, match=r"made of the 'field id' of a record, and would now be made of the 'field k"
    ):
        run(world.runner(calling(tools)), of("x"), world.out, message_id="k")
    run(world.runner(calling(tools)), of("x"), world.out, message_id="id")
    more = [*of("x"), {"id": "y", "k": "z"}]
    run(world.runner(calling(tools)), more, world.out, message_id="k")
    assert tools.made == ["x", "x", "z"]
    tools.hang_on.add("w")
    more = [*more, {"id": "v", "k": "w"}]
    crashed(world.runner(calling(tools)), more, world.out, message_id="k", when=lambda: tools.count("w") == 1)
    tools.hang_on.clear()
    run(world.runner(calling(tools)), more, world.out, message_id="k")
    assert tools.made == ["x", "x", "z", "w", "w"]


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["position", "given", "content"])
def test_every_key_is_itself_in_records_checkpoints_and_inspection(world: World, tools: Tools, kind: str) -> None:
    """Each key has a finished message, one in flight, which a checkpoint has in its inbox, and one behind that."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        await ctx.durable_execute(tools.call, value["n"], effect="read")
        await ctx.durable_execute(tools.call, ("end", value["n"]), effect="idempotent")
        return [value["n"] % 1000, n]

    count = len(ODD_KEYS)
    records = [{"k": key, "n": 1000 * turn + n} for turn in range(3) for n, key in enumerate(ODD_KEYS)]
    options: dict[str, Any] = {"key": "k", "message_id": "n"} if kind == "given" else {"key": "k"}

    def source() -> Any:
        return Partitions([records], 0) if kind == "content" else records

    async def first() -> None:
        tools.hang_on = {("end", 1000 + n) for n in range(count)}
        runner = world.runner(Scripted(body))
        running = asyncio.ensure_future(runner.run_async(source(), world.out, **options))
        await until(lambda: len(tools.hanging) == count)
        await until(lambda: runner._pipeline is not None and runner._pipeline.reading.records == len(records))
        await until(checkpoints(runner, 1))
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(first())
    tools.hang_on.clear()
    with closing(world.store().inspect()) as inspector:
        of_key = list({key: None for key, _ in inspector.messages("job")})
        assert sorted(of_key) == sorted(map(key_bytes, ODD_KEYS))
        assert [find_key(key_text(key), of_key, as_json=True) for key in of_key if key.isascii()] == [
            key for key in of_key if key.isascii()
        ]
    runner = world.runner(Scripted(body))
    run(runner, source(), world.out, **options)
    assert sorted(world.outputs()) == sorted([n, turn + 1] for turn in range(3) for n in range(count))
    assert [memory for _, memory in runner.memories()] == [{"n": 3}] * count
    assert sorted(map(key_bytes, (key for key, _ in runner.memories()))) == sorted(map(key_bytes, ODD_KEYS))
    assert all(tools.count(record["n"]) == 1 for record in records)
    assert world.recorded() == {}


@pytest.mark.parametrize("hangs", [0, 5, 30])
def test_after_a_kill_the_same_messages_count_as_begun_whatever_their_ids(
    world: World, tools: Tools, hangs: int
) -> None:
    """Those up to the last one on record, and as many beyond it as the killed process may have begun."""
    begun = {}
    records = [{"id": str(n), "k": n} for n in range(100)]
    for option in (None, "id"):
        options = {"key": "k", "message_id": option}
        job, out = f"by {option}", world.folder / f"{option}.jsonl"
        tools.hang_on = {str(hangs)}
        tools.hanging.clear()
        runner = world.runner(calling(tools), job, max_in_flight=1)
        crashed(runner, records, out, when=lambda: bool(tools.hanging), **options)
        tools.hang_on.clear()
        with closing(sqlite3.connect(world.checkpoints(job))) as file, file:
            file.execute("CREATE TABLE IF NOT EXISTS running (one INTEGER PRIMARY KEY)")
            file.execute("INSERT INTO running VALUES (1)")
        store = world.store()
        runner = world.runner(calling(tools), job, store=store, max_in_flight=1, max_attempts=3)
        run(runner, records, out, **options)
        begun[option] = store.kinds().count("begun")
        assert len(out.read_text().splitlines()) == 100
    assert begun[None] == begun["id"] > 0


# --- looking and deciding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", ODD_IDS)
def test_a_parked_message_of_any_id_is_found_and_retried(tmp_path: Path, tools: Tools, identity: Any) -> None:
    world = World("sqlite", tmp_path)
    name = str(identity)
    tools.fail_on[name] = ValueError("no")
    report = run(world.runner(calling(tools), on_failure="park"), of(identity), world.out, message_id="id")
    assert [parked.message_id for parked in report.parked] == [name]
    tools.fail_on.clear()
    with closing(world.store().inspect()) as inspector:
        assert find_message(inspector, "job", name) == (key_bytes(None), name)
        assert decide.retry(inspector, "job", name).written
    run(world.runner(calling(tools)), of(identity), world.out, message_id="id")
    assert world.outputs() in (
        [[name, 1]],
        [[name.encode(errors="replace").decode(), 1]],
        [["\ufffd", 1]],
        [["a\ufffdb", 1]],
    )


@pytest.fixture
def dalsegno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process, in a folder with an agent; gives the exit code and what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = f"shop_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(AGENT)

    def command(*args: str) -> tuple[Any, str]:
        given = [f"{module}:agent" if arg == "AGENT" else arg for arg in args]
        monkeypatch.setattr(sys, "argv", ["dalsegno", *given])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return caught.value.code, out + err

    return command


AGENT = """
from pathlib import Path
from dalsegno import Agent, InputEvent, OutputEvent, action

def charge(n):
    if not Path("mended").exists():
        raise ValueError("refused")
    return n

class Shop(Agent):
    @action(InputEvent)
    async def buy(self, event, ctx):
        ctx.send_event(OutputEvent(output=await ctx.durable_execute(charge, ctx.message_id)))

agent = Shop()
"""
RUN = ("run", "AGENT", "--job", "shop", "--source", "in.jsonl", "--sink", "out.jsonl")


def test_the_command_takes_the_field_of_the_id_and_tells_what_came_again(dalsegno: Any, tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    (tmp_path / "in.jsonl").write_text('{"id": 7}\n{"id": 7}\n{"id": "a"}\n')
    code, shown = dalsegno(*RUN, "--message-id", "id")
    assert code == 0
    assert "records that came again" in shown
    assert (tmp_path / "out.jsonl").read_text() == '"7"\n"a"\n'
    code, shown = dalsegno(*RUN)
    assert (code, "RestoreError" in shown) == (1, True)
    code, shown = dalsegno(*RUN, "--message-id", "id", "--json")
    assert json.loads(shown)["repeated"] == 0
    (tmp_path / "in.jsonl").write_text('{"id": 7}\n{"id": 7}\n{"id": "a"}\n{"n": 1}\n')
    code, shown = dalsegno(*RUN, "--message-id", "id")
    assert (code, "the record has no field 'id'; its fields are 'n'" in shown) == (1, True)


@pytest.mark.parametrize("identity", ["-1", "a b", "\n", "\0", "\ud800", "\x1b[31m", "deadbeef", "😀", "'", str(2**63)])
def test_a_message_is_found_by_what_is_shown_of_its_id(dalsegno: Any, tmp_path: Path, identity: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": identity}) + "\n")
    code, shown = dalsegno(*RUN, "--message-id", "id", "--on-failure", "park")
    assert (code, "\x1b" in shown) == (3, False)
    code, shown = dalsegno("show", "shop", "--json")
    assert json.loads(shown)["messages"][0]["message"] == identity
    code, shown = dalsegno("show", "shop", "--", printable(identity))
    assert (code, "\x1b" in shown) == (0, False)
    (retry,) = (line for line in shown.splitlines() if "dalsegno retry" in line)
    (tmp_path / "mended").touch()
    code, shown = dalsegno(*shlex.split(retry.partition("dalsegno ")[2]))
    assert (code, shown.splitlines()[0].startswith("decided: retry")) == (0, True)
    assert dalsegno(*RUN, "--message-id", "id")[0] == 0


# --- checkpoint files -----------------------------------------------------------------------------------------------

_FIRST_VERSION = """
CREATE TABLE job (name TEXT NOT NULL, agent TEXT NOT NULL, store TEXT NOT NULL);
CREATE TABLE checkpoint (
    number INTEGER NOT NULL, read INTEGER NOT NULL, position TEXT, sink TEXT NOT NULL
);
CREATE TABLE memory (key BLOB PRIMARY KEY, tree BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE inbox (ordinal INTEGER PRIMARY KEY, key BLOB NOT NULL, content BLOB NOT NULL, parked TEXT);
CREATE TABLE bad_input (ordinal INTEGER PRIMARY KEY, place TEXT NOT NULL, reason TEXT NOT NULL, raw BLOB NOT NULL);
"""


def as_first_version(path: Path) -> None:
    """Write the checkpoint file anew as the first version of the library did."""
    old = path.with_name("old.db")
    with closing(sqlite3.connect(path)) as now, closing(sqlite3.connect(old)) as then, then:
        (application,) = now.execute("PRAGMA application_id").fetchone()
        then.executescript(_FIRST_VERSION)
        tables = {
            "job": "name, agent, store",
            "checkpoint": "number, read, position, sink",
            "memory": "key, tree",
            "inbox": "ordinal, key, content, parked",
            "bad_input": "ordinal, place, reason, raw",
        }
        if now.execute("SELECT 1 FROM sqlite_master WHERE name = 'seal'").fetchone():
            then.execute("CREATE TABLE seal (proof BLOB NOT NULL)")
            tables["seal"] = "proof"
        for table, columns in tables.items():
            rows = now.execute(f"SELECT {columns} FROM {table}").fetchall()
            then.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns.split(', ')))})", rows)
        then.execute(f"PRAGMA application_id = {application}")
        then.execute("PRAGMA user_version = 1")
    for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        file.unlink(missing_ok=True)
    old.rename(path)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_checkpoint_file_of_the_first_version_goes_on(tmp_path: Path, tools: Tools, encrypted: bool) -> None:
    world = World("sqlite", tmp_path)
    options: dict[str, Any] = {"cipher": AesGcmCipher(bytes(32))} if encrypted else {}
    tools.fail_on = {"1": ValueError("no")}
    records = [{"n": n, "k": n % 3} for n in range(9)]
    run(world.runner(calling(tools), on_failure="park", **options), records, world.out, key="k")
    as_first_version(world.checkpoints())
    tools.fail_on.clear()
    with pytest.raises(RestoreError, match="that cannot change once a job has read input"):
        run(world.runner(calling(tools), **options), records, world.out, key="k", message_id="n")
    with closing(sqlite3.connect(world.checkpoints())) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (3,)
    report = run(world.runner(calling(tools), on_failure="park", **options), records, world.out, key="k")
    assert [parked.message_id for parked in report.parked] == ["1"]
    with closing(world.store().inspect()) as inspector:
        (question,) = [record for record in inspector.records("job") if b'"parked"' in record.body or encrypted][:1]
        assert question.message == "1"
    assert tools.made == ["0", "1", "2", "3", "5", "6", "8"]


def test_an_encrypted_job_with_ids_goes_on(tmp_path: Path, tools: Tools) -> None:
    world = World("sqlite", tmp_path)
    options: dict[str, Any] = {"cipher": AesGcmCipher(bytes(32)), "on_failure": "park"}
    tools.fail_on = {"\ud800": ValueError("no")}
    ids = ["a", "\ud800", "b", "b", "c"]
    report = run(world.runner(calling(tools), **options), of(*ids), world.out, message_id="id")
    assert (report.repeated, report.waiting) == (1, 2)
    report = run(world.runner(calling(tools), **options), of(*ids, "c", "b"), world.out, message_id="id")
    assert (report.repeated, report.waiting) == (2, 2)


# --- sources that bring messages in another order -------------------------------------------------------------------


class Partitions(Source):
    """Partitions that are merged anew each time, by *seed*; every record comes again exactly once, as it should."""

    replays_in_order: ClassVar[bool] = False

    def __init__(self, parts: Sequence[Sequence[Any]], seed: int) -> None:
        self.parts = parts
        self.chance = random.Random(seed)

    def describe(self) -> str:
        return "partitions"

    def total(self) -> int | None:
        return None

    def progress(self, position: dict[str, Any] | None) -> int:
        return sum(position["read"]) if position else 0

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        return self._items(list(position["read"]) if position else [0] * len(self.parts))

    async def _items(self, read: list[int]) -> AsyncIterator[SourceItem]:
        while left := [n for n, part in enumerate(self.parts) if read[n] < len(part)]:
            for _ in range(self.chance.randrange(4)):
                await asyncio.sleep(0)
            part = self.chance.choice(left)
            read[part] += 1
            yield SourceItem(sum(read) - 1, self.parts[part][read[part] - 1], {"read": list(read)})

    async def close(self) -> None:
        pass


def in_random_order(parts: Sequence[Sequence[Any]], seed: int) -> MergedSource:
    async def part(number: int) -> AsyncIterator[Any]:
        chance = random.Random(seed * 10 + number)
        for record in parts[number]:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            yield record

    return MergedSource({f"part {number}": part(number) for number in range(len(parts))})


class Checked:
    """Calls that fail the test if they are made again after their outcome was durable."""

    def __init__(self) -> None:
        self.durable: set[str] = set()
        self.made: Counter[str] = Counter()

    async def call(self, what: str) -> str:
        assert what not in self.durable, f"{what} was executed again"
        self.made[what] += 1
        await asyncio.sleep(0)
        return what

    def watch(self, store: SpyStore) -> None:
        async def note(records: Sequence[Any]) -> None:
            for body in store.bodies()[-len(records) :]:
                if "result" in body:
                    self.durable.add(body["result"])

        store.after_put = note


def checked(calls: Checked) -> Scripted:
    async def body(value: Any, ctx: RunnerContext) -> Any:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        for step in range(value["steps"]):
            what = f"{ctx.key}: {ctx.message_id}, {step}"
            await ctx.durable_execute(calls.call, what, effect="read" if step % 2 else "idempotent")
        return [value["k"], n, value["n"]]

    return Scripted(body)


@pytest.mark.parametrize("kind", ["content", "equal contents", "source", "given"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_order_and_wherever_it_is_killed_nothing_is_lost_doubled_or_run_again(
    world: World, kind: str, seed: int
) -> None:
    chance = random.Random(seed)
    parts = [
        [
            {"k": chance.randrange(3), "n": chance.randrange(3) if kind == "equal contents" else f"{p}-{n}", "steps": 2}
            for n in range(chance.randrange(5, 25))
        ]
        for p in range(2)
    ]
    calls = Checked()
    options: dict[str, Any] = {"key": "k", "message_id": "n"} if kind == "given" else {"key": "k"}
    interval = chance.choice([0.001, 3600.0])

    def source(life: int) -> Source:
        return in_random_order(parts, seed + life) if kind == "source" else Partitions(parts, seed + life)

    async def lives() -> None:
        for life in range(6):
            store = world.store()
            calls.watch(store)
            runner = world.runner(checked(calls), store=store, checkpoint_interval=interval, max_in_flight=2)
            run = asyncio.ensure_future(runner.run_async(source(life), world.out, **options))
            records = chance.randrange(1, 60)
            while life < 5 and not run.done() and len(store.bodies()) < records:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if life < 5:
                run.cancel()
            await asyncio.wait([run])
            if not run.cancelled():
                run.result()

    asyncio.run(asyncio.wait_for(lives(), 20))
    outputs = world.outputs()
    sent = Counter((record["k"], record["n"]) for part in parts for record in part)
    assert Counter((k, n) for k, _, n in outputs) == sent
    for key in {k for k, _, _ in outputs}:
        assert [count for k, count, _ in outputs if k == key] == list(
            range(1, 1 + sum(k == key for k, _, _ in outputs))
        )
        if kind != "equal contents":
            for part in range(2):
                of_part = [n for k, _, n in outputs if k == key and n.startswith(f"{part}-")]
                assert of_part == [r["n"] for r in parts[part] if r["k"] == key]
    assert world.recorded() == {}


def recorded_in_order(world: World, tools: Tools, ids: Sequence[str]) -> None:
    """Crash when the messages *ids*, of one key, are recorded in this order, the last one unfinished."""
    tools.hang_on = {ids[-1]}
    source = Steered([[{"id": each} for each in ids]], list(ids))
    crashed(world.runner(calling(tools)), source, world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    tools.hanging.clear()


class Steered(Partitions):
    """Hands out records with ids in the order in which a test wants them, and waits where it has a function."""

    gives_ids: ClassVar[bool] = True

    def __init__(self, parts: Sequence[Sequence[Any]], order: Sequence[Any]) -> None:
        super().__init__(parts, 0)
        self.order = order
        self.records = {record["id"]: record for part in parts for record in part}

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        return self._steered(set(position["ids"]) if position else set())

    def value(self, identity: str) -> Any:
        return self.records[identity]

    async def _steered(self, read: set[str]) -> AsyncIterator[SourceItem]:
        for step in self.order:
            if callable(step):
                await until(step)
            elif step not in read:
                read = read | {step}
                yield SourceItem(len(read) - 1, self.value(step), {"ids": sorted(read)}, step)

    def progress(self, position: dict[str, Any] | None) -> int:
        return len(position["ids"]) if position else 0


IDS = ["a", "b", "c", "d", "e"]
PARTS = [[{"id": each} for each in IDS]]


def test_messages_wait_for_those_that_were_recorded_before_them(world: World, tools: Tools) -> None:
    recorded_in_order(world, tools, ["a", "b", "c"])
    run(world.runner(calling(tools)), Steered(PARTS, ["e", "c", "b", "d", "a"]), world.out)
    assert world.outputs() == [["a", 1], ["b", 2], ["c", 3], ["e", 4], ["d", 5]]
    assert tools.made == ["a", "b", "c", "c", "e", "d"]


class Nameless(Steered):
    gives_ids: ClassVar[bool] = False

    def value(self, identity: str) -> Any:
        return self.records[identity]["v"]


def test_without_ids_messages_are_known_by_their_content(world: World, tools: Tools) -> None:
    """Two of them have the same: each is played back once, as the one that was recorded first."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        what = (ctx.message_id, value, n)
        await ctx.durable_execute(tools.call, what, effect="idempotent")
        return [*what]

    parts = [[{"id": each, "v": each[0]} for each in ("a", "b1", "b2", "c", "d")]]
    tools.hang_on = {("3", "c", 4)}
    source = Nameless(parts, ["a", "b1", "b2", "c"])
    crashed(world.runner(Scripted(body)), source, world.out, key=None, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), Nameless(parts, ["d", "c", "b2", "a", "b1"]), world.out)
    assert world.outputs() == [["0", "a", 1], ["1", "b", 2], ["2", "b", 3], ["3", "c", 4], ["4", "d", 5]]
    assert [what[0] for what in tools.made] == ["0", "1", "2", "3", "3", "4"]


def test_what_waits_is_in_checkpoints_and_waits_on_after_another_crash(world: World, tools: Tools) -> None:
    recorded_in_order(world, tools, ["a", "b", "c"])
    runner = world.runner(calling(tools))

    def stopped() -> bool:
        runner.stop()
        return True

    stops = ["e", "c", checkpoints(runner, 1), "b", checkpoints(runner, 2), stopped]
    run(runner, Steered(PARTS, [*stops, lambda: False]), world.out)
    assert world.outputs() == []
    run(world.runner(calling(tools)), Steered(PARTS, ["d", "a"]), world.out)
    assert world.outputs() == [["a", 1], ["b", 2], ["c", 3], ["e", 4], ["d", 5]]
    assert tools.made == ["a", "b", "c", "c", "e", "d"]
    assert world.recorded() == {}


def test_what_waited_keeps_its_place_when_a_message_before_it_is_parked(world: World, tools: Tools) -> None:
    recorded_in_order(world, tools, ["a", "b", "c"])
    tools.fail_on["c"] = ValueError("no")
    runner = world.runner(calling(tools), on_failure="park", checkpoint_interval=0.001)
    order = ["e", checkpoints(runner, 1), "c", "b", checkpoints(runner, 2), "a", checkpoints(runner, 4), "d"]
    report = run(runner, Steered(PARTS, order), world.out)
    assert (len(report.parked), report.waiting) == (1, 2)
    tools.fail_on.clear()
    for _ in range(2):
        report = run(world.runner(calling(tools), on_failure="park"), Steered(PARTS, IDS), world.out)
        assert (len(report.parked), report.waiting) == (1, 2)
    retry(world, "c")
    run(world.runner(calling(tools)), Steered(PARTS, IDS), world.out)
    assert world.outputs() == [["a", 1], ["b", 2], ["c", 3], ["e", 4], ["d", 5]]


def parked(runner: LocalRunner, count: int) -> Any:
    return lambda: runner._pipeline is not None and len(runner._pipeline.parked()) == count


@pytest.mark.parametrize("comes_first", ["the decision", "what is waited for"])
def test_what_waits_for_its_turn_is_not_what_waits_behind_a_parked_message(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch, comes_first: str
) -> None:
    recorded_in_order(world, tools, ["a", "b"])
    # In a life in which b does not come in time, d goes before it.
    monkeypatch.setattr(recovery, "WAIT_SECONDS", 0.0)
    tools.hang_on = {"d"}
    source = Steered(PARTS, ["a", "d", lambda: False])
    crashed(world.runner(calling(tools)), source, world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    monkeypatch.setattr(recovery, "WAIT_SECONDS", 60.0)
    # So b and d are recorded in this order, and b can be parked while e waits for d.
    tools.fail_on["b"] = ValueError("no")
    runner = world.runner(calling(tools), on_failure="park")

    def retried() -> bool:
        tools.fail_on.clear()
        return retry(world, "b")

    order = ["a", "b", parked(runner, 1), "e", checkpoints(runner, 1), "c", checkpoints(runner, 2)]
    order += [retried, parked(runner, 0), "d"] if comes_first == "the decision" else ["d", retried, parked(runner, 0)]
    report = run(runner, Steered(PARTS, order), world.out)
    assert (report.waiting, report.parked) == (0, [])
    assert [output[0] for output in world.outputs()] == ["a", "b", "d", "e", "c"]
    assert [output[1] for output in world.outputs()] == [1, 2, 3, 4, 5]
    assert world.recorded() == {}


def test_what_is_given_up_while_the_inbox_is_read_keeps_its_order_behind_a_parked_message(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_in_order(world, tools, ["a", "b"])
    runner = world.runner(calling(tools))
    order = ["e", "d", checkpoints(runner, 1), lambda: len(tools.made) == 9]
    crashed(runner, Steered(PARTS, order), world.out, when=checkpoints_are(runner, 1))
    monkeypatch.setattr(recovery, "WAITING_IN_MEMORY", 0)
    tools.fail_on["e"] = ValueError("no")
    runner = world.runner(calling(tools), on_failure="park")

    def retried() -> bool:
        tools.fail_on.clear()
        return retry(world, "e")

    order = [parked(runner, 1), retried, lambda: len(world.outputs()) == 2, "a", "b"]
    report = run(runner, Steered(PARTS, order), world.out)
    assert (report.waiting, report.parked) == (0, [])
    assert [output[0] for output in world.outputs()] == ["e", "d", "a", "b"]
    assert world.recorded() == {}


def checkpoints_are(runner: LocalRunner, at_least: int) -> Any:
    return lambda: runner._pipeline is not None and runner._pipeline.report.checkpoints >= at_least


def test_many_that_wait_go_on_with_a_warning_when_there_are_too_many(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded_in_order(world, tools, ["a", "b", "c"])
    monkeypatch.setattr(recovery, "WAITING_IN_MEMORY", 2)
    with caplog.at_level(logging.WARNING, "dalsegno"):
        run(world.runner(calling(tools)), Steered(PARTS, ["e", "c", "b", "d", "a"]), world.out)
    assert "1 that were recorded before them and did not come again, as 2 messages wait" in caplog.text
    assert "the first of those is 'a'" in caplog.text
    assert [output[0] for output in world.outputs()] == ["b", "c", "e", "d", "a"]
    assert tools.made == ["a", "b", "c", "c", "e", "d"]


def test_messages_go_on_with_a_warning_when_they_have_waited_for_long(
    world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded_in_order(world, tools, ["a", "b", "c"])
    monkeypatch.setattr(recovery, "WAIT_SECONDS", 0.0)
    order = ["b", lambda: len(world.outputs()) == 1, "c", lambda: len(world.outputs()) == 2, "a", "d", "e"]
    with caplog.at_level(logging.WARNING, "dalsegno"):
        run(world.runner(calling(tools), checkpoint_interval=0.001), Steered(PARTS, order), world.out)
    assert [output[0] for output in world.outputs()] == ["b", "c", "a", "d", "e"]
    assert caplog.text.count("go on without 1 that were recorded before them") == 1
    assert tools.made == ["a", "b", "c", "c", "d", "e"]


def test_what_waits_for_a_message_that_is_gone_is_not_lost(world: World, tools: Tools) -> None:
    recorded_in_order(world, tools, ["a", "b", "c"])
    with pytest.raises(RestoreError, match="message 'a', which is recorded, did not come again"):
        run(world.runner(calling(tools)), Steered(PARTS, ["b", "c", "d"]), world.out)
    assert world.outputs() == []
    run(world.runner(calling(tools)), Steered(PARTS, ["a", "e"]), world.out)
    assert [output[0] for output in world.outputs()] == ["a", "b", "c", "d", "e"]


def test_numbers_claimed_by_content_are_never_given_twice(world: World, tools: Tools) -> None:
    """Else two calls would share an idempotency key."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, value["n"], effect="idempotent")
        return ctx.message_id

    parts = [[{"n": 10 * part + n} for n in range(6)] for part in range(2)]
    for life in range(4):
        tools.hanging.clear()
        tools.hang_on = {life, 10 + life}
        runner = world.runner(Scripted(body), checkpoint_interval=0.001)
        crashed(runner, Partitions(parts, life), world.out, when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    run(world.runner(Scripted(body)), Partitions(parts, 9), world.out)
    ids = world.outputs()
    assert len(set(ids)) == len(ids) == 12


def test_another_key_is_found_by_content_too(world: World, tools: Tools) -> None:
    parts = [[{"k": "a", "j": "b"}]]
    tools.hang_on.add("0")
    crashed(world.runner(calling(tools)), Partitions(parts, 0), world.out, key="k", when=lambda: bool(tools.hanging))
    tools.hang_on.clear()
    with pytest.raises(DivergenceError, match="has the key 'b', but was recorded with 'a'"):
        run(world.runner(calling(tools)), Partitions(parts, 0), world.out, key="j")
    assert tools.made == ["0"]


# --- merged sources -------------------------------------------------------------------------------------------------


def test_a_merge_brings_each_part_in_order_with_ids_of_its_own(world: World, tools: Tools, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("1\n2\nnot JSON\n3\n")

    async def slowly() -> AsyncIterator[Any]:
        for n in range(3):
            await asyncio.sleep(0)
            yield n

    source = MergedSource({"file": file, "list": IterableSource([7, 8]), "a/b": slowly()})
    report = run(world.runner(calling(tools)), source, world.out, on_bad_input="skip")
    assert (report.messages, report.skipped) == (8, 1)
    for part, numbers in {"file": [0, 1, 3], "list": [0, 1], "a/b": [0, 1, 2]}.items():
        assert [made for made in tools.made if made.startswith(f"{part}/")] == [f"{part}/{n}" for n in numbers]
    file.write_text("1\n2\nnot JSON\n3\n4\n")
    source = MergedSource({"file": file, "list": [7, 8, 9], "a/b": [0, 1, 2], "new": [5]})
    assert run(world.runner(calling(tools)), source, world.out).messages == 3
    assert sorted(tools.made[-3:]) == ["file/4", "list/2", "new/0"]


def test_a_part_that_is_missing_or_fails_is_told(world: World, tools: Tools) -> None:
    run(world.runner(calling(tools)), MergedSource({"a": [1], "b": [2]}), world.out)
    with pytest.raises(RestoreError, match=r"has read 'b', which is no part of a merge of a \("):
        run(world.runner(calling(tools)), MergedSource({"a": [1]}), world.out)
    with pytest.raises(RestoreError, match="the ids of its messages are given by the source, and would now be the num"):
        run(world.runner(calling(tools)), [1, 2], world.out)

    async def failing() -> AsyncIterator[Any]:
        yield 2
        raise OSError("gone")

    with pytest.raises(InputError, match=r"an async iterable .* failed before record 2 with OSError"):
        run(world.runner(calling(tools)), MergedSource({"a": [1, 3], "b": failing()}), world.out)
    run(world.runner(calling(tools)), MergedSource({"a": [1, 3], "b": [2, 4]}), world.out)
    assert sorted(made[0] for made in world.outputs()) == ["a/0", "a/1", "b/0", "b/1"]


@pytest.mark.parametrize("wrong", [{}, [1], {1: [2]}, {"a": 3}, {"a": Partitions([[1]], 0)}])
def test_what_cannot_be_merged_is_refused(wrong: Any) -> None:
    with pytest.raises(DefinitionError):
        MergedSource(wrong)


def test_a_merge_knows_how_much_there_is_if_its_parts_do() -> None:
    assert MergedSource({"a": [1, 2], "b": [3]}).total() == 3
    assert MergedSource({"a": [1, 2], "b": iter([3])}).total() is None
    assert MergedSource({"a": [1, 2], "b": [3]}).progress({"ordinal": 2, "parts": {"a": {"ordinal": 2}}}) == 2


def test_stopping_a_merge_leaves_no_task_behind(world: World, tools: Tools) -> None:
    async def endless() -> AsyncIterator[Any]:
        yield 1
        await for_ever()

    async def main() -> None:
        runner = world.runner(calling(tools))
        running = asyncio.ensure_future(runner.run_async(MergedSource({"a": endless(), "b": endless()}), world.out))
        await until(lambda: len(tools.made) == 2)
        runner.stop()
        assert (await running).messages == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_the_source_fails_as_before_if_an_action_does(world: World, tools: Tools) -> None:
    tools.fail_on["a/0"] = ValueError("no")
    with pytest.raises(ActionError, match="message 'a/0'"):
        run(world.runner(calling(tools)), MergedSource({"a": [1]}), world.out)
