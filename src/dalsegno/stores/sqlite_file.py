"""The SQLite file of `SqliteStore`, as the owner of one job uses it. Everything here blocks."""

from __future__ import annotations

import os
import socket
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import datetime
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

from dalsegno.core.records import OpenBody, Record, TaskActionState, fold
from dalsegno.errors import FencedError, OwnershipError, StoreError
from dalsegno.stores.base import Decision
from dalsegno.stores.sqlite_schema import (
    OWNER_SECONDS,
    check,
    code,
    connect,
    connect_durably,
    create,
    errors,
    lock_path,
    patiently,
    string,
    text,
    transaction,
)

_COLUMNS = 4
_ROWS = sorted({2**n for n in range(13)} | {3 * 2**n for n in range(12)} | {8000})
"""Rows of the statements in use. A batch takes the next larger one and fills it up, so that few need be compiled.

The largest has 32,000 parameters: SQLite takes 32,766, since version 3.32.
"""


class JobFile:
    """One job in one file. One thread at a time may write and, with a connection of its own, one may read."""

    def __init__(self, path: Path, job: str, owner: str) -> None:
        self.path, self.job = path, job
        self.recorded: set[bytes] = set()
        """Keys that have records; changed by the writing thread only."""
        self._quiet = (0, -1)
        """The number after which there was no decision, and the state of the file in which that was so."""
        if sqlite3.sqlite_version_info < (3, 32):
            raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old for {path}: version 3.32 or later is needed")
        with ExitStack() as undo, errors(path, "open the store"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = connect_durably(path, "rwc")
            undo.callback(self._writer.close)
            patiently(partial(check, self._writer, path))
            self._lock = _lock(self._writer, path, job)
            undo.callback(self._lock.close)
            patiently(partial(create, self._writer, path))
            self._id, self.identity, self._epoch, self.pruned_through = _own(self._writer, job, owner)
            self._reader = connect(path, "ro")
            undo.callback(self._reader.close)
            keys = self._writer.execute("SELECT DISTINCT key FROM records WHERE job = ?", (self._id,))
            self.recorded.update(key for (key,) in keys)
            self._place = _place(path)
            undo.pop_all()
        self._fence = f"(SELECT epoch FROM jobs WHERE id = {self._id}) = {self._epoch}"

    def insert(self, records: Sequence[Record]) -> None:
        """Append *records*, all or none."""
        values: list[Any] = []
        for record in records:
            values += (record.key, text(record.message), text(record.task), record.body)
        with errors(self.path, "record a step"):
            limit = _COLUMNS * _ROWS[-1]
            if len(values) <= limit:
                self._insert(values)
            else:
                with transaction(self._writer):
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
        """Remove records and decisions of *messages* and note *checkpoint*; the number of records removed."""
        with errors(self.path, "prune"), transaction(self._writer):
            noted = max(checkpoint, self.pruned_through)
            statement = f"UPDATE jobs SET pruned_through = {noted:d} WHERE id = {self._id} AND {self._fence}"
            if self._writer.execute(statement).rowcount == 0:
                raise self._fenced()
            rows, values = _padded([value for key, message in messages for value in (key, text(message))], 2)
            removed = self._writer.execute(
                f"DELETE FROM records WHERE n IN (SELECT n FROM {rows} CROSS JOIN records"
                f" ON job = {self._id} AND key = column1 AND message = column2)",
                values,
            ).rowcount
            self._writer.execute(
                f"DELETE FROM decisions WHERE n IN (SELECT n FROM {rows} CROSS JOIN decisions"
                f" ON job = {self._id} AND key = column1 AND message = column2)",
                values,
            )
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

    def states(self, key: bytes, task: str | None, open_body: OpenBody | None) -> list[TaskActionState]:
        """The states of all action tasks of *key*, or of one."""
        statement, values = "SELECT n, message, task, body FROM records WHERE job = ? AND key = ?", [self._id, key]
        if task is not None:
            statement, values = f"{statement} AND task = ?", [*values, text(task)]
        with errors(self.path, "read what is recorded"):
            rows = self._reader.execute(statement, values).fetchall()
        # Sorted here: SQLite would copy the bodies, into a file when they are large.
        rows.sort(key=itemgetter(0))
        records = (Record(key, string(message), string(task), body) for _, message, task, body in rows)
        return fold(records, open_body)

    def decisions(self, after: int) -> list[tuple[int, Decision]]:
        """The numbered decisions of the job after number *after*. Asked again and again, mostly for nothing."""
        with errors(self.path, "read what was decided"):
            # Asked before the decisions: one that is made in between is found twice rather than never.
            ((changes,),) = self._reader.execute("PRAGMA data_version")
            quiet_after, quiet_changes = self._quiet
            if changes == quiet_changes and after >= quiet_after:
                return []
            rows = self._reader.execute(
                "SELECT n, key, message, target, body FROM decisions WHERE n > ? AND +job = ? ORDER BY n",
                (after, self._id),
            ).fetchall()
        self._quiet = max([after, *(row[0] for row in rows)]), changes
        return [(n, Decision(key, string(message), string(target), body)) for n, key, message, target, body in rows]

    def check_place(self) -> None:
        """Raise `StoreError` if the file is no longer where it was: SQLite would go on writing to what nobody finds."""
        if _place(self.path) != self._place:
            raise StoreError(
                f"{self.path}: the file was removed or replaced while job {self.job!r} was running, so nothing more can"
                f" be recorded: put it back, or start the job anew"
            )

    def close_reader(self) -> None:
        with errors(self.path, "close the store"):
            self._reader.close()

    def close(self, reader: Future[None] | None = None) -> None:
        """Give up everything, the ownership last; *reader* is the closing of the reader in its own thread."""
        with errors(self.path, "close the store"), ExitStack() as last:
            last.callback(self._lock.close)
            last.callback(self._writer.close)
            reader.result() if reader else self._reader.close()

    def _fenced(self) -> FencedError:
        return FencedError(
            f"{self.path}: this process no longer owns job {self.job!r}; another one took it over, so nothing more may"
            f" be recorded here"
        )


def _lock(connection: sqlite3.Connection, path: Path, job: str) -> sqlite3.Connection:
    """A connection that holds the lock of *job* until it is closed.

    It locks an empty database, so it never writes; SQLite's locks end with the process and are not inherited by a fork.
    """
    lock = connect(lock_path(path, job), "rwc", timeout=OWNER_SECONDS)
    try:
        lock.execute("PRAGMA journal_mode = MEMORY")
        lock.execute("BEGIN EXCLUSIVE")  # not only RESERVED, so that `is_running` sees it
    except sqlite3.OperationalError as error:
        lock.close()
        if code(error) != sqlite3.SQLITE_BUSY:
            raise
        raise OwnershipError(
            f"job {job!r} in {path} is already running: {_owner(connection, job)}. End that process first, or give this"
            f" run another job name"
        ) from None
    return lock


def _owner(connection: sqlite3.Connection, job: str) -> str:
    query = "SELECT owner, pid, host, since FROM jobs WHERE name = ?"
    try:
        found = connection.execute(query, (text(job),)).fetchone()
    except sqlite3.OperationalError:  # the other process has yet to create the tables
        found = None
    return "process {1} on {2}, since {3} ({0})".format(*found) if found else "a process that is just starting"


def _own(connection: sqlite3.Connection, job: str, owner: str) -> tuple[int, str, int, int]:
    """Begin a new epoch of *job*: its number, identity, epoch, and the checkpoint it was pruned for."""
    name, since = text(job), datetime.now().astimezone().isoformat(timespec="seconds")
    me = (text(owner), os.getpid(), socket.gethostname(), since)
    with transaction(connection):
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
