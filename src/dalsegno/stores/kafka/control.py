"""What partition 0 of a topic says of its job: a log of events, and their fold. Nothing here does I/O.

=========== ========================================================================================================
event       says
=========== ========================================================================================================
opened      a worker opened the job; the first one names the job, its identity and its number of partitions
fenced      workers of another number can write no more
pruned      for which checkpoint, which decisions went, and where the log of each partition may begin by now
decided     what somebody decided about a message; the first one about a target counts
snapshot    all that the events before offset ``upto`` add up to, so that these may go
=========== ========================================================================================================

An event is JSON. Texts that JSON cannot hold are in it as base64, as are bytes.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dalsegno.errors import RecordError
from dalsegno.stores.base import Decision, Worker

Event = dict[str, Any]


@dataclass(slots=True)
class JobState:
    """What is known of a job."""

    job: str = ""
    identity: str = ""
    partitions: int = 0
    """Partitions with records, numbered from 1. Those that were added to the topic later are not among them."""
    epoch: int = 0
    """How often the job was opened."""
    writers: dict[Worker, int] = field(default_factory=dict)
    """Who may still be able to write, and the epoch in which they opened the job."""
    last: dict[str, Any] = field(default_factory=dict)
    """Who opened it last: owner, pid, host, since."""
    pruned_through: int = 0
    marks: dict[int, int] = field(default_factory=dict)
    """Of each partition the offset from which on its log is needed: what lies before it may be gone."""
    decisions: dict[tuple[bytes, str, str], tuple[int, str, Decision]] = field(default_factory=dict)
    """Of each target the number of its decision, who made it (a random name), and what it is."""
    order: int = 0
    """No record that was put by an owner before the last has a later place."""


class ControlLog:
    """The fold of the events so far; *position* is the offset of the next one."""

    def __init__(self) -> None:
        self.state = JobState()
        self.position = 0
        self.openings: dict[str, tuple[int, dict[Worker, int]]] = {}
        """Of each opening that was read, by its random name, the epoch and who could write at that time."""
        self._begun = False
        self._early: list[tuple[int, Event]] = []

    def begin(self) -> None:
        """Whatever was read so far is the log from its start: apply it, beginning with the last snapshot."""
        snapshots = [event for _, event in self._early if event["event"] == "snapshot"]
        upto = 0
        if snapshots:
            self.state, upto = _state(snapshots[-1]["state"]), snapshots[-1]["upto"]
        for offset, event in self._early:
            if offset >= upto:
                self._apply(offset, event)
        self._early.clear()
        self._begun = True

    def add(self, offset: int, payload: bytes) -> None:
        try:
            event = json.loads(payload)
            if self._begun:
                self._apply(offset, event)
            else:
                self._early.append((offset, event))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"it is no event that this version knows ({type(error).__name__}: {error})") from error

    def _apply(self, offset: int, event: Event) -> None:
        kind = event["event"]
        if kind == "opened":
            self._opened(event)
        elif kind == "fenced":
            for index, of, epoch in event["workers"]:
                if self.state.writers.get(Worker(index, of)) == epoch:
                    del self.state.writers[Worker(index, of)]
        elif kind == "pruned":
            self._pruned(event)
        elif kind == "decided":
            decision = Decision(
                *(_bytes(event["key"]), _text(event["message"]), _text(event["target"]), _bytes(event["body"]))
            )
            self.state.decisions.setdefault(decision[:3], (offset + 1, event["by"], decision))
        elif kind != "snapshot":
            raise ValueError(f"event {kind!r}")

    def _opened(self, event: Event) -> None:
        state = self.state
        state.epoch += 1
        state.identity = state.identity or event["identity"]
        state.partitions = state.partitions or event["partitions"]
        state.job = _text(event["job"])
        state.order = max(state.order, event["order"])
        state.last = {name: event[name] for name in ("pid", "host", "since")} | {"owner": _text(event["owner"])}
        self.openings[event["by"]] = state.epoch, state.writers.copy()
        state.writers[Worker(*event["worker"])] = state.epoch

    def _pruned(self, event: Event) -> None:
        state = self.state
        state.pruned_through = max(state.pruned_through, event["through"])
        state.order = max(state.order, event["order"])
        for partition, mark in event["marks"]:
            state.marks[partition] = max(state.marks.get(partition, 0), mark)
        dropped = set(event["dropped"])
        if dropped:
            state.decisions = {which: made for which, made in state.decisions.items() if made[0] not in dropped}


def opened(job: str, owner: str, worker: Worker, by: str, partitions: int, identity: str, **me: Any) -> Event:
    return {
        **me,
        "event": "opened",
        "job": _written(job),
        "owner": _written(owner),
        "worker": [worker.index, worker.of],
        "by": by,
        "partitions": partitions,
        "identity": identity,
    }


def fenced(workers: Mapping[Worker, int]) -> Event:
    return {"event": "fenced", "workers": [[worker.index, worker.of, epoch] for worker, epoch in workers.items()]}


def pruned(through: int, marks: Mapping[int, int], dropped: list[int], order: int) -> Event:
    return {"event": "pruned", "through": through, "marks": [*marks.items()], "dropped": dropped, "order": order}


def decided(decision: Decision, by: str) -> Event:
    key, message, target, body = decision
    return {
        "event": "decided",
        "by": by,
        "key": _b64(key),
        "message": _written(message),
        "target": _written(target),
        "body": _b64(body),
    }


def snapshot(log: ControlLog) -> Event:
    state = log.state
    kept = {
        "job": _written(state.job),
        "identity": state.identity,
        "partitions": state.partitions,
        "epoch": state.epoch,
        "last": state.last | {"owner": _written(state.last["owner"])},
        "pruned_through": state.pruned_through,
        "marks": [*state.marks.items()],
        "order": state.order,
        "writers": [[worker.index, worker.of, epoch] for worker, epoch in state.writers.items()],
        "decisions": [[number, decided(decision, by)] for number, by, decision in state.decisions.values()],
    }
    return {"event": "snapshot", "upto": log.position, "state": kept}


def _state(kept: dict[str, Any]) -> JobState:
    replayed = ControlLog()
    replayed.begin()
    for number, event in kept["decisions"]:
        replayed._apply(number - 1, event)
    return JobState(
        _text(kept["job"]),
        kept["identity"],
        kept["partitions"],
        kept["epoch"],
        {Worker(index, of): epoch for index, of, epoch in kept["writers"]},
        kept["last"] | {"owner": _text(kept["last"]["owner"])},
        kept["pruned_through"],
        dict(kept["marks"]),
        replayed.state.decisions,
        kept["order"],
    )


def dump(event: Event) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _b64(value: bytes) -> str:
    return b64encode(value).decode()


def _bytes(value: str) -> bytes:
    return b64decode(value, validate=True)


def _written(text: str) -> str | list[str]:
    try:
        text.encode()
    except UnicodeEncodeError:
        return [_b64(text.encode(errors="surrogatepass"))]
    return text


def _text(written: str | list[str]) -> str:
    return written if isinstance(written, str) else _bytes(written[0]).decode(errors="surrogatepass")
