"""The outsider's way into the tables of a store: reads them, and leaves decisions, while jobs run or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
from psycopg import errors as failures

from dalsegno.core.records import Record
from dalsegno.errors import StoreError
from dalsegno.stores.base import Decision, JobInfo, StoreInspector, not_recorded, unknown_job
from dalsegno.stores.postgres.job import decision as as_decision
from dalsegno.stores.postgres.link import mapped
from dalsegno.stores.postgres.schema import LOCKS, WAITING, checked_version, digest, place, string, text
from dalsegno.stores.postgres.settings import Settings

ALIVE_SECONDS = 15
ROWS_AT_A_TIME = 100

_JOBS = f"""
    SELECT name, identity, epoch, owner, pid, host, since, pruned_through,
        EXISTS (SELECT FROM {{workers}} AS w WHERE w.job = j.id AND beat > now() - interval '{ALIVE_SECONDS} seconds'),
        (SELECT count(*) FROM (SELECT FROM {{records}} AS r WHERE r.job = j.id GROUP BY key, message) AS m)
    FROM {{jobs}} AS j
"""
_OF_MESSAGE = "job = %(job)b AND key_hash = %(key_hash)b AND message_hash = %(message_hash)b AND key = %(key)b"
_OF_MESSAGE += " AND message = %(message)b"


class PostgresInspector(StoreInspector):
    """Inspects the store that *settings* name; raises `StoreError` if there is none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        with mapped(settings, "look into the store"):
            self._connection = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(**self._settings.connection())
        try:
            row = connection.execute(self._settings.statement("SELECT max(version) FROM {migrations}")).fetchone()
            checked_version(row, self._settings)
        except (failures.UndefinedTable, failures.InvalidSchemaName):
            connection.close()
            raise StoreError(f"{self._settings}: no job has made a store in this database yet") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def jobs(self) -> list[JobInfo]:
        rows = self._fetch("list its jobs", _JOBS, {})
        return sorted((_info(*row) for row in rows), key=lambda info: info.name)

    def messages(self, job: str) -> Iterator[tuple[bytes, str]]:
        query = "SELECT key, message FROM {records} WHERE job = %(job)b GROUP BY key, message ORDER BY min(n)"
        rows = self._fetch("read what is recorded", query, {"job": self._job(job)})
        return ((key, string(message)) for key, message in rows)

    def records(self, job: str, key: bytes | None = None, message: str | None = None) -> Iterator[Record]:
        values: dict[str, Any] = {"job": self._job(job)}
        conditions = ["job = %(job)b"]
        if key is not None:
            values |= {"key": key, "key_hash": place(key)}
            conditions.append("key_hash = %(key_hash)b AND key = %(key)b")
        if message is not None:
            values |= {"message": text(message), "message_hash": place(text(message))}
            conditions.append("message_hash = %(message_hash)b AND message = %(message)b")
        query = f"SELECT key, message, task, body FROM {{records}} WHERE {' AND '.join(conditions)} ORDER BY n"
        if key is not None and message is not None:
            return map(_record, self._fetch("read what is recorded", query, values))
        return self._stream(query, values)

    def _stream(self, query: str, values: dict[str, Any]) -> Iterator[Record]:
        """The records as of one moment, on a connection that keeps that moment for no one else."""
        with (
            mapped(self._settings, "read what is recorded"),
            closing(self._connect()) as connection,
            connection.transaction(),
            connection.cursor("records", binary=True) as cursor,
        ):
            cursor.itersize = ROWS_AT_A_TIME
            cursor.execute(self._settings.statement(query), values, binary=True)
            yield from map(_record, cursor)

    def decisions(self, job: str) -> list[Decision]:
        query = "SELECT key, message, target, body FROM {decisions} WHERE job = %(job)b ORDER BY n"
        return [as_decision(*row) for row in self._fetch("read what was decided", query, {"job": self._job(job)})]

    def decide(self, job: str, decision: Decision) -> bool:
        number = self._job(job)
        key, message, target = decision.key, text(decision.message), text(decision.target)
        values = {"job": number, "key": key, "message": message, "target": target, "body": decision.body}
        values |= {"key_hash": place(key), "message_hash": place(message), "digest": digest(key, message, target)}
        with mapped(self._settings, "write a decision"), self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            self._connection.execute(WAITING)
            # One at a time, and none while its message is pruned: numbers are to appear in their order.
            self._connection.execute("SELECT pg_advisory_xact_lock(%b, %b)", (LOCKS, number))
            query = f"SELECT FROM {{records}} WHERE {_OF_MESSAGE} LIMIT 1"
            if self._execute(query, values).fetchone() is None:
                raise not_recorded(str(self._settings), job, decision.message)
            query = (
                "INSERT INTO {decisions} (job, key_hash, message_hash, target_digest, key, message, target, body)"
                " VALUES (%(job)b, %(key_hash)b, %(message_hash)b, %(digest)b, %(key)b, %(message)b, %(target)b,"
                " %(body)b) ON CONFLICT DO NOTHING"
            )
            return self._execute(query, values).rowcount == 1

    def close(self) -> None:
        self._connection.close()

    def _job(self, job: str) -> int:
        query = "SELECT id FROM {jobs} WHERE name_digest = %(digest)b"
        found = self._fetch("look for the job", query, {"digest": digest(text(job))})
        if not found:
            names = self._fetch("look for the job", "SELECT name FROM {jobs} ORDER BY id LIMIT 20", {})
            raise unknown_job(str(self._settings), job, [string(name) for (name,) in names])
        return int(found[0][0])

    def _fetch(self, what: str, query: str, values: dict[str, Any]) -> list[Any]:
        with mapped(self._settings, what):
            return self._execute(query, values).fetchall()

    def _execute(self, query: str, values: dict[str, Any]) -> psycopg.Cursor[Any]:
        return self._connection.execute(self._settings.statement(query), values, binary=True)


def _info(
    name: bytes,
    identity: str,
    epoch: int,
    owner: bytes,
    pid: int,
    host: bytes,
    since: str,
    pruned_through: int,
    running: bool,
    messages: int,
) -> JobInfo:
    return JobInfo(
        string(name), identity, epoch, string(owner), pid, string(host), since, pruned_through, running, messages
    )


def _record(row: tuple[bytes, bytes, bytes, bytes]) -> Record:
    key, message, task, body = row
    return Record(key, string(message), string(task), body)
