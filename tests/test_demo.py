"""``dalsegno demo`` kills real processes, counts what really happened, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dalsegno.demo import show
from dalsegno.demo.lives import KillPoint, Life, LineCounter, plan, run_lives
from dalsegno.demo.measure import Counts, measure
from dalsegno.demo.world import CALLS, IN_FLIGHT, MAILS, MEMORY, PROGRESS, QUESTIONS, RESULTS, load_reviews
from dalsegno.errors import DalSegnoError

PATIENCE = 60.0
COMMAND = [sys.executable, "-W", "error", "-m", "dalsegno", "demo"]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=2 * PATIENCE)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------ the parts of it


def test_the_sample_is_a_stream_of_different_reviews_of_a_dozen_products() -> None:
    reviews = load_reviews()
    assert [review["number"] for review in reviews] == list(range(1, len(reviews) + 1))
    assert 120 <= len(reviews) <= 200
    assert len({review["review"] for review in reviews}) == len(reviews)
    assert len({review["id"] for review in reviews}) == IN_FLIGHT == 12


@pytest.mark.parametrize("kills", [1, 5, 20])
def test_a_seed_chooses_the_kill_points_and_all_of_them_find_work(kills: int) -> None:
    plans = [plan(kills, seed, 168) for seed in range(200)]
    assert plans[7] == plan(kills, 7, 168)
    assert len({tuple(points) for points in plans}) > 20
    for points in plans:
        assert len(points) == kills
        assert points[0].at_mail
        assert all(point.calls > IN_FLIGHT for point in points)
        assert sum(point.calls - IN_FLIGHT for point in points) <= 0.75 * 168


def test_lines_are_counted_from_where_the_file_was(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    missing = LineCounter(path)
    assert missing.new() == 0
    path.write_text("a\nb\n")
    assert missing.new() == 2
    later = LineCounter(path)
    with path.open("a") as file:
        file.write("c\nd")
    assert (missing.new(), later.new()) == (3, 1)
    with path.open("a") as file:
        file.write("\n")
    assert (missing.new(), later.new()) == (4, 2)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def perfect_run(folder: Path) -> None:
    """The files of a run in which everything happened once; every third review has a bad score."""
    reviews = load_reviews()
    scores = {review["number"]: 2 if review["number"] % 3 == 0 else 4 for review in reviews}
    mails = [{"number": number, "call": str(number)} for number, score in scores.items() if score == 2]
    write_lines(folder / MAILS, mails)
    write_lines(folder / CALLS, [{}] * (len(reviews) + len(mails)))
    write_lines(folder / RESULTS, [{"number": number, "score": score} for number, score in scores.items()])
    (folder / MEMORY).write_text(json.dumps(Counter(review["id"] for review in reviews)))


def test_a_perfect_run_is_measured_as_such(tmp_path: Path) -> None:
    perfect_run(tmp_path)
    assert measure(tmp_path, [Life(1, 0, 224, 56, at_mail=False)]) == Counts(
        messages=168,
        kills=0,
        calls_executed=224,
        calls_replayed=0,
        in_doubt=0,
        once_calls=56,
        once_repeated=0,
        outputs=168,
        outputs_repeated=0,
        outputs_lost=0,
        contradictions=0,
        memory_wrong=0,
    )


def test_every_kind_of_fault_is_measured(tmp_path: Path) -> None:
    perfect_run(tmp_path)
    results = [json.loads(line) for line in (tmp_path / RESULTS).read_text().splitlines()]
    changed = [{"number": 3, "score": 5}, {"number": 4, "score": 1}]
    write_lines(tmp_path / RESULTS, [*results[:-2], *changed])
    with (tmp_path / MAILS).open("a") as mails:
        mails.write('{"number": 6, "call": "6"}\n')
    memory = json.loads((tmp_path / MEMORY).read_text())
    memory["mug-harbour"] += 1
    del memory["tent-kestrel"]
    (tmp_path / MEMORY).write_text(json.dumps(memory | {"no-such-product": 1}))
    write_lines(tmp_path / QUESTIONS, [{"call": "6"}, {"call": "6"}, {"call": "9"}])
    write_lines(tmp_path / PROGRESS, [{"pid": pid, "replayed": n} for pid, n in [(1, 0), (1, 4), (2, 0), (2, 3)]])
    lives = [Life(1, -9, 9, 1, at_mail=True), Life(2, -9, 9, 1, at_mail=False), Life(3, 0, 9, 1, at_mail=False)]
    counts = measure(tmp_path, lives)
    assert (counts.kills, counts.calls_replayed, counts.in_doubt) == (2, 7, 2)
    assert (counts.once_calls, counts.once_repeated) == (57, 1)
    assert (counts.outputs, counts.outputs_repeated, counts.outputs_lost) == (168, 2, 2)
    # The mail of the lost review 168 contradicts nothing: there is no result to compare it with.
    assert (counts.contradictions, counts.memory_wrong) == (2, 3)
    assert counts.faults == 10


# --------------------------------------------------------------------------------------------------- the whole of it


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_through_all_kills_nothing_is_repeated_or_lost_and_the_ordinary_script_is_not_as_lucky(seed: int) -> None:
    done = demo("--json", "--seed", str(seed), "--kills", "4")
    assert (done.returncode, done.stderr) == (0, "")
    ours = json.loads(done.stdout)
    plain = ours.pop("without")
    for counts in (ours, plain):
        assert counts["messages"] == len(load_reviews())
        assert counts["kills"] == 4
        assert [death["returncode"] for death in counts["deaths"]] == [-signal.SIGKILL] * 4
        assert len({death["pid"] for death in counts["deaths"]}) == 4
        assert all(death["calls"] > IN_FLIGHT for death in counts["deaths"])
    assert ours["seed"] == seed
    faults = ("once_repeated", "outputs_repeated", "outputs_lost", "contradictions", "memory_wrong")
    assert {name: ours[name] for name in faults} == dict.fromkeys(faults, 0)
    assert ours["outputs"] == ours["messages"]
    assert ours["calls_replayed"] > 0
    # At most what was in flight at a kill is executed again.
    needed = ours["messages"] + ours["once_calls"]
    assert needed <= ours["calls_executed"] <= needed + 4 * IN_FLIGHT
    assert (plain["calls_replayed"], plain["in_doubt"]) == (0, 0)
    assert plain["once_repeated"] > 0
    assert plain["outputs_repeated"] > 0
    # It saves when the work is done, and says so: it repeats and does not lose.
    assert (plain["outputs_lost"], plain["memory_wrong"]) == (0, 0)
    assert plain["calls_executed"] > ours["calls_executed"]


@pytest.mark.slow
def test_piped_it_prints_plain_text_and_keeps_the_files_where_it_is_told_to(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = demo("--kills", "1", "--seed", "5", "--keep", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "random stand-in" in done.stdout
    assert "So a kill makes it lose nothing, and do again what it had not saved." in " ".join(done.stdout.split())
    assert done.stdout.count("(code -9)") == 2
    assert "Through the kill, every mail was sent once and every result written once." in done.stdout
    assert "dalsegno demo --seed 5 --kills 1" in done.stdout
    for kind in ("with", "without"):
        assert {CALLS, MAILS, RESULTS, MEMORY} <= {path.name for path in (folder / kind).iterdir()}
    again = demo("--keep", str(folder))
    assert again.returncode == 2
    assert "not an empty folder" in again.stderr


def run_show(folder: Path) -> int:
    return show.show_demo(kills=1, seed=1, keep=folder, as_json=False)


@pytest.mark.slow
def test_a_kill_that_does_not_happen_is_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "plan", lambda kills, seed, messages: [KillPoint(10**9, at_mail=False)])
    assert run_show(tmp_path / "kept") == 1
    assert "Only 0 of 1 kills happened" in capsys.readouterr().out


@pytest.mark.slow
def test_faults_of_the_run_with_the_library_are_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_and_repeat_a_mail(kind: str, folder: Path, *args: Any, **kwargs: Any) -> list[Life]:
        lives = run_lives(kind, folder, *args, **kwargs)
        sent = (folder / MAILS).read_text().splitlines()
        write_lines(folder / MAILS, [json.loads(mail) for mail in [*sent, sent[0]]])
        return lives

    monkeypatch.setattr(show, "run_lives", run_and_repeat_a_mail)
    assert run_show(tmp_path / "kept") == 1
    assert "This is a bug" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_fails_by_itself_is_an_error_that_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('planted')\n")
    with pytest.raises(DalSegnoError, match=r"ended by itself with code 1:\n(?s:.*)planted"):
        run_show(tmp_path / "kept")


# ------------------------------------------------------------------------------------------------ nothing stays behind


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@contextmanager
def at_work(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A demo that has its temporary files in *folder* and a child at work; yields both processes."""
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            wait_until(lambda: any(path.read_text() for path in folder.glob(f"*/with/{CALLS}")))
            (calls,) = folder.glob(f"*/with/{CALLS}")
            child = json.loads(calls.read_text().splitlines()[0])["pid"]
            yield parent, child
        finally:
            parent.kill()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_child_too_and_removes_the_files(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with at_work(tmp_path) as (parent, child):
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=PATIENCE)
        assert (parent.returncode, errors) == (code, "")
        assert not alive(child)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_the_child_does_not_outlive_a_demo_that_is_killed(tmp_path: Path) -> None:
    with at_work(tmp_path) as (parent, child):
        parent.kill()
        parent.communicate(timeout=PATIENCE)
        wait_until(lambda: not alive(child))
