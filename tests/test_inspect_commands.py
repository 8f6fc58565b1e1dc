"""The commands that look into a store and decide: what they say, their exit codes, and that they disturb no job."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from dalsegno import LocalRunner, RunnerContext
from dalsegno.cipher import PayloadCipher, is_sealed
from dalsegno.core import codec, decisions
from dalsegno.core.decisions import WAIT, Resolved, Retried, Signalled
from dalsegno.core.identity import key_bytes
from dalsegno.core.records import Record, encode_body
from dalsegno.inspect import cli, commands
from dalsegno.operate.views import Lens, call_id
from dalsegno.runners import parking
from dalsegno.stores.base import Decision
from dalsegno.stores.default import default_store_path
from dalsegno.stores.encrypting import EncryptingStore
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.stores.sqlite_inspector import SqliteInspector
from dalsegno.testing.stores import ODD_KEYS, step
from tests.helpers import PATIENCE, Scripted, Tools, crashed, run, until

JOB = "shop"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def dalsegno(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process."""

    def command(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["dalsegno", *args])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        assert "\x1b" not in out + err
        code = caught.value.code
        return Result(code if isinstance(code, int) else 0 if code is None else 1, out, err)

    return command


# --- what is recorded ---


class Recorded:
    """Records of one message, made step by step."""

    def __init__(self, key: Any, message: str) -> None:
        self.key, self.message, self.task = key_bytes(key), message, f"{int(message):032x}"
        self.records: list[Record] = []

    def step(self, kind: str, **fields: Any) -> Recorded:
        if not self.records:
            fields["task"] = {"action": "buy", "event": "InputEvent", "sender": "", "index": 0, "content": "c"}
        self.records.append(Record(self.key, self.message, self.task, encode_body(kind, fields)))
        return self

    def call(self, kind: str, number: int, name: str, *args: Any, **fields: Any) -> Recorded:
        return self.step(kind, call=number, name=name, args_digest=str(number), effect="once", args=[*args], **fields)

    def id(self, number: int = 0) -> str:
        return call_id(self.key, self.message, self.task, number)


def in_doubt(key: Any = "A", message: str = "0") -> Recorded:
    return (
        Recorded(key, message)
        .call("called", 0, "shop:ask", "how much?", result={"n": 4})
        .call("requested", 1, "shop:charge", key, kwargs={"n": 4})
        .step("parked", reason="nobody can tell whether it happened", why="in_doubt", call=1)
    )


def waiting(key: Any = "W", message: str = "1", name: str = "approved") -> Recorded:
    return (
        Recorded(key, message)
        .call("requested", 0, WAIT, name, kwargs={"until": "2026-12-01T00:00:00+00:00"})
        .step("parked", reason=f"waits for the signal {name!r}", why="waiting", call=0)
    )


def failed(key: Any = "F", message: str = "2", why: str = "failed") -> Recorded:
    return Recorded(key, message).step("parked", reason="ValueError: card refused", why=why)


def record(*messages: Recorded, job: str = JOB, path: Path | None = None) -> None:
    async def main() -> None:
        store = SqliteStore(path or default_store_path(job))
        await store.open(job, "the test")
        await store.put([each for message in messages for each in message.records])
        await store.close()

    asyncio.run(main())


@contextmanager
def running(job: str = JOB) -> Iterator[Callable[[], list[Decision]]]:
    """The job is owned by this process; gives what its owner learns of decisions."""
    with asyncio.Runner() as loop:
        store = SqliteStore(default_store_path(job))
        loop.run(store.open(job, "the test"))
        try:
            yield lambda: [made for _, made in loop.run(store.decisions(0))]
        finally:
            loop.run(store.close())


def decided(job: str = JOB) -> list[decisions.Answer]:
    with SqliteStore(default_store_path(job)).inspect() as inspector:
        return [decisions.load(made.target, made.body) for made in inspector.decisions(job)]


# --- runs ---


def test_without_any_job_runs_says_so_and_makes_nothing(dalsegno: Command, folder: Path) -> None:
    shown = dalsegno("runs")
    assert (shown.code, shown.err) == (0, "")
    assert "no job has run in this folder" in shown.out
    assert dalsegno("runs", "--json").json == {"jobs": [], "failures": []}
    assert list(folder.iterdir()) == []


def test_runs_lists_the_jobs_of_all_stores_and_says_which_run(dalsegno: Command) -> None:
    record(in_doubt(), waiting())
    record(job="a.checkpoints")
    record(job="second", path=default_store_path(JOB))
    run(LocalRunner(Scripted(lambda value, ctx: asyncio.sleep(0)), job="ran"), [1])  # has a file of checkpoints
    with running("a.checkpoints"):
        shown = dalsegno("runs")
        jobs = {job["name"]: job for job in dalsegno("runs", "--json").json["jobs"]}
    assert (shown.code, shown.err) == (0, "")
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["job", "running", "messages", "opened", "since"]
    assert [line[0] for line in lines[1:]] == ["a.checkpoints", "ran", "second", "shop"]
    assert lines[1][1:4] == ["pid", str(os.getpid()), "0"]
    assert lines[4][1:4] == ["no", "2", "1"]
    assert [name for name, job in jobs.items() if job["running"]] == ["a.checkpoints"]
    assert jobs["shop"] | {"since": "", "identity": ""} == {
        "store": "sqlite:///.dalsegno/shop.db",
        "name": "shop",
        "identity": "",
        "epoch": 1,
        "running": False,
        "owner": "the test",
        "pid": os.getpid(),
        "host": jobs["ran"]["host"],
        "since": "",
        "pruned_through": 0,
        "messages": 2,
    }


