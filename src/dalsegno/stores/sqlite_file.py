"""The SQLite file of `SqliteStore`, as the owner of one job uses it. Everything here blocks.

Tables: ``jobs`` has the epoch, the owner and the latest pruned checkpoint of each job; ``records`` has the records in
the order in which they were put. ``application_id`` says that it is a store, ``user_version`` which schema it has.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import cache, partial
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

from dalsegno.core.records import Record, TaskActionState, fold
from dalsegno.errors import FencedError, OwnershipError, RecordError, StoreError

APPLICATION_ID = 0x44534753
SCHEMA_VERSION = 1
SCHEMA = (
    """CREATE TABLE jobs (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, identity TEXT NOT NULL, epoch INTEGER NOT NULL,
        owner TEXT, pid INTEGER, host TEXT, since TEXT, pruned_through INTEGER NOT NULL)""",
    """CREATE TABLE records (
        n INTEGER PRIMARY KEY, job INTEGER NOT NULL, key BLOB NOT NULL, message TEXT NOT NULL, task TEXT NOT NULL,
        body BLOB NOT NULL)""",
    "CREATE INDEX records_of_message ON records (job, key, message)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

BUSY_SECONDS = 30.0
OWNER_SECONDS = 0.5
"""How long `open` waits for an owner that may just be going, before it says who that is."""
LOG_BYTES = 16 * 2**20

_COLUMNS = 4
_ROWS = sorted({2**n for n in range(13)} | {3 * 2**n for n in range(12)} | {8000})
"""Rows of the statements in use. A batch takes the next larger one and fills it up, so that few need be compiled.

