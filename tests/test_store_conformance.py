"""Every store that is part of the package passes the suite that is part of the package."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.testing.stores import StoreSuite


class TestMemoryStore(StoreSuite):
    persistent = False
    shared = True
    places: ClassVar[dict[Path, dict[str, Any]]] = {}

    def make(self, place: Path) -> TaskActionStore:
        return MemoryStore(self.places.setdefault(place, {}))

    async def displace(self, place: Path, job: str) -> None:
        MemoryStore(self.places[place]).take_over(job)


class TestSqliteStore(StoreSuite):
    def make(self, place: Path) -> TaskActionStore:
        return SqliteStore(place / "agent.db")

    async def displace(self, place: Path, job: str) -> None:
        with closing(sqlite3.connect(place / "agent.db")) as database, database:
            database.execute("UPDATE jobs SET epoch = epoch + 1 WHERE name = ?", (job,))
