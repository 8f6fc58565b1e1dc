"""Records, and the task action state that they add up to.

Recording is append-only. Each step of an action task is one small record; nothing is ever rewritten.

=========== ===================================================================================================
kind        holds
=========== ===================================================================================================
requested   a call is about to start: its number, name, argument fingerprint, effect, arguments, attempt
completed   its outcome, a result or the exception that the action caught
called      both in one, for a `read` call, which needs no record before it starts
failed      an attempt raised, and another one is due or the exception left the action; not final. Of a `read` call
            that has no record yet it also holds what ``requested`` does
abandoned   the action cancelled a call and went on without an outcome. Of a `read` call that has no record yet it also
            holds what ``requested`` does
reopened    that is taken back: an exception left the action, which may have been the reason
slept       a sleep, whose outcome is when it is due, has ended
parked      the message is set aside, see `Park`, until anything else is recorded
begun       after a crash: the message is begun once more, for the how-manieth time
patched     what ``ctx.patched`` answers for a name
given_up    the calls that no longer bind the code, because it was changed or failed before them, see `GivenUp`
done        the action task is done: its memory updates and output events; ``last`` ends the message, and ``order``
            then names its action tasks, if they are not those of the record in their order
=========== ===================================================================================================

The first record of an action task also carries its header ``task``: the action, the event type, who sent the event, and
for the input event the fingerprint of the message's content. Any record may carry ``open``: calls that were in flight
when it was written and have no record of their own yet. An outcome that came while other calls were in flight carries
its `Order`.

The body of a record is JSON, with its format version. A newer version is refused; nothing is read as nothing. Where it
is stored in another form, encrypted for one, an `OpenBody` gives the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import orjson

from dalsegno.cipher import is_sealed, needs_cipher
from dalsegno.core.transitions import CallStatus, advance
from dalsegno.errors import RecordError

FORMAT_VERSION = 1


class Record(NamedTuple):
    """One step of one action task, as a store keeps it.

    *key* is the canonical form of the message key, *message* the id of the message, *task* the identity of the action
    task, *body* UTF-8 JSON.
    """

    key: bytes
    message: str
    task: str
    body: bytes


OpenBody = Callable[[Record, str], bytes]
"""Gives the JSON of a record's body; raises `RecordError` if it cannot. The text is what messages call the record."""


as_record: Callable[[tuple[bytes, str, str, bytes]], Record] = partial(tuple.__new__, Record)
"""``Record(*fields)`` at half the cost: each step of each action task makes one."""


@dataclass(slots=True, eq=False)
class Order:
    """Where an outcome stands among those of its action task that came while other calls were in flight."""

    turn: int
    """Outcomes of the same turn reached the action together."""
    position: int
    """Tells those of one turn apart."""
    begun: int
    """How many calls the action had begun by then."""
    after: int
    """Milliseconds since the action was begun."""
    abandoned_from: CallStatus | None = None
    """Of an abandoned call: what it was before."""

    @property
    def key(self) -> tuple[int, int]:
        return self.turn, self.position

    @property
    def tree(self) -> list[int]:
        return [self.turn, self.position, self.begun, self.after]


@dataclass(slots=True)
class CallState:
    """What is recorded of one durable call."""

    number: int
    name: str
    arguments: str
    alone: bool
    effect: str = "read"
    status: CallStatus = CallStatus.NEW
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    result: Any = None
    error: Any = None
    """The tree of the exception, when the outcome is one."""
    unsure: bool = False
    """Whether the exception may still have been on its way out of the action when it was recorded."""
    failures: int = 0
    """How many attempts are recorded as failed."""
    retry_at: datetime | None = None
    """When the next attempt is due, if the last one failed and is to be tried again."""
    order: Order | None = None
    """Where its outcome stands, if other calls were in flight when it came; where it stood, if it was taken back."""


@dataclass(frozen=True, slots=True)
class Park:
    """Why a message is set aside. It stays so until somebody decides about it, or its time has come."""

    reason: str
    """A sentence for people."""
    why: str = "in_doubt"
    """``in_doubt`` a call may or may not have happened; ``waiting`` for a signal; ``failed`` the action raised;
    ``attempts`` the message was begun too often without coming to an end."""
    call: int | None = None
    """The number of the call in doubt, or of the wait."""

    @classmethod
    def because(cls, reason: str, why: str, call: int | None = None) -> Park:
        """With a *reason* in which anything may be quoted: what cannot be written as UTF-8 is escaped."""
        return cls(reason.encode(errors="backslashreplace").decode(), why, call)


