"""The statements of the owner of a job. All may be sent again when it is not known whether they were carried out."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import uuid4

from dalsegno.core.records import Record
from dalsegno.errors import FencedError
from dalsegno.stores.base import Decision, Worker
from dalsegno.stores.postgres.link import Connection
from dalsegno.stores.postgres.schema import LOCKS, WAITING, digest, migrate, place, string, text
from dalsegno.stores.postgres.settings import Settings

CHUNK_BYTES = 64 * 2**20
"""Bytes of records in one statement; a message of the protocol has room for a thousand million."""

_DURABLY = (
    "CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
_FENCE = "job = %b AND index = %b AND epoch = %b"
_ROWS = """
    INSERT INTO {{records}} (job, key_hash, message_hash, key, message, task, body)
    SELECT %b, * FROM unnest(%b::bigint[], %b::bigint[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[]) {}
"""
_NUMBERED = f"UPDATE {{workers}} SET put = %b WHERE {_FENCE} AND put < %b RETURNING {_DURABLY}"
_PUT = f"WITH owned AS ({_NUMBERED}) {_ROWS.format('CROSS JOIN (SELECT FROM owned) AS fence')}"
_PUT_MORE = _ROWS.format("")
_PRUNE = f"""
    WITH owned AS MATERIALIZED (
        SELECT {_DURABLY} FROM {{workers}} WHERE {_FENCE} AND pruned < %b FOR UPDATE
    ), covered AS MATERIALIZED (
        SELECT * FROM unnest(%b::bigint[], %b::bigint[], %b::bytea[], %b::bytea[]) AS c (kh, mh, key, message)
        WHERE EXISTS (SELECT FROM owned)
    ), gone AS (
        DELETE FROM {{records}} AS r USING covered AS c
        WHERE r.job = %b AND r.key_hash = c.kh AND r.message_hash = c.mh AND r.key = c.key AND r.message = c.message
        RETURNING 1
    ), decided AS (
        DELETE FROM {{decisions}} AS d USING covered AS c
        WHERE d.job = %b AND d.key_hash = c.kh AND d.message_hash = c.mh AND d.key = c.key AND d.message = c.message
    ), noted AS (
        UPDATE {{jobs}} SET pruned_through = %b WHERE id = %b AND pruned_through < %b AND EXISTS (SELECT FROM owned)
    )
    UPDATE {{workers}} SET pruned = %b, removed = (SELECT count(*) FROM gone)
    WHERE {_FENCE} AND EXISTS (SELECT FROM owned) RETURNING removed
"""
_READ = "SELECT n, message, task, body FROM {records} WHERE job = %b AND key_hash = %b AND key = %b"


class Job(NamedTuple):
    """A job as its worker opened it."""

    settings: Settings
    name: str
    id: int
    identity: str
    epoch: int
    pruned_through: int
    worker: Worker

    @property
    def _fence(self) -> tuple[int, int, int]:
        return self.id, self.worker.index, self.epoch

    async def put(self, connection: Connection, number: int, records: Sequence[Record]) -> None:
        """Append *records* as write *number*, or see that this was done.

        Each write has a greater number than all before it, so one that was given up can no longer take place later.
        """
        first, *others = _chunks(records)
        if others:
            async with connection.transaction():
                await connection.execute(WAITING)
                if await self._insert(connection, number, first):
                    for chunk in others:
                        await self._execute(connection, _PUT_MORE, (self.id, *chunk))
                    return
        elif await self._insert(connection, number, first):
            return
        await self._check(connection, "put", number)

    async def _insert(self, connection: Connection, number: int, columns: Sequence[Any]) -> bool:
        done = await self._execute(connection, _PUT, (number, *self._fence, number, self.id, *columns))
        return bool(done.rowcount > 0)

    async def prune(
        self, connection: Connection, number: int, messages: Sequence[tuple[bytes, str]], checkpoint: int
    ) -> int:
        """Remove records and decisions of *messages* and note *checkpoint*, or see that this was done.

        The number of records removed.
        """
        names = [(key, text(message)) for key, message in messages]
        covered = [[place(key) for key, _ in names], [place(message) for _, message in names], *_columns(names, 2)]
        values = (*self._fence, number, *covered, self.id, self.id, checkpoint, self.id, checkpoint)
        async with connection.transaction():
            await connection.execute(WAITING)
            # Before the statement, which must see what others decided until then.
            await connection.execute("SELECT pg_advisory_xact_lock(%b, %b)", (LOCKS, self.id))
            found = await self._execute(connection, _PRUNE, (*values, number, *self._fence))
            row = await found.fetchone()
        return int(row[0]) if row is not None else await self._check(connection, "pruned", number)

    async def _check(self, connection: Connection, column: str, number: int) -> int:
        """Raise `FencedError` unless write *number* took place, though its answer was lost."""
        found = await self._execute(
            connection, f"SELECT {column}, removed FROM {{workers}} WHERE {_FENCE}", self._fence
        )
        row = await found.fetchone()
        if row is None or row[0] != number:
            raise FencedError(
                f"{self.settings}: this process no longer owns job {self.name!r}; another one took it over, so nothing"
                f" more may be recorded here"
            )
        return int(row[1])

    async def records(self, connection: Connection, key: bytes, task: str | None = None) -> list[Record]:
        """What is recorded of *key*, or of one action task."""
        query, values = _READ, [self.id, place(key), key]
        if task is not None:
            query, values = f"{query} AND task = %b", [*values, text(task)]
        rows = await (await self._execute(connection, query, values)).fetchall()
        rows.sort(key=_number)
        return [Record(key, string(message), string(task), body) for _, message, task, body in rows]

    async def keys(self, connection: Connection) -> list[bytes]:
        found = await self._execute(connection, "SELECT DISTINCT key FROM {records} WHERE job = %b", (self.id,))
        return [key for (key,) in await found.fetchall()]

    async def decisions(self, connection: Connection, after: int) -> list[tuple[int, Decision]]:
        found = await self._execute(
            connection,
            "SELECT n, key, message, target, body FROM {decisions} WHERE n > %b AND job = %b ORDER BY n",
            (after, self.id),
        )
        return [(n, decision(*row)) for n, *row in await found.fetchall()]

    async def beat(self, connection: Connection) -> None:
        """Say that the owner is alive, by the server's clock."""
        await self._execute(connection, f"UPDATE {{workers}} SET beat = now() WHERE {_FENCE}", self._fence)

    async def leave(self, connection: Connection) -> None:
        await self._execute(connection, f"UPDATE {{workers}} SET beat = NULL WHERE {_FENCE}", self._fence)

    async def _execute(self, connection: Connection, statement: str, values: Sequence[Any]) -> Any:
        return await connection.execute(self.settings.statement(statement), values, binary=True)


async def take(connection: Connection, settings: Settings, job: str, owner: str, worker: Worker, opening: str) -> Job:
    """Begin a new epoch of *job*; once, however often this is done with the same *opening*."""
    await migrate(connection, settings)
    name, since = text(job), datetime.now().astimezone().isoformat(timespec="seconds")
    me = (text(owner), os.getpid(), text(socket.gethostname()), since)
    async with connection.transaction():
        await connection.execute(WAITING)
        await connection.execute(
            settings.statement(
                "INSERT INTO {jobs} (name, name_digest, identity, epoch, pruned_through) VALUES (%b, %b, %b, 0, 0)"
                " ON CONFLICT DO NOTHING"
            ),
            (name, digest(name), uuid4().hex),
        )
        found = await connection.execute(
            settings.statement(
                "UPDATE {jobs} SET epoch = epoch + (opening IS DISTINCT FROM %b::text)::integer, opening = %b,"
                " owner = %b, pid = %b, host = %b, since = %b WHERE name_digest = %b"
                " RETURNING id, identity, epoch, pruned_through"
            ),
            (opening, opening, *me, digest(name)),
        )
        row: Any = await found.fetchone()
        number, identity, epoch, pruned_through = row
        taken = Job(settings, job, number, identity, epoch, pruned_through, worker)
        await connection.execute(
            settings.statement("DELETE FROM {workers} WHERE job = %b AND of <> %b"), (taken.id, worker.of)
        )
        await connection.execute(
            settings.statement(
                "INSERT INTO {workers} (job, index, of, epoch, put, pruned, removed, beat)"
                " VALUES (%b, %b, %b, %b, 0, 0, 0, now()) ON CONFLICT (job, index) DO UPDATE SET"
                " of = EXCLUDED.of, epoch = EXCLUDED.epoch, put = 0, pruned = 0, removed = 0, beat = now()"
            ),
            (taken.id, worker.index, worker.of, taken.epoch),
        )
    return taken


def decision(key: bytes, message: bytes, target: bytes, body: bytes) -> Decision:
    return Decision(key, string(message), string(target), body)


def _chunks(records: Sequence[Record]) -> Iterator[list[Any]]:
    rows: list[tuple[bytes, bytes, bytes, bytes]] = []
    size = 0
    for key, message, task, body in records:
        rows.append((key, text(message), text(task), body))
        size += len(key) + len(body) + 100
        if size > CHUNK_BYTES:
            yield _arrays(rows)
            rows, size = [], 0
    if rows:
        yield _arrays(rows)


def _arrays(rows: Sequence[tuple[bytes, bytes, bytes, bytes]]) -> list[Any]:
    return [[place(row[0]) for row in rows], [place(row[1]) for row in rows], *_columns(rows, 4)]


def _columns(rows: Sequence[Sequence[bytes]], number: int) -> list[list[bytes]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(number)]


def _number(row: tuple[int, ...]) -> int:
    return row[0]
