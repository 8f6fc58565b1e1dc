"""What looking into a SQLite store, and deciding there, promises beyond the contract of every store."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dalsegno.core.records import Record
from dalsegno.errors import OwnershipError, RecordError, StoreError
from dalsegno.stores import sqlite_inspector, sqlite_schema
from dalsegno.stores.base import Covered
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.stores.sqlite_schema import is_running
from dalsegno.testing.stores import decision, in_loop, states, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def query(path: Path, statement: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement).fetchall()


async def record(path: Path, *records: Record, job: str = "job") -> None:
    store = SqliteStore(path)
    await store.open(job, "the test")
    await store.put(records)
    await store.close()


def files(folder: Path) -> dict[str, bytes]:
    return {found.name: found.read_bytes() for found in folder.iterdir()}


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    prelude = (
        "import asyncio, os, sys, time\n"
        "from pathlib import Path\n"
        "from dalsegno.stores.sqlite import SqliteStore\n"
        "from dalsegno.testing.stores import decision, step\n"
        "path, *arguments = sys.argv[1:]\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prelude + script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# --- files of an earlier version ---

VERSION_1 = """
    PRAGMA journal_mode = WAL;
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, identity TEXT NOT NULL, epoch INTEGER NOT NULL,
        owner TEXT, pid INTEGER, host TEXT, since TEXT, pruned_through INTEGER NOT NULL);
    CREATE TABLE records (
        n INTEGER PRIMARY KEY, job INTEGER NOT NULL, key BLOB NOT NULL, message TEXT NOT NULL, task TEXT NOT NULL,
        body BLOB NOT NULL);
    CREATE INDEX records_of_message ON records (job, key, message);
    PRAGMA application_id = 0x44534753;
    PRAGMA user_version = 1;
    INSERT INTO jobs VALUES (1, 'job', 'b0f5', 3, 'process 7', 7, 'host', '2026-11-29T23:00:00+00:00', 5);
