"""The brokers, as a store sees them: topics, offsets, errors. Everything here blocks, for a bounded time."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from dalsegno.errors import FencedError, StoreError
from dalsegno.stores.kafka.settings import Settings

logger = logging.getLogger("dalsegno.kafka")
client_logger = logging.getLogger("dalsegno.kafka.client")

_T = TypeVar("_T")

_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
_REFUSED = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL)
_ADVICE = {
    KafkaError._TRANSPORT: "no broker can be reached: see to it that they run and that host and port are right",
    KafkaError._ALL_BROKERS_DOWN: "no broker can be reached: see to it that they run and that host and port are right",
    KafkaError._TIMED_OUT: "the brokers did not answer in time: see whether they are well",
    KafkaError._MSG_TIMED_OUT: "the brokers did not take it in time: see whether they run and have room on their disks",
    KafkaError.NOT_ENOUGH_REPLICAS: "too few replicas are in sync: see whether all brokers run",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user needs the rights to describe, read, write, create and delete "
    "records of the topics of this prefix",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the user needs the right to write with transactional ids of "
    "this prefix",
    KafkaError.POLICY_VIOLATION: "a policy of the cluster forbids the topic: create it by hand",
}


class Refused(StoreError):
    """The brokers refuse this client; trying again is of no use."""


def topic_of(prefix: str, job: str) -> str:
    """The topic of *job*: what can be read of its name, and a digest of all of it."""
    digest = blake2b(job.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{prefix}.{re.sub('[^A-Za-z0-9_]', '-', job)[:40]}-{digest}"


def explained(where: object, doing: str, error: KafkaError) -> StoreError:
    """The `StoreError` for an error of the client library."""
    text = f"{where}: cannot {doing}: {error.str()} ({error.name()})"
    if error.code() in _FENCED:
        return FencedError(
            f"{where}: this process no longer owns its job, another one took it over, so nothing more may be recorded"
            f" here ({error.name()})"
        )
    if error.code() in _REFUSED:
        return Refused(f"{text}; the brokers refuse this client: check the security settings, user and password")
    return StoreError(f"{text}; {_ADVICE.get(error.code(), 'see the cause')}")


@contextmanager
def errors(where: object, doing: str) -> Iterator[None]:
    """Turn errors of the client library into those of this one."""
    try:
        yield
    except ERRORS as error:
        raise explained(where, doing, reason_of(error)) from error


ERRORS = (KafkaException, SystemError)
"""What the client library raises; a `SystemError` when an error comes up within a callback."""


def reason_of(error: KafkaException | SystemError) -> KafkaError:
    """The client library's error in what it raised."""
    found = error if isinstance(error, KafkaException) else error.__cause__
    if not isinstance(found, KafkaException):
        raise error
    reason: KafkaError = found.args[0]
    return reason


@dataclass(frozen=True)
class Topic:
    """What the brokers say of a topic."""

    name: str
    partitions: int
    ready: bool
    """Whether each partition has a leader."""
    replicas: int
    config: Mapping[str, str]

    @property
    def largest(self) -> int:
        """Bytes that a batch of messages may have."""
        return int(self.config["max.message.bytes"])


