"""Jobs on a PostgreSQL store whose processes are killed, stopped and replaced."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.postgres import PostgresStore
from dalsegno.testing import crash_everywhere
from tests.crashed_agents import Reviewer, inputs, outside
from tests.test_kill_reviews import Job, Process, check_answers, reviews

ROOT = Path(__file__).parents[1]
SECONDS = 120


class PostgresJob(Job):
    """The same job, with its records in a database."""

    def __init__(self, folder: Path, reviews: Sequence[dict[str, Any]], url: str) -> None:
        super().__init__(folder, reviews)
        self._url = url
        self.options = [option for option in self.options if not option.startswith("--store=")] + [f"--store={url}"]

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        with psycopg.connect(self._url) as connection:
            rows = connection.execute("SELECT message, body FROM dalsegno.records ORDER BY n").fetchall()
        return [(message.decode(), json.loads(body)) for message, body in rows]


def test_kills_lose_and_repeat_nothing(postgres_url: str, tmp_path: Path) -> None:
    job = PostgresJob(tmp_path, reviews()[:900], postgres_url)
    choose = random.Random(7)
    targets = [100 * number + choose.randint(1, 100) for number in range(8)]
    lives: list[tuple[int, set[str], dict[str, int]]] = []
    done = in_doubt = 0
    for target in targets:
        with Process(job, "--checkpoint-interval=0.1") as process:
            process.expect("notify", max(target - done, 1))
            process.kill()
            done += max(target - done, 1) + len(process.rest())
        lives.append((process.pid, {line["message"] for line in job.executed("notify")}, job.answers()))
        in_doubt += len(job.in_doubt())
    assert done < len(job.reviews), "the last kill came after the end"
    with Process(job) as process:
        assert process.end() == 0, process.errors.read_text()
    check_answers(job, [*lives, (process.pid, set(), {})])
    assert in_doubt
    job.check_finished()
    job.check_that_nothing_is_left()


# --- a process that was taken for dead ---


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dalsegno.inspect.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_process_that_wakes_up_after_it_was_replaced_does_nothing_more(postgres_url: str, tmp_path: Path) -> None:
    outside, gate, source = tmp_path / "outside", tmp_path / "gate", tmp_path / "orders.jsonl"
    source.write_text("".join(json.dumps({"order": order}) + "\n" for order in ("first", "second")))
    os.mkfifo(gate)

    def run(name: str, **environment: str) -> subprocess.Popen[str]:
        files = (f"--checkpoints={tmp_path / name}.db", f"--sink={tmp_path / 'new'}.jsonl")
        if "ZOMBIE_GATE" in environment:
            files = (files[0], f"--sink={tmp_path / 'old'}.jsonl")
        options = ("--job=orders", f"--source={source}", "--key=order", "--max-in-flight=1", f"--store={postgres_url}")
        return command(
            "run", "tests.children.zombies:agent", *options, *files, ZOMBIE_OUTSIDE=str(outside), **environment
        )

    old = run("old", ZOMBIE_GATE=str(gate))
    try:
        deadline = time.monotonic() + SECONDS
        while not (outside.exists() and outside.read_text()):
            assert old.poll() is None, old.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        old.send_signal(signal.SIGSTOP)
        new = run("new")
        said, _ = new.communicate(timeout=SECONDS)
        assert new.returncode == 3, said  # the message of the call in doubt is parked, the other one is done
        old.send_signal(signal.SIGCONT)
        with gate.open("w") as opened:
            opened.write(".")
        said, _ = old.communicate(timeout=SECONDS)
    finally:
        old.kill()
        old.communicate()
    assert old.returncode == 1
    assert "FencedError" in said
    assert "no longer owns job 'orders'" in said
    lines = [line.split(" ", 1) for line in outside.read_text().splitlines()]
    assert [what for pid, what in lines if pid == str(old.pid)] == ["ship first"]
    assert [what for pid, what in lines if pid == str(new.pid)] == ["ship second", "tell second"]

    shown = command("show", "orders", "--json", f"--store={postgres_url}").communicate(timeout=SECONDS)[0]
    assert "in-doubt" in shown
    parked = command("show", "orders", f"--store={postgres_url}").communicate(timeout=SECONDS)[0]
    (call,) = [word for word in parked.split() if len(word) == 12 and all(c in "0123456789abcdef" for c in word)]
    resolved = command("resolve", "orders", call, "--happened", '"shipped first"', f"--store={postgres_url}")
    assert resolved.wait(SECONDS) == 0, resolved.communicate()[0]
    resolved.communicate()
    last = run("new")
    said, _ = last.communicate(timeout=SECONDS)
    assert last.returncode == 0, said
    outputs = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert sorted(outputs) == [[f"shipped {order}", f"told {order}"] for order in ("first", "second")]


# --- a crash at each step ---


def test_a_crash_at_each_step_loses_and_repeats_nothing(postgres_url: str) -> None:
    def make(folder: Path) -> TaskActionStore:
        return PostgresStore(f"{postgres_url}?schema={hashlib.sha256(bytes(folder)).hexdigest()[:32]}")

    report = crash_everywhere(Reviewer, inputs(1), key="id", store=make, outside=outside, pairs=3)
    assert report.cases > 2 * len(report.boundaries)
    assert report.parked == 0
