"""Finds what people name in a store: keys, messages, calls.

What is not there, and what could be several, is an `InspectError` that says what there is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from dalsegno.cipher import is_sealed, needs_cipher
from dalsegno.core import codec
from dalsegno.core.decisions import WAIT
from dalsegno.core.identity import key_bytes
from dalsegno.core.records import Record
from dalsegno.errors import CodecError, InspectError, RecordError
from dalsegno.operate.views import PLAIN, SHOWN_DIGITS, Lens, MessageSummary, call_id, summarize
from dalsegno.stores.base import Decision, StoreInspector

FEWEST_DIGITS = 4
_SHOWN = 10
_WAIT = WAIT.encode()


class CallPlace(NamedTuple):
    """Where a call is recorded."""

    call: str
    key: bytes
    message: str
    task: str
    number: int


def key_text(key: bytes) -> str:
    """A key as people see it and may type it: in canonical form."""
    return printable(key.decode(errors="backslashreplace"))


def printable(text: str) -> str:
    """*text* without what would move the cursor, ring the bell or turn the line around."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def parse_json(text: str) -> Any:
    """The value of JSON *text*; raises ``ValueError`` for anything else, as for NaN, and for a number out of range."""
    return json.loads(text, parse_constant=_not_json, parse_float=_finite)


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:80]} is out of the range of a float")
    return number


def find_key(text: str, keys: Iterable[bytes], *, as_json: bool = False) -> bytes:
    """The key of *keys* that *text* names.

    It may be a JSON value, the canonical form that is shown, or, unless *as_json*, the key itself if that is text. What
    names two keys is ambiguous, as ``1`` where there are ``1`` and ``"1"``.
    """
    there = dict.fromkeys(keys)
    found = sorted(there.keys() & set(_candidates(text, as_json)))
    if len(found) > 1:
        raise InspectError(
            f"{text!r} names {len(found)} keys, {' and '.join(map(key_text, found))}: say with --key-json that it is "
            "JSON, where text has quotes"
        )
    if not found:
        raise InspectError(f"nothing is recorded of a key {text!r}; {some('the keys are', map(key_text, there))}")
    return found[0]


def _candidates(text: str, as_json: bool) -> Iterator[bytes]:
    if not as_json:
        yield key_bytes(text)
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        if as_json:
            raise InspectError(f"{text!r} is not JSON; text has quotes there, as in '\"a\"'") from None
        return
    yield key_bytes(value)
    try:
        yield codec.canonical(value)
    except CodecError:
        return


def find_messages(
    inspector: StoreInspector, job: str, message: str | None = None, key: bytes | None = None
) -> list[tuple[bytes, str]]:
    """Key and id of the messages that have this id, this key, or both.

    What no message has as its id may be an id as it is shown, where that differs, as for one with a newline in it.
    """
    of_key = [each for each in inspector.messages(job) if key in (None, each[0])]
    found = [each for each in of_key if message in (None, each[1])]
    return found or [each for each in of_key if message == printable(each[1])]


def find_message(inspector: StoreInspector, job: str, message: str, key: bytes | None = None) -> tuple[bytes, str]:
    """The one message with this id, of *key* if that is given."""
    found = find_messages(inspector, job, message, key)
    if not found:
        of_key = f" of key {key_text(key)}" if key is not None else ""
        raise InspectError(
            f"job {job!r} has no message {message!r}{of_key} on record: it is done and was pruned, or never was; "
            f"{some('the messages are', (name for _, name in inspector.messages(job)))}"
        )
    if len(found) > 1:
        raise InspectError(
            f"{len(found)} keys of job {job!r} have a message {message!r}: say with --key which one is meant; "
            f"{some('the keys are', (key_text(name) for name, _ in found))}"
        )
    return found[0]


def find_call(inspector: StoreInspector, job: str, prefix: str, lens: Lens = PLAIN) -> CallPlace:
    """The one call whose id begins with *prefix*."""
    digits = prefix.lower()
    if not looks_like_call(digits):
        raise InspectError(
            f"{prefix!r} is not the id of a call: those are hexadecimal, and at least {FEWEST_DIGITS} of their digits "
            f"are needed; 'dalsegno show {job} MESSAGE' shows them"
        )
    found = {place for place in _calls(inspector, job, lens) if place.call.startswith(digits)}
    if not found:
        raise InspectError(
            f"job {job!r} has no call {prefix!r} on record: its message is done and was pruned, or it never was; "
            f"'dalsegno show {job} MESSAGE' shows the calls of a message"
        )
    if len(found) > 1:
        ids = sorted(place.call for place in found)
        raise InspectError(
            f"{prefix!r} is the beginning of {len(found)} calls of job {job!r}: give more digits; "
            f"{some('they are', (_told_apart(each, ids) for each in ids))}"
        )
    return found.pop()


