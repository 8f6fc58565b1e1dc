"""Processes that are killed and merge the same parts anew each time: nothing is lost, doubled or run again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children.merging import KEYS, KILLED, PARTS, RECORDS
from tests.crash.harness import rows

KILLS = 12


def live(folder: Path, write: int, moment: str, ids: str, seed: int) -> bool:
    """One life; whether it came to its end."""
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.children.merging", folder, str(write), moment, ids, str(seed)],
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert child.returncode in (0, KILLED)
    return child.returncode == 0


def made(folder: Path) -> list[str]:
    path = folder / "made"
    return path.read_text().splitlines() if path.exists() else []


def recorded(folder: Path) -> set[str]:
    """The calls whose outcome is in the store."""
    bodies = [json.loads(body) for (body,) in rows(folder / "store.db", "SELECT body FROM records")]
    return {body["result"] for body in bodies if "result" in body}


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["given", "source"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_in_any_write_a_merge_goes_on_as_it_was(tmp_path: Path, moment: str, ids: str) -> None:
    chance = random.Random(f"{moment} {ids}")
    known: dict[str, int] = {}
    life, ended = 0, False
    for life in range(KILLS + 1):
        ended = live(tmp_path, chance.randrange(1, 9) if life < KILLS else 0, moment, ids, life)
        calls = made(tmp_path)
        assert {call: calls.count(call) for call in known} == known, "what was recorded was executed again"
        known |= {call: calls.count(call) for call in recorded(tmp_path)}
        if ended:
            break
    assert ended
    assert life > 3, "it was hardly ever killed"
    outputs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(name for _, _, name in outputs) == sorted(f"{p}-{n}" for p in range(PARTS) for n in range(RECORDS))
    for key in range(KEYS):
        of_key = [(n, name) for k, n, name in outputs if k == key]
        assert [n for n, _ in of_key] == list(range(1, 1 + PARTS * RECORDS // KEYS))
        for part in range(PARTS):
            of_part = [name for _, name in of_key if name.startswith(f"{part}-")]
            assert of_part == [f"{part}-{n}" for n in range(RECORDS) if n % KEYS == key]
    assert recorded(tmp_path) == set()
