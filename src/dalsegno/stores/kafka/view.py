"""What the log of one partition adds up to. Nothing here does I/O."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dalsegno.core.records import Record
from dalsegno.errors import RecordError
from dalsegno.stores.kafka.frames import (
    COVERED,
    RECORDS,
    Assembler,
    Blob,
    Foreign,
    Placed,
    decode_messages,
    decode_records,
    read_piece,
)

Message = tuple[bytes, str]

KEEP_OUT = (
    "Nobody but a store may write to this topic: keep others from it, and open the store with unreadable=skip to leave"
    " out what is there"
)


@dataclass(slots=True)
class Recorded:
    """What is recorded of one message."""

    first: int
    """The offset from which on the log is needed for it."""
    records: list[Placed] = field(default_factory=list)


class PartitionView:
    """The messages of one partition that no checkpoint covers, as of *position*.

    *epoch* is that of the one who looks. What he writes himself he adds with `add`, so that he need not read it again;
    if he does, it is not added twice. Without *bodies* it is only known of which messages something is recorded, and
    the place of the first record of each. Threads hold *lock* while they change or go through a view.
    """

    def __init__(self, where: str, epoch: int = -1, *, skip: bool = False, bodies: bool = True) -> None:
        self.where = where
        self.lock = threading.RLock()
        self._epoch, self._skip, self._bodies = epoch, skip, bodies
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.loaded = False
        self.position = 0
        """Everything before it has been added."""
        self.keys: dict[bytes, dict[str, Recorded]] = {}
        self.messages = 0
        self._added = (-1, -1)
        self._assembler = Assembler()
        self._oldest: builtins.list[tuple[int, bytes, str]] = []

    def read(self, offset: int, value: bytes | None) -> str | None:
        """Add a message of the log. What is not ours is a `RecordError`, or is skipped and the answer says why."""
        try:
            piece = read_piece(value)
            blob = self._assembler.add(offset, piece)
        except Foreign as why:
            if not self._skip:
                raise RecordError(f"{self.where}, offset {offset}: {why}. {KEEP_OUT}") from None
            return str(why)
        except RecordError as error:
            raise RecordError(f"{self.where}, offset {offset}: {error}") from error
        if blob is not None:
            try:
                self.add(blob)
            except RecordError as error:
                raise RecordError(f"{self.where}, offset {blob.offset}, is damaged: {error}") from error
        return None

    def add(self, blob: Blob) -> None:
        """Add what *blob* says, unless it is one's own and was added before."""
        if blob.epoch == self._epoch:
            which = (blob.write, -blob.kind)  # of one write, COVERED comes before RECORDS
            if which <= self._added:
                return
            self._added = which
        if blob.kind == COVERED:
            self.cover(decode_messages(blob.payload))
        elif blob.kind == RECORDS:
            for placed in decode_records(blob.payload):
                self._insert(blob.offset, placed)

    def _insert(self, offset: int, placed: Placed) -> None:
        key, message = placed.record.key, placed.record.message
        messages = self.keys.get(key)
        if messages is None:
            messages = self.keys[key] = {}
        recorded = messages.get(message)
        if recorded is None:
            recorded = messages[message] = Recorded(offset)
            self.messages += 1
            heappush(self._oldest, (offset, key, message))
        elif not self._bodies:
            return
        recorded.records.append(placed if self._bodies else Placed(placed.order, Record(key, message, "", b"")))

    def cover(self, messages: Iterable[Message]) -> int:
        """Forget *messages*; how many records they had."""
        removed = 0
        for key, message in messages:
            of_key = self.keys.get(key)
            recorded = of_key.pop(message, None) if of_key is not None else None
            if recorded is not None:
                removed += len(recorded.records)
                self.messages -= 1
            if not of_key:
                self.keys.pop(key, None)
        return removed

    def mark(self, without: Collection[Message] = ()) -> int:
        """The offset from which on the log is needed, once the messages *without* are covered."""
        held: builtins.list[tuple[int, bytes, str]] = []
        while self._oldest:
            first, key, message = self._oldest[0]
            recorded = self.keys.get(key, {}).get(message)
            alive = recorded is not None and recorded.first == first
            if alive and (key, message) not in without:
                break
            heappop(self._oldest)
            if alive:
                held.append((first, key, message))
        needed = self._oldest[0][0] if self._oldest else self.position
        for each in held:
            heappush(self._oldest, each)
        unfinished = self._assembler.begin
        return min(needed, self.position, self.position if unfinished is None else unfinished)

    def older_than(self, offset: int) -> builtins.list[Message]:
        """The messages for which the log is needed from before *offset*, oldest first."""
        found = [
            (recorded.first, key, message)
            for key, messages in self.keys.items()
            for message, recorded in messages.items()
            if recorded.first < offset
        ]
        return [(key, message) for _, key, message in sorted(found)]

    def list(self, key: bytes) -> builtins.list[Record]:
        """The records of *key* in the order in which they were put."""
        placed = [each for recorded in self.keys.get(key, {}).values() for each in recorded.records]
        placed.sort(key=_order)
        return [each.record for each in placed]

    def has(self, message: Message) -> bool:
        return message[1] in self.keys.get(message[0], {})

    def of(self, messages: Iterable[Message]) -> Iterator[Placed]:
        """The records of *messages*."""
        for key, message in messages:
            recorded = self.keys.get(key, {}).get(message)
            if recorded is not None:
                yield from recorded.records

    def every(self) -> Iterator[Placed]:
        return (each for messages in self.keys.values() for recorded in messages.values() for each in recorded.records)

    def firsts(self) -> Iterator[tuple[int, Message]]:
        """The messages, each with the place of its first record."""
        for key, messages in self.keys.items():
            for message, recorded in messages.items():
                yield recorded.records[0].order, (key, message)


def _order(placed: Placed) -> int:
    return placed.order
