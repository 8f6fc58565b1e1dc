"""`crash_everywhere`: proves that an agent survives a crash at each of its steps."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

from dalsegno.agent import Agent
from dalsegno.errors import ActionError, DefinitionError
from dalsegno.testing.checks import check
from dalsegno.testing.kills import KilledLives
from dalsegno.testing.lives import Ended, Job, Lives, MakeStore
from dalsegno.testing.outside import Outside
from dalsegno.testing.report import Case, CrashReport, CrashTestFailed, Failure, name_of, parse_case
from dalsegno.testing.world import Boundary, Strike, World

OnCase = Callable[[CrashReport, int], None]

_RESTARTS = 50
"""How often a job is started again whose agent raises, before that counts as its end."""


def crash_everywhere(
    agent: Agent | Callable[[], Agent] | Sequence[Agent | Callable[[], Agent]],
    inputs: Iterable[Any],
    *,
    key: Any = None,
    store: MakeStore = "memory://",
    outside: Outside | None = None,
    seed: int = 0,
    pairs: int = 100,
    kills: int = 0,
    case: str | None = None,
    part: tuple[int, int] | None = None,
    checkpoint_after: int = 3,
    clock_jumps: float = 0.0,
    on_case: OnCase | None = None,
    **options: Any,
) -> CrashReport:
    """Run *agent* over *inputs* with a crash at each of its steps, and check what comes of it.

    The agent runs once without a crash, and its *boundaries* are counted: each write to the store, call, event, action
    done, checkpoint, prune and output. Then it runs once for each boundary with a crash before it, and once after it;
    once for each write with an error instead of it, with one after it, and, where the store lets another process take a
    job over, with one that does so just before it; and goes on in new lives until it is done.
    *pairs* histories, chosen by *seed*, have a second crash during the recovery from the first one; the report says how
    many are possible. After each history it is checked that no recorded call was executed again, that no output is
    lost, repeated or other than the recorded answers say, that memory is what they say, that nothing is parked without
    need, and that no record is left.

    *agent* is an agent or, better, what makes one: each life then begins with a new one, as each process does. Of
    several agents each is proven on its own, and the report is that of the last one. *key* is as in `LocalRunner.run`,
    and *options* are those of `LocalRunner`. *store* is a URL, with ``{folder}`` for a folder of each history, or makes
    a store from such a folder; each life opens it anew. *outside* is what the agent's tools act on; it is reset before
    each history. Waiting takes no time. ``random`` is seeded anew in each life, so that a model stand-in that uses it
    answers otherwise each time. *checkpoint_after* so many messages a checkpoint is taken. The clock on the wall
    jumps by up to *clock_jumps* seconds, forward or back, in each life and between lives.

    *kills* more histories, chosen by *seed*, have lives that are real processes, forked from this one, which stop at
    their boundary and are killed there with SIGKILL. For a store in memory they have an SQLite file.

    *case* runs one history alone, as the report names it. *part* is ``(index, of)``: of all histories only each *of*-th
    is run, beginning with the one numbered *index*, from 0; all parts together run as many as there are without it.
    *on_case* is told of the report and the number of cases that are planned.

    Raises `CrashTestFailed`, an `AssertionError`, with the shortest case that fails, and `DefinitionError` for wrong
    options.
    """
    __tracebackhide__ = True
    agents = [*agent] if isinstance(agent, Sequence) else [agent]
    given = [*inputs]
    if not agents or not given:
        raise DefinitionError("crash_everywhere needs an agent and at least one input")
    _check_part(part)
    for name, number in {"pairs": pairs, "kills": kills}.items():
        if type(number) is not int or number < 0:
            raise DefinitionError(f"{name}={number!r}: give a whole number of histories, 0 or more")
    report = CrashReport()
    with _ruins():
        for one in agents:
            settings = {"max_in_flight": 4, **options}
            job = Job(one, given, store, outside, checkpoint_after, clock_jumps, seed, key, settings)
            report = _Campaign(job, pairs, on_case, kills, part).run(_parsed(case))
            if not report.passed:
                break
    if not report.passed:
        raise CrashTestFailed(report)
    return report


def _check_part(part: object) -> None:
    match part:
        case None:
            return
        case (int(index), int(of)) if 0 <= index < of:
            return
    raise DefinitionError(f"part={part!r}: give (index, of), as (0, 4), (1, 4), (2, 4) and (3, 4)")


def _parsed(case: str | None) -> Case | None:
    try:
        return None if case is None else parse_case(case)
    except ValueError as error:
        raise DefinitionError(f"case={case!r}: {error}") from None


class _Campaign:
    """All histories of one agent."""

    def __init__(
        self,
        job: Job,
        pairs: int,
        on_case: OnCase | None,
        kills: int = 0,
        part: tuple[int, int] | None = None,
    ) -> None:
        self._job = job
        self._part = part or (0, 1)
        self._pairs = self._share(pairs)
        self._kills = self._share(kills)
        self._on_case = on_case
        self._report = CrashReport(seed=job.seed, part=part)
        self._planned = 1
        self._zombies = False

    def _share(self, number: int) -> int:
        """How many of *number* histories are in this part."""
        index, of = self._part
        return len(range(index, number, of))

    def run(self, case: Case | None) -> CrashReport:
        began = time.monotonic()
        try:
            self._run_all() if case is None else self._run_case(case)
        finally:
            self._report.seconds = time.monotonic() - began
        return self._report

    def _run_all(self) -> None:
        lives = self._run_case(())
        self._report.boundaries = lives[0].life.boundaries
        index, of = self._part
        singles = [*self._strikes(lives[0])][index::of]
        self._planned = 1 + len(singles) + self._pairs + self._kills
        if not self._report.passed:
            self._shorten()
            return
        second: list[Case] = []
        for strike in singles:
            lives = self._run_case((strike,))
            if not self._report.passed:
                self._shorten()
                return
            if len(lives) > 1:
                second += [(strike, again) for again in self._strikes(lives[1])]
        self._report.pairs_possible = len(second)
        chosen = random.Random(self._job.seed).sample(second, min(self._pairs, len(second)))
        killed = self._chosen_kills([(strike,) for strike in singles], second)
        self._planned = 1 + len(singles) + len(chosen) + len(killed)
        for case in [*chosen, *killed]:
            self._run_case(case)
            self._report.pairs_run += case in chosen
            if not self._report.passed:
                return

    def _chosen_kills(self, once: Sequence[Case], twice: Sequence[Case]) -> list[Case]:
        """One in three has a second kill during the recovery."""
        choose = random.Random(f"{self._job.seed} kills")
        twice, once = _killed(twice), _killed(once)
        chosen = choose.sample(twice, min(self._kills // 3, len(twice)))
        return chosen + choose.sample(once, min(self._kills - len(chosen), len(once)))

    def _shorten(self) -> None:
        """Look for a failure with fewer inputs."""
        for inputs in range(1, self._report.failures[-1].inputs):
            job = dataclasses.replace(self._job, inputs=self._job.inputs[:inputs])
            shorter = _Campaign(job, 0, None)
            shorter._shallow()
            if not shorter._report.passed:
                self._report.failures += shorter._report.failures
                return

    def _shallow(self) -> None:
        lives = self._run_case(())
        for strike in self._strikes(lives[0]):
            if self._report.passed:
                self._run_case((strike,))

    def _run_case(self, case: Case) -> list[Ended]:
        """One history: its lives."""
        real = any(strike.kills for strike in case)
        with _folder() as folder, self._outside(folder if real else None):
            name = f"crash-{uuid4().hex[:12]}"  # a new job in a store that other histories may share
            world = World(folder, name, f"{self._job.seed} {name_of(case)}")
            lives = KilledLives(self._job, world) if real else Lives(self._job, world)
            self._zombies = self._job.store == "memory://" or lives.store().shared
            ended = self._live_through(lives, case)
            (folder / "replay").mkdir()
            check(lives, ended[-1], folder / "replay")
            if isinstance(lives, KilledLives):
                self._count_processes(lives)
            self._count(case, world, ended)
        return ended

    @contextmanager
    def _outside(self, folder: Path | None) -> Iterator[None]:
        outside = self._job.outside
        with nullcontext() if outside is None or folder is None else outside.kept_in(folder):
            if outside is not None:
                outside.reset()
            yield

    def _count_processes(self, lives: KilledLives) -> None:
        self._report.kills_run += 1
        self._report.processes += len(lives.pids)
        self._report.killed += len(lives.killed)

    def _strikes(self, ended: Ended) -> Iterator[Strike]:
        return _strikes(ended.life.boundaries, zombies=self._zombies)

    def _live_through(self, lives: Lives, case: Case) -> list[Ended]:
        """The last one is the one that did the last of the work."""
        ended: list[Ended] = []
        for strike in [*case, None]:
            if lives.successors:
                break
            ended.append(lives.live(strike))
            if strike is None or ended[-1].life.struck is None:
                break
        ended += lives.successors[-1:]
        # What the agent raised ends the process; whoever looks after it starts it again.
        for _ in range(_RESTARTS):
            if not isinstance(ended[-1].error, ActionError):
                break
            ended.append(lives.live())
        return ended

    def _count(self, case: Case, world: World, ended: Sequence[Ended]) -> None:
        self._report.cases += 1
        struck = [life.struck for life in world.lives if life.struck is not None]
        self._report.missed += len(struck) < len(case)
        self._report.parked += any(one.report is not None and one.report.parked for one in ended[-1:])
        if world.problems:
            self._report.failures.append(Failure(case, len(self._job.inputs), struck, [*world.problems]))
        if self._on_case is not None:
            self._on_case(self._report, self._planned)


def _killed(cases: Sequence[Case]) -> list[Case]:
    """Those of *cases* that a kill can make, each with kills for its crashes."""
    return [
        tuple(strike._replace(how="killed before" if strike.is_before else "killed after") for strike in case)
        for case in cases
        if all(strike.is_before or strike.is_after for strike in case)
    ]


def _strikes(boundaries: Sequence[Boundary], *, zombies: bool) -> Iterator[Strike]:
    for boundary in boundaries:
        yield Strike("before", boundary.number)
        yield Strike("after", boundary.number)
        if boundary.kind == "write":
            yield Strike("failing", boundary.number)
            yield Strike("unanswered", boundary.number)
            if zombies:
                yield Strike("zombie", boundary.number)


@contextmanager
def _ruins() -> Iterator[None]:
    """A crash closes nothing, so connections and files are found open: no warning is due, now or in a later test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where that is possible: a crash of a process loses nothing that was written there either."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)
