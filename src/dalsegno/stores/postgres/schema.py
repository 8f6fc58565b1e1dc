"""The tables of a PostgreSQL store, numbered migrations, and what each role needs.

``jobs`` has the epoch and the latest pruned checkpoint of each job, ``workers`` who may write and the numbers of the
last writes, ``records`` the records in the order in which they were put, ``decisions`` what was decided about them.

Names, keys and ids are ``bytea``: text in PostgreSQL holds neither NUL nor lone surrogates. An index entry has no
room for a long key, so indexes hold the hashes that `places` makes, and every query compares the whole key as well.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import psycopg
from psycopg import errors as failures

from dalsegno.errors import RecordError
from dalsegno.stores.postgres.settings import Settings

SCHEMA_VERSION = 1
_STEPS = (
    (
        "CREATE TABLE {migrations} (version integer PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())",
        """CREATE TABLE {jobs} (
            id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name bytea NOT NULL, name_digest bytea NOT NULL UNIQUE,
            identity text NOT NULL, epoch bigint NOT NULL, opening text, owner bytea, pid bigint, host bytea,
            since text, pruned_through bigint NOT NULL) WITH (fillfactor = 50)""",
        # Each write changes a row of this table in place: half of each page is left for that.
        """CREATE TABLE {workers} (
            job integer NOT NULL, index integer NOT NULL, of integer NOT NULL, epoch bigint NOT NULL,
            put bigint NOT NULL, pruned bigint NOT NULL, removed bigint NOT NULL, beat timestamptz,
            PRIMARY KEY (job, index)) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000)""",
        # The defaults wait until a fifth of the table is dead, which a table that empties at each checkpoint outgrows.
        """CREATE TABLE {records} (
            n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job integer NOT NULL, key_hash bigint NOT NULL,
            message_hash bigint NOT NULL, key bytea NOT NULL, message bytea NOT NULL, task bytea NOT NULL,
            body bytea NOT NULL)
            WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0,
                toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 1000,
                toast.autovacuum_vacuum_cost_delay = 0)""",
        "CREATE INDEX records_of_message ON {records} (job, key_hash, message_hash)",
        """CREATE TABLE {decisions} (
            n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job integer NOT NULL, key_hash bigint NOT NULL,
            message_hash bigint NOT NULL, target_digest bytea NOT NULL, key bytea NOT NULL, message bytea NOT NULL,
            target bytea NOT NULL, body bytea NOT NULL, UNIQUE (job, key_hash, message_hash, target_digest))""",
    ),
)
"""What makes each schema version of the one before it."""

WORKER_GRANTS = (
    "GRANT USAGE ON SCHEMA {schema} TO {role}",
    "GRANT SELECT ON {migrations}, {decisions} TO {role}",
    "GRANT SELECT, INSERT, UPDATE ON {jobs} TO {role}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON {workers} TO {role}",
    "GRANT SELECT, INSERT, DELETE ON {records} TO {role}",
    "GRANT DELETE ON {decisions} TO {role}",
)
"""What a role needs to run jobs, once the owner of the schema has migrated it."""
INSPECTOR_GRANTS = (
    "GRANT USAGE ON SCHEMA {schema} TO {role}",
    "GRANT SELECT ON {migrations}, {jobs}, {workers}, {records}, {decisions} TO {role}",
    "GRANT INSERT ON {decisions} TO {role}",
)
"""What a role needs to look in and to decide."""

LOCKS = 0x44534753
"""The space of this library's advisory locks: 0 is that of migrations, others are the numbers of jobs."""
WAITING = "SET LOCAL idle_in_transaction_session_timeout = '20s'"
"""In a transaction of several statements: a client that stops half-way must not hold its locks for ever."""


def text(string: str) -> bytes:
    """*string*, lone surrogates and all."""
    return string.encode("utf-8", "surrogatepass")


def string(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def place(value: bytes) -> int:
    """The hash of a key or a message in an index."""
    return int.from_bytes(blake2b(value, digest_size=8).digest(), "big", signed=True)


def digest(*parts: bytes) -> bytes:
    """Tells *parts* from all others, for an index that must be unique."""
    state = blake2b(digest_size=24)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


async def migrate(connection: psycopg.AsyncConnection[Any], settings: Settings) -> None:
    """Make or migrate the tables, whoever else is about to do the same.

    Raises `RecordError` if a newer version of this library has migrated them.
    """
    if await _version(connection, settings) == SCHEMA_VERSION:
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (LOCKS,))
        found = await _version(connection, settings)
        if found is None:
            await _make_schema(connection, settings)
        for version in range((found or 0) + 1, SCHEMA_VERSION + 1):
            for statement in _STEPS[version - 1]:
                await connection.execute(settings.statement(statement))
            await connection.execute(settings.statement("INSERT INTO {migrations} VALUES (%s)"), (version,))


async def _make_schema(connection: psycopg.AsyncConnection[Any], settings: Settings) -> None:
    # Asked first: IF NOT EXISTS wants the right to create one even if there is one.
    found = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (settings.schema,))
    if await found.fetchone() is None:
        await connection.execute(settings.statement("CREATE SCHEMA {schema}"))


async def _version(connection: psycopg.AsyncConnection[Any], settings: Settings) -> int | None:
    try:
        async with connection.transaction():
            found = await connection.execute(settings.statement("SELECT max(version) FROM {migrations}"))
            return checked_version(await found.fetchone(), settings)
    except (failures.UndefinedTable, failures.InvalidSchemaName):
        return None


def checked_version(row: Any, settings: Settings) -> int:
    version = int(row[0] or 0)
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"the tables in {settings} have schema version {version}; this version of dalsegno knows up to"
            f" {SCHEMA_VERSION}: install the version that migrated them, or a newer one"
        )
    return version
