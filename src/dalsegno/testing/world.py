"""The world in which an agent is crashed: what outlives its lives, and what was seen to happen in each.

A *life* is one process of the job, or what stands for one: it ends with a crash or with the end of the input. What the
store, the checkpoint file and the sink have taken outlives it; nothing else does. After its crash a life can touch
nothing any more: each step that it still tries raises `Crashed`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dalsegno.core.records import CallState, OpenBody, Record, fold
from dalsegno.core.transitions import CallStatus

Kind = Literal["write", "prune", "checkpoint", "call", "event", "action", "output"]
How = Literal["before", "after", "failing", "unanswered", "zombie", "killed before", "killed after"]
"""What happens at a boundary: a crash before or after it; or, to a write, an error instead of it or after it, or that
another process takes the job over, and does all of it, before the write is tried. In a history with *killed* its lives
are real processes."""
Tell = Callable[..., None]
"""Takes the name of something that was seen, and what belongs to it."""

START = datetime(2026, 1, 1, tzinfo=UTC)


class Crashed(BaseException):
    """Raised in a life that is over, at each step that would be seen outside of it."""


class Boundary(NamedTuple):
    """The *number*-th step of a life, from 1, that something outside can tell from its not being taken."""

    number: int
    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"boundary {self.number}: {self.kind} {self.what}".rstrip()


class Strike(NamedTuple):
    """Where a life is struck."""

    how: How
    number: int

    def __str__(self) -> str:
        return f"{self.how} {self.number}"

    @property
    def is_before(self) -> bool:
        return self.how.endswith("before")

    @property
    def is_after(self) -> bool:
        return self.how.endswith("after")

    @property
    def kills(self) -> bool:
        return self.how.startswith("killed")

    @classmethod
    def parse(cls, text: str) -> Strike:
        how, _, number = text.strip().rpartition(" ")
        if how not in get_args(How) or not number.isdecimal():
            raise ValueError(f"{text!r} is no crash: write 'before 7' or 'after 7', as the report does")
        return cls(how, int(number))  # type: ignore[arg-type]


_FINAL = (CallStatus.COMPLETED, CallStatus.ABANDONED)


class CallPlace(NamedTuple):
    """Which durable call."""

    key: bytes
    message: str
    task: str
    number: int


@dataclass(slots=True)
class Execution:
    """One time that the function of a durable call was really executed."""

    place: CallPlace
    about: str
    effect: str
    life: int
    state: Literal["begun", "returned", "raised"] = "begun"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be. *promise* is the number that the documentation gives to what is broken."""

    promise: str
    text: str

    def __str__(self) -> str:
        return f"[{self.promise}] {self.text}"


@dataclass
class World:
    """What outlives the lives of one case, and what is known of them. *folder* is empty at the beginning."""

    folder: Path
    job: str
    seed: str = ""
    """With the number of a life it seeds what is random in it."""
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    log: dict[tuple[bytes, str, str], list[Record]] = field(default_factory=dict)
    """All records that became durable, pruned ones too, by their action task."""
    order: list[Record] = field(default_factory=list)
    """The same in their order."""
    open_body: OpenBody | None = None
    executions: dict[CallPlace, list[Execution]] = field(default_factory=dict)
    settled: set[tuple[CallPlace, int]] = field(default_factory=set)
    """Calls of which a reconcile has said that they did not happen, each with how many executions it knew of."""
    problems: list[Problem] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    checkpoints: int = 0
    """The number of the checkpoint file that the next life uses."""
    clock: float = 0.0
    """Seconds since `START`."""
    tell: Tell = lambda *_: None
    """Told of all that is seen, in a life that is a process of its own."""
    freeze: Callable[[], None] | None = None
    """Stops the process of such a life for good."""

    @property
    def checkpoint_file(self) -> Path:
        return self.folder / f"checkpoints-{self.checkpoints}.db"

    def copy_checkpoints(self) -> None:
        """From now on lives use a copy: the file itself is still in the hands of one that was displaced."""
        before = self.checkpoint_file
        self.checkpoints += 1
        for path in before.parent.glob(f"{before.name}*"):
            shutil.copy(path, f"{self.checkpoint_file}{path.name.removeprefix(before.name)}")

    def blame(self, promise: str, text: str) -> None:
        problem = Problem(promise, text)
        if problem not in self.problems:
            self.problems.append(problem)
            self.tell("problem", problem)

    def became_durable(self, records: Sequence[Record]) -> None:
        self.tell("durable", [*records])
        for record in records:
            self.log.setdefault((record.key, record.message, record.task), []).append(record)
            self.order.append(record)

    def recorded(self, place: CallPlace) -> CallState | None:
        """What is durable of a call."""
        states = fold(self.log.get(place[:3], ()), self.open_body)
        return states[0].calls.get(place.number) if states else None

    def begin(self, place: CallPlace, about: str, effect: str) -> Execution:
        """The function of a call is about to be executed; finds out whether it may be."""
        before = self.executions.setdefault(place, [])
        execution = Execution(place, about, effect, len(self.lives) - 1)
        self._check_first(execution, before)
        before.append(execution)
        self.tell("begun", place, about, effect)
        return execution

    def end(self, execution: Execution, state: Literal["returned", "raised"]) -> None:
        execution.state = state
        index = next(n for n, each in enumerate(self.executions[execution.place]) if each is execution)
        self.tell("ended", execution.place, index, state)

    def settle(self, place: CallPlace) -> list[Execution]:
        """A reconcile has said that a call did not happen; gives the executions that there were."""
        executions = self.executions.get(place, [])
        self.settled.add((place, len(executions)))
        self.tell("settled", place, len(executions))
        return executions

    def _check_first(self, now: Execution, before: Sequence[Execution]) -> None:
        if not before:
            return
        recorded = self.recorded(now.place)
        if recorded is not None and recorded.status in _FINAL and not recorded.unsure:
            self.blame("P1", f"{now.about} was executed again although its outcome is recorded")
            return
        last = before[-1]
        if last.state == "raised":
            return
        if recorded is None and now.effect != "read":
            self.blame("P6", f"{now.about} was executed before its request was durable")
        if last.life == now.life and last.state == "returned":
            self.blame("P1", f"{now.about} was executed twice by one process")
        elif now.effect == "once" and last.state == "returned":
            self.blame("P6", f"{now.about}, with effect 'once', was executed again after it had happened")
        elif now.effect == "once" and (now.place, len(before)) not in self.settled:
            self.blame("P6", f"{now.about}, with effect 'once', was executed again while it was in doubt")


