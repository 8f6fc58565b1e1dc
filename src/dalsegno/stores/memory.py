"""``memory://``: the model of a store, the simplest one that keeps the contract. Nothing outlives the process."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import ClassVar
from uuid import uuid4

from dalsegno.core.records import Record, TaskActionState, fold, uncovered
from dalsegno.errors import FencedError, OwnershipError, StoreError
from dalsegno.stores.base import Covered, PruneReport, TaskActionStore


class _Job:
    def __init__(self) -> None:
        self.identity = uuid4().hex
        self.records: dict[bytes, list[Record]] = {}
        self.pruned_through = 0
        self.owner: str | None = None
        self.epoch = 0


class MemoryStore(TaskActionStore):
    """Keeps records in a dict. A second `MemoryStore` over the same *jobs* stands for a restarted process."""

    persistent: ClassVar[bool] = False

    def __init__(self, jobs: dict[str, _Job] | None = None) -> None:
        self.jobs: dict[str, _Job] = {} if jobs is None else jobs
        self._job: _Job | None = None
        self._epoch = 0

    async def open(self, job: str, owner: str) -> None:
        found = self.jobs.setdefault(job, _Job())
        if found.owner is not None:
            raise OwnershipError(
                f"job {job!r} is already running in this process ({found.owner}); stop it first, or use another job"
                f" name"
            )
        found.owner = owner
        found.epoch += 1
        self._job, self._epoch = found, found.epoch

    def take_over(self, job: str) -> None:
        """Fence the present owner of *job*, as a new one would after a crash."""
        found = self.jobs[job]
        found.owner = None
        found.epoch += 1

    @property
    def identity(self) -> str:
        return self._opened().identity

    @property
    def pruned_through(self) -> int:
        return self._opened().pruned_through

    async def keys(self) -> builtins.list[bytes]:
        return list(self._opened().records)

    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self.list(key)

    async def put(self, records: Sequence[Record]) -> None:
        job = self._owned()
        for record in records:
            job.records.setdefault(record.key, []).append(record)

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        recorded = self._opened().records.get(key, [])
        of_task = [record for record in recorded if record.task == task]
        return next(iter(fold(of_task, self.open_body)), None)

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        return fold(self._opened().records.get(key, []), self.open_body)

    async def prune(self, covered: Covered) -> PruneReport:
        job = self._owned()
        messages = set(covered.messages)
        removed = 0
        for key in {key for key, _ in messages} & job.records.keys():
            kept = uncovered(job.records[key], messages)
            removed += len(job.records[key]) - len(kept)
            if kept:
                job.records[key] = kept
            else:
                del job.records[key]
        job.pruned_through = max(job.pruned_through, covered.checkpoint)
        return PruneReport(removed)

    async def close(self) -> None:
        if self._job is not None and self._job.epoch == self._epoch:
            self._job.owner = None
        self._job = None

    def _opened(self) -> _Job:
        if self._job is None:
            raise StoreError("the store is not open: call open(job, owner) first")
        return self._job

    def _owned(self) -> _Job:
        job = self._opened()
        if job.epoch != self._epoch:
            raise FencedError(
                f"this store no longer owns its job; {job.owner or 'another owner'} took it over, so nothing more may"
                f" be recorded here"
            )
        return job
