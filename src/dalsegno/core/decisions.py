"""What a person may decide about a message, and how a decision is written down.

=========================================== =========================================================================
target                                      body, besides ``"v": 1``
=========================================== =========================================================================
``resolve/<task>/<call>/<attempt>``         ``"happened": tree`` the call in doubt did, with this result; or
                                            ``"did_not_happen": true``
``signal/<task>/<call>``                    ``"value": tree`` what the call that waits is given
``retry/<task>/<failures>``                 nothing: the action is run again
=========================================== =========================================================================

A target names one question: the same call in doubt in its next attempt, or an action that fails once more, is another
one. *failures* is the `failures` of the `TaskActionState`. A body is JSON with its format version; what is damaged or
of a newer version is refused.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from dalsegno.core.codec import Tree
from dalsegno.errors import RecordError

if TYPE_CHECKING:
    from dalsegno.core.records import CallState

FORMAT_VERSION = 1


class Resolved(NamedTuple):
    """A call in doubt happened, with the tree *result*, or it did not (*happened* is False)."""

    task: str
    call: int
    attempt: int
    happened: bool
    result: Tree = None

    @property
    def target(self) -> str:
        return f"resolve/{self.task}/{self.call}/{self.attempt}"

    @property
    def body(self) -> bytes:
        return _dump({"happened": self.result} if self.happened else {"did_not_happen": True})


class Signalled(NamedTuple):
    """A call that waits is given the tree *value*."""

    task: str
    call: int
    value: Tree

    @property
    def target(self) -> str:
        return f"signal/{self.task}/{self.call}"

    @property
    def body(self) -> bytes:
        return _dump({"value": self.value})


class Retried(NamedTuple):
    """The action is run again, after it was parked for failing for the *failures*-th time."""

    task: str
    failures: int

    @property
    def target(self) -> str:
        return f"retry/{self.task}/{self.failures}"

    @property
    def body(self) -> bytes:
        return _dump({})


WAIT = "dalsegno.wait_for"
"""The name of the call that waits for a signal; its argument is the name of the signal."""


def wait_limit(state: CallState) -> datetime | None:
    """When a call that waits for a signal gives up."""
    until = state.kwargs.get("until")
    return datetime.fromisoformat(until) if until is not None else None


Answer = Resolved | Signalled | Retried


def resolve_target(task: str, call: int, attempt: int) -> str:
    return Resolved(task, call, attempt, False).target


def signal_target(task: str, call: int) -> str:
    return Signalled(task, call, None).target


def retry_target(task: str, failures: int) -> str:
    return Retried(task, failures).target


class Target(NamedTuple):
    """The parts of a target: *numbers* are call and attempt, call, or failures."""

    kind: str
    task: str
    numbers: tuple[int, ...]


_NUMBERS = {"resolve": 2, "signal": 1, "retry": 1}


def parse_target(target: str) -> Target:
    """The parts of *target*; raises `RecordError` if it is none that this version knows."""
    kind, _, rest = target.partition("/")
    task, *numbers = rest.rsplit("/", _NUMBERS.get(kind, 0))
    if kind not in _NUMBERS or len(numbers) != _NUMBERS[kind] or not all(map(_is_number, numbers)):
        raise RecordError(
            f"the decision {target!r} is about nothing that this version of dalsegno knows: install the version that "
            "wrote it, or a newer one"
        )
    return Target(kind, task, tuple(map(int, numbers)))


def load(target: str, body: bytes) -> Answer:
    """The answer that a decision gives; raises `RecordError` if it is damaged, foreign or too new."""
    kind, task, numbers = parse_target(target)
    fields = _load(target, body)
    if kind == "signal" and "value" in fields:
        return Signalled(task, numbers[0], fields["value"])
    if kind == "resolve" and "happened" in fields:
        return Resolved(task, numbers[0], numbers[1], True, fields["happened"])
    if kind == "resolve" and fields.get("did_not_happen") is True:
        return Resolved(task, numbers[0], numbers[1], False)
    if kind == "retry":
        return Retried(task, *numbers)
    raise RecordError(f"the decision {target!r} is not what this version writes: {body[:200]!r}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and str(int(text)) == text


def _dump(fields: dict[str, Any]) -> bytes:
    return orjson.dumps({"v": FORMAT_VERSION} | fields)


def _load(target: str, body: bytes) -> dict[str, Any]:
    try:
        fields: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"the decision {target!r} is damaged, it is not JSON ({error}): {body[:200]!r}") from error
    version = fields.get("v") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or type(version) is not int or version < 1:
        raise RecordError(f"the decision {target!r} is not one of this library: {body[:200]!r}")
    if version > FORMAT_VERSION:
        raise RecordError(
            f"the decision {target!r} has format version {version}; this version of dalsegno reads up to "
            f"{FORMAT_VERSION}: install the version that wrote it, or a newer one"
        )
    return fields
