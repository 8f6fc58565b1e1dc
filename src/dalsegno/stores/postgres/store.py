"""The store: a connection that writes, one that does the rest, and a task that says that the owner is alive."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from dalsegno.core.records import Record, TaskActionState, fold
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
from dalsegno.stores.postgres.inspector import PostgresInspector
from dalsegno.stores.postgres.job import Job, take
from dalsegno.stores.postgres.link import Link
from dalsegno.stores.postgres.settings import Settings, parse_url

PRUNE_CHUNK = 1000
"""Messages that are pruned in one transaction; other writes go in between."""
BEAT_SECONDS = 5.0
"""`PostgresInspector` takes an owner for gone that has missed two beats."""

_T = TypeVar("_T")


class PostgresStore(TaskActionStore):
    """Keeps records in a PostgreSQL database; *where* is a URL or `Settings`."""

    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(self, where: str | Settings) -> None:
        self.settings = parse_url(where) if isinstance(where, str) else where
        self._open: _Open | None = None

    def __repr__(self) -> str:
        return f"PostgresStore({str(self.settings)!r})"

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        check_worker(str(self.settings), worker, shared=self.shared)
        if self._open is not None:
            raise OwnershipError(f"{self.settings}: this store object runs a job already: close it first")
        link = Link(self.settings)
        opening = partial(take, settings=self.settings, job=job, owner=owner, worker=worker, opening=uuid4().hex)
        try:
            taken = await link.do("open the store", opening, self.settings.patience / 4)
        except BaseException:
            await link.close()
            raise
        self._open = _Open(taken, Link(self.settings), link)

    @property
    def identity(self) -> str:
        return self._opened().job.identity

    @property
    def pruned_through(self) -> int:
        return self._opened().pruned_through

    async def keys(self) -> builtins.list[bytes]:
        opened = self._opened()
        return await opened.reader.do("read the keys", opened.job.keys)

    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self.list(key)

    async def put(self, records: Sequence[Record]) -> None:
        opened = self._opened()
        if records:
            await opened.finish(opened.put([*records]))

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        return next(iter(fold(await self._records(key, task), self.open_body)), None)

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        return fold(await self._records(key), self.open_body)

    async def _records(self, key: bytes, task: str | None = None) -> builtins.list[Record]:
        opened = self._opened()
        return await opened.reader.do("read what is recorded", partial(opened.job.records, key=key, task=task))

    async def prune(self, covered: Covered) -> PruneReport:
        removed = 0
        # The first chunk is there even when it is empty: it notes the checkpoint.
        for start in range(0, max(len(covered.messages), 1), PRUNE_CHUNK):
            opened = self._opened()
            chunk = covered.messages[start : start + PRUNE_CHUNK]
            removed += await opened.finish(opened.prune(chunk, covered.checkpoint))
        return PruneReport(removed)

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        opened = self._opened()
        return await opened.reader.do("read what was decided", partial(opened.job.decisions, after=after))

    def inspect(self) -> StoreInspector:
        return PostgresInspector(self.settings)

    async def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await asyncio.shield(asyncio.ensure_future(opened.close()))

    def _opened(self) -> _Open:
        if self._open is None:
            raise StoreError(f"{self.settings}: the store is not open: call open(job, owner) first")
        return self._open


class _Open:
    """An open job, its two connections, and the numbers of its writes."""

    def __init__(self, job: Job, writer: Link, reader: Link) -> None:
        self.job, self.writer, self.reader = job, writer, reader
        self.pruned_through = job.pruned_through
        self._puts = self._prunes = 0
        self._putting, self._pruning = asyncio.Lock(), asyncio.Lock()
        self._unfinished: set[asyncio.Task[Any]] = set()
        self._beating = asyncio.create_task(self._beat())

    async def put(self, records: Sequence[Record]) -> None:
        async with self._putting:
            self._puts += 1
            await self.writer.do("record a step", partial(self.job.put, number=self._puts, records=records))

    async def prune(self, messages: Sequence[tuple[bytes, str]], checkpoint: int) -> int:
        async with self._pruning:
            self._prunes += 1
            pruning = partial(self.job.prune, number=self._prunes, messages=messages, checkpoint=checkpoint)
            removed = await self.reader.do("prune", pruning)
            self.pruned_through = max(self.pruned_through, checkpoint)
        return removed

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What *work* gives. It is done to its end even if nobody waits for it any more, so that its number is used."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it, or was cancelled

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            with suppress(StoreError):
                await self.reader.do("say that the job runs", self.job.beat, 0)

    async def close(self) -> None:
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        with suppress(StoreError):
            await self.reader.do("close the store", self.job.leave, 0)
        await self.writer.close()
        await self.reader.close()
