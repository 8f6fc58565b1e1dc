"""An agent in a single file, run as ``python app.py``: what it recorded fits in the next process, wherever it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, enum, os, sys
from dataclasses import dataclass, field
from pathlib import Path

import pydantic

from dalsegno import Agent, Event, InputEvent, LocalRunner, OutputEvent, action, register

folder = Path(sys.argv[1])
die_in = sys.argv[2]


class Mood(enum.Enum):
    GOOD = "good"


@register
@dataclass(frozen=True)
class Question:
    text: str
    tags: frozenset = frozenset()


class Reply(pydantic.BaseModel):
    text: str
    mood: Mood = Mood.GOOD


class Refused(Exception):
    def __init__(self, *, question, status):
        super().__init__(f"refused with {status}")
        self.question, self.status = question, status


class Replied(Event):
    reply: Reply
    to: Question


def executed(what):
    with (folder / "executed").open("a") as file:
        file.write(what + "\\n")
    if what == die_in:
        os._exit(9)


class Model:
    def __init__(self, name):
        self.name = name

    async def ask(self, question, *, options) -> Reply:
        executed("ask")
        return Reply(text=f"{self.name}: {question.text}")

    @staticmethod
    def rate(texts: set) -> dict:
        executed("rate")
        return {text: Mood.GOOD for text in texts}


def refuse(question):
    executed("refuse")
    raise Refused(question=question, status=403)


def notify(reply, moods):
    executed("notify")


def finish(what):
    executed("finish")
    return what


class App(Agent):
    model = Model("m")

    @action(InputEvent)
    async def begin(self, event, ctx):
        words = set(event.input["text"].split())  # its order is another one in each process
        question = Question(event.input["text"], frozenset(words))
        options = {word: len(word) for word in words}
        reply = await ctx.durable_execute(self.model.ask, question, options=options, effect="read")
        assert type(reply) is Reply and reply == Reply(text="m: " + question.text) and reply.mood is Mood.GOOD
        moods = await ctx.durable_execute(Model.rate, words, effect="read")
        assert moods == {word: Mood.GOOD for word in words}
        try:
            await ctx.durable_execute(refuse, question, effect="once")
        except Refused as error:
            assert (error.question, error.status, str(error)) == (question, 403, "refused with 403")
            ctx.short_term_memory.set("refused", error.question)
        await ctx.durable_execute(notify, reply, moods, effect="idempotent")
        ctx.send_event(Replied(reply=reply, to=question))

    @action(Replied)
    async def end(self, event, ctx):
        assert type(event.reply) is Reply and event.to == ctx.short_term_memory.get("refused")
        what = await ctx.durable_execute(finish, event.to, effect="idempotent")
        assert isinstance(what, Question)
        ctx.send_event(OutputEvent(output=[event.reply.text, event.reply.mood.value, sorted(what.tags)]))


def main():
    runner = LocalRunner(App(), job="questions", store=f"sqlite:///{folder}/store.db")
    report = runner.run([{"text": "how many planets are there"}], folder / "out.jsonl")
    print(report.calls_executed, report.calls_replayed)


if __name__ == "__main__":
    main()
"""


class Place:
    """Where the script lies, in a folder whose name is not that of a module, and ways to start it."""

    def __init__(self, folder: Path) -> None:
        self.records = folder / "records"
        self.home = folder / "my agents 1.0"
        self.elsewhere = folder / "elsewhere"
        for made in (self.records, self.home, self.elsewhere):
            made.mkdir()
        (self.home / "app.py").write_text(SCRIPT)

    def start(self, way: str, seed: str, die_in: str = "nowhere") -> tuple[int, str]:
        """The exit code and the last line of output."""
        arguments, cwd = {
            "in its folder": (["app.py"], self.home),
            "from elsewhere": (["../my agents 1.0/app.py"], self.elsewhere),
            "by its full path": ([str(self.home / "app.py")], Path("/")),
            "as a module": (["-m", "app"], self.home),
            "optimised": (["-OO", "app.py"], self.home),
        }[way]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, *arguments, str(self.records), die_in],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode in (0, 9), done.stderr
        return done.returncode, done.stdout.strip()

    def executed(self) -> list[str]:
        return (self.records / "executed").read_text().split()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_script_replays_with_no_execution_from_any_folder_with_any_hash_seed(place: Place) -> None:
    """Each start but the last is killed in the last call of all, with everything else recorded."""
    starts = [
        ("in its folder", "0"),
        ("from elsewhere", "1"),
        ("by its full path", "2"),
        ("as a module", "3"),
        ("optimised", "4"),
    ]
    for way, seed in starts:
        assert place.start(way, seed, "finish") == (9, "")
    assert place.start("in its folder", "random") == (0, "1 4")
    assert place.executed() == ["ask", "rate", "refuse", "notify", *["finish"] * 6]
    (output,) = (place.records / "out.jsonl").read_text().splitlines()
    assert json.loads(output) == ["m: how many planets are there", "good", ["are", "how", "many", "planets", "there"]]


@pytest.mark.parametrize("die_in", ["ask", "rate", "notify", "finish"])
def test_a_script_that_is_killed_in_any_call_runs_only_that_one_again(place: Place, die_in: str) -> None:
    assert place.start("in its folder", "5", die_in) == (9, "")
    assert place.start("from elsewhere", "6")[0] == 0
    calls = ["ask", "rate", "refuse", "notify", "finish"]
    # What a process that is killed had begun to record of a `read` call right before may not be durable yet.
    again = {"rate": {"ask", "rate"}}.get(die_in, {die_in})
    counts = {call: place.executed().count(call) for call in calls}
    assert {call for call, count in counts.items() if count > 1} <= again
    assert counts[die_in] == 2
    assert all(1 <= count <= 2 for count in counts.values())
    assert len((place.records / "out.jsonl").read_text().splitlines()) == 1


def test_a_copy_of_the_script_under_the_same_name_goes_on_where_it_was_left(place: Place) -> None:
    """A deployment puts the file somewhere else."""
    assert place.start("in its folder", "7", "finish") == (9, "")
    shutil.move(place.home, place.home.with_name("release-2"))
    place.home = place.home.with_name("release-2")
    assert place.start("in its folder", "8") == (0, "1 4")
    assert place.executed().count("ask") == place.executed().count("refuse") == 1
