"""The HTTP example: an agent that is killed after the work and before the answer, and a service that knows its keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.payments import Service

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0
INVOICES = [{"customer": f"C{n % 3}", "invoice": f"I{n}", "cents": 100 + n} for n in range(12)]


class Gate:
    """Holds the answer of each payment back until it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.paid = threading.Semaphore(0)

    def __call__(self, key: str) -> None:
        self.paid.release()
        self.open.wait(PATIENCE)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def service(tmp_path: Path, gate: Gate) -> Iterator[Service]:
    with Service(0, tmp_path / "paid.jsonl", gate) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,))
        thread.start()
        yield service
        gate.open.set()
        service.shutdown()
        thread.join(PATIENCE)


def start(folder: Path, url: str) -> subprocess.Popen[str]:
    command = "-W error -m dalsegno run examples.payments:agent --job payments --source invoices.jsonl --key customer"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return subprocess.Popen(
        [sys.executable, *command.split(), "--sink", "out.jsonl", "--json"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "PAYMENTS_URL": url, "NO_PROXY": "*", "no_proxy": "*"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_each_invoice_is_paid_once_though_the_agent_is_killed_between_the_work_and_the_answer(
    tmp_path: Path, service: Service, gate: Gate
) -> None:
    (tmp_path / "invoices.jsonl").write_text("".join(json.dumps(invoice) + "\n" for invoice in INVOICES))
    killed = start(tmp_path, service.url)
    try:
        for _ in range(3):  # the first invoice of each customer
            assert gate.paid.acquire(timeout=PATIENCE), killed.poll()
    finally:
        killed.kill()
        killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert len(lines(tmp_path / "paid.jsonl")) == 3
    gate.open.set()

    last = start(tmp_path, service.url)
    summary, errors = last.communicate(timeout=PATIENCE)
    assert (last.returncode, errors) == (0, "")
    assert last.pid != killed.pid
    assert json.loads(summary)["outputs"] == len(INVOICES)
    paid = lines(tmp_path / "paid.jsonl")
    assert Counter(payment["invoice"] for payment in paid) == Counter(invoice["invoice"] for invoice in INVOICES)
    assert service.refused == 3  # each of those that the killed process had asked for
    receipts = {payment["invoice"]: payment["receipt"] for payment in paid}
    assert {output["invoice"]: output["receipt"] for output in lines(tmp_path / "out.jsonl")} == receipts
