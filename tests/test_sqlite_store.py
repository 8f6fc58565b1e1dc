"""What the SQLite store promises beyond the contract: real crashes, other processes, full disks, few statements."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from dalsegno.core.records import Record
from dalsegno.errors import OwnershipError, RecordError, StoreError
from dalsegno.stores import sqlite, sqlite_file, sqlite_schema
from dalsegno.stores.base import Covered
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.testing.stores import in_loop, states, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@asynccontextmanager
async def opened(path: Path, job: str = "job") -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    await store.open(job, "the test")
    try:
        yield store
    finally:
        await store.close()


def query(path: Path, statement: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(statement).fetchall()


def file_of(store: SqliteStore) -> sqlite_file.JobFile:
    assert store._open is not None
    return store._open.file


# --- other processes ---

PRELUDE = """
import asyncio, os, resource, sqlite3, sys, time
from dalsegno.core.records import Record
from dalsegno.errors import *
from dalsegno.stores.base import Covered
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.testing.stores import step
path, *arguments = sys.argv[1:]
"""


@contextmanager
def process(script: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Another interpreter that runs *script* and is killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def finish(child: subprocess.Popen[str]) -> str:
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    return output.strip()


OWN = """
async def main():
    store = SqliteStore(path)
    await store.open("job", "the other one")
    print("open", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.slow
@in_loop
async def test_another_process_is_refused_until_the_owner_is_gone(path: Path) -> None:
    with process(OWN, path) as owner:
        assert line(owner) == "open"
        with pytest.raises(OwnershipError) as refused:
            await SqliteStore(path).open("job", "me")
        for part in ("'job'", str(path), f"process {owner.pid} on ", "since 20", "the other one", "another job name"):
            assert part in str(refused.value)
        async with opened(path, "another job"):
            pass
        owner.kill()
        owner.wait()
        async with opened(path) as store:
            assert store.identity


FORK = """
async def main():
    store = SqliteStore(path)
    await store.open("job", "parent")
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    print(child, flush=True)
    time.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.slow
@in_loop
async def test_a_child_that_outlives_its_parent_does_not_own_the_job(path: Path) -> None:
    with process(FORK, path) as owner:
        child = int(line(owner))
        try:
            owner.kill()
            owner.wait()
            async with opened(path):
                pass
        finally:
            # Raises when the child is gone, for then nothing was tested.
            os.kill(child, signal.SIGKILL)


WRITE = """
async def main():
    store = SqliteStore(path)
    await store.open("job", "writer")
    for number in range(1_000_000):
        await store.put([step(b"%d" % (number % 5), f"m{number}", task=str(n)) for n in range(10)])
        print(number, flush=True)
        if number % 50 == 49:
            await store.prune(Covered(number, [(b"%d" % (n % 5), f"m{n}") for n in range(number - 40)]))
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("least", [0, 70, 230])
@in_loop
async def test_what_was_put_survives_a_kill(path: Path, least: int) -> None:
    with process(WRITE, path) as writer:
        while int(line(writer)) < least:
            pass
        writer.kill()
        assert writer.stdout is not None
        last = max([least, *(int(number) for number in writer.stdout.read().split("\n") if number)])
        writer.wait()
    async with opened(path) as store:
        found: dict[int, int] = {}
        for key in await store.keys():
            for state in await store.claim(key):
                found[int(state.message[1:])] = found.get(int(state.message[1:]), 0) + 1
        assert set(found) >= set(range(store.pruned_through - 40 if store.pruned_through else 0, last + 1))
        assert max(found) <= last + 1
        assert set(found.values()) == {10}
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


START = """
async def main():
    store = SqliteStore(path)
    await store.open(arguments[0], "starter")
    for number in range(20):
        await store.put([step(b"1", f"m{number}")])
    print(len(await store.list(b"1")))
    await store.close()
asyncio.run(main())
"""


@pytest.mark.slow
def test_processes_with_jobs_of_their_own_start_at_the_same_time(path: Path) -> None:
    with ExitStack() as stack:
        starters = [stack.enter_context(process(START, path, job)) for job in "abcdef"]
        assert [finish(starter) for starter in starters] == ["20"] * 6
    assert query(path, "SELECT count(*), count(DISTINCT job) FROM records") == [(120, 6)]
    assert query(path, "SELECT count(DISTINCT identity) FROM jobs") == [(6,)]


@pytest.mark.slow
def test_threads_with_jobs_of_their_own_create_the_same_file(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def create(path: Path, job: str, start: threading.Barrier) -> None:
        start.wait()
        try:
            sqlite_file.JobFile(path, job, "creator").close()
        except BaseException as error:
            failures.append(error)

    for number in range(20):
        path, start = tmp_path / f"{number}.db", threading.Barrier(8)
        threads = [threading.Thread(target=create, args=[path, job, start]) for job in "abcdefgh"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert query(path, "SELECT count(*) FROM jobs") == [(8,)]
    assert failures == []


def test_a_file_that_another_process_is_creating_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, tries = sqlite_schema.create, 0

    def busy_at_first(connection: sqlite3.Connection, place: Path) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        create(connection, place)

    monkeypatch.setattr(sqlite_file, "create", busy_at_first)
    asyncio.run(_touch(path))
    assert tries == 3


# The first statement may have to wait for a process that is just opening the file; later ones never wait.
READ = """
database = sqlite3.connect(path, timeout=0)
database.execute("SELECT * FROM records ORDER BY body").fetchall()
print("reading", flush=True)
while True:
    database.execute("SELECT * FROM records ORDER BY body").fetchall()
"""


@pytest.mark.slow
def test_threads_write_while_another_process_reads_everything(path: Path) -> None:
    failures: list[BaseException] = []

    async def write(number: int) -> None:
        async with opened(path, f"job{number}") as store:
            for message in range(50):
                await store.put([step(b"1", f"m{message}")])

    def work(number: int) -> None:
        try:
            asyncio.run(write(number))
        except BaseException as error:
            failures.append(error)

    asyncio.run(_touch(path))
    with process(READ, path) as reader:
        assert line(reader) == "reading"
        threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reader.poll() is None
    assert failures == []
    assert query(path, "SELECT count(*) FROM records") == [(400,)]


async def _touch(path: Path) -> None:
    async with opened(path, "another"):
        pass


FILL = """
async def main():
    store = SqliteStore(path)
    await store.open("job", "filler")
    await store.put([step(b"1", "before")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    for count, size in (3000, 1000), (1, 2_000_000), (20_000, 100):
        batch = [step(b"1", f"m{n}", result="x" * size) for n in range(count)]
        try:
            await store.put(batch)
        except StoreError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    print(len(await store.list(b"1")))
    await store.put([step(b"1", "after")])
    await store.close()
asyncio.run(main())
"""


@pytest.mark.slow
@in_loop
async def test_a_batch_that_finds_no_room_writes_nothing(path: Path) -> None:
    with process(FILL, path) as child:
        *errors, count = finish(child).split("\n")
    assert len(errors) == 3
    assert all(f"{path}: cannot record a step: disk I/O error" in error for error in errors)
    assert count == "1"
    async with opened(path) as store:
        assert [state.message for state in await store.claim(b"1")] == ["before", "after"]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


# --- files that are something else ---


@in_loop
async def test_the_folder_is_made(tmp_path: Path) -> None:
    async with opened(tmp_path / "a" / "b%20#?" / "c.db") as store:
        await store.put([step(b"1", "m")])
    assert (tmp_path / "a" / "b%20#?" / "c.db").stat().st_size > 0


@in_loop
async def test_a_link_is_the_file_that_it_names(tmp_path: Path, path: Path) -> None:
    (tmp_path / "link.db").symlink_to(path)
    async with opened(path):
        with pytest.raises(OwnershipError):
            await SqliteStore(tmp_path / "link.db").open("job", "me")


def _foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE notes (text TEXT)")


def _newer(path: Path) -> None:
    asyncio.run(_touch(path))
    query(path, "PRAGMA user_version = 99")


def _text_file(path: Path) -> None:
    path.write_text("name,age\n" * 1000)


def _foreign_application(path: Path) -> None:
    query(path, "PRAGMA application_id = 1234")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_foreign, "of something else.*1 tables"),
        (_foreign_application, "of something else.*0x4d2"),
        (_newer, "schema version 99; this version of dalsegno reads up to 2"),
        (_text_file, "not an SQLite database"),
    ],
)
def test_what_is_not_a_store_is_left_alone(path: Path, make: Callable[[Path], None], message: str) -> None:
    make(path)
    before = path.read_bytes(), sorted(path.parent.iterdir())
    with pytest.raises(RecordError, match=message) as refused:
        asyncio.run(_touch(path))
    assert str(path) in str(refused.value)
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before