def test_a_file_that_cannot_be_read_does_not_hide_the_others(dalsegno: Command) -> None:
    record(in_doubt())
    Path(".dalsegno/foreign.db").write_text("name,age\n" * 1000)
    shown = dalsegno("runs")
    assert shown.code == 1
    assert "shop" in shown.out
    assert "foreign.db is not an SQLite database" in shown.out.replace("\n", "")
    shown = dalsegno("runs", "--json")
    assert (len(shown.json["jobs"]), len(shown.json["failures"])) == (1, 1)
    shown = dalsegno("runs", "--store", "sqlite:///.dalsegno/foreign.db")
    assert (shown.code, shown.out) == (1, "")
    assert "RecordError" in shown.err


@pytest.mark.parametrize("args", [("runs",), ("show", JOB)])
def test_a_store_in_memory_cannot_be_looked_into(dalsegno: Command, args: tuple[str, ...]) -> None:
    shown = dalsegno(*args, "--store", "memory://")
    assert shown.code == 2
    assert "in the memory of the process that runs the job" in shown.err


@pytest.mark.parametrize("args", [("show",), ("retry", "--all"), ("resolve", "abcd", "--did-not-happen")])
def test_a_job_that_is_not_there_is_named_and_nothing_is_made(
    dalsegno: Command, folder: Path, args: tuple[str, ...]
) -> None:
    shown = dalsegno(args[0], "nobody", *args[1:])
    assert (shown.code, shown.out) == (1, "")
    assert "there is no file '.dalsegno/nobody.db', where job 'nobody' has its records" in shown.err
    shown = dalsegno(args[0], "nobody", *args[1:], "--store", "sqlite:///none.db")
    assert shown.code == 1
    assert "none.db: there is no such file" in shown.err
    assert list(folder.iterdir()) == []
    record()
    shown = dalsegno(args[0], "nobody", *args[1:], "--store", "sqlite:///.dalsegno/shop.db")
    assert shown.code == 1
    assert "has no job 'nobody'; its jobs are 'shop'" in shown.err


# --- show ---


def test_messages_are_listed_with_what_is_to_be_decided(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(
        doubt, waiting(), failed(), failed("G", "3", "attempts"), Recorded("H", "4").call("called", 0, "f", result=1)
    )
    shown = dalsegno("show", JOB)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0] == "job shop: not running; 5 messages on record"
    assert [line.split() for line in lines[1:]] == [
        ["key", "message", "state", "calls", "about"],
        ['"A"', "0", "in-doubt", "2", doubt.id(1)[:12], "shop:charge"],
        ['"W"', "1", "waiting", "1", "signal", "approved"],
        ['"F"', "2", "failed", "0", "ValueError:", "card", "refused"],
        ['"G"', "3", "attempts", "0", "ValueError:", "card", "refused"],
        ['"H"', "4", "in-flight", "1"],
    ]
    listed = dalsegno("show", JOB, "--json").json
    assert (listed["job"]["name"], listed["more"], len(listed["messages"])) == ("shop", False, 5)
    assert listed["messages"][0] == {
        "key": "A",
        "message": "0",
        "state": "in-doubt",
        "actions": 1,
        "calls": 2,
        "reason": "nobody can tell whether it happened",
        "questions": [{"kind": "resolve", "name": "shop:charge", "call": doubt.id(1), "answer": None}],
    }


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--state", "parked"], "0123"),
        (["--state", "in-doubt"], "0"),
        (["--state", "waiting"], "1"),
        (["--state", "failed"], "2"),
        (["--state", "attempts"], "3"),
        (["--state", "in-flight"], "4"),
        (["--state", "done"], ""),
        (["--key", "F"], "2"),
        (["--key", '"F"', "--key-json"], "2"),
        (["--key", "F", "--state", "waiting"], ""),
        (["--limit", "2"], "01"),
        (["--limit", "1", "--state", "failed"], "2"),
    ],
)
def test_messages_are_chosen_by_state_and_key(dalsegno: Command, options: list[str], messages: str) -> None:
    record(
        in_doubt(),
        waiting(),
        failed(),
        failed("G", "3", "attempts"),
        Recorded("H", "4").call("called", 0, "f", result=1),
    )
    listed = dalsegno("show", JOB, *options, "--json").json
    assert "".join(message["message"] for message in listed["messages"]) == messages
    assert listed["more"] is (options == ["--limit", "2"])
    assert ("no such message" in dalsegno("show", JOB, *options).out) is (not messages)


