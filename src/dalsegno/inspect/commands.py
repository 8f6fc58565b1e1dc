"""The commands that look and decide: ``runs``, ``show``, ``checkpoints``, ``resolve``, ``retry``, ``signal``.

They own no job, so they work while it runs. Exit code 0: shown or decided, also if the same was decided before; 1: what
is named is not there, is not to be decided, or was decided otherwise; 2: wrong usage; 4: decided, or found, but
standard output does not take it.
"""

from __future__ import annotations

from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dalsegno.errors import DalSegnoError, DefinitionError
from dalsegno.inspect import streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dalsegno.operate.decide import Outcome
    from dalsegno.operate.views import Lens, MessageSummary
    from dalsegno.stores.base import JobInfo, StoreInspector

Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]
Store = Annotated[str | None, typer.Option(help="URL of the store. [default: sqlite:///.dalsegno/JOB.db]")]
Cipher = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="Cipher of the job's payloads.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Key = Annotated[str | None, typer.Option(help="Key of the message: text, or a JSON value.")]
KeyJson = Annotated[bool, typer.Option("--key-json", help="The key is JSON, where text has quotes.")]


class StateChoice(StrEnum):
    """What messages may be asked for; ``parked`` is all that are set aside."""

    parked = "parked"
    in_doubt = "in-doubt"
    waiting = "waiting"
    failed = "failed"
    attempts = "attempts"
    in_flight = "in-flight"
    damaged = "damaged"
    encrypted = "encrypted"
    done = "done"


def add_commands(app: typer.Typer) -> None:
    """Make the commands of this module commands of *app*."""
    for command in (runs, show, checkpoints, resolve, retry):
        app.command()(command)
    app.command("signal")(send_signal)


# --- looking ---


