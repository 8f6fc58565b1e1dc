"""Group commit: one writer per process that batches the records of all messages in flight into one store write.

Records become durable in the order in which they were appended, so whoever waits for a record waits for everything
before it. A record that nobody waits for is written after at most *linger* seconds.

After a failed write nothing is accepted any more: every waiter, and every later append, gets a `StoreError`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from dalsegno.core.records import Record
from dalsegno.errors import StoreError

Put = Callable[[Sequence[Record]], Awaitable[None]]
WhenDurable = Callable[[StoreError | None], None]


class GroupCommit:
    """The journal's way into the store. Not thread-safe: all of it runs on the event loop that it is made in.

    *linger* is in seconds; *max_batch* is in records, *max_bytes* in bytes of record bodies (one record may exceed it).
    """

    def __init__(self, put: Put, *, linger: float = 0.002, max_batch: int = 2000, max_bytes: int = 8_000_000) -> None:
        self._loop = asyncio.get_running_loop()  # asked for once: it is a system call each time
        self._put = put
        self._linger = linger
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._pending: deque[Record] = deque()
        self._pending_bytes = 0
        self._waiters: deque[tuple[int, WhenDurable]] = deque()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._urgent = False
        self._writer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.appended = 0
        self.durable = 0
        self.batches = 0

    def append(self, record: Record) -> None:
        """Take *record*; it is durable when a later `barrier` returns. Raises `StoreError` after a failed write."""
        if self._failure is not None:
            raise self._error()
        self._pending.append(record)
        self._pending_bytes += len(record.body)
        self.appended += 1
        if self._writer is None and self._timer is None:
            self._timer = self._loop.call_later(self._linger, self._start)

    @property
    def crowded(self) -> bool:
        """Whether so much is pending that whoever appends should wait."""
        return len(self._pending) > 2 * self._max_batch or self._pending_bytes > 2 * self._max_bytes

    def check(self) -> None:
        """Raise `StoreError` if a write has failed."""
        if self._failure is not None:
            raise self._error()

    async def barrier(self) -> None:
        """Return when everything appended so far is durable; raises `StoreError` when it could not be made so."""
        self.check()
        if self.durable == self.appended:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self.when_durable(functools.partial(_wake, waiter))
        await waiter
        self.check()  # the write after this one may have failed meanwhile, because the job has a new owner, for one

    def when_durable(self, then: WhenDurable) -> None:
        """Call *then* with None when everything appended so far is durable, or with the error if it cannot be made so.

        Calls come in the order in which they were asked for, from the event loop, never from within this method.
        """
        self._waiters.append((self.appended, then))
        if self._failure is not None or self.durable == self.appended:
            self._loop.call_soon(self._release)
        elif self._writer is None and not self._urgent:
            if self._timer is not None:
                self._timer.cancel()
            # Not at once: what else is ready to run in this turn of the loop joins the batch.
            self._timer = self._loop.call_soon(self._start)
            self._urgent = True

    async def close(self) -> None:
        """Write what is pending, unless a write has failed before."""
        if self._failure is None:
            await self.barrier()
        elif self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        self._timer = None
        self._urgent = False
        self._writer = self._loop.create_task(self._write(), name="dalsegno-group-commit")

    async def _write(self) -> None:
        try:
            while self._pending and self._failure is None:
                batch = self._take()
                await self._put(batch)
                self.batches += 1
                self.durable += len(batch)
                # Later, so that the store is at work on the next batch meanwhile.
                self._loop.call_soon(self._release)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._writer = None

    def _take(self) -> list[Record]:
        if len(self._pending) <= self._max_batch and self._pending_bytes <= self._max_bytes:
            batch = list(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
            return batch
        batch, size = [], 0
        while self._pending and len(batch) < self._max_batch:
            size += len(self._pending[0].body)
            if batch and size > self._max_bytes:
                break
            batch.append(self._pending.popleft())
            self._pending_bytes -= len(batch[-1].body)
        return batch

    def _release(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.durable:
            self._waiters.popleft()[1](None)
        if self._failure is not None:
            while self._waiters:
                self._waiters.popleft()[1](self._error())

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._pending.clear()
        self._pending_bytes = 0
        self._release()

    def _error(self) -> StoreError:
        if isinstance(self._failure, StoreError):
            return self._failure
        error = StoreError(
            f"a write to the store failed, so nothing may go on ({type(self._failure).__name__}: {self._failure})"
        )
        error.__cause__ = self._failure
        return error


def _wake(waiter: asyncio.Future[None], error: StoreError | None) -> None:
    if waiter.done():  # cancelled
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
