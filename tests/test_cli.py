"""The command line: exit codes, summaries and messages, never a traceback for what can be expected."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno.inspect import cli
from dalsegno.runners.local import LocalRunner
from dalsegno.runners.report import ParkedMessage, Progress, RunReport
from dalsegno.stores.sqlite_schema import lock_path

AGENT = """
    import os
    from pathlib import Path
    from dalsegno import Agent, InputEvent, OutputEvent, action

    def charge(n):
        with open("charged", "a") as file:
            file.write(f"{n}\\n")
        if n == "die":
            raise ValueError("card refused")
        if n == "stop" and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), 15)
        return n

    class Shop(Agent):
        @action(InputEvent)
        async def buy(self, event, ctx):
            n = await ctx.durable_execute(charge, event.input["n"])
            ctx.send_event(OutputEvent(output={"charged": n}))

    agent = Shop()
    other = Shop()
    number = 3

    class Deaf(Agent):
        pass

    class Space:
        agent = Shop()

    class Needy(Shop):
        def __init__(self, model):
            self.model = model

    class Failing(Shop):
        def __init__(self):
            raise KeyError("MODEL")

    class Quitter(Agent):
        @action(InputEvent)
        async def quit(self, event, ctx):
            raise SystemExit(0)
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, with a module of its own name in it that holds agents."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = re.sub(r"\W", "_", tmp_path.name)
    (tmp_path / f"shop_{name}.py").write_text(textwrap.dedent(AGENT))
    yield tmp_path
    sys.modules.pop(f"shop_{name}", None)


@pytest.fixture
def module(folder: Path) -> str:
    return next(folder.glob("shop_*.py")).stem


