"""What a run did, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A message that was set aside, and why."""

    key: Any
    message_id: str
    reason: str
    why: str = "in_doubt"
    """``in_doubt``, ``waiting`` (for a signal), ``failed`` or ``attempts``, see `dalsegno.core.records.Park`."""


@dataclass(slots=True)
class RunReport:
    """What one run of a job did. Counts are of this run, not of the job's whole history."""

    job: str
    messages: int = 0
    """Messages that were finished."""
    outputs: int = 0
    calls_executed: int = 0
    calls_replayed: int = 0
    """Calls that were answered from the record."""
    parked: list[ParkedMessage] = field(default_factory=list)
    """Messages that are set aside when the run ends, in the order in which they were."""
    waiting: int = 0
    """Messages that wait behind a parked one of their key."""
    skipped: int = 0
    """Input records that could not be read and were skipped."""
    set_aside: int = 0
    """Input records that could not be read and were set aside."""
    repeated: int = 0
    """Input records that came again with the id and content of a message that is known, and were dropped."""
    diverged: int = 0
    """Messages that went on, with ``on_divergence="rerun"``, although the code no longer fitted their record."""
    lag: int | None = None
    """How many records of the source were yet to be read, as last known; None for a source that has no such count."""
    checkpoints: int = 0
    seconds: float = 0.0
    stopped_by: str | None = None
    """The name of the signal that stopped the run before its input was finished, ``"stop()"``, or None."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. *read*, *total* and *done* are in the source's unit (bytes of a file, records).

    *total* is None if it is not known.
    """

    report: RunReport
    read: int
    total: int | None
    in_flight: int = 0
    """Messages that are being run now."""
    done: int = 0
    """How much of *read* is worked off. Of a file it is an estimate, in which all records are equally long, that is
    exact when nothing is left to do."""


OnProgress = Callable[[Progress], None]