def test_a_folder_or_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "agent.db"):
        with pytest.raises(StoreError, match="cannot open the store") as refused:
            asyncio.run(_touch(path))
        assert str(path) in str(refused.value)
        assert refused.value.__cause__ is not None


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    asyncio.run(_touch(path))
    assert query(path, "PRAGMA application_id") == [(sqlite_schema.APPLICATION_ID,)]


@in_loop
async def test_a_damaged_file_is_an_error(path: Path) -> None:
    async with opened(path) as store:
        await store.put([step(b"1", f"m{number}", result="x" * 3000) for number in range(50)])
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 100_000)
    with pytest.raises(StoreError, match="malformed; the file is damaged"):
        async with opened(path) as store:
            await store.claim(b"1")


@in_loop
async def test_a_file_that_is_removed_or_replaced_is_not_written_to(path: Path) -> None:
    async with opened(path) as store:
        path.rename(path.with_suffix(".old"))
        for _ in range(2):
            for write in (store.put([step(b"1", "m")]), store.prune(Covered(1, []))):
                with pytest.raises(StoreError, match="removed or replaced"):
                    await write
            path.write_bytes(path.with_suffix(".old").read_bytes())
        path.with_suffix(".old").rename(path)
        await store.put([step(b"1", "m")])


# --- errors of SQLite ---


