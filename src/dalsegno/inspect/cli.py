"""The command line, ``dalsegno``.

Exit codes of ``dalsegno run``: 0 the input is finished; 1 the run failed; 2 wrong usage; 3 finished, but messages are
parked or records were set aside; 4 finished, but the summary could not be printed; 130 and 143 stopped by SIGINT or
SIGTERM before the end of the input.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import os
import re
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dalsegno.errors import DalSegnoError, DefinitionError, raised_at
from dalsegno.inspect import interrupts, streams
from dalsegno.inspect.commands import add_commands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dalsegno.agent import Agent
    from dalsegno.cipher import PayloadCipher
    from dalsegno.runners.local import LocalRunner
    from dalsegno.runners.report import OnProgress, Progress, RunReport
    from dalsegno.runners.sinks import Sink
    from dalsegno.runners.sources import Source

app = typer.Typer(
    name="dalsegno",
    help="AI agents on streams that are safe to crash.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PARKED = 3
_KAFKA = "kafka://"
_NARROW = 80
_AT_ONCE_SECONDS = 3.0
"""How long a second signal may take to end a run, whatever its calls do."""
_BESIDE = re.compile(r"-(wal|shm|journal)|\.[0-9a-f]{16}\.lock")
"""What follows the name of a database in the names of the files beside it."""
_SIGNAL_CODES = {"SIGINT": 130, "SIGTERM": 143}


class BadInputChoice(StrEnum):
    """What happens to an input record that cannot be read."""

    stop = "stop"
    skip = "skip"
    park = "park"


class OnDivergenceChoice(StrEnum):
    """What happens to a message in flight whose record the code no longer fits."""

    strict = "strict"
    rerun = "rerun"


class OnFailureChoice(StrEnum):
    """What happens to a message whose action raises."""

    stop = "stop"
    park = "park"


class _Interrupted(Exception):
    """Ctrl-C came while nothing else saw to it."""


class _EndAtOnce(Exception):
    """A second signal came; *code* is the exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


def main() -> None:
    """Entry point of the command, for a process that has nothing else to do. Ends with `SystemExit`."""
    streams.make_usable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    code = _code()
    streams.let_go()
    sys.exit(code)


def _code() -> int:
    """Run the command; its exit code."""
    try:
        with streams.checked():
            app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except (KeyboardInterrupt, _Interrupted):
        interrupts.is_handled()
        streams.say(interrupts.interruption())
        return interrupts.INTERRUPTED
    except streams.CannotPrint as error:
        if (message := error.message()) is not None:
            streams.say(message)
        return error.code
    except DalSegnoError as error:
        streams.say(f"{type(error).__name__}: {error}")
        return 2 if isinstance(error, DefinitionError) else 1
    except _EndAtOnce as end:
        _end_at_once(end.code)
    return 0


