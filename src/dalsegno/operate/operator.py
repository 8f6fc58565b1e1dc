"""`Operator`: what a person decides about a job, from Python. The commands do the same on the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dalsegno.cipher import PayloadCipher, needs_cipher
from dalsegno.core import codec
from dalsegno.core.identity import key_bytes
from dalsegno.effects import DidNotHappen, Happened
from dalsegno.errors import AlreadyDecidedError, DefinitionError, StoreError
from dalsegno.operate import decide
from dalsegno.operate.lookup import key_text, perhaps_set_aside, summaries
from dalsegno.operate.views import SET_ASIDE, SHOWN_DIGITS, MessageSummary, State
from dalsegno.stores import open_store
from dalsegno.stores.base import StoreInspector, TaskActionStore
from dalsegno.stores.default import default_store_path
from dalsegno.stores.encrypting import EncryptingStore


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """What a person may answer about a parked message."""

    kind: Literal["signal", "resolve", "retry"]
    """The method of `Operator` that answers it."""
    name: str
    """Of the signal, of the call in doubt, or of the action that failed."""
    call: str | None
    """The id of the call in doubt or of the wait, None for a retry."""
    answered: bool
    """Whether there is an answer already, which the job has not yet taken up."""


@dataclass(frozen=True, slots=True)
class Parked:
    """A message that cannot go on until somebody decides."""

    key: Any
    message_id: str
    why: str
    """``waiting`` for a signal, ``in-doubt``, ``failed`` or ``attempts``, as ``dalsegno show`` says it."""
    reason: str | None
    """A sentence for people."""
    questions: Sequence[OpenQuestion]


class Operator:
    """Sees which messages of the job *job* are parked, and answers what they wait for.

    It owns nothing, so it works while the job runs, in this process or in another one, and while it does not. A running
    job takes an answer up within a second, otherwise the next run does. An answer is durable when the method returns,
    and each question has one at most. *store* and *cipher* are those of the job's `LocalRunner`, whose method
    ``operator()`` gives one of these. The methods block; each has a twin in ``_async`` for code in an event loop.

    Raises `InspectError` when what is named is not there, is ambiguous, or is nothing to be decided now,
    `AlreadyDecidedError` when there is another answer, `StoreError` when there is no such job or its store cannot be
    reached, and `RecordError` when it cannot be read, for want of its cipher for one.
    """

    def __init__(
        self, *, job: str, store: str | TaskActionStore | None = None, cipher: PayloadCipher | None = None
    ) -> None:
        self.job = job
        self._store = None if store is None else place_of(store, cipher)
        self._cipher = cipher

    def parked(self) -> list[Parked]:
        """The messages that are parked now, in recorded order, each with what can be answered about it."""
        with self._inspector() as inspector:
            found = list(summaries(inspector, self.job, perhaps_set_aside(inspector, self.job)))
        if any(summary.state is State.ENCRYPTED for summary in found):
            raise needs_cipher(f"job {self.job!r}")
        return [_parked(summary) for summary in found if summary.state in SET_ASIDE]

    def signal(self, key: Any, name: str, value: Any, message_id: str | None = None) -> None:
        """Give *value* to the message of *key* that waits for the signal *name*.

        If several of the key's messages do, *message_id* says which one. A second signal for the same wait is an
        `AlreadyDecidedError`, also with the same value: the agent may have acted on the first. Raises `CodecError` for
        a value that cannot be recorded.
        """
        tree = codec.to_tree(value, root="the value of the signal")
        with self._inspector() as inspector:
            outcome = decide.signal(inspector, self.job, key_bytes(key), name, tree, message_id)
        if not outcome.written:
            raise self._decided(outcome)

    def resolve(self, call: str, answer: Happened | DidNotHappen) -> None:
        """Answer whether the call in doubt whose id begins with *call* happened, as a ``reconcile`` would.

        With ``Happened(result)`` the call is not made, with ``DidNotHappen()`` it is made again. The same answer once
        more changes nothing. `parked` gives the id.
        """
        if not isinstance(answer, (Happened, DidNotHappen)):
            raise DefinitionError(f"resolve(...) takes Happened(result) or DidNotHappen(), not {answer!r}")
        happened = isinstance(answer, Happened)
        tree = codec.to_tree(answer.result, root="result") if isinstance(answer, Happened) else None
        with self._inspector() as inspector:
            outcome = decide.resolve(inspector, self.job, call, happened, tree)
        if not outcome.same:
            raise self._decided(outcome)

    def retry(self, key: Any, message_id: str | None = None) -> None:
        """Let the message of *key* run again that is set aside as ``failed`` or ``attempts``.

        If several are, *message_id* says which one. Once more, before it has failed again, changes nothing.
        """
        with self._inspector() as inspector:
            outcome = decide.retry(inspector, self.job, message_id, key_bytes(key))
        if not outcome.same:
            raise self._decided(outcome)

    async def parked_async(self) -> list[Parked]:
        """`parked`, without blocking the event loop."""
        return await asyncio.to_thread(self.parked)

    async def signal_async(self, key: Any, name: str, value: Any, message_id: str | None = None) -> None:
        """`signal`, without blocking the event loop."""
        await asyncio.to_thread(self.signal, key, name, value, message_id)

    async def resolve_async(self, call: str, answer: Happened | DidNotHappen) -> None:
        """`resolve`, without blocking the event loop."""
        await asyncio.to_thread(self.resolve, call, answer)

    async def retry_async(self, key: Any, message_id: str | None = None) -> None:
        """`retry`, without blocking the event loop."""
        await asyncio.to_thread(self.retry, key, message_id)

    def _inspector(self) -> StoreInspector:
        return inspector_of(self.job, self._store, self._cipher)

    def _decided(self, outcome: decide.Outcome) -> AlreadyDecidedError:
        question = outcome.question
        call = f", call {question.call[:SHOWN_DIGITS]}" if question.call else ""
        # What was answered is a payload, and those do not belong into errors.
        return AlreadyDecidedError(
            f"job {self.job!r}, key {key_text(question.key)}, message {question.message!r}{call} ({question.name}): it "
            "is already decided, and an answer stays, so nothing was changed; 'dalsegno show' tells what it is"
        )


def inspector_of(job: str, store: TaskActionStore | None, cipher: PayloadCipher | None) -> StoreInspector:
    """A way into *store*, or into the job's own file, that opens what *cipher* has sealed. The caller closes it."""
    if store is None:
        path = default_store_path(job)
        if not path.exists():
            raise StoreError(
                f"there is no file {str(path)!r}, where job {job!r} has its records unless told otherwise: go to the "
                "folder that it is run in, or name its store with --store, in Python with store=; 'dalsegno runs' "
                "lists the jobs of this folder"
            )
        store = open_store(f"sqlite:///{path}")
    return (store if cipher is None else EncryptingStore(store, cipher)).inspect()


def place_of(store: str | TaskActionStore, cipher: PayloadCipher | None = None) -> TaskActionStore:
    """The store that is named, if anybody but its owner can look into it; else a `DefinitionError`."""
    opened = open_store(store)
    if isinstance(store, str) and not opened.persistent:
        raise DefinitionError(
            f"{store!r} is in the memory of the process that runs the job, so nobody can look into it; there, ask the "
            "runner itself: LocalRunner.operator()"
        )
    if cipher is not None and isinstance(opened, EncryptingStore):
        raise DefinitionError("the store is an EncryptingStore, which has its cipher already: leave cipher= out")
    return opened


def _parked(summary: MessageSummary) -> Parked:
    questions = [
        OpenQuestion(each.kind, each.name, each.call, each.decision is not None)  # type: ignore[arg-type]
        for each in summary.questions
    ]
    return Parked(codec.decode(summary.key), summary.message, str(summary.state), summary.reason, questions)