def test_more_than_the_limit_is_said(dalsegno: Command) -> None:
    record(*(failed(number, str(number)) for number in range(60)))
    shown = dalsegno("show", JOB)
    assert len(shown.out.splitlines()) == 2 + 50 + 1
    assert shown.out.splitlines()[-1].startswith("and more: --limit 500 shows more of them")
    assert "more" not in dalsegno("show", JOB, "--limit", "60").out
    assert "and more" in dalsegno("show", JOB, "--limit", "59").out
    assert dalsegno("show", JOB, "--limit", "0").code == 2


def test_one_message_is_shown_in_full(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt, failed())
    shown = dalsegno("show", JOB, "0")
    assert (shown.code, shown.err) == (0, "")
    first, second = doubt.id(0)[:12], doubt.id(1)[:12]
    assert shown.out.splitlines() == [
        "job shop: not running; 2 messages on record",
        'key "A", message 0: in-doubt',
        "  nobody can tell whether it happened",
        f"  to decide: dalsegno resolve shop {second} --happened JSON",
        f"  to decide: dalsegno resolve shop {second} --did-not-happen",
        "",
        "action buy for InputEvent, not done",
        f"  {first}  shop:ask  once, completed",
        '    ("how much?")',
        '    -> {"n": 4}',
        f"  {second}  shop:charge  once, in-doubt",
        '    ("A", n=4)',
    ]
    message = dalsegno("show", JOB, "0", "--json").json["message"]
    assert message["tasks"][0]["calls"][1] == {
        "call": doubt.id(1),
        "number": 1,
        "name": "shop:charge",
        "effect": "once",
        "status": "in-doubt",
        "attempt": 1,
        "args": ["A"],
        "kwargs": {"n": 4},
    }


def test_calls_that_changed_code_gave_up_are_shown_as_such(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt.step("given_up", calls=[0], before=2))
    lines = dalsegno("show", JOB, "0").out.splitlines()
    assert f"  {doubt.id(0)[:12]}  shop:ask  once, completed, given up" in lines
    calls = dalsegno("show", JOB, "0", "--json").json["message"]["tasks"][0]["calls"]
    assert [call.get("given_up") for call in calls] == [True, None]


def test_one_call_is_shown_without_cuts(dalsegno: Command) -> None:
    long = Recorded("A", "0").call("called", 0, "f", "a" * 2000, result="b" * 2000)
    long.call("called", 1, "g", error=codec.encode_exception(ValueError("no")))
    record(long)
    assert "…" in dalsegno("show", JOB, "0").out
    shown = dalsegno("show", JOB, long.id(0)[:8])
    assert shown.code == 0
    assert "".join(shown.out.split()).count("a" * 2000) == 1
    assert "g" not in [line.split()[1] for line in shown.out.splitlines() if line.startswith(f"  {long.id(1)[:4]}")]
    assert "raised ValueError: no" in dalsegno("show", JOB, long.id(1)).out
    call = dalsegno("show", JOB, long.id(0)[:8], "--json").json["call"]
    assert (call["key"], call["message"], call["state"], call["action"]) == ("A", "0", "in-flight", "buy")
    assert (call["call"], call["result"]) == (long.id(0), "b" * 2000)


def test_memory_events_and_decisions_of_a_message_are_shown(dalsegno: Command) -> None:
    done = Recorded("A", "0").call("called", 0, "f", result=None)
    memory = [{"op": "set", "path": ["user", "name"], "value": "X"}, {"op": "delete", "path": ["a"]}]
    done.step("done", memory=memory, sensory=[{"op": "create", "path": ["b"]}], events=[{"e": 1}], last=True)
    record(done, in_doubt("B", "1"))
    out = dalsegno("show", JOB, "0").out
    for line in ('memory: set user.name = "X"', "memory: delete a", "sensory: create b", 'sent: {"e": 1}', "-> null"):
        assert f"  {line}\n" in out
    assert dalsegno("resolve", JOB, in_doubt("B", "1").id(1), "--did-not-happen").code == 0
    out = dalsegno("show", JOB, "1").out
    assert "  decided: did not happen\n" in out
    assert "decided about call number 1 in attempt 1: did not happen\n" in out


def test_what_is_not_on_record_is_named_with_what_is(dalsegno: Command) -> None:
    record(in_doubt(), failed())
    for what, message in (
        (
            "9",
            "job 'shop' has no message '9' on record: it is done and was pruned, or never was; the messages are 0, 2",
        ),
        ("abcd", "job 'shop' has no call 'abcd' on record"),
        ("nothing", "job 'shop' has no message 'nothing' on record"),
    ):
        shown = dalsegno("show", JOB, what)
        assert (shown.code, shown.out) == (1, "")
        assert message in shown.err
    shown = dalsegno("show", JOB, "--key", "Z")
    assert shown.code == 1
    assert 'nothing is recorded of a key \'Z\'; the keys are "A", "F"' in shown.err


