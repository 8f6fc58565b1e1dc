"""A store that encrypts keeps the whole contract of a store, and opens nothing that is not in its place."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dalsegno import AesGcmCipher, PayloadCipher, RecordError, StoreError
from dalsegno.cipher import SEALED
from dalsegno.core.records import Record, encode_body
from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.encrypting import EncryptingStore
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.testing.stores import StoreSuite, step
from tests.helpers import SpyStore

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


class TestEncryptedMemoryStore(StoreSuite):
    persistent = False
    shared = True
    places: ClassVar[dict[Path, dict[str, Any]]] = {}

    def make(self, place: Path) -> TaskActionStore:
        return EncryptingStore(MemoryStore(self.places.setdefault(place, {})), AesGcmCipher(KEY))

    async def displace(self, place: Path, job: str) -> None:
        MemoryStore(self.places[place]).take_over(job)


class TestEncryptedSqliteStore(StoreSuite):
    def make(self, place: Path) -> TaskActionStore:
        return EncryptingStore(SqliteStore(place / "agent.db"), AesGcmCipher(KEY))

    async def displace(self, place: Path, job: str) -> None:
        with closing(sqlite3.connect(place / "agent.db")) as database, database:
            database.execute("UPDATE jobs SET epoch = epoch + 1 WHERE name = ?", (job,))


class Jobs:
    """Jobs in one SQLite file, whose rows a test changes behind the back of the store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, records: Sequence[Record], *, job: str = "job", cipher: PayloadCipher | None = None) -> None:
        async def write(store: TaskActionStore) -> None:
            await store.put(records)

        self._do(write, job, cipher)

    def read(self, key: bytes = b"1", *, job: str = "job", cipher: PayloadCipher | None = None) -> list[Any]:
        """The results of the calls of *key*, which *claim*, *list* and *get* say alike or all refuse."""
        results: list[Any] = []

        async def read(store: TaskActionStore) -> None:
            errors = set()
            for reading in (store.claim(key), store.get(key, "task"), store.list(key)):
                try:
                    states = await reading
                except RecordError as error:
                    errors.add(str(error))
                else:
                    listed = states if isinstance(states, list) else [states] if states else []
                    results[:] = [call.result for state in listed for call in state.calls.values()]
            assert len(errors) <= 1
            if errors:
                raise RecordError(errors.pop())

        self._do(read, job, cipher)
        return results

    def sql(self, statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as database, database:
            return database.execute(statement, values).fetchall()

    def _do(self, use: Callable[[TaskActionStore], Any], job: str, cipher: PayloadCipher | None) -> None:
        async def main() -> None:
            inner = SqliteStore(self.path)
            store = EncryptingStore(inner, cipher) if cipher else inner
            await store.open(job, "owner")
            try:
                await use(store)
            finally:
                await store.close()

        asyncio.run(main())


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path / "agent.db")


CIPHER = AesGcmCipher(KEY)


def test_what_is_put_comes_back_and_lies_there_sealed(jobs: Jobs) -> None:
    jobs.put([step(b"1", "m", result="the result")], cipher=CIPHER)
    assert jobs.read(cipher=CIPHER) == ["the result"]
    ((body,),) = jobs.sql("SELECT body FROM records")
    assert body.startswith(SEALED)
    assert b"result" not in body
    assert b"act" not in body


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET key = CAST('1' AS BLOB), message = 'm' WHERE key = CAST('2' AS BLOB)",
        "UPDATE records SET message = 'm', key = CAST('1' AS BLOB) WHERE message = 'n'",
        "UPDATE records SET task = 'task' WHERE task = 'other'",
        "UPDATE records SET job = (SELECT id FROM jobs WHERE name = 'job') WHERE result = 'x'",
    ],
    ids=["key", "message", "task", "job"],
)
def test_a_record_from_another_place_is_refused(jobs: Jobs, change: str) -> None:
    jobs.put([step(b"2", "m", result="another key's")], cipher=CIPHER)
    jobs.put([step(b"1", "n", result="another message's")], cipher=CIPHER)
    jobs.put([step(b"1", "m", task="other", result="another task's")], cipher=CIPHER)
    jobs.put([step(b"1", "m", result="another job's")], job="other", cipher=CIPHER)
    if "job =" in change:
        change = change.replace("result = 'x'", "job = (SELECT id FROM jobs WHERE name = 'other')")
        jobs.sql("DELETE FROM records WHERE job = (SELECT id FROM jobs WHERE name = 'job')")
    jobs.sql(change)
    with pytest.raises(RecordError, match=r"key 1, message 'm', action task 'task' cannot be decrypted.*moved here"):
        jobs.read(cipher=CIPHER)


def test_a_record_of_an_earlier_store_with_the_same_job_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    earlier = Jobs(tmp_path / "earlier.db")
    for some in (earlier, jobs):
        some.put([step(b"1", "m", result="x")], cipher=CIPHER)
    ((body,),) = earlier.sql("SELECT body FROM records")
    jobs.sql("UPDATE records SET body = ?", body)
    with pytest.raises(RecordError, match="cannot be decrypted"):
        jobs.read(cipher=CIPHER)


