"""Which columns of a checkpoint file hold payloads, and how they are sealed.

What stays in clear is what the runner finds rows by, and counts: the job, the agent's name, the store's identity, the
numbers of checkpoints and messages, message keys and ids, how ids are made, and whether a message is parked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dalsegno.cipher import PayloadCipher, place, seal, unseal

Row = tuple[Any, ...]


class _Table(NamedTuple):
    names: int
    """Columns at the beginning of a row that name it: what is sealed in the row is bound to those that are not NULL."""
    payloads: dict[int, tuple[str, type]]
    """Name and type, text or bytes, of each column that is sealed, by its number."""


_TABLES = {
    "checkpoint": _Table(2, {2: ("position", str), 3: ("sink", str)}),
    "memory": _Table(1, {1: ("tree", bytes)}),
    "inbox": _Table(3, {3: ("content", bytes), 4: ("parked", str)}),
    "covered": _Table(2, {2: ("content", str)}),
    "bad_input": _Table(1, {1: ("place", str), 2: ("reason", str), 3: ("raw", bytes)}),
    "seal": _Table(0, {0: ("proof", str)}),
}


class SealedRows:
    """Seals and opens the rows of one job's checkpoint file, which messages call *where*.

    Each payload is bound to the job, the identity of its store, the table, the column, and what names the row.
    """

    def __init__(self, cipher: PayloadCipher, job: str, store: str, where: str) -> None:
        self._cipher = cipher
        self._job = place("checkpoint file", job, store)
        self._where = where

    def seal(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """*rows* with their payloads sealed; NULL stays. Raises `StoreError` if the cipher fails."""
        return [self._sealed(table, row) for row in rows]

    def open(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """*rows* as they were given to `seal`. Raises `RecordError` that names table and row."""
        return [self._opened(table, row) for row in rows]

    def _sealed(self, table: str, row: Row) -> Row:
        columns = list(row)
        for number, (name, _) in _TABLES[table].payloads.items():
            value = row[number]
            if value is not None:
                plain = value if isinstance(value, bytes) else value.encode(errors="surrogatepass")
                columns[number] = seal(self._cipher, plain, self._place(table, name, row))
        return tuple(columns)

    def _opened(self, table: str, row: Row) -> Row:
        columns = list(row)
        for number, (name, kind) in _TABLES[table].payloads.items():
            if row[number] is not None:
                where = f"{self._where}: {name!r} of row {row_name(table, row)} of the table {table!r}"
                plain = unseal(self._cipher, row[number], self._place(table, name, row), where)
                columns[number] = plain if kind is bytes else plain.decode(errors="surrogatepass")
        return tuple(columns)

    def _place(self, table: str, column: str, row: Row) -> bytes:
        names = [name if isinstance(name, bytes) else str(name) for name in _names(table, row)]
        return self._job + place(table, column, *names)


def _names(table: str, row: Row) -> list[Any]:
    return [name for name in row[: _TABLES[table].names] if name is not None]


def row_name(table: str, row: Row) -> str:
    """What messages call a row by."""
    names = _names(table, row)
    return ", ".join(name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names) or "1"
