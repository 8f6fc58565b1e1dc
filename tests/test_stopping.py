"""Ctrl-C at the command line: what the first one says and waits for, and that the second one ends the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0

AGENT = """
import asyncio, os, time
from pathlib import Path
from dalsegno import Agent, InputEvent, OutputEvent, action

def say(what):
    os.write(2, f"{what}\\n".encode())  # in one piece

async def call(n):
    say("called")
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    return n

def in_thread(n):
    say("called")
    while not Path("go").exists():
        time.sleep(0.01)
    return n

async def stubborn(n):
    say("called")
    while not Path("go").exists():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass
    return n

async def blocks(n):
    return in_thread(n)

class Waits(Agent):
    def __init__(self, function):
        self.function = function

    @action(InputEvent)
    async def act(self, event, ctx):
        ctx.send_event(OutputEvent(output=await ctx.durable_execute(self.function, event.input["n"])))

agents = {f.__name__: Waits(f) for f in (call, in_thread, stubborn, blocks)}
globals().update({f"{name}_agent": agent for name, agent in agents.items()})
"""


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "app.py").write_text(AGENT)
        (folder / "in.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(3)))

    def start(self, agent: str) -> subprocess.Popen[str]:
        command = f"-W error -m dalsegno run app:{agent}_agent --job job --source in.jsonl --key n --sink out.jsonl"
        process = subprocess.Popen(
            [sys.executable, *command.split()],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def called(self, process: subprocess.Popen[str], times: int) -> None:
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(times)] == ["called\n"] * times


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for process in job.processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_says_what_it_waits_for(job: Job, number: signal.Signals, code: int) -> None:
    process = job.start("call")
    job.called(process, 3)
    process.send_signal(number)
    assert process.stderr is not None
    assert process.stderr.readline() == (
        "dalsegno: stopping; waiting for the calls in flight of 3 messages to end (Ctrl-C again to stop at once, which "
        "leaves calls with effect 'once' in doubt)\n"
    )
    (job.folder / "go").touch()
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (code, "")
    assert f"stopped by {number.name}" in out
    last = job.start("call")
    _, errors = last.communicate(timeout=PATIENCE)
    assert (last.returncode, errors) == (0, ""), "no call was made again"
    assert sorted((job.folder / "out.jsonl").read_text().split()) == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["call", "in_thread", "stubborn"])
def test_the_second_signal_ends_the_process_whatever_the_calls_do(job: Job, agent: str) -> None:
    process = job.start(agent)
    job.called(process, 3)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "stopping; waiting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert errors == (
        "dalsegno: stopped at once; of the calls that were cut off, those with effect 'once' are in doubt; run it "
        "again to go on\n"
    )
    (job.folder / "go").touch()
    last = job.start(agent)
    last.communicate(timeout=PATIENCE)
    assert last.returncode == 3  # all are in doubt


@pytest.mark.slow
def test_two_signals_end_a_process_whose_action_blocks_the_event_loop(job: Job) -> None:
    process = job.start("blocks")
    job.called(process, 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # two of one kind may become one
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode in (130, 143)
    assert "stopped at once" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_run_that_has_nothing_to_wait_for_says_nothing(job: Job) -> None:
    (job.folder / "go").touch()
    process = job.start("call")
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "called\n" * 3)
    assert "finished" in out
