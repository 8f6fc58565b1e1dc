"""Older checkpoints that can be restored, and history that stays after the checkpoint that covers it."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dalsegno import ActionError, AesGcmCipher, DefinitionError, LocalRunner, RestoreError, RunnerContext, StoreError
from dalsegno.runners import kept_rows, retention
from dalsegno.runners.checkpoints import CheckpointFile
from dalsegno.runners.merged import MergedSource
from dalsegno.runners.sinks import JsonLinesSink
from dalsegno.runners.sources import IterableSource
from tests.helpers import Scripted, Tools, World, crashed, run


def calling(tools: Tools) -> Scripted:
    """Makes one call for the message, and counts the key's messages in memory."""

    async def body(value: Any, ctx: RunnerContext) -> Any:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        if value.get("forget"):
            ctx.short_term_memory.delete("n")
        await ctx.durable_execute(tools.call, value["n"], effect="idempotent")
        return [value["n"], n]

    return Scripted(body)


def of(*numbers: int, keys: int = 3, **more: Any) -> list[dict[str, Any]]:
    return [{"n": n, "k": n % keys, **more} for n in numbers]


def memories(runner: LocalRunner) -> dict[Any, Any]:
    return dict(runner.memories())


def grown(world: World, tools: Tools, upto: int, step: int = 2, **options: Any) -> LocalRunner:
    """Run to the end of *upto* records, a checkpoint after each *step* of them. A run takes exactly one checkpoint."""
    options = {"keep_checkpoints": 3, **options}
    given = {name: options.pop(name) for name in ("message_id",) if name in options}
    runner = world.runner(calling(tools), **options)
    for end in range(step, upto + 1, step):
        runner = world.runner(calling(tools), **options)
        run(runner, of(*range(end)), world.out, key="k", **given)
    return runner


def outputs(world: World) -> list[Any]:
    """In no particular order: keys go on beside one another."""
    return sorted(world.outputs())


def numbers(runner: LocalRunner) -> list[int]:
    return [kept.number for kept in runner.checkpoints()]


@pytest.fixture(params=[None, "n"], ids=["by position", "given"])
def ids(request: pytest.FixtureRequest) -> Any:
    return {} if request.param is None else {"message_id": request.param}


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_an_older_checkpoint_is_restored_and_nothing_on_record_is_executed_again(
    world: World, tools: Tools, ids: Any, encrypted: bool, back: int
) -> None:
    options: dict[str, Any] = {"cipher": AesGcmCipher(bytes(32))} if encrypted else {}
    runner = grown(world, tools, 10, **options, **ids)
    kept, before, memory = runner.checkpoints(), outputs(world), memories(runner)
    assert [(each.number, each.read) for each in kept] == [(3, 6), (4, 8), (5, 10)]
    assert all(each.taken is not None and each.taken.tzinfo is UTC for each in kept)
    chosen = kept[2 - back]
    restored = world.runner(calling(tools), keep_checkpoints=3, restore=chosen.number, **options)
    report = run(restored, of(*range(12)), world.out, key="k", **ids)
    assert (report.messages, report.calls_replayed, report.calls_executed) == (12 - chosen.read, back * 2, 2)
    assert Counter(tools.made) == Counter(range(12))
    assert outputs(world) == [*before, [10, 4], [11, 4]]
    assert memories(restored) == {key: {"n": value["n"] + (key > 0)} for key, value in memory.items()}


def test_what_was_before_is_put_back_exactly(world: World, tools: Tools) -> None:
    """Keys that came, went and changed, a message that was parked, retried and is done, bad input."""
    path = world.checkpoints()
    states = {}
    tables = ("checkpoint", "memory", "inbox", "bad_input", "covered")
    lines = [*of(0, 1, 2), *of(3, forget=True), *of(4, 5), "bad", *of(6, 7), *of(8, forget=True), *of(9, 0xA)]
    tools.fail_on = {4: ValueError("no")}
    for number, end in enumerate(range(2, 13, 2), 1):
        if end == 8:
            tools.fail_on.clear()
            world.runner(calling(tools)).operator().retry(1)
        runner = world.runner(calling(tools), keep_checkpoints=9, on_failure="park")
        run(runner, lines[:end], world.out, key="k", on_bad_input="park")
        with closing(sqlite3.connect(path)) as file:
            states[number] = [file.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables]
    assert states[3][2] != states[6][2]
    assert states[3][3] != states[6][3]
    for number in range(5, 0, -1):
        with closing(sqlite3.connect(path)) as file, file:
            kept_rows.go_back(file, number)
            found = [file.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables]
        assert found == states[number], number


