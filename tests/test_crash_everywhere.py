"""`crash_everywhere`: agents that survive, mistakes that it finds, and what it says of them."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from dalsegno import DefinitionError
from dalsegno.testing import CrashTestFailed, crash_everywhere
from dalsegno.testing.virtual_loop import VirtualLoop
from tests.crashed_agents import (
    MISTAKES,
    ActsBesideTheRecord,
    Failing,
    LeavesFiles,
    LeavesTasks,
    Plain,
    Reviewer,
    Unsettled,
    Waits,
    inputs,
    outside,
)

STORES = ["memory://", "sqlite:///{folder}/agent.db"]


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("agent", [Reviewer, Plain, Failing])
def test_a_right_agent_survives(agent: Any, store: str) -> None:
    report = crash_everywhere(agent, inputs(4, keys=2), key="id", store=store, outside=outside, pairs=40)
    kinds = {boundary.kind for boundary in report.boundaries}
    assert kinds == {"write", "prune", "checkpoint", "call", "event", "action", "output"} or agent is Failing
    assert report.cases > 2 * len(report.boundaries)
    assert report.parked == 0
    assert report.pairs_run == 40 < report.pairs_possible


@pytest.mark.parametrize("agent", [LeavesTasks, LeavesFiles])
def test_what_a_crash_leaves_behind_is_no_warning_for_whoever_comes_next(agent: Any) -> None:
    gc.disable()
    try:
        crash_everywhere(agent, inputs(2, keys=2), key="id", pairs=5)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            gc.collect()
    finally:
        gc.enable()
    assert [str(warning.message) for warning in warned] == []


@pytest.mark.slow
@pytest.mark.parametrize("jumps", [0.0, 7200.0])
def test_a_clock_that_jumps_changes_no_decision(jumps: float) -> None:
    report = crash_everywhere(Waits, inputs(3, keys=2), key="id", pairs=40, clock_jumps=jumps)
    assert report.cases > 80


def test_the_report_counts_what_was_run() -> None:
    report = crash_everywhere(Reviewer, inputs(1), key="id", outside=outside, pairs=3)
    kinds = [boundary.kind for boundary in report.boundaries]
    assert [kinds.count(kind) for kind in ("call", "event", "action", "output")] == [5, 2, 2, 1]
    assert report.cases == 1 + 2 * len(kinds) + 3 * kinds.count("write") + 3
    assert f"3 of {report.pairs_possible} possible (seed 0)" in str(report)


def test_a_call_in_doubt_parks_its_message_and_that_is_right() -> None:
    report = crash_everywhere(Unsettled, inputs(2, keys=1), key="id", outside=outside, pairs=0)
    assert 0 < report.parked < report.cases


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_agent_is_found_and_said(mistake: str) -> None:
    agent, words = MISTAKES[mistake]
    with pytest.raises(CrashTestFailed) as failed:
        crash_everywhere(agent, inputs(3, keys=1), key="id", outside=outside, pairs=0)
    assert re.search(words, str(failed.value), re.DOTALL)
    shortest = failed.value.report.failures[-1]
    assert shortest.inputs <= 2
    assert len(shortest.case) <= 1


def test_the_case_that_failed_can_be_run_alone() -> None:
    agent, words = MISTAKES["a reconcile that does not look"]
    with pytest.raises(CrashTestFailed) as failed:
        crash_everywhere(agent, inputs(3), key="id", outside=outside)
    case = re.search(r"case='([^']+)'\)", str(failed.value))
    assert case is not None
    with pytest.raises(CrashTestFailed, match=words) as again:
        crash_everywhere(agent, inputs(1), key="id", outside=outside, case=case[1])
    assert again.value.report.cases == 1
    assert str(again.value.report.failures[-1]) == str(failed.value.report.failures[-1])


def test_several_agents_are_proven_one_after_the_other() -> None:
    with pytest.raises(CrashTestFailed, match="outside of a durable call"):
        crash_everywhere([Plain, ActsBesideTheRecord], inputs(1), key="id", outside=outside, pairs=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": []}, "at least one input"),
        ({"agent": []}, "needs an agent"),
        ({"case": "sideways 3"}, "before 7"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DefinitionError, match=words):
        crash_everywhere(options.pop("agent", Plain), options.pop("inputs", inputs(1)), key="id", **options)


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    report = crash_everywhere(
        Plain, inputs(1), key="id", outside=outside, pairs=2, on_case=lambda so_far, of: told.append((so_far.cases, of))
    )
    assert told[-1] == (report.cases, report.cases)
    assert [done for done, _ in told] == [*range(1, report.cases + 1)]


def test_waiting_takes_no_time_and_threads_are_waited_for(tmp_path: Path) -> None:
    loop = VirtualLoop(5.0)

    async def main() -> tuple[float, float]:
        before = loop.time()
        await asyncio.sleep(3600)
        after = loop.time()
        done = await asyncio.to_thread(lambda: "done")
        assert done == "done"
        return before, after

    before, after = loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert 5.0 <= before < 65.0
    assert after - before >= 3600
