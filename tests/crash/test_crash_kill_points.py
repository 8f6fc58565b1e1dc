"""A process that is killed at any boundary of a run is as good as one that was not.

A first run that nobody interrupts counts the boundaries. Then, for each of them, a child process runs the same job
into that boundary, says so, freezes, and is killed with SIGKILL; another process runs the job again, to its end, and
one more finds nothing left to do. What is compared is read from the files, without the library: executions from a file
outside of the job, records and checkpoints from what the killed process left.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crash.harness import Crash, Ended, Forks, Job, Order, quick_folder

pytestmark = pytest.mark.slow

MESSAGES = [{"key": key, "text": f"review {number}: fine, «so to say»"} for number, key in enumerate("abacabb")]
CHECKPOINT_DURING = ("2", "5")
RECORDS_PER_MESSAGE = 7
SEED = 20260801
PAIRS = 120


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


def order_for(folder: Path, *, reconcile: bool = True, max_in_flight: int = 1) -> tuple[Job, Order]:
    job = Job(folder, MESSAGES)
    # With many in flight one checkpoint could serve both, and a callee would wait for its own for ever.
    during = CHECKPOINT_DURING if max_in_flight == 1 else CHECKPOINT_DURING[:1]
    return job, Order(folder, reconcile, max_in_flight, during)


def count(forks: Forks, folder: Path, *, reconcile: bool = True, max_in_flight: int = 1) -> dict[str, list[str]]:
    """The boundaries of a run that is not interrupted, by kind."""
    job, order = order_for(folder, reconcile=reconcile, max_in_flight=max_in_flight)
    ended = forks.run_to_end(order)
    nothing = Crash({}, {}, set())
    job.check(ended, [nothing], reconcile=reconcile)
    check_that_nothing_is_left(forks, job, order)
    assert ended.result is not None
    passed: dict[str, list[str]] = ended.result["passed"]
    assert len(passed["record"]) == 2 * RECORDS_PER_MESSAGE * len(MESSAGES)
    return passed


def kill(forks: Forks, order: Order, stop_at: tuple[str, int]) -> Ended:
    ended = forks.run(replace(order, stop_at=stop_at))
    assert ended.boundary is not None, f"{stop_at} was not reached: {ended.code} {forks.errors()}"
    assert ended.code == -9
    return ended


def go_on(forks: Forks, job: Job, order: Order, killed: list[Ended], crashes: list[Crash]) -> None:
    """Run to the end, check what is there, and that one more run does nothing."""
    order = replace(order, checkpoint_during=())
    ended = forks.run_to_end(order)
    assert ended.pid not in {process.pid for process in killed}
    job.check(ended, crashes, reconcile=order.reconcile)
    check_that_nothing_is_left(forks, job, order)


def check_that_nothing_is_left(forks: Forks, job: Job, order: Order) -> None:
    before = {name: (job.folder / name).read_bytes() for name in ("output.jsonl", "outside.jsonl")}
    result = forks.run_to_end(replace(order, checkpoint_during=())).result
    assert result is not None
    report = result["report"]
    assert (report["messages"], report["outputs"], report["calls_executed"]) == (0, 0, 0)
    assert before == {name: (job.folder / name).read_bytes() for name in before}
    if not report["parked"]:
        assert (report["calls_replayed"], report["checkpoints"]) == (0, 0)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", ["record", "callee", "sink", "checkpoint", "store"])
def test_a_kill_at_any_boundary_changes_nothing(forks: Forks, folder: Path, kind: str, part: int) -> None:
    passed = count(forks, folder / "whole")
    check_coverage(passed)
    for number in range(1 + part, len(passed[kind]) + 1, 2):
        job, order = order_for(folder / f"{kind}-{number}")
        killed = kill(forks, order, (kind, number))
        go_on(forks, job, order, [killed], [job.crash()])
        shutil.rmtree(job.folder)


def check_coverage(passed: dict[str, list[str]]) -> None:
    """The windows that matter are among the boundaries."""
    assert {"before a line", "half a line", "after a line"} == set(passed["sink"])
    assert {
        f"{when} {call} of message {n}"
        for when in ("before", "after")
        for call in ("ask", "upsert", "send")
        for n in range(7)
    } == set(passed["callee"])
    for what in ("flushing the sink", "BEGIN IMMEDIATE", "COMMIT"):
        assert {f"before {what}", f"after {what}"} <= set(passed["checkpoint"])
    pruning = passed["store"][passed["store"].index("before pruning") :]
    chunks = [pruning[: pruning.index("after pruning")].count("after COMMIT")]
    while "before pruning" in (pruning := pruning[pruning.index("after pruning") + 1 :]):
        chunks.append(pruning[: pruning.index("after pruning")].count("after COMMIT"))
    assert len(chunks) == len(CHECKPOINT_DURING) + 1
    assert max(chunks) > 1, "no prune has two chunks"


@pytest.mark.parametrize("kind", ["record", "callee"])
def test_a_once_call_without_reconcile_is_parked_exactly_when_it_is_in_doubt(
    forks: Forks, folder: Path, kind: str
) -> None:
    passed = count(forks, folder / "whole", reconcile=False)
    parked = []
    for number, what in enumerate(passed[kind], start=1):
        job, order = order_for(folder / f"{kind}-{number}", reconcile=False)
        killed = kill(forks, order, (kind, number))
        crash = job.crash()
        parked += [what for message in job.ids() if crash.in_doubt(message)]
        go_on(forks, job, order, [killed], [crash])
        shutil.rmtree(job.folder)
    # Between the request of `send`, the second one of a message, and the record of its outcome; the next message of the
    # key may have got as far as its `ask` by then.
    beside = [what for what in parked if kind == "callee" and " ask of " in what]
    assert len(parked) - len(beside) == 2 * len(MESSAGES)
    assert len(beside) <= 2 * len(MESSAGES)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("reconcile", [True, False])
def test_a_kill_while_many_keys_are_in_flight_changes_nothing(
    forks: Forks, folder: Path, reconcile: bool, part: int
) -> None:
    passed = count(forks, folder / "whole", reconcile=reconcile, max_in_flight=8)
    boundaries = [(kind, number) for kind in ("record", "callee", "sink") for number in range(1, len(passed[kind]) + 1)]
    for kind, number in random.Random(SEED + part).sample(boundaries, 20):
        job, order = order_for(folder / f"{kind}-{number}", reconcile=reconcile, max_in_flight=8)
        killed = kill(forks, order, (kind, number))
        go_on(forks, job, order, [killed], [job.crash()])
        shutil.rmtree(job.folder)


@pytest.mark.parametrize("part", range(4))
def test_a_second_kill_during_the_recovery_changes_nothing(forks: Forks, folder: Path, part: int) -> None:
    seed = SEED + part
    choose = random.Random(seed)
    passed = count(forks, folder / "whole")
    first = [(kind, number) for kind, names in passed.items() for number in range(1, len(names) + 1)]
    for pair in range(PAIRS // 4):
        reconcile = choose.random() < 0.7
        job, order = order_for(folder / f"pair-{pair}", reconcile=reconcile)
        stop_at = choose.choice(first)
        killed = [kill(forks, order, stop_at)]
        crashes = [job.crash()]
        second = choose_in_recovery(forks, job, order, choose)
        killed.append(kill(forks, replace(order, checkpoint_during=()), second))
        crashes.append(job.crash())
        assert killed[0].pid != killed[1].pid
        print(f"seed {seed}, pair {pair}: {stop_at} {killed[0].boundary}, then {second} {killed[1].boundary}")
        go_on(forks, job, order, killed, crashes)
    print(f"seed {seed}: {PAIRS // 4} pairs of kills")


def choose_in_recovery(forks: Forks, job: Job, order: Order, choose: random.Random) -> tuple[str, int]:
    """A boundary of the recovery, which is counted on a copy of what the crash left."""
    copy = job.folder.with_name(f"{job.folder.name}-copy")
    shutil.copytree(job.folder, copy)
    result = forks.run_to_end(replace(order, folder=copy, checkpoint_during=())).result
    assert result is not None
    return choose.choice([(kind, n) for kind, names in result["passed"].items() for n in range(1, len(names) + 1)])
