"""The outsider's way into the topics of a store: reads them, and leaves decisions, while jobs run or not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO
from uuid import uuid4

from dalsegno.core.records import Record
from dalsegno.errors import StoreError
from dalsegno.stores.base import Decision, JobInfo, StoreInspector, not_recorded, unknown_job
from dalsegno.stores.kafka import control
from dalsegno.stores.kafka.cluster import Cluster, topic_of
from dalsegno.stores.kafka.frames import CONTROL, Placed, decode_records, encode_records, pieces
from dalsegno.stores.kafka.heartbeat import is_alive
from dalsegno.stores.kafka.log import JobLog
from dalsegno.stores.kafka.settings import Settings
from dalsegno.stores.kafka.view import PartitionView
from dalsegno.stores.kafka.writer import OVERHEAD, Unknown, Writer


class KafkaInspector(StoreInspector):
    """Inspects the store that *settings* name; raises `StoreError` if the brokers have no topic of it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._logs: dict[str, JobLog] = {}
        self._writer: Writer | None = None
        self._writes = 0
        with ExitStack() as undo:
            self._cluster = Cluster(settings)
            undo.callback(self._cluster.close)
            self._cluster.connect()
            if not self._cluster.topics():
                raise StoreError(
                    f"{settings}: there is no topic of that prefix, so there is no store to look into: name the store"
                    " that the job runs on"
                )
            undo.pop_all()

    def jobs(self) -> list[JobInfo]:
        return sorted((self._info(log) for log in self._all()), key=lambda info: info.name)

    def _all(self) -> list[JobLog]:
        """The logs of all jobs. A topic that nobody has opened yet is none."""
        logs = [self._log_of(topic) for topic in self._cluster.topics()]
        return [log for log in logs if log.state.epoch]

    def _log_of(self, topic: str) -> JobLog:
        log = self._logs.get(topic)
        if log is None:
            log = self._logs[topic] = JobLog(self.settings, self._cluster, topic, bodies=False)
        log.refresh()
        if not log.views:
            log.begin()
        return log

    def _info(self, log: JobLog) -> JobInfo:
        log.catch_up(log.views)
        state = log.refresh()
        return JobInfo(
            state.job,
            state.identity,
            state.epoch,
            state.last["owner"],
            state.last["pid"],
            state.last["host"],
            state.last["since"],
            state.pruned_through,
            any(is_alive(self._cluster, log.topic, epoch) for epoch in state.writers.values()),
            sum(view.messages for view in log.views.values()),
        )

    def messages(self, job: str) -> Iterator[tuple[bytes, str]]:
        log = self._log(job)
        log.catch_up(log.views)
        found = sorted(first for view in log.views.values() for first in view.firsts())
        return (message for _, message in found)

    def records(self, job: str, key: bytes | None = None, message: str | None = None) -> Iterator[Record]:
        return _Spool(self, self._log(job), key, message).records()

    def decisions(self, job: str) -> list[Decision]:
        return [made for _, _, made in self._log(job).refresh().decisions.values()]

    def decide(self, job: str, decision: Decision) -> bool:
        log = self._log(job)
        log.catch_up([log.partition(decision.key)])
        if not log.view(decision.key).has((decision.key, decision.message)):
            raise not_recorded(str(self.settings), job, decision.message)
        if decision[:3] in log.refresh().decisions:
            return False
        by = uuid4().hex
        end = self._write(log, control.dump(control.decided(decision, by)))
        made = log.refresh(at_least=end).decisions.get(decision[:3])
        # It is gone if its message was covered in this moment.
        return made is None or made[1] == by

    def _write(self, log: JobLog, event: bytes) -> int:
        """Write an event; the offset that follows it."""
        described = self._cluster.describe(log.topic)
        if described is None:
            raise StoreError(f"{self.settings}: topic {log.topic} was deleted meanwhile")
        if self._writer is None:
            # Nobody else has this id; it is there so that all pieces of a decision are written or none.
            self._id = uuid4().int >> 65
            self._writer = Writer(
                self.settings, self._cluster, f"{self.settings.prefix}.{self._id:x}", described.largest - OVERHEAD // 2
            )
            self._writer.own()
        self._writes += 1
        values = pieces(CONTROL, self._id, self._writes, event, described.largest - OVERHEAD)
        try:
            offsets = self._writer.write(log.topic, [(0, value) for value in values])
        except Unknown as unknown:
            raise StoreError(
                f"{unknown.error}; look whether the decision is there, and decide again if not"
            ) from unknown
        return offsets[-1] + 1

    def _log(self, job: str) -> JobLog:
        topic = topic_of(self.settings.prefix, job)
        topics = self._cluster.topics()
        if topic in topics:
            log = self._log_of(topic)
            if log.state.epoch:
                return log
        raise unknown_job(str(self.settings), job, sorted(log.state.job for log in self._all()))

    def close(self) -> None:
        with ExitStack() as last:
            last.callback(self._cluster.close)
            for log in self._logs.values():
                last.callback(log.close)
            if self._writer is not None:
                last.callback(self._writer.close)
        self._logs.clear()
        self._writer = None


class _Spool:
    """What is recorded as of one moment. It is read from the log into a file first: a prune may delete it there."""

    def __init__(self, inspector: KafkaInspector, log: JobLog, key: bytes | None, message: str | None) -> None:
        self._inspector, self._log, self._key, self._message = inspector, log, key, message

    def records(self) -> Iterator[Record]:
        log = self._log
        numbers = [*log.views] if self._key is None else [log.partition(self._key)]
        with tempfile.TemporaryFile() as file:
            for begin, size in self._fill(numbers, file):
                file.seek(begin)
                (placed,) = decode_records(file.read(size))
                yield placed.record

    def _fill(self, numbers: list[int], file: IO[bytes]) -> list[tuple[int, int]]:
        """Read the partitions *numbers* into *file*; where each record is in it, in recorded order."""
        log = JobLog(self._inspector.settings, self._inspector._cluster, self._log.topic)
        try:
            log.refresh()
            log.views = {number: _SpoolingView(log, number, self, file) for number in numbers}
            log.catch_up(numbers)
        finally:
            log.close()
        found = sorted(
            (placed.order, *_where(placed.record.body)) for view in log.views.values() for placed in view.every()
        )
        return [(begin, size) for _, begin, size in found]

    def wants(self, record: Record) -> bool:
        return self._key in (None, record.key) and self._message in (None, record.message)


class _SpoolingView(PartitionView):
    """A view that keeps its records in a file, and in memory only where each of them is."""

    def __init__(self, log: JobLog, number: int, spool: _Spool, file: IO[bytes]) -> None:
        skip = log.settings.unreadable == "skip"
        super().__init__(f"{log.settings}: topic {log.topic}, partition {number}", skip=skip)
        self._spool, self._file = spool, file

    def _insert(self, offset: int, placed: Placed) -> None:
        if self._spool.wants(placed.record):
            written = encode_records([placed])
            where = b"%d %d" % (self._file.tell(), len(written))
            self._file.write(written)
            super()._insert(offset, Placed(placed.order, placed.record._replace(body=where)))


def _where(body: bytes) -> tuple[int, int]:
    begin, size = body.split()
    return int(begin), int(size)