def test_a_message_of_several_keys_needs_the_key(dalsegno: Command) -> None:
    record(failed("A", "7"), failed("B", "7"))
    shown = dalsegno("show", JOB, "7")
    assert shown.code == 1
    assert "2 keys of job 'shop' have a message '7': say with --key which one is meant; the keys are" in shown.err
    assert 'key "B", message 7' in dalsegno("show", JOB, "7", "--key", "B").out


def test_a_message_whose_id_looks_like_a_call_is_the_message(dalsegno: Command) -> None:
    record(failed("A", "12345678"))
    assert 'key "A", message 12345678: failed' in dalsegno("show", JOB, "12345678").out


def test_a_beginning_of_several_calls_is_ambiguous(dalsegno: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dalsegno.operate.lookup.call_id", lambda key, message, task, number: f"{'abcdef' * 3}{number:014x}"
    )
    record(in_doubt())
    shown = dalsegno("show", JOB, "abcdef")
    assert shown.code == 1
    assert "'abcdef' is the beginning of 2 calls of job 'shop': give more digits; they are" in shown.err
    assert f"{'abcdef' * 3}{0:014x}, {'abcdef' * 3}{1:014x}" in shown.err


def test_a_damaged_message_is_listed_and_the_others_can_be_decided(dalsegno: Command) -> None:
    broken = Recorded("B", "5")
    broken.records = [Record(broken.key, "5", "t", b"\xff{"), Record(b"\xff", "6", "t", b"[]")]
    doubt = in_doubt()
    record(broken, doubt, failed())
    out = dalsegno("show", JOB).out
    assert out.count("damaged") >= 2
    shown = dalsegno("show", JOB, "5")
    assert shown.code == 1
    assert "RecordError: record of key \"B\", message '5'" in shown.err
    assert [each["message"] for each in dalsegno("show", JOB, "--state", "damaged", "--json").json["messages"]] == [
        "5",
        "6",
    ]
    assert dalsegno("resolve", JOB, doubt.id(1), "--did-not-happen").code == 0
    assert dalsegno("retry", JOB, "--all").code == 0


def test_odd_keys_do_not_break_the_output(dalsegno: Command) -> None:
    messages = []
    for number, key in enumerate(
        [*ODD_KEYS, *(key_bytes(text) for text in ("\x1b[31m", "[red]x[/red]", ":smile:", "\u202e"))]
    ):
        message = failed("", str(number))
        message.records = [each._replace(key=key) for each in message.records]
        messages.append(message)
    record(*messages)
    shown = dalsegno("show", JOB, "--limit", "100")
    assert shown.code == 0
    assert max(map(cell_len, shown.out.splitlines())) <= 80
    assert "[red]x[/red]" in shown.out
    assert "\u202e" not in shown.out
    assert len(dalsegno("show", JOB, "--limit", "100", "--json").json["messages"]) == len(messages)
    assert dalsegno("retry", JOB, "--all").code == 0
    for number in range(len(messages)):
        assert dalsegno("show", JOB, str(number)).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_piped_output_is_plain(encoding: str) -> None:
    record(in_doubt("\x1b[31mé😀\n"), failed("😀"))
    for args in (["runs"], ["show", JOB], ["show", JOB, "0"]):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "dalsegno", *args],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": encoding, "TERM": "xterm-256color"},
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\x1b" not in done.stdout
        assert all(line == line.rstrip() for line in done.stdout.splitlines())


# --- resolve ---


@pytest.mark.parametrize(
    ("options", "answer", "said"),
    [
        (["--happened", '{"id": 42}'], {"id": 42}, 'happened {"id": 42}'),
        (["--happened", "null"], None, "happened null"),
        (["--happened", '""'], "", 'happened ""'),
        (["--happened", str(2**70)], 2**70, "happened "),
        (["--happened", '{"$": "tuple", "v": [1]}'], {"$": "tuple", "v": [1]}, "happened "),
        (["--did-not-happen"], ..., "did not happen"),
    ],
)
def test_a_call_in_doubt_is_resolved(dalsegno: Command, options: list[str], answer: Any, said: str) -> None:
    doubt = in_doubt()
    record(doubt)
    shown = dalsegno("resolve", JOB, doubt.id(1)[:8], *options)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"decided: {said}")
    assert shown.out.endswith("run the job again to go on\n")
    assert shown.out.count(doubt.id(1)[:12]) == 1
    (made,) = decided()
    assert isinstance(made, Resolved)
    assert made[:4] == (doubt.task, 1, 1, answer is not ...)
    if answer is not ...:
        assert codec.from_tree(made.result) == answer


def test_a_running_job_learns_of_a_decision(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt)
    with running() as learned:
        shown = dalsegno("resolve", JOB, doubt.id(1), "--happened", "1")
        assert shown.code == 0
        assert f"the running job (pid {os.getpid()}) takes it up within a second" in shown.out
        assert learned() == [Decision(doubt.key, "0", f"resolve/{doubt.task}/1/1", b'{"v":1,"happened":1}')]