def test_a_crash_after_going_back_loses_nothing(world: World, tools: Tools, ids: Any) -> None:
    grown(world, tools, 10, **ids)
    before = outputs(world)
    tools.hang_on = {10}
    restored = world.runner(calling(tools), keep_checkpoints=3, restore=3)
    crashed(restored, of(*range(12)), world.out, when=lambda: 10 in tools.hanging, key="k", **ids)
    tools.hang_on.clear()
    run(world.runner(calling(tools), keep_checkpoints=3), of(*range(12)), world.out, key="k", **ids)
    assert Counter(tools.made) == Counter([*range(12), 10])  # it is idempotent, and its request alone was on record
    assert outputs(world) == [*before, [10, 4], [11, 4]]


class _NoSink(JsonLinesSink):
    """The process ends when the sink is to be cut back to the older checkpoint."""

    opened: ClassVar[int] = 0

    def open(self, state: dict[str, Any] | None) -> None:
        type(self).opened += 1
        if type(self).opened == 2:
            raise StoreError("as if killed")
        super().open(state)


def test_a_crash_between_going_back_and_cutting_the_sink(world: World, tools: Tools) -> None:
    grown(world, tools, 10)
    before = outputs(world)
    _NoSink.opened = 0
    with pytest.raises(StoreError, match="as if killed"):
        run(world.runner(calling(tools), keep_checkpoints=3, restore=3), of(*range(10)), _NoSink(world.out), key="k")
    assert outputs(world) == before
    report = run(world.runner(calling(tools), keep_checkpoints=3), of(*range(10)), world.out, key="k")
    assert (report.messages, report.calls_executed, outputs(world)) == (4, 0, before)


def test_going_back_twice_and_further(world: World, tools: Tools, ids: Any) -> None:
    grown(world, tools, 10, **ids)
    before = outputs(world)
    for number, messages in ((4, 2), (3, 4), (3, 4), (4, 0)):
        runner = world.runner(calling(tools), keep_checkpoints=3, restore=number)
        report = run(runner, of(*range(10)), world.out, key="k", **ids)
        assert (report.messages, report.calls_executed, outputs(world)) == (messages, 0, before), number
        assert numbers(runner)[-1] == number + bool(messages)


def test_a_runner_goes_back_once(world: World, tools: Tools) -> None:
    grown(world, tools, 10)
    runner = world.runner(calling(tools), keep_checkpoints=3, restore=3)
    assert run(runner, of(*range(10)), world.out, key="k").messages == 4
    assert run(runner, of(*range(10)), world.out, key="k").messages == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (2, "checkpoint 2: the oldest checkpoint that is kept is 3, and what was needed .* Restore one from 3 to 5"),
        (6, "checkpoint 6: its last checkpoint is 5. Restore one from 3 to 5"),
    ],
)
def test_a_checkpoint_that_is_not_kept_is_refused(world: World, tools: Tools, number: int, reason: str) -> None:
    runner = grown(world, tools, 10)
    before = numbers(runner), outputs(world)
    with pytest.raises(RestoreError, match=reason):
        run(world.runner(calling(tools), restore=number), of(*range(10)), world.out, key="k")
    assert (numbers(runner), outputs(world)) == before


def test_a_new_job_has_nothing_to_go_back_to(world: World, tools: Tools) -> None:
    with pytest.raises(RestoreError, match="checkpoint 1: it has not taken one yet"):
        run(world.runner(calling(tools), restore=1), of(0), world.out)
    with pytest.raises(StoreError, match="there is no checkpoint file"):
        world.runner(calling(tools), "other").checkpoints()


def test_other_ids_than_then_are_refused_before_anything_changes(world: World, tools: Tools) -> None:
    runner = grown(world, tools, 4, message_id="n")
    run(
        world.runner(calling(tools), keep_checkpoints=3), of(*range(6)), world.out, key="k", message_id=lambda r: r["n"]
    )
    with pytest.raises(RestoreError, match=r"were made as 'given field n' then, .* 'given function'"):
        run(world.runner(calling(tools), restore=1), of(*range(6)), world.out, key="k", message_id=lambda r: r["n"])
    assert numbers(runner)[-1] == 3


