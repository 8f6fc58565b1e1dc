"""The outsider's way into the SQLite file of a store: reads it, and leaves decisions, while jobs run or not.

SQLite shows a reader one moment and never makes a writer wait for it; only the write-ahead log is not cut back until
the reader is done. So what may take long, to go through all records, has a connection of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from dalsegno.core.records import Record
from dalsegno.errors import StoreError
from dalsegno.stores.base import Decision, JobInfo, StoreInspector, not_recorded, unknown_job
from dalsegno.stores.sqlite_schema import (
    WITH_DECISIONS,
    check,
    code,
    connect,
    connect_durably,
    errors,
    is_running,
    patiently,
    schema_version,
    string,
    text,
    transaction,
)

_RECORDS = "SELECT key, message, task, body FROM records WHERE {} ORDER BY n"


class SqliteInspector(StoreInspector):
    """Inspects the store in the SQLite file *path*; raises `StoreError` if there is no such file, or no store in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise StoreError(
                f"{path}: {'this is not a file' if path.exists() else 'there is no such file'}, so there is no store to"
                f" look into: name the store that the job runs on"
            )
        with ExitStack() as undo, errors(path, "look into the store"):
            self._reader = _connect_reader(path)
            undo.callback(self._reader.close)
            if self._schema() == 0:
                raise StoreError(f"{path}: the file is empty, no job has made a store of it yet")
            undo.pop_all()

    def jobs(self) -> list[JobInfo]:
        query = (
            "SELECT name, identity, epoch, owner, pid, host, since, pruned_through,"
            " (SELECT count(*) FROM (SELECT 1 FROM records WHERE job = jobs.id GROUP BY key, message)) FROM jobs"
        )
        with errors(self.path, "list its jobs"):
            rows = self._reader.execute(query).fetchall()
            return sorted((self._info(*row) for row in rows), key=lambda info: info.name)

    def _info(
        self, name: Any, identity: str, epoch: int, owner: Any, pid: int, host: str, since: str, pruned: int, count: int
    ) -> JobInfo:
        job = string(name)
        running = is_running(self.path, job)
        return JobInfo(job, identity, epoch, string(owner or ""), pid, host, since, pruned, running, count)

    def messages(self, job: str) -> Iterator[tuple[bytes, str]]:
        with errors(self.path, "read what is recorded"):
            rows = self._reader.execute(
                "SELECT key, message, min(n) FROM records WHERE job = ? GROUP BY key, message", (self._job(job),)
            ).fetchall()
        rows.sort(key=itemgetter(2))
        return ((key, string(message)) for key, message, _ in rows)

    def records(self, job: str, key: bytes | None = None, message: str | None = None) -> Iterator[Record]:
        # Neither may make SQLite sort: it would copy the bodies.
        condition = "+job = ?"
        values: list[Any] = [self._job(job)]
        if key is not None and message is not None:
            condition, values = "job = ? AND key = ? AND message = ?", [*values, key, text(message)]
            with errors(self.path, "read what is recorded"):
                return map(_record, self._reader.execute(_RECORDS.format(condition), values).fetchall())
        if key is not None:
            condition, values = "n IN (SELECT n FROM records WHERE job = ? AND key = ?)", [*values, key]
        if message is not None:
            condition, values = f"{condition} AND +message = ?", [*values, text(message)]
        return self._stream(condition, values)

    def _stream(self, condition: str, values: list[Any]) -> Iterator[Record]:
        """The records as of one moment, row by row, on a connection that keeps that moment for no one else."""
        with errors(self.path, "read what is recorded"), closing(_connect_reader(self.path)) as reader:
            yield from map(_record, reader.execute(_RECORDS.format(condition), values))

    def decisions(self, job: str) -> list[Decision]:
        number = self._job(job)
        with errors(self.path, "read what was decided"):
            if self._schema() < WITH_DECISIONS:
                return []
            rows = self._reader.execute(
                "SELECT key, message, target, body FROM decisions WHERE job = ? ORDER BY n", (number,)
            ).fetchall()
        return [Decision(key, string(message), string(target), body) for key, message, target, body in rows]

    def decide(self, job: str, decision: Decision) -> bool:
        number = self._job(job)
        with (
            errors(self.path, "write a decision"),
            closing(connect_durably(self.path, "rw")) as writer,
            transaction(writer),
        ):
            if schema_version(writer, self.path) < WITH_DECISIONS:
                raise StoreError(
                    f"{self.path} was written by an earlier version of dalsegno, which took no decisions: run job"
                    f" {job!r} once with this version, then decide again"
                )
            return self._insert(writer, number, job, decision)

    def _insert(self, writer: sqlite3.Connection, number: int, job: str, decision: Decision) -> bool:
        key, message, target, body = decision
        where = (number, key, text(message))
        if not writer.execute(
            "SELECT 1 FROM records WHERE job = ? AND key = ? AND message = ? LIMIT 1", where
        ).fetchone():
            raise not_recorded(str(self.path), job, message)
        written = writer.execute(
            "INSERT INTO decisions (job, key, message, target, body) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (*where, text(target), body),
        )
        return written.rowcount == 1

    def close(self) -> None:
        with errors(self.path, "close the store"):
            self._reader.close()

    def _schema(self) -> int:
        # Asked each time: the owner of a job may migrate the file meanwhile.
        return int(self._reader.execute("PRAGMA user_version").fetchone()[0])

    def _job(self, job: str) -> int:
        with errors(self.path, "look for the job"):
            found = self._reader.execute("SELECT id FROM jobs WHERE name = ?", (text(job),)).fetchone()
            if found is None:
                names = self._reader.execute("SELECT name FROM jobs ORDER BY id LIMIT 20").fetchall()
                raise unknown_job(str(self.path), job, [string(name) for (name,) in names])
        return int(found[0])


def _record(row: tuple[bytes, str | bytes, str | bytes, bytes]) -> Record:
    key, message, task, body = row
    return Record(key, string(message), string(task), body)


def _connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads.

    Without a log beside the file SQLite has to make one even to read. A connection that may write takes it away again
    when it is closed; one that may not would leave it behind. With a log there is nothing to make, and nothing of a
    crashed job is touched.
    """
    log = path.with_name(f"{path.name}-wal")
    try:
        return _checked(connect(path, "ro" if log.exists() else "rw"), path)
    except sqlite3.OperationalError as error:
        if code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or log.exists():
            raise
    # The folder may not be written, so no job runs here either, and the file stays as it is.
    return _checked(connect(path, "ro", options="&immutable=1"), path)


def _checked(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    with ExitStack() as undo:
        undo.callback(connection.close)
        connection.execute("PRAGMA query_only = ON")
        patiently(partial(check, connection, path))
        undo.pop_all()
    return connection
