"""Where the input records of a job come from, and how reading goes on after a crash.

A source numbers its records from 0 and hands each out with a *position*: a JSON-able dict, kept in the checkpoint, from
which a later process goes on with the very next record. For every item: reading on from ``item.position`` gives exactly
the items that followed it. A record that cannot be read is an item too (its value is a :class:`BadInput`), so that it
takes a number and one bad line does not stop a job; blank lines take none.

What reading goes on *in* must be what was read before, else :class:`~dalsegno.errors.RestoreError`:

* a file must still be as long as what was read of it, with the same last 4,096 bytes before that place (earlier bytes
  are not compared). It may have grown: a second run goes on where the first one ended. A last line without a newline
  counts as complete; if it has been written on since, reading does not go on;
* standard input and iterables must bring the same records from the start again, in the same order; those already read
  are skipped.

JSON is read as :func:`json.loads` reads it (integers exactly, ``NaN`` accepted), CSV with :mod:`csv` in strict mode:
a stray quote makes a bad record and never silently merges rows. Files and standard input are read in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, NamedTuple, TypeVar

from dalsegno.errors import DalSegnoError, DefinitionError, InputError, RestoreError
from dalsegno.runners.lines import (
    PUT_BACK,
    READ_BYTES,
    BadInput,
    CsvRows,
    FileLines,
    count_in,
    digest,
    is_blank,
    open_regular,
    pipe_lines,
    raw_text,
    read_json,
)

__all__ = [
    "NO_RECORD",
    "AsyncIterableSource",
    "BadInput",
    "CsvSource",
    "IterableSource",
    "JsonLinesSource",
    "Source",
    "SourceItem",
    "open_source",
]

_T = TypeVar("_T")

_BATCH_ITEMS = 2048
_CSV_FIELD_CHARS = 1 << 26


class _NoRecord:
    def __repr__(self) -> str:
        return "NO_RECORD"


NO_RECORD: Final = _NoRecord()
"""The value of an item that is no record: it only says, with the ordinal of the record before it, where reading is."""


class SourceItem(NamedTuple):
    """One input record: its number in the source (from 0), its value, the position after it, and maybe an id."""

    ordinal: int
    value: object
    position: dict[str, Any]
    id: str | None = None
    """Where the source gives ids: the same whenever the record comes, and another one than any other record's."""
    key: Any = None
    """Where the source gives keys: the message key, the same whenever the record comes."""


class Source(ABC):
    """A supply of input records that can be read on from any position it gave out.

    Reading is sequential: one iteration at a time, ended by :meth:`close`. A source may be opened again after that.
    """

    replays_in_order: ClassVar[bool] = True
    """Whether reading on from a position brings the records in the same order each time.

    A source that merges partitions may set this to False. Reading on from a position must still bring exactly the
    records that were not handed out before it, each partition's in its order; so the position says how far each
    partition is read, and not only how much of all is.
    """
    gives_ids: ClassVar[bool] = False
    """Whether each item has an id; it then names the message, unless the job is given a ``message_id``."""
    gives_keys: ClassVar[bool] = False
    """Whether each item has a key; messages are then partitioned by it, unless the job is given a ``key``."""

    @abstractmethod
    def describe(self) -> str:
        """Name the source for people."""

    @abstractmethod
    def total(self) -> int | None:
        """How much there is to read now: bytes of a file, records of a sequence; None if that cannot be known."""

    @abstractmethod
    def progress(self, position: dict[str, Any] | None) -> int:
        """How much was read at a position, in the unit of :meth:`total`."""

    def lag(self, position: dict[str, Any] | None) -> int | None:
        """How many records were yet to be read at a position, as last known; None for a source that has no such count.

        For sources that others write to while they are read.
        """
        return None

    async def checkpointed(self, position: dict[str, Any]) -> None:  # noqa: B027
        """A checkpoint with this position is complete, so nothing before it is read again. Must not raise or wait."""

    @abstractmethod
    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        """Start reading: at the first record, or at the one after ``position``.

        Raises InputError if the source cannot be read, RestoreError if it is not what ``position`` was taken from; for
        inputs that are read from the start again, while iterating. The iterator raises InputError if reading fails.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of what reading holds. Safe to call at any time and more than once."""