def _end_at_once(code: int) -> NoReturn:
    """End the process: a callee may sit in a thread that nothing can end, and the interpreter would wait for that."""
    streams.say(
        "stopped at once; of the calls that were cut off, those with effect 'once' are in doubt; run it again to go on"
    )
    with suppress(OSError, RuntimeError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()
    os._exit(code)


def _end_soon(signal_name: str) -> None:
    """End the process before long, also if a call swallows its cancellation or blocks the event loop."""
    timer = threading.Timer(_AT_ONCE_SECONDS, _end_at_once, [_SIGNAL_CODES.get(signal_name, 1)])
    timer.daemon = True
    timer.start()


@contextmanager
def _interruptible() -> Iterator[None]:
    # The argument parser would end the process without a word.
    interrupts.raise_on_interrupt()
    try:
        with streams.unchecked():
            yield
    except KeyboardInterrupt as interrupt:
        raise _Interrupted from interrupt


def _version(wanted: bool) -> None:
    if wanted:
        from dalsegno import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "run":  # which still has to load what it runs
        interrupts.raise_on_interrupt()


@app.command()
def run(
    agent: Annotated[
        str, typer.Argument(metavar="MODULE:AGENT", help="Where the agent is, as in examples.reviews:agent.")
    ],
    job: Annotated[str, typer.Option(help="Name of the job: the same name goes on with the same history.")],
    source: Annotated[
        str,
        typer.Option(help="JSON Lines or CSV file, - for JSON Lines on standard input, or kafka://HOST:PORT/TOPIC."),
    ],
    sink: Annotated[
        str,
        typer.Option(help="JSON Lines file for the outputs, - for standard output, or kafka://HOST:PORT/TOPIC."),
    ] = "-",
    until_end: Annotated[
        bool, typer.Option("--until-end", help="End where the topics of a Kafka source end now.")
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Let a new job append to a sink that holds outputs already.")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="Field that messages are partitioned by. Without it, one message at a time.")
    ] = None,
    message_id: Annotated[
        str | None, typer.Option(help="Field with the id of the message. Without it, its place in the source.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="URL of the store. [default: sqlite:///.dalsegno/JOB.db]")] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="File of the job's checkpoints. [default: beside the store]")
    ] = None,
    on_bad_input: Annotated[
        BadInputChoice, typer.Option(help="What to do with a record that cannot be read.")
    ] = BadInputChoice.stop,
    cipher: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Cipher of the job's payloads, or a function that returns it."),
    ] = None,
    on_failure: Annotated[
        OnFailureChoice, typer.Option(help="What to do when an action raises: stop the job, or park the message.")
    ] = OnFailureChoice.stop,
    max_attempts: Annotated[
        int | None,
        typer.Option(min=3, help="Park a message during which the process was killed that often. [default: never]"),
    ] = None,
    on_divergence: Annotated[
        OnDivergenceChoice,
        typer.Option(
            help="What to do where changed code no longer fits the record: stop the job, or go on from there."
        ),
    ] = OnDivergenceChoice.strict,
    wait: Annotated[bool, typer.Option("--wait", help="Do not end while a message waits for a signal.")] = False,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="So many of the last checkpoints can be restored.")] = 1,
    keep_history: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep finished messages for so long, as 12h or 7d. [default: 0]")
    ] = None,
    restore_checkpoint: Annotated[
        int | None,
        typer.Option(min=0, help="Go back to that checkpoint first, see 'dalsegno checkpoints'. [default: the last]"),
    ] = None,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Messages that are processed at a time.")] = 64,
    checkpoint_interval: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds between checkpoints. [default: 5, or 1 with a Kafka sink]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
) -> None:
    """Run an agent over a stream of records; run it again after a crash, and it goes on where it was."""
    from dalsegno.runners.kafka_client import sink_of
    from dalsegno.runners.local import LocalRunner
    from dalsegno.runners.sinks import JsonLinesSink, open_sink
    from dalsegno.runners.sources import open_source

    with _interruptible():
        runner = LocalRunner(
            load_agent(agent),
            job=job,
            store=store,
            checkpoints=checkpoints,
            max_in_flight=max_in_flight,
            checkpoint_interval=checkpoint_interval,
            on_failure=on_failure.value,
            max_attempts=max_attempts,
            on_divergence=on_divergence.value,
            cipher=None if cipher is None else load_cipher(cipher),
            keep_checkpoints=keep_checkpoints,
            keep_history=None if keep_history is None else _time(keep_history),
            restore=restore_checkpoint,
        )
        opened_source, opened_sink = open_source(source), open_sink(sink)
        if until_end:
            opened_source = _until_end(source)
        if append and sink.startswith(_KAFKA):
            opened_sink = sink_of(sink, append=True)
        if isinstance(opened_sink, JsonLinesSink):
            _check_apart(opened_sink.path, source, runner)
            opened_sink = JsonLinesSink(sink, append=append)
        runner._at_once = _end_soon
        with _progress_bar(progress and sys.stderr.isatty()) as on_progress:
            told = _told_when_stopping(on_progress)
            report = _run_to_the_end(runner, opened_source, opened_sink, key, message_id, on_bad_input, wait, told)
    code = _exit_code(report)
    finished = "the input is finished" if report.stopped_by is None else f"the run is stopped by {report.stopped_by}"
    more = ", and messages are parked or bad records set aside" if code == PARKED else ""
    with streams.telling(f"job {report.job}: {finished}{more}", code if report.stopped_by else streams.UNTOLD):
        # Outputs on standard output are not to be mixed with the summary.
        to = sys.stderr if sink == "-" else sys.stdout
        print(_as_json(report) if as_json else _summary(report), file=to, flush=True)
    raise typer.Exit(code)


