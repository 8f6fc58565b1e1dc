"""Reads ranges of a topic's log, to ends that are known before: never "until nothing comes"."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from dalsegno.errors import StoreError
from dalsegno.stores.kafka.cluster import Cluster, client_logger, errors, explained
from dalsegno.stores.kafka.settings import Settings

Take = Callable[[int, int, bytes | None], None]
"""Is given partition, offset and value of each message."""


class Truncated(Exception):
    """The log of *partition* no longer has what is wanted; it was cut back meanwhile."""

    def __init__(self, partition: int) -> None:
        super().__init__(f"partition {partition}")
        self.partition = partition


class LogReader:
    """A consumer. One thread at a time may use it."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.settings, self._cluster = settings, cluster
        self.bytes_read = 0
        """What was read, in bytes of values."""
        with errors(settings, "make a consumer with these settings"):
            self._consumer = Consumer(
                {**settings.consumer(), "error_cb": cluster.trouble, "log_level": 4}, logger=client_logger
            )

    def read(self, topic: str, ranges: Mapping[int, tuple[int, int]], take: Take) -> None:
        """Give *take* every committed message of *ranges*, ``{partition: (begin, end)}``.

        Returns when each end is reached, also if what lies before it was aborted. Raises `Truncated`, and `StoreError`
        when nothing comes for longer than the timeout although an end is not reached.
        """
        wanted = {partition: end for partition, (begin, end) in ranges.items() if begin < end}
        if not wanted:
            return
        position = {partition: ranges[partition][0] for partition in wanted}
        self._consumer.assign([TopicPartition(topic, partition, position[partition]) for partition in wanted])
        try:
            self._read(topic, wanted, position, take)
        finally:
            self._consumer.unassign()

    def _read(self, topic: str, wanted: dict[int, int], position: dict[int, int], take: Take) -> None:
        doing = f"read topic {topic}"
        patience = self.settings.timeout + self.settings.transaction_timeout
        moved = time.monotonic()
        while any(position[partition] < end for partition, end in wanted.items()):
            for message in self._next(doing):
                partition, offset = message.partition(), message.offset()
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    self._fault(doing, error, partition)
                    continue
                if partition is None or offset is None or partition not in wanted:
                    continue
                if offset > position[partition] or error is None:
                    moved = time.monotonic()
                if error is None and offset < wanted[partition]:
                    value = message.value()
                    self.bytes_read += len(value or b"")
                    take(partition, offset, value)
                position[partition] = max(position[partition], offset + (error is None))
            self._cluster.check(doing)
            if time.monotonic() - moved > patience:
                raise self._stuck(topic, wanted, position, patience)

    def _next(self, doing: str) -> list[Message]:
        """What is there by now; `consume` alone would wait for a full list."""
        with errors(self.settings, doing):
            message = self._consumer.poll(0.1)
            return [] if message is None else [message, *self._consumer.consume(1000, 0)]

    def _fault(self, doing: str, error: KafkaError, partition: int | None) -> None:
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE) and partition is not None:
            raise Truncated(partition)
        if error.fatal() or error.code() in _FINAL:
            raise explained(self.settings, doing, error)
        client_logger.info("%s: %s: %s", self.settings, doing, error.str())

    def _stuck(self, topic: str, wanted: dict[int, int], position: dict[int, int], patience: float) -> StoreError:
        behind = "; ".join(
            f"partition {partition} to offset {end}, got to {position[partition]}"
            for partition, end in wanted.items()
            if position[partition] < end
        )
        return StoreError(
            f"{self.settings}: topic {topic} cannot be read to its end: wanted {behind}, and nothing came for"
            f" {patience:.0f} seconds. Either its brokers are not well, or a transaction of somebody else is open in it"
        )

    def close(self) -> None:
        self._consumer.close()


_FINAL = (
    *(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._BAD_MSG),
    *(KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION),
)
