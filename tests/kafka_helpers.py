"""What the tests of the Kafka store do to topics behind its back."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.services.kafka import Kafka


def admin(kafka: Kafka) -> AdminClient:
    return AdminClient({**kafka.client_settings})


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
