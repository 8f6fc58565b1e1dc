"""Runs jobs in child processes, kills them at a boundary, and says from outside what must be there afterwards.

`Forks` runs and kills, `Job` looks at the files of a job without the library, `Crash` is what they held when a child
was killed, and `Job.check` compares the end with what that crash allows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 60
CALLS = ("ask", "upsert", "send")


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of a copy of *database*: opening the file itself would tidy up what a crash left. None without tables."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (database, database.with_name(f"{database.name}-wal")):
            if path.exists():
                shutil.copy(path, folder)
        with closing(sqlite3.connect(f"{folder}/{database.name}")) as connection:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection.execute(query).fetchall() if tables else []


@contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """In memory where that is possible: what a killed process has written outlives it there as well."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else otherwise) as name:
        yield Path(name)


@dataclass(frozen=True)
class Order:
    """One run of a job. *stop_at* is the kind and number of the boundary to freeze at."""

    folder: Path
    reconcile: bool = True
    max_in_flight: int = 1
    checkpoint_during: Sequence[str] = ()
    stop_at: tuple[str, int] | None = None


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, the boundary that it was killed at, or the result of its run."""

    pid: int
    code: int
    boundary: str | None
    result: dict[str, Any] | None


class Forks:
    """The process that forks children, see ``tests/children/forks.py``."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SECONDS)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.children.forks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()
        self._answers = self._socket.makefile("rb")

    def run(self, order: Order) -> Ended:
        """Run *order* to its end, or to its boundary, where the child is killed."""
        self._errors.truncate(0)
        self._socket.sendall(json.dumps({**vars(order), "folder": str(order.folder)}).encode() + b"\n")
        boundary = result = None
        while (answer := self._answer())["event"] != "ended":
            if answer["event"] == "boundary":
                boundary = answer["what"]
                os.kill(answer["pid"], signal.SIGKILL)
            else:
                result = answer
        return Ended(answer["pid"], answer["code"], boundary, result)

    def run_to_end(self, order: Order) -> Ended:
        ended = self.run(order)
        assert ended.code == 0, f"exit code {ended.code}: {self.errors()}"
        assert ended.result is not None
        return ended

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        try:
            code = self._process.wait(SECONDS / 6)
        except subprocess.TimeoutExpired:  # it waits for a child that hangs
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        assert code == 0, self.errors()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, f"the process that forks has ended: {self.errors()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Recorded:
    """What the store holds of one message: its calls that were requested, and the outcomes of those that ended."""

    requested: set[str] = field(default_factory=set)
    results: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Crash:
    """What a job had left when its process was killed."""

    executed: dict[tuple[str, str], list[dict[str, Any]]]
    recorded: dict[str, Recorded]
    covered: set[str]

    def times(self, call: str, message: str) -> int:
        return len(self.executed.get((call, message), ()))

    def in_doubt(self, message: str) -> bool:
        """Whether the call with effect `once` was requested, and nobody knows more."""
        state = self.recorded.get(message, Recorded())
        return message not in self.covered and "send" in state.requested - state.results.keys()

    def to_come(self, call: str, message: str, reconcile: bool) -> int:
        """How often *call* of *message* must still be executed."""
        if message in self.covered or call in self.recorded.get(message, Recorded()).results:
            return 0
        if call == "send":
            return 0 if self.times(call, message) or (self.in_doubt(message) and not reconcile) else 1
        return 1