@pytest.fixture
def dalsegno(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process."""

    def command(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["dalsegno", *args])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])  # else the command would not set up its own
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        code = caught.value.code
        return Result(code if isinstance(code, int) else 0 if code is None else 1, out, err)

    return command


@pytest.fixture
def run(dalsegno: Command, module: str) -> Command:
    """``dalsegno run`` of the shop, with the job, source and sink that most tests want."""

    def command(*args: str, agent: str | None = None) -> Result:
        given = [*args]
        for option, value in (("--job", "shop"), ("--source", "in.jsonl"), ("--sink", "out.jsonl")):
            if option not in args:
                given += [option, value]
        return dalsegno("run", agent or f"{module}:agent", *given)

    return command


def write_input(*values: Any, path: str = "in.jsonl") -> None:
    Path(path).write_text("".join(value if isinstance(value, str) else json.dumps(value) + "\n" for value in values))


def outputs() -> list[Any]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def charged() -> list[str]:
    return Path("charged").read_text().split() if Path("charged").exists() else []


# --- a run that is finished -----------------------------------------------------------------------------------------


def test_a_finished_run_ends_with_0_and_a_summary(run: Command) -> None:
    write_input({"n": 1}, {"n": 2})
    result = run()
    assert result.code == 0
    assert "job shop: finished" in result.out
    for name, value in (("messages", 2), ("outputs", 2), ("calls executed", 2), ("calls replayed", 0), ("parked", 0)):
        assert re.search(rf"^  {name} +{value}$", result.out, re.MULTILINE)
    assert result.err == ""
    assert outputs() == [{"charged": 1}, {"charged": 2}]


def test_the_same_job_goes_on_and_does_nothing_twice(run: Command) -> None:
    write_input({"n": 1})
    run()
    write_input({"n": 1}, {"n": 2})
    result = run()
    assert result.code == 0
    assert charged() == ["1", "2"]
    assert outputs() == [{"charged": 1}, {"charged": 2}]


def test_unless_told_otherwise_everything_lies_in_one_folder(run: Command) -> None:
    write_input({"n": 1})
    run()
    assert {path.name for path in Path(".dalsegno").glob("*.db")} == {"shop.db", "shop.checkpoints.db"}
    run("--job", "other", "--store", "sqlite:///x/y.db", "--checkpoints", "x/c.db")
    assert {path.name for path in Path("x").glob("*.db")} == {"y.db", "c.db"}


def test_the_summary_as_json_is_the_report(run: Command) -> None:
    write_input({"n": 1}, {"n": 2})
    result = run("--json")
    report = json.loads(result.out)
    assert {field: report[field] for field in ("job", "messages", "outputs", "calls_executed", "calls_replayed")} == {
        "job": "shop",
        "messages": 2,
        "outputs": 2,
        "calls_executed": 2,
        "calls_replayed": 0,
    }
    assert report["parked"] == []
    assert report["stopped_by"] is None
    assert isinstance(report["seconds"], float)
    assert set(report) == set(RunReport.__dataclass_fields__)


@pytest.mark.parametrize("key", [b"\xff", ("a",), {1, 2}, "\ud800", float("nan"), None])
def test_the_summary_as_json_is_valid_for_any_key(key: Any) -> None:
    report = RunReport("shop", parked=[ParkedMessage(key, "0", "in doubt \ud800")])
    text = cli._as_json(report)
    text.encode()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse)["parked"][0]["message_id"] == "0"


def test_outputs_on_standard_output_are_not_mixed_with_the_summary(run: Command) -> None:
    write_input({"n": 1}, {"n": "é"})
    result = run("--sink", "-", "--json")
    assert [json.loads(line) for line in result.out.splitlines()] == [{"charged": 1}, {"charged": "é"}]
    assert json.loads(result.err)["messages"] == 2


def test_csv_is_read_by_its_ending(run: Command) -> None:
    Path("in.csv").write_text("n,other\n7,x\n8,y\n")
    assert run("--source", "in.csv").code == 0
    assert outputs() == [{"charged": "7"}, {"charged": "8"}]


def test_an_agent_may_be_named_by_its_class_or_a_dotted_path(run: Command, module: str) -> None:
    for number, name in enumerate(("Shop", "Space.agent", "other")):
        write_input({"n": number})
        assert run("--job", name, "--sink", f"{name}.jsonl", agent=f"{module}:{name}").code == 0
    assert charged() == ["0", "1", "2"]


def test_the_version_and_the_help_are_shown(dalsegno: Command) -> None:
    import dalsegno as package

    assert dalsegno("--version") == Result(0, package.__version__ + "\n", "")
    for args in (["--help"], ["run", "--help"]):
        result = dalsegno(*args)
        assert result.code == 0
        assert "Usage" in result.out
    for option in ("--job", "--source", "--sink", "--key", "--on-bad-input", "--max-in-flight", "--json"):
        assert option in dalsegno("run", "--help").out


# --- a run that failed: 1 -------------------------------------------------------------------------------------------


def test_an_action_that_fails_ends_with_1_and_says_where_and_why(run: Command) -> None:
    write_input({"n": 1}, {"n": "die"}, {"n": 3})
    result = run()
    assert result.code == 1
    message = "dalsegno: ActionError: job 'shop', key None, message '1', action 'buy': ValueError: card refused"
    assert result.err.startswith(message)
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert outputs() == [{"charged": 1}]
    write_input({"n": 1}, {"n": "die"}, {"n": 3})
    assert run().code == 1
    assert charged() == ["1", "die", "die"]


def test_a_missing_source_is_named(run: Command) -> None:
    result = run("--source", "missing.jsonl")
    assert result.code == 1
    assert "InputError" in result.err
    assert "missing.jsonl" in result.err


@pytest.mark.parametrize("where", ["missing/out.jsonl", "in.jsonl/out.jsonl", "."])
def test_a_sink_that_cannot_be_written_is_named_and_nothing_is_charged(run: Command, where: str) -> None:
    write_input({"n": 1})
    result = run("--sink", where)
    if result.code == 0:  # a missing folder may be made
        assert where == "missing/out.jsonl"
        assert Path(where).exists()
    else:
        assert result.code in (1, 2)
        assert "dalsegno: " in result.err
        assert charged() == []


def test_what_does_not_fit_together_is_explained(run: Command) -> None:
    write_input({"n": 1})
    run()
    write_input({"n": 2})
    result = run()
    assert result.code == 1
    assert "dalsegno: RestoreError: " in result.err
    assert "in.jsonl" in result.err
    Path("out.jsonl").unlink()
    assert "out.jsonl" in run().err
    assert charged() == ["1"]


def test_a_store_that_is_something_else_is_left_alone(run: Command) -> None:
    write_input({"n": 1})
    Path("letters.db").write_bytes(b"my letters" * 1000)
    result = run("--store", "sqlite:///letters.db")
    assert result.code == 1
    assert "letters.db" in result.err
    assert Path("letters.db").read_bytes() == b"my letters" * 1000


def test_a_new_job_does_not_share_an_output_file_unless_told_to(run: Command) -> None:
    write_input({"n": 1})
    run()
    result = run("--job", "other")
    assert result.code == 1
    assert "RestoreError: 'out.jsonl' already holds" in result.err
    assert charged() == ["1"]
    assert run("--job", "other", "--append").code == 0
    assert outputs() == [{"charged": 1}, {"charged": 1}]


@pytest.mark.parametrize(
    ("sink", "what"),
    [
        ("in.jsonl", "the source"),
        ("./x/../in.jsonl", "the source"),
        ("link.jsonl", "the source"),
        ("s.db", "the store"),
        ("c.db", "the file of the checkpoints"),
        ("s.db-wal", "a part of the store"),
        ("./x/../s.db-shm", "a part of the store"),
        (lock_path(Path("s.db"), "job").name, "a part of the store"),
        (lock_path(Path("s.db"), "another job").name, "a part of the store"),
        ("c.db-wal", "a part of the checkpoints"),
        ("c.db-journal", "a part of the checkpoints"),
    ],
)
@pytest.mark.parametrize("append", [[], ["--append"]])
def test_a_sink_that_the_run_itself_uses_is_refused(run: Command, sink: str, what: str, append: list[str]) -> None:
    write_input({"n": 1})
    Path("x").mkdir()
    Path("link.jsonl").symlink_to("in.jsonl")
    result = run("--sink", sink, "--store", "sqlite:///s.db", "--checkpoints", "c.db", *append)
    assert result.code == 2
    assert f"DefinitionError: the sink {str(Path(sink))!r} is {what} of this run" in result.err
    assert Path("in.jsonl").read_text() == '{"n": 1}\n'
    assert not Path("s.db").exists()
    assert not Path("c.db").exists()


def test_an_agent_that_exits_does_not_choose_the_exit_code(run: Command, module: str) -> None:
    write_input({"n": 1})
    result = run(agent=f"{module}:Quitter")
    assert result.code == 1
    assert "SystemExit" in result.err


def test_a_run_ended_by_system_exit_is_a_failed_one(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(self: LocalRunner, *args: Any, **options: Any) -> RunReport:
        raise SystemExit(0)

    monkeypatch.setattr(LocalRunner, "run", ended)
    result = run()
    assert result.code == 1
    assert "the run was ended by SystemExit(0), at " in result.err


def test_ctrl_c_before_the_run_is_one_line_and_130(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in ((LocalRunner, "run"), (cli, "load_agent"), (cli, "app")):
        monkeypatch.setattr(owner, name, interrupted)
        result = run()
        assert result.code == 130
        assert result.err == "dalsegno: interrupted; run it again to go on\n"


@pytest.mark.parametrize(("width", "replayed"), [(79, False), (80, True)])
def test_a_narrow_progress_bar_leaves_out_what_was_replayed(width: int, replayed: bool) -> None:
    report = RunReport("shop", messages=1, calls_executed=2, calls_replayed=3, parked=[ParkedMessage("k", "0", "")])
    middle = ", 3 replayed" if replayed else ""
    assert cli._counts(report, width) == f"1 messages, 2 calls executed{middle}, 1 parked"


def test_the_progress_bar_shows_what_is_done_not_what_is_read() -> None:
    progress = Progress(RunReport("shop", messages=7), read=100, total=100, in_flight=3, done=70)
    assert cli._bar_of(progress, 80) == {
        "description": "shop",
        "completed": 70,
        "total": 100,
        "counts": "7 messages, 0 calls executed, 0 replayed",
    }


# --- input that cannot be read --------------------------------------------------------------------------------------

BAD = ['{"n": 1}\n', "{broken\n", '{"n": 3}\n']


def test_a_bad_record_stops_the_run_with_1_and_its_file_line_and_reason(run: Command) -> None:
    write_input(*BAD)
    result = run()
    assert result.code == 1
    assert re.search(r"InputError: in\.jsonl, line 2: .+Nothing was read past it", result.err)
    assert "{broken" in result.err
    assert charged() in ([], ["1"])


def test_bad_records_that_are_skipped_are_counted_and_the_run_is_finished(run: Command) -> None:
    write_input(*BAD)
    result = run("--on-bad-input", "skip")
    assert result.code == 0
    assert re.search(r"bad records skipped +1$", result.out, re.MULTILINE)
    assert "in.jsonl, line 2: " in result.err
    assert charged() == ["1", "3"]


def test_bad_records_that_are_set_aside_end_the_run_with_3(run: Command) -> None:
    write_input(*BAD)
    result = run("--on-bad-input", "park")
    assert result.code == 3
    assert re.search(r"bad records set aside +1$", result.out, re.MULTILINE)
    assert "in.jsonl, line 2: " in result.err
    assert charged() == ["1", "3"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]\n", "is a list, not an object"),
        ('{"m": 1}\n', "has no field 'n'; its fields are 'm'"),
        ("{}\n", "has no field 'n'"),
        ("7\n", "is a int, not an object"),
    ],
)
def test_a_record_without_the_key_field_is_a_bad_one(run: Command, line: str, reason: str) -> None:
    write_input('{"n": 1}\n', line)
    result = run("--key", "n")
    assert result.code == 1
    assert "in.jsonl, line 2: " in result.err
    assert reason in result.err


# --- wrong usage: 2 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{module}", "does not name an agent: write MODULE:AGENT"),
        (":agent", "does not name an agent: write MODULE:AGENT"),
        ("{module}:", "does not name an agent: write MODULE:AGENT"),
        ("no_such_module:agent", "there is no module 'no_such_module'"),
        ("no_such.module:agent", "there is no module 'no_such'"),
        ("{module}:missing", "has no 'missing'; its agents are 'agent', 'other'"),
        ("{module}:number", "an agent is an instance of a subclass of dalsegno.Agent"),
        ("{module}:Deaf", "has no action for InputEvent"),
        ("{module}.py:agent", "there is no module"),
        ("{module}:Needy", "missing 1 required positional argument: 'model', at "),
        ("{module}:Needy", "in __init__; name an instance of it instead, as in agent = Needy(...)"),
        ("{module}:Failing", "KeyError: 'MODEL', at "),
    ],
)
def test_a_wrong_agent_ends_with_2_and_says_what_is_there(run: Command, module: str, agent: str, message: str) -> None:
    write_input({"n": 1})
    result = run(agent=agent.format(module=module))
    assert result.code == 2
    assert message in result.err
    assert not Path(".dalsegno").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["--job", ""],
        ["--job", " "],
        ["--on-bad-input", "ignore"],
        ["--max-in-flight", "0"],
        ["--max-in-flight", "many"],
        ["--checkpoint-interval", "0"],
        ["--checkpoint-interval", "-1"],
        ["--store", "my.db"],
        ["--store", "nosuch://x"],
        ["--store", "sqlite://x.db"],
        ["--store", "memory://", "--checkpoints", "c.db"],
        ["--source", ""],
        ["--sink", ""],
        ["--no-such-option"],
        ["more", "arguments"],
    ],
)
def test_wrong_options_end_with_2_before_anything_is_done(run: Command, args: list[str]) -> None:
    write_input({"n": 1})
    result = run(*args)
    assert result.code == 2
    assert result.err != ""
    assert charged() == []
    assert not Path("out.jsonl").exists()


def test_missing_options_are_named(dalsegno: Command, module: str) -> None:
    result = dalsegno("run", f"{module}:agent", "--job", "shop")
    assert result.code == 2
    assert "--source" in result.err


def test_a_module_with_a_mistake_of_its_own_is_not_called_missing(run: Command, module: str) -> None:
    write_input({"n": 1})
    Path(f"{module}_broken.py").write_text("\nimport no_such_dependency\n")
    result = run(agent=f"{module}_broken:agent")
    assert result.code == 2
    assert "there is no module" not in result.err
    assert "ModuleNotFoundError: No module named 'no_such_dependency'" in result.err
    assert f"{module}_broken.py:2" in result.err


# --- parked: 3, stopped: 143 ----------------------------------------------------------------------------------------


def test_a_message_in_doubt_ends_the_run_with_3_and_is_listed(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "job 'shop', key 'k': the call charge was requested before a crash"

    def parked(self: LocalRunner, *args: Any, **options: Any) -> RunReport:
        found = [ParkedMessage(f"k{n}", str(n), reason) for n in range(12)]
        return RunReport("shop", messages=1, parked=found, waiting=2)

    monkeypatch.setattr(LocalRunner, "run", parked)
    result = run()
    assert result.code == 3
    assert re.search(r"^  parked +12$", result.out, re.MULTILINE)
    assert re.search(r"waiting behind a parked message +2$", result.out, re.MULTILINE)
    assert f"parked: key 'k0', message 0: {reason}" in result.out
    assert "and 2 more parked messages" in result.out
    assert json.loads(run("--json").out)["parked"][0] == {
        "key": "k0",
        "message_id": "0",
        "reason": reason,
        "why": "in_doubt",
    }


def test_sigterm_ends_the_run_cleanly_with_143_and_it_goes_on_later(run: Command) -> None:
    write_input(*({"n": n} for n in (1, "stop", 3, 4)))
    result = run("--max-in-flight", "1")
    assert result.code == 143
    assert "stopped by SIGTERM; run it again to go on" in result.out
    assert run().code == 0
    assert charged() == ["1", "stop", "3", "4"]
    assert outputs() == [{"charged": n} for n in (1, "stop", 3, 4)]


# --- in a process of its own ----------------------------------------------------------------------------------------


def shell(*args: str, stdin: str = "", script: tuple[str, ...] = ("-m", "dalsegno")) -> Result:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *script, *args],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_terminal_of_few_characters_is_no_traceback(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    write_input({"n": "é"})
    args = ["run", f"{module}:agent", "--source", "in.jsonl", "--job", "café"]
    result = shell(*args)
    assert result.code == 0
    assert result.out == '{"charged": "\\u00e9"}\n'
    assert "job caf\\xe9: finished" in result.err
    result = shell("demo", "--kills", "1")
    assert result.code == 0
    assert "x process" in result.out
    assert "+ process" in result.out
    assert "\\u" not in result.out + result.err


@pytest.mark.slow
def test_records_can_be_piped_in_and_outputs_out(module: str) -> None:
    args = ["run", f"{module}:agent", "--job", "pipe", "--source", "-", "--sink", "-", "--json"]
    result = shell(*args, stdin='{"n": 1}\n\n{"n": 2}')
    assert result.code == 0
    assert [json.loads(line) for line in result.out.splitlines()] == [{"charged": 1}, {"charged": 2}]
    assert json.loads(result.err)["messages"] == 2
    result = shell(*args, stdin='{"n": 1}\n\n{"n": 2}\n{"n": 3}\n')
    assert result.out == '{"charged": 3}\n'
    assert charged() == ["1", "2", "3"]
    result = shell(*args, stdin='{"n": 1}\n')
    assert result.code == 1
    assert "dalsegno: RestoreError: " in result.err
    result = shell(*args[:3], "bad", *args[4:], stdin="{broken\n")
    assert result.code == 1
    assert "standard input, line 1" in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_the_module_is_found_in_the_present_folder_and_a_closed_pipe_is_no_traceback(module: str) -> None:
    write_input(*({"n": n} for n in range(2000)))
    source = Path(cli.__file__).parents[2]
    command = f"{sys.executable} -m dalsegno run {module}:agent --job j --source in.jsonl --store memory:// | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; PYTHONPATH={source} {command}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == '{"charged": 0}\n'
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
