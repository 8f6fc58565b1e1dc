"""Lives that are real processes: each is forked, stops at its boundary, and is killed there with SIGKILL.

The lives of one history are on one store, one checkpoint file and one output file. What a process does it appends to a
file as it does it, so that the next one, and the process that judges, know of it. That a life was killed is taken from
nothing but its wait status.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from dalsegno.core import codec
from dalsegno.errors import ActionError, DefinitionError, DivergenceError
from dalsegno.runners.report import RunReport
from dalsegno.runners.sinks import JsonLinesSink, Sink
from dalsegno.stores import open_store
from dalsegno.stores.base import TaskActionStore
from dalsegno.testing.lines import Lines
from dalsegno.testing.lives import Ended, Job, Lives
from dalsegno.testing.world import Boundary, CallPlace, Execution, Life, Problem, Strike, World

PATIENCE = 120
"""Seconds after which a process that neither ends nor comes to its boundary is ended by SIGALRM."""


class LifeLost(RuntimeError):
    """A process ended neither by itself nor by the SIGKILL that it was to get."""


@dataclass(frozen=True)
class _End:
    """What a process that was not killed leaves. *memories* are in the codec's form."""

    error: BaseException | None
    report: RunReport | None
    memories: dict[bytes, bytes]


class KilledLives(Lives):
    """Lives of *job* in processes of their own; needs `os.fork`.

    Raises `DefinitionError` where that is missing, and for a job whose store forgets with its process.
    """

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job, world)
        if not hasattr(os, "fork"):
            raise DefinitionError("kills= needs os.fork, which this platform lacks; crash without kills here")
        if job.options.get("cipher") is not None:
            raise DefinitionError("kills= with cipher=: what other processes encrypted cannot be judged; kill without")
        if not self.store().persistent:
            raise DefinitionError("kills= needs a store that outlives a process: give store= a file, or leave it out")
        self.pids: list[int] = []
        self.killed: list[int] = []
        """Those whose wait status says that SIGKILL ended them."""
        self._seen = Lines(world.folder / "seen")
        self._outputs = world.folder / "outputs.jsonl"

    def store(self) -> TaskActionStore:
        if self.job.store == "memory://":
            return open_store(f"sqlite:///{self.world.folder}/agent.db")
        return super().store()

    def sink(self, life: Life) -> Sink:
        return _OutputFile(life, self._outputs)

    def live(self, strike: Strike | None = None) -> Ended:
        pid = _fork(lambda: self._be_a_life(strike))
        life = Life(self.world, strike)
        self.pids.append(pid)
        life.dead = _killed_where_it_stops(pid)
        if life.dead:
            self.killed.append(pid)
        self._learn(life, pid)
        end = _End(None, None, {}) if life.dead else self._end_of(pid)
        return Ended(life, end.error, end.report, {key: codec.decode(tree) for key, tree in end.memories.items()})

    def _be_a_life(self, strike: Strike | None) -> None:
        pid = os.getpid()
        self.world.tell = lambda *what: self._seen.append((pid, *what))
        self.world.freeze = _stop_for_good
        ended = super().live(strike)
        memories = {key: codec.encode(memory) for key, memory in ended.memories.items()}
        end = pickle.dumps(_End(_plain(ended.error), ended.report, memories))
        self._end_file(pid).write_bytes(end)

    def _end_of(self, pid: int) -> _End:
        path = self._end_file(pid)
        if not path.exists():
            raise LifeLost(f"process {pid} of the agent left no result:\n{_last_words(self._seen.all(), pid)}")
        end: _End = pickle.loads(path.read_bytes())
        return end

    def _end_file(self, pid: int) -> Path:
        return self.world.folder / f"end-{pid}"

    def _learn(self, life: Life, pid: int) -> None:
        """Take over what the process *pid* has said of *life*, and what it left."""
        unanswered: list[Any] = []
        for teller, what, *details in self._seen.new():
            if teller != pid:
                raise LifeLost(f"process {teller} still acted while {pid} was the one that lived")
            if what == "putting":
                unanswered = details[0]
            elif what == "durable":
                unanswered = []
            if what in _TAKE:
                _TAKE[what](life, *details)
        if unanswered and self._is_stored(unanswered[-1]):
            life.world.became_durable(unanswered)  # the kill came between the write and what was said of it
        lines = self._outputs.read_bytes().splitlines() if self._outputs.exists() else []
        self.world.outputs[:] = [
            (line["id"], codec.decode(line["output"].encode())) for line in map(orjson.loads, lines)
        ]

    def _is_stored(self, record: Any) -> bool:
        with self.store().inspect() as inspector:
            return record in inspector.records(self.world.job, record.key, record.message)


class _OutputFile(JsonLinesSink):
    """The real sink, on lines that keep the id of each output and its exact value."""

    def __init__(self, life: Life, path: Path) -> None:
        super().__init__(path)
        self._life = life

    def write(self, output: object, output_id: str) -> None:
        with self._life.boundary("output", repr(output_id)):
            super().write({"id": output_id, "output": codec.encode(output).decode()}, output_id)


def _fork(run: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # The child runs nothing but the agent, on an event loop and threads of its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _stop_for_good() -> None:
    """Stop all threads of this process; it is killed while it stands still."""
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1)


def _killed_where_it_stops(pid: int) -> bool:
    """Wait for a process; kill it when it stops. Whether SIGKILL is what ended it."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return True
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status):
        raise LifeLost(f"process {pid} of the agent ended with wait status {status}")
    return False


def _plain(error: BaseException | None) -> BaseException | None:
    """*error*, or what can be said of it in another process."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        kind = next((kind for kind in (ActionError, DivergenceError) if isinstance(error, kind)), RuntimeError)
        return kind(str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}")


def _last_words(seen: list[Any], pid: int) -> str:
    said = [what for teller, *what in seen if teller == pid]
    return f"the last that it did was {said[-1]!r}" if said else "it did nothing"


def _boundary(life: Life, here: Boundary, clock: float) -> None:
    life.boundaries.append(here)
    life.world.clock = max(life.world.clock, clock)


def _struck(life: Life, here: Boundary) -> None:
    life.struck = here


def _begun(life: Life, place: CallPlace, about: str, effect: str) -> None:
    now = Execution(place, about, effect, len(life.world.lives) - 1)
    life.world.executions.setdefault(place, []).append(now)


def _ended(life: Life, place: CallPlace, index: int, state: Any) -> None:
    life.world.executions[place][index].state = state


def _settled(life: Life, place: CallPlace, executions: int) -> None:
    life.world.settled.add((place, executions))


def _problem(life: Life, problem: Problem) -> None:
    life.world.blame(problem.promise, problem.text)


def _durable(life: Life, records: Any) -> None:
    life.world.became_durable(records)


_TAKE: dict[str, Callable[..., None]] = {
    "boundary": _boundary,
    "struck": _struck,
    "begun": _begun,
    "ended": _ended,
    "settled": _settled,
    "problem": _problem,
    "durable": _durable,
}
