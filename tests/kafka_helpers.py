"""What the tests of the Kafka store do to topics behind its back."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewPartitions, NewTopic

from dalsegno.stores.base import ALONE, Worker
from dalsegno.stores.kafka import KafkaStore
from dalsegno.stores.kafka.cluster import topic_of
from tests.services.kafka import Kafka


def admin(kafka: Kafka) -> AdminClient:
    return AdminClient({**kafka.client_settings, "log_level": 0})


def topics(kafka: Kafka, prefix: str) -> list[str]:
    return [name for name in admin(kafka).list_topics(timeout=30).topics if name.startswith(prefix)]


def delete_topics(kafka: Kafka, prefix: str) -> None:
    client, found = admin(kafka), topics(kafka, prefix)
    for future in client.delete_topics(found).values() if found else ():
        future.result(30)


def create_topic(kafka: Kafka, name: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
    client = admin(kafka)
    client.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])[name].result(30)


def add_partitions(kafka: Kafka, topic: str, total: int) -> None:
    client = admin(kafka)
    client.create_partitions([NewPartitions(topic, total)])[topic].result(30)


def delete_records(kafka: Kafka, topic: str, partition: int, before: int) -> None:
    client, where = admin(kafka), TopicPartition(topic, partition, before)
    client.delete_records([where])[where].result(30)


def write_foreign(kafka: Kafka, topic: str, partition: int, value: bytes | None) -> None:
    producer = Producer({**kafka.client_settings, "acks": "all"})
    producer.produce(topic, value, key=b"key", partition=partition)
    assert producer.flush(30) == 0


def log_starts(kafka: Kafka, topic: str, partitions: int) -> list[int]:
    """The offset at which the log of each partition begins."""
    client = admin(kafka)
    wanted = {TopicPartition(topic, number): OffsetSpec.earliest() for number in range(partitions)}
    return [future.result(30).offset for future in client.list_offsets(wanted).values()]


def begin_transaction(kafka: Kafka, topic: str, partition: int, value: bytes) -> Producer:
    """A transaction of somebody else that is open, with one message in it."""
    producer = Producer({**kafka.client_settings, "transactional.id": f"somebody {secrets.token_hex(8)}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0
    return producer


class Place:
    """A topic prefix of a test's own."""

    def __init__(self, kafka: Kafka, prefix: str) -> None:
        self.kafka, self.prefix = kafka, prefix

    def store(self, options: str = "partitions=3", servers: str | None = None) -> KafkaStore:
        return KafkaStore(f"kafka://{servers or self.kafka.url}/{self.prefix}?{options}")

    def topic(self, job: str = "job") -> str:
        return topic_of(self.prefix, job)

    @asynccontextmanager
    async def opened(
        self, worker: Worker = ALONE, options: str = "partitions=3", job: str = "job"
    ) -> AsyncIterator[KafkaStore]:
        store = self.store(options)
        await store.open(job, "the test", worker)
        try:
            yield store
        finally:
            await store.close()
