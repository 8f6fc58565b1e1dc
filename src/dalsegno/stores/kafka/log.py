"""A job's topic as it is read: the fold of its control events and the views of its partitions.

Everything here blocks, for a bounded time. Threads may share a `JobLog`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack

from dalsegno.errors import RecordError, StoreError
from dalsegno.stores.kafka.cluster import Cluster, logger
from dalsegno.stores.kafka.control import ControlLog, JobState
from dalsegno.stores.kafka.frames import CONTROL, Assembler, Foreign, partition_of, read_piece
from dalsegno.stores.kafka.reader import LogReader, Truncated
from dalsegno.stores.kafka.settings import Settings
from dalsegno.stores.kafka.view import KEEP_OUT, PartitionView


class JobLog:
    """Reads *topic*. *bodies* says whether the views keep what is recorded, or only of which messages something is."""

    def __init__(self, settings: Settings, cluster: Cluster, topic: str, *, bodies: bool = True) -> None:
        self.settings, self.cluster, self.topic = settings, cluster, topic
        self.control = ControlLog()
        self.control_start = 0
        self.views: dict[int, PartitionView] = {}
        self._bodies = bodies
        self._assembler = Assembler()
        self._epoch = -1
        self._reading = threading.RLock()
        self._reader = LogReader(settings, cluster)

    @property
    def state(self) -> JobState:
        return self.control.state

    @property
    def bytes_read(self) -> int:
        """Bytes of values that were read so far."""
        return self._reader.bytes_read

    def begin(self, epoch: int = -1) -> None:
        """Make the views of the partitions that are known by now, for the worker of *epoch*."""
        self._epoch = epoch
        self.views = {number: self._view(number) for number in range(1, self.state.partitions + 1)}

    def _view(self, partition: int) -> PartitionView:
        return PartitionView(
            self._where(partition), self._epoch, skip=self.settings.unreadable == "skip", bodies=self._bodies
        )

    def _where(self, partition: int) -> str:
        return f"{self.settings}: topic {self.topic}, partition {partition}"

    def partition(self, key: bytes) -> int:
        return partition_of(key, self.state.partitions) + 1

    def view(self, key: bytes) -> PartitionView:
        return self.views[self.partition(key)]

    # The control partition.

    def refresh(self, *, stable: bool = False, at_least: int = 0) -> JobState:
        """Read what the control partition holds by now, or what of it is decided, and at least up to an offset."""
        with self._reading:
            deadline = time.monotonic() + self.settings.timeout
            while True:
                try:
                    self._refresh(stable, at_least)
                    return self.state
                except Truncated:
                    # Its owner cut it back behind a snapshot of it.
                    self.control, self._assembler = ControlLog(), Assembler()
                    if time.monotonic() > deadline:
                        raise StoreError(f"{self._where(0)} is cut back all the time, so it cannot be read") from None

    def _refresh(self, stable: bool, at_least: int) -> None:
        fresh = self.control.position == 0
        if fresh:
            self.control_start = self.cluster.starts(self.topic, [0])[0]
        end = max(self.cluster.ends(self.topic, [0], stable=stable)[0], at_least)
        begin = max(self.control.position, self.control_start)
        self._reader.read(self.topic, {0: (begin, end)}, self._take_event)
        if fresh:
            self.control.begin()
        self.control.position = max(self.control.position, begin, end)

    def _take_event(self, partition: int, offset: int, value: bytes | None) -> None:
        try:
            blob = self._assembler.add(offset, read_piece(value))
            if blob is not None and blob.kind == CONTROL:
                self.control.add(blob.offset, blob.payload)
        except Foreign as why:
            if self.settings.unreadable == "stop":
                raise RecordError(f"{self._where(partition)}, offset {offset}: {why}. {KEEP_OUT}") from None
            self._say_skipped(partition, offset, str(why))
        except RecordError as error:
            raise RecordError(f"{self._where(partition)}, offset {offset}: {error}") from error
        self.control.position = offset + 1

    # The partitions with records.

    def load(self, partitions: Iterable[int]) -> None:
        """Read those of *partitions* that were not read yet, to the end that they have now."""
        self._read([number for number in partitions if not self.views[number].loaded], stable=False)

    def catch_up(self, partitions: Iterable[int], *, stable: bool = False) -> None:
        """Read *partitions* to the end that they have now, or to that of what is decided."""
        self._read([*partitions], stable=stable)

    def _read(self, partitions: list[int], *, stable: bool) -> None:
        if not partitions:
            return
        with self._reading, ExitStack() as held:
            for number in sorted(partitions):
                held.enter_context(self.views[number].lock)
            deadline = time.monotonic() + self.settings.timeout
            while True:
                begins = self._begins(partitions)
                ends = self.cluster.ends(self.topic, partitions, stable=stable)
                try:
                    self._reader.read(self.topic, {n: (begins[n], ends[n]) for n in partitions}, self._take)
                    break
                except Truncated as cut:
                    # Another worker has deleted what is covered, perhaps with the record that says so.
                    self.views[cut.partition].reset()
                    if time.monotonic() > deadline:
                        raise StoreError(f"{self._where(cut.partition)} is cut back all the time") from None
            for number in partitions:
                view = self.views[number]
                view.position, view.loaded = max(view.position, begins[number], ends[number]), True

    def _begins(self, partitions: list[int]) -> dict[int, int]:
        new = [number for number in partitions if not self.views[number].loaded]
        starts = self.cluster.starts(self.topic, new) if new else {}
        # Afterwards: a mark is on record before anything is deleted for it.
        marks = self.refresh().marks if any(starts.values()) else self.state.marks
        for number, start in starts.items():
            if start > marks.get(number, 0):
                raise StoreError(
                    f"{self._where(number)} begins at offset {start}, but what is recorded from offset"
                    f" {marks.get(number, 0)} on may still be needed: it was removed by the topic's retention or by"
                    " somebody else. Calls that were recorded there would be made again: start a new job, and keep the"
                    " topic's retention.ms and retention.bytes at -1"
                )
        return {number: starts.get(number, self.views[number].position) for number in partitions}

    def _take(self, partition: int, offset: int, value: bytes | None) -> None:
        view = self.views[partition]
        why = view.read(offset, value)
        view.position = offset + 1
        if why is not None:
            self._say_skipped(partition, offset, why)

    def _say_skipped(self, partition: int, offset: int, why: str) -> None:
        logger.warning("%s, offset %d: %s; skipped", self._where(partition), offset, why)

    def close(self) -> None:
        with self._reading:
            self._reader.close()