def test_fewer_and_more_are_kept(world: World, tools: Tools, ids: Any) -> None:
    """The number may change between runs, and the store has no more than what it takes."""
    runner = grown(world, tools, 10, **ids)
    assert len(recorded(world)) == 4
    run(world.runner(calling(tools)), of(*range(11)), world.out, key="k", **ids)
    assert (numbers(runner), recorded(world)) == ([6], set())
    run(world.runner(calling(tools), keep_checkpoints=2), of(*range(12)), world.out, key="k", **ids)
    assert (numbers(runner), recorded(world)) == ([6, 7], {"11"})
    report = run(world.runner(calling(tools), keep_checkpoints=2, restore=6), of(*range(12)), world.out, key="k", **ids)
    assert (report.messages, report.calls_executed, Counter(tools.made)) == (1, 0, Counter(range(12)))


def recorded(world: World) -> set[str]:
    return {state.message for states in world.recorded().values() for state in states}


def test_fewer_are_kept_and_a_crash_comes_before_the_prune(world: World, tools: Tools, ids: Any) -> None:
    grown(world, tools, 10, **ids)
    store = world.store()

    def refuse(covered: Any) -> None:
        if covered.checkpoint > 3:
            raise StoreError("no prune")

    store.before_prune = refuse
    with pytest.raises(StoreError, match="no prune"):
        run(world.runner(calling(tools), store=store), of(*range(11)), world.out, key="k", **ids)
    run(world.runner(calling(tools)), of(*range(11)), world.out, key="k", **ids)
    assert (recorded(world), Counter(tools.made)) == (set(), Counter(range(11)))


def test_an_older_store_is_still_refused(tmp_path: Path, tools: Tools) -> None:
    world = World("sqlite", tmp_path)
    grown(world, tools, 4, keep_checkpoints=1)
    shutil.copytree(tmp_path, tmp_path / "copy")
    for end in (6, 8):
        run(world.runner(calling(tools)), of(*range(end)), world.out, key="k")
    for file in tmp_path.glob("store.db*"):
        file.unlink()
    for file in (tmp_path / "copy").glob("store.db*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(RestoreError, match="it is older than the checkpoint file"):
        run(world.runner(calling(tools), keep_checkpoints=3), of(*range(10)), world.out, key="k")


def halves(upto: int) -> MergedSource:
    return MergedSource({"a": of(*range(0, upto, 2), keys=2), "b": of(*range(1, upto, 2), keys=2)})


@pytest.mark.parametrize("number", [2, 3, 4])
def test_merged_sources_go_back(world: World, tools: Tools, number: int) -> None:
    for end in range(4, 21, 4):
        run(world.runner(calling(tools), keep_checkpoints=4), halves(end), world.out, key="k")
    restored = world.runner(calling(tools), keep_checkpoints=4, restore=number)
    report = run(restored, halves(24), world.out, key="k")
    assert (report.messages, report.calls_executed) == (24 - 4 * number, 4)
    assert Counter(tools.made) == Counter(range(24))
    assert [n for n, _ in outputs(world)] == list(range(24))


class _ByContent(IterableSource):
    """Brings its records in any order, so that they have no ids."""

    replays_in_order: ClassVar[bool] = False

    def __init__(self, upto: int, seed: int) -> None:
        self._rest = random.Random(seed)
        super().__init__(of(*range(upto)))

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[Any]:
        items = [item async for item in await super().open(position)]
        values = [item.value for item in items]
        self._rest.shuffle(values)
        return _again(items, values)


async def _again(items: list[Any], values: list[Any]) -> AsyncIterator[Any]:
    for item, value in zip(items, values, strict=True):
        yield item._replace(value=value)


@pytest.mark.parametrize("seed", range(3))
def test_messages_claimed_by_content_go_back(world: World, tools: Tools, seed: int) -> None:
    options: dict[str, Any] = {"keep_checkpoints": 3, "keep_history": timedelta(days=1)}
    for end in range(4, 21, 4):
        run(world.runner(calling(tools), **options), _ByContent(end, end), world.out, key="k")
    report = run(world.runner(calling(tools), restore=3, **options), _ByContent(24, seed), world.out, key="k")
    assert (report.messages, report.calls_executed) == (12, 4)
    assert Counter(tools.made) == Counter(range(24))


def as_second_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        for table in ("taken", "kept", "memory_before", "inbox_before", "finished"):
            file.execute(f"DROP TABLE {table}")
        file.execute("PRAGMA user_version = 2")


def test_a_checkpoint_file_of_the_second_version_goes_on(world: World, tools: Tools, ids: Any) -> None:
    runner = grown(world, tools, 4, keep_checkpoints=1, **ids)
    as_second_version(world.checkpoints())
    assert [tuple(each) for each in runner.checkpoints()] == [(2, None, 4)]
    run(world.runner(calling(tools), keep_checkpoints=2), of(*range(6)), world.out, key="k", **ids)
    assert numbers(runner) == [2, 3]
    run(world.runner(calling(tools), keep_checkpoints=2, restore=2), of(*range(6)), world.out, key="k", **ids)
    assert Counter(tools.made) == Counter(range(6))


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "3", None])
def test_wrong_numbers_of_checkpoints(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match="keep_checkpoints="):
        LocalRunner(Scripted(None), job="j", store="memory://", keep_checkpoints=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, True, "3"])