class _FileSource(Source):
    """A regular file that is read by lines; the position is a byte offset with a digest of what precedes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def describe(self) -> str:
        return str(self.path)

    def total(self) -> int | None:
        try:
            return self.path.stat().st_size
        except OSError:
            return None

    def progress(self, position: dict[str, Any] | None) -> int:
        return count_in(position, "offset", self.describe()) if position is not None else 0

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        await self.close()
        starting = asyncio.ensure_future(_in_daemon_thread(self._start, position))
        try:
            return _pump(await asyncio.shield(starting), _in_daemon_thread)
        except asyncio.CancelledError:
            # Its thread goes on and opens the file, which nobody else would close.
            await asyncio.wait([starting])
            if starting.exception() is None:
                await self.close()
            raise

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await _in_daemon_thread(file.close)

    def _start(self, position: dict[str, Any] | None) -> Iterator[list[SourceItem]]:
        file = open_regular(self.path)
        try:
            lines = FileLines(file, str(self.path))
            self._read_head(lines, position)
            ordinal = lines.go_on_at(position) if position is not None else 0
        except BaseException:
            file.close()
            raise
        self._file = file
        return _batched(self._items(lines, ordinal))

    def _read_head(self, lines: FileLines, position: dict[str, Any] | None) -> None:
        """Read what precedes the first record."""

    @abstractmethod
    def _items(self, lines: FileLines, ordinal: int) -> Iterator[SourceItem]:
        """The records that follow, the first of which has the number *ordinal*."""


class _JsonLinesFile(_FileSource):
    def _items(self, lines: FileLines, ordinal: int) -> Iterator[SourceItem]:
        name = self.describe()
        for raw in lines:
            if is_blank(raw):
                continue
            value = read_json(raw, name, lines.line)
            yield SourceItem(ordinal, value, lines.position(ordinal + 1))
            ordinal += 1


class CsvSource(_FileSource):
    """A CSV file with a header row; each record is a dict of column name to text.

    Quoted fields may hold newlines. A row with more or fewer values than the header is a :class:`BadInput`, an empty or
    repeated column name an InputError. A field may have up to 64 Mi characters; opening raises the process-wide
    :func:`csv.field_size_limit` to that.
    """

    def __init__(self, path: str | os.PathLike[str], *, delimiter: str = ",") -> None:
        super().__init__(path)
        self._delimiter = delimiter
        self._columns: list[str] = []

    def _read_head(self, lines: FileLines, position: dict[str, Any] | None) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _CSV_FIELD_CHARS))
        rows = CsvRows(lines, self._delimiter)
        header = next((row for row in rows if row or rows.flaw), [])
        if rows.flaw:
            raise InputError(f"The header row of {self.describe()!r} cannot be read: {rows.flaw}.")
        self._columns = _columns(header, self.describe())
        if position is not None and (wanted := position.get("columns")) != self._columns:
            raise RestoreError(
                f"{self.describe()!r} had the columns {wanted!r} when this job read it, and has {self._columns!r} now. "
                + PUT_BACK
            )

    def _items(self, lines: FileLines, ordinal: int) -> Iterator[SourceItem]:
        rows = CsvRows(lines, self._delimiter)
        for row in rows:
            if not row and not rows.flaw:
                continue
            value = self._value(row, rows)
            position = lines.position(ordinal + 1)
            position["columns"] = self._columns
            if rows.half:
                position["half"] = True
            yield SourceItem(ordinal, value, position)
            ordinal += 1

    def _value(self, row: list[str], rows: CsvRows) -> object:
        columns = self._columns
        if not rows.flaw and len(row) != len(columns):
            rows.flaw = f"the row has {len(row)} values, the header names {len(columns)} columns"
        if rows.flaw:
            return BadInput(f"{self.describe()}, line {rows.first_line}", rows.flaw, raw_text(b"".join(rows.raw)))
        return dict(zip(columns, row, strict=True))


class JsonLinesSource(Source):
    """A file of JSON values, one a line, or with the path ``-`` the same from standard input.

    Standard input has no offset: its position is the number of records read and a digest of the last one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._inner: Source = _JsonLinesStdin() if path == "-" else _JsonLinesFile(path)

    def describe(self) -> str:
        return self._inner.describe()

    def total(self) -> int | None:
        return self._inner.total()

    def progress(self, position: dict[str, Any] | None) -> int:
        return self._inner.progress(position)

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        return await self._inner.open(position)

    async def close(self) -> None:
        await self._inner.close()