The largest has 32,000 parameters: SQLite takes 32,766, since version 3.32.
"""

_ADVICE = {
    sqlite3.SQLITE_FULL: "nothing of it was written and what is recorded is intact: free some space and start again",
    sqlite3.SQLITE_BUSY: f"another process has held the file for {BUSY_SECONDS:.0f} seconds: end it and start again",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable; SQLite keeps its log beside the file",
    sqlite3.SQLITE_CANTOPEN: "it must be a file, and its folder must be writable; SQLite keeps its log beside the file",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: put a copy of it back, or give the job a new file",
    sqlite3.SQLITE_IOERR: "the disk or the file system failed: see to it and start again, what is recorded is intact",
    sqlite3.SQLITE_TOOBIG: "a record may have up to 1,000,000,000 bytes",
}


class JobFile:
    """One job in one file. One thread at a time may write and, with a connection of its own, one may read."""

    def __init__(self, path: Path, job: str, owner: str) -> None:
        self.path, self.job = path, job
        self.recorded: set[bytes] = set()
        """Keys that have records; changed by the writing thread only."""
        if sqlite3.sqlite_version_info < (3, 32):
            raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old for {path}: version 3.32 or later is needed")
        with ExitStack() as undo, _errors(path, "open the store"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = _connect(path)
            undo.callback(self._writer.close)
            _patiently(partial(_check, self._writer, path))
            self._lock = _lock(self._writer, path, job)
            undo.callback(self._lock.close)
            _patiently(partial(_create, self._writer, path))
            self._id, self.identity, self._epoch, self.pruned_through = _own(self._writer, job, owner)
            self._reader = _connect(path, read_only=True)
            undo.callback(self._reader.close)
            keys = self._writer.execute("SELECT DISTINCT key FROM records WHERE job = ?", (self._id,))
            self.recorded.update(key for (key,) in keys)
            self._place = _place(path)
            undo.pop_all()
        self._fence = f"(SELECT epoch FROM jobs WHERE id = {self._id}) = {self._epoch}"

    def insert(self, records: Sequence[Record]) -> None:
        """Append *records*, all or none."""
        values: list[Any] = []
        for key, message, task, body in records:
            if message.isascii() and task.isascii():  # as nearly all are
                values += (key, message, task, body)
            else:
                values += (key, _text(message), _text(task), body)
        with _errors(self.path, "record a step"):
            limit = _COLUMNS * _ROWS[-1]
            if len(values) <= limit:
                self._insert(values)
            else:
                with _transaction(self._writer):
                    for start in range(0, len(values), limit):
                        self._insert(values[start : start + limit])
            self.recorded.update(values[::_COLUMNS])

    def _insert(self, values: Sequence[Any]) -> None:
        rows, values = _padded(values, _COLUMNS)
        statement = (
            f"INSERT INTO records (job, key, message, task, body) SELECT {self._id}, * FROM {rows}"
            f" WHERE column1 IS NOT NULL AND {self._fence}"
        )
        if self._writer.execute(statement, values).rowcount == 0:
            raise self._fenced()

    def delete(self, messages: Sequence[tuple[bytes, str]], checkpoint: int) -> int:
        """Remove the records of *messages* and note *checkpoint*; the number of records removed."""
        with _errors(self.path, "prune"), _transaction(self._writer):
            noted = max(checkpoint, self.pruned_through)
            statement = f"UPDATE jobs SET pruned_through = {noted:d} WHERE id = {self._id} AND {self._fence}"
            if self._writer.execute(statement).rowcount == 0:
                raise self._fenced()
            rows, values = _padded([value for key, message in messages for value in (key, _text(message))], 2)
            removed = self._writer.execute(
                f"DELETE FROM records WHERE n IN (SELECT n FROM {rows} CROSS JOIN records"
                f" ON job = {self._id} AND key = column1 AND message = column2)",
                values,
            ).rowcount
            emptied = self._without_records({key for key, _ in messages})
        self.pruned_through = noted
        self.recorded.difference_update(emptied)
        return removed

    def _without_records(self, keys: Iterable[bytes]) -> list[bytes]:
        numbered = list(keys)
        rows, values = _padded([value for number, key in enumerate(numbered) for value in (key, number)], 2)
        # One row, as each row is a step.
        (numbers,) = self._writer.execute(
            f"SELECT group_concat(column2) FROM {rows} WHERE column1 IS NOT NULL"
            f" AND NOT EXISTS (SELECT 1 FROM records WHERE job = {self._id} AND key = column1)",
            values,
        ).fetchone()
        return [numbered[int(number)] for number in numbers.split(",")] if numbers else []

    def states(self, key: bytes, task: str | None = None) -> list[TaskActionState]:
        """The states of all action tasks of *key*, or of one."""
        statement, values = "SELECT n, message, task, body FROM records WHERE job = ? AND key = ?", [self._id, key]
        if task is not None:
            statement, values = f"{statement} AND task = ?", [*values, _text(task)]
        with _errors(self.path, "read what is recorded"):
            rows = self._reader.execute(statement, values).fetchall()
        # Sorted here: SQLite would copy the bodies, into a file when they are large.
        rows.sort(key=itemgetter(0))
        return fold(Record(key, _string(message), _string(task), body) for _, message, task, body in rows)

    def check_place(self) -> None:
        """Raise `StoreError` if the file is no longer where it was: SQLite would go on writing to what nobody finds."""
        if _place(self.path) != self._place:
            raise StoreError(
                f"{self.path}: the file was removed or replaced while job {self.job!r} was running, so nothing more can"
                f" be recorded: put it back, or start the job anew"
            )

    def close_reader(self) -> None:
        with _errors(self.path, "close the store"):
            self._reader.close()

    def close(self, reader: Future[None] | None = None) -> None:
        """Give up everything, the ownership last; *reader* is the closing of the reader in its own thread."""
        with _errors(self.path, "close the store"), ExitStack() as last:
            last.callback(self._lock.close)
            last.callback(self._writer.close)
            reader.result() if reader else self._reader.close()

    def _fenced(self) -> FencedError:
        return FencedError(
            f"{self.path}: this process no longer owns job {self.job!r}; another one took it over, so nothing more may"
            f" be recorded here"
        )


def _connect(path: Path, *, read_only: bool = False, timeout: float = BUSY_SECONDS) -> sqlite3.Connection:
    # Threads take turns at a connection, so SQLite's own check of the creator's thread is in the way.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={'ro' if read_only else 'rwc'}",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
    )
    with ExitStack() as undo:
        undo.callback(connection.close)
        if not read_only:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
            # Some builds of SQLite overwrite what is deleted, so that all that was recorded would be written twice.
            connection.execute("PRAGMA secure_delete = OFF")
        undo.pop_all()
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _check(connection: sqlite3.Connection, path: Path) -> None:
    # In a transaction, as another process may be creating the tables.
    with _transaction(connection, "DEFERRED"):
        _is_store(connection, path)


def _is_store(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file holds a store, False if it is empty; raises `RecordError` for anything else."""
    ((application,),) = connection.execute("PRAGMA application_id")
    ((version,),) = connection.execute("PRAGMA user_version")
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master")
    if application == 0 and version == 0 and tables == 0:
        return False
    if application != APPLICATION_ID:
        raise RecordError(
            f"{path} is an SQLite database of something else (application id {application:#x}, {tables} tables and"
            f" indexes), so nothing is recorded in it: name another file"
        )
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema version {version}; this version of dalsegno reads up to {SCHEMA_VERSION}: install the"
            f" version that wrote it, or a newer one"
        )
    return True


