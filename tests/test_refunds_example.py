"""The example that waits for a person: killed while it waits, answered, and then each refund is paid once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dalsegno import AlreadyDecidedError, InspectError, Operator, StoreError
from examples import refunds

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0
REQUESTS = [
    {"customer": "ann", "order": "A1", "cents": 90_000},
    {"customer": "ann", "order": "A2", "cents": 100},
    {"customer": "bob", "order": "B1", "cents": 200},
    {"customer": "cid", "order": "C1", "cents": 70_000},
]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = "-W error -m dalsegno run examples.refunds:agent --job refunds --source in.jsonl --key customer"
    return subprocess.Popen(
        [sys.executable, *command.split(), "--sink", "out.jsonl", "--json", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_parked(operator: Operator, process: subprocess.Popen[str], keys: list[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        try:
            if [parked.key for parked in operator.parked()] == keys:
                return
        except StoreError:  # the process has not made the store yet
            pass
        time.sleep(0.01)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("answered_while", ["dead", "running"])
def test_a_kill_between_the_question_and_the_answer_loses_nothing_and_pays_once(
    tmp_path: Path, answered_while: str
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
    operator = Operator(job="refunds", store=f"sqlite:///{tmp_path}/.dalsegno/refunds.db")
    killed = start(tmp_path, "--wait")
    try:
        wait_until_parked(operator, killed, ["ann", "cid"])
    finally:
        killed.kill()
        killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert {line["order"] for line in lines(tmp_path / "refunded.jsonl")} <= {"B1"}

    last = None
    if answered_while == "running":
        last = start(tmp_path, "--wait")
        wait_until_parked(operator, last, ["ann", "cid"])
    operator.signal("ann", "approval", {"approved": True, "by": "me"})
    with pytest.raises(InspectError) as second:  # taken up already, if the job runs
        operator.signal("ann", "approval", {"approved": False, "by": "somebody else"})
    assert last is not None or isinstance(second.value, AlreadyDecidedError)
    operator.signal("cid", "approval", {"approved": False, "by": "me"})
    last = last or start(tmp_path)
    summary, errors = last.communicate(timeout=PATIENCE)
    assert (last.returncode, errors) == (0, "")
    assert last.pid != killed.pid
    assert json.loads(summary)["parked"] == []
    paid = lines(tmp_path / "refunded.jsonl")
    assert sorted(line["order"] for line in paid) == ["A1", "A2", "B1"]
    assert len({line["key"] for line in paid}) == 3
    assert sorted(lines(tmp_path / "out.jsonl"), key=lambda output: output["order"]) == [
        {"order": "A1", "approved": True, "by": "me"},
        {"order": "A2", "approved": True, "by": "rule"},
        {"order": "B1", "approved": True, "by": "rule"},
        {"order": "C1", "approved": False, "by": "me"},
    ]


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "how-to" / "wait-for-a-person.md").read_text()
    shown = page.split("# refunds.py\n")[1].split("```")[0]
    assert Path(refunds.__file__).read_text().endswith(shown)