def looks_like_call(text: str) -> bool:
    return FEWEST_DIGITS <= len(text) <= 32 and all(character in "0123456789abcdef" for character in text)


def _told_apart(call: str, ids: list[str]) -> str:
    length = SHOWN_DIGITS
    while sum(each.startswith(call[:length]) for each in ids) > 1:
        length += 1
    return call[:length]


def _calls(inspector: StoreInspector, job: str, lens: Lens) -> Iterator[CallPlace]:
    """Every call of the job, some more than once; what is damaged is passed over."""
    for record in _records(inspector, job):
        try:
            body = orjson.loads(lens.decode(record))
            numbers = [open_call[0] for open_call in body.get("open", ())]
            numbers += [body["call"]] if body["kind"] != "parked" and "call" in body else []
        except (orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError):
            if is_sealed(record.body):
                raise needs_cipher(f"the record of message {record.message!r} of job {job!r}") from None
            continue
        for number in numbers:
            place = (record.key, record.message, record.task, number)
            yield CallPlace(call_id(*place), *place)


def _records(inspector: StoreInspector, job: str) -> Iterator[Record]:
    """All records of the job, of all messages that can be read; some more than once."""
    try:
        yield from inspector.records(job)
    except RecordError:
        # One record that a cipher cannot open ends what goes through all of them.
        for key, message in inspector.messages(job):
            with suppress(RecordError):
                yield from inspector.records(job, key, message)


def summaries(
    inspector: StoreInspector,
    job: str,
    messages: Iterable[tuple[bytes, str]] | None = None,
    lens: Lens = PLAIN,
) -> Iterator[MessageSummary]:
    """Each of *messages*, or of all of the job, in recorded order; one message at a time is in memory."""
    decided = decisions_by_message(inspector, job)
    for key, message in inspector.messages(job) if messages is None else messages:
        summary = summarize(key, message, inspector.records(job, key, message), decided.get((key, message), ()), lens)
        if summary.actions or summary.reason is not None:  # else it was pruned meanwhile
            yield summary


def perhaps_set_aside(inspector: StoreInspector, job: str, lens: Lens = PLAIN) -> list[tuple[bytes, str]]:
    """The messages that may be set aside: all that are, and a few others. Far quicker than to look at each message."""
    found: dict[tuple[bytes, str], None] = {}
    for record in _records(inspector, job):
        body = lens.decode(record)
        if b'"parked"' in body or _WAIT in body or is_sealed(body):
            found[record.key, record.message] = None
    return list(found)


def perhaps_in_flight(inspector: StoreInspector, job: str, lens: Lens = PLAIN) -> list[tuple[bytes, str]]:
    """The messages that may be in flight, in recorded order: all that are, and a few others; in one pass."""
    open_now: dict[tuple[bytes, str], bool] = {}
    for record in _records(inspector, job):
        open_now[record.key, record.message] = not _ends_or_parks(lens.decode(record))
    return [message for message, is_open in open_now.items() if is_open]


def _ends_or_parks(body: bytes) -> bool:
    """Whether nothing of a message is in flight after a record with that *body*."""
    if is_sealed(body):
        return True  # nobody can tell without the cipher
    if not (b'"parked"' in body or b'"last"' in body):  # spares most of them the reading
        return False
    try:
        fields = orjson.loads(body)
        return fields["kind"] == "parked" or (fields["kind"] == "done" and bool(fields.get("last")))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return False


def decisions_by_message(inspector: StoreInspector, job: str) -> dict[tuple[bytes, str], list[Decision]]:
    decided: dict[tuple[bytes, str], list[Decision]] = {}
    for decision in inspector.decisions(job):
        decided.setdefault(decision[:2], []).append(decision)
    return decided


def some(they_are: str, names: Iterable[str]) -> str:
    """*names* in a message, however many there are."""
    shown = list(dict.fromkeys(names))
    if not shown:
        return "there are none"
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return f"{they_are} {', '.join(printable(name[:80]) for name in shown[:_SHOWN])}{more}"
