"""The pytest plugin: its fixture, marker, options and what it shows, in pytest processes of their own."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno import DefinitionError
from dalsegno.testing import CrashReport, crash_everywhere
from tests.crashed_agents import Asking, inputs, outside

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0

RIGHT = """
    from tests.crashed_agents import Asking, ReconcilesBlindly, inputs, outside

    def test_right(crash_everywhere):
        report = crash_everywhere(Asking, inputs(2), key="id", outside=outside, pairs=2)
        print(f"histories={report.cases} seed={report.seed} pairs={report.pairs_run} kills={report.kills_run}")
"""


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", *options]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}


def run(folder: Path, test: str, *options: str, code: int = 0) -> str:
    """What pytest prints about the file *test* in *folder*."""
    lines = test.strip("\n").split("\n")
    margin = len(lines[0]) - len(lines[0].lstrip())
    (folder / "test_it.py").write_text("\n".join(line[margin:] for line in lines) + "\n")
    done = subprocess.run(
        command(folder, *options, "test_it.py"),
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern!r} is not in:\n{text}"
    return match[1]


@pytest.mark.slow
def test_the_fixture_is_there_and_the_summary_counts(tmp_path: Path) -> None:
    shown = run(tmp_path, RIGHT, "-rP")
    assert found(r"histories=(\d+) seed=0 pairs=2 kills=0", shown) == found(r"crash_everywhere: (\d+) histories", shown)
    assert "--crash-seed" not in shown


@pytest.mark.slow
def test_a_run_without_it_imports_nothing_and_says_nothing(tmp_path: Path) -> None:
    test = """
    import sys

    def test_nothing():
        assert "_dalsegno_pytest" in sys.modules
        assert "dalsegno" not in sys.modules
    """
    assert "crash" not in run(tmp_path, test, "--strict-markers").replace(str(tmp_path), "")


@pytest.mark.slow
def test_the_command_line_says_what_a_call_does_not(tmp_path: Path) -> None:
    test = RIGHT.replace(", pairs=2", "")
    shown = run(tmp_path, test, "-rP", "--crash-seed=7", "--crash-pairs=3", "--crash-kills=2", "--crash-inputs=1")
    assert "seed=7 pairs=3 kills=2" in shown
    assert "crash_everywhere: seed 7 (--crash-seed 7)" in shown
    assert re.search(r"2 of them of real processes with [23] SIGKILLs", shown)


@pytest.mark.slow
def test_a_random_seed_is_shown_and_used_also_by_workers(tmp_path: Path) -> None:
    shown = run(tmp_path, RIGHT, "-rP", "--crash-seed=random", "-n", "2")
    assert found(r"--crash-seed (\d+)\)", shown) == found(r"histories=\d+ seed=(\d+)", shown)


@pytest.mark.slow
def test_the_marker_counts_less_than_call_and_command_line(tmp_path: Path) -> None:
    marked = RIGHT.replace(
        "    def test", "    import pytest\n\n    @pytest.mark.crash_everywhere(pairs=9, seed=3)\n    def test"
    )
    shown = run(tmp_path, marked, "-rP", "--strict-markers")
    assert "seed=3 pairs=2" in shown
    shown = run(tmp_path, marked.replace(", pairs=2", ""), "-rP", "--crash-pairs=1")
    assert "seed=3 pairs=1" in shown


@pytest.mark.slow
def test_parts_run_in_parallel_and_make_up_the_whole(tmp_path: Path) -> None:
    parts = RIGHT.replace(
        "    def test", "    import pytest\n\n    @pytest.mark.crash_everywhere(parts=3)\n    def test"
    )
    shown = run(tmp_path, parts, "-rP", "-n", "2")
    assert "3 passed" in shown
    whole = crash_everywhere(Asking, inputs(2), key="id", outside=outside, pairs=2)
    # Each part begins with the history without a crash.
    assert int(found(r"crash_everywhere: (\d+) histories", shown)) == whole.cases + 2


@pytest.mark.slow
def test_a_failure_shows_the_report_and_how_to_run_it_alone(tmp_path: Path) -> None:
    test = RIGHT.replace("(Asking, inputs(2)", "(ReconcilesBlindly, inputs(3)")
    shown = run(tmp_path, test, "--crash-seed=5", code=1)
    assert "said DidNotHappen()" in shown
    assert "1 agents failed" in shown
    assert "dalsegno/testing/crash.py" not in shown, "the traceback shows more than the test"
    again = found(r"pytest (test_it.py::test_right --crash-seed 5 --crash-inputs 1 --crash-case '[a-z]+ \d+')", shown)
    options = [part.strip("'") for part in re.findall(r"'[^']+'|\S+", again)][1:]
    alone = run(tmp_path, test, *options, code=1)
    assert found(r"(case '.*)", alone) == found(r"(case '.*)", shown)
    assert "crash_everywhere: 1 histories" in alone


@pytest.mark.slow
def test_a_terminal_sees_progress_and_others_do_not(tmp_path: Path) -> None:
    assert " of " not in run(tmp_path, RIGHT).split("----")[0]
    for options, seen in ([], True), (["-q"], False):
        shown = in_terminal(tmp_path, *options)
        assert bool(re.search(r"crash_everywhere: \d+ of \d+ histories", shown)) is seen, shown
        assert "1 passed" in shown


def in_terminal(folder: Path, *options: str) -> str:
    parent, child = pty.openpty()
    with subprocess.Popen(
        command(folder, *options, "test_it.py"),
        cwd=folder,
        env=environment() | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
    ):
        os.close(child)
        shown = b""
        while True:
            try:
                read = os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
            if not read:
                break
            shown += read
    os.close(parent)
    return shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--crash-pairs=-1", "--crash-kills=many", "--crash-seed=odd"])
def test_wrong_options_are_refused(tmp_path: Path, option: str) -> None:
    assert option.split("=")[0] in run(tmp_path, RIGHT, option, code=4)


@pytest.mark.slow
def test_parts_without_the_fixture_are_refused(tmp_path: Path) -> None:
    test = """
    import pytest

    @pytest.mark.crash_everywhere(parts=2)
    def test_it():
        pass
    """
    assert "has parts=2, and no fixture crash_everywhere" in run(tmp_path, test, code=2)


def part(index: int, of: int) -> CrashReport:
    return crash_everywhere(Asking, inputs(1), key="id", outside=outside, pairs=5, part=(index, of))


def test_the_parts_of_a_campaign_make_up_the_whole() -> None:
    whole = crash_everywhere(Asking, inputs(1), key="id", outside=outside, pairs=5)
    parts = [part(index, 3) for index in range(3)]
    assert sum(each.cases - 1 for each in parts) == whole.cases - 1
    assert sum(each.pairs_run for each in parts) == whole.pairs_run == 5
    assert sum(each.pairs_possible for each in parts) == whole.pairs_possible
    assert str(parts[1]).startswith("part 1 of 3")


@pytest.mark.parametrize("wrong", [(3, 3), (-1, 2), (0, 0), 1, (0, 1, 2)])
def test_a_wrong_part_is_refused(wrong: object) -> None:
    with pytest.raises(DefinitionError, match="part="):
        crash_everywhere(Asking, inputs(1), key="id", part=wrong)  # type: ignore[arg-type]
