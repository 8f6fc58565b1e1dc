"""The command with standard streams that are closed, full, or without a reader, and Ctrl-C while it loads."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and a shell"),
]

ROOT = Path(__file__).parents[1]
AGENT = """
    exec("import colorsys")  # as a dataclass makes its methods
    import os
    from pathlib import Path
    from dalsegno import Agent, InputEvent, OutputEvent, action

    class Shop(Agent):
        @action(InputEvent)
        async def buy(self, event, ctx):
            if event.input == "stop" and not Path("stopped").exists():
                Path("stopped").touch()
                os.kill(os.getpid(), 15)
            if event.input == "ask":
                await ctx.wait_for("approved")
            if event.input == "print":
                print("from the agent")
            if event.input == "child":
                os.system("echo from a child; echo from a child >&2")
            ctx.send_event(OutputEvent(output=event.input))

    agent = Shop()
"""
RUN = "run shop:agent --job j --source in.jsonl"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    (tmp_path / "shop.py").write_text("\n".join(line[4:] for line in AGENT.splitlines()))
    given(1, 2, 3)
    return tmp_path


def given(*values: Any) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def shell(arguments: str, streams: str = "", *, stdin: str | None = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, with *streams* as in a shell."""
    command = f'exec "{sys.executable}" -m dalsegno {arguments} {streams}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, input=stdin)
    assert "Traceback" not in done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


# --- closed ---------------------------------------------------------------------------------------------------------


def test_with_standard_error_closed_a_run_is_as_any_other() -> None:
    code, out, err = shell(f"{RUN} --sink o.jsonl", "2>&-")
    assert (code, err) == (0, "")
    assert out.startswith("job j: finished\n")
    assert lines("o.jsonl") == [1, 2, 3]


def test_with_standard_error_closed_the_summary_is_not_among_the_outputs() -> None:
    assert shell(f"{RUN} --json", "2>&-") == (0, "1\n2\n3\n", "")


def test_with_standard_error_closed_errors_are_not_among_the_outputs() -> None:
    assert shell("run shop:missing --job j --source in.jsonl", "2>&-") == (2, "", "")
    Path("in.jsonl").write_text("1\nbroken\n")
    assert shell(RUN, "2>&-") == (1, "1\n", "")
    assert shell(f"{RUN} --job k --on-bad-input skip", "2>&-") == (0, "1\n", "")


def test_with_standard_output_closed_the_summary_goes_nowhere() -> None:
    assert shell(f"{RUN} --sink o.jsonl", ">&-") == (0, "", "")
    assert lines("o.jsonl") == [1, 2, 3]


def test_outputs_do_not_go_to_a_closed_standard_output() -> None:
    code, out, err = shell(RUN, ">&-")
    assert (code, out) == (1, "")
    assert "cannot be written to standard output: it is closed" in err
    assert shell(RUN)[:2] == (0, "1\n2\n3\n"), "nothing is lost"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_of_the_run_becomes_a_standard_stream(closed: str) -> None:
    given("print", "child")
    assert shell(f"{RUN} --sink o.jsonl", closed)[0] == 0
    assert lines("o.jsonl") == ["print", "child"]
    assert shell("runs", "<&-")[0] == 0


