"""From bytes to input records: the lines of files and pipes, CSV rows, JSON values, and what is wrong with them.

A line ends with a newline byte and nothing else; the last one may lack it. Positions in files are byte offsets with the
line number and a digest of the last 4,096 bytes before the offset, which tell whether a file is still the same.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dalsegno.errors import InputError, RestoreError

TAIL_BYTES = 4096
READ_BYTES = 1 << 18
_PIPE_READ = 1 << 16
_RAW_CHARS = 2000
_BLANK_STARTS = b" \t\r\n\v\f" + codecs.BOM_UTF8[:1]

_UNREADABLE_STARTS = {
    codecs.BOM_UTF16_LE: "it is UTF-16; convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16; convert it to UTF-8",
    b"\x1f\x8b": "it is compressed with gzip; decompress it, or pipe `gzip -dc` into the source '-'",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet; export it as JSON Lines or CSV",
}

PUT_BACK = "It is not the file that this job has read: give the job a new name, or put the file back."


@dataclass(frozen=True, slots=True)
class BadInput:
    """The value of an input record that cannot be read."""

    where: str
    """Source and place, such as ``reviews.jsonl, line 17`` (lines count from 1)."""
    reason: str
    raw: str
    """The first 2,000 characters of the record, with U+FFFD for what is not UTF-8."""


class FileLines:
    """The physical lines of a file, with the offset, line number and last bytes at the end of the latest one."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.offset = 0
        self.line = 0
        self.ended = False
        self._tail = b""
        self._file = file
        self._name = name
        _refuse_start(file.read(4), name)
        file.seek(0)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            raw = self._file.readline()
        except OSError as error:
            raise InputError(f"{self._name!r} cannot be read at byte {self.offset:,}: {error}.") from error
        if not raw:
            self._end()
            raise StopIteration
        self.line += 1
        self._pass(raw)
        return raw

    def position(self, ordinal: int) -> dict[str, Any]:
        return {"offset": self.offset, "ordinal": ordinal, "line": self.line, "tail": digest(self._tail)}

    def go_on_at(self, position: dict[str, Any]) -> int:
        """Move to a position if the file is still the one it was taken from; return the number of the next record."""
        offset, line, ordinal = (count_in(position, key, self._name) for key in ("offset", "line", "ordinal"))
        size = os.fstat(self._file.fileno()).st_size
        at = f"This job has read {self._name!r} up to byte {offset:,} (line {line:,})"
        if size < offset:
            raise RestoreError(f"{at}, but the file has only {size:,} bytes now. {PUT_BACK}")
        self._file.seek(max(0, offset - TAIL_BYTES))
        tail = self._file.read(min(offset, TAIL_BYTES))
        if (found := digest(tail)) != (wanted := position.get("tail")):
            raise RestoreError(
                f"{at}, but the {len(tail):,} bytes before that place are not what it read there "
                f"(digest wanted {wanted!r}, found {found!r}). {PUT_BACK}"
            )
        self.offset, self.line, self._tail = offset, line, tail
        written_on = size > offset if position.get("half") else not self._ends_line()
        if written_on:
            raise RestoreError(
                f"{at} when its last line was half written; the line has been written on since, so going on would read "
                "its second half as a record. Give the job a new name to read the file from its start."
            )
        return ordinal

    def _ends_line(self) -> bool:
        """Whether a record ended here; pass the newline that a last line has got since it was read."""
        if not self._tail or self._tail.endswith(b"\n"):
            return True
        rest = self._file.readline()
        self._pass(rest)
        return not rest.strip(b"\r\n")

    def _pass(self, raw: bytes) -> None:
        self.offset += len(raw)
        self._tail = raw[-TAIL_BYTES:] if len(raw) >= TAIL_BYTES else (self._tail + raw)[-TAIL_BYTES:]

    def _end(self) -> None:
        self.ended = True
        if (size := os.fstat(self._file.fileno()).st_size) < self.offset:
            raise InputError(
                f"{self._name!r} has shrunk to {size:,} bytes while it was read up to byte {self.offset:,}; records may"
                " be lost. Append to an input file or put a new one beside it, but do not rewrite one that a job reads."
            )