def test_a_doubled_record_and_one_out_of_order_are_refused(jobs: Jobs) -> None:
    call = {"call": 0, "name": "pay", "args_digest": "0"}
    header = {"action": "act", "event": "input", "sender": "", "index": 0}
    requested = encode_body("requested", {**call, "task": header, "args": [1], "kwargs": {}, "effect": "once"})
    completed = encode_body("completed", {**call, "result": "paid"})
    jobs.put([Record(b"1", "m", "task", body) for body in (requested, completed)], cipher=CIPHER)
    assert jobs.read(cipher=CIPHER) == ["paid"]
    copy = "INSERT INTO records (job, key, message, task, body) SELECT job, key, message, task, body FROM records"
    jobs.sql(f"{copy} WHERE n = 2")
    with pytest.raises(RecordError, match="a 'completed' record cannot follow the state 'completed'"):
        jobs.read(cipher=CIPHER)
    jobs.sql("DELETE FROM records WHERE n = 3")
    jobs.sql("UPDATE records SET n = 5 WHERE n = 1")
    with pytest.raises(RecordError, match="the first record of an action task has no header"):
        jobs.read(cipher=CIPHER)


@pytest.mark.parametrize("kept", [0, 4, 5, 6, 20, 60])
def test_a_cut_record_is_refused(jobs: Jobs, kept: int) -> None:
    jobs.put([step(b"1", "m")], cipher=CIPHER)
    jobs.sql("UPDATE records SET body = substr(body, 1, ?)", kept)
    with pytest.raises(RecordError, match="record of key 1, message 'm', action task 'task'"):
        jobs.read(cipher=CIPHER)


def test_a_wrong_key_a_forgotten_cipher_and_one_too_many_are_told_apart(jobs: Jobs) -> None:
    jobs.put([step(b"1", "m")], cipher=CIPHER)
    with pytest.raises(RecordError, match="the key '1' does not fit"):
        jobs.read(cipher=AesGcmCipher(OTHER_KEY))
    with pytest.raises(RecordError, match="encrypted with the key '1', and the cipher has '2'"):
        jobs.read(cipher=AesGcmCipher({"2": KEY}))
    with pytest.raises(RecordError, match=r"is encrypted, but this job is run without a cipher.*--cipher"):
        jobs.read()
    jobs.put([step(b"1", "m")], job="plain")
    with pytest.raises(RecordError, match="is not encrypted, but this job is run with a cipher"):
        jobs.read(job="plain", cipher=CIPHER)


def test_encrypted_and_plain_jobs_share_a_store(jobs: Jobs) -> None:
    jobs.put([step(b"1", "m", result="a")], job="sealed", cipher=CIPHER)
    jobs.put([step(b"1", "m", result="b")], job="plain")
    assert (jobs.read(job="sealed", cipher=CIPHER), jobs.read(job="plain")) == (["a"], ["b"])


def test_after_a_rotation_old_and_new_records_are_read(jobs: Jobs) -> None:
    jobs.put([step(b"1", "m", 0, result="old")], cipher=AesGcmCipher({"old": KEY}))
    both = AesGcmCipher({"old": KEY, "new": OTHER_KEY})
    jobs.put([step(b"1", "m", 1, result="new")], cipher=both)
    assert jobs.read(cipher=both) == ["old", "new"]
    with pytest.raises(RecordError, match="with the key 'old', and the cipher has 'new'"):
        jobs.read(cipher=AesGcmCipher({"new": OTHER_KEY}))


def test_a_store_object_is_plain_again_after_it_was_wrapped() -> None:
    async def main() -> None:
        store = MemoryStore()
        wrapped = EncryptingStore(store, CIPHER)
        await wrapped.open("sealed", "owner")
        await wrapped.close()
        await store.open("plain", "owner")
        await wrapped.close()  # it has nothing open
        await store.put([step(b"1", "m")])
        assert len(await store.list(b"1")) == 1

    asyncio.run(main())


class Failing(AesGcmCipher):
    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        if b"not this" in plain:
            raise ConnectionError("the key service is down")
        return super().encrypt(plain, bound_to)


def test_when_the_cipher_fails_nothing_of_the_batch_is_written(jobs: Jobs) -> None:
    with pytest.raises(StoreError, match="the key service is down"):
        jobs.put([step(b"1", "m"), step(b"1", "n", result="not this")], cipher=Failing(KEY))
    assert jobs.sql("SELECT * FROM records") == []


def test_wrappers_hand_the_opening_on() -> None:
    async def main() -> None:
        store = EncryptingStore(SpyStore(MemoryStore()), CIPHER)
        await store.open("job", "owner")
        await store.put([step(b"1", "m", result="x")])
        assert (await store.list(b"1"))[0].calls[0].result == "x"

    asyncio.run(main())


def test_an_error_does_not_show_what_is_encrypted(jobs: Jobs) -> None:
    jobs.put([Record(b"1", "m", "task", b'{"v":1,"kind":"odd","secret":"text"}')], cipher=CIPHER)
    with pytest.raises(RecordError) as refused:
        jobs.read(cipher=CIPHER)
    assert "secret" not in str(refused.value)
