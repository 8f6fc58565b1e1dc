"""The agents that the project shows survive a crash at each of their steps, and the kill of a real process at some.

They act on what they always act on: files, and a payment service of its own on the loopback interface. Only the demo's
model and mail, which are there to be counted, are replaced. A file knows nothing of simulated crashes, so a tool that
is still at work in its thread when its process crashes would go on; with one message at a time there is none.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dalsegno import Agent
from dalsegno.demo import agent as demo
from dalsegno.testing import CrashReport, Outside, crash_everywhere
from examples import payments, refunds, reviews
from tests.test_docs import ROOT, steps

pytestmark = pytest.mark.slow

KILLS = 4


class Files(Outside):
    """The files that the tools write, which are no more after a reset."""

    def __init__(self, *paths: Path) -> None:
        super().__init__()
        self.paths = paths

    def reset(self) -> None:
        super().reset()
        for path in self.paths:
            path.unlink(missing_ok=True)


class Served(Outside):
    """A payment service, which has not been paid anything after a reset."""

    def __init__(self, service: payments.Service) -> None:
        super().__init__()
        self.service = service

    def reset(self) -> None:
        super().reset()
        self.service.ledger.unlink(missing_ok=True)
        self.service._payments.clear()


def crash(agent: Callable[[], Agent], inputs: list[dict[str, Any]], key: str, outside: Outside) -> CrashReport:
    report = crash_everywhere(agent, inputs, key=key, outside=outside, pairs=5, kills=KILLS, max_in_flight=1)
    assert report.kills_run == KILLS
    assert report.killed + report.missed >= KILLS
    assert report.parked == 0
    assert {"call", "write", "output"} <= {boundary.kind for boundary in report.boundaries}
    return report


def test_reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mail = tmp_path / "mail.jsonl"
    monkeypatch.setenv("REVIEWS_SENT_MAIL", str(mail))
    monkeypatch.setattr(random, "randint", lambda low, high: 2 if random.random() < 0.7 else 5)
    crash(reviews.ReviewAgent, [{"id": "p", "review": f"review {n}"} for n in range(2)], "id", Files(mail))


def test_refunds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "refunded.jsonl"
    monkeypatch.setattr(refunds, "LEDGER", ledger)
    orders = [{"customer": "ann", "order": f"o{n}", "cents": 100 * n} for n in range(2)]
    crash(refunds.Refunds, orders, "customer", Files(ledger))
    assert ledger.read_text().count("\n") == 2


def test_refunds_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refunds, "LEDGER", tmp_path / "refunded.jsonl")
    orders = [{"customer": "ann", "order": "o1", "cents": refunds.SMALL + 1}]
    report = crash_everywhere(lambda: refunds.Refunds(timedelta(0)), orders, key="customer", pairs=5)
    assert report.parked == 0


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[payments.Service]:
    with payments.Service(0, tmp_path / "paid.jsonl") as server:
        monkeypatch.setenv("PAYMENTS_URL", server.url)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_payments(service: payments.Service) -> None:
    invoices = [{"customer": "ann", "invoice": f"i{n}", "cents": n} for n in range(2)]
    crash(payments.Payments, invoices, "customer", Served(service))
    assert service.ledger.read_text().count("\n") == len(invoices)


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The agent of README.md, imported from the files that the page has one save."""
    for _, _, text, file in steps((ROOT / "README.md").read_text("utf-8")):
        if file is not None:
            (tmp_path / file).write_text(text + "\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("agent")
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_readme(readme: ModuleType, tmp_path: Path) -> None:
    crash(
        readme.ReviewAgent,
        [{"id": "p", "review": f"review {n}"} for n in range(2)],
        "id",
        Files(tmp_path / "outbox.txt"),
    )


def test_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = Outside()

    async def ask_model(review: str) -> int:
        return random.choice([1, 2, 5])

    def send_mail(number: int, product: str, call: str | None) -> None:
        outside.did("mail", call)

    def find_mail(call: str) -> bool:
        return outside.has("mail", call)

    for stand_in in (ask_model, send_mail, find_mail):
        monkeypatch.setattr(demo, stand_in.__name__, stand_in)
    crash(demo.ReviewAgent, [{"number": n, "id": "p", "review": "?"} for n in range(2)], "id", outside)
    assert len({deed.details for deed in outside.deeds}) == len(outside.deeds) <= 2