class Job:
    """The files of one job, read without the library."""

    def __init__(self, folder: Path, messages: Sequence[dict[str, Any]]) -> None:
        self.folder = folder
        self.messages = messages
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "input.jsonl").write_text("".join(json.dumps(message) + "\n" for message in messages))

    def key_of(self, message: str) -> str:
        return str(self.messages[int(message)]["key"])

    def ids(self) -> list[str]:
        return [str(ordinal) for ordinal in range(len(self.messages))]

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def executed(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in self.lines("outside.jsonl"):
            found.setdefault((line["call"], line["message"]), []).append(line)
        return found

    def rows(self, database: str, query: str) -> list[tuple[Any, ...]]:
        return rows(self.folder / database, query)

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        query = "SELECT message, body FROM records ORDER BY n"
        return [(message, json.loads(body)) for message, body in self.rows("store.db", query)]

    def inbox(self) -> set[str]:
        return {str(ordinal) for (ordinal,) in self.rows("checkpoints.db", "SELECT ordinal FROM inbox")}

    def crash(self) -> Crash:
        self._check_written()
        recorded: dict[str, Recorded] = {}
        numbers: dict[tuple[str, str, int], str] = {}
        task: dict[str, str] = {}
        for message, body in self.records():
            state = recorded.setdefault(message, Recorded())
            task[message] = body["task"]["action"] if "task" in body else task[message]
            if "name" in body:
                numbers[message, task[message], body["call"]] = body["name"].rpartition(":")[2]
            if body["kind"] == "requested":
                state.requested.add(numbers[message, task[message], body["call"]])
            if body["kind"] in ("called", "completed"):
                state.results[numbers[message, task[message], body["call"]]] = body["result"]
        return Crash(self.executed(), recorded, self._covered())

    def _check_written(self) -> None:
        """At any time the output holds whole lines, none of them twice, and at most a part of one more."""
        path = self.folder / "output.jsonl"
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]
        written = [(output["message"], "receipt" in output) for output in map(json.loads, lines)]
        assert len(set(written)) == len(written)

    def _covered(self) -> set[str]:
        rows = self.rows("checkpoints.db", "SELECT read FROM checkpoint")
        return {str(ordinal) for (read,) in rows for ordinal in range(read)} - self.inbox()

    # What must hold when a run after *crashes* has ended.

    def check(self, ended: Ended, crashes: Sequence[Crash], *, reconcile: bool) -> None:
        assert ended.result is not None
        parked = {m for m in self.ids() if not reconcile and any(crash.in_doubt(m) for crash in crashes)}
        finished = [m for m in self.ids() if not self._waits(m, parked) and m not in parked]
        self._check_executions(crashes, finished, parked, reconcile)
        self._check_outputs(finished)
        self._check_memory(ended.result["memories"], finished)
        assert {found["message_id"] for found in ended.result["report"]["parked"]} == parked
        assert {message for message, _ in self.records()} == parked
        assert self.inbox() == set(self.ids()) - set(finished)

    def _waits(self, message: str, parked: set[str]) -> bool:
        return any(self.key_of(p) == self.key_of(message) and int(p) < int(message) for p in parked)

    def _check_executions(
        self, crashes: Sequence[Crash], finished: list[str], parked: set[str], reconcile: bool
    ) -> None:
        executed = self.executed()
        for (call, message), lines in executed.items():
            if message not in {*finished, *parked}:
                # It waits behind a parked one, beside which it had begun before the crash: as far as its first effect,
                # which would have waited until the other one was durable, and so not in doubt.
                assert call == "ask"
                assert len(lines) == crashes[-1].times(call, message)
        for message in [*finished, *parked]:
            for call in CALLS:
                lines = executed.get((call, message), [])
                for crash, later in zip(crashes, [*crashes[1:], None], strict=True):
                    more = (later.times(call, message) if later else len(lines)) - crash.times(call, message)
                    wanted = crash.to_come(call, message, reconcile)
                    assert more == wanted if later is None else more <= wanted, (call, message, more, wanted)
                assert call != "send" or len(lines) == 1 or (not lines and message in parked)
                assert len({line.get("key") for line in lines}) <= 1
        self._check_recorded(crashes, executed)

    def _check_recorded(self, crashes: Sequence[Crash], executed: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
        """A recorded answer is that of the last execution, and nothing was done on any other."""
        for crash in crashes:
            for message, state in crash.recorded.items():
                if "ask" in state.results:
                    assert state.results["ask"] == executed["ask", message][-1]["answer"]
        for (call, message), lines in executed.items():
            if call != "ask":
                assert {line["answer"] for line in lines} == {executed["ask", message][-1]["answer"]}, (call, message)
        keys = {lines[0]["key"] for (call, _), lines in executed.items() if call == "upsert"}
        assert len(keys) == sum(call == "upsert" for call, _ in executed)

    def _check_outputs(self, finished: list[str]) -> None:
        outputs = self.lines("output.jsonl")
        assert sorted(outputs, key=str) == sorted(self._wanted_outputs(finished), key=str)
        for key in {self.key_of(message) for message in self.ids()}:
            order = [int(output["message"]) for output in outputs if self.key_of(output["message"]) == key]
            assert order == sorted(order)

    def _wanted_outputs(self, finished: list[str]) -> list[dict[str, Any]]:
        executed = self.executed()
        wanted, answers = [], dict[str, list[int]]()
        for message in finished:
            answer = executed["ask", message][-1]["answer"]
            known = answers.setdefault(self.key_of(message), [])
            known.append(answer)
            wanted.append({"message": message, "answer": answer, "seen": len(known)})
            key, receipt = executed["upsert", message][-1]["key"], executed["send", message][-1]["receipt"]
            wanted.append({"message": message, "answer": answer, "key": key, "receipt": receipt, "answers": [*known]})
        return wanted

    def _check_memory(self, memories: dict[str, Any], finished: list[str]) -> None:
        wanted: dict[str, Any] = {}
        for message in finished:
            memory = wanted.setdefault(self.key_of(message), {"seen": 0, "answers": []})
            memory["seen"] += 1
            memory["answers"].append(self.executed()["ask", message][-1]["answer"])
        assert memories == wanted
