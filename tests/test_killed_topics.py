"""A job from topic to topic whose processes are killed at random moments: each output once, each call once.

``DALSEGNO_SEED`` chooses the moments; each failure shows it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno import DidNotHappen, Happened
from tests.children.topics import UNKNOWN_KEY, made, runner
from tests.services import Kafka
from tests.topics import MINUTE, put, read

KILLS = 20
PARTITIONS = 4
KEYS = 8
A_LIFE = 18
"""So many records come for each life, and again so many for the last one."""
RECORDS = A_LIFE * (KILLS + 1)


class Lives:
    """The processes of one job, one after another."""

    def __init__(self, folder: Path, servers: str, source: str, sink: str) -> None:
        self.folder = folder
        self._arguments = [str(folder), servers, source, sink]
        self.pids: list[int] = []

    def begin(self, *, until_end: bool = False) -> subprocess.Popen[bytes]:
        """A process whose run is just beginning."""
        child = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-m",
                "tests.children.topics",
                *self._arguments,
                "yes" if until_end else "no",
            ],
            cwd=Path(__file__).parents[1],
        )
        self.pids.append(child.pid)
        deadline = time.monotonic() + MINUTE
        while not (self.folder / "ready" / str(child.pid)).exists():
            assert child.poll() is None, f"the process ended with {child.returncode} before its run"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        assert child.poll() is None, f"the process ended with {child.returncode} before it was killed"
        child.send_signal(signal.SIGKILL)
        assert child.wait(MINUTE) == -signal.SIGKILL

    def to_the_end(self) -> None:
        assert self.begin(until_end=True).wait(2 * MINUTE) == 0


def answer_open_questions(folder: Path, servers: str, source: str) -> int:
    """Say of each call in doubt what is true of it; how many there were."""
    operator = runner(folder).operator()
    parked = operator.parked()
    numbers = {f"{source}/{record.partition}/{record.offset}": record.json["n"] for record in read(servers, source)}
    calls = made(folder)
    for message in parked:
        assert (message.key, message.why) == (UNKNOWN_KEY, "in-doubt"), message
        (question,) = message.questions
        assert question.call is not None
        number = numbers[message.message_id]
        happened = f"{UNKNOWN_KEY} {number}" in calls
        operator.resolve(question.call, Happened(f"made {number}") if happened else DidNotHappen())
    return len(parked)


@pytest.mark.slow
def test_killed_at_random_a_job_from_topic_to_topic_does_everything_once(
    kafka_server: Kafka, kafka_topic: Callable[..., str], tmp_path: Path
) -> None:
    seed = int(os.environ.get("DALSEGNO_SEED", random.randrange(1 << 32)))
    print(f"DALSEGNO_SEED={seed}")
    chance = random.Random(seed)
    source, sink = kafka_topic(PARTITIONS), kafka_topic(PARTITIONS)
    records = [(f"k{n % KEYS}", {"k": f"k{n % KEYS}", "n": n}) for n in range(RECORDS)]
    lives = Lives(tmp_path, kafka_server.url, source, sink)
    worked = 0
    for life in range(KILLS):
        put(kafka_server.url, source, records[life * A_LIFE : (life + 1) * A_LIFE])
        before = len(made(tmp_path))
        child = lives.begin()
        time.sleep(chance.uniform(0.0, 1.5))
        lives.kill(child)
        worked += len(made(tmp_path)) > before
    put(kafka_server.url, source, records[KILLS * A_LIFE :])
    lives.to_the_end()
    answered = 0
    while questions := answer_open_questions(tmp_path, kafka_server.url, source):
        answered += questions
        lives.to_the_end()
    print(f"{worked} lives of {KILLS} made calls; {answered} calls in doubt were answered")
    assert len(set(lives.pids)) == len(lives.pids) > KILLS
    assert worked >= KILLS // 4, "it was mostly killed before it did anything"
    _check_calls(made(tmp_path))
    _check_outputs(kafka_server.url, sink)


def _check_calls(calls: dict[str, list[int]]) -> None:
    assert {call: pids for call, pids in calls.items() if len(pids) != 1} == {}, "made twice"
    assert set(calls) == {f"k{n % KEYS} {n}" for n in range(RECORDS)}


def _check_outputs(servers: str, sink: str) -> None:
    found = read(servers, sink)
    assert Counter(record.json["n"] for record in found) == Counter(range(RECORDS))
    assert len({record.output_id for record in found}) == RECORDS
    assert {record.json["result"] for record in found} == {f"made {n}" for n in range(RECORDS)}
    for key in range(KEYS):
        of_key = [record for record in found if record.key == f"k{key}".encode()]
        assert len({record.partition for record in of_key}) == 1
        assert [record.json["count"] for record in of_key] == list(range(1, 1 + len(of_key)))
        numbers = [record.json["n"] for record in of_key]
        assert numbers == sorted(numbers)