def test_wrong_checkpoints_to_restore(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match="restore="):
        LocalRunner(Scripted(None), job="j", store="memory://", restore=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [timedelta(-1), 7, "7d"])
def test_wrong_times_of_history(wrong: Any) -> None:
    with pytest.raises(DefinitionError, match="keep_history="):
        LocalRunner(Scripted(None), job="j", store="memory://", keep_history=wrong)  # type: ignore[arg-type]


# --- history --------------------------------------------------------------------------------------------------------


class Later:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def remembering(world: World, tools: Tools, clock: Later, **options: Any) -> LocalRunner:
    runner = world.runner(calling(tools), keep_history=timedelta(days=7), **options)
    runner._clock = clock
    return runner


def test_history_stays_for_its_time_and_is_then_pruned(world: World, tools: Tools, ids: Any) -> None:
    clock = Later()
    for end in (2, 4):
        run(remembering(world, tools, clock), of(*range(end)), world.out, key="k", **ids)
        clock.now += timedelta(days=4)
    assert recorded(world) == {"0", "1", "2", "3"}
    run(remembering(world, tools, clock), of(*range(4)), world.out, key="k", **ids)  # 8 and 4 days
    assert recorded(world) == {"2", "3"}
    clock.now += timedelta(days=2.9)
    run(remembering(world, tools, clock), of(*range(6)), world.out, key="k", **ids)
    assert recorded(world) == {"2", "3", "4", "5"}
    clock.now += timedelta(days=0.2)
    run(remembering(world, tools, clock), of(*range(6)), world.out, key="k", **ids)
    assert recorded(world) == {"4", "5"}
    for end in (7, 8):  # none is kept any more
        run(world.runner(calling(tools)), of(*range(end)), world.out, key="k", **ids)
    assert (recorded(world), Counter(tools.made)) == (set(), Counter(range(8)))
    with closing(sqlite3.connect(world.checkpoints())) as file:
        assert file.execute("SELECT count(*) FROM finished").fetchone() == (0,)


def test_history_is_shown_as_done(world: World, tools: Tools) -> None:
    run(remembering(world, tools, Later()), of(0, 1), world.out, key="k")
    with closing(world.store().inspect()) as inspector:
        assert {message for _, message in inspector.messages("job")} == {"0", "1"}
        assert all(json.loads(record.body)["v"] for record in inspector.records("job"))


def test_a_crash_before_the_store_was_asked_forgets_nothing(world: World, tools: Tools, ids: Any) -> None:
    clock = Later()
    run(remembering(world, tools, clock), of(0, 1), world.out, key="k", **ids)
    clock.now += timedelta(days=8)
    store = world.store()

    def refuse(covered: Any) -> None:
        if covered.messages:
            raise StoreError("no prune")

    store.before_prune = refuse
    with pytest.raises(StoreError, match="no prune"):
        run(remembering(world, tools, clock, store=store), of(*range(4)), world.out, key="k", **ids)
    run(remembering(world, tools, clock), of(*range(4)), world.out, key="k", **ids)
    assert (recorded(world), Counter(tools.made)) == ({"2", "3"}, Counter(range(4)))


