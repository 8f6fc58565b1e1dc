"""A disk that is full: the run ends with an error that says so, and goes on once there is room again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.children.small_disk import MESSAGES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


FILES = ["agent.db", "checkpoints.db", "out.jsonl"]


def run(folder: Path, small: Path, what: str, limit: int = 0) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.children.small_disk", str(folder), str(small), what, str(limit)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr.decode()
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def check_all_is_there(folder: Path, sink: Path, said: dict[str, Any]) -> None:
    outputs = [json.loads(line) for line in sink.read_text().splitlines()]
    assert sorted(number for number, _ in outputs) == [*range(MESSAGES)]
    calls = Counter((folder / "calls").read_text().split())
    assert sorted(map(int, calls)) == [*range(MESSAGES)]
    # Only what was in flight when the disk was full can have been made again, with its own key.
    assert sum(calls.values()) <= MESSAGES + 2
    assert said["memory"] == MESSAGES


def test_files_that_may_not_grow_stop_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    code, said = run(tmp_path, tmp_path, "agent.db", 400_000)
    assert code == 3, said
    assert any(name in said["error"] for name in FILES)
    code, said = run(tmp_path, tmp_path, "agent.db")
    assert code == 0, said
    check_all_is_there(tmp_path, tmp_path / "out.jsonl", said)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 600 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _may_mount() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


@pytest.mark.skipif(not _may_mount(), reason="only root may mount a file system; the limit above needs no root")
@pytest.mark.parametrize("what", FILES)
def test_a_full_disk_stops_the_run_and_nothing_is_lost(tmp_path: Path, small_disk: Path, what: str) -> None:
    code, said = run(tmp_path, small_disk, what)
    assert code == 3, said
    assert str(small_disk / what.split(".")[0]) in said["error"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, said = run(tmp_path, small_disk, what)
    assert code == 0, said
    check_all_is_there(tmp_path, (small_disk if what == "out.jsonl" else tmp_path) / "out.jsonl", said)
