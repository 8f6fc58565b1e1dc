"""Switches a mechanism of the library off in a copy of the source tree, and runs tests on that copy.

Lines that must be there exactly once are replaced. The tests run in a child process. A failure counts only if the test
was collected and set up, failed while it ran, and failed with the words that are written down for it: a copy that
cannot be imported proves nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0
"""Seconds for one child process on a busy machine."""

PLUGIN = """
import json, pathlib
import pytest

out = pathlib.Path(__file__).with_name("outcomes")

def note(**what):
    with out.open("a") as file:
        file.write(json.dumps(what) + "\\n")

def pytest_sessionstart(session):
    import dalsegno
    note(test="dalsegno", when="import", outcome="passed", why=dalsegno.__file__)

def pytest_collectreport(report):
    if report.failed:
        note(test=report.nodeid, when="collect", outcome="failed", why=str(report.longrepr))

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    why = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
    note(test=report.nodeid, when=report.when, outcome=report.outcome, why=why)
    return report
"""


@dataclass(frozen=True)
class Outcome:
    """How one phase of one test ended, and with which exception."""

    test: str
    when: str
    outcome: str
    why: str


@dataclass(frozen=True)
class Change:
    """Whole lines of a *file* of the package, and what stands there *instead*, both without common indentation."""

    file: str
    lines: str
    instead: str

    def apply(self, source: Path) -> None:
        path = source / "dalsegno" / self.file
        text = path.read_text()
        found = [*self._pattern().finditer(text)]
        assert len(found) == 1, f"bring this change up to date, {self.file} has it {len(found)} times:\n{self.lines}"
        (place,) = found
        instead = textwrap.indent(textwrap.dedent(self.instead).strip("\n"), place["indentation"])
        path.write_text(text[: place.start()] + instead + text[place.end() :])

    def _pattern(self) -> re.Pattern[str]:
        lines = textwrap.dedent(self.lines).strip("\n").split("\n")
        return re.compile("^(?P<indentation> *)" + "\n(?P=indentation)".join(map(re.escape, lines)) + "$", re.MULTILINE)


def copied(folder: Path, changes: Sequence[Change] = ()) -> Path:
    """A copy of the project in *folder*, with *changes*."""
    copy = folder / "copy"
    shutil.copytree(ROOT / "src", copy / "src")
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "outcomes_plugin.py").write_text(PLUGIN)
    for change in changes:
        change.apply(copy / "src")
    return copy


def outcomes(copy: Path, tests: Sequence[str]) -> list[Outcome]:
    """Run *tests* in a process of their own on the *copy*."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcomes_plugin", *tests]
    done = subprocess.run(
        command,
        cwd=copy,
        env={**environment, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    lines = (copy / "outcomes").read_text().splitlines() if (copy / "outcomes").exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    assert found, f"the child process did not run the tests:\n{done.stdout.decode()}"
    imported = found.pop(0)
    assert Path(imported.why).is_relative_to(copy), f"the child process tested {imported.why}"
    return found


def assert_passed(found: Sequence[Outcome], tests: Sequence[str]) -> None:
    assert [outcome for outcome in found if outcome.outcome != "passed"] == []
    assert {outcome.test for outcome in found if outcome.when == "call"} == set(tests)


def assert_failed(found: Sequence[Outcome], tests: dict[str, str]) -> None:
    """Each of *tests* was set up, and then failed by the words that are its value, a regular expression."""
    called = {outcome.test: outcome for outcome in found if outcome.when == "call"}
    assert [outcome for outcome in found if outcome.when != "call" and outcome.outcome != "passed"] == []
    assert set(called) == set(tests)
    for test, words in tests.items():
        assert called[test].outcome == "failed", f"{test} passes although the mechanism is off"
        assert re.search(words, called[test].why, re.DOTALL), f"{test} failed for another reason: {called[test].why}"


@dataclass(frozen=True)
class Mutation:
    """A mechanism that is switched off by *changes*, and for each test about it the words with which it fails."""

    mechanism: str
    changes: Sequence[Change]
    tests: dict[str, str]
