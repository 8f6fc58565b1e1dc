"""The Kafka store passes the suite that is part of the package, on a real broker."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.kafka import KafkaStore
from dalsegno.testing.stores import StoreSuite
from tests.kafka_helpers import delete_topics
from tests.services.kafka import Kafka


class TestKafkaStore(StoreSuite):
    takes_over = True
    shared = True
    kafka: Kafka
    names: dict[Path, str]

    @pytest.fixture(autouse=True)
    def _broker(self, kafka_server: Kafka) -> Iterator[None]:
        self.kafka, self.names = kafka_server, {}
        yield
        for name in self.names.values():
            delete_topics(kafka_server, name)

    def make(self, place: Path) -> TaskActionStore:
        # Test runs may share a broker, and the folders of each have the same names.
        name = self.names.setdefault(place, f"test-{secrets.token_hex(8)}")
        return KafkaStore(f"kafka://{self.kafka.url}/{name}?partitions=3")

    async def displace(self, place: Path, job: str) -> None:
        other = self.make(place)
        await other.open(job, "another")
        await other.close()
