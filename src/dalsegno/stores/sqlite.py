"""``sqlite:///agent.db``: task action states in one SQLite file, with the standard library alone.

* **Durable**: WAL with ``synchronous=FULL``; when `put` returns, its records survive a power cut.
* **Quick**: a batch is one statement. Every step of a statement gives up the interpreter lock and waits for it again,
  which costs up to 5 ms beside a busy event loop; so statements are few and rows are many.
* **Undisturbed**: one thread and connection write, another pair reads; a long reader never delays a write.
* **Owned**: the owner of a job holds a lock on a file of its own beside the database, ``agent.db.<digest>.lock``, which
  the operating system releases when the process ends, however it ends. Every write is checked against the epoch of
  its job as well, in the same statement. Several processes may run different jobs in one file.
* **Bounded**: pages that pruning frees are used again, and the log beside the file is cut back; the file keeps the size
  of its fullest moment. What is deleted stays readable in free pages until they are used again; only encryption, of
  the disk or of the bodies by a store around this one, keeps it from whoever gets hold of the file.

The file must be on a local disk: SQLite's locks and its write-ahead log do not work on network file systems.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
from dalsegno.stores.sqlite_file import JobFile
from dalsegno.stores.sqlite_inspector import SqliteInspector

PRUNE_CHUNK = 1000
"""Messages that are pruned in one transaction; other writes go in between."""

_T = TypeVar("_T")


class SqliteStore(TaskActionStore):
    """Keeps records in the SQLite file *path*, which is created together with its folder."""

    persistent: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        self._open: _Open | None = None

    def __repr__(self) -> str:
        return f"SqliteStore({str(self.path)!r})"

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        check_worker(str(self.path), worker, shared=self.shared)
        if self._open is not None:
            raise OwnershipError(f"{self.path}: this store object runs a job already: close it first")
        writer, reader = _thread("writer"), _thread("reader")
        opening = writer.submit(JobFile, self.path, job, owner)
        try:
            file = await asyncio.shield(asyncio.wrap_future(opening))
        except BaseException:
            # When `open` is cancelled half-way, the job must not stay owned.
            opening.add_done_callback(_close_opened)
            writer.shutdown(wait=False)
            reader.shutdown(wait=False)
            raise
        self._open = _Open(file, writer, reader)

    @property
    def identity(self) -> str:
        return self._opened().file.identity

    @property
    def pruned_through(self) -> int:
        return self._opened().file.pruned_through

    async def keys(self) -> builtins.list[bytes]:
        return [*self._opened().file.recorded]

    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self.list(key) if key in self._opened().file.recorded else []

    async def put(self, records: Sequence[Record]) -> None:
        file, writer, _ = self._opened()
        if records:
            file.check_place()
            await _run(writer, file.insert, records)

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        file, _, reader = self._opened()
        states = await _run(reader, file.states, key, task, self.open_body)
        return states[0] if states else None

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        file, _, reader = self._opened()
        return await _run(reader, file.states, key, None, self.open_body)

    async def prune(self, covered: Covered) -> PruneReport:
        removed = 0
        # The first chunk is there even when it is empty: it notes the checkpoint.
        for start in range(0, max(len(covered.messages), 1), PRUNE_CHUNK):
            file, writer, _ = self._opened()
            file.check_place()
            chunk = covered.messages[start : start + PRUNE_CHUNK]
            removed += await _run(writer, file.delete, chunk, covered.checkpoint)
        return PruneReport(removed)

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        file, _, reader = self._opened()
        return await _run(reader, file.decisions, after)

    def inspect(self) -> StoreInspector:
        return SqliteInspector(self.path)

    async def close(self) -> None:
        if self._open is None:
            return
        file, writer, reader = self._open
        self._open = None
        # In both threads, so that what was begun there ends first.
        reading = reader.submit(file.close_reader)
        closing = writer.submit(file.close, reading)
        reader.shutdown(wait=False)
        writer.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closing))

    def _opened(self) -> _Open:
        if self._open is None:
            raise StoreError(f"{self.path}: the store is not open: call open(job, owner) first")
        return self._open


class _Open(NamedTuple):
    file: JobFile
    writer: ThreadPoolExecutor
    reader: ThreadPoolExecutor


def _thread(role: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"dalsegno-sqlite-{role}")


async def _run(thread: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
    """Run *function* in *thread*, and see to it that a busy event loop does not starve that thread."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def give_way() -> None:
        # The loop gives up the interpreter lock for an instant at each of its turns and is the first to take it again,
        # so the thread may wait for seconds, and each instant also begins its wait of 5 ms anew.
        nonlocal timer
        time.sleep(0.0001)
        timer = loop.call_later(0.002, give_way)

    timer = loop.call_later(0.005, give_way)
    try:
        return await loop.run_in_executor(thread, function, *args)
    finally:
        timer.cancel()


def _close_opened(opening: Future[JobFile]) -> None:
    if opening.exception() is None:
        opening.result().close()