@in_loop
async def test_a_file_that_stays_locked(path: Path) -> None:
    async with opened(path) as store:
        file_of(store)._writer.execute("PRAGMA busy_timeout = 20")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for write in (store.put([step(b"1", "m")]), store.prune(Covered(1, []))):
                with pytest.raises(
                    StoreError, match="locked; another process has held the file for 30 seconds"
                ) as error:
                    await write
                assert isinstance(error.value.__cause__, sqlite3.OperationalError)
        await store.put([step(b"1", "m")])
        assert len(await store.list(b"1")) == 1


@in_loop
async def test_a_file_that_may_not_be_written(path: Path) -> None:
    async with opened(path) as store:
        file_of(store)._writer.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreError, match="readonly database; make the file and its folder writable"):
            await store.put([step(b"1", "m")])
        assert await store.keys() == []


@in_loop
async def test_a_full_disk(path: Path) -> None:
    async with opened(path) as store:
        file_of(store)._writer.execute("PRAGMA max_page_count = 20")
        put: list[Record] = []
        for small, large in ((0, 1000), (8000, 2000)):  # the second one takes two statements; the first has room
            put = [step(b"1", f"m{number}") for number in range(small)]
            put += [step(b"1", f"n{number}", result="x" * 3000) for number in range(large)]
            with pytest.raises(StoreError, match="database or disk is full; nothing of it was written"):
                await store.put(put)
            assert await store.list(b"1") == []
            file_of(store)._writer.execute("PRAGMA max_page_count = 1500")
        await store.put(put[:8000])
        await store.prune(Covered(1, [(record.key, record.message) for record in put]))
        await store.put([step(b"1", "m")])
        assert len(await store.list(b"1")) == 1


def test_an_old_sqlite(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 9))
    with pytest.raises(StoreError, match=r"version 3\.32 or later"):
        asyncio.run(_touch(path))


# --- cancelling ---


