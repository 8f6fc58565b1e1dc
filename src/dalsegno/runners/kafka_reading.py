"""Reading Kafka topics from offsets that the caller keeps. Used in one thread, but for what says otherwise."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dalsegno.errors import InputError, RestoreError
from dalsegno.runners.kafka_client import (
    REQUEST_SECONDS,
    START_SECONDS,
    Watch,
    admin_module,
    ask,
    client_config,
    has_code,
    made,
    text_of,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, IsolationLevel, Message, TopicPartition
    from confluent_kafka.admin import AdminClient

_BATCH = 500
_POLL_SECONDS = 0.2
_REFRESH_SECONDS = 2.0
_GONE_AFTER = 3
"""A topic is gone if it is not there so many times in a row: a broker that starts may not know it yet."""

_logger = logging.getLogger("dalsegno")

Offsets = dict[str, list[int]]
"""By partition, ``topic/number``: the offset that is read next, and the leader epoch of the record before it."""


class Read(NamedTuple):
    """Reading a partition came to *next_offset*, after *message*, or after what is no record if that is None."""

    partition: str
    next_offset: int
    epoch: int
    message: Message | None


class Opened(NamedTuple):
    """Where reading starts, in all partitions, and the ids of the topics."""

    offsets: Offsets
    topic_ids: dict[str, str]


def partition_of(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}"


class Reading:
    """One reading of *topics*, which messages call *name*. *begun* says that the job has read some of them before."""

    def __init__(
        self,
        name: str,
        topics: list[str],
        servers: str,
        config: Mapping[str, Any],
        group: str | None,
        *,
        begun: bool,
        until_end: bool,
        start: int | None,
        skip_gaps: bool,
    ) -> None:
        from confluent_kafka import IsolationLevel
        from confluent_kafka.admin import AdminClient

        self._name = name
        self._topics = topics
        self._begun = begun
        self._until_end = until_end
        self._start = start
        self._skip_gaps = skip_gaps
        self._watch = Watch(name)
        self._config = {"isolation.level": "read_committed", **client_config(servers, config, self._watch)}
        committed = self._config["isolation.level"] == "read_committed"
        self._isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        self._group = group
        admin = {name: value for name, value in self._config.items() if name != "isolation.level"}
        self._admin: AdminClient = made(lambda: AdminClient(admin))
        self._consumer: Consumer | None = None
        self.closing = threading.Event()
        """Set from any thread: what waits gives up."""
        self._publishing = threading.Lock()
        self._topic_ids: dict[str, str] = {}
        self._next: Offsets = {}
        self._base: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._targets: dict[str, int] = {}
        """Where partitions that are yet to be read end, with *until_end*."""
        self._refreshed = 0.0
        self._gone = 0

    # Told to others, in any thread.

    def total(self) -> int:
        return sum(max(0, end - self._base.get(partition, 0)) for partition, end in list(self._ends.items()))

    def progress(self, offsets: Offsets) -> int:
        return sum(max(0, read[0] - self._base.get(partition, 0)) for partition, read in offsets.items())

    def lag(self, offsets: Offsets) -> int:
        ends, base = list(self._ends.items()), self._base
        return sum(max(0, end - (offsets[p][0] if p in offsets else base.get(p, 0))) for p, end in ends)

    def publish(self, offsets: Offsets) -> None:
        """Tell the group how far a checkpoint is; in vain if the broker is away."""
        from confluent_kafka import KafkaException

        with self._publishing:
            if self._consumer is None:
                return
            try:
                self._consumer.commit(offsets=[_at(p, read[0]) for p, read in offsets.items()], asynchronous=True)
            except (KafkaException, RuntimeError) as error:
                self._watch.warn(f"the group {self._group!r} cannot be told how far the job is: {text_of(error)}")

    # Open.

    def open(self, offsets: Offsets, topic_ids: Mapping[str, str]) -> Opened:
        """Start reading at *offsets*, of topics that had the ids *topic_ids*."""
        from confluent_kafka import Consumer

        began = time.monotonic()

        def left() -> float:
            return 0.0 if self.closing.is_set() else began + START_SECONDS - time.monotonic()

        partitions = self._describe(topic_ids, left)
        if gone := [p for p in offsets if p not in partitions]:
            raise RestoreError(
                f"this job has read {', '.join(sorted(gone)[:10])} (topic/partition), which {self._name} has not. "
                "Give the topics that the job has read, or give it a new name"
            )
        lows, ends = self._ask_offsets(partitions, left)
        self._base, self._ends = dict(lows), ends
        starts = self._starts(offsets, partitions, lows, left)
        if self._until_end:
            self._targets = {p: ends[p] for p in partitions if starts[p][0] < ends[p]}
        self._consumer = made(lambda: Consumer(self._consumer_config()))
        self._next = dict(starts)
        self._assign([p for p in partitions if not self._until_end or p in self._targets])
        self._refreshed = time.monotonic()
        return Opened(starts, self._topic_ids)

    def _consumer_config(self) -> dict[str, Any]:
        return {
            "queued.max.messages.kbytes": 16_384,
            "fetch.wait.max.ms": 100,
            **self._config,
            "group.id": self._group or "dalsegno",  # nothing is committed if there is none
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "on_commit": self._on_commit,
        }

    def _on_commit(self, error: object, partitions: object) -> None:
        if error is not None:
            self._watch.warn(f"the group {self._group!r} cannot be told how far the job is: {text_of(error)}")

    def _describe(self, known: Mapping[str, str], left: Callable[[], float]) -> list[str]:
        """The partitions of the topics, which must have the ids that are *known*."""
        from confluent_kafka import KafkaException, TopicCollection

        partitions = []
        for topic in self._topics:

            def describe(topic: str = topic) -> Any:
                asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_SECONDS)
                return asked[topic].result(REQUEST_SECONDS + 1)

            try:
                found = ask(self._admin, self._watch, describe, InputError, self._name, left)
            except KafkaException as error:
                raise InputError(f"the topic {topic!r} of {self._name} cannot be read: {text_of(error)}") from error
            topic_id = str(found.topic_id)
            if known.get(topic, topic_id) != topic_id:
                raise RestoreError(
                    f"the topic {topic!r} of {self._name} is not the one that this job has read: it had the id "
                    f"{known[topic]}, and has {topic_id} now. It was deleted and made again, so its offsets mean other "
                    "records. Give the job a new name to read the new topic from its start"
                )
            self._topic_ids[topic] = topic_id
            partitions += [f"{topic}/{partition.id}" for partition in found.partitions]
        return partitions

    def _ask_offsets(self, partitions: list[str], left: Callable[[], float]) -> tuple[dict[str, int], dict[str, int]]:
        """Where the log of each partition starts, and where it ends."""
        spec = admin_module().OffsetSpec
        lows = self._list_offsets(partitions, spec.earliest(), left)
        return lows, self._list_offsets(partitions, spec.latest(), left)

    def _list_offsets(
        self, partitions: list[str], spec: Any, left: Callable[[], float], isolation: IsolationLevel | None = None
    ) -> dict[str, int]:
        from confluent_kafka import KafkaException

        def request() -> dict[str, int]:
            asked = self._admin.list_offsets(
                {_at(partition): spec for partition in partitions},
                isolation_level=isolation or self._isolation,
                request_timeout=REQUEST_SECONDS,
            )
            found = {f"{at.topic}/{at.partition}": answer.result(REQUEST_SECONDS + 1) for at, answer in asked.items()}
            return {partition: info.offset for partition, info in found.items()}

        try:
            return ask(self._admin, self._watch, request, InputError, self._name, left)
        except KafkaException as error:
            raise InputError(f"the offsets of {self._name} cannot be asked for: {text_of(error)}") from error

    def _starts(
        self, offsets: Offsets, partitions: list[str], lows: dict[str, int], left: Callable[[], float]
    ) -> Offsets:
        at_time: dict[str, int] = {}
        if not self._begun and self._start is not None:
            at_time = self._list_offsets(partitions, admin_module().OffsetSpec.for_timestamp(self._start), left)
            at_time = {p: self._ends[p] if offset < 0 else offset for p, offset in at_time.items()}
        starts = {}
        for partition in partitions:
            if partition in offsets:
                starts[partition] = self._checked(partition, offsets[partition], lows[partition])
            else:  # it was made after the job began
                starts[partition] = [at_time.get(partition, lows[partition]), -1]
        return starts

    def _checked(self, partition: str, at: list[int], low: int) -> list[int]:
        """Where to go on in a partition that was read up to *at* and whose log now starts at *low*."""
        end = self._ends[partition]
        if at[0] > end and not self._may_be_open(partition, at[0]):
            raise RestoreError(
                f"this job has read {partition} (topic/partition) of {self._name} up to offset {at[0]:,}, but it ends "
                f"at {end:,} now: records were lost, or the topic was made again. Give the job a new name to read it "
                "from its start"
            )
        if at[0] >= low:
            return at
        what = (
            f"{partition} (topic/partition) of {self._name} is to be read from offset {at[0]:,}, but starts at {low:,}"
        )
        if not self._skip_gaps:
            raise RestoreError(
                f"{what} now: what is between was deleted before it was read, by the topic's retention for one. To go "
                "on without those records, use on_gap=skip"
            )
        _logger.warning("%s now: the %d offsets between are skipped", what, low - at[0])
        return [low, -1]

    def _may_be_open(self, partition: str, offset: int) -> bool:
        # Whoever reads what is not committed is told an end before which that is.
        from confluent_kafka import IsolationLevel

        latest = admin_module().OffsetSpec.latest()
        ends = self._list_offsets([partition], latest, self._while_open, IsolationLevel.READ_UNCOMMITTED)
        return ends[partition] >= offset

    def _while_open(self) -> float:
        return 0.0 if self.closing.is_set() else 1.0

    def _assign(self, partitions: list[str]) -> None:
        assert self._consumer is not None
        self._consumer.incremental_assign([_at(p, *self._next[p]) for p in partitions])

    # Read.

    def next_batch(self) -> list[Read] | None:
        """What came, maybe nothing; None at the end. Raises InputError, or RestoreError for a gap or another topic."""
        if self.closing.is_set() or (self._until_end and not self._targets):
            return None
        assert self._consumer is not None
        if new := self._refresh():
            return new
        first = self._consumer.poll(_POLL_SECONDS)
        if first is None:
            return []
        batch = []
        for message in [first, *self._consumer.consume(_BATCH - 1, 0)]:
            read = self._read(message)
            if read is not None:
                batch.append(read)
        return batch

    def _read(self, message: Message) -> Read | None:
        partition, error = partition_of(message), message.error()
        if error is not None and not has_code(error, "_PARTITION_EOF"):
            return self._failed(partition, message)
        if self._until_end and partition not in self._targets:
            return None
        offset = message.offset()
        if offset is None or offset < 0:
            return None
        at = self._next[partition]
        if error is not None:  # the end of the partition; before it may be what is no record
            read = Read(partition, offset, at[1], None) if offset > at[0] else None
            self._passed(partition, [max(offset, at[0]), at[1]])
            return read
        if self._until_end and offset >= self._targets[partition]:
            self._passed(partition, [self._targets[partition], at[1]])
            return Read(partition, self._next[partition][0], at[1], None)
        epoch = message.leader_epoch()
        self._passed(partition, [offset + 1, -1 if epoch is None else epoch])
        return Read(partition, offset + 1, self._next[partition][1], message)

    def _passed(self, partition: str, at: list[int]) -> None:
        self._next[partition] = at
        self._ends[partition] = max(self._ends.get(partition, 0), at[0])
        if partition in self._targets and at[0] >= self._targets[partition]:
            del self._targets[partition]
            assert self._consumer is not None
            self._consumer.incremental_unassign([_at(partition)])

    def _failed(self, partition: str, message: Message) -> Read | None:
        """A partition cannot be read on, or the client says what goes by."""
        error = message.error()
        assert error is not None
        if has_code(error, "_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "_LOG_TRUNCATION") and partition in self._next:
            self._describe(dict(self._topic_ids), self._while_open)  # made again?
            lows, ends = self._ask_offsets([partition], self._while_open)
            self._ends |= ends
            at = self._checked(partition, self._next[partition], lows[partition])
            if has_code(error, "_LOG_TRUNCATION") and at == self._next[partition]:
                raise RestoreError(
                    f"{partition} (topic/partition) of {self._name} has lost records that this job has read, before "
                    f"offset {at[0]:,}: {text_of(error)}. Give the job a new name to read it from its start"
                )
            assert self._consumer is not None
            self._consumer.incremental_unassign([_at(partition)])
            self._passed(partition, at)
            self._assign([partition])
            return Read(partition, at[0], at[1], None)
        if has_code(error, "TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "_FATAL"):
            raise InputError(f"{partition} (topic/partition) of {self._name} cannot be read: {text_of(error)}")
        if not has_code(error, "_ALL_BROKERS_DOWN", "_TRANSPORT"):  # the refresh tells of that
            self._watch.warn(f"{partition}: {text_of(error)}; reading waits for it")
        return None

    def _refresh(self) -> list[Read]:
        """Now and then: how far the partitions go, whether there are new ones, and whether the topics are the same.

        Gives where new partitions start.
        """
        if time.monotonic() - self._refreshed < _REFRESH_SECONDS:
            return []
        self._refreshed = time.monotonic()
        try:
            partitions = self._describe(dict(self._topic_ids), lambda: 0.0)
            lows, ends = self._ask_offsets(partitions, lambda: 0.0)
        except InputError as error:
            cause = error.__cause__
            self._gone = self._gone + 1 if has_code(cause, "UNKNOWN_TOPIC_OR_PART") else 0
            if self._gone >= _GONE_AFTER or has_code(cause, "TOPIC_AUTHORIZATION_FAILED"):
                raise
            self._watch.warn(f"{error}; reading waits for it")
            return []
        self._gone = 0
        self._ends |= ends
        new = [] if self._until_end else [p for p in partitions if p not in self._next]
        for partition in new:
            self._base[partition] = lows[partition]
            self._next[partition] = [lows[partition], -1]
        if new:
            self._assign(new)
        return [Read(partition, lows[partition], -1, None) for partition in new]

    def close(self) -> None:
        with self._publishing:
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _at(partition: str, offset: int | None = None, epoch: int = -1) -> TopicPartition:
    from confluent_kafka import TopicPartition

    topic, _, number = partition.rpartition("/")
    if offset is None:
        return TopicPartition(topic, int(number))
    if epoch < 0:
        return TopicPartition(topic, int(number), offset)
    return TopicPartition(topic, int(number), offset, leader_epoch=epoch)
