"""What ``dalsegno demo`` prints: a sentence before each phase, a line for each kill, a table of what was counted."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dalsegno.demo.lives import KillPoint, Life, plan, run_lives
from dalsegno.demo.measure import Counts, measure
from dalsegno.demo.plain import BATCH
from dalsegno.demo.world import IN_FLIGHT, RESULTS, load_reviews
from dalsegno.errors import DefinitionError

_WIDTH = 100
_ROWS = {
    "messages": "reviews",
    "kills": "times killed (SIGKILL)",
    "calls_executed": "calls executed, of model and mail tool",
    "calls_replayed": "calls played back from the record",
    "in_doubt": "mails in doubt after a kill, looked up",
    "once_calls": "mails sent",
    "once_repeated": "  sent twice",
    "outputs": "results written",
    "outputs_repeated": "  written twice",
    "outputs_lost": "  lost",
    "contradictions": "results that contradict what was mailed",
    "memory_wrong": "products counted wrongly in memory",
}
_FAULTS = {
    "once_repeated": ("sent {} twice", "mail"),
    "outputs_repeated": ("wrote {} twice", "result"),
    "outputs_lost": ("lost {}", "result"),
    "contradictions": ("contradicted its own mails in {}", "result"),
    "memory_wrong": ("counted {} wrongly", "product"),
}


def show_demo(*, kills: int, seed: int | None, keep: Path | None, as_json: bool) -> int:
    """Run both ways under the same kills and print what was counted; returns the exit code.

    *seed* chooses the kill points; the model stays random. *keep* is a new or empty folder for the files of both runs.
    Returns 1 if the run with the library was not perfect, or if fewer processes were killed than asked.
    """
    seed = random.randrange(1_000_000) if seed is None else seed
    messages = len(load_reviews())
    points = plan(kills, seed, messages)
    stage = Stage(Console(quiet=as_json, highlight=False, width=min(Console().width, _WIDTH)), messages)
    with _working_folder(keep) as folder, _sigterm_ends():
        stage.introduce(kills)
        ours, deaths = _run("with", folder, points, stage)
        stage.introduce_plain()
        plain, plain_deaths = _run("without", folder, points, stage)
    if as_json:
        fields = dataclasses.asdict(ours) | {"deaths": deaths, "seed": seed}
        print(json.dumps(fields | {"without": dataclasses.asdict(plain) | {"deaths": plain_deaths}}))
    else:
        stage.conclude(ours, plain, kills, seed, keep)
    return 1 if ours.faults or ours.kills < kills or plain.kills < kills else 0


def _run(kind: str, folder: Path, points: Sequence[KillPoint], stage: Stage) -> tuple[Counts, list[dict[str, int]]]:
    home = folder / kind
    home.mkdir()
    with stage.run(home) as (on_tick, on_life):
        lives = run_lives(kind, home, points, on_tick=on_tick, on_life=on_life)
    deaths = [
        {"pid": life.pid, "returncode": life.returncode, "calls": life.calls, "mails": life.mails}
        for life in lives
        if life.killed
    ]
    return measure(home, lives), deaths


@contextmanager
def _working_folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dalsegno-demo-") as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise DefinitionError(f"--keep {str(keep)!r} is there already and not an empty folder; give a new one")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, so that processes and files are cleaned up."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stage:
    """Everything that is printed. Plain text when it does not go to a terminal."""

    def __init__(self, console: Console, messages: int) -> None:
        self._console = console
        self._messages = messages
        fancy = _encodable("✗✓⠋", console.encoding)
        self._killed, self._ended, self._spinner = ("✗", "✓", "dots") if fancy else ("x", "+", "line")

    def introduce(self, kills: int) -> None:
        say = self._console.print
        say()
        self._console.rule("[bold]Dal Segno[/]: an agent that is safe to kill", align="left", style="cyan")
        say(
            f"\n{self._messages} product reviews come in. For each one an agent [bold]asks a model[/] for a score from "
            "1 to 5, [bold]counts[/] the review in its memory of the product, [bold]mails[/] the manager if the score "
            f"is 2 or less, and writes a [bold]result[/]. It works on {IN_FLIGHT} reviews at a time."
        )
        say(
            "\nThe model here is only a [bold]random stand-in[/]: like a real one it is slow, and asked twice it may "
            "answer differently. A mail is a line in a file outside.\n"
        )
        say(
            "[bold cyan]1.[/] [bold]With Dal Segno.[/] The agent's process is killed with SIGKILL in the middle of its "
            f"work, {'once' if kills == 1 else f'{kills} times'}, and started again:"
        )

    def introduce_plain(self) -> None:
        self._console.print(
            "\n[bold cyan]2.[/] [bold]Without it.[/] The same logic as an ordinary, careful script, which saves its "
            f"position and memory after every {BATCH} reviews, when all of their work is done. So a kill makes it lose "
            "nothing, and do again what it had not saved. The same kills:"
        )

    @contextmanager
    def run(self, home: Path) -> Iterator[tuple[Callable[[], None], Callable[[Life], None]]]:
        """What shows one run: a function for each look at it, and one for each process that ended."""
        live = self._console.is_terminal and not self._console.quiet
        with self._console.status("  starting ...", spinner=self._spinner) if live else nullcontext() as status:
            counter = _Results(home / RESULTS, self._messages)

            def on_tick() -> None:
                if status is not None and (text := counter.text()):
                    status.update(text)

            yield on_tick, self._tell

    def _tell(self, life: Life) -> None:
        did = f"{life.calls:>4} calls, {life.mails:>3} mails"
        code = f"[dim](code {life.returncode})[/]"
        if life.killed:
            when = "as a mail left" if life.at_mail else "at work"
            text = f"   [red]{self._killed}[/] process {life.pid:<8}{did}   [red]killed[/] {when} {code}"
        else:
            text = f"   [green]{self._ended}[/] process {life.pid:<8}{did}   came to the end {code}"
        self._console.print(text)

    def conclude(self, ours: Counts, plain: Counts, kills: int, seed: int, keep: Path | None) -> None:
        say = self._console.print
        say("\n[bold cyan]3.[/] [bold]What the world outside has seen[/], counted in its files:\n")
        say(Padding(_table(ours, plain), (0, 0, 0, 3)))
        footnote = (
            "A model call that a kill cut off is made again, as nobody had seen its answer. An answer that was "
            "recorded is never asked for again."
        )
        say(Padding(Text(footnote, style="dim"), (1, 3)))
        say(_verdict(ours, plain, kills))
        say(f"\nThe same kills again: [bold]dalsegno demo --seed {seed}{'' if kills == 5 else f' --kills {kills}'}[/]")
        if keep is not None:
            say(f"The files of both runs: [bold]{escape(str(keep))}[/]")
        agent = Path(__file__).with_name("agent.py")
        say("The agent:", Text(str(agent), style="bold"), soft_wrap=True)


def _encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Results:
    """Counts results now and then, for the line that shows progress."""

    def __init__(self, path: Path, messages: int) -> None:
        self._path = path
        self._messages = messages
        self._ticks = 0

    def text(self) -> str | None:
        self._ticks += 1
        if self._ticks % 25 or not self._path.exists():
            return None
        return f"  {self._path.read_bytes().count(bytes([10]))} results of {self._messages} reviews"


def _table(ours: Counts, plain: Counts) -> Table:
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("")
    table.add_column("with Dal Segno", justify="right")
    table.add_column("without", justify="right")
    for field, label in _ROWS.items():
        cells = (_cell(field, getattr(counts, field)) for counts in (ours, plain))
        table.add_row(Text(label), *cells)
    return table


def _cell(field: str, count: int) -> Text:
    if field not in _FAULTS:
        return Text(str(count))
    return Text(str(count), style="bold red" if count else "bold green")


def _verdict(ours: Counts, plain: Counts, kills: int) -> str:
    happened = min(ours.kills, plain.kills)
    if happened < kills:
        return f"[bold red]Only {happened} of {kills} kills happened, so this shows nothing: run it again.[/]"
    if ours.faults:
        return (
            "[bold red]The run with Dal Segno was not perfect. This is a bug: please report it with the seed below.[/]"
        )
    times = "the kill" if kills == 1 else f"all {kills} kills"
    text = f"[bold green]Through {times}, every mail was sent once and every result written once.[/]"
    wrong = [
        words.format(f"[bold red]{count}[/] {noun}{'' if count == 1 else 's'}")
        for field, (words, noun) in _FAULTS.items()
        if (count := getattr(plain, field))
    ]
    if wrong:
        text += f"\nThe ordinary script {', '.join(wrong[:-1])}{' and ' if wrong[1:] else ''}{wrong[-1]}."
    return text