def test_a_closed_standard_input_is_named() -> None:
    code, _, err = shell("run shop:agent --job j --source - --sink o.jsonl", "<&-")
    assert code == 1
    assert err.startswith("dalsegno: InputError: Standard input is closed, so there is nothing to read. Pipe ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["runs", "show j", "show j --json", "--version", "run --help", "demo --help"])
def test_the_other_commands_need_no_stream(command: str, closed: str) -> None:
    assert shell(f"{RUN} --sink o.jsonl")[0] == 0
    code, out, err = shell(command, closed)
    assert (code, err) == (0, "")
    assert bool(out) is (">&-" not in closed.replace("2>&-", ""))


# --- full, or without a reader --------------------------------------------------------------------------------------


def test_a_summary_that_cannot_be_printed_is_no_failure_of_the_job() -> None:
    code, _, err = shell(f"{RUN} --sink o.jsonl", ">/dev/full")
    assert code == 4
    assert err == "dalsegno: job j: the input is finished, but that cannot be printed: No space left on device\n"
    assert lines("o.jsonl") == [1, 2, 3]
    code, out, _ = shell(f"{RUN} --sink o.jsonl --json")
    assert (code, json.loads(out)["messages"]) == (0, 0)


def test_a_summary_on_a_full_standard_error_still_has_its_exit_code() -> None:
    assert shell(RUN, "2>/dev/full") == (4, "1\n2\n3\n", "")


def test_warnings_that_cannot_be_printed_change_nothing() -> None:
    Path("in.jsonl").write_text("1\nbroken\n")
    code, out, _ = shell(f"{RUN} --sink o.jsonl --on-bad-input skip", "2>/dev/full")
    assert code == 0
    assert out.startswith("job j: finished\n")


def test_what_waits_for_a_person_is_said_where_the_summary_cannot() -> None:
    given("ask")
    code, _, err = shell(f"{RUN} --sink o.jsonl", ">/dev/full")
    assert code == 4
    assert err == (
        "dalsegno: job j: the input is finished, and messages are parked or bad records set aside, but that cannot be "
        "printed: No space left on device\n"
    )


@pytest.mark.parametrize(("streams", "said"), [(">/dev/full", True), ("2>/dev/full >/dev/full", False)])
def test_a_stopped_run_keeps_its_exit_code(streams: str, said: bool) -> None:
    given("stop", 2)
    code, _, err = shell(f"{RUN} --sink o.jsonl", streams)
    assert code == 143
    assert ("the run is stopped by SIGTERM, but that cannot be printed" in err) is said
    assert shell(f"{RUN} --sink o.jsonl")[0] == 0
    assert lines("o.jsonl") == ["stop", 2]


def test_errors_on_a_full_standard_error_keep_their_exit_code() -> None:
    assert shell("run shop:missing --job j --source in.jsonl", "2>/dev/full")[0] == 2
    assert shell("run shop:agent --job j --source missing.jsonl", "2>/dev/full")[0] == 1


def test_outputs_that_nobody_takes_are_one_line() -> None:
    code, _, err = shell(RUN, ">/dev/full")
    assert (code, err.count("\n")) == (1, 1)
    assert "StoreError: The output" in err
    assert shell(RUN)[:2] == (0, "1\n2\n3\n")


@pytest.mark.parametrize("command", ["runs", "show j", "show j --json", "--version", "--help", "run --help"])
def test_what_cannot_be_shown_is_one_line_and_4(command: str) -> None:
    assert shell(f"{RUN} --sink o.jsonl")[0] == 0
    code, _, err = shell(command, ">/dev/full")
    assert (code, err) == (4, "dalsegno: what was asked for cannot be printed: No space left on device\n")


def into_a_closed_pipe(arguments: str) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dalsegno", *arguments.split()], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["runs", "show j", "show j --json --limit 5000", "show j --limit 5000", "--help"])
def test_a_reader_that_has_seen_enough_is_no_error_worth_a_word(command: str) -> None:
    given(*["ask"] * 3, *range(300))
    assert shell(f"{RUN} --sink o.jsonl")[0] == 3
    assert into_a_closed_pipe(command) == (4, "")


def test_a_summary_without_a_reader_is_told_like_one_without_room() -> None:
    expected = "dalsegno: job j: the input is finished, but that cannot be printed: Broken pipe\n"
    assert into_a_closed_pipe(f"{RUN} --sink o.jsonl") == (4, expected)


def test_a_decision_stands_that_cannot_be_printed() -> None:
    given("ask")
    assert shell(f"{RUN} --sink o.jsonl")[0] == 3
    code, _, err = shell("signal j null approved true", ">/dev/full")
    assert (code, err) == (4, "dalsegno: job j: it is decided, but that cannot be printed: No space left on device\n")
    code, _, err = shell("signal j null approved false", ">/dev/full")
    assert code == 1
    assert err == "dalsegno: job j: it is not decided as asked, but that cannot be printed: No space left on device\n"
    assert shell(f"{RUN} --sink o.jsonl")[0] == 0


def test_a_demo_without_room_for_words_leaves_no_process() -> None:
    code, _, err = shell("demo --kills 1", ">/dev/full")
    assert (code, err) == (4, "dalsegno: what was asked for cannot be printed: No space left on device\n")


# --- Ctrl-C while it loads ------------------------------------------------------------------------------------------

INTERRUPT_AT = """
    import os
    import signal
    import sys

    def interrupt(event, args, waiting=[os.environ["INTERRUPT_AT"]]):
        if event == "import" and args[0] == waiting[0]:
            waiting[0] = None
            os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(interrupt)
"""


@pytest.fixture
def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command and presses Ctrl-C when it begins to import a module."""
    (folder / "hook").mkdir()
    text = "\n".join(line[4:] for line in INTERRUPT_AT.splitlines())
    (folder / "hook" / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'hook'}:{ROOT / 'src'}")

    def at(module: str, arguments: str, streams: str = "") -> tuple[int, str, str]:
        monkeypatch.setenv("INTERRUPT_AT", module)
        return shell(arguments, streams)

    return at


@pytest.mark.parametrize(
    "module",
    [
        "dalsegno.inspect.cli",
        "typer",
        "typing",
        "dalsegno.errors",
        "dalsegno.runners.local",
        "pydantic",
        "orjson",
        "colorsys",
    ],
)
def test_ctrl_c_while_a_run_loads_is_one_line_and_130(
    interrupted: Callable[..., tuple[int, str, str]], module: str
) -> None:
    line = "dalsegno: interrupted; run it again to go on\n"
    assert interrupted(module, f"{RUN} --sink o.jsonl") == (130, "", line)
    assert not Path("o.jsonl").exists()
    assert interrupted("nothing", f"{RUN} --sink o.jsonl")[0] == 0


@pytest.mark.parametrize("command", ["runs", "show j", "demo"])
def test_ctrl_c_while_another_command_loads_is_one_line_and_130(
    interrupted: Callable[..., tuple[int, str, str]], command: str
) -> None:
    assert interrupted("typer", command) == (130, "", "dalsegno: interrupted\n")
    assert interrupted("typer", command, "2>&-") == (130, "", "")


def test_an_ignored_ctrl_c_stays_ignored(interrupted: Callable[..., tuple[int, str, str]]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert interrupted("typer", f"{RUN} --sink o.jsonl")[0] == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_little_is_loaded_before_ctrl_c_is_seen_to() -> None:
    code = "import sys; old = set(sys.modules); import dalsegno.__main__; print(*sorted(set(sys.modules) - old))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("dalsegno")}
    assert found == {"dalsegno", "dalsegno.__main__", "dalsegno.inspect", "dalsegno.inspect.interrupts"}
    assert not {"typing", "pydantic", "typer", "asyncio", "dataclasses", "re"} & set(done.stdout.split())


# --- names that are loaded when they are asked for ------------------------------------------------------------------


def test_every_public_name_is_there_and_is_what_its_module_has() -> None:
    tree = ast.parse(Path(dalsegno.__file__).read_text())
    declared = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dalsegno.")
        for alias in node.names
    }
    assert {name: f"dalsegno.{home}" for name, home in dalsegno._HOME.items()} == declared
    assert sorted(declared) == sorted(name for name in dalsegno.__all__ if name != "__version__")
    for name in declared:
        assert getattr(dalsegno, name) is getattr(sys.modules[declared[name]], name)
        assert name in dir(dalsegno)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dalsegno' has no attribute 'agents'"):
        dalsegno.agents  # type: ignore[attr-defined]  # noqa: B018


def test_each_module_can_be_the_first_that_is_imported() -> None:
    names = [module.name for module in pkgutil.walk_packages(dalsegno.__path__, "dalsegno.")]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for each in [each for each in sys.modules if each.partition('.')[0] == 'dalsegno']:\n"
        "        del sys.modules[each]\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code, *names], check=True)