class _CountedSource(Source):
    """A source that starts over in each process; the position is the number of records read."""

    def total(self) -> int | None:
        return None

    def progress(self, position: dict[str, Any] | None) -> int:
        return count_in(position, "ordinal", self.describe()) if position is not None else 0

    async def close(self) -> None:
        pass


class _JsonLinesStdin(_CountedSource):
    def describe(self) -> str:
        return "standard input"

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        self.progress(position)
        # An idle pipe blocks the reading thread for ever; a pool's thread would then keep the process from ending.
        return _pump(self._batches(_stdin_reader(), position), _in_daemon_thread)

    def _batches(self, read: Callable[[int], bytes], position: dict[str, Any] | None) -> Iterator[list[SourceItem]]:
        skip, ordinal, line = self.progress(position), 0, 0
        for raws in pipe_lines(read, self.describe()):
            batch = []
            for raw in raws:
                line += 1
                if is_blank(raw):
                    continue
                ordinal += 1
                if ordinal > skip:
                    value = read_json(raw, self.describe(), line)
                    batch.append(SourceItem(ordinal - 1, value, {"ordinal": ordinal, "last": _last(raw)}))
                elif ordinal == skip and position is not None:
                    self._check_last(raw, line, position)
            yield batch
        if ordinal < skip:
            raise _too_few(self.describe(), skip, ordinal)

    def _check_last(self, raw: bytes, line: int, position: dict[str, Any]) -> None:
        if position.get("last", _last(raw)) != _last(raw):
            raise RestoreError(
                f"Record {position['ordinal']} of {self.describe()} (line {line}) is not the one that this job read "
                "there, so the records before it cannot be skipped. Pipe in the same input from its start, or give the "
                "job a new name."
            )


class IterableSource(_CountedSource):
    """The records of a Python iterable, taken on the event loop; use an async iterable for one that waits.

    To go on after a restart it must bring the same records in the same order again: those that were read are skipped by
    their number. A one-shot iterator can be opened once.
    """

    def __init__(self, records: Iterable[object]) -> None:
        self._records = records
        self._spent = False

    def describe(self) -> str:
        return f"an iterable ({type(self._records).__name__})"

    def total(self) -> int | None:
        return len(self._records) if isinstance(self._records, Sized) else None

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        records = iter(self._records)
        self._spent = _use(self._spent, one_shot=records is self._records, name=self.describe())
        return _numbered(_awaitable(records), self.progress(position), self.describe())


class AsyncIterableSource(_CountedSource):
    """The records of an async iterable, under the rules of :class:`IterableSource`. Closing closes a generator."""

    def __init__(self, records: AsyncIterable[object]) -> None:
        self._records = records
        self._spent = False
        self._open: AsyncIterator[object] | None = None

    def describe(self) -> str:
        return f"an async iterable ({type(self._records).__name__})"

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        records = aiter(self._records)
        self._spent = _use(self._spent, one_shot=records is self._records, name=self.describe())
        self._open = records
        return _numbered(records, self.progress(position), self.describe())

    async def close(self) -> None:
        records, self._open = self._open, None
        aclose = getattr(records, "aclose", None)
        if aclose is not None:
            await aclose()


def open_source(spec: object) -> Source:
    """Find the source for a path (``.csv``, ``.tsv``, else JSON Lines), ``"-"``, an iterable, async or not, or
    ``kafka://HOST:PORT/TOPIC``.

    A :class:`Source` is given back as it is; anything else is a DefinitionError.
    """
    if isinstance(spec, Source):
        return spec
    if isinstance(spec, str | os.PathLike):
        return _open_path(spec)
    if isinstance(spec, AsyncIterable):
        return AsyncIterableSource(spec)
    if isinstance(spec, Iterable) and not isinstance(spec, bytes | bytearray | memoryview | Mapping):
        return IterableSource(spec)
    raise DefinitionError(
        f"A source cannot be made of {spec!r}: a {type(spec).__name__} is not a series of records. Give a path, '-' "
        "for standard input, an iterable or async iterable of records, or a Source."
    )