class Life:
    """One life in *world*. It is *struck* at one boundary, or lives to its end."""

    def __init__(
        self,
        world: World,
        strike: Strike | None,
        loop: asyncio.AbstractEventLoop | None = None,
        clock_jumps: float = 0.0,
    ) -> None:
        self._jumps = random.Random(f"{world.seed} clock {len(world.lives)}")
        self._clock_jumps = clock_jumps
        self.clock_error = self._jump()
        """How far, in seconds, the clock on the wall is from the time that has passed."""
        self.world = world
        self.strike = strike
        self.boundaries: list[Boundary] = []
        self.struck: Boundary | None = None
        self.dead = False
        self.over = asyncio.Event()
        self.write_failed = False
        self.displaced = False
        """Whether another process has taken over the job."""
        self._loop = loop
        self._numbers = itertools.count(1)
        world.lives.append(self)

    @contextmanager
    def boundary(self, kind: Kind, what: str = "") -> Iterator[Strike | None]:
        """One step; gives what strikes it if that is no crash."""
        self.check_alive()
        here = Boundary(next(self._numbers), kind, what)
        self.boundaries.append(here)
        if self._clock_jumps and here.number % 8 == 0:
            self.clock_error = self._jump()
        self.world.tell("boundary", here, self._loop.time() if self._loop is not None else 0.0)
        hit = self.strike if self.strike is not None and self.strike.number == here.number else None
        if hit is not None and not hit.is_after:
            self._strike(here)
        if hit is not None and hit.is_before:
            self.die()
        if kind == "output":
            self.check_may_go_on(f"the output {what}")
        failure: Exception | None = None
        try:
            yield hit if hit is not None and not (hit.is_before or hit.is_after) else None
        except Exception as error:
            failure = error
        self.check_alive()
        if hit is not None and hit.is_after:
            self._strike(here)
            self.die()
        if failure is not None:
            raise failure

    def _jump(self) -> float:
        return self._jumps.uniform(-self._clock_jumps, self._clock_jumps)

    def _strike(self, here: Boundary) -> None:
        self.struck = here
        self.world.tell("struck", here)

    def check_may_go_on(self, what: str) -> None:
        """Blame a step that the world can tell and that comes although the process must not go on."""
        self.check_alive()
        if self.write_failed:
            self.world.blame("P5", f"a write to the store had failed, and still there was {what}")
        if self.displaced:
            self.world.blame("P8", f"another process had taken over the job, and still there was {what}")

    def check_alive(self) -> None:
        if self.dead:
            raise Crashed

    def die(self) -> None:
        if self.world.freeze is not None:
            self.world.freeze()
        self.dead = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.over.set)
        raise Crashed