def test_a_crash_before_the_file_knows_asks_twice(
    world: World, tools: Tools, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Later()
    run(remembering(world, tools, clock), of(0, 1), world.out, key="k", **ids)
    clock.now += timedelta(days=8)

    def fail(file: CheckpointFile, messages: Any) -> None:
        raise StoreError("as if killed")

    monkeypatch.setattr(CheckpointFile, "mark_pruned", fail)
    with pytest.raises(StoreError, match="as if killed"):
        run(remembering(world, tools, clock), of(*range(4)), world.out, key="k", **ids)
    monkeypatch.undo()
    store = world.store()
    run(remembering(world, tools, clock, store=store), of(*range(4)), world.out, key="k", **ids)
    assert {message for covered in store.pruned for _, message in covered.messages} == {"0", "1"}
    assert (recorded(world), Counter(tools.made)) == ({"2", "3"}, Counter(range(4)))


def test_a_message_whose_id_comes_again_gets_nothing_of_the_one_before(world: World, tools: Tools) -> None:
    """Without history the id is free once it is covered, and with it, too."""
    clock = Later()
    again = [{"n": n, "id": n % 2, "k": 0} for n in range(6)]
    other = [{"n": n, "id": n, "k": 0} for n in range(6, 12)]
    records: list[Any] = []
    for n in range(0, 6, 2):
        for more in (again[n : n + 2], other[n : n + 1], other[n + 1 : n + 2]):
            records += more
            run(remembering(world, tools, clock), records, world.out, key="k", message_id="id")
    assert tools.made == [record["n"] for record in records]
    assert world.outputs() == [[record["n"], place] for place, record in enumerate(records, 1)]


def test_content_that_comes_again_gets_nothing_of_the_one_before(world: World, tools: Tools) -> None:
    clock = Later()
    for end in (2, 4, 6):
        source = _Same(end)
        run(remembering(world, tools, clock), source, world.out, key="k")
    assert tools.made == [0] * 6
    assert world.outputs() == [[0, n] for n in range(1, 7)]


class _Same(IterableSource):
    replays_in_order: ClassVar[bool] = False

    def __init__(self, upto: int) -> None:
        super().__init__([{"n": 0, "k": 0}] * upto)


def test_going_back_keeps_history(world: World, tools: Tools, ids: Any) -> None:
    clock = Later()
    for end in (2, 4, 6, 8):
        run(remembering(world, tools, clock, keep_checkpoints=2), of(*range(end)), world.out, key="k", **ids)
    run(remembering(world, tools, clock, keep_checkpoints=2, restore=3), of(*range(10)), world.out, key="k", **ids)
    assert (recorded(world), Counter(tools.made)) == ({str(n) for n in range(10)}, Counter(range(10)))
    clock.now += timedelta(days=8)
    run(remembering(world, tools, clock, keep_checkpoints=2), of(*range(10)), world.out, key="k", **ids)
    assert recorded(world) == {"6", "7", "8", "9"}  # which the older of the two checkpoints does not cover


def test_a_parked_message_is_not_pruned_with_history(world: World, tools: Tools) -> None:
    clock = Later()
    tools.fail_on = {1: ValueError("no")}
    run(remembering(world, tools, clock, on_failure="park"), of(0, 1, 2), world.out, key="k")
    clock.now += timedelta(days=8)
    run(remembering(world, tools, clock, on_failure="park"), of(*range(4)), world.out, key="k")
    assert recorded(world) == {"1", "3"}


def test_the_store_is_asked_in_chunks(world: World, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PRUNE_CHUNK", 5)
    store = world.store()
    run(world.runner(calling(tools), store=store), of(*range(12)), world.out, key="k")
    assert [len(covered.messages) for covered in store.pruned if covered.checkpoint == 1] == [5, 5, 2]
    clock = Later()
    run(remembering(world, tools, clock), of(*range(24)), world.out, key="k")
    clock.now += timedelta(days=8)
    store = world.store()
    run(remembering(world, tools, clock, store=store), of(*range(24)), world.out, key="k")
    assert [len(covered.messages) for covered in store.pruned if covered.messages] == [5, 5, 2]


def test_a_failed_action_does_not_disturb_what_is_kept(world: World, tools: Tools, ids: Any) -> None:
    grown(world, tools, 6, **ids)
    tools.fail_on = {7: ValueError("no")}
    with pytest.raises(ActionError):
        run(world.runner(calling(tools), keep_checkpoints=3), of(*range(9)), world.out, key="k", **ids)
    tools.fail_on.clear()
    run(world.runner(calling(tools), keep_checkpoints=3, restore=2), of(*range(9)), world.out, key="k", **ids)
    assert Counter(tools.made) == Counter([*range(9), 7])
    assert [n for n, _ in outputs(world)] == list(range(9))


class _Final(JsonLinesSink):
    goes_back: ClassVar[bool] = False


def test_a_sink_that_takes_nothing_back_is_refused_before_anything_changes(world: World, tools: Tools) -> None:
    runner = grown(world, tools, 6)
    with pytest.raises(RestoreError, match="cannot be taken back, and would be written twice"):
        run(world.runner(calling(tools), restore=2), of(*range(6)), _Final(world.out), key="k")
    assert numbers(runner) == [1, 2, 3]