def _time(text: str) -> timedelta:
    """What ``90s``, ``30m``, ``12h`` or ``7d`` means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    try:
        if found is not None:
            return timedelta(seconds=float(found[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[found[2]])
    except OverflowError:
        pass
    raise DefinitionError(f"{text!r} is not a time: write a number and s, m, h or d, as in 12h or 7d")


def _run_to_the_end(
    runner: LocalRunner,
    source: Source,
    sink: Sink,
    key: str | None,
    message_id: str | None,
    on_bad_input: BadInputChoice,
    wait: bool,
    on_progress: OnProgress,
) -> RunReport:
    import asyncio

    try:
        return runner.run(
            source,
            sink,
            key=key,
            message_id=message_id,
            on_bad_input=on_bad_input.value,
            wait=wait,
            on_progress=on_progress,
        )
    except SystemExit as error:
        # Its code would become the command's, and 0 would say that the input is finished.
        raise DalSegnoError(
            f"the run was ended by SystemExit({error.code!r}){raised_at(error)}, before the end of its input; do not "
            "exit the process in code that a run calls, then run it again to go on"
        ) from error
    except asyncio.CancelledError as second_signal:
        raise _EndAtOnce(_SIGNAL_CODES.get(str(second_signal), 1)) from None


def _until_end(source: str) -> Source:
    from dalsegno.runners.kafka_client import source_of

    if not source.startswith(_KAFKA):
        raise DefinitionError(f"--until-end is for Kafka topics; {source!r} has an end of its own")
    return source_of(source, until_end=True)


def _check_apart(sink: Path, source: str, runner: LocalRunner) -> None:
    """Refuse outputs that would go into a file which the run reads, or keeps its records in."""
    store, checkpoints = getattr(runner._store, "path", None), runner._checkpoints._path
    others = {
        "the source": None if source == "-" else Path(source),
        "the store": store,
        "the file of the checkpoints": checkpoints,
    }
    used = [what for what, path in others.items() if isinstance(path, Path) and _same_file(sink, path)]
    databases = {"a part of the store": store, "a part of the checkpoints": checkpoints}
    used += [what for what, path in databases.items() if isinstance(path, Path) and _is_beside(sink, path)]
    if used:
        raise DefinitionError(f"the sink {str(sink)!r} is {used[0]} of this run; give outputs a file of their own")


def _is_beside(file: Path, database: Path) -> bool:
    """Whether *file* has a name that belongs to *database*: SQLite's log and the like, or a job's lock."""
    name, of = Path(os.path.realpath(file)), Path(os.path.realpath(database))
    rest = name.name.removeprefix(of.name)
    return name.parent == of.parent and rest != name.name and _BESIDE.fullmatch(rest) is not None


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there yet
        return os.path.realpath(one) == os.path.realpath(other)


@app.command()
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print what was counted as one JSON object.")] = False,
    kills: Annotated[int, typer.Option(min=1, max=20, help="How often the agent's process is killed.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Chooses where the kills fall. [default: random]")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the files of both runs there.")] = None,
) -> None:
    """Kill an agent in the middle of its work, with this library and without it, and count what went wrong."""
    from dalsegno.demo.show import show_demo

    raise typer.Exit(show_demo(kills=kills, seed=seed, keep=keep, as_json=as_json))


add_commands(app)


def load_agent(spec: str) -> Agent:
    """The agent that *spec*, ``module:attribute``, names; an agent class is instantiated.

    The present folder is importable. Raises `DefinitionError` that says what is missing where.
    """
    from dalsegno.agent import Agent, check_agent

    found = _named(spec, Agent, "an agent", "MODULE:AGENT", "examples.reviews:agent")
    if isinstance(found, type) and issubclass(found, Agent):
        found = _made(found, spec)
    return check_agent(found)


def load_cipher(spec: str) -> PayloadCipher:
    """The cipher that *spec*, ``module:attribute``, names; a function or class is called.

    The present folder is importable. Raises `DefinitionError` that says what is missing where.
    """
    from dalsegno.cipher import PayloadCipher

    found = _named(spec, PayloadCipher, "a cipher", "MODULE:NAME", "keys:cipher")
    if not isinstance(found, PayloadCipher) and callable(found):
        try:
            found = found()
        except DefinitionError:
            raise
        except (Exception, SystemExit) as error:
            raise DefinitionError(
                f"the cipher {spec!r} cannot be made: {type(error).__name__}: {error}{raised_at(error)}"
            ) from error
    if not isinstance(found, PayloadCipher):
        raise DefinitionError(
            f"{spec!r} is not a cipher but {type(found).__name__}; name a PayloadCipher, such as an AesGcmCipher, or a "
            "function that returns one"
        )
    return found


def _named(spec: str, kind: type, what: str, form: str, example: str) -> Any:
    """What *spec* names, which ought to be *what*, of the class *kind*; messages show *form* and *example*."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise DefinitionError(f"{spec!r} does not name {what}: write {form}, as in {example}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _not_importable(module_name, error) from error
        raise DefinitionError(
            f"there is no module {error.name!r} in {os.getcwd()} or among what is installed; {form} is written with "
            f"dots, as in {example}"
        ) from error
    except (Exception, SystemExit) as error:
        raise _not_importable(module_name, error) from error
    found: object = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            named = [n for n, value in vars(module).items() if isinstance(value, kind)]
            raise DefinitionError(
                f"module {module_name!r} has no {attribute!r}; its {what.split()[-1]}s are "
                f"{', '.join(map(repr, named)) or 'none'}"
            )
        found = getattr(found, name)
    return found