@in_loop
async def test_an_open_that_is_cancelled_leaves_the_job_free(path: Path) -> None:
    for turns in range(6):
        store = SqliteStore(path)
        opening = asyncio.create_task(store.open("job", "me"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if opening.cancel():
            with pytest.raises(asyncio.CancelledError):
                await opening
        else:  # its threads were that quick
            await opening
            await store.close()
        async with opened(path):
            pass


@in_loop
async def test_a_close_that_is_cancelled_closes(path: Path) -> None:
    store = SqliteStore(path)
    await store.open("job", "me")
    closing_store = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing_store.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing_store
    async with opened(path):
        pass


@in_loop
async def test_a_busy_loop_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given = 0
    waiting = threading.Event()

    def sleep(seconds: float) -> None:
        nonlocal given
        given += 1
        assert seconds < 0.001
        if given == 3:
            waiting.set()

    monkeypatch.setattr(time, "sleep", sleep)
    thread = sqlite._thread("test")
    assert await sqlite._run(thread, waiting.wait, 10)
    given_until_the_end = given  # at least 3: the thread may end a turn or two later than it was woken
    thread.shutdown()
    await asyncio.sleep(0.02)
    assert given == given_until_the_end >= 3


# --- what it costs ---


@in_loop
async def test_a_batch_is_one_statement(path: Path) -> None:
    statements: list[str] = []
    async with opened(path) as store:
        file_of(store)._writer.set_trace_callback(statements.append)
        for count in (1, 2, 5, 64, 100, 1000, 2000, 8000):
            await store.put([step(b"1", f"m{number}") for number in range(count)])
            assert len(statements) == 1, [statement[:80] for statement in statements]
            statements.clear()


@in_loop
async def test_nothing_is_read_for_a_key_without_records(path: Path) -> None:
    statements: list[str] = []
    async with opened(path) as store:
        await store.put([step(b"1", "m")])
    async with opened(path) as store:
        for connection in (file_of(store)._writer, file_of(store)._reader):
            connection.set_trace_callback(statements.append)
        assert await store.claim(b"2") == []
        assert statements == []
        assert len(await store.claim(b"1")) == 1
        assert len(statements) == 1


@in_loop
async def test_no_statement_reads_the_records_of_other_keys(path: Path) -> None:
    statements: list[str] = []
    async with opened(path) as store:
        await store.put([step(b"1", "m")])
        for connection in (file_of(store)._writer, file_of(store)._reader):
            connection.set_trace_callback(statements.append)
        await store.list(b"1")
        await store.get(b"1", "task")
        await store.prune(Covered(1, [(b"1", "m"), (b"2", "m"), (b"1", "n")]))
    planned = [statement for statement in statements if statement.startswith(("SELECT", "DELETE", "UPDATE"))]
    assert len(planned) == 6
    searches = []
    for statement in planned:
        plan = [row[3] for row in query(path, f"EXPLAIN QUERY PLAN {statement}")]
        assert not [detail for detail in plan if "SCAN records" in detail or "SCAN jobs" in detail], (statement, plan)
        searches += [detail for detail in plan if "(job=? AND key=? AND message=?)" in detail]
    # Nor does pruning read the other messages of its keys, or their decisions.
    assert len(searches) == 2


@in_loop
async def test_a_long_reader_does_not_delay_a_write(path: Path) -> None:
    async with opened(path) as store:
        await store.put([step(b"1", f"m{number}") for number in range(1000)])
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            rows = reader.execute("SELECT * FROM records")
            rows.fetchone()
            file_of(store)._writer.execute("PRAGMA busy_timeout = 0")
            await store.put([step(b"1", "n")])
            await store.prune(Covered(1, [(b"1", "m1")]))
            assert len(rows.fetchall()) == 999


@pytest.mark.slow
@in_loop
async def test_what_is_kept_is_bounded(path: Path) -> None:
    log = path.with_name(path.name + "-wal")
    sizes = []
    async with opened(path) as store:
        for number in range(2000):
            await store.put([step(b"%d" % (number % 300), f"m{number}", n, result="x" * 400) for n in range(5)])
            if number % 100 == 99:
                covered = [(b"%d" % (n % 300), f"m{n}") for n in range(number - 99, number + 1)]
                assert (await store.prune(Covered(number, covered))).records == 500
                assert await store.keys() == []
                sizes.append(path.stat().st_size)
                assert log.stat().st_size <= sqlite_schema.LOG_BYTES
        await store.put([step(b"1", "large", result="x" * (2 * sqlite_schema.LOG_BYTES))])
        for number in range(3):
            await store.put([step(b"1", f"small{number}")])
        assert log.stat().st_size <= sqlite_schema.LOG_BYTES
    assert max(sizes[5:]) <= 1.2 * sizes[4] + 100_000
    assert query(path, "SELECT count(*) FROM records") == [(4,)]
    # The lock of the job stays, as an empty file.
    assert sorted((entry.name, entry.stat().st_size > 0) for entry in path.parent.iterdir())[0] == ("agent.db", True)
    assert [entry.suffix for entry in sorted(path.parent.iterdir())] == [".db", ".lock"]


@in_loop
async def test_bytes_grow_with_what_is_recorded(path: Path) -> None:
    put: list[Record] = []
    async with opened(path) as store:
        for number in range(200):
            put.append(step(b"1", "m", number, result="x" * 20_000))
            await store.put(put[-1:])
        assert await store.list(b"1") == states(put, b"1")
    assert 4_000_000 < path.stat().st_size < 6_000_000


@in_loop
async def test_the_loop_goes_on_while_a_key_is_read(path: Path) -> None:
    async with opened(path) as store:
        await store.put([step(b"1", "m", number, result="x" * 50_000) for number in range(400)])
        reading = asyncio.create_task(store.list(b"1"))
        turns = 0
        while not reading.done():
            turns += 1
            await asyncio.sleep(0.0005)
        assert turns > 1
        assert (await reading)[0].calls.keys() == set(range(400))


@in_loop
async def test_time_of_a_late_write_is_that_of_an_early_one(path: Path) -> None:
    async def seconds(store: SqliteStore, number: int) -> float:
        start = time.perf_counter()
        await store.put([step(b"1", "m", number, result="x" * 1000)])
        return time.perf_counter() - start

    async with opened(path) as store:
        early = sorted([await seconds(store, number) for number in range(30)])
        await store.put([step(b"1", "m", number, result="x" * 1000) for number in range(100, 8000)])
        late = sorted([await seconds(store, number) for number in range(8000, 8030)])
    assert late[15] < 10 * early[15] + 0.01
