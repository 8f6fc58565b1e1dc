"""`crash_everywhere(kills=...)`: processes that SIGKILL ends at a step of the agent."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dalsegno import AesGcmCipher, DefinitionError
from dalsegno.stores.memory import MemoryStore
from dalsegno.testing import CrashTestFailed, Outside, crash_everywhere
from dalsegno.testing.kills import KilledLives
from dalsegno.testing.lives import Job
from dalsegno.testing.world import Strike, World
from tests.crashed_agents import ActsBesideTheRecord, Plain, ReconcilesBlindly, Reviewer, Unsettled, inputs, outside
from tests.mutation import Change, Mutation, assert_failed, copied, outcomes

pytestmark = pytest.mark.slow

KILLS = 24
BOUNDARIES = 14
"""Fewer than the run of one message has."""
ALONE = "tests/test_crash_kills.py::test_a_kill_after_each_call_and_write"


@pytest.mark.parametrize("agent", [Reviewer, Plain])
def test_a_right_agent_survives(agent: Any) -> None:
    report = crash_everywhere(agent, inputs(2), key="id", outside=outside, pairs=0, kills=KILLS)
    assert report.kills_run == KILLS
    assert report.killed >= KILLS, "fewer processes ended by SIGKILL than histories had one"
    assert report.processes == report.killed + KILLS, "each history ends with a process that nothing kills"
    assert report.parked == 0
    assert f"{KILLS} were run in {report.processes} real processes, {report.killed} of which ended by SIGKILL" in str(
        report
    )


def test_a_process_is_killed_where_it_is_told_to_stop(tmp_path: Path) -> None:
    lives = KilledLives(Job(Plain, inputs(1), key="id", outside=outside), World(tmp_path, "job"))
    with outside.kept_in(tmp_path):
        first = lives.live(Strike("killed after", 2))
        assert first.life.struck == first.life.boundaries[-1]
        assert first.crashed
        last = lives.live()
        assert not last.crashed
        assert outside.times("charge") == 1
    assert len({os.getpid(), *lives.pids}) == 3
    assert lives.killed == lives.pids[:1]
    assert last.report is not None
    assert last.report.messages == 1
    assert len(lives.world.outputs) == 1


def test_a_call_in_doubt_parks_its_message() -> None:
    report = crash_everywhere(Unsettled, inputs(1), key="id", outside=outside, pairs=0, kills=KILLS)
    simulated = crash_everywhere(Unsettled, inputs(1), key="id", outside=outside, pairs=0)
    assert report.parked > simulated.parked > 0


def test_a_kill_after_each_call_and_write() -> None:
    """Run on its own by the mutations, too."""
    for number in itertools.count(1):
        report = crash_everywhere(Reviewer, inputs(1), key="id", outside=outside, case=f"killed after {number}")
        if report.missed:
            break
        assert report.killed == 1
    assert number > BOUNDARIES


@pytest.mark.parametrize(
    ("agent", "case", "words"),
    [
        (ReconcilesBlindly, "killed after 3", r"reconcile of .*charge.* said DidNotHappen"),
        (ActsBesideTheRecord, "killed after 1", r"charge.* outside of a durable call"),
    ],
)
def test_a_mistake_of_the_agent_is_found_across_processes(agent: Any, case: str, words: str) -> None:
    with pytest.raises(CrashTestFailed, match=words) as failed:
        crash_everywhere(agent, inputs(1), key="id", outside=outside, case=case)
    assert failed.value.report.killed == 1


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation(
            "the barrier before a call with effect once",
            [
                Change(
                    "core/attempts.py",
                    """
                    self._journal.request(call, effect, answer)
                    await self._environment.log.barrier()
                    """,
                    "self._journal.request(call, effect, answer)",
                )
            ],
            {ALONE: r"killed after .*\[P6\] the call .* was executed before its request was durable"},
        ),
        Mutation(
            "the sink is cut back to its checkpoint",
            [Change("runners/sinks.py", "os.ftruncate(fd, end)", "end = os.fstat(fd).st_size")],
            {ALONE: r"killed after .*\[outputs\] the output .* left 2 times"},
        ),
    ],
    ids=lambda mutation: mutation.mechanism,
)
def test_without(mutation: Mutation, tmp_path: Path) -> None:
    copy = copied(tmp_path, mutation.changes)
    assert_failed(outcomes(copy, [*mutation.tests]), mutation.tests)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kills": -1}, "kills=-1"),
        ({"case": "killed after 1", "cipher": AesGcmCipher(bytes(32))}, "cipher="),
        ({"case": "killed after 1", "store": lambda folder: MemoryStore()}, "outlives a process"),
    ],
)
def test_what_cannot_be_killed_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DefinitionError, match=words):
        crash_everywhere(Plain, inputs(1), key="id", **options)


def test_deeds_in_a_folder_are_seen_by_other_processes(tmp_path: Path) -> None:
    world = Outside(tmp_path)
    pid = os.fork()
    if not pid:
        world.did("charge", "k1")
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert world.times("charge", "k1") == 1
    world.reset()
    assert world.deeds == Outside(tmp_path).deeds == []
