"""The store: `OwnedJob` in two threads, one that writes and one that reads."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar

from dalsegno.core.records import Record, TaskActionState
from dalsegno.errors import OwnershipError, StoreError
from dalsegno.stores.base import (
    ALONE,
    Covered,
    Decision,
    PruneReport,
    StoreInspector,
    TaskActionStore,
    Worker,
    check_worker,
)
from dalsegno.stores.kafka.inspector import KafkaInspector
from dalsegno.stores.kafka.job import OwnedJob
from dalsegno.stores.kafka.settings import Settings, parse_url

PRUNE_CHUNK = 10_000
"""Messages that are pruned in one transaction; other writes go in between."""

_T = TypeVar("_T")


class KafkaStore(TaskActionStore):
    """Keeps the records of each job in a Kafka topic of its own; *where* is a URL or `Settings`."""

    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(self, where: str | Settings) -> None:
        self.settings = parse_url(where) if isinstance(where, str) else where
        self._open: _Open | None = None

    def __repr__(self) -> str:
        return f"KafkaStore({str(self.settings)!r})"

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        check_worker(str(self.settings), worker, shared=self.shared)
        if self._open is not None:
            raise OwnershipError(f"{self.settings}: this store object runs a job already: close it first")
        writer, reader = _thread("writer"), _thread("reader")
        opening = writer.submit(OwnedJob, self.settings, job, owner, worker)
        try:
            opened = await asyncio.shield(asyncio.wrap_future(opening))
        except BaseException:
            opening.add_done_callback(_close_opened)
            writer.shutdown(wait=False)
            reader.shutdown(wait=False)
            raise
        self._open = _Open(opened, writer, reader)

    @property
    def identity(self) -> str:
        return self._opened().job.identity

    @property
    def pruned_through(self) -> int:
        return self._opened().job.pruned_through

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from the topic since the job was opened."""
        return self._opened().job.log.bytes_read

    async def keys(self) -> builtins.list[bytes]:
        job, _, reader = self._opened()
        return await _run(reader, job.keys)

    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        job, _, reader = self._opened()
        known = job.claim_at_once(key, self.open_body)
        return await _run(reader, job.claim, key, self.open_body) if known is None else known

    async def put(self, records: Sequence[Record]) -> None:
        job, writer, _ = self._opened()
        if records:
            await _run(writer, job.put, records)

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        job, _, reader = self._opened()
        return next(iter(await _run(reader, job.states, key, task, self.open_body)), None)

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        job, _, reader = self._opened()
        return await _run(reader, job.states, key, None, self.open_body)

    async def prune(self, covered: Covered) -> PruneReport:
        removed = 0
        # The first chunk is there even when it is empty: it notes the checkpoint.
        for start in range(0, max(len(covered.messages), 1), PRUNE_CHUNK):
            job, writer, reader = self._opened()
            chunk = Covered(covered.checkpoint, covered.messages[start : start + PRUNE_CHUNK])
            count, marks = await _run(writer, job.prune, chunk)
            removed += count
            await _run(reader, job.delete, marks)
        return PruneReport(removed)

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        job, _, reader = self._opened()
        return await _run(reader, job.decisions, after)

    def inspect(self) -> StoreInspector:
        return KafkaInspector(self.settings)

    async def close(self) -> None:
        if self._open is None:
            return
        job, writer, reader = self._open
        self._open = None
        # After what was begun in both threads.
        reading = reader.submit(lambda: None)
        closing = writer.submit(_close, job, reading)
        reader.shutdown(wait=False)
        writer.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closing))

    def _opened(self) -> _Open:
        if self._open is None:
            raise StoreError(f"{self.settings}: the store is not open: call open(job, owner) first")
        return self._open


class _Open(NamedTuple):
    job: OwnedJob
    writer: ThreadPoolExecutor
    reader: ThreadPoolExecutor


def _thread(role: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"dalsegno-kafka-{role}")


async def _run(thread: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(thread, function, *args)


def _close(job: OwnedJob, reading: Future[None]) -> None:
    reading.result()
    job.close()


def _close_opened(opening: Future[OwnedJob]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
