"""The contract of a task action store.

A store keeps records of one job at a time. It knows records and their order; it knows nothing of agents.

* **Atomic**: `put` writes all of its records or none.
* **Durable**: when `put` returns, its records survive the loss of the process and, for stores that say so, of the
  machine.
* **Ordered**: the records of one key come back in the order in which they were put, across batches too.
* **Owned**: `open` makes this process the owner of the job, or one of the workers that own it together; a write of a
  former owner raises `FencedError`.
* **Exact**: keys and message ids are compared by equality, whatever characters they hold; bodies come back byte by
  byte.

Beside the owner there may be *outsiders*, such as the command line. `TaskActionStore.inspect` gives them a way in that
owns nothing: a `StoreInspector` reads what is recorded, and leaves **decisions** about it, which the owner picks up.

Raises `StoreError` (or a subclass) for everything that a backend can do wrong, with the backend's error as its cause.
Between `open` and `close`, which are called alone, any methods may be in progress at the same time, except two `put` or
two `prune`. A method that is cancelled has done all that it was asked to do or, part by part for `prune`, none of it.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

from dalsegno.core.records import OpenBody, Record, TaskActionState
from dalsegno.errors import StoreError


@dataclass(frozen=True, slots=True)
class Worker:
    """One of the workers that run a job together: number *index*, from 0, of *of*.

    Each has keys of its own, and a key's worker follows from *of* alone, so whoever replaces a worker has its keys. Who
    runs a job alone is worker 0 of 1.
    """

    index: int
    of: int


ALONE = Worker(0, 1)


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


class Decision(NamedTuple):
    """What a person decided about a message: there is at most one per job, key, message and target.

    *key* is the canonical form of the message key, *message* the id of the message, *target* what is decided, *body*
    UTF-8 JSON that says how; `dalsegno.core.decisions` makes and reads both. A store looks into neither.
    """

    key: bytes
    message: str
    target: str
    body: bytes


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What a store knows of one of its jobs."""

    name: str
    identity: str
    epoch: int
    """How often the job was opened."""
    owner: str
    """What the one who opened it last said of himself; *pid*, *host* and *since*, an ISO time, are of that opening."""
    pid: int
    host: str
    since: str
    pruned_through: int
    running: bool
    """Whether a living process owns the job now."""
    messages: int
    """Messages that have records."""


class StoreInspector(ABC):
    """The way into a store for those who own none of its jobs, also while jobs run.

    Looking changes nothing: it creates no file that stays, takes no lock of a job, and holds up no writer. Deciding is
    one small write. Methods block, so an event loop calls them in a thread; one thread at a time may use an object.

    What a method gives is as of one moment: that of the call, or of the first step of what it gives step by step. A job
    that was never opened is a `StoreError`, raised by the call.
    """

    @abstractmethod
    def jobs(self) -> Sequence[JobInfo]:
        """The jobs of the store, by name."""

    @abstractmethod
    def messages(self, job: str) -> Iterator[tuple[bytes, str]]:
        """Key and id of each message that has records, in the order of their first records."""

    @abstractmethod
    def records(self, job: str, key: bytes | None = None, message: str | None = None) -> Iterator[Record]:
        """The records, of all keys and messages or of those given, in recorded order.

        Of all, or of a key, never many are in memory at once.
        """

    @abstractmethod
    def decisions(self, job: str) -> Sequence[Decision]:
        """The decisions of the job in the order in which they were made."""

    @abstractmethod
    def decide(self, job: str, decision: Decision) -> bool:
        """Write *decision*, durably: True if it was written, False if its target is decided already.

        Of those who decide one target at the same time, exactly one gets True. Raises `StoreError` if the message has
        no records: it is done, or never was, so nobody would ever take the decision up.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_worker(store: str, worker: Worker, *, shared: bool) -> None:
    """Raise `StoreError` for a worker that cannot be, or is not alone although the store is not *shared*."""
    if not (type(worker.index) is int and type(worker.of) is int and 0 <= worker.index < worker.of):
        raise StoreError(f"{store}: there is no worker {worker.index!r} of {worker.of!r}; they are numbered from 0")
    if worker != ALONE and not shared:
        raise StoreError(
            f"{store} serves one process at a time, so it cannot be opened by worker {worker.index} of {worker.of}; "
            "choose a store that several workers can share"
        )


def unknown_job(store: str, job: str, names: Iterable[str]) -> StoreError:
    """The error of an inspector that is asked for a job that was never opened; *names* are those that are there."""
    return StoreError(f"{store} has no job {job!r}; its jobs are {', '.join(map(repr, names)) or 'none'}")


def not_recorded(store: str, job: str, message: str) -> StoreError:
    """The error of an inspector that is to decide about a message without records."""
    return StoreError(
        f"{store}: nothing is recorded of message {message!r} of job {job!r}, so there is nothing to decide about it: "
        "it is done, or never was"
    )


class TaskActionStore(ABC):
    """Where task action states are kept. See the module's docstring for what every store promises."""

    persistent: ClassVar[bool] = True
    """Whether records outlive the process."""

    shared: ClassVar[bool] = False
    """Whether several workers may run one job together."""

    open_body: OpenBody | None = None
    """What reading methods give to `fold` with the records."""

    def read_through(self, open_body: OpenBody | None) -> None:
        """From now on *open_body* gives the plain bodies of the records that are read, None for plain ones.

        Called by a store that wraps this one and puts bodies of another form into it, and never while anything is
        read. A store that wraps another one and adds nothing to bodies hands it on.
        """
        self.open_body = open_body

    @abstractmethod
    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        """Become the owner of *job*, or its *worker*. *owner* says who that is, for the error of another process.

        From then on those can write nothing who opened the job as the same worker before, or, for they divide the keys
        in another way, as one of another number of workers.

        Raises `OwnershipError` when one of those is alive and the store does not displace the living, `StoreError` when
        the store cannot be reached or is not `shared` and *worker* is not alone, and `RecordError` when what is there
        is not a store of a format that this version reads.
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
        """Remove the records and the decisions of the covered messages, and only those.

        Of one message they go together. Doing it twice does no harm.
        """

    @abstractmethod
    async def decisions(self, after: int) -> builtins.list[tuple[int, Decision]]:
        """The decisions of the job with a number greater than *after*, in the order in which they were made.

        Numbers are positive, grow, and are never given again while the store lives; a decision that is made later has a
        greater number than all that were seen before. Cheap enough to be asked twice a second.
        """

    @abstractmethod
    def inspect(self) -> StoreInspector:
        """A way into the same place, whether this object is open or not; the caller closes it.

        Raises `StoreError` if there is no store yet, and creates none.
        """

    @abstractmethod
    async def close(self) -> None:
        """Give up ownership and release everything. Closing twice, or a store that was never opened, does no harm."""