def test_what_is_decided_stays_decided(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt)
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "42").code == 0
    for options, code in (
        (["--happened", "42"], 0),
        (["--happened", "42.0"], 1),
        (["--happened", '"42"'], 1),
        (["--did-not-happen"], 1),
    ):
        shown = dalsegno("resolve", JOB, doubt.id(1), *options)
        assert shown.code == code
        assert "already decided: happened 42, nothing changed" in shown.out
        assert "run the job" not in shown.out
        again = dalsegno("resolve", JOB, doubt.id(1), *options, "--json")
        assert (again.code, again.json["written"]) == (code, 0)
        where = {"key": "A", "message": "0", "kind": "resolve", "name": "shop:charge", "call": doubt.id(1)}
        outcome = {"answer": {"happened": 42}, "written": False, "same": code == 0}
        assert again.json["decisions"] == [where | outcome]
    assert len(decided()) == 1


def test_true_is_not_one(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt)
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "true").code == 0
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "1").code == 1
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "true").code == 0


def test_a_damaged_decision_is_no_answer_and_no_traceback(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt)
    with SqliteStore(default_store_path(JOB)).inspect() as inspector:
        assert inspector.decide(JOB, Decision(doubt.key, "0", f"resolve/{doubt.task}/1/1", b"{"))
    shown = dalsegno("resolve", JOB, doubt.id(1), "--did-not-happen")
    assert shown.code == 1
    assert "already decided: unreadable" in shown.out
    assert "unreadable" in dalsegno("show", JOB).out
    assert "unreadable" in dalsegno("show", JOB, "0").out


def test_only_a_call_in_doubt_can_be_resolved(dalsegno: Command) -> None:
    doubt, signal = in_doubt(), waiting()
    record(doubt, signal)
    for call in (doubt.id(0), signal.id(0)):
        shown = dalsegno("resolve", JOB, call, "--did-not-happen")
        assert shown.code == 1
        assert f"the call {call[:12]} of job 'shop' is not in doubt, so there is nothing to resolve" in shown.err
        assert f"in doubt are {doubt.id(1)[:12]} (shop:charge)" in shown.err
    assert decided() == []


def test_an_attempt_that_came_after_the_answer_is_a_new_question(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt)
    assert dalsegno("resolve", JOB, doubt.id(1), "--did-not-happen").code == 0
    later = Recorded("A", "0")
    later.records = doubt.records[:1]
    later.call("requested", 1, "shop:charge", "A", kwargs={"n": 4}, attempt=2, answer="did_not_happen")
    taken_up = Recorded("A", "0")
    taken_up.records = later.records[1:]
    record(taken_up)
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "1").code == 1  # it is being made
    again = Recorded("A", "0")
    again.records = later.step("parked", reason="in doubt again", why="in_doubt", call=1).records[2:]
    record(again)
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "1").code == 0
    assert [answer[:4] for answer in decided()] == [(doubt.task, 1, 1, False), (doubt.task, 1, 2, True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say either --happened JSON"),
        (["--happened", "1", "--did-not-happen"], "say either --happened JSON"),
        (["--happened", "paid"], "--happened is JSON, which 'paid' is not"),
        (["--happened", "NaN"], "--happened is JSON, which 'NaN' is not"),
        (["--happened", ""], "--happened is JSON, which '' is not"),
    ],
)
def test_wrong_usage_ends_with_2_and_decides_nothing(dalsegno: Command, options: list[str], message: str) -> None:
    doubt = in_doubt()
    record(doubt)
    shown = dalsegno("resolve", JOB, doubt.id(1), *options)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert decided() == []


def test_too_few_digits_are_no_call(dalsegno: Command) -> None:
    record(in_doubt())
    for text in ("abc", "xyz0", "", "a" * 33):
        shown = dalsegno("resolve", JOB, text, "--did-not-happen")
        assert shown.code == 1
        assert f"{text!r} is not the id of a call" in shown.err


def test_all_calls_that_were_in_flight_together_can_be_resolved(dalsegno: Command) -> None:
    three = Recorded("A", "0")
    for number in range(3):
        three.call("requested", number, "shop:charge", number)
    three.step("parked", reason="nobody can tell", why="in_doubt", call=2)
    record(three)
    for number in range(3):
        assert dalsegno("resolve", JOB, three.id(number), "--happened", str(number)).code == 0
    assert [answer[:5] for answer in decided()] == [(three.task, number, 1, True, number) for number in range(3)]


# --- retry ---


@pytest.mark.parametrize("why", ["failed", "attempts"])
def test_a_failed_message_is_retried_once_per_failure(dalsegno: Command, why: str) -> None:
    message = failed(why=why)
    record(message)
    for code, said in ((0, 'decided: retry, for key "F", message 2'), (0, "already decided: retry, nothing changed")):
        shown = dalsegno("retry", JOB, "2")
        assert (shown.code, shown.err) == (code, "")
        assert shown.out.startswith(said)
    again = Recorded("F", "2")
    again.records = failed(why=why).step("parked", reason="again", why=why).records[1:]
    record(again)
    assert dalsegno("retry", JOB, "2").out.startswith("decided: retry")
    assert decided() == [Retried(message.task, 1), Retried(message.task, 2)]


