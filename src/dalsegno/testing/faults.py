"""`FaultStore`: a store that fails where a test wants it to."""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dalsegno.core.records import Record, TaskActionState
from dalsegno.errors import DefinitionError, StoreError
from dalsegno.stores.base import ALONE, Covered, Decision, PruneReport, TaskActionStore, Worker
from dalsegno.stores.wrapping import WrappingStore

Method = Literal["open", "keys", "claim", "put", "get", "list", "prune", "decisions", "close"]

_T = TypeVar("_T")
_METHODS = ("open", "keys", "claim", "put", "get", "list", "prune", "decisions", "close")


@dataclass(frozen=True)
class Fault:
    """What becomes of the *number*-th call of *method*, from 1, and of the *times* - 1 calls after it.

    ``"before"``: it fails and does nothing. ``"after"``: it does all of its work, and fails. ``"torn"``, for ``put``:
    half of the records are written, and it fails, as it must never be; for proving that a test would find that.
    ``"lost"``: it fails and does nothing, and so does every later call of any method, until `FaultStore.reconnect`.
    ``"never"``: only the *delay*. *delay*, in seconds, is waited for first. *error* is what is raised, a `StoreError`
    unless given.
    """

    method: Method
    number: int = 1
    when: Literal["before", "after", "torn", "lost", "never"] = "before"
    times: int = 1
    delay: float = 0.0
    error: Exception | None = None

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise DefinitionError(f"method={self.method!r} is none of those that can fail: {', '.join(_METHODS)}")
        if self.when not in ("before", "after", "torn", "lost", "never"):
            raise DefinitionError(f"when={self.when!r} is not one of 'before', 'after', 'torn', 'lost', 'never'")
        if self.when == "torn" and self.method != "put":
            raise DefinitionError(f"only a put can be torn, not {self.method!r}")
        if self.number < 1 or self.times < 1 or self.delay < 0:
            raise DefinitionError(f"{self!r}: number and times are from 1 on, and delay is no less than 0")

    def strikes(self, method: str, number: int) -> bool:
        return method == self.method and self.number <= number < self.number + self.times


class FaultStore(WrappingStore):
    """Passes everything on to *inner*, with *faults*. `calls` counts the calls of each method, failed ones too."""

    def __init__(self, inner: TaskActionStore, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = [*faults]
        self.calls: Counter[str] = Counter()
        self.connected = True

    def lose_connection(self) -> None:
        """From now on every method fails and does nothing."""
        self.connected = False

    def reconnect(self) -> None:
        self.connected = True

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        await self._call("open", lambda: self.inner.open(job, owner, worker))

    async def keys(self) -> builtins.list[bytes]:
        return await self._call("keys", self.inner.keys)

    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self._call("claim", lambda: self.inner.claim(key))

    async def put(self, records: Sequence[Record]) -> None:
        async def half() -> None:
            await self.inner.put(records[: len(records) // 2])

        await self._call("put", lambda: self.inner.put(records), half)

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        return await self._call("get", lambda: self.inner.get(key, task))

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self._call("list", lambda: self.inner.list(key))

    async def prune(self, covered: Covered) -> PruneReport:
        return await self._call("prune", lambda: self.inner.prune(covered))

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        return await self._call("decisions", lambda: self.inner.decisions(after))

    async def close(self) -> None:
        await self._call("close", self.inner.close)

    async def _call(
        self, method: str, work: Callable[[], Awaitable[_T]], half: Callable[[], Awaitable[None]] | None = None
    ) -> _T:
        self.calls[method] += 1
        number = self.calls[method]
        fault = next((fault for fault in self.faults if fault.strikes(method, number)), None)
        if fault is not None and fault.delay:
            await asyncio.sleep(fault.delay)
        if fault is not None and fault.when == "lost":
            self.connected = False
        if not self.connected and method != "close":
            raise self._failure(fault, f"the connection is lost ({method} {number})")
        if fault is None or fault.when in ("never", "lost"):
            return await work()
        if fault.when == "after":
            await work()
            if method == "open":
                await self.inner.close()  # what nobody knows of cannot stay open
        elif fault.when == "torn" and half is not None:
            await half()
        raise self._failure(fault, f"{method} {number} fails {fault.when} its work, as the test wants it")

    def _failure(self, fault: Fault | None, text: str) -> Exception:
        return fault.error if fault is not None and fault.error is not None else StoreError(text)
