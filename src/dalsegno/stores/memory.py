"""``memory://``: the model of a store, the simplest one that keeps the contract. Nothing outlives the process."""

from __future__ import annotations

import builtins
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import ClassVar
from uuid import uuid4

from dalsegno.core.records import Record, TaskActionState, fold
from dalsegno.errors import FencedError, OwnershipError, StoreError
from dalsegno.stores.base import (
    ALONE,
    Covered,
    Decision,
    JobInfo,
    PruneReport,
    StoreInspector,
    TaskActionStore,
    Worker,
    check_worker,
    not_recorded,
    unknown_job,
)


class _Job:
    def __init__(self) -> None:
        self.identity = uuid4().hex
        self.records: dict[bytes, dict[int, Record]] = {}
        """The records of each key, numbered in the order in which they were put."""
        self.last_record = 0
        self.pruned_through = 0
        self.decisions: dict[tuple[bytes, str, str], tuple[int, Decision]] = {}
        self.last_decision = 0
        self.lock = threading.Lock()
        """For inspectors of other threads."""
        self.workers: dict[Worker, tuple[int, str | None]] = {}
        """Of each worker that may write, the epoch in which it opened the job, and who it is while it is alive."""
        self.epoch = 0
        self.last_owner = self.since = ""

    def living(self, worker: Worker) -> str | None:
        """Who is in the way of *worker*."""
        found = [who for one, (_, who) in self.workers.items() if one == worker or one.of != worker.of]
        return next((who for who in found if who is not None), None)

    def admit(self, worker: Worker, owner: str) -> int:
        self.epoch += 1
        self.workers = {one: which for one, which in self.workers.items() if one.of == worker.of}
        self.workers[worker] = self.epoch, owner
        self.last_owner, self.since = owner, datetime.now().astimezone().isoformat(timespec="seconds")
        return self.epoch


class MemoryStore(TaskActionStore):
    """Keeps records in a dict. A second `MemoryStore` over the same *jobs* stands for a restarted process."""

    persistent: ClassVar[bool] = False
    shared: ClassVar[bool] = True

    def __init__(self, jobs: dict[str, _Job] | None = None) -> None:
        self.jobs: dict[str, _Job] = {} if jobs is None else jobs
        self._job: _Job | None = None
        self._worker, self._epoch = ALONE, 0

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        check_worker("the store in memory", worker, shared=self.shared)
        found = self.jobs.setdefault(job, _Job())
        living = found.living(worker)
        if living is not None:
            raise OwnershipError(
                f"job {job!r} is already running in this process ({living}); stop it first, or use another job name"
            )
        self._job, self._worker, self._epoch = found, worker, found.admit(worker, owner)

    def take_over(self, job: str) -> None:
        """Fence the present owners of *job*, as new ones would after a crash."""
        found = self.jobs[job]
        found.workers = {}

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
        with job.lock:
            for record in records:
                job.last_record += 1
                job.records.setdefault(record.key, {})[job.last_record] = record

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        recorded = self._opened().records.get(key, {}).values()
        of_task = [record for record in recorded if record.task == task]
        return next(iter(fold(of_task, self.open_body)), None)

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        return fold(self._opened().records.get(key, {}).values(), self.open_body)

    async def prune(self, covered: Covered) -> PruneReport:
        job = self._owned()
        messages = set(covered.messages)
        removed = 0
        with job.lock:
            job.decisions = {which: made for which, made in job.decisions.items() if which[:2] not in messages}
            for key in {key for key, _ in messages} & job.records.keys():
                recorded = job.records[key]
                kept = {n: record for n, record in recorded.items() if (key, record.message) not in messages}
                removed += len(recorded) - len(kept)
                if kept:
                    job.records[key] = kept
                else:
                    del job.records[key]
        job.pruned_through = max(job.pruned_through, covered.checkpoint)
        return PruneReport(removed)

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        return [made for made in self._opened().decisions.copy().values() if made[0] > after]

    def inspect(self) -> StoreInspector:
        return MemoryInspector(self.jobs)

    async def close(self) -> None:
        if self._job is not None and self._owns(self._job):
            self._job.workers[self._worker] = self._epoch, None
        self._job = None

    def _opened(self) -> _Job:
        if self._job is None:
            raise StoreError("the store is not open: call open(job, owner) first")
        return self._job

    def _owned(self) -> _Job:
        job = self._opened()
        if not self._owns(job):
            raise FencedError(
                f"this store no longer owns its job; {job.last_owner} took it over, so nothing more may be recorded"
                f" here"
            )
        return job

    def _owns(self, job: _Job) -> bool:
        return job.workers.get(self._worker, (0, None))[0] == self._epoch


class MemoryInspector(StoreInspector):
    """Looks into the same *jobs*, from the same process."""

    def __init__(self, jobs: dict[str, _Job]) -> None:
        self._jobs = jobs

    def jobs(self) -> list[JobInfo]:
        return [self._info(name, job) for name, job in sorted(self._jobs.copy().items())]

    def _info(self, name: str, job: _Job) -> JobInfo:
        return JobInfo(
            name,
            job.identity,
            job.epoch,
            job.last_owner,
            os.getpid(),
            socket.gethostname(),
            job.since,
            job.pruned_through,
            any(who is not None for _, who in job.workers.values()),
            len({(record.key, record.message) for record in self.records(name)}),
        )

    def messages(self, job: str) -> Iterator[tuple[bytes, str]]:
        return iter({(record.key, record.message): None for record in self.records(job)})

    def records(self, job: str, key: bytes | None = None, message: str | None = None) -> Iterator[Record]:
        found = self._job(job)
        with found.lock:
            numbered = [
                item for name, of_key in found.records.items() if key in (None, name) for item in of_key.items()
            ]
        return (record for _, record in sorted(numbered) if message in (None, record.message))

    def decisions(self, job: str) -> list[Decision]:
        return [decision for _, decision in self._job(job).decisions.copy().values()]

    def decide(self, job: str, decision: Decision) -> bool:
        found = self._job(job)
        with found.lock:
            if not any(r.message == decision.message for r in found.records.get(decision.key, {}).values()):
                raise not_recorded("the store in memory", job, decision.message)
            if decision[:3] in found.decisions:
                return False
            found.last_decision += 1
            found.decisions[decision[:3]] = (found.last_decision, decision)
            return True

    def close(self) -> None:
        pass

    def _job(self, job: str) -> _Job:
        try:
            return self._jobs[job]
        except KeyError:
            raise unknown_job("the store in memory", job, sorted(self._jobs.copy())) from None