def _open_path(spec: str | os.PathLike[str]) -> Source:
    if spec == "":
        raise DefinitionError("The path of the source is empty. Give a path, or '-' for standard input.")
    if isinstance(spec, str) and spec.startswith("kafka://"):
        from dalsegno.runners.kafka_client import source_of

        return source_of(spec)
    suffix = Path(spec).suffix.lower()
    if suffix in (".csv", ".tsv"):
        return CsvSource(spec, delimiter="," if suffix == ".csv" else "\t")
    return JsonLinesSource(spec)


def _columns(header: list[str], name: str) -> list[str]:
    if not all(column.strip() for column in header):
        raise InputError(f"The header row of {name!r} has an empty column name: {header!r}. Name every column.")
    if repeated := sorted({column for column in header if header.count(column) > 1}):
        raise InputError(f"The header row of {name!r} repeats {repeated!r}. Give every column a name of its own.")
    return header


def _last(raw: bytes) -> str:
    return digest(raw.strip())


def _too_few(name: str, wanted: int, found: int) -> RestoreError:
    return RestoreError(
        f"This job has read {wanted:,} records of {name}, but only {found:,} came this time, so it cannot go on after "
        "them. Give it the same input from its start, or give the job a new name."
    )


def _use(spent: bool, *, one_shot: bool, name: str) -> bool:
    if spent:
        raise InputError(f"{name} can be read only once, and has been opened before. Give a list, or a new iterator.")
    return one_shot


def _batched(items: Iterator[SourceItem]) -> Iterator[list[SourceItem]]:
    batch: list[SourceItem] = []
    start = None
    for item in items:
        batch.append(item)
        offset = item.position["offset"]
        start = offset if start is None else start
        if offset - start >= READ_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, start = [], offset
    yield batch


def _stdin_reader() -> Callable[[int], bytes]:
    if sys.stdin is None:
        raise InputError("Standard input is closed, so there is nothing to read. Pipe the records in, or give a file.")
    try:
        fd = sys.stdin.fileno()
    except (io.UnsupportedOperation, ValueError):
        return sys.stdin.buffer.read
    return lambda size: os.read(fd, size)


async def _pump(batches: Iterator[list[SourceItem]], hop: Callable[..., Awaitable[Any]]) -> AsyncIterator[SourceItem]:
    while (batch := await hop(next, batches, None)) is not None:
        for item in batch:
            yield item


async def _in_daemon_thread(fn: Callable[..., _T], *args: object) -> _T:
    """Run *fn* in a thread of its own: those of the loop may all be taken by what an agent calls."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(act: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            act(outcome)

    def run() -> None:
        act: Callable[[Any], None]
        outcome: object
        try:
            act, outcome = future.set_result, fn(*args)
        except Exception as error:
            act, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has been closed since
            loop.call_soon_threadsafe(settle, act, outcome)

    threading.Thread(target=run, name="dalsegno-source", daemon=True).start()
    return await future


async def _awaitable(records: Iterator[object]) -> AsyncIterator[object]:
    for number, value in enumerate(records):
        if number % _BATCH_ITEMS == 0:
            await asyncio.sleep(0)
        yield value


async def _numbered(records: AsyncIterator[object], skip: int, name: str) -> AsyncIterator[SourceItem]:
    ordinal = 0
    while True:
        try:
            value = await anext(records)
        except StopAsyncIteration:
            break
        except DalSegnoError:
            raise
        except Exception as error:
            raise InputError(f"{name} failed before record {ordinal + 1:,} with {error!r}.") from error
        ordinal += 1
        if ordinal > skip:
            yield SourceItem(ordinal - 1, value, {"ordinal": ordinal})
    if ordinal < skip:
        raise _too_few(name, skip, ordinal)