class CsvRows:
    """The rows of a CSV file; after each, its first line, raw lines and flaw, and whether the file ends within it."""

    def __init__(self, lines: FileLines, delimiter: str) -> None:
        self.first_line = 0
        self.raw: list[bytes] = []
        self.flaw = ""
        self.half = False
        self._lines = lines
        self._reader = csv.reader(self._texts(), delimiter=delimiter, strict=True)

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        self.first_line, self.raw, self.flaw = self._lines.line + 1, [], ""
        try:
            return next(self._reader)
        except csv.Error as error:
            self.half = self._lines.ended
            self.flaw = "the file ends within a quoted field" if self.half else f"it is not CSV: {error}"
            return []

    def _texts(self) -> Iterator[str]:
        for raw in self._lines:
            text = raw.removeprefix(codecs.BOM_UTF8) if self._lines.line == 1 else raw
            self.raw.append(raw)
            try:
                yield text.decode()
            except UnicodeDecodeError as error:
                self.flaw = _not_utf8(error)
                yield text.decode(errors="replace")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Opening anything else could wait for ever, so that is looked at first."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.open("rb", buffering=READ_BYTES)
    except OSError as error:
        raise InputError(f"The input file {str(path)!r} cannot be opened: {error.strerror}.") from error
    kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device, which cannot be read on from a position"
    raise InputError(f"The input {str(path)!r} is {kind}. Give a regular file, or '-' to read standard input.")


def _refuse_start(start: bytes, name: str) -> None:
    for magic, advice in _UNREADABLE_STARTS.items():
        if start.startswith(magic):
            raise InputError(f"{name!r} cannot be read as text: {advice}.")


def is_blank(raw: bytes) -> bool:
    return raw[:1] in _BLANK_STARTS and not raw.removeprefix(codecs.BOM_UTF8).strip()


def read_json(raw: bytes, name: str, line: int) -> object:
    """Read a line as one JSON value, exactly; a byte order mark before it is passed over."""
    try:
        return json.loads(raw.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        reason = _not_utf8(error)
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {error.msg}, at character {error.pos + 1}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    return BadInput(f"{name}, line {line}", reason, raw_text(raw))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"it is not UTF-8: byte {error.object[error.start]:#04x}, number {error.start + 1} of the line"


def raw_text(raw: bytes) -> str:
    """Show a bad record: its first 2,000 characters (none takes more than four bytes)."""
    return raw[: 4 * _RAW_CHARS].rstrip(b"\r\n").decode(errors="replace")[:_RAW_CHARS]


def digest(data: bytes) -> str:
    """Digest the last 4,096 bytes: 32 hexadecimal digits of their SHA-256."""
    return hashlib.sha256(data[-TAIL_BYTES:]).hexdigest()[:32]


def count_in(position: dict[str, Any], key: str, name: str, *, other: str = "source was read") -> int:
    """Take a count from a position that may have been taken from another kind of source, or sink: *other*."""
    value = position.get(key)
    if type(value) is not int or value < 0:
        raise RestoreError(
            f"The position {position!r} was not taken from {name!r}: it needs a number {key!r}. Another kind of "
            f"{other} under this job name; go on with that one, or give the job a new name."
        )
    return value


def pipe_lines(read: Callable[[int], bytes], name: str) -> Iterator[list[bytes]]:
    """Give out lines as they arrive, all that each read completes; the pieces of a long line are joined once."""
    pieces: list[bytes] = []
    fresh = True
    while chunk := _read_some(read, name):
        if fresh:
            _refuse_start(chunk, name)
            fresh = False
        pieces.append(chunk)
        if b"\n" in chunk:
            *lines, rest = b"".join(pieces).split(b"\n")
            pieces = [rest]
            yield lines
    yield [b"".join(pieces)]


def _read_some(read: Callable[[int], bytes], name: str) -> bytes:
    try:
        return read(_PIPE_READ)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error}.") from error
