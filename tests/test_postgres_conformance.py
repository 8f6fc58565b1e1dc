"""The PostgreSQL store passes the suite that is part of the package, on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.postgres import PostgresStore
from dalsegno.testing.stores import StoreSuite


class TestPostgresStore(StoreSuite):
    takes_over = True
    shared = True
    url: str
    places: dict[Path, str]

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> None:
        self.url, self.places = postgres_url, {}

    def make(self, place: Path) -> TaskActionStore:
        schema = self.places.setdefault(place, f"place{len(self.places)}")
        return PostgresStore(f"{self.url}?schema={schema}")

    async def displace(self, place: Path, job: str) -> None:
        other = self.make(place)
        await other.open(job, "another")
        await other.close()
