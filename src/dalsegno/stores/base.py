"""The contract of a task action store.

A store keeps records of one job at a time. It knows records and their order; it knows nothing of agents.

* **Atomic**: `put` writes all of its records or none.
* **Durable**: when `put` returns, its records survive the loss of the process and, for stores that say so, of the
  machine.
* **Ordered**: the records of one key come back in the order in which they were put, across batches too.
* **Owned**: `open` makes this process the owner of the job; a write of a former owner raises `FencedError`.
* **Exact**: keys and message ids are compared by equality, whatever characters they hold; bodies come back byte by
  byte.

Raises `StoreError` (or a subclass) for everything that a backend can do wrong, with the backend's error as its cause.
Between `open` and `close`, which are called alone, any methods may be in progress at the same time, except two `put` or
two `prune`. A method that is cancelled has done all that it was asked to do or, part by part for `prune`, none of it.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dalsegno.core.records import OpenBody, Record, TaskActionState


@dataclass(frozen=True, slots=True)
class Covered:
    """What a completed checkpoint covers: messages, by key and id, that will never be replayed.

    *checkpoint* is the number of that checkpoint. Once anything was pruned for it, no earlier one can be restored.
    """

    checkpoint: int
    messages: Sequence[tuple[bytes, str]]


@dataclass(frozen=True, slots=True)
class PruneReport:
    """How many records a prune removed."""

    records: int


class TaskActionStore(ABC):
    """Where task action states are kept. See the module's docstring for what every store promises."""

    persistent: ClassVar[bool] = True
    """Whether records outlive the process."""

    open_body: OpenBody | None = None
    """What reading methods give to `fold` with the records."""

    def read_through(self, open_body: OpenBody | None) -> None:
        """From now on *open_body* gives the plain bodies of the records that are read, None for plain ones.

        Called by a store that wraps this one and puts bodies of another form into it, and never while anything is
        read. A store that wraps another one and adds nothing to bodies hands it on.
        """
        self.open_body = open_body

    @abstractmethod
    async def open(self, job: str, owner: str) -> None:
        """Become the owner of *job*. *owner* says who that is, for the error that another process gets.

        Raises `OwnershipError` when a living process owns the job, `StoreError` when the store cannot be reached, and
        `RecordError` when what is there is not a store of a format that this version reads.
        """

    @property
    @abstractmethod
    def identity(self) -> str:
        """A random name that the store was given when the job was first opened; another store has another one."""

    @property
    @abstractmethod
    def pruned_through(self) -> int:
        """The latest checkpoint that anything was pruned for, 0 if none: no earlier one can be restored."""

    @abstractmethod
    async def keys(self) -> builtins.list[bytes]:
        """The keys that have records, in no particular order. Takes no ownership."""

    @abstractmethod
    async def claim(self, key: bytes) -> builtins.list[TaskActionState]:
        """Take ownership of *key* and read what is recorded of it, in recorded order; at most one round trip."""

    @abstractmethod
    async def put(self, records: Sequence[Record]) -> None:
        """Append *records* as one atomic, durable batch.

        Raises `FencedError` if ownership is lost; then nothing is written.
        """

    @abstractmethod
    async def get(self, key: bytes, task: str) -> TaskActionState | None:
        """The state of one action task, or None if nothing is recorded of it."""

    @abstractmethod
    async def list(self, key: bytes) -> builtins.list[TaskActionState]:
        """The states of all action tasks of *key*, in recorded order. Takes no ownership."""

    @abstractmethod
    async def prune(self, covered: Covered) -> PruneReport:
        """Remove the records of the covered messages, and only those. Doing it twice does no harm."""

    @abstractmethod
    async def close(self) -> None:
        """Give up ownership and release everything. Closing twice, or a store that was never opened, does no harm."""