"""
"""What the first release made."""


def make_version_1(path: Path, *records: Record) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(VERSION_1)
        database.executemany("INSERT INTO records (job, key, message, task, body) VALUES (1, ?, ?, ?, ?)", records)


@in_loop
async def test_the_owner_of_a_job_migrates_a_file_of_version_1(path: Path) -> None:
    put = [step(b"1", "m", number) for number in range(3)]
    make_version_1(path, *put)
    store = SqliteStore(path)
    await store.open("job", "the test")
    assert (store.identity, store.pruned_through) == ("b0f5", 5)
    assert await store.claim(b"1") == states(put, b"1")
    assert await store.decisions(0) == []
    with store.inspect() as outside:
        assert outside.decide("job", decision(b"1", "m"))
    assert len(await store.decisions(0)) == 1
    await store.close()
    assert query(path, "PRAGMA user_version") == [(2,)]
    assert query(path, "SELECT epoch FROM jobs") == [(4,)]


def test_a_migrated_file_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    make_version_1(tmp_path / "old.db")
    schemas = []
    for name in ("old.db", "new.db"):
        asyncio.run(record(tmp_path / name))
        rows = query(tmp_path / name, "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name")
        schemas.append([(*row[:3], " ".join((row[3] or "").split())) for row in rows])
    assert schemas[0] == schemas[1]


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_version_1(path, step(b"1", "m"))
    made, migration = sqlite_schema._STEPS
    monkeypatch.setattr(sqlite_schema, "_STEPS", (made, (*migration, "CREATE TABLE jobs (id)")))
    with pytest.raises(StoreError, match="table jobs already exists"):
        asyncio.run(record(path))
    assert query(path, "PRAGMA user_version") == [(1,)]
    assert query(path, "SELECT count(*) FROM sqlite_master WHERE name = 'decisions'") == [(0,)]
    monkeypatch.undo()
    asyncio.run(record(path, step(b"1", "n")))
    assert query(path, "PRAGMA user_version") == [(2,)]


def test_two_jobs_may_migrate_a_file_at_the_same_time(tmp_path: Path) -> None:
    for turn in range(5):
        path = tmp_path / f"{turn}.db"
        make_version_1(path)
        failures: list[BaseException] = []

        def start(job: str, path: Path = path, failures: list[BaseException] = failures) -> None:
            try:
                asyncio.run(record(path, step(b"1", "m"), job=job))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=start, args=(f"job{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_a_file_of_version_1_can_be_looked_into_and_stays_as_it_is(path: Path) -> None:
    put = [step(b"1", "m"), step(b"2", "n")]
    make_version_1(path, *put)
    before = files(path.parent)
    with SqliteStore(path).inspect() as outside:
        (job,) = outside.jobs()
        assert (job.name, job.epoch, job.owner, job.pid, job.host) == ("job", 3, "process 7", 7, "host")
        assert (job.messages, job.pruned_through, job.running) == (2, 5, False)
        assert list(outside.records("job")) == put
        assert outside.decisions("job") == []
        with pytest.raises(StoreError, match=r"earlier version of dalsegno.*run job 'job' once with this version"):
            outside.decide("job", decision(b"1", "m"))
        assert files(path.parent).keys() >= before.keys()
        # Once the owner has migrated it, the same inspector can go on.
        asyncio.run(record(path))
        assert outside.decide("job", decision(b"1", "m"))
        assert outside.decisions("job") == [decision(b"1", "m")]


# --- what is no store ---


def _missing(path: Path) -> None:
    pass


def _folder(path: Path) -> None:
    path.mkdir()


def _empty(path: Path) -> None:
    path.touch()


def _text(path: Path) -> None:
    path.write_text("name,age\n" * 1000)


def _foreign(path: Path) -> None:
    query(path, "CREATE TABLE notes (text)")


def _newer(path: Path) -> None:
    make_version_1(path)
    query(path, "PRAGMA user_version = 3")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_missing, StoreError, "there is no such file, so there is no store to look into"),
        (_folder, StoreError, "this is not a file"),
        (_empty, StoreError, "no job has made a store of it yet"),
        (_text, RecordError, "is not an SQLite database"),
        (_foreign, RecordError, "an SQLite database of something else"),
        (_newer, RecordError, "schema version 3; this version of dalsegno reads up to 2"),
    ],
)
def test_what_is_no_store_is_named_and_left_alone(
    path: Path, make: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    make(path)
    before = sorted(path.parent.iterdir())
    with pytest.raises(error, match=message) as refused:
        SqliteStore(path).inspect()
    assert str(path) in str(refused.value)
    assert sorted(path.parent.iterdir()) == before


def test_a_file_that_went_away_is_not_made_again(path: Path) -> None:
    asyncio.run(record(path, step(b"1", "m")))
    with SqliteStore(path).inspect() as outside:
        path.rename(path.with_suffix(".old"))
        with pytest.raises(StoreError, match="cannot write a decision"):
            outside.decide("job", decision(b"1", "m"))
    assert not path.exists()


def test_a_job_whose_lock_file_was_removed_does_not_run(path: Path) -> None:
    asyncio.run(record(path))
    for lock in path.parent.glob("*.lock"):
        lock.unlink()
    with SqliteStore(path).inspect() as outside:
        assert [job.running for job in outside.jobs()] == [False]
    assert not list(path.parent.glob("*.lock"))


# --- crashed and running jobs ---

OWN = """
async def main():
    store = SqliteStore(path)
    await store.open("job", "the other one")
    await store.put([step(b"1", f"m{number}") for number in range(100)])
    print("open", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_job_runs_as_long_as_its_process_and_a_crashed_one_is_left_as_it_is(path: Path) -> None:
    with child(OWN, path) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with SqliteStore(path).inspect() as outside:
            for running in (True, False):
                (job,) = outside.jobs()
                assert (job.running, job.pid, job.owner) == (running, owner.pid, "the other one")
                owner.kill()
                owner.wait()
    before = files(path.parent)
    assert any(name.endswith("-wal") for name in before)
    with SqliteStore(path).inspect() as outside:
        assert len(list(outside.records("job"))) == 100
        assert outside.jobs()[0].messages == 100
    after = files(path.parent)
    assert {n: b for n, b in after.items() if not n.endswith("-shm")} == {
        n: b for n, b in before.items() if not n.endswith("-shm")
    }


def test_an_owner_in_the_same_process_is_seen_and_keeps_its_job(path: Path) -> None:
    """Locks of POSIX go when any handle of the process on the file is closed; SQLite sees to it that it is not."""

    async def main() -> None:
        store = SqliteStore(path)
        await store.open("job", "me")
        for _ in range(3):
            with store.inspect() as outside:
                assert outside.jobs()[0].running
        with child(
            "from dalsegno.stores.sqlite_schema import is_running; print(is_running(Path(path), 'job'))", path
        ) as (other):
            assert other.communicate(timeout=60)[0] == "True\n"
        with pytest.raises(OwnershipError):
            await SqliteStore(path).open("job", "another one")
        await store.close()
        assert not is_running(path, "job")

    asyncio.run(main())


PROBE = """
from dalsegno.stores.sqlite_schema import is_running
print("looking", flush=True)
seen = set()
while not Path(arguments[0]).exists():
    seen.add(is_running(Path(path), "job"))
print(sorted(seen), flush=True)
"""


@pytest.mark.slow
def test_a_job_that_starts_while_many_look_is_not_refused(path: Path, tmp_path: Path) -> None:
    asyncio.run(record(path))
    done = tmp_path / "done"
    with child(PROBE, path, done) as one, child(PROBE, path, done) as two:
        for looker in (one, two):
            assert looker.stdout is not None
            assert looker.stdout.readline() == "looking\n"
        try:
            for _ in range(100):
                asyncio.run(record(path))
        finally:
            done.touch()
        assert [looker.communicate(timeout=60)[0] for looker in (one, two)] == ["[False, True]\n"] * 2


@pytest.mark.slow
def test_those_who_look_do_not_take_each_other_for_the_job(path: Path, tmp_path: Path) -> None:
    asyncio.run(record(path))
    done = tmp_path / "done"
    with child(PROBE, path, done) as one, child(PROBE, path, done) as two:
        for looker in (one, two):
            assert looker.stdout is not None
            assert looker.stdout.readline() == "looking\n"
        time.sleep(0.5)
        done.touch()
        assert [looker.communicate(timeout=60)[0] for looker in (one, two)] == ["[False]\n"] * 2


# --- deciding ---

DECIDE = """
sys.stdin.readline()
with SqliteStore(path).inspect() as outside:
    print("".join(str(int(outside.decide("job", decision(b"1", "m", str(n), int(arguments[0]))))) for n in range(100)))
"""


@pytest.mark.slow
def test_of_two_processes_that_decide_one_does(path: Path) -> None:
    asyncio.run(record(path, step(b"1", "m")))
    with child(DECIDE, path, 0) as one, child(DECIDE, path, 1) as two:
        for decider in (one, two):
            assert decider.stdin is not None
            decider.stdin.write("\n")
            decider.stdin.flush()
        results = [decider.communicate(timeout=120)[0].strip() for decider in (one, two)]
    assert all(sorted(pair) == ["0", "1"] for pair in zip(*results, strict=True)), results
    with SqliteStore(path).inspect() as outside:
        assert sorted(int(made.target) for made in outside.decisions("job")) == list(range(100))


DECIDE_FOR_EVER = """
with SqliteStore(path).inspect() as outside:
    for number in range(10 ** 9):
        assert outside.decide("job", decision(b"1", "m", str(number)))
        print(number, flush=True)
"""


@pytest.mark.slow
def test_what_was_decided_survives_a_kill(path: Path) -> None:
    asyncio.run(record(path, step(b"1", "m")))
    with child(DECIDE_FOR_EVER, path) as decider:
        assert decider.stdout is not None
        said = [int(decider.stdout.readline()) for _ in range(20)][-1]
        decider.send_signal(signal.SIGKILL)
        said = max([said, *(int(line) for line in decider.stdout if line.endswith("\n"))])
    with SqliteStore(path).inspect() as outside:
        made = [int(each.target) for each in outside.decisions("job")]
    assert made[: said + 1] == list(range(said + 1))
    assert len(made) <= said + 2


def test_a_decision_is_committed_with_a_full_flush(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(record(path, step(b"1", "m")))
    levels = []
    connect = sqlite_schema.connect_durably

    def spying(path: Path, mode: sqlite_schema.Mode) -> sqlite3.Connection:
        connection = connect(path, mode)
        levels.append(connection.execute("PRAGMA synchronous").fetchone()[0])
        return connection

    monkeypatch.setattr(sqlite_inspector, "connect_durably", spying)
    with SqliteStore(path).inspect() as outside:
        assert outside.decide("job", decision(b"1", "m"))
    assert levels == [2]


def test_a_file_that_stays_locked_is_an_error_that_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(record(path, step(b"1", "m")))
    connect = sqlite_schema.connect_durably

    def impatient(path: Path, mode: sqlite_schema.Mode) -> sqlite3.Connection:
        connection = connect(path, mode)
        connection.execute("PRAGMA busy_timeout = 20")
        return connection

    monkeypatch.setattr(sqlite_inspector, "connect_durably", impatient)
    with closing(sqlite3.connect(path, isolation_level=None)) as other, SqliteStore(path).inspect() as outside:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="cannot write a decision: database is locked; another process"):
            outside.decide("job", decision(b"1", "m"))
        assert outside.decisions("job") == []  # reading goes on


# --- what it costs ---


@in_loop
async def test_asking_for_decisions_again_and_again_reads_none(path: Path) -> None:
    store = SqliteStore(path)
    await store.open("job", "the test")
    await store.put([step(b"1", "m")])
    assert store._open is not None
    statements: list[str] = []
    store._open.file._reader.set_trace_callback(statements.append)
    await store.decisions(0)
    statements.clear()
    for _ in range(10):
        assert await store.decisions(0) == []
    assert set(statements) == {"PRAGMA data_version"}
    with store.inspect() as outside:
        assert outside.decide("job", decision(b"1", "m"))
    assert len(await store.decisions(0)) == 1
    ((number, _),) = await store.decisions(0)
    statements.clear()
    assert await store.decisions(number) == []
    assert set(statements) == {"PRAGMA data_version"}
    await store.close()


@in_loop
async def test_a_decision_waits_for_no_long_reader_and_a_writer_for_no_inspector(path: Path) -> None:
    store = SqliteStore(path)
    await store.open("job", "the test")
    await store.put([step(b"1", f"m{number}") for number in range(2000)])
    with store.inspect() as outside:
        reading = outside.records("job")
        next(reading)
        begun = time.monotonic()
        await store.put([step(b"1", "later")])
        assert outside.decide("job", decision(b"1", "later"))
        await store.prune(Covered(1, [(b"1", "m1")]))
        assert time.monotonic() - begun < 5
        assert len(list(reading)) == 1999
    await store.close()


@pytest.mark.slow
def test_no_look_at_a_message_reads_those_of_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(record(path, *(step(b"%d" % number, f"m{number}") for number in range(100))))
    with SqliteStore(path).inspect() as outside:
        assert isinstance(outside, sqlite_inspector.SqliteInspector)
        statements: list[str] = []
        outside._reader.set_trace_callback(statements.append)
        assert len(list(outside.records("job", b"7", "m7"))) == 1
        (statement,) = [each for each in statements if "FROM records" in each]
        plan = [row[3] for row in query(path, f"EXPLAIN QUERY PLAN {statement}")]
        assert plan == ["SEARCH records USING INDEX records_of_message (job=? AND key=? AND message=?)"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory that was used")
def test_a_hundred_thousand_messages_are_read_step_by_step(path: Path) -> None:
    body = "x" * 500
    asyncio.run(record(path, *(step(b"%d" % (n % 1000), f"m{n}", result=body) for n in range(100_000))))
    script = (
        "import re\n"
        "def used():\n"
        "    return int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "with SqliteStore(path).inspect() as outside:\n"
        "    next(outside.records('job'))\n"
        "    before = used()\n"
        "    assert sum(1 for _ in outside.records('job')) == 100_000\n"
        "    assert sum(1 for _ in outside.records('job', b'7')) == 100\n"
        "    print(used() - before)\n"
    )
    with child(script, path) as reader:
        assert int(reader.communicate(timeout=120)[0]) < 20_000  # KiB; the bodies are 50 MB


# --- folders that may not be written ---


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs to give up the rights of root")
@pytest.mark.parametrize("crashed", [False, True])
def test_a_store_in_a_folder_that_may_not_be_written_can_be_looked_into(crashed: bool) -> None:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    path = folder / "agent.db"
    try:
        asyncio.run(record(path, step(b"1", "m")))
        if crashed:
            with child(OWN, path) as owner:
                assert owner.stdout is not None
                assert owner.stdout.readline() == "open\n"
                owner.kill()
        folder.chmod(0o755)
        before = files(folder)
        os.seteuid(65534)
        try:
            with SqliteStore(path).inspect() as outside:
                assert len(list(outside.records("job"))) == (101 if crashed else 1)
                assert outside.jobs()[0].running is False
                with pytest.raises(StoreError, match="make the file and its folder writable"):
                    outside.decide("job", decision(b"1", "m"))
        finally:
            os.seteuid(0)
        assert files(folder) == before
    finally:
        shutil.rmtree(folder)
