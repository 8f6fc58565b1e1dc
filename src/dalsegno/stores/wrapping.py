"""The base of stores that add something to another one: all is passed on, and a subclass changes what it must."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from dalsegno.core.records import OpenBody, Record, TaskActionState
from dalsegno.stores.base import ALONE, Covered, Decision, PruneReport, StoreInspector, TaskActionStore, Worker


class WrappingStore(TaskActionStore):
    """Passes everything on to *inner*."""

    def __init__(self, inner: TaskActionStore) -> None:
        self.inner = inner

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return self.inner.persistent

    def read_through(self, open_body: OpenBody | None) -> None:
        self.inner.read_through(open_body)

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.inner.shared

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        await self.inner.open(job, owner, worker)

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def pruned_through(self) -> int:
        return self.inner.pruned_through

    async def keys(self) -> builtins.list[bytes]:
        return await self.inner.keys()

    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self.inner.claim(key)

    async def put(self, records: Sequence[Record]) -> None:
        await self.inner.put(records)

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        return await self.inner.get(key, task)

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self.inner.list(key)

    async def prune(self, covered: Covered) -> PruneReport:
        return await self.inner.prune(covered)

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        return await self.inner.decisions(after)

    def inspect(self) -> StoreInspector:
        return self.inner.inspect()

    async def close(self) -> None:
        await self.inner.close()