def test_all_failed_messages_are_retried(dalsegno: Command) -> None:
    record(failed("A", "1"), in_doubt("B", "2"), waiting("C", "3"), failed("D", "4", "attempts"))
    assert dalsegno("retry", JOB, "1").code == 0
    shown = dalsegno("retry", JOB, "--all")
    assert shown.code == 0
    assert [line.split(":")[0] for line in shown.out.splitlines()] == [
        "already decided",
        "decided",
        "run the job again to go on",
    ]
    assert len(decided()) == 2
    again = dalsegno("retry", JOB, "--all", "--json")
    assert (again.code, again.json["written"], len(again.json["decisions"])) == (0, 0, 2)
    assert dalsegno("retry", JOB, "--all", "--key", "D", "--json").json["decisions"][0]["message"] == "4"


def test_nothing_to_retry(dalsegno: Command) -> None:
    record(in_doubt("A", "0"))
    shown = dalsegno("retry", JOB, "--all")
    assert (shown.code, shown.out) == (0, "no message of job 'shop' failed: nothing was decided\n")
    shown = dalsegno("retry", JOB, "0")
    assert shown.code == 1
    assert (
        "message '0' of job 'shop' is not set aside as failed, so there is nothing to retry; there are none"
        in shown.err
    )
    record(failed())
    assert "failed are 2" in dalsegno("retry", JOB, "0").err
    for args in ([], ["2", "--all"]):
        shown = dalsegno("retry", JOB, *args)
        assert shown.code == 2
        assert "say which MESSAGE is to be run again, or --all" in shown.err
    assert decided() == []


# --- signal ---


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        ("W", "W"),
        ("W", '"W"'),
        (1, "1"),
        ("1", "1"),
        ("1", '"1"'),
        (("a", 1), '{"$":"tuple","v":["a",1]}'),
        (None, "null"),
        ("", ""),
        ("--x", "--x"),
    ],
)
def test_a_signal_finds_its_key(dalsegno: Command, key: Any, typed: str) -> None:
    signal = waiting(key)
    record(signal)
    shown = dalsegno("signal", JOB, "--", typed, "approved", '{"by": "me"}')
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith('decided: signal {"by": "me"}, for key ')
    assert decided() == [Signalled(signal.task, 0, {"by": "me"})]


def test_a_key_that_could_be_two_needs_to_be_json(dalsegno: Command) -> None:
    number, text = waiting(1, "1"), waiting("1", "2")
    record(number, text)
    shown = dalsegno("signal", JOB, "1", "approved", "true")
    assert shown.code == 1
    assert "'1' names 2 keys" in shown.err
    assert "--key-json" in shown.err
    assert dalsegno("signal", JOB, "1", "approved", "true", "--key-json").code == 0
    assert decided() == [Signalled(number.task, 0, True)]


def test_a_second_signal_is_always_refused(dalsegno: Command) -> None:
    record(waiting())
    assert dalsegno("signal", JOB, "W", "approved", "true").code == 0
    for value in ("true", "false"):
        shown = dalsegno("signal", JOB, "W", "approved", value)
        assert shown.code == 1
        assert "already decided: signal true, nothing changed" in shown.out
    assert len(decided()) == 1


def test_a_signal_that_nobody_waits_for_is_refused_with_those_that_are_waited_for(dalsegno: Command) -> None:
    record(waiting(), in_doubt())
    for key, name in (("W", "refused"), ("A", "approved")):
        shown = dalsegno("signal", JOB, key, name, "true")
        assert shown.code == 1
        assert f"no message of key \"{key}\" of job 'shop' waits for a signal {name!r}" in shown.err
        assert 'waited for are approved (key "W")' in shown.err
    assert dalsegno("signal", JOB, "W", "approved", "yes").code == 2
    assert decided() == []


def test_of_several_messages_that_wait_one_must_be_named(dalsegno: Command) -> None:
    record(waiting("W", "1"), waiting("W", "2"), waiting("W", "3", "other"))
    shown = dalsegno("signal", JOB, "W", "approved", "true")
    assert shown.code == 1
    assert "several messages of key \"W\" wait for the signal 'approved': say with --message which one" in shown.err
    assert dalsegno("signal", JOB, "W", "approved", "true", "--message", "2").code == 0
    assert decided() == [Signalled(waiting("W", "2").task, 0, True)]


@pytest.mark.parametrize("value", ["1e400", '{"by": [-1e400]}', "NaN", "Infinity"])
def test_a_number_that_json_does_not_have_or_a_float_does_not_hold_is_refused(dalsegno: Command, value: str) -> None:
    record(waiting())
    shown = dalsegno("signal", JOB, "W", "approved", value)
    assert shown.code == 2
    assert f"is JSON, which {value!r} is not (" in shown.err
    assert decided() == []


def test_two_waits_of_one_message_get_a_signal_each(dalsegno: Command) -> None:
    both = waiting().call("requested", 1, WAIT, "approved")
    record(both)
    for value in (1, 2):
        assert dalsegno("signal", JOB, "W", "approved", str(value)).code == 0
    assert dalsegno("signal", JOB, "W", "approved", "3").code == 1
    assert decided() == [Signalled(both.task, 0, 1), Signalled(both.task, 1, 2)]


