"""Deciding: finds the question that a person means, checks that it is one, and writes the answer down once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dalsegno.cipher import needs_cipher
from dalsegno.core import codec
from dalsegno.core.codec import Tree
from dalsegno.core.decisions import WAIT, Answer, Resolved, Retried, Signalled, load, parse_target, signal_target
from dalsegno.errors import InspectError, RecordError
from dalsegno.operate.lookup import (
    decisions_by_message,
    find_call,
    find_message,
    find_messages,
    key_text,
    perhaps_set_aside,
    some,
    summaries,
)
from dalsegno.operate.views import PLAIN, SHOWN_DIGITS, Lens, Question, State, call_id, signal_name
from dalsegno.stores.base import Decision, StoreInspector

_SAY_WHICH = "say with --message which one is meant, in Python with message_id="


class Outcome(NamedTuple):
    """What became of an answer."""

    question: Question
    decision: Decision
    """What holds now: the answer, or the one that was there before."""
    written: bool
    same: bool
    """Whether what holds now is the answer that was given."""


def resolve(
    inspector: StoreInspector, job: str, call: str, happened: bool, result: Tree = None, lens: Lens = PLAIN
) -> Outcome:
    """Answer whether the call in doubt whose id begins with *call* happened, and with which *result*."""
    place = find_call(inspector, job, call, lens)
    here = questions(inspector, job, "resolve", [(place.key, place.message)], lens)
    question = next((each for each in here if each.call == place.call), None)
    if question is None:
        in_doubt = (
            f"{(each.call or '')[:SHOWN_DIGITS]} ({each.name})"
            for each in questions(inspector, job, "resolve", lens=lens)
        )
        raise InspectError(
            f"the call {place.call[:SHOWN_DIGITS]} of job {job!r} is not in doubt, so there is nothing to resolve; "
            f"{some('in doubt are', in_doubt)}"
        )
    _, task, (number, attempt) = parse_target(question.target)
    return _decide(inspector, job, question, Resolved(task, number, attempt, happened, result))


def retry(
    inspector: StoreInspector, job: str, message: str | None, key: bytes | None = None, lens: Lens = PLAIN
) -> Outcome:
    """Let the message run again that was set aside because it failed: the one that is named, or the one of *key*."""
    if message is None:
        messages = find_messages(inspector, job, None, key)
    else:
        messages = [find_message(inspector, job, message, key)]
    found = list(questions(inspector, job, "retry", messages, lens))
    of_key = f"of key {key_text(key)} " if key is not None else ""
    if len({each.message for each in found}) > 1:
        raise InspectError(
            f"several messages {of_key}of job {job!r} are set aside as failed: {_SAY_WHICH}; "
            f"{some('they are', (each.message for each in found))}"
        )
    if not found:
        failed = (each.message for each in questions(inspector, job, "retry", lens=lens))
        which = f"message {message!r} of job {job!r} is not" if message is not None else f"no message {of_key}is"
        raise InspectError(f"{which} set aside as failed, so there is nothing to retry; {some('failed are', failed)}")
    return _retry(inspector, job, found[0])


def retry_all(inspector: StoreInspector, job: str, key: bytes | None = None, lens: Lens = PLAIN) -> Iterator[Outcome]:
    """Let every message run again, or every one of *key*, that was set aside because it failed."""
    messages = None if key is None else find_messages(inspector, job, None, key)
    for question in list(questions(inspector, job, "retry", messages, lens)):
        yield _retry(inspector, job, question)


def _retry(inspector: StoreInspector, job: str, question: Question) -> Outcome:
    _, task, (failures,) = parse_target(question.target)
    return _decide(inspector, job, question, Retried(task, failures))


def signal(
    inspector: StoreInspector,
    job: str,
    key: bytes,
    name: str,
    value: Tree,
    message: str | None = None,
    lens: Lens = PLAIN,
) -> Outcome:
    """Give *value* to the call of *key*, or of one message of it, that waits for the signal *name*."""
    messages = find_messages(inspector, job, message, key)
    of_key = list(questions(inspector, job, "signal", messages, lens))
    found = [each for each in of_key if each.name == name] or _answered(inspector, job, messages, name, lens)
    if len(found) > 1:
        # Of several waits in one message, the first is the one that has no answer yet.
        found = [each for each in found if each.decision is None] or found
        if len({each.message for each in found}) > 1:
            raise InspectError(
                f"several messages of key {key_text(key)} wait for the signal {name!r}: {_SAY_WHICH}; "
                f"{some('they are', (each.message for each in found))}"
            )
    if not found:
        waiting = [f"{each.name} (key {key_text(each.key)})" for each in of_key] or (
            f"{each.name} (key {key_text(each.key)})" for each in questions(inspector, job, "signal", lens=lens)
        )
        raise InspectError(
            f"no message of key {key_text(key)} of job {job!r} waits for a signal {name!r}; "
            f"{some('waited for are', waiting)}"
        )
    _, task, (number,) = parse_target(found[0].target)
    return _decide(inspector, job, found[0], Signalled(task, number, value))


def _answered(
    inspector: StoreInspector, job: str, messages: Iterable[tuple[bytes, str]], name: str, lens: Lens
) -> list[Question]:
    """The last wait for the signal *name* that is over because it was answered, as long as its message is on record."""
    found: list[Question] = []
    decided = decisions_by_message(inspector, job)
    for place in messages:
        made = {decision.target: decision for decision in decided.get(place, ())}
        for state in lens.states(inspector.records(job, *place)) if made else ():
            for call in state.calls.values():
                decision = made.get(signal_target(state.task, call.number))
                if decision is not None and call.name == WAIT and signal_name(call) == name:
                    identity = call_id(*place, state.task, call.number)
                    found = [Question(*place, decision.target, "signal", name, identity, decision)]
    return found


def questions(
    inspector: StoreInspector,
    job: str,
    kind: str,
    messages: Iterable[tuple[bytes, str]] | None = None,
    lens: Lens = PLAIN,
) -> Iterator[Question]:
    """The questions of one kind about *messages*, or about all of the job."""
    if messages is None:
        messages = perhaps_set_aside(inspector, job, lens)
    for summary in summaries(inspector, job, messages, lens):
        if summary.state is State.ENCRYPTED:
            raise needs_cipher(f"message {summary.message!r} of job {job!r}")
        yield from (each for each in summary.questions if each.kind == kind)


def _decide(inspector: StoreInspector, job: str, question: Question, answer: Answer) -> Outcome:
    decision = Decision(question.key, question.message, answer.target, answer.body)
    if inspector.decide(job, decision):
        return Outcome(question, decision, written=True, same=True)
    before = next((each for each in inspector.decisions(job) if each[:3] == decision[:3]), None)
    if before is None:
        raise InspectError(
            f"message {question.message!r} of job {job!r} was decided about before, and is done by now: nothing was "
            "written"
        )
    return Outcome(question, before, written=False, same=_says(before, answer))


def _says(decision: Decision, answer: Answer) -> bool:
    """Whether *decision* is *answer*; ``1`` and ``True`` are two."""
    try:
        before = load(decision.target, decision.body)
    except RecordError:
        return False
    return codec.canonical(list(before)) == codec.canonical(list(answer))
