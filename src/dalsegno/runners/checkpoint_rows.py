"""What is read from a checkpoint file: each row becomes what was written, or a `RecordError` that names it.

SQLite keeps any value in any column, so nothing here relies on the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from dalsegno.core import codec
from dalsegno.errors import CodecError, RecordError
from dalsegno.memory import Node, from_json
from dalsegno.runners.sealed_rows import Row, row_name
from dalsegno.stores.sqlite_schema import string

_T = TypeVar("_T")

Head = tuple[int, int, dict[str, Any] | None, dict[str, Any], str, int]
"""The number of a checkpoint, how many records were read, the position after them, the state of the sink, how ids of
messages are made, and how many numbers were given as ids."""


class RowReader:
    """Reads rows of the checkpoint file that messages call *where*."""

    def __init__(self, where: str) -> None:
        self._where = where

    def head(self, rows: Sequence[Row], inbox: Row) -> Head | None:
        """The checkpoint, None if there is none yet. *inbox* holds the least and the greatest ordinal in the inbox."""
        if not rows:
            if inbox != (None, None):
                raise self._damaged("the table 'checkpoint' is empty, but the inbox is not")
            return None
        if len(rows) > 1:
            raise self._damaged(f"the table 'checkpoint' has {len(rows)} rows instead of one")
        with self._reading("checkpoint", rows[0]):
            number, read, position, sink, ids, numbered = rows[0]
            counts = _count(number, "number"), _count(read, "read")
            where = _position(position, read), _object(sink, "sink")
            head = *counts, *where, _of_type(ids, str, "ids"), _count(numbered, "numbered")
        first, last = inbox
        if ids == "position" and first is not None and not 0 <= first <= last < read:
            raise self._damaged(
                f"the table 'inbox' holds message {first if first < 0 else last} of {read} that were read"
            )
        return head

    def memory(self, row: Row) -> tuple[bytes, Node]:
        """A key and its memory."""
        with self._reading("memory", row):
            key, tree = row
            memory: Any = codec.loads(_of_type(tree, bytes, "tree"))
            return _key(key), from_json(memory)

    def inbox(self, row: Row) -> tuple[int, bytes, Any, str | None, str | None]:
        """Ordinal, key and content of a message, why it is parked, and its id if that is not its ordinal."""
        with self._reading("inbox", row):
            ordinal, key, message, content, parked = row
            if parked is not None:
                _of_type(parked, str, "parked")
            named = None if message is None else string(message)
            return ordinal, _key(key), codec.loads(_of_type(content, bytes, "content")), parked, named

    def covered(self, row: Row) -> tuple[bytes, str, str | None]:
        """Key, id and fingerprint of a message that the checkpoint covers."""
        with self._reading("covered", row):
            key, message, content = row
            if content is not None:
                _of_type(content, str, "content")
            return _key(key), string(message), content

    def bad_input(self, row: Row) -> tuple[int, str, str, str]:
        """Ordinal, place, reason and text of a record that was set aside."""
        with self._reading("bad_input", row):
            ordinal, place, reason, raw = row
            text = _of_type(raw, bytes, "raw").decode("utf-8", "surrogatepass")
            return ordinal, _of_type(place, str, "place"), _of_type(reason, str, "reason"), text

    @contextmanager
    def _reading(self, table: str, row: Row) -> Iterator[None]:
        try:
            yield
        except (_WrongValue, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = str(error)
            if not isinstance(error, (CodecError, _WrongValue)):
                reason = f"it is not what is written there ({type(error).__name__}: {reason})"
            raise self._damaged(f"row {row_name(table, row)} of the table {table!r}: {reason}") from error

    def _damaged(self, what: str) -> RecordError:
        return RecordError(f"{self._where} is damaged: {what}; put a copy of it back")


class _WrongValue(Exception):
    """A column holds what is never written there."""


def _of_type(value: object, kind: type[_T], column: str) -> _T:
    if type(value) is not kind:
        raise _WrongValue(f"{column!r} is {_shown(value)}, not {kind.__name__}")
    return value


def _count(value: object, column: str) -> int:
    if not (type(value) is int and value >= 0):
        raise _WrongValue(f"{column!r} is {_shown(value)}, not a number from 0 on")
    return value


def _object(text: object, column: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _WrongValue(f"{column!r} is {_shown(text)}, not a JSON object")
    return found


def _position(text: object, read: int) -> dict[str, Any] | None:
    # Without it the input would be read from its start again.
    if (text is None) is not (read == 0):
        raise _WrongValue(f"'position' is {_shown(text)}, but {read} records were read")
    return None if text is None else _object(text, "position")


def _key(key: object) -> bytes:
    data = _of_type(key, bytes, "key")
    codec.decode(data)
    return data


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
