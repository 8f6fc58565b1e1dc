"""Encryption of records, around any store.

Bodies are sealed on their way in and opened on their way out, each bound to its job, the store's identity, its key,
message and action task; those of decisions likewise, each bound to its target. What a store needs in order to find and
to order records stays in clear: those, and the number, order and size of records. A record that was copied here from
another place cannot be opened; one that was moved or doubled within its action task is refused where the table of
transitions forbids it. That a record is missing, or that the whole store is an earlier copy, no encryption can tell.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence

from dalsegno.cipher import PayloadCipher, place, seal, unseal
from dalsegno.core.records import OpenBody, Record
from dalsegno.errors import StoreError
from dalsegno.stores.base import ALONE, Decision, JobInfo, StoreInspector, TaskActionStore, Worker, unknown_job
from dalsegno.stores.wrapping import WrappingStore


class EncryptingStore(WrappingStore):
    """Keeps records in *inner*, encrypted by *cipher*. *inner* may hold other jobs, encrypted or not.

    Reading raises `RecordError` for a record that is not encrypted, or that *cipher* cannot open. `put` raises
    `StoreError` if *cipher* fails; then nothing is written.
    """

    def __init__(self, inner: TaskActionStore, cipher: PayloadCipher) -> None:
        super().__init__(inner)
        self._cipher = cipher
        self._bound: _Bound | None = None

    def read_through(self, open_body: OpenBody | None) -> None:
        self.open_body = open_body  # what is read through the inner store is opened here first

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        await self.inner.open(job, owner, worker)
        self._bound = _Bound(self._cipher, job, self.inner.identity)
        self.inner.read_through(self._open_body)

    async def put(self, records: Sequence[Record]) -> None:
        await self.inner.put([self._opened().sealed(record) for record in records])

    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        found = await self.inner.decisions(after)
        bound = self._opened()
        return [(number, bound.opened_decision(decision)) for number, decision in found]

    def inspect(self) -> StoreInspector:
        return EncryptingInspector(self.inner.inspect(), self._cipher)

    async def close(self) -> None:
        if self._bound is None:
            return
        try:
            await self.inner.close()
        finally:
            self._bound = None
            self.inner.read_through(None)

    def _open_body(self, record: Record, where: str) -> bytes:
        body = self._opened().open(record, where)
        # This store may be wrapped by another one that seals.
        return body if self.open_body is None else self.open_body(record._replace(body=body), where)

    def _opened(self) -> _Bound:
        if self._bound is None:
            raise StoreError("the store is not open: call open(job, owner) first")
        return self._bound


class EncryptingInspector(StoreInspector):
    """Opens what *inner* shows of jobs that are encrypted by *cipher*, and seals what is decided about them.

    What *cipher* cannot open is a `RecordError`.
    """

    def __init__(self, inner: StoreInspector, cipher: PayloadCipher) -> None:
        self._inner = inner
        self._cipher = cipher
        self._known: dict[str, _Bound] = {}

    def jobs(self) -> Sequence[JobInfo]:
        return self._inner.jobs()

    def messages(self, job: str) -> Iterator[tuple[bytes, str]]:
        return self._inner.messages(job)

    def records(self, job: str, key: bytes | None = None, message: str | None = None) -> Iterator[Record]:
        found = self._inner.records(job, key, message)  # raises now if there is no such job
        bound = self._bound(job)
        return (record._replace(body=bound.open(record, _where(record))) for record in found)

    def decisions(self, job: str) -> Sequence[Decision]:
        found = self._inner.decisions(job)
        bound = self._bound(job)
        return [bound.opened_decision(decision) for decision in found]

    def decide(self, job: str, decision: Decision) -> bool:
        return self._inner.decide(job, self._bound(job).sealed_decision(decision))

    def close(self) -> None:
        self._inner.close()

    def _bound(self, job: str) -> _Bound:
        if job not in self._known:
            self._known = {info.name: _Bound(self._cipher, info.name, info.identity) for info in self._inner.jobs()}
        if job not in self._known:
            raise unknown_job("the store", job, self._known)
        return self._known[job]


class _Bound:
    """*cipher*, with every payload bound to *job* in the store that is called *identity*."""

    def __init__(self, cipher: PayloadCipher, job: str, identity: str) -> None:
        self._cipher = cipher
        self._record = place("record", job, identity)
        self._decision = place("decision", job, identity)

    def sealed(self, record: Record) -> Record:
        key, message, task, body = record
        return Record(key, message, task, seal(self._cipher, body, self._record + place(key, message, task)))

    def open(self, record: Record, where: str) -> bytes:
        key, message, task, body = record
        return unseal(self._cipher, body, self._record + place(key, message, task), where)

    def sealed_decision(self, decision: Decision) -> Decision:
        key, message, target, body = decision
        return decision._replace(body=seal(self._cipher, body, self._decision + place(key, message, target)))

    def opened_decision(self, decision: Decision) -> Decision:
        key, message, target, body = decision
        where = f"decision {target!r} about message {message!r}"
        return decision._replace(body=unseal(self._cipher, body, self._decision + place(key, message, target), where))


def _where(record: Record) -> str:
    return f"record of message {record.message!r}, action task {record.task!r}"
