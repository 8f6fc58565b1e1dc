"""`dalsegno run` over Kafka topics, and the hint where the client is not installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.services import Kafka
from tests.topics import MINUTE, put, read

ROOT = Path(__file__).parents[1]
AGENT = """
from dalsegno import Agent, InputEvent, OutputEvent, action

class Echo(Agent):
    @action(InputEvent)
    async def act(self, event, ctx):
        ctx.send_event(OutputEvent(output=event.input))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "echo.py").write_text(AGENT)
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dalsegno", "run", "echo:Echo", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(folder: Path, *arguments: str) -> tuple[int, str, str]:
    with command(folder, *arguments) as child:
        out, err = child.communicate(timeout=MINUTE)
    return child.returncode, out, err


def test_a_bounded_run_ends_and_an_unbounded_one_is_stopped(
    kafka_server: Kafka, kafka_topic: Callable[..., str], folder: Path
) -> None:
    source, sink = kafka_topic(2), kafka_topic()
    put(kafka_server.url, source, [(f"k{n}", n) for n in range(9)])
    given = "--job", f"job-{sink}", "--source", f"kafka://{kafka_server.url}/{source}", "--json"
    code, out, err = ended(folder, *given, "--sink", f"kafka://{kafka_server.url}/{sink}", "--until-end")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["messages"], report["outputs"], report["lag"]) == (9, 9, 0)
    put(kafka_server.url, source, [("k0", 9)])
    with command(folder, *given, "--sink", f"kafka://{kafka_server.url}/{sink}") as child:
        deadline = time.monotonic() + MINUTE
        while len(read(kafka_server.url, sink)) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=MINUTE)
    assert child.returncode == 143, err
    assert json.loads(out)["stopped_by"] == "SIGTERM"
    assert sorted(record.json for record in read(kafka_server.url, sink)) == list(range(10))


def test_a_name_that_has_written_is_for_append(
    kafka_server: Kafka, kafka_topic: Callable[..., str], folder: Path
) -> None:
    sink = kafka_topic()
    (folder / "in.jsonl").write_text("1\n2\n")
    given = ["--job", f"job-{sink}", "--source", "in.jsonl", "--sink", f"kafka://{kafka_server.url}/{sink}"]
    assert ended(folder, *given)[0] == 0
    code, _, err = ended(folder, *given, "--store", "memory://")
    assert (code, "--append" in err) == (1, True)
    assert ended(folder, *given, "--store", "memory://", "--append")[0] == 0
    assert len(read(kafka_server.url, sink)) == 4


@pytest.mark.slow
def test_a_run_that_waits_for_a_broker_can_be_stopped(folder: Path) -> None:
    absent = "kafka://127.0.0.1:1/orders"
    with command(folder, "--job", "absent", "--source", absent, "--sink", "out.jsonl") as child:
        deadline = time.monotonic() + MINUTE
        while not (folder / "out.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=MINUTE)
    assert child.returncode == 143, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--source", "in.jsonl", "--until-end"], "--until-end is for Kafka topics"),
        (["--source", "kafka://host"], "names no Kafka topic"),
        (["--source", "in.jsonl", "--sink", "kafka://host/a?until_end=true"], "no option 'until_end'"),
    ],
)
def test_wrong_usage(folder: Path, arguments: list[str], what: str) -> None:
    (folder / "in.jsonl").write_text("1\n")
    code, _, err = ended(folder, "--job", "wrong", *arguments)
    assert code == 2
    assert what in err


def test_without_the_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from dalsegno import DefinitionError
    from dalsegno.runners.sinks import open_sink
    from dalsegno.runners.sources import open_source

    absent: Any = None
    monkeypatch.setitem(sys.modules, "confluent_kafka", absent)
    for choose in (open_source, open_sink):
        with pytest.raises(DefinitionError, match=r"pip install 'dalsegno\[kafka\]'"):
            choose("kafka://host/topic")


@pytest.mark.slow
def test_nothing_of_the_client_is_imported_by_who_needs_no_topic() -> None:
    code = "import sys; from dalsegno.runners.local import LocalRunner; sys.exit('confluent_kafka' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode
        == 0
    )
