"""Encryption of records, around any store.

Bodies are sealed on their way in and opened on their way out, each bound to its job, the store's identity, its key,
message and action task. What a store needs in order to find and to order records stays in clear: those, and the number,
order and size of records. A record that was copied here from another place cannot be opened; one that was moved or
doubled within its action task is refused where the table of transitions forbids it. That a record is missing, or that
the whole store is an earlier copy, no encryption can tell.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from dalsegno.cipher import PayloadCipher, place, seal, unseal
from dalsegno.core.records import Record, TaskActionState
from dalsegno.errors import StoreError
from dalsegno.stores.base import Covered, PruneReport, TaskActionStore


class EncryptingStore(TaskActionStore):
    """Keeps records in *inner*, encrypted by *cipher*. *inner* may hold other jobs, encrypted or not.

    Reading raises `RecordError` for a record that is not encrypted, or that *cipher* cannot open. `put` raises
    `StoreError` if *cipher* fails; then nothing is written.
    """

    def __init__(self, inner: TaskActionStore, cipher: PayloadCipher) -> None:
        self.inner = inner
        self._cipher = cipher
        self._job: bytes | None = None
        """What every record of the job that is open is bound to."""

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return self.inner.persistent

    async def open(self, job: str, owner: str) -> None:
        await self.inner.open(job, owner)
        self._job = place("record", job, self.inner.identity)
        self.inner.read_through(self._open_body)

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
        await self.inner.put([self._sealed(record) for record in records])

    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        return await self.inner.get(key, task)

    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        return await self.inner.list(key)

    async def prune(self, covered: Covered) -> PruneReport:
        return await self.inner.prune(covered)

    async def close(self) -> None:
        if self._job is None:
            return
        try:
            await self.inner.close()
        finally:
            self._job = None
            self.inner.read_through(None)

    def _sealed(self, record: Record) -> Record:
        body = seal(self._cipher, record.body, self._place(record))
        return Record(record.key, record.message, record.task, body)

    def _open_body(self, record: Record, where: str) -> bytes:
        body = unseal(self._cipher, record.body, self._place(record), where)
        # This store may be wrapped by another one that seals.
        return body if self.open_body is None else self.open_body(record._replace(body=body), where)

    def _place(self, record: Record) -> bytes:
        if self._job is None:
            raise StoreError("the store is not open: call open(job, owner) first")
        return self._job + place(record.key, record.message, record.task)
