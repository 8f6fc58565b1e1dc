"""Kills a process in the middle of its work and starts it again, until the work is done.

When to kill is decided by what the process has done to the outside world, never by the clock. The same kill points
serve both runs: they are counted in calls since the process started.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dalsegno.demo.world import CALLS, IN_FLIGHT, MAILS
from dalsegno.errors import DalSegnoError

_POLL = 0.002
_LIFETIME = 120.0
_WAIT_FOR_MAIL = 10
_ERRORS = "errors.txt"


@dataclass(frozen=True, slots=True)
class KillPoint:
    """After how many calls of a process it is killed; *at_mail*, right when its next mail has left."""

    calls: int
    at_mail: bool


@dataclass(frozen=True, slots=True)
class Life:
    """One process from its start to its end, as seen from outside."""

    pid: int
    returncode: int
    calls: int
    mails: int
    at_mail: bool
    """Whether it was killed because a mail of it was seen, while it still waited for the server's answer."""

    @property
    def killed(self) -> bool:
        return self.returncode == -signal.SIGKILL


def plan(kills: int, seed: int, messages: int) -> list[KillPoint]:
    """Random kill points, early enough that the last one still finds work. Every other one waits for a mail."""
    rng = random.Random(seed)
    budget = messages * rng.uniform(0.35, 0.6)
    weights = [rng.uniform(0.5, 1.5) for _ in range(kills)]
    # What is in flight when a process is killed is no progress, so it comes on top.
    shares = [max(3, round(budget * weight / sum(weights))) for weight in weights]
    return [KillPoint(IN_FLIGHT + share, at_mail=number % 2 == 0) for number, share in enumerate(shares)]


def run_lives(
    kind: str,
    folder: Path,
    points: Sequence[KillPoint],
    *,
    on_tick: Callable[[], None],
    on_life: Callable[[Life], None],
) -> list[Life]:
    """Run ``child`` *kind* in *folder* until its work is done, killing it once at each of *points*.

    *on_tick* is called many times a second, *on_life* after each process. Raises `DalSegnoError` when a process fails
    by itself. No process is left behind, whatever happens.
    """
    lives: list[Life] = []
    for point in [*points, None]:
        life = _live(kind, folder, point, on_tick)
        lives.append(life)
        on_life(life)
        if life.returncode == 0:
            break
    return lives


def _live(kind: str, folder: Path, point: KillPoint | None, on_tick: Callable[[], None]) -> Life:
    calls, mails = LineCounter(folder / CALLS), LineCounter(folder / MAILS)
    trigger = _Trigger(point)
    deadline = time.monotonic() + _LIFETIME
    with _process(kind, folder) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise DalSegnoError(f"the demo's process {process.pid} is not done after {_LIFETIME:g} s")
            if trigger.reached(calls.new(), mails.new()):
                process.kill()
                break
            on_tick()
            time.sleep(_POLL)
        returncode = process.wait()
    if returncode != 0 and not (trigger.fired and returncode == -signal.SIGKILL):
        said = (folder / _ERRORS).read_text("utf-8", "replace")[-4000:]
        raise DalSegnoError(f"the demo's process {process.pid} ended by itself with code {returncode}:\n{said}")
    return Life(process.pid, returncode, calls.new(), mails.new(), trigger.at_mail)


@contextmanager
def _process(kind: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "dalsegno.demo.child", kind, str(folder)]
    with (folder / _ERRORS).open("ab") as errors:
        # A session of its own, so that Ctrl-C is for this process only, which then ends the other; the end of the pipe
        # does so in any case.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


class _Trigger:
    """Decides when a kill point is reached; never, if there is none."""

    def __init__(self, point: KillPoint | None) -> None:
        self.fired = False
        self.at_mail = False
        self._point = point
        self._mails_before: int | None = None

    def reached(self, calls: int, mails: int) -> bool:
        if self._point is None or calls < self._point.calls:
            return False
        if self._mails_before is None:
            self._mails_before = mails
        self.at_mail = self._point.at_mail and mails > self._mails_before
        self.fired = self.at_mail or not self._point.at_mail or calls >= self._point.calls + _WAIT_FOR_MAIL
        return self.fired


class LineCounter:
    """Counts the lines that a file gains."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0
        self._lines = 0

    def new(self) -> int:
        """How many complete lines were added since this counter was made."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return 0
        self._read += len(data)
        self._lines += data.count(b"\n")
        return self._lines
