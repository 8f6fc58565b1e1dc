"""What came of crashing an agent everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dalsegno.testing.world import Boundary, Problem, Strike

Case = tuple[Strike, ...]
"""Where the lives of a history are struck, one after the other; the one after the last lives to its end."""


def name_of(case: Case) -> str:
    """A case as it is written down; `parse_case` reads it."""
    return ", ".join(map(str, case)) or "no crash"


def parse_case(text: str) -> Case:
    """Raises `ValueError` for what is no case."""
    return () if text.strip() == "no crash" else tuple(Strike.parse(part) for part in text.split(","))


@dataclass(frozen=True)
class Failure:
    """A case in which something was wrong. *inputs* is how many of the inputs were used, the first ones."""

    case: Case
    inputs: int
    struck: Sequence[Boundary]
    problems: Sequence[Problem]

    def __str__(self) -> str:
        where = "".join(
            f"\n  life {number}: {strike.how} {boundary}"
            for number, (strike, boundary) in enumerate(zip(self.case, self.struck, strict=False), 1)
        )
        wrong = "".join(f"\n  {problem}" for problem in self.problems)
        return f"case {name_of(self.case)!r} with {self.inputs} input(s):{where or ' no crash'}\n wrong:{wrong}"


@dataclass
class CrashReport:
    """What was run, and what was wrong."""

    boundaries: Sequence[Boundary] = ()
    """Those of the run without a crash."""
    cases: int = 0
    """Histories that were run, the one without a crash included."""
    missed: int = 0
    """Those in which the run ended before it came to the boundary: its steps came in another order."""
    pairs_possible: int = 0
    pairs_run: int = 0
    parked: int = 0
    """Histories that ended with a message parked as in doubt, as they may."""
    kills_run: int = 0
    """Histories in which the lives were real processes."""
    processes: int = 0
    """So many there were."""
    killed: int = 0
    """Those of which the wait status says that SIGKILL ended them."""
    part: tuple[int, int] | None = None
    """Which part of all histories this is, from 0, and of how many."""
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    seed: int = 0

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        kinds = Counter(boundary.kind for boundary in self.boundaries)
        counted = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        lines = [
            f"{self.cases} histories of {len(self.boundaries)} boundaries ({counted}) in {self.seconds:.1f} s",
            f"second crashes during recovery: {self.pairs_run} of {self.pairs_possible} possible (seed {self.seed})",
            f"{self.parked} ended with a message parked as in doubt",
        ]
        if self.part is not None:
            lines.insert(0, f"part {self.part[0]} of {self.part[1]}, counted from 0")
        if self.kills_run:
            lines.append(
                f"{self.kills_run} were run in {self.processes} real processes, {self.killed} of which ended by SIGKILL"
            )
        if self.missed:
            lines.append(f"{self.missed} ended before they came to their boundary")
        if self.failures:
            shortest = self.failures[-1]
            lines.append(f"FAILED: {shortest}")
            lines.append(
                f"to run it alone: crash_everywhere(agent, inputs[:{shortest.inputs}], ..., seed={self.seed}, "
                f"case={name_of(shortest.case)!r})"
            )
        return "\n".join(lines)


class CrashTestFailed(AssertionError):
    """An agent, or this library, did not survive a crash. `report` says where, and what was wrong."""

    def __init__(self, report: CrashReport) -> None:
        super().__init__(str(report))
        self.report = report