class Cluster:
    """An admin client."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._refused: KafkaError | None = None
        self._connected = False
        with errors(settings, "make a client with these settings"):
            self._admin = AdminClient(
                {**settings.common(), "error_cb": self.trouble, "log_level": 4},  # type: ignore[dict-item]
                logger=client_logger,
            )

    def trouble(self, error: KafkaError) -> None:
        """What the client library calls with errors that it goes on after, for ever."""
        # A handshake may fail when a broker goes away as well; before the first answer it is the settings.
        if error.code() in _REFUSED and not (self._connected and error.code() == KafkaError._SSL):
            self._refused = error
        else:
            client_logger.info("%s: %s", self.settings, error.str())

    def check(self, doing: str) -> None:
        """Raise `Refused` if the brokers have refused this client."""
        if self._refused is not None:
            raise explained(self.settings, doing, self._refused)

    def connect(self) -> None:
        """Wait until a broker answers."""
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                # Of all topics: to ask for one that is not there may create it.
                self._admin.list_topics(timeout=min(self.settings.timeout, 5))
                self._connected = True
                return
            except KafkaException as error:
                self._admin.poll(0)
                self.check("connect")
                if error.args[0].code() in _REFUSED or time.monotonic() > deadline:
                    raise explained(self.settings, "connect", error.args[0]) from error
                time.sleep(0.1)

    def topics(self) -> list[str]:
        """The topics of this prefix."""
        pattern = re.compile(re.escape(self.settings.prefix) + r"\.[A-Za-z0-9_-]{0,40}-[0-9a-f]{16}")
        with errors(self.settings, "list its topics"):
            found = self._admin.list_topics(timeout=self.settings.timeout).topics
        return sorted(name for name in found if pattern.fullmatch(name))

    def describe(self, name: str) -> Topic | None:
        """What the topic is like, None if there is none."""
        try:
            described = self._await(
                self._admin.describe_topics(TopicCollection([name]), request_timeout=self.settings.timeout)[name]
            )
            resource = ConfigResource(ResourceType.TOPIC, name)
            config = self._await(
                self._admin.describe_configs([resource], request_timeout=self.settings.timeout)[resource]
            )
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise explained(self.settings, f"describe topic {name}", error.args[0]) from error
        return Topic(
            name,
            len(described.partitions),
            all(partition.leader is not None and partition.leader.id >= 0 for partition in described.partitions),
            min((len(partition.replicas) for partition in described.partitions), default=0),
            {entry.name: entry.value for entry in config.values() if entry.value is not None},
        )

    def create(self, name: str) -> Topic:
        """The topic, which is created if it is not there, as others may do at the same time."""
        found = self.describe(name)
        if found is None:
            self._create(name)
        deadline = time.monotonic() + self.settings.timeout
        while found is None or not found.ready:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self.settings}: partitions of topic {name} have no leader: see whether all brokers run"
                )
            time.sleep(0.05)
            found = self.describe(name)
        return found

    def _create(self, name: str) -> None:
        topic = NewTopic(
            name,
            num_partitions=self.settings.partitions + 1,
            replication_factor=self.settings.replication or -1,
            config={"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"},
        )
        try:
            self._await(self._admin.create_topics([topic], request_timeout=self.settings.timeout)[name])
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise explained(self.settings, f"create topic {name}", error.args[0]) from error

    def starts(self, topic: str, partitions: list[int]) -> dict[int, int]:
        """The offset at which the log of each partition begins."""
        return self._offsets(topic, partitions, _EARLIEST, IsolationLevel.READ_UNCOMMITTED)

    def ends(self, topic: str, partitions: list[int], *, stable: bool = False) -> dict[int, int]:
        """The offset that follows the last message of each partition, or the last one that is decided (*stable*)."""
        isolation = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(topic, partitions, _LATEST, isolation)

    def _offsets(
        self, topic: str, partitions: list[int], spec: OffsetSpec, isolation: IsolationLevel
    ) -> dict[int, int]:
        wanted = {TopicPartition(topic, partition): spec for partition in partitions}
        return self._patiently(
            f"ask for the offsets of topic {topic}",
            lambda: {
                partition.partition: self._await(future).offset
                for partition, future in self._admin.list_offsets(
                    wanted, isolation_level=isolation, request_timeout=self.settings.timeout
                ).items()
            },
        )

    def delete_before(self, topic: str, marks: Mapping[int, int]) -> None:
        """Delete what lies before *marks*. That it could not be done is logged: a later prune does it."""
        wanted = [TopicPartition(topic, partition, mark) for partition, mark in marks.items()]
        if not wanted:
            return
        for partition, future in self._admin.delete_records(wanted, request_timeout=self.settings.timeout).items():
            try:
                self._await(future)
            except KafkaException as error:
                logger.warning(
                    "%s: what is covered could not be deleted from topic %s, partition %d; it stays until a later"
                    " prune: %s",
                    *(self.settings, topic, partition.partition, error.args[0].str()),
                )

    def note(self, group: str, topic: str, text: str) -> None:
        """Keep *text* under the name *group*. That it could not be kept is logged: nothing rests on it."""
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 0, text)])
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                futures = self._admin.alter_consumer_group_offsets([wanted], request_timeout=self.settings.timeout)
                (answer,) = self._await(futures[group]).topic_partitions
                failure = answer.error
            except KafkaException as error:
                failure = error.args[0]
            if failure is None:
                return
            if not (failure.retriable() or failure.code() in _MOVING) or time.monotonic() > deadline:
                logger.info("%s: cannot say that the owner is alive: %s", self.settings, failure.str())
                return
            time.sleep(0.05)

    def noted(self, group: str, topic: str) -> str | None:
        """What is kept under the name *group*."""
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])

        def ask() -> str | None:
            futures = self._admin.list_consumer_group_offsets([wanted], request_timeout=self.settings.timeout)
            (answer,) = self._await(futures[group]).topic_partitions
            if answer.error is not None:
                raise KafkaException(answer.error)
            return answer.metadata or None

        return self._patiently("ask whether an owner is alive", ask)

    def forget(self, group: str) -> None:
        """Forget what is kept under the name *group*; the brokers do so by themselves after some days."""
        with suppress(KafkaException):
            self._await(
                self._admin.delete_consumer_groups([group], request_timeout=min(self.settings.timeout, 2))[group]
            )

    def _patiently(self, doing: str, ask: Callable[[], _T]) -> _T:
        """Ask again while a broker or its partitions are on the move."""
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                return ask()
            except KafkaException as error:
                self.check(doing)
                if not (error.args[0].retriable() or error.args[0].code() in _MOVING) or time.monotonic() > deadline:
                    raise explained(self.settings, doing, error.args[0]) from error
                time.sleep(0.1)
                # The client library asks by itself after minutes only who leads a partition now.
                with suppress(KafkaException):
                    self._admin.list_topics(timeout=1)

    def _await(self, future: Future[_T]) -> _T:
        return future.result(self.settings.timeout + 5)

    def close(self) -> None:
        self._admin.poll(0)


_MOVING = (
    *(KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._WAIT_CACHE),
    *(KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART),
    *(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR),
    *(KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH),
    *(KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT, KafkaError.NETWORK_EXCEPTION),
)


def check_topic(settings: Settings, topic: Topic) -> list[str]:
    """What could be lost with the settings of *topic*, one sentence each; `StoreError` if they are impossible."""
    config = topic.config
    where = f"{settings}: topic {topic.name}"
    if "compact" in config.get("cleanup.policy", "delete"):
        raise StoreError(
            f"{where} has cleanup.policy={config['cleanup.policy']}, so the broker would remove records that are still"
            " needed: set it to delete"
        )
    insync = int(config.get("min.insync.replicas", "1"))
    if insync > topic.replicas:
        raise StoreError(
            f"{where} has min.insync.replicas={insync} and {topic.replicas} replicas, so nothing can be written: change"
            " one of them"
        )
    return [f"{where}: {sentence}" for sentence in _risks(config, topic.replicas, insync)]


def _risks(config: Mapping[str, str], replicas: int, insync: int) -> Iterator[str]:
    for name, unit in (("retention.ms", "milliseconds"), ("retention.bytes", "bytes of each partition")):
        if int(config.get(name, "-1")) >= 0:
            yield (
                f"{name}={config[name]}: the broker keeps {config[name]} {unit} only; what is recorded since the last"
                " checkpoint and of parked messages is lost when it is older. Set it to -1; the store deletes what is"
                " no longer needed"
            )
    if replicas < 2:
        yield "it has one replica: what is recorded is lost with the disk of one broker"
    elif insync < 2:
        yield (
            f"min.insync.replicas=1 with {replicas} replicas: what one broker alone has taken counts as recorded, and"
            " is lost with it. Set it to 2"
        )
    if config.get("unclean.leader.election.enable", "false") == "true":
        yield "unclean.leader.election.enable=true: records are lost when a replica that lags behind becomes the leader"
