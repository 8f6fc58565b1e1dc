"""Batches of outputs in Kafka transactions, and the marker that says which batch was committed last.

The *marker* is an offset that each transaction commits with its records, for a consumer group that nobody is in, on
partition 0 of the topic: the number of the batch, with the run that wrote it as the metadata. Kafka sets it if and only
if the transaction commits.

Whatever goes wrong while a batch is written is settled in one way, the same as after a crash: a new producer with the
same transactional id is made, for which Kafka ends what the one before it left open; then the marker is read, which
nobody with an older producer can change any more; then the batch is written if the marker is not there yet. If another
run has set the marker meanwhile, this one is a zombie and gives up.

One thread at a time uses it, but for `interrupt`.
"""

from __future__ import annotations

import base64
import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dalsegno.errors import FencedError, StoreError
from dalsegno.runners.kafka_client import (
    REQUEST_SECONDS,
    START_SECONDS,
    WARN_AFTER_SECONDS,
    Watch,
    admin_module,
    ask,
    client_config,
    code_of,
    has_code,
    is_passing,
    made,
    text_of,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient

_STEP_SECONDS = 1.0
"""So long one request of the client may block; then it is asked whether the run is to end."""
_ATTEMPTS = 5
"""A batch is given up after so many failures that are not for want of a broker."""
_FENCED = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "TRANSACTION_COORDINATOR_FENCED")
_RECORD_BYTES = 100
"""At most this much a record takes beside its key, value and headers, with the batch that it is alone in."""


class Marker(NamedTuple):
    """The number of the batch that was committed last, and the run that did it."""

    batch: int
    run: str


class Outgoing(NamedTuple):
    """One record to write."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]

    @property
    def size(self) -> int:
        """How many bytes it takes at most, not compressed."""
        headers = sum(len(name.encode()) + len(value) + 10 for name, value in self.headers)
        return _RECORD_BYTES + len(self.key or b"") + len(self.value or b"") + headers

    def as_json(self) -> list[Any]:
        headers = [[name, _as_json(value)] for name, value in self.headers]
        return [self.topic, _as_json(self.key), _as_json(self.value), headers]

    @classmethod
    def of_json(cls, tree: list[Any]) -> Outgoing:
        topic, key, value, headers = tree
        return cls(topic, _of_json(key), _of_json(value), [(name, _of_json(value) or b"") for name, value in headers])


def _as_json(value: bytes | None) -> str | list[str] | None:
    """Text where it is UTF-8, else a list of its base64."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return [base64.b64encode(value).decode()]


def _of_json(tree: Any) -> bytes | None:
    if tree is None or isinstance(tree, str):
        return None if tree is None else tree.encode()
    return base64.b64decode(tree[0])


