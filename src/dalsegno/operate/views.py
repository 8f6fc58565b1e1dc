"""What is recorded of a message, and decided about it, as plain data for people and programs. No I/O.

Records come as a store has them. A `Lens` says how bodies are read and what of their payloads is shown; everything that
is shown of an argument, a result, an exception, a memory update, an event or an answer passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from dalsegno.cipher import is_sealed
from dalsegno.core import decisions as answers
from dalsegno.core.codec import Tree
from dalsegno.core.decisions import WAIT, Resolved, Retried, Signalled
from dalsegno.core.identity import digest
from dalsegno.core.records import COUNTED, CallState, Park, Record, TaskActionState, fold
from dalsegno.core.transitions import CallStatus
from dalsegno.errors import RecordError
from dalsegno.stores.base import Decision

SHOWN_DIGITS = 12
"""Digits of the id of a call that are shown; of a hundred thousand calls, two share them once in 50,000 stores."""


@dataclass(frozen=True, slots=True)
class Lens:
    """How what is stored becomes what is shown."""

    decode: Callable[[Record], bytes] = lambda record: record.body
    """The body of a record as JSON, where an inspector does not give it as such."""
    redact: Callable[[Tree], Tree] = lambda tree: tree
    """A payload without what is to be kept secret."""

    def states(self, records: Iterable[Record]) -> list[TaskActionState]:
        """What *records* add up to; raises `RecordError` for what is damaged or too new."""
        return fold(record._replace(body=self.decode(record)) for record in records)


PLAIN = Lens()


class State(StrEnum):
    """How a message stands. All but ``in-flight`` and ``done`` need a person, or a time to come."""

    IN_FLIGHT = "in-flight"
    WAITING = "waiting"
    IN_DOUBT = "in-doubt"
    FAILED = "failed"
    ATTEMPTS = "attempts"
    PARKED = "parked"
    DAMAGED = "damaged"
    ENCRYPTED = "encrypted"
    DONE = "done"


SET_ASIDE = frozenset({State.WAITING, State.IN_DOUBT, State.FAILED, State.ATTEMPTS, State.PARKED})
_STATES = {
    "in_doubt": State.IN_DOUBT,
    "waiting": State.WAITING,
    "failed": State.FAILED,
    "attempts": State.ATTEMPTS,
}


@dataclass(frozen=True, slots=True)
class Question:
    """What a person can answer about a message, and the answer that is given already, if one is."""

    key: bytes
    message: str
    target: str
    kind: str
    """``resolve``, ``signal`` or ``retry``."""
    name: str
    """Of the call in doubt, of the signal, or of the action that failed."""
    call: str | None
    """The id of the call that is in doubt or waits."""
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class MessageSummary:
    """One message in a list."""

    key: bytes
    message: str
    state: State
    actions: int
    calls: int
    reason: str | None
    """Why it is set aside, or what is damaged."""
    questions: Sequence[Question]


def call_id(key: bytes, message: str, task: str, number: int) -> str:
    """The name by which people call a call: 32 hexadecimal digits, of which the first few are enough."""
    # In hexadecimal, as JSON has no way to write any text there is.
    names = [key, message.encode(errors="surrogatepass"), task.encode(errors="surrogatepass")]
    return digest(*(name.hex() for name in names), number)


def summarize(
    key: bytes, message: str, records: Iterable[Record], decided: Sequence[Decision], lens: Lens = PLAIN
) -> MessageSummary:
    """*decided* are the decisions about the message.

    A record that cannot be read makes a message that says so, not an error.
    """
    recorded: list[Record] = []
    try:
        recorded.extend(records)
        states = lens.states(recorded)
    except RecordError as error:
        state = State.ENCRYPTED if any(is_sealed(record.body) for record in recorded) else State.DAMAGED
        return MessageSummary(key, message, state, 0, 0, str(error), ())
    return _summary(key, message, states, decided)


def _summary(
    key: bytes, message: str, states: Sequence[TaskActionState], decided: Sequence[Decision]
) -> MessageSummary:
    park = _park(states)
    questions = list(_questions(states, {decision.target: decision for decision in decided}))
    if any(state.last for state in states):
        status = State.DONE
    elif park is not None:
        status = _STATES.get(park.why, State.PARKED)
    elif any(question.kind == "signal" for question in questions):
        status = State.WAITING
    else:
        status = State.IN_FLIGHT
    calls = sum(len(state.calls) for state in states)
    return MessageSummary(key, message, status, len(states), calls, park.reason if park else None, questions)


def _park(states: Sequence[TaskActionState]) -> Park | None:
    return next((state.parked for state in reversed(states) if state.parked), None)


def _questions(states: Sequence[TaskActionState], decided: dict[str, Decision]) -> Iterator[Question]:
    for state in states:
        if state.done:
            continue
        for call in state.calls.values():
            where = (state.task, call.number)
            if is_waiting(call):
                kind, name, target = "signal", signal_name(call), answers.signal_target(*where)
            elif is_in_doubt(state, call):
                kind, name, target = "resolve", call.name, answers.resolve_target(*where, call.attempt)
            else:
                continue
            identity = call_id(state.key, state.message, *where)
            yield Question(state.key, state.message, target, kind, name, identity, decided.get(target))
        if state.parked is not None and state.parked.why in COUNTED:
            target = answers.retry_target(state.task, state.failures)
            yield Question(state.key, state.message, target, "retry", state.action, None, decided.get(target))


def is_waiting(call: CallState) -> bool:
    """Whether *call* waits for a signal."""
    return call.name == WAIT and call.status is CallStatus.REQUESTED


def signal_name(call: CallState) -> str:
    return call.args[0] if call.args and isinstance(call.args[0], str) else ""


def is_in_doubt(state: TaskActionState, call: CallState) -> bool:
    """Whether *call* may or may not have happened. Of calls that were in flight together the park names only one."""
    if state.parked is None or state.parked.why != "in_doubt":
        return False
    if call.status in (CallStatus.COMPLETED, CallStatus.ABANDONED):
        return False
    return call.number == state.parked.call or (call.effect == "once" and call.status is CallStatus.REQUESTED)


# --- as JSON: the contract is in docs/reference/command-line.md ---


def key_tree(key: bytes) -> Tree:
    """The key as a codec tree; as text where a store holds something else."""
    try:
        return orjson.loads(key)  # type: ignore[no-any-return]
    except orjson.JSONDecodeError:
        return key.decode(errors="backslashreplace")


def summary_json(summary: MessageSummary, lens: Lens = PLAIN) -> dict[str, Any]:
    return {
        "key": key_tree(summary.key),
        "message": summary.message,
        "state": str(summary.state),
        "actions": summary.actions,
        "calls": summary.calls,
        "reason": summary.reason,
        "questions": [question_json(question, lens) for question in summary.questions],
    }


def question_json(question: Question, lens: Lens = PLAIN) -> dict[str, Any]:
    return {
        "kind": question.kind,
        "name": question.name,
        "call": question.call,
        "answer": answer_json(question.decision, lens) if question.decision else None,
    }


def answer_json(decision: Decision, lens: Lens = PLAIN) -> dict[str, Any]:
    """What was decided; a damaged decision says so instead."""
    try:
        answer = answers.load(decision.target, decision.body)
    except RecordError as error:
        return {"damaged": str(error)}
    match answer:
        case Resolved(happened=True):
            return {"happened": lens.redact(answer.result)}
        case Resolved():
            return {"did_not_happen": True}
        case Signalled():
            return {"value": lens.redact(answer.value)}
        case Retried():
            return {"retry": True}


def message_json(
    key: bytes, message: str, records: Iterable[Record], decided: Sequence[Decision], lens: Lens = PLAIN
) -> dict[str, Any]:
    """One message in full; raises `RecordError` for what is damaged or too new."""
    states = lens.states(records)
    return summary_json(_summary(key, message, states, decided), lens) | {
        "tasks": [_task_json(state, lens) for state in states],
        "decisions": [{"target": made.target, "answer": answer_json(made, lens)} for made in decided],
    }


def _task_json(state: TaskActionState, lens: Lens) -> dict[str, Any]:
    return {
        "task": state.task,
        "action": state.action,
        "event": state.event_type,
        "sender": state.sender,
        "index": state.index,
        "done": state.done,
        "calls": [call_json(state, call, lens) for _, call in sorted(state.calls.items())],
        "memory": [_update_json(update, lens) for update in state.short_term],
        "sensory": [_update_json(update, lens) for update in state.sensory],
        "events": [lens.redact(event) for event in state.events],
    }


def _update_json(update: dict[str, Any], lens: Lens) -> dict[str, Any]:
    """A memory update; the lens sees its value beside its path, which is shown as it is."""
    shown = lens.redact(update)
    return shown | {"path": update["path"]} if isinstance(shown, dict) else {"op": update["op"], "path": update["path"]}


def call_json(state: TaskActionState, call: CallState, lens: Lens = PLAIN) -> dict[str, Any]:
    """One call; it has ``result`` or ``error`` if that is recorded, and ``given_up`` if it no longer binds the code."""
    status = "waiting" if is_waiting(call) else "in-doubt" if is_in_doubt(state, call) else str(call.status)
    shown: dict[str, Any] = {
        "call": call_id(state.key, state.message, state.task, call.number),
        "number": call.number,
        "name": call.name,
        "effect": call.effect,
        "status": status,
        "attempt": call.attempt,
        "args": lens.redact(call.args),
        "kwargs": lens.redact(call.kwargs),
    }
    if any(call.number in lost.calls for lost in state.given_up):
        shown["given_up"] = True
    if call.error is not None:
        shown["error"] = lens.redact(call.error)
    elif call.status is CallStatus.COMPLETED:
        shown["result"] = lens.redact(call.result)
    return shown