def _made(agent: type[Agent], spec: str) -> Agent:
    try:
        return agent()
    except (Exception, SystemExit) as error:
        raise DefinitionError(
            f"{spec!r} is a class that cannot be made without arguments: {type(error).__name__}: {error}"
            f"{raised_at(error) or _defined_at(agent)}; name an instance of it instead, as in agent = "
            f"{agent.__name__}(...)"
        ) from error


def _defined_at(agent: type[Agent]) -> str:
    code = getattr(inspect.unwrap(agent.__init__), "__code__", None)
    return f", at {code.co_filename}:{code.co_firstlineno} in __init__" if code else ""


def _not_importable(module_name: str, error: BaseException) -> DefinitionError:
    return DefinitionError(
        f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}{raised_at(error)}"
    )


def _exit_code(report: RunReport) -> int:
    if report.stopped_by is not None:
        return _SIGNAL_CODES.get(report.stopped_by, 1)
    return PARKED if report.parked or report.set_aside else 0


def _as_json(report: RunReport) -> str:
    fields = dataclasses.asdict(report)
    fields["parked"] = [{**parked, "key": _json_or_text(parked["key"])} for parked in fields["parked"]]
    return json.dumps(fields)


def _json_or_text(key: object) -> object:
    try:
        json.dumps(key, allow_nan=False)
    except (TypeError, ValueError):
        return repr(key)
    return key


def _summary(report: RunReport) -> str:
    from dalsegno.operate.lookup import printable

    rows = [
        ("messages", report.messages),
        ("outputs", report.outputs),
        ("calls executed", report.calls_executed),
        ("calls replayed", report.calls_replayed),
        ("parked", len(report.parked)),
        ("checkpoints", report.checkpoints),
        ("seconds", f"{report.seconds:.2f}"),
    ]
    if report.lag is not None:
        rows.insert(-2, ("records yet to be read", report.lag))
    if report.diverged:
        rows.insert(4, ("messages rerun by changed code", report.diverged))
    if report.waiting:
        rows.insert(5, ("waiting behind a parked message", report.waiting))
    if report.skipped or report.set_aside:
        rows.insert(5, ("bad records skipped", report.skipped))
        rows.insert(6, ("bad records set aside", report.set_aside))
    if report.repeated:
        rows.insert(-2, ("records that came again", report.repeated))
    ending = f"stopped by {report.stopped_by}; run it again to go on" if report.stopped_by else "finished"
    lines = [f"job {report.job}: {ending}", *(f"  {name:<32}{value:>12}" for name, value in rows)]
    lines += [
        f"  parked: key {parked.key!r}, message {printable(parked.message_id)}: {parked.reason}"
        for parked in report.parked[:10]
    ]
    if len(report.parked) > 10:
        lines.append(f"  and {len(report.parked) - 10} more parked messages")
    return "\n".join(lines)


@contextmanager
def _progress_bar(shown: bool) -> Iterator[OnProgress | None]:
    """A bar on standard error, by bytes or records that are worked off where the total is known."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, counts="")

        def on_progress(progress: Progress) -> None:
            bar.update(task, **_bar_of(progress, console.width))

        yield on_progress


def _bar_of(progress: Progress, width: int) -> dict[str, Any]:
    return {
        "description": progress.report.job,
        "completed": progress.done,  # not what is read, which runs ahead of the work
        "total": progress.total,
        "counts": _counts(progress.report, width),
    }


def _told_when_stopping(shown: OnProgress | None) -> OnProgress:
    """*shown*, which is None if there is nothing to show, and a line when a signal has come and calls have to end."""
    told = False

    def on_progress(progress: Progress) -> None:
        nonlocal told
        if shown is not None:
            shown(progress)
        if not told and progress.in_flight and progress.report.stopped_by in _SIGNAL_CODES:
            told = True
            messages = "1 message" if progress.in_flight == 1 else f"{progress.in_flight:,} messages"
            streams.say(
                f"stopping; waiting for the calls in flight of {messages} to end (Ctrl-C again to stop at once, which "
                "leaves calls with effect 'once' in doubt)"
            )

    return on_progress


def _counts(report: RunReport, width: int) -> str:
    counts = f"{report.messages:,} messages, {report.calls_executed:,} calls executed"
    if width >= _NARROW:
        counts += f", {report.calls_replayed:,} replayed"
    if report.lag is not None:
        counts += f", lag {report.lag:,}"
    if report.parked:
        counts += f", {len(report.parked)} parked"
    return counts


if __name__ == "__main__":
    main()
