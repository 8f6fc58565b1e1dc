"""``dalsegno run`` over 3,163 reviews: killed twenty times, stopped by signals, started twice.

Progress comes over a pipe that is kept short, so the child can be only a few calls ahead when a test acts on it;
nothing here waits for time to pass. What counts is read from outside: a file of executions, the output, and copies of
the job's databases as a killed process left them.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harness import quick_folder, rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "product_reviews.jsonl"
REVIEWS = 3163
KILLS = 20
SEED = 1835
SENTENCE = "love these shoes, they fit well but the heel slips “a little” – half a size too small"
LINE = 64
SECONDS = 60
SHORT_PIPES = hasattr(fcntl, "F_SETPIPE_SZ")


def reviews() -> list[dict[str, Any]]:
    """The reviews that lie beside the repository, or others of the same kind."""
    if SHARED.exists():
        return [json.loads(line) for line in SHARED.read_text().splitlines()]
    choose = random.Random(SEED)
    products = [f"B{choose.randrange(10**9):09}" for _ in range(31)]
    words = SENTENCE.split()
    texts = [" ".join(choose.choices(words, k=choose.randint(2, 60))) for _ in range(REVIEWS)]
    return [{"id": choose.choice(products), "review": text, "ts": 1756684800 + 900 * n} for n, text in enumerate(texts)]


class Process:
    """``dalsegno run`` in a process, with a pipe that tells what it does and perhaps a gate in front of its model."""

    def __init__(self, job: Job, *options: str, agent: str = "agent", gate: bool = False) -> None:
        self._told, telling = os.pipe()
        if SHORT_PIPES:
            fcntl.fcntl(telling, fcntl.F_SETPIPE_SZ, 64 * LINE)
        waiting, self._gate = os.pipe()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "REVIEWS_PIPE": str(telling)}
        environment["REVIEWS_OUTSIDE"] = str(job.outside)
        if gate:
            environment["REVIEWS_GATE"] = str(waiting)
        self.output = job.folder / "stdout.txt"
        self.errors = job.folder / "stderr.txt"
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "error",
                    "-m",
                    "dalsegno.inspect.cli",
                    "run",
                    f"tests.children.reviews:{agent}",
                    *job.options,
                    *options,
                ],
                cwd=ROOT,
                env=environment,
                pass_fds=[telling, waiting],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        os.close(telling)
        os.close(waiting)
        self.pid = self.process.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._told)
        os.close(self._gate)

    def told(self) -> str | None:
        """The next line of the pipe, None when the process has ended."""
        assert select.select([self._told], [], [], SECONDS)[0], (
            f"nothing for {SECONDS} seconds: {self.errors.read_text()}"
        )
        line = os.read(self._told, LINE)
        return line.decode().rstrip() if line else None

    def expect(self, what: str, times: int) -> None:
        """Read until *what* was told *times* more times."""
        while times:
            line = self.told()
            assert line is not None, f"ended before: {self.process.wait()} {self.errors.read_text()}"
            times -= line.startswith(what)

    def rest(self) -> list[str]:
        """What is still told until the process ends."""
        return list(iter(self.told, None))

    def open_gate(self, calls: int) -> None:
        os.write(self._gate, b"." * calls)

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(SECONDS) == -9

    def end(self) -> int:
        """Wait for the end; the exit code."""
        self.rest()
        return self.process.wait(SECONDS)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found


class Job:
    """A job over some reviews, and what it leaves behind, read without the library."""

    def __init__(self, folder: Path, reviews: Sequence[dict[str, Any]]) -> None:
        self.folder = folder
        self.reviews = reviews
        self.outside = folder / "outside.jsonl"
        source = folder / "reviews.jsonl"
        source.write_text("".join(json.dumps(review, ensure_ascii=False) + "\n" for review in reviews))
        paths = {"source": source, "sink": folder / "out.jsonl", "store": f"sqlite:///{folder / 'store.db'}"}
        paths["checkpoints"] = folder / "checkpoints.db"
        self.options = [
            "--job",
            "reviews",
            "--key",
            "id",
            "--json",
            *(f"--{name}={path}" for name, path in paths.items()),
        ]

    def outputs(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "out.jsonl")

    def executed(self, call: str) -> list[dict[str, Any]]:
        return [line for line in _lines(self.outside) if line["call"] == call]

    def rows(self, database: str, query: str) -> list[tuple[Any, ...]]:
        return rows(self.folder / database, query)

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (m, json.loads(body)) for m, body in self.rows("store.db", "SELECT message, body FROM records ORDER BY n")
        ]

    def answers(self) -> dict[str, int]:
        """The answers of the model that are recorded."""
        return {message: body["result"] for message, body in self.records() if body["kind"] == "called"}

    def in_doubt(self) -> set[str]:
        """The messages with a call that was requested, and whose outcome is not recorded."""
        requested = {message for message, body in self.records() if body["kind"] == "requested"}
        return requested - {message for message, body in self.records() if body["kind"] == "completed"}

    def memory(self) -> dict[str, int]:
        rows = self.rows("checkpoints.db", "SELECT key, tree FROM memory")
        return {json.loads(key): json.loads(tree)["o"]["reviews"]["v"] for key, tree in rows}

    def check_finished(self) -> None:
        """Each review has one output, one notification and one answer that both were made of; nothing else is left."""
        ids = [str(number) for number in range(len(self.reviews))]
        notified = {line["message"]: line for line in self.executed("notify")}
        assert sorted(line["message"] for line in self.executed("notify")) == sorted(ids)
        outputs = {output["message"]: output for output in self.outputs()}
        assert sorted(output["message"] for output in self.outputs()) == sorted(ids)
        answers = {line["message"]: line["answer"] for line in self.executed("score")}
        counts: Counter[str] = Counter()
        for message, review in zip(ids, self.reviews, strict=True):
            counts[review["id"]] += 1
            fields = {"message": message, "id": review["id"], "answer": answers[message], "count": counts[review["id"]]}
            assert outputs[message] == {**fields, "receipt": notified[message]["receipt"]}
            assert notified[message]["answer"] == answers[message]
        assert self.memory() == counts
        assert self.records() == []
        assert self.rows("checkpoints.db", "SELECT * FROM inbox") == []

    def check_that_nothing_is_left(self) -> None:
        before = [(self.folder / "out.jsonl").read_bytes(), self.outside.read_bytes()]
        with Process(self) as process:
            assert process.end() == 0
            summary = process.summary()
        for count in ("messages", "outputs", "calls_executed", "calls_replayed", "checkpoints"):
            assert summary[count] == 0, count
        assert before == [(self.folder / "out.jsonl").read_bytes(), self.outside.read_bytes()]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


@pytest.mark.skipif(not SHORT_PIPES, reason="the length of a pipe cannot be set here")
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_twenty_kills_lose_and_repeat_nothing(folder: Path, seed: int) -> None:
    job = Job(folder, reviews())
    assert len(job.reviews) == REVIEWS
    choose = random.Random(seed)
    space = (REVIEWS - 128) // KILLS  # the child may be 64 reviews ahead
    targets = [space * number + choose.randint(1, space) for number in range(KILLS)]
    print(f"seed {seed}: kills when {targets} reviews are notified of")
    lives: list[tuple[int, set[str], dict[str, int]]] = []
    done = in_doubt = 0
    for target in targets:
        with Process(job, "--checkpoint-interval=0.1") as process:
            process.expect("notify", max(target - done, 1))
            process.kill()
            done += max(target - done, 1) + len(process.rest())
        assert process.pid not in {pid for pid, _, _ in lives}
        lives.append((process.pid, {line["message"] for line in job.executed("notify")}, job.answers()))
        in_doubt += len(job.in_doubt())
    assert done < REVIEWS, "the last kill came after the end"
    with Process(job) as process:
        assert process.end() == 0, process.errors.read_text()
    repeated = check_answers(job, [*lives, (process.pid, set(), {})])
    print(f"seed {seed}: {in_doubt} calls in doubt were settled, {repeated} calls of the model were repeated")
    assert in_doubt
    job.check_finished()
    job.check_that_nothing_is_left()


def check_answers(job: Job, lives: Sequence[tuple[int, set[str], dict[str, int]]]) -> int:
    """A call of the model is repeated only if its answer was not recorded, and a recorded answer stays."""
    number = {pid: life for life, (pid, _, _) in enumerate(lives)}
    asked = [(number[line["pid"]], line["message"], line["answer"]) for line in job.executed("score")]
    used = {output["message"]: output["answer"] for output in job.outputs()}
    for life, (_, notified, recorded) in enumerate(lives):
        later = {message for asked_in, message, _ in asked if asked_in > life}
        assert not later & (notified | recorded.keys())
        assert recorded.items() <= used.items()
    assert max(Counter((life, message) for life, message, _ in asked).values()) == 1
    return len(asked) - len(used)


IN_FLIGHT = 4
FINISHED = 20


def run_into_the_gate(process: Process) -> None:
    """Let some messages be finished, until as many others as there may be are in their first call."""
    process.expect("score", IN_FLIGHT)
    for _ in range(FINISHED):
        process.open_gate(1)
        process.expect("score", 1)


@pytest.mark.parametrize("agent", ["agent", "agent_in_thread", "agent_in_pool"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_cleanly(folder: Path, number: signal.Signals, code: int, agent: str) -> None:
    job = Job(folder, reviews()[:300])
    with Process(job, f"--max-in-flight={IN_FLIGHT}", gate=True, agent=agent) as process:
        run_into_the_gate(process)
        process.process.send_signal(number)
        process.expect("stopping", 1)
        assert process.process.poll() is None, "the calls in flight were not waited for"
        process.open_gate(IN_FLIGHT)
        assert process.end() == code, process.errors.read_text()
        summary = process.summary()
    assert (summary["stopped_by"], summary["messages"], summary["calls_executed"]) == (
        number.name,
        FINISHED,
        2 * FINISHED + IN_FLIGHT,
    )
    assert summary["checkpoints"] >= 1
    assert len(job.answers()) == IN_FLIGHT
    assert {message for message, _ in job.records()} == job.answers().keys()
    assert len(job.outputs()) == FINISHED
    ((sink,),) = job.rows("checkpoints.db", "SELECT sink FROM checkpoint")
    assert json.loads(sink)["length"] == (folder / "out.jsonl").stat().st_size
    go_on(job, agent)
    assert max(Counter(line["message"] for line in job.executed("score")).values()) == 1


@pytest.mark.parametrize("agent", ["agent", "agent_in_thread", "agent_in_pool"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_run_at_once(folder: Path, number: signal.Signals, code: int, agent: str) -> None:
    job = Job(folder, reviews()[:300])
    with Process(job, f"--max-in-flight={IN_FLIGHT}", gate=True, agent=agent) as process:
        run_into_the_gate(process)
        process.process.send_signal(number)
        process.expect("stopping", 1)
        process.process.send_signal(number)
        # The gate stays closed, so the calls in flight never end by themselves.
        assert process.end() == code, process.errors.read_text()
    assert "Traceback" not in process.errors.read_text()
    go_on(job, agent)


def go_on(job: Job, agent: str) -> None:
    with Process(job, agent=agent) as process:
        assert process.end() == 0, process.errors.read_text()
    job.check_finished()


def test_a_second_process_on_the_same_job_is_refused_with_the_pid_of_the_first(folder: Path) -> None:
    job = Job(folder, reviews()[:300])
    with Process(job, f"--max-in-flight={IN_FLIGHT}", gate=True) as first:
        run_into_the_gate(first)
        before = job.outside.read_bytes()
        with Process(job) as second:
            assert second.end() == 1
        errors = second.errors.read_text()
        assert "OwnershipError" in errors
        assert f"process {first.pid} on" in errors
        assert "Traceback" not in errors
        assert job.outside.read_bytes() == before
        # What is owned by a process that is killed is free at once.
        first.kill()
    go_on(job, "agent")