def _create(connection: sqlite3.Connection, path: Path) -> None:
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL")
    if mode != "wal":
        raise StoreError(f"{path}: SQLite cannot keep a write-ahead log there (mode {mode!r}): use a local disk")
    with _transaction(connection):
        # Another process may have been quicker.
        if not _is_store(connection, path):
            for statement in SCHEMA:
                connection.execute(statement)


def _lock(connection: sqlite3.Connection, path: Path, job: str) -> sqlite3.Connection:
    """A connection that holds the lock of *job* until it is closed.

    It locks an empty database, so it never writes; SQLite's locks end with the process and are not inherited by a fork.
    The file stays: a process may be about to lock it.
    """
    digest = blake2b(job.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    lock = _connect(path.with_name(f"{path.name}.{digest}.lock"), timeout=OWNER_SECONDS)
    try:
        lock.execute("PRAGMA journal_mode = MEMORY")
        lock.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        lock.close()
        if _code(error) != sqlite3.SQLITE_BUSY:
            raise
        raise OwnershipError(
            f"job {job!r} in {path} is already running: {_owner(connection, job)}. End that process first, or give this"
            f" run another job name"
        ) from None
    return lock


def _owner(connection: sqlite3.Connection, job: str) -> str:
    query = "SELECT owner, pid, host, since FROM jobs WHERE name = ?"
    try:
        found = connection.execute(query, (_text(job),)).fetchone()
    except sqlite3.OperationalError:  # the other process has yet to create the tables
        found = None
    return "process {1} on {2}, since {3} ({0})".format(*found) if found else "a process that is just starting"


def _own(connection: sqlite3.Connection, job: str, owner: str) -> tuple[int, str, int, int]:
    """Begin a new epoch of *job*: its number, identity, epoch, and the checkpoint it was pruned for."""
    name, since = _text(job), datetime.now().astimezone().isoformat(timespec="seconds")
    me = (_text(owner), os.getpid(), socket.gethostname(), since)
    with _transaction(connection):
        connection.execute(
            "INSERT OR IGNORE INTO jobs (name, identity, epoch, pruned_through) VALUES (?, ?, 0, 0)",
            (name, uuid4().hex),
        )
        connection.execute(
            "UPDATE jobs SET epoch = epoch + 1, owner = ?, pid = ?, host = ?, since = ? WHERE name = ?", (*me, name)
        )
        (found,) = connection.execute("SELECT id, identity, epoch, pruned_through FROM jobs WHERE name = ?", (name,))
    number, identity, epoch, pruned_through = found
    return number, identity, epoch, pruned_through


def _place(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@cache
def _rows(rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return f"(VALUES {', '.join([row] * rows)})"


def _padded(values: Sequence[Any], columns: int) -> tuple[str, Sequence[Any]]:
    """A table expression for *values* as rows of *columns*, and its parameters: the values and rows of NULL."""
    rows = _ROWS[bisect_left(_ROWS, len(values) // columns)]
    return _rows(rows, columns), [*values, *[None] * (rows * columns - len(values))]


def _text(text: str) -> str | bytes:
    """What SQLite keeps exactly for *text*: a BLOB where it has no TEXT, for lone surrogates."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text


def _string(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode(errors="surrogatepass")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _patiently(action: Callable[[], object]) -> None:
    """Do *action*; SQLite does not wait by itself for a process that creates or recovers the same file."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


@contextmanager
def _errors(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if _code(error) == sqlite3.SQLITE_NOTADB:
            raise RecordError(f"{path} is not an SQLite database, so it is left alone: name another file") from error
        advice = _ADVICE.get(_code(error), "see the cause")
        raise StoreError(f"{path}: cannot {doing}: {error}; {advice}") from error
    except (OSError, OverflowError) as error:
        raise StoreError(f"{path}: cannot {doing}: {error}") from error