def runs(
    store: Annotated[str | None, typer.Option(help="URL of the store. [default: each file .dalsegno/*.db]")] = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs, and whether they run."""
    from dalsegno.inspect import output
    from dalsegno.operate.operator import place_of

    found: list[tuple[str, JobInfo]] = []
    failures: list[str] = []
    for url in _default_stores() if store is None else [store]:
        try:
            with closing(place_of(url).inspect()) as inspector:
                found += [(url, info) for info in inspector.jobs()]
        except DalSegnoError as error:
            if store is not None:
                raise
            failures.append(str(error))
    output.show_runs(found, failures, as_json)
    if failures:
        raise typer.Exit(1)


def show(
    job: Job,
    what: Annotated[
        str | None, typer.Argument(metavar="MESSAGE|CALL", help="One message, or one call by its first digits.")
    ] = None,
    key: Key = None,
    key_json: KeyJson = False,
    state: Annotated[StateChoice | None, typer.Option(help="Only messages in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Messages that are listed.")] = 50,
    redact: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Hide values of that name too; may be repeated.")
    ] = None,
    store: Store = None,
    cipher: Cipher = None,
    as_json: AsJson = False,
) -> None:
    """Show what is recorded of a job, of one message or of one call."""
    from dalsegno.inspect import output

    with closing(_inspector_of(job, store, cipher)) as inspector:
        info, lens = _info(inspector, job), _lens(redact or ())
        of_key = _key(inspector, job, key, key_json)
        if what is None:
            output.show_messages(info, _chosen(inspector, job, of_key, state, lens), limit, lens, as_json)
        else:
            _show_one(inspector, info, what, of_key, lens, as_json)


def _chosen(
    inspector: StoreInspector, job: str, key: bytes | None, state: StateChoice | None, lens: Lens
) -> Iterator[MessageSummary]:
    from dalsegno.operate.lookup import find_messages, perhaps_in_flight, perhaps_set_aside, summaries
    from dalsegno.operate.views import SET_ASIDE, State

    messages = None
    if key is not None:
        messages = find_messages(inspector, job, None, key)
    elif state is not None and State(state) in SET_ASIDE:
        messages = perhaps_set_aside(inspector, job, lens)
    elif state == StateChoice.in_flight:
        messages = perhaps_in_flight(inspector, job, lens)
    for summary in summaries(inspector, job, messages, lens):
        if state in (None, str(summary.state)) or (state == "parked" and summary.state in SET_ASIDE):
            yield summary


def _show_one(
    inspector: StoreInspector, info: JobInfo, what: str, key: bytes | None, lens: Lens, as_json: bool
) -> None:
    from dalsegno.inspect import output
    from dalsegno.operate.lookup import decisions_by_message, find_call, find_message, find_messages, looks_like_call
    from dalsegno.operate.views import message_json

    call = None
    # What is the id of a message is not taken for the digits of a call.
    if looks_like_call(what) and not find_messages(inspector, info.name, what, key):
        place = find_call(inspector, info.name, what, lens)
        call, which = place.call, (place.key, place.message)
    else:
        which = find_message(inspector, info.name, what, key)
    decided = decisions_by_message(inspector, info.name).get(which, [])
    message = message_json(*which, inspector.records(info.name, *which), decided, lens)
    if call is None:
        output.show_message(info, message, as_json)
    else:
        output.show_call(info, message, call, as_json)


def checkpoints(
    job: Job,
    store: Store = None,
    file: Annotated[
        str | None,
        typer.Option("--checkpoints", help="File of the job's checkpoints. [default: beside the store]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a job that 'dalsegno run --restore-checkpoint' can go back to."""
    from dalsegno.inspect import output
    from dalsegno.runners.checkpoints import CheckpointFile
    from dalsegno.runners.local import checkpoint_path
    from dalsegno.stores import open_store
    from dalsegno.stores.default import default_store_path

    place = open_store(store if store is not None else f"sqlite:///{default_store_path(job)}")
    path = checkpoint_path(job, place, file)
    if path is None:
        raise DefinitionError("a store in memory has no checkpoints that another process could see")
    kept = CheckpointFile(path)
    output.show_checkpoints(kept.kept_of(job), as_json)


# --- deciding ---


def resolve(
    job: Job,
    call: Annotated[str, typer.Argument(metavar="CALL", help="The call in doubt, by its first digits.")],
    happened: Annotated[
        str | None, typer.Option(metavar="JSON", help="It happened, and this is what it returned.")
    ] = None,
    did_not_happen: Annotated[
        bool, typer.Option("--did-not-happen", help="It did not happen, so it is made again.")
    ] = False,
    store: Store = None,
    cipher: Cipher = None,
    as_json: AsJson = False,
) -> None:
    """Answer whether a call in doubt happened."""
    from dalsegno.operate import decide

    if (happened is None) is not did_not_happen:
        raise DefinitionError("say either --happened JSON, with what the call returned, or --did-not-happen")
    result = None if happened is None else _tree(happened, "--happened")
    with closing(_inspector_of(job, store, cipher)) as inspector:
        _end(inspector, job, [decide.resolve(inspector, job, call, happened is not None, result, _lens())], as_json)


def retry(
    job: Job,
    message: Annotated[str | None, typer.Argument(metavar="MESSAGE", help="The message that failed.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every message that failed.")] = False,
    key: Key = None,
    key_json: KeyJson = False,
    store: Store = None,
    cipher: Cipher = None,
    as_json: AsJson = False,
) -> None:
    """Run a message again that was set aside because it failed."""
    from dalsegno.operate import decide

    if (message is None) is not every:
        raise DefinitionError("say which MESSAGE is to be run again, or --all")
    with closing(_inspector_of(job, store, cipher)) as inspector:
        of_key = _key(inspector, job, key, key_json)
        if message is None:
            _end(inspector, job, list(decide.retry_all(inspector, job, of_key, _lens())), as_json)
        else:
            _end(inspector, job, [decide.retry(inspector, job, message, of_key, _lens())], as_json)


def send_signal(
    job: Job,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the message that waits: text, or a JSON value.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the signal.")],
    value: Annotated[str, typer.Argument(metavar="JSON", help="What the agent is given.")],
    message: Annotated[str | None, typer.Option(help="The message, if several of the key wait.")] = None,
    key_json: KeyJson = False,
    store: Store = None,
    cipher: Cipher = None,
    as_json: AsJson = False,
) -> None:
    """Give a message the signal that it waits for."""
    from dalsegno.operate import decide

    tree = _tree(value, "the value of the signal")
    with closing(_inspector_of(job, store, cipher)) as inspector:
        of_key = _key(inspector, job, key, key_json)
        assert of_key is not None
        # An agent may act on a signal at once, so a second one is never taken for the first.
        _end(
            inspector,
            job,
            [decide.signal(inspector, job, of_key, name, tree, message, _lens())],
            as_json,
            repeatable=False,
        )


def _end(
    inspector: StoreInspector, job: str, outcomes: list[Outcome], as_json: bool, *, repeatable: bool = True
) -> None:
    """Say what was decided, and with the exit code whether it now is as was asked."""
    from dalsegno.inspect import output

    info = _info(inspector, job)
    decided = all(outcome.written or (outcome.same and repeatable) for outcome in outcomes)
    done = f"job {info.name}: it is decided" if decided else f"job {info.name}: it is not decided as asked"
    with streams.telling(done, streams.UNTOLD if decided else 1):
        output.show_outcomes(info, outcomes, _lens(), as_json)
    if not decided:
        raise typer.Exit(1)


# --- what the arguments name ---


def _lens(names: Sequence[str] = ()) -> Lens:
    """How all commands show payloads: without what lies under the name of a secret, or one of *names*."""
    from dalsegno.inspect.redact import Redactor
    from dalsegno.operate.views import Lens

    return Lens(redact=Redactor(names).redact)


def _default_stores() -> list[str]:
    # The dots in the name of a job are escaped in the name of its file.
    files = sorted(path for path in Path(".dalsegno").glob("*.db") if not path.name.endswith(".checkpoints.db"))
    return [f"sqlite:///{path}" for path in files]


def _inspector_of(job: str, store: str | None, cipher: str | None) -> StoreInspector:
    from dalsegno.inspect.cli import load_cipher
    from dalsegno.operate.operator import inspector_of, place_of

    place = None if store is None else place_of(store)
    return inspector_of(job, place, None if cipher is None else load_cipher(cipher))


def _info(inspector: StoreInspector, job: str) -> JobInfo:
    from dalsegno.stores.base import unknown_job

    jobs = inspector.jobs()
    for info in jobs:
        if info.name == job:
            return info
    raise unknown_job("the store", job, [info.name for info in jobs])


def _key(inspector: StoreInspector, job: str, key: str | None, as_json: bool) -> bytes | None:
    from dalsegno.operate.lookup import find_key

    if key is None:
        return None
    return find_key(key, (each for each, _ in inspector.messages(job)), as_json=as_json)


def _tree(text: str, what: str) -> Any:
    """The codec tree of a JSON argument."""
    from dalsegno.core import codec
    from dalsegno.operate.lookup import parse_json

    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise DefinitionError(
            f"{what} is JSON, which {text[:200]!r} is not ({error}); text has quotes there, as in '\"paid\"'"
        ) from None
    return codec.to_tree(value, root=what)
