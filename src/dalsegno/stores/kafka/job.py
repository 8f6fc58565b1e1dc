"""One job in its topic, as the owner or a worker of it uses it. Everything here blocks, for a bounded time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from uuid import uuid4

from dalsegno.core.records import OpenBody, Record, TaskActionState, fold
from dalsegno.errors import RecordError, StoreError
from dalsegno.stores.base import Covered, Decision, Worker
from dalsegno.stores.kafka import control
from dalsegno.stores.kafka.cluster import Cluster, Topic, check_topic, logger, topic_of
from dalsegno.stores.kafka.frames import (
    CONTROL,
    COVERED,
    RECORDS,
    Blob,
    Placed,
    encode_messages,
    encode_records,
    pieces,
)
from dalsegno.stores.kafka.heartbeat import Heartbeat
from dalsegno.stores.kafka.log import JobLog
from dalsegno.stores.kafka.reader import LogReader
from dalsegno.stores.kafka.settings import Settings
from dalsegno.stores.kafka.view import Message, PartitionView
from dalsegno.stores.kafka.writer import OVERHEAD, Frame, Unknown, Writer

CARRY_AFTER = 5000
"""A message is carried forward when the log of its partition has grown by so many offsets since, or by eight times as
many as there are messages that need it."""
SNAPSHOT_AFTER = 500
"""Offsets that the control partition may have before a snapshot takes their place."""

_Part = tuple[int, int, bytes]
"""Partition, kind and payload of a blob that is to be written."""


class OwnedJob:
    """One thread at a time may write and prune, others may read meanwhile."""

    def __init__(self, settings: Settings, job: str, owner: str, worker: Worker) -> None:
        self.settings, self.job, self.worker = settings, job, worker
        self._writes = self._pruned_through = 0
        self._last: dict[int, int] = {}
        """The offset of one's last message in each partition."""
        self._mine: set[bytes] = set()
        with ExitStack() as undo:
            self._cluster = Cluster(settings)
            undo.callback(self._cluster.close)
            self._cluster.connect()
            topic = self._cluster.create(topic_of(settings.prefix, job))
            for risk in check_topic(settings, topic):
                logger.warning("%s", risk)
            self.topic, self._largest = topic.name, topic.largest
            self.log = JobLog(settings, self._cluster, topic.name)
            undo.callback(self.log.close)
            self._writer = self._own(worker)
            undo.callback(self._writer.close)
            self.epoch = self._opened(topic, owner)
            self._heartbeat = Heartbeat(self._cluster, topic.name, self.epoch)
            undo.pop_all()

    def _own(self, worker: Worker) -> Writer:
        """Become the one who writes as *worker*."""
        name = f"{self.topic}.{worker.index}-of-{worker.of}"
        writer = Writer(self.settings, self._cluster, name, self._largest - OVERHEAD // 2)
        writer.own()
        return writer

    def _opened(self, topic: Topic, owner: str) -> int:
        """Write down that the job was opened, and see to it that workers of another number write no more."""
        state = self.log.refresh()
        self._order = max(time.time_ns(), state.order)
        by = self._write_opening(topic, owner)
        while by not in self.log.control.openings:
            # Another worker took a snapshot in this moment, and what was before it is gone.
            by = self._write_opening(topic, owner)
        epoch, writers = self.log.control.openings[by]
        self._check(topic)
        others = {other: when for other, when in writers.items() if other.of != self.worker.of}
        for other in others:
            self._own(other).close()
        self.log.begin(epoch)
        self.epoch = epoch
        if others:
            self._write([(0, CONTROL, control.dump(control.fenced(others)))])
        return epoch

    def _write_opening(self, topic: Topic, owner: str) -> str:
        """Write that the job was opened, and read it; the random name by which it can be found."""
        by = uuid4().hex
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "order": self._next_order()}
        event = control.opened(self.job, owner, self.worker, by, topic.partitions - 1, uuid4().hex, **me)
        self._write([(0, CONTROL, control.dump(event))], epoch=0)
        self.log.refresh(at_least=self._last[0] + 1)
        return by

    def _check(self, topic: Topic) -> None:
        state = self.log.state
        if state.job != self.job:
            raise RecordError(f"{self.settings}: topic {topic.name} belongs to job {state.job!r}, not {self.job!r}")
        if not 0 < state.partitions < topic.partitions:
            raise StoreError(
                f"{self.settings}: topic {topic.name} has {topic.partitions} partitions, but the records of job"
                f" {self.job!r} are in {state.partitions} and one more: it is not the topic that the job began with. A"
                " topic needs at least 2"
            )

    @property
    def identity(self) -> str:
        return self.log.state.identity

    @property
    def pruned_through(self) -> int:
        return max(self._pruned_through, self.log.state.pruned_through)

    # Writing.

    def put(self, records: Sequence[Record]) -> None:
        """Append *records*, all or none."""
        parts: dict[int, list[Placed]] = {}
        for record in records:
            parts.setdefault(self.log.partition(record.key), []).append(Placed(self._next_order(), record))
        if self.worker.of > 1:
            self._mine.update(record.key for record in records)
        self._add(self._write([(number, RECORDS, encode_records(part)) for number, part in parts.items()]))

    def _next_order(self) -> int:
        self._order = max(self._order + 1, time.time_ns())
        return self._order

    def _write(self, parts: Sequence[_Part], epoch: int | None = None) -> list[tuple[int, Blob]]:
        """Write one transaction; what it wrote, by partition."""
        self._writes += 1
        epoch = self.epoch if epoch is None else epoch
        frames: list[Frame] = []
        spans: list[tuple[int, int]] = []
        for partition, kind, payload in parts:
            begin = len(frames)
            values = pieces(kind, epoch, self._writes, payload, self._largest - OVERHEAD)
            frames += ((partition, value) for value in values)
            spans.append((begin, len(frames)))
        offsets = self._commit(frames)
        for (partition, _), offset in zip(frames, offsets, strict=True):
            self._check_place(partition, offset)
        return [
            (partition, Blob(offsets[begin], offsets[end - 1] + 1, kind, epoch, self._writes, payload))
            for (partition, kind, payload), (begin, end) in zip(parts, spans, strict=True)
        ]

    def _commit(self, frames: Sequence[Frame]) -> list[int]:
        try:
            return self._writer.write(self.topic, frames)
        except Unknown as unknown:
            if self._happened(frames[0], unknown):
                return unknown.offsets
            raise StoreError(f"{unknown.error}; nothing of it was written: start the job again") from unknown

    def _happened(self, frame: Frame, unknown: Unknown) -> bool:
        """Whether the transaction that *frame* belongs to took place, which the log says once it is decided."""
        partition, value = frame
        found: list[bytes | None] = []
        reader = LogReader(self.settings, self._cluster)
        try:
            offset = unknown.offsets[0]
            reader.read(self.topic, {partition: (offset, offset + 1)}, lambda *message: found.append(message[2]))
        except StoreError as error:
            raise StoreError(
                f"{unknown.error}; whether it was written cannot be found out now: start the job again when the brokers"
                " are well, and it will be read from the log"
            ) from error
        finally:
            reader.close()
        return found == [value]

    def _check_place(self, partition: int, offset: int) -> None:
        if offset <= self._last.get(partition, -1):
            error = StoreError(
                f"{self.settings}: topic {self.topic}, partition {partition}: what was written now is at offset"
                f" {offset}, what was written before at {self._last[partition]}: the topic was deleted and created"
                " anew, so what was recorded is lost. Start the job again: it will say what it misses"
            )
            self._writer.give_up(error)
            raise error
        self._last[partition] = offset

    def _add(self, written: Iterable[tuple[int, Blob]]) -> None:
        """Add what was written to the views, so that it need not be read."""
        for partition, blob in written:
            if partition == 0:
                continue
            view = self.log.views[partition]
            with view.lock:
                if view.loaded:
                    view.add(blob)
                    if self.worker.of == 1:
                        view.position = max(view.position, blob.end)

    # Reading.

    def keys(self) -> list[bytes]:
        numbers = [*self.log.views]
        self._see(numbers)
        return [key for number in numbers for key in self._keys_of(number)]

    def _keys_of(self, number: int) -> list[bytes]:
        view = self.log.views[number]
        with view.lock:
            return [*view.keys]

    def _see(self, numbers: list[int]) -> None:
        """Read *numbers* so far that what others have put is seen, if there are others."""
        if self.worker.of == 1:
            self.log.load(numbers)
        else:
            self.log.catch_up(numbers)

    def claim(self, key: bytes, open_body: OpenBody | None) -> list[TaskActionState]:
        """What is recorded of *key*. Only its worker writes it, so what was there when this one came is all."""
        if self.worker.of > 1:
            self._mine.add(key)
        self.log.load([self.log.partition(key)])
        return self._states(key, None, open_body)

    def states(self, key: bytes, task: str | None, open_body: OpenBody | None) -> list[TaskActionState]:
        self._see([self.log.partition(key)])
        return self._states(key, task, open_body)

    def claim_at_once(self, key: bytes, open_body: OpenBody | None) -> list[TaskActionState] | None:
        """What `claim` gives, if it is known without waiting for anything."""
        view = self.log.view(key)
        if not view.loaded or not view.lock.acquire(blocking=False):
            return None
        try:
            records = view.list(key)
        finally:
            view.lock.release()
        if self.worker.of > 1:
            self._mine.add(key)
        return fold(records, open_body) if records else []

    def _states(self, key: bytes, task: str | None, open_body: OpenBody | None) -> list[TaskActionState]:
        view = self.log.view(key)
        with view.lock:
            records = view.list(key)
        return fold((record for record in records if task in (None, record.task)), open_body)

    def decisions(self, after: int) -> list[tuple[int, Decision]]:
        state = self.log.refresh(stable=True, at_least=self._last[0] + 1)
        return [(number, made) for number, _, made in [*state.decisions.values()] if number > after]

    # Pruning.

    def prune(self, covered: Covered) -> tuple[int, dict[int, int]]:
        """Write down that *covered* is; how many records that removes, and what `delete` is to be given."""
        state = self.log.refresh(stable=True, at_least=self._last[0] + 1)
        gone: dict[int, set[Message]] = {}
        for message in covered.messages:
            gone.setdefault(self.log.partition(message[0]), set()).add(message)
        self.log.load(gone)
        ends = self._watch()
        removed = 0
        parts: list[_Part] = []
        marks: dict[int, int] = {}
        for number in ends.keys() | gone.keys():
            view, leaving = self.log.views[number], gone.get(number, set())
            with view.lock:
                removed += sum(1 for _ in view.of(leaving))
                moving = self._to_carry(view, leaving, ends.get(number, 0))
                parts += _moves(
                    number, [each for each in leaving if self.worker.of > 1 or view.has(each)], moving, view
                )
                mark = view.mark(leaving.union(moving)) if self._watches(number) else 0
            if mark > state.marks.get(number, 0):
                marks[number] = mark
        parts.append((0, CONTROL, control.dump(self._pruned(covered, marks))))
        if self.log.control.position - self.log.control_start > SNAPSHOT_AFTER:
            parts.append((0, CONTROL, control.dump(control.snapshot(self.log.control))))
            marks[0] = self.log.control_start = self.log.control.position
        self._add(self._write(parts))
        self._pruned_through = max(self._pruned_through, covered.checkpoint)
        return removed, marks

    def delete(self, marks: Mapping[int, int]) -> None:
        """Have the broker delete what lies before *marks*."""
        self._cluster.delete_before(self.topic, marks)

    def _watches(self, number: int) -> bool:
        """Whether this worker is the one that keeps the log of a partition short."""
        return number % self.worker.of == self.worker.index and self.log.views[number].loaded

    def _watch(self) -> dict[int, int]:
        """Learn what others have written to the partitions that this worker watches; where those that it knows end."""
        if self.worker.of > 1:
            watched = [number for number in self.log.views if number % self.worker.of == self.worker.index]
            self.log.catch_up(watched, stable=True)
        known = [number for number, view in self.log.views.items() if view.loaded]
        if self.worker.of > 1 and known:
            return self._cluster.ends(self.topic, known, stable=True)
        return {number: self.log.views[number].position for number in known}

    def _to_carry(self, view: PartitionView, leaving: set[Message], end: int) -> list[Message]:
        """One's own messages that alone keep the log long, since they were parked or are in flight for so long."""
        oldest = end - max(CARRY_AFTER, 8 * view.messages)
        if view.mark(leaving) >= oldest:
            return []
        return [
            each
            for each in view.older_than(oldest)
            if each not in leaving and (self.worker.of == 1 or each[0] in self._mine)
        ]

    def _pruned(self, covered: Covered, marks: Mapping[int, int]) -> control.Event:
        """The event of a prune. Decisions about messages without records go with it: nobody will take them up."""
        leaving = set(covered.messages)
        dropped = [
            number
            for number, _, made in self.log.state.decisions.values()
            if made[:2] in leaving or not self._may_be_recorded(made.key, made.message)
        ]
        return control.pruned(covered.checkpoint, marks, dropped, self._next_order())

    def _may_be_recorded(self, key: bytes, message: str) -> bool:
        return not self._watches(self.log.partition(key)) or self.log.view(key).has((key, message))

    def close(self) -> None:
        """Release everything."""
        with ExitStack() as last:
            last.callback(self._cluster.close)
            last.callback(self.log.close)
            last.callback(self._writer.close)
            self._heartbeat.stop()


def _moves(number: int, leaving: list[Message], moving: list[Message], view: PartitionView) -> list[_Part]:
    """What says that *leaving* are covered, and puts the records of *moving* at the end of the log."""
    parts: list[_Part] = []
    if leaving or moving:
        parts.append((number, COVERED, encode_messages([*leaving, *moving])))
    if moving:
        parts.append((number, RECORDS, encode_records(view.of(moving))))
    return parts