def test_all_commands_look_through_the_lens(dalsegno: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr3t"
    doubt = Recorded("A", "0").call("called", 0, "f", secret, result=secret).call("requested", 1, "g", secret)
    doubt.step("parked", reason="nobody can tell", why="in_doubt", call=1)
    signal = waiting().call("called", 1, "f", secret, result=secret)
    hidden = [each._replace(body=each.body[::-1]) for each in doubt.records]
    doubt.records = hidden
    signal.records = [each._replace(body=each.body[::-1]) for each in signal.records]
    record(doubt, signal)

    def redact(tree: Any) -> Any:
        return json.loads(json.dumps(tree).replace(secret, "***"))

    monkeypatch.setattr(
        commands, "_lens", lambda names=(): Lens(decode=lambda record: record.body[::-1], redact=redact)
    )
    shown = [
        dalsegno("resolve", JOB, doubt.id(1), "--happened", f'"{secret}"', *as_json) for as_json in ([], ["--json"])
    ]
    shown += [dalsegno("signal", JOB, "W", "approved", f'"{secret}"')]
    for args in ([], ["0"], ["1"], [doubt.id(0)], ["--state", "parked"], ["--state", "in-flight"]):
        shown += [dalsegno("show", JOB, *args), dalsegno("show", JOB, *args, "--json")]
    for result in shown:
        assert (result.code, result.err) == (0, "")
        assert secret not in result.out
    assert sum("***" in result.out for result in shown) >= len(shown) - 2
    assert [answer[-1] for answer in decided()] == [secret, secret]


# --- a job that was really run ---


def test_a_message_that_the_runner_parked_is_found_and_resolved(dalsegno: Command) -> None:
    tools = Tools()
    tools.hang_on.add("A")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect="once")

    crashed(LocalRunner(Scripted(body), job="real"), ["A"], when=lambda: "A" in tools.hanging)
    report = run(LocalRunner(Scripted(body), job="real"), ["A"])
    assert len(report.parked) == 1
    (message,) = dalsegno("show", "real", "--state", "in-doubt", "--json").json["messages"]
    (question,) = message["questions"]
    assert question["name"].endswith("Tools.call")
    assert dalsegno("resolve", "real", question["call"], "--happened", '"done"').code == 0
    (made,) = decided("real")
    assert isinstance(made, Resolved)
    assert (made.call, made.attempt, made.result) == (0, 1, "done")
    outputs: list[Any] = []
    assert run(LocalRunner(Scripted(body), job="real"), ["A"], outputs.append).parked == []
    assert (outputs, tools.made) == (["done"], ["A"])


def test_a_message_that_failed_is_retried_by_a_running_job(dalsegno: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_LISTEN_SECONDS", 0.01)
    tools = Tools()
    tools.fail_on["A"] = ValueError("card refused")
    outputs: list[Any] = []

    async def body(value: Any, ctx: RunnerContext) -> Any:
        if value == "W":
            return await ctx.wait_for("approved")
        return await ctx.durable_execute(tools.call, value, effect="idempotent")

    async def main() -> None:
        runner = LocalRunner(Scripted(body), job="real", on_failure="park")
        job = asyncio.create_task(runner.run_async(["A", "W"], outputs.append, key=lambda value: value, wait=True))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: dalsegno("show", "real", "--state", "parked", "--json").out.count('"reason"') == 2)
            del tools.fail_on["A"]
            shown = dalsegno("retry", "real", "0")
            assert f"the running job (pid {os.getpid()}) takes it up" in shown.out
            await until(lambda: bool(outputs))
            assert dalsegno("signal", "real", "W", "approved", '"yes"').code == 0
            assert (await job).parked == []
        assert dalsegno("retry", "real", "0").code == 1

    asyncio.run(main())
    assert outputs == ["done A", "yes"]
    assert tools.made == ["A", "A"]


class Backwards(PayloadCipher):
    """Hides nothing from anybody who can read backwards."""

    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        return plain[::-1]

    def decrypt(self, sealed: bytes, bound_to: bytes) -> bytes:
        return sealed[::-1]


def test_an_encrypted_job_is_seen_and_decided_with_its_cipher(dalsegno: Command) -> None:
    doubt, failure = in_doubt(), failed()

    async def main() -> None:
        store = EncryptingStore(SqliteStore(default_store_path(JOB)), Backwards())
        await store.open(JOB, "the test")
        await store.put([*doubt.records, *failure.records])
        await store.close()

    asyncio.run(main())
    Path("keys.py").write_text("from tests.test_inspect_commands import Backwards\ncipher = Backwards()\n")
    with_cipher = ("--cipher", "keys:cipher")
    assert dalsegno("runs").code == 0
    listed = dalsegno("show", JOB, "--json")
    assert [message["state"] for message in listed.json["messages"]] == ["encrypted"] * 2
    for args in (("show", JOB, "0"), ("show", JOB, doubt.id(1)), ("retry", JOB, "2"), ("retry", JOB, "--all")):
        shown = dalsegno(*args)
        assert shown.code == 1
        assert "is encrypted" in shown.err
        assert "--cipher" in shown.err
        assert dalsegno(*args, *with_cipher).code == 0
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "42").code == 1
    assert dalsegno("resolve", JOB, doubt.id(1), "--happened", "42", *with_cipher).code == 0
    assert "happened 42" in dalsegno("show", JOB, "0", *with_cipher).out
    with SqliteStore(default_store_path(JOB)).inspect() as inspector:
        assert all(is_sealed(made.body) for made in inspector.decisions(JOB))