COUNTED = ("failed", "attempts")
"""Why a message is parked until it is retried; each time is another question."""


class GivenUp(NamedTuple):
    """Recorded calls that no longer bind the code from some point on. One that is made all the same keeps its answer.

    The point is after all other calls with a number below *before*.
    """

    calls: list[int]
    before: int


@dataclass(slots=True)
class TaskActionState:
    """What is recorded of one action task: the fold of its records."""

    key: bytes
    message: str
    task: str
    action: str = ""
    event_type: str = ""
    sender: str = ""
    index: int = 0
    content: str | None = None
    """Fingerprint of the message's content, in the task of its input event."""
    calls: dict[int, CallState] = field(default_factory=dict)
    short_term: list[dict[str, Any]] = field(default_factory=list)
    sensory: list[dict[str, Any]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    done: bool = False
    last: bool = False
    parked: Park | None = None
    begun: int = 0
    """How often the message was begun after a crash, as far as that was recorded."""
    failures: int = 0
    """How often the message was parked because this action failed, or did not come to an end."""
    patches: dict[str, bool] = field(default_factory=dict)
    given_up: list[GivenUp] = field(default_factory=list)
    order: list[str] | None = None
    """The action tasks of the finished message in their order, if that is not the recorded order of all."""


def new_body(kind: str) -> dict[str, Any]:
    """The body of a record of *kind*, to be filled and given to `dump_body`."""
    return {"v": FORMAT_VERSION, "kind": kind}


dump_body: Callable[[dict[str, Any]], bytes] = orjson.dumps
"""The bytes of a body; the very function of the library, as a call between would be a good part of its cost."""


def encode_body(kind: str, fields: dict[str, Any]) -> bytes:
    return dump_body(new_body(kind) | fields)


def fold(records: Iterable[Record], open_body: OpenBody | None = None) -> list[TaskActionState]:
    """The states of the action tasks of *records*, in the order of their first record.

    *open_body* gives the JSON of each body, where that is not what is stored. Raises `RecordError` for a record that is
    damaged, too new, or does not fit what is recorded before it.
    """
    states: dict[tuple[bytes, str, str], TaskActionState] = {}
    for record in records:
        identity = (record.key, record.message, record.task)
        state = states.get(identity)
        if state is None:
            state = states[identity] = TaskActionState(*identity)
        _apply(state, record, open_body)
    return list(states.values())


def by_message(states: Iterable[TaskActionState]) -> dict[str, list[TaskActionState]]:
    """The states of each message, in recorded order."""
    messages: dict[str, list[TaskActionState]] = {}
    for state in states:
        messages.setdefault(state.message, []).append(state)
    return messages


def _apply(state: TaskActionState, record: Record, open_body: OpenBody | None) -> None:
    where = (
        f"record of key {record.key.decode(errors='replace')}, message {record.message!r}, action task {record.task!r}"
    )
    body = _load(record, where, open_body)
    try:
        if "task" in body:
            _header(state, body["task"])
        elif not state.action:
            raise RecordError(
                f"{where}: the first record of an action task has no header, so what it belongs to is not known"
            )
        if state.done:
            raise RecordError(f"{where}: a {body['kind']!r} record follows the end of its action task")
        for number, name, arguments, alone in body.get("open", ()):
            _call(state, "open", {"call": number, "name": name, "args_digest": arguments, "alone": alone}, where)
        state.parked = None
        _KINDS[body["kind"]](state, body, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(
            f"{where}: it is not what this version writes ({type(error).__name__}: {error}): {record.body[:200]!r}"
        ) from error


def _load(record: Record, where: str, open_body: OpenBody | None) -> dict[str, Any]:
    # Messages show the body as it is stored: what is encrypted there stays so.
    try:
        body: Any = orjson.loads(record.body if open_body is None else open_body(record, where))
    except orjson.JSONDecodeError as error:
        if open_body is None and is_sealed(record.body):
            raise needs_cipher(where) from None
        raise RecordError(f"{where} is damaged, it is not JSON ({error}): {record.body[:200]!r}") from error
    version = body.get("v") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(version, int):
        raise RecordError(f"{where} is not a record of this library: {record.body[:200]!r}")
    if version < 1:
        raise RecordError(f"{where} has format version {version}, which no release has written: {record.body[:200]!r}")
    if version > FORMAT_VERSION:
        raise RecordError(
            f"{where} has format version {version}; this version of dalsegno reads up to {FORMAT_VERSION}: install "
            "the version that wrote it, or a newer one"
        )
    return body


def _header(state: TaskActionState, header: dict[str, Any]) -> None:
    state.action = header["action"]
    state.event_type = header["event"]
    state.sender = header["sender"]
    state.index = header["index"]
    state.content = header.get("content")


def _call(state: TaskActionState, kind: str, body: dict[str, Any], where: str) -> CallState:
    number = body["call"]
    call = state.calls.get(number)
    if call is None:
        call = state.calls[number] = CallState(number, body["name"], body["args_digest"], body.get("alone", False))
    if kind == "failed" and call.status is CallStatus.COMPLETED and not (call.unsure or body.get("left")):
        raise RecordError(f"{where}, call {number} ({call.name}): its outcome was final, but a failure follows it")
    before = call.status
    call.status = advance(before, kind, f"{where}, call {number} ({call.name})")
    if "args" in body:
        call.args, call.kwargs, call.effect = body["args"], body.get("kwargs", {}), body["effect"]
        call.attempt = body.get("attempt", 1)
    elif "attempt" in body:
        call.attempt = body["attempt"]
    call.failures += kind == "failed"
    call.retry_at = _moment(body["retry_at"]) if "retry_at" in body else None
    if "error" in body:
        call.error, call.unsure = body["error"], body.get("unsure", False)
    elif kind in ("completed", "called"):
        call.result, call.error = body["result"], None
    if "order" in body or kind in ("abandoned", "slept"):
        call.order = _order(*body["order"])
    elif kind in ("completed", "called"):
        call.order = None
    if kind == "abandoned" and call.order is not None:
        call.order.abandoned_from, call.unsure = before, body.get("unsure", False)
    return call


def _order(turn: int, position: int, begun: int, after: int) -> Order:
    if not all(type(number) is int and number >= 0 for number in (turn, position, begun, after)):
        raise ValueError(f"{[turn, position, begun, after]} is no order of an outcome")
    return Order(turn, position, begun, after)


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment


def _outcome(state: TaskActionState, body: dict[str, Any], where: str) -> None:
    _call(state, body["kind"], body, where)


def _parked(state: TaskActionState, body: dict[str, Any], where: str) -> None:
    state.parked = Park(body["reason"], body.get("why", "in_doubt"), body.get("call"))
    state.failures += state.parked.why in COUNTED


def _begun(state: TaskActionState, body: dict[str, Any], where: str) -> None:
    state.begun = body["attempt"]


def _patched(state: TaskActionState, body: dict[str, Any], where: str) -> None:
    state.patches[body["name"]] = body["answer"]


def _given_up(state: TaskActionState, body: dict[str, Any], where: str) -> None:
    state.given_up.append(GivenUp(body["calls"], body["before"]))
    for call in state.calls.values():
        if call.number in body["calls"]:
            call.order = None
        elif call.order is not None:
            call.order.begun = 0  # it counts calls that the code no longer makes


def _done(state: TaskActionState, body: dict[str, Any], where: str) -> None:
    state.done, state.last = True, body.get("last", False)
    state.short_term = body.get("memory", [])
    state.sensory = body.get("sensory", [])
    state.events = body.get("events", [])
    state.order = body.get("order")


_KINDS = {
    "requested": _outcome,
    "completed": _outcome,
    "called": _outcome,
    "failed": _outcome,
    "abandoned": _outcome,
    "reopened": _outcome,
    "slept": _outcome,
    "parked": _parked,
    "begun": _begun,
    "patched": _patched,
    "given_up": _given_up,
    "done": _done,
}
