"""What a checkpoint file keeps beside its last checkpoint. Everything here is inside a transaction of the caller.

Checkpoints are incremental, so an older one is kept as what was there *before* the next one changed it: its row of
``checkpoint``, and the rows of ``memory`` and ``inbox``. Going back puts those back, newest first. Rows move between
tables as they are, sealed or not: what is sealed in them is bound to what names it, which stays.

``finished`` has the messages that a checkpoint was the first to cover and that are kept in the store; ``pruned`` are
those that are not in the store any more, but belong to the oldest checkpoint that can be restored.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from dalsegno.runners.sealed_rows import Row
from dalsegno.stores.sqlite_schema import text

SCHEMA = """
CREATE TABLE taken (number INTEGER PRIMARY KEY, at REAL NOT NULL, pruned INTEGER NOT NULL);
CREATE TABLE kept (
    number INTEGER PRIMARY KEY, read INTEGER NOT NULL, position TEXT, sink TEXT NOT NULL, ids TEXT NOT NULL,
    numbered INTEGER NOT NULL
);
CREATE TABLE memory_before (
    number INTEGER NOT NULL, key BLOB NOT NULL, tree BLOB, PRIMARY KEY (number, key)
) WITHOUT ROWID;
CREATE TABLE inbox_before (
    number INTEGER NOT NULL, ordinal INTEGER NOT NULL, key BLOB, message, content BLOB, parked TEXT,
    PRIMARY KEY (number, ordinal)
) WITHOUT ROWID;
CREATE TABLE finished (
    n INTEGER PRIMARY KEY, number INTEGER NOT NULL, at REAL NOT NULL, key BLOB NOT NULL, message NOT NULL, content TEXT,
    pruned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX finished_by_message ON finished (key, message);
"""
_ROWS = (512, 32, 1)


class FinishedMessage(NamedTuple):
    """A message that a checkpoint covers and the store may have. *at* is when, in seconds since 1970."""

    n: int
    number: int
    at: float
    key: bytes
    message: str
    pruned: bool


def remember(connection: sqlite3.Connection, keys: Sequence[bytes], ordinals: Collection[int]) -> None:
    """Keep the present checkpoint: the next one changes the memory of *keys* and the inbox at *ordinals*."""
    row = connection.execute("SELECT number FROM checkpoint").fetchone()
    if row is None:
        return
    number = int(row[0])
    connection.execute("INSERT INTO kept SELECT * FROM checkpoint")
    write(
        connection,
        f"INSERT INTO memory_before SELECT {number}, column1, (SELECT tree FROM memory WHERE key = column1)"
        " FROM (VALUES {})",
        [(key,) for key in keys],
    )
    write(
        connection,
        f"INSERT INTO inbox_before SELECT {number}, column1, key, message, content, parked"
        " FROM (VALUES {}) LEFT JOIN inbox ON ordinal = column1",
        [(ordinal,) for ordinal in ordinals],
    )
    # Of a checkpoint that was taken when none was kept, what it covers is listed elsewhere, and is not in the store.
    connection.execute(
        "INSERT INTO finished (number, at, key, message, content, pruned) SELECT ?1, 0, key, message, content, 1"
        " FROM covered WHERE NOT EXISTS (SELECT 1 FROM finished WHERE number = ?1)",
        (number,),
    )


def finish(connection: sqlite3.Connection, number: int, at: float, covered: Sequence[Row]) -> None:
    """Note the messages, as rows of ``covered``, that checkpoint *number* is the first to cover."""
    write(
        connection,
        f"INSERT INTO finished (number, at, key, message, content) SELECT {number}, {at!r}, * FROM (VALUES {{}})",
        covered,
    )


def trim(connection: sqlite3.Connection, oldest: int) -> None:
    """Forget the checkpoints before *oldest*."""
    for table in ("kept", "memory_before", "inbox_before"):
        connection.execute(f"DELETE FROM {table} WHERE number < ?", (oldest,))
    connection.execute("DELETE FROM finished WHERE pruned AND number < ?", (oldest,))


def go_back(connection: sqlite3.Connection, number: int) -> None:
    """Make the kept checkpoint *number* the last one, and forget those after it."""
    ((last,),) = connection.execute("SELECT number FROM checkpoint")
    for before in range(last - 1, number - 1, -1):
        _put_back(connection, before)
    connection.execute("DELETE FROM checkpoint")
    connection.execute("INSERT INTO checkpoint SELECT * FROM kept WHERE number = ?", (number,))
    connection.execute("DELETE FROM bad_input WHERE ordinal >= (SELECT read FROM checkpoint)")
    connection.execute("DELETE FROM covered")
    connection.execute(
        "INSERT INTO covered SELECT key, message, content FROM finished"
        " WHERE number = ? AND (SELECT ids FROM checkpoint) <> 'position'",
        (number,),
    )
    for table in ("kept", "memory_before", "inbox_before"):
        connection.execute(f"DELETE FROM {table} WHERE number >= ?", (number,))
    for table in ("taken", "finished"):
        connection.execute(f"DELETE FROM {table} WHERE number > ?", (number,))


def _put_back(connection: sqlite3.Connection, number: int) -> None:
    connection.execute(
        "DELETE FROM memory WHERE key IN (SELECT key FROM memory_before WHERE number = ?)",
        (number,),
    )
    connection.execute(
        "INSERT INTO memory SELECT key, tree FROM memory_before WHERE number = ? AND tree IS NOT NULL",
        (number,),
    )
    connection.execute(
        "DELETE FROM inbox WHERE ordinal IN (SELECT ordinal FROM inbox_before WHERE number = ?)",
        (number,),
    )
    connection.execute(
        "INSERT INTO inbox (ordinal, key, message, content, parked) SELECT ordinal, key, message, content, parked"
        " FROM inbox_before WHERE number = ? AND key IS NOT NULL",
        (number,),
    )


def oldest(connection: sqlite3.Connection) -> int:
    """The number of the oldest checkpoint that can be restored."""
    return int(
        connection.execute(
            "SELECT min(number) FROM (SELECT number FROM kept UNION ALL SELECT number FROM checkpoint)"
        ).fetchone()[0]
    )


def first_finished(connection: sqlite3.Connection, limit: int) -> Sequence[Row]:
    """Up to *limit* messages that are in the store, those first that were covered first."""
    return connection.execute(
        "SELECT n, number, at, key, message, pruned FROM finished WHERE NOT pruned ORDER BY n LIMIT ?", (limit,)
    ).fetchall()


def find_finished(connection: sqlite3.Connection, key: bytes, message: str) -> Row | None:
    row: Row | None = connection.execute(
        "SELECT n, number, at, key, message, pruned FROM finished WHERE key = ? AND message = ?"
        " ORDER BY n DESC LIMIT 1",
        (key, text(message)),
    ).fetchone()
    return row


def mark_pruned(connection: sqlite3.Connection, numbers: Sequence[int], oldest: int) -> None:
    """The messages, by their *n*, are not in the store any more; *oldest* is the oldest checkpoint that is kept."""
    rows = [(n,) for n in numbers]
    write(connection, f"DELETE FROM finished WHERE number < {oldest} AND (n) IN (VALUES {{}})", rows)
    write(connection, "UPDATE finished SET pruned = 1 WHERE (n) IN (VALUES {})", rows)


def write(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Run *statement* with many rows at a time.

    Each step of a statement waits for the interpreter lock, which costs up to 5 ms beside a busy event loop. Few sizes,
    because each makes a statement that SQLite keeps prepared.
    """
    start = 0
    for size in _ROWS:
        while len(rows) - start >= size:
            chunk = rows[start : start + size]
            row = f"({', '.join('?' * len(chunk[0]))})"
            values = list(itertools.chain.from_iterable(chunk))
            connection.execute(statement.format(", ".join([row] * size)), values)
            start += size
