"""The checkpoint file: damage of any row is an error that names it, and an empty memory takes no place."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dalsegno import RunnerContext
from dalsegno.cipher import AesGcmCipher, PayloadCipher
from dalsegno.errors import RecordError
from dalsegno.memory import EMPTY, Leaf, Node, to_json
from dalsegno.runners.checkpoints import BadRecord, Checkpoint, CheckpointFile, InboxEntry, JobIdentity
from tests.helpers import Scripted, Tools, World, run

IDENTITY = JobIdentity("job", "Agent", "store")
CIPHER = AesGcmCipher({"k": b"k" * 32})
READ = 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.db"


def written(path: Path, cipher: PayloadCipher | None = None) -> None:
    file = CheckpointFile(path, cipher)
    assert file.open(IDENTITY) is None
    memory = {b"1": Node({"n": Leaf("one"), "in": Node({"x": Leaf(None)})}), b"2": Node({"n": Leaf("two")})}
    inbox = [InboxEntry(3, b"1", {"n": 3}, "a reason"), InboxEntry(5, b"2", None)]
    bad = [BadRecord(6, "line 6", "it is not JSON", "{broken")]
    file.commit(Checkpoint(1, READ, {"offset": 9}, {"length": 10}, memory, inbox, [], bad))
    file.close()


def changed(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(statement, values).rowcount == 1


def read_all(path: Path, cipher: PayloadCipher | None = None) -> list[Any]:
    file = CheckpointFile(path, cipher)
    try:
        head = file.open(IDENTITY)
        return [head, file.memory(b"1"), [*file.memories()], file.inbox(-1, 9), file.bad_input()]
    finally:
        file.close()


def test_what_was_written_is_read(path: Path) -> None:
    written(path)
    head, memory, memories, inbox, bad = read_all(path)
    assert head == Checkpoint(1, READ, {"offset": 9}, {"length": 10})
    assert to_json(memory) == {"o": {"n": {"v": "one"}, "in": {"o": {"x": {"v": None}}}}}
    assert [key for key, _ in memories] == [b"1", b"2"]
    assert inbox == [InboxEntry(3, b"1", {"n": 3}, "a reason"), InboxEntry(5, b"2", None)]
    assert bad == [BadRecord(6, "line 6", "it is not JSON", "{broken")]


CHECKPOINT = "row 1, 8 of the table 'checkpoint': "
MEMORY = "row 1 of the table 'memory': "
INBOX = "row 3, 1 of the table 'inbox': "
BAD = "row 6 of the table 'bad_input': "


@pytest.mark.parametrize(
    ("table", "column", "value", "what"),
    [
        ("checkpoint", "number", "x", "row x, 8 of the table 'checkpoint': 'number' is 'x', not a number from 0 on"),
        ("checkpoint", "number", -1, "'number' is -1, not a number from 0 on"),
        ("checkpoint", "number", 1.5, "'number' is 1.5, not a number from 0 on"),
        ("checkpoint", "read", "x", "row 1, x of the table 'checkpoint': 'read' is 'x', not a number from 0 on"),
        ("checkpoint", "read", -1, "'read' is -1, not a number from 0 on"),
        ("checkpoint", "read", b"8", "'read' is b'8', not a number from 0 on"),
        ("checkpoint", "read", 0, "'position' is '{\"offset\": 9}', but 0 records were read"),
        ("checkpoint", "read", 5, "the table 'inbox' holds message 5 of 5 that were read"),
        ("checkpoint", "position", "junk", CHECKPOINT + "'position' is 'junk', not a JSON object"),
        ("checkpoint", "position", "null", CHECKPOINT + "'position' is 'null', not a JSON object"),
        ("checkpoint", "position", None, CHECKPOINT + "'position' is None, but 8 records were read"),
        ("checkpoint", "position", "", CHECKPOINT + "'position' is '', not a JSON object"),
        ("checkpoint", "position", "[9]", CHECKPOINT + "'position' is '[9]', not a JSON object"),
        ("checkpoint", "position", b"{}", CHECKPOINT + "'position' is b'{}', not a JSON object"),
        ("checkpoint", "sink", "null", CHECKPOINT + "'sink' is 'null', not a JSON object"),
        ("checkpoint", "sink", "{", CHECKPOINT + "'sink' is '{', not a JSON object"),
        ("memory", "tree", b"junk", MEMORY + "cannot read"),
        ("memory", "tree", b"null", MEMORY + "it is not what is written there (TypeError"),
        ("memory", "tree", b"{}", MEMORY + "it is not what is written there (KeyError"),
        ("memory", "tree", b'{"o": []}', MEMORY + "it is not what is written there (AttributeError"),
        ("memory", "tree", b'{"o": {"": {"v": 1}}}', MEMORY + "it is not what is written there (IndexError"),
        ("memory", "tree", b'{"o": {"a": 1}}', MEMORY + "it is not what is written there (TypeError"),
        ("memory", "tree", '{"o": {}}', MEMORY + "'tree' is '{\"o\": {}}', not bytes"),
        ("memory", "key", b"\xff", "the table 'memory': cannot read"),
        ("memory", "key", "1", MEMORY + "'key' is '1', not bytes"),
        ("inbox", "content", b"junk", INBOX + "cannot read"),
        ("inbox", "content", "{}", INBOX + "'content' is '{}', not bytes"),
        ("inbox", "parked", b"a reason", INBOX + "'parked' is b'a reason', not str"),
        ("inbox", "key", b"junk", "row 3, junk of the table 'inbox': cannot read"),
        ("inbox", "ordinal", -3, "the table 'inbox' holds message -3 of 8 that were read"),
        ("inbox", "ordinal", READ, "the table 'inbox' holds message 8 of 8 that were read"),
        ("bad_input", "raw", "{broken", BAD + "'raw' is '{broken', not bytes"),
        ("bad_input", "raw", b"\xff", BAD + "it is not what is written there (UnicodeDecodeError"),
        ("bad_input", "place", b"line 6", BAD + "'place' is b'line 6', not str"),
        ("bad_input", "reason", b"", BAD + "'reason' is b'', not str"),
    ],
)
def test_a_damaged_row_is_an_error_that_names_file_table_and_row(
    path: Path, table: str, column: str, value: object, what: str
) -> None:
    written(path)
    first = {"checkpoint": "1", "memory": "key = CAST('1' AS BLOB)", "inbox": "ordinal = 3", "bad_input": "1"}[table]
    changed(path, f"UPDATE {table} SET {column} = ? WHERE {first}", value)
    with pytest.raises(RecordError) as caught:
        read_all(path)
    text = str(caught.value)
    assert text.startswith(f"the checkpoint file {path} is damaged: ")
    assert what in text
    assert text.endswith("; put a copy of it back")


@pytest.mark.parametrize("cipher", [None, CIPHER])
def test_a_missing_position_is_never_the_start_of_the_input(path: Path, cipher: PayloadCipher | None) -> None:
    written(path, cipher)
    changed(path, "UPDATE checkpoint SET position = NULL")
    with pytest.raises(RecordError, match="'position' is None, but 8 records were read"):
        read_all(path, cipher)


def test_before_anything_was_read_there_is_no_position(path: Path) -> None:
    file = CheckpointFile(path)
    assert file.open(IDENTITY) is None
    file.commit(Checkpoint(0, 0, None, {}))
    file.close()
    assert read_all(path)[0] == Checkpoint(0, 0, None, {})


def test_a_checkpoint_that_is_gone_or_there_twice_is_damage(path: Path) -> None:
    written(path)
    changed(path, "INSERT INTO checkpoint SELECT * FROM checkpoint")
    with pytest.raises(RecordError, match="the table 'checkpoint' has 2 rows instead of one"):
        read_all(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM checkpoint")
    with pytest.raises(RecordError, match="the table 'checkpoint' is empty, but the inbox is not"):
        read_all(path)


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE checkpoint SET position = ?", "null"),
        ("UPDATE checkpoint SET position = ?", None),
        ("UPDATE memory SET tree = ? WHERE key = CAST('1' AS BLOB)", b"null"),
    ],
)
def test_damage_stops_the_job_before_anything_is_done_again(
    world: World, tools: Tools, statement: str, value: object
) -> None:
    async def body(n: int, ctx: RunnerContext) -> int:
        ctx.short_term_memory.set("n", n)
        await ctx.durable_execute(tools.call, n, effect="read")
        return n

    run(world.runner(Scripted(body)), [1, 2, 3], world.out, key=lambda n: 1)
    outputs = world.out.read_bytes()
    changed(world.checkpoints(), statement, value)
    with pytest.raises(RecordError, match=world.checkpoints().name):
        run(world.runner(Scripted(body)), [1, 2, 3, 4], world.out, key=lambda n: 1)
    assert (tools.made, world.out.read_bytes()) == ([1, 2, 3], outputs)


# --- memory that is empty -------------------------------------------------------------------------------------------


def rows(path: Path) -> list[bytes]:
    with closing(sqlite3.connect(path)) as database:
        return [key for (key,) in database.execute("SELECT key FROM memory ORDER BY key")]


@pytest.mark.parametrize("cipher", [None, CIPHER])
def test_a_memory_that_became_empty_takes_no_row(path: Path, cipher: PayloadCipher | None) -> None:
    written(path, cipher)
    file = CheckpointFile(path, cipher)
    file.open(IDENTITY)
    file.commit(Checkpoint(2, READ, {"offset": 9}, {}, {b"1": Node(), b"3": EMPTY}))
    assert rows(path) == [b"2"]
    assert file.memory(b"1").fields == {}
    assert [key for key, _ in file.memories()] == [b"2"]
    file.commit(Checkpoint(3, READ, {"offset": 9}, {}, {b"1": Node({"o": Node()}), b"2": Node()}))
    assert rows(path) == [b"1"]
    assert to_json(file.memory(b"1")) == {"o": {"o": {"o": {}}}}, "an empty object in it is something"
    file.close()


def test_the_memories_of_many_keys_go_in_one_checkpoint(path: Path) -> None:
    keys = [str(number).encode() for number in range(1, 1500)]
    file = CheckpointFile(path)
    file.open(IDENTITY)
    file.commit(Checkpoint(1, 1, {}, {}, {key: Node({"n": Leaf(1)}) for key in keys}))
    file.commit(Checkpoint(2, 1, {}, {}, {key: Node() for key in keys[:-1]}))
    file.close()
    assert rows(path) == keys[-1:]


def test_an_empty_memory_of_an_earlier_release_is_not_listed_and_goes(path: Path) -> None:
    written(path)
    changed(path, "UPDATE memory SET tree = ? WHERE key = CAST('1' AS BLOB)", b'{"o":{}}')
    file = CheckpointFile(path)
    file.open(IDENTITY)
    assert [key for key, _ in file.memories()] == [b"2"]
    assert file.memory(b"1").fields == {}
    file.commit(Checkpoint(2, READ, {"offset": 9}, {}, {b"1": Node()}))
    file.close()
    assert rows(path) == [b"2"]


def test_an_agent_that_forgets_leaves_nothing(world: World) -> None:
    async def body(n: int, ctx: RunnerContext) -> None:
        if n < 10:
            ctx.short_term_memory.set("n", n)
        else:
            ctx.short_term_memory.delete("n")

    runner = world.runner(Scripted(body), checkpoint_interval=0.01)
    run(runner, [1, 2, 3, 11, 13], key=lambda n: n % 10)
    assert dict(runner.memories()) == {2: {"n": 2}}
    assert rows(world.checkpoints()) == [b"2"]
    run(world.runner(Scripted(body)), [1, 2, 3, 11, 13, 4], key=lambda n: n % 10)
    assert rows(world.checkpoints()) == [b"2", b"4"]