class Transactions:
    """Writes batches as *name*, which is the transactional id and the group of the marker, to what messages call
    *where*."""

    def __init__(self, name: str, where: str, servers: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._where = where
        self._watch = Watch(where)
        self._config = client_config(servers, config, self._watch)
        self._run = uuid.uuid4().hex
        self._began = 0.0
        """When what is under way was asked for."""
        self._interrupted = 0.0
        self._grace = math.inf
        """How long it may wait for a broker after that and after it was interrupted."""
        self._wake = threading.Event()
        self._admin: AdminClient | None = None
        self._settled: Consumer | None = None
        """Reads the marker when no transaction is open that may change it; else it waits for its end."""
        self._present: Consumer | None = None
        """Reads it as it is."""
        self._producer: Producer | None = None
        self._written = -1
        """The last batch that is known to be written by this run, or before it."""
        self._doubtful = False
        """Whether something failed, so that only a new producer tells what is written."""
        self._undelivered: tuple[KafkaError, Outgoing] | None = None
        """The first record of the present batch that could not be written."""
        self._batch_bytes = 1_000_000
        self.cluster = ""

    def interrupt(self, seconds: float) -> None:
        """What waits for a broker gives up after so many seconds. Any thread."""
        self._interrupted = time.monotonic()
        self._grace = min(self._grace, seconds)
        self._wake.set()

    def _left(self) -> float:
        """For how many seconds what is under way may still wait."""
        return max(self._began, self._interrupted) + self._grace - time.monotonic()

    def _left_at_start(self) -> float:
        return min(self._left(), self._began + START_SECONDS - time.monotonic())

    def close(self) -> None:
        producer, self._producer = self._producer, None
        consumers, self._settled, self._present = (self._settled, self._present), None, None
        if producer is not None:
            _throw_away(producer)
        for consumer in consumers:
            if consumer is not None:
                consumer.close()

    # What is there.

    def connect(self) -> None:
        """Find out which cluster it is; waits some time for a broker. Raises StoreError."""
        from confluent_kafka import Consumer, KafkaException
        from confluent_kafka.admin import AdminClient

        self._began = time.monotonic()
        self._admin = admin = made(lambda: AdminClient(self._config))

        def describe() -> Any:
            return admin.describe_cluster(request_timeout=REQUEST_SECONDS).result(REQUEST_SECONDS + 1)

        try:
            found = ask(admin, self._watch, describe, StoreError, self._where, self._left_at_start)
            self.cluster = found.cluster_id
        except KafkaException as error:
            raise StoreError(f"{self._where}: {text_of(error)}") from error
        own = {**self._config, "group.id": self._name, "enable.auto.commit": False}
        self._settled = made(lambda: Consumer({**own, "isolation.level": "read_committed"}))
        self._present = made(lambda: Consumer({**own, "isolation.level": "read_uncommitted"}))

    def limit_of(self, topic: str) -> int:
        """The greatest record that *topic* takes, in bytes; StoreError if there is no such topic."""
        from confluent_kafka import KafkaException, TopicCollection

        admin = self._admin
        assert admin is not None
        names = admin_module()
        resource = names.ConfigResource(names.ResourceType.TOPIC, topic)

        def describe() -> Any:
            topics = admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_SECONDS)
            return topics[topic].result(REQUEST_SECONDS + 1)

        def configs() -> Any:
            asked = admin.describe_configs([resource], request_timeout=REQUEST_SECONDS)
            return asked[resource].result(REQUEST_SECONDS + 1)

        try:
            ask(admin, self._watch, describe, StoreError, self._where, self._left_at_start)
        except KafkaException as error:
            raise StoreError(
                f"the topic {topic!r} of {self._where} cannot be written: {text_of(error)}. Create it, or let the "
                "client describe and write it"
            ) from error
        try:
            found = ask(admin, self._watch, configs, StoreError, self._where, self._left_at_start)
            limit = int(found["max.message.bytes"].value)
        except (KafkaException, KeyError, TypeError, ValueError):
            limit = 1_000_012  # who may not know it gets Kafka's default
        self._batch_bytes = min(limit, 1_000_000)
        return limit

    def read_marker(self, topic: str) -> Marker | None:
        """What is committed now. A transaction may be open that changes it, so it decides nothing."""
        return self._committed(self._present, topic)

    def _committed(self, consumer: Consumer | None, topic: str) -> Marker | None:
        from confluent_kafka import KafkaException

        assert consumer is not None
        while True:
            try:
                found = consumer.committed([_marker(topic)], REQUEST_SECONDS)[0]
            except KafkaException as error:
                self._wait_for_marker(error)
                continue
            if found.error is not None:
                self._wait_for_marker(found.error)
                continue
            if found.offset < 0:
                return None
            return Marker(found.offset, found.metadata or "")

    def _wait_for_marker(self, error: object) -> None:
        if has_code(error, *_FINAL):
            raise StoreError(
                f"the marker of {self._where}, an offset of the group {self._name!r}, cannot be read: {text_of(error)}"
            )
        self._wait(error)

    # Write.

    def take_over(self, topic: str, settled: Callable[[Marker | None], int]) -> None:
        """From now on no other run writes. *settled* is told the marker, and gives the batch that is written."""
        self._began = time.monotonic()
        settled(self.read_marker(topic))  # raises before anybody is fenced off
        self._retried(lambda: self._take_over(topic, settled))

    def _take_over(self, topic: str, settled: Callable[[Marker | None], int]) -> None:
        self._new_producer()
        batch = settled(self._committed(self._settled, topic))
        self._transaction(topic, batch, [])
        self._written, self._doubtful = batch, False

    def write(self, topic: str, batch: int, outgoing: list[Outgoing]) -> None:
        """Write a batch, unless it is written. Raises FencedError if another run does that, and StoreError."""
        self._began = time.monotonic()
        self._retried(lambda: self._write(topic, batch, outgoing))

    def _write(self, topic: str, batch: int, outgoing: list[Outgoing]) -> None:
        if self._doubtful:
            self._own(self.read_marker(topic))  # before another run is fenced off
            self._new_producer()
            self._written, self._doubtful = self._own(self._committed(self._settled, topic)), False
        if batch > self._written:
            self._transaction(topic, batch, outgoing)
            self._written = batch

    def _own(self, marker: Marker | None) -> int:
        """The batch that this run has written last."""
        if marker is None or marker.run != self._run:
            raise FencedError(
                f"another process writes the outputs of {self._name!r} to {self._where}, so this one has stopped. Run "
                "a job once at a time; another job needs another name"
            )
        return marker.batch

    def _retried(self, attempt: Callable[[], None]) -> None:
        from confluent_kafka import KafkaException

        failures = 0
        while True:
            try:
                attempt()
                return
            except KafkaException as error:
                self._doubtful = True
                failures += not (is_passing(code_of(error) or 0) or has_code(error, *_FENCED))
                if failures >= _ATTEMPTS or self._is_final(error):
                    raise self._refused(error) from error
                self._wait(error)

    def _new_producer(self) -> None:
        """A producer that has fenced off all others of this name, and ended what they had begun."""
        from confluent_kafka import Producer

        producer, self._producer = self._producer, None
        if producer is not None:
            _throw_away(producer)
        config = {
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "message.max.bytes": 1_000_000_000,  # it is the topic's limit that counts
            "batch.size": self._batch_bytes,
            **self._config,
            "transactional.id": self._name,
        }
        self._producer = producer = made(lambda: Producer(config))
        self._in_steps(producer.init_transactions)

    def _transaction(self, topic: str, batch: int, outgoing: list[Outgoing]) -> None:
        from confluent_kafka import KafkaException

        producer, consumer = self._producer, self._settled
        assert producer is not None
        assert consumer is not None
        self._undelivered = None
        producer.begin_transaction()
        for record in outgoing:
            self._produce(producer, record)
        # Before the marker: setting it blocks for a minute while no broker answers, whatever its time limit is.
        while producer.flush(_STEP_SECONDS):
            self._check_interrupted("records are not yet acknowledged")
            self._warn("records are not yet acknowledged")
        if self._undelivered is not None:
            raise KafkaException(self._undelivered[0])
        at = _marker(topic, batch, self._run)
        group = consumer.consumer_group_metadata()
        self._in_steps(lambda seconds: producer.send_offsets_to_transaction([at], group, seconds))
        self._in_steps(producer.commit_transaction)

    def _produce(self, producer: Producer, record: Outgoing) -> None:
        def delivered(error: Any, message: Message) -> None:
            if error is not None and self._undelivered is None:
                self._undelivered = error, record

        while True:
            try:
                producer.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    on_delivery=delivered,
                )
                producer.poll(0)
                return
            except BufferError as error:
                producer.poll(_STEP_SECONDS)
                self._check_interrupted(error)

    def _in_steps(self, request: Callable[[float], Any]) -> None:
        """Make a request of the client, one step after another until it is done."""
        from confluent_kafka import KafkaException

        while True:
            try:
                request(_STEP_SECONDS)
                return
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
                if self._watch.refused is not None:
                    raise StoreError(
                        f"{self._where}: the Kafka client is not let in: {text_of(self._watch.refused)}"
                    ) from error
                self._check_interrupted(error)
                self._warn(error)

    def _is_final(self, error: Exception) -> bool:
        """Whether another attempt would fail in the same way."""
        return has_code(error, *_FINAL) or (self._undelivered is not None and has_code(self._undelivered[0], *_FINAL))

    def _refused(self, error: Exception) -> StoreError:
        if self._undelivered is None:
            return StoreError(f"outputs cannot be written to {self._where}: {text_of(error)}. {_KEPT}")
        why, record = self._undelivered
        return StoreError(
            f"an output of {record.size:,} bytes cannot be written to the topic {record.topic!r} of {self._where}: "
            f"{text_of(why)}. {_KEPT}"
        )

    def _wait(self, error: object) -> None:
        """Before another attempt."""
        if self._watch.refused is not None:
            raise StoreError(f"{self._where}: the Kafka client is not let in: {text_of(self._watch.refused)}")
        self._check_interrupted(error)
        self._warn(error)
        self._wake.wait(0.25)

    def _warn(self, error: object) -> None:
        if time.monotonic() - self._began > WARN_AFTER_SECONDS:
            self._watch.warn(f"outputs wait for Kafka ({self._watch.why(error)})")

    def _check_interrupted(self, error: object) -> None:
        if self._left() <= 0:
            raise StoreError(
                f"outputs are not yet written to {self._where}: Kafka has not answered in time "
                f"({self._watch.why(error)}). {_KEPT}"
            )


_KEPT = "They are kept in the checkpoint; start the job again to write them"
_FINAL = (
    "MSG_SIZE_TOO_LARGE",
    "RECORD_LIST_TOO_LARGE",
    "TOPIC_AUTHORIZATION_FAILED",
    "INVALID_RECORD",
    "_UNKNOWN_TOPIC",
    "UNKNOWN_TOPIC_OR_PART",
    "POLICY_VIOLATION",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "INVALID_TRANSACTION_TIMEOUT",
    "UNSUPPORTED_VERSION",
    "_UNSUPPORTED_FEATURE",
)
"""Another attempt would fail in the same way."""


def _marker(topic: str, batch: int | None = None, run: str = "") -> TopicPartition:
    from confluent_kafka import TopicPartition

    return TopicPartition(topic, 0) if batch is None else TopicPartition(topic, 0, batch, run)


def _throw_away(producer: Producer) -> None:
    """What it has begun is ended if a broker answers, so that it holds up no reader; else by the next producer."""
    from confluent_kafka import KafkaException

    producer.purge()
    with contextlib.suppress(KafkaException):  # there is none to end, or no broker: its close() would wait for one
        producer.abort_transaction(_STEP_SECONDS)
