"""The examples run as their docstrings say, also through a SIGKILL."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dalsegno import DidNotHappen, Happened, effects
from examples import reviews

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
PATIENCE = 60.0
REVIEWS = [{"id": f"product-{number % 4}", "review": f"review {number}"} for number in range(80)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_imported_and_says_how_it_is_run(name: str) -> None:
    assert "::" in (importlib.import_module(f"examples.{name}").__doc__ or "")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(folder: Path) -> subprocess.Popen[str]:
    command = "-W error -m dalsegno run examples.reviews:agent --job reviews --source reviews.jsonl --key id"
    options = ["--sink", "out.jsonl", "--max-in-flight", "4", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    environment.pop("REVIEWS_SENT_MAIL", None)
    return subprocess.Popen(
        [sys.executable, *command.split(), *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_at(process: subprocess.Popen[str], mails: Path, count: int) -> None:
    """SIGKILL as soon as *count* lines are in the sent mail."""
    deadline = time.monotonic() + PATIENCE
    try:
        while not mails.exists() or mails.read_bytes().count(b"\n") < count:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_reviews_notify_once_and_lose_nothing_through_kills(tmp_path: Path) -> None:
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(review) + "\n" for review in REVIEWS))
    mails = tmp_path / "sent_mail.jsonl"
    # About 32 notifications are to be expected; fewer than 12 have a chance of one in ten million.
    for count in (4, 8, 12):
        kill_at(start(tmp_path), mails, count)
        assert len(mails.read_text().splitlines()) < 30
    last = start(tmp_path)
    summary, errors = last.communicate(timeout=PATIENCE)
    assert (last.returncode, errors) == (0, "")
    report = json.loads(summary)
    assert report["calls_replayed"] > 0
    assert report["calls_executed"] < len(REVIEWS) + len(lines(mails))

    outputs = lines(tmp_path / "out.jsonl")
    assert Counter(output["id"] for output in outputs) == Counter(review["id"] for review in REVIEWS)
    assert len({mail["key"] for mail in lines(mails)}) == len(lines(mails))
    bad = Counter(output["id"] for output in outputs if output["score"] <= 2)
    assert Counter(mail["product"] for mail in lines(mails)) == bad


def test_was_notified_finds_exactly_the_mail_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVIEWS_SENT_MAIL", str(tmp_path / "mail.jsonl"))

    def as_call(key: str, function: Any) -> Any:
        token = effects.running.set(lambda: effects.CurrentCall("reviews", "notify_manager", 1, key))
        try:
            return function("product-1")
        finally:
            effects.running.reset(token)

    assert as_call("first", reviews.was_notified) == DidNotHappen()
    as_call("first", reviews.notify_manager)
    assert as_call("first", reviews.was_notified) == Happened(None)
    assert as_call("fir", reviews.was_notified) == DidNotHappen()
    assert as_call("second", reviews.was_notified) == DidNotHappen()
    assert [mail["product"] for mail in lines(tmp_path / "mail.jsonl")] == ["product-1"]
