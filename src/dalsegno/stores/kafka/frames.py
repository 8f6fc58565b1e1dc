"""What the messages of a topic hold. Nothing here does I/O.

A write puts one *blob* into each partition that it concerns, cut into *pieces* that the broker takes, one message each.
All pieces of all blobs of a write are in one transaction, so none is ever seen without the others. A piece is::

    magic "dalsegno", version, kind, epoch of the writer, number of its write, number of the piece, number of pieces

and then bytes of the blob. A blob of kind RECORDS is a list of records, each with its place in the order in which
records were put; one of COVERED a list of messages that a checkpoint covers: what is recorded of them *before* it in
the partition is gone. One of CONTROL is JSON, see ``control``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from dalsegno.core.records import Record
from dalsegno.errors import RecordError

MAGIC = b"dalsegno"
VERSION = 1
RECORDS, COVERED, CONTROL = 1, 2, 3
_KINDS = (RECORDS, COVERED, CONTROL)

_HEADER = struct.Struct(">8sBBQQII")
HEADER_BYTES = _HEADER.size
_RECORD = struct.Struct(">QIIII")
_MESSAGE = struct.Struct(">II")


class Placed(NamedTuple):
    """A record and its place among all that were put: *order* of its write, and what it is within that."""

    order: int
    record: Record


class Piece(NamedTuple):
    """One message of a topic."""

    kind: int
    epoch: int
    write: int
    number: int
    of: int
    payload: bytes


class Blob(NamedTuple):
    """What one write put into one partition. *offset* is that of its first piece, *end* follows that of its last."""

    offset: int
    end: int
    kind: int
    epoch: int
    write: int
    payload: bytes


class Foreign(Exception):
    """A message that no store has written; says why."""


def partition_of(key: bytes, partitions: int) -> int:
    """Which of *partitions* holds the records of *key*, from 0: BLAKE2b of 8 bytes, big-endian, modulo their number.

    It is part of the format, and no client library has a say in it.
    """
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") % partitions


def encode_records(placed: Iterable[Placed]) -> bytes:
    parts: list[bytes] = []
    for order, (key, message, task, body) in placed:
        name, of = _encoded(message), _encoded(task)
        parts += (_RECORD.pack(order, len(key), len(name), len(of), len(body)), key, name, of, body)
    return b"".join(parts)


def decode_records(blob: bytes) -> Iterator[Placed]:
    """The records of a blob; raises `RecordError` if it holds anything else."""
    at, size = 0, len(blob)
    while at < size:
        try:
            order, key, message, task, body = _RECORD.unpack_from(blob, at)
        except struct.error:
            raise RecordError(f"{size - at} bytes are left where a record should begin") from None
        a = at + _RECORD.size
        b = a + key
        c = b + message
        d = c + task
        at = d + body
        if at > size:
            raise RecordError(f"a record ends {at - size} bytes beyond the end")
        yield Placed(order, Record(blob[a:b], _decoded(blob[b:c]), _decoded(blob[c:d]), blob[d:at]))


def encode_messages(messages: Iterable[tuple[bytes, str]]) -> bytes:
    parts: list[bytes] = []
    for key, message in messages:
        name = _encoded(message)
        parts += (_MESSAGE.pack(len(key), len(name)), key, name)
    return b"".join(parts)


def decode_messages(blob: bytes) -> Iterator[tuple[bytes, str]]:
    at, size = 0, len(blob)
    while at < size:
        try:
            key, message = _MESSAGE.unpack_from(blob, at)
        except struct.error:
            raise RecordError(f"{size - at} bytes are left where a message should begin") from None
        begin = at + _MESSAGE.size
        at = begin + key + message
        if at > size:
            raise RecordError(f"a message ends {at - size} bytes beyond the end")
        yield blob[begin : begin + key], _decoded(blob[begin + key : at])


def pieces(kind: int, epoch: int, write: int, blob: bytes, largest: int) -> Iterator[bytes]:
    """The values of the messages for *blob*, none with more than *largest* bytes."""
    room = largest - HEADER_BYTES
    of = max(-(-len(blob) // room), 1)
    for number in range(of):
        header = _HEADER.pack(MAGIC, VERSION, kind, epoch, write, number, of)
        yield header + blob[number * room : (number + 1) * room]


def read_piece(value: bytes | None) -> Piece:
    """Raises `Foreign` for what no store has written, `RecordError` for what a newer one has."""
    if value is None:
        raise Foreign("it is a tombstone, without a value")
    if len(value) < HEADER_BYTES or not value.startswith(MAGIC):
        raise Foreign(f"it is not a message of this library: {value[:40]!r}")
    _, version, kind, epoch, write, number, of = _HEADER.unpack_from(value)
    if version > VERSION:
        raise RecordError(
            f"it has format version {version}; this version of dalsegno reads up to {VERSION}: install the version that"
            " wrote it, or a newer one"
        )
    if version < 1 or kind not in _KINDS or not number < of:
        raise Foreign(f"it is damaged: version {version}, kind {kind}, piece {number} of {of}")
    return Piece(kind, epoch, write, number, of, value[HEADER_BYTES:])


class Assembler:
    """Puts the pieces of one partition together. Pieces of several writers may lie between one another."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int, int], list[bytes]] = {}
        self._begins: dict[tuple[int, int, int], int] = {}

    @property
    def begin(self) -> int | None:
        """The offset of the first piece of a blob that is not whole yet."""
        return min(self._begins.values(), default=None)

    def add(self, offset: int, piece: Piece) -> Blob | None:
        """The blob that *piece* completes. Raises `Foreign` for a piece that does not follow the one before it.

        A blob whose first pieces were deleted, since all that it held is covered, is none.
        """
        which = (piece.kind, piece.epoch, piece.write)
        if piece.number == 0:
            self._parts[which], self._begins[which] = [], offset
        parts = self._parts.get(which)
        if parts is None:
            return None
        if len(parts) != piece.number:
            raise Foreign(f"piece {piece.number} of {piece.of} follows piece {len(parts) - 1}")
        parts.append(piece.payload)
        if len(parts) < piece.of:
            return None
        del self._parts[which]
        begin = self._begins.pop(which)
        return Blob(begin, offset + 1, piece.kind, piece.epoch, piece.write, b"".join(parts))


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _decoded(stored: bytes) -> str:
    return stored.decode(errors="surrogatepass")