def test_an_encrypted_record_that_cannot_be_opened_hides_no_other(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(failed())  # in clear, where all is to be encrypted

    async def main() -> None:
        store = EncryptingStore(SqliteStore(default_store_path(JOB)), Backwards())
        await store.open(JOB, "the test")
        await store.put(doubt.records)
        await store.close()

    asyncio.run(main())
    Path("keys.py").write_text("from tests.test_inspect_commands import Backwards\ncipher = Backwards()\n")
    listed = dalsegno("show", JOB, "--json", "--cipher", "keys:cipher").json["messages"]
    assert [message["state"] for message in listed] == ["damaged", "in-doubt"]
    assert dalsegno("resolve", JOB, doubt.id(1), "--did-not-happen", "--cipher", "keys:cipher").code == 0


def test_secrets_are_not_shown(dalsegno: Command) -> None:
    secret = Recorded("A", "0").call("called", 0, "f", kwargs={"password": "s3cr3t", "motto": "s3cr3t"}, result=1)
    record(secret)
    assert dalsegno("show", JOB, "0").out.count("s3cr3t") == 1
    for args in (["0"], ["0", "--json"], [secret.id()]):
        assert "s3cr3t" not in dalsegno("show", JOB, *args, "--redact", "motto").out


def test_a_store_of_an_earlier_version_can_be_seen_and_asks_for_a_run(dalsegno: Command) -> None:
    doubt = in_doubt()
    record(doubt)
    with closing(sqlite3.connect(default_store_path(JOB))) as database, database:
        database.executescript("DROP TABLE decisions; PRAGMA user_version = 1;")
    assert "in-doubt" in dalsegno("show", JOB).out
    shown = dalsegno("resolve", JOB, doubt.id(1), "--did-not-happen")
    assert shown.code == 1
    assert "run job 'shop' once with this version, then decide again" in shown.err


def every_state() -> list[Recorded]:
    """Messages of all states, and such whose payloads look like the end of one."""
    done = Recorded("D", "10").call("called", 0, "f", result=1).step("done", last=True)
    half_done = Recorded("E", "11").call("called", 0, "f", result=1).step("done")
    taken_up = in_doubt("T", "12").call("requested", 1, "shop:charge", "T", attempt=2)
    odd = Recorded("O", "13").call(
        "called", 0, "parked", {"kind": "parked"}, "last", result={"kind": "done", "last": 1}
    )
    damaged = Recorded("B", "14").step("parked", reason="r", why="failed")
    damaged.records.append(damaged.records[0]._replace(body=b'"parked"'))
    return [in_doubt(), waiting(), failed(), done, half_done, taken_up, odd, damaged]


def test_messages_in_flight_are_those_of_the_whole_list(dalsegno: Command) -> None:
    record(*every_state())
    whole = dalsegno("show", JOB, "--json").json["messages"]
    assert len(whole) == 8
    listed = dalsegno("show", JOB, "--state", "in-flight", "--json").json["messages"]
    assert listed == [message for message in whole if message["state"] == "in-flight"]
    assert [message["message"] for message in listed] == ["11", "12", "13"]


def test_messages_in_flight_are_found_in_one_pass(dalsegno: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    record(*(failed(n, str(n)) for n in range(50)), *every_state())
    looks: list[tuple[Any, ...]] = []
    records = SqliteInspector.records

    def counted(self: SqliteInspector, *args: Any) -> Iterator[Record]:
        looks.append(args)
        return records(self, *args)

    monkeypatch.setattr(SqliteInspector, "records", counted)
    assert dalsegno("show", JOB, "--state", "in-flight").code == 0
    assert len(looks) <= 1 + 4  # all of it once, then those that may be, among them the damaged one


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory that was used")
def test_a_big_store_is_listed_in_bounded_memory() -> None:
    async def main() -> None:
        store = SqliteStore(default_store_path("big"))
        await store.open("big", "the test")
        await store.put([step(b"%d" % (n % 1000), str(n), result="x" * 3000) for n in range(30_000)])
        await store.close()

    asyncio.run(main())
    script = (
        "import re, sys\nfrom dalsegno.inspect import cli\nsys.argv = ['dalsegno', *sys.argv[1:]]\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    for args in (["show", "big", "--limit", "3"], ["show", "big", "--state", "done"], ["show", "big", "29999"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120, check=True
        )
        assert int(done.stdout.split()[-1]) < 110_000, args  # KiB; the bodies are 90 MB, the interpreter some 45
