"""How what is recorded looks on a terminal of 80 columns, and as JSON. Nothing here looks anything up."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dalsegno.core.decisions import parse_target
from dalsegno.errors import RecordError
from dalsegno.operate.decide import Outcome
from dalsegno.operate.lookup import key_text, printable
from dalsegno.operate.views import (
    SHOWN_DIGITS,
    Lens,
    MessageSummary,
    Question,
    answer_json,
    key_tree,
    question_json,
    summary_json,
)

if TYPE_CHECKING:
    from dalsegno.runners.checkpoints import CheckpointInfo
    from dalsegno.stores.base import JobInfo

_CUT_LIST = 90
_CUT_PAYLOAD = 400
_NARROWEST = 20


def show_runs(found: Sequence[tuple[str, JobInfo]], failures: Sequence[str], as_json: bool) -> None:
    if as_json:
        jobs = [{"store": store} | _job_json(info) for store, info in found]
        _print_json({"jobs": jobs, "failures": list(failures)})
        return
    if not found and not failures:
        print("no job has run in this folder: there is no store .dalsegno/*.db; name another one with --store")
    if found:
        table = _table("job", "running", "messages>", "opened>", "since")
        for _, info in found:
            running = f"pid {info.pid}" if info.running else "no"
            table.add_row(*_texts(info.name, running, f"{info.messages:,}", f"{info.epoch:,}", info.since))
        _print_table(table)
    for failure in failures:
        print(f"cannot be read: {printable(failure)}")


def show_checkpoints(kept: Sequence[CheckpointInfo], as_json: bool) -> None:
    if as_json:
        _print_json(
            {"checkpoints": [each._asdict() | {"taken": each.taken and each.taken.isoformat()} for each in kept]}
        )
        return
    if not kept:
        print("no checkpoint was taken yet")
        return
    table = _table("checkpoint>", "taken", "records read>")
    for each in kept:
        taken = each.taken.astimezone().isoformat(" ", "seconds") if each.taken else "not noted"
        table.add_row(*_texts(f"{each.number}", taken, f"{each.read:,}"))
    _print_table(table)


def show_messages(info: JobInfo, summaries: Iterator[MessageSummary], limit: int, lens: Lens, as_json: bool) -> None:
    shown = list(islice(summaries, limit))
    more = next(summaries, None) is not None
    if as_json:
        _print_json({"job": _job_json(info), "messages": [summary_json(each, lens) for each in shown], "more": more})
        return
    _print_job(info)
    if not shown:
        print("no such message is on record")
        return
    table = _table("key", "message", "state", "calls>", "about")
    for summary in shown:
        key = _cut(key_text(summary.key), 30)
        table.add_row(*_texts(key, summary.message, summary.state, f"{summary.calls:,}", _about(summary, lens)))
    _print_table(table)
    if more:
        print(f"and more: --limit {limit * 10} shows more of them, --state and --key fewer")


def show_message(info: JobInfo, message: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json({"job": _job_json(info), "message": message})
        return
    _print_job(info)
    _print_message_head(info, message)
    for task in message["tasks"]:
        print()
        _print_line(f"action {task['action']} for {task['event']}{'' if task['done'] else ', not done'}")
        for call in task["calls"]:
            _print_call(call, _CUT_PAYLOAD)
        for what in ("memory", "sensory"):
            for update in task[what]:
                path = ".".join(update["path"])
                value = f" = {_payload(update['value'], _CUT_PAYLOAD)}" if "value" in update else ""
                _print_line(f"{what}: {update['op']} {path}{value}", 2)
        for event in task["events"]:
            _print_line(f"sent: {_payload(event, _CUT_PAYLOAD)}", 2)
    if message["decisions"]:
        print()
    for made in message["decisions"]:
        _print_line(f"decided about {_about_what(made['target'])}: {answer_text(made['answer'])}")


def show_call(info: JobInfo, message: dict[str, Any], call_id: str, as_json: bool) -> None:
    """One call of *message*, in full."""
    task, call = next((t, c) for t in message["tasks"] for c in t["calls"] if c["call"] == call_id)
    if as_json:
        where = {name: message[name] for name in ("key", "message", "state")} | {"action": task["action"]}
        _print_json({"job": _job_json(info), "call": call | where})
        return
    _print_job(info)
    _print_message_head(info, message)
    print()
    _print_line(f"action {task['action']} for {task['event']}")
    _print_call(call, None)


def show_outcomes(info: JobInfo, outcomes: Sequence[Outcome], lens: Lens, as_json: bool) -> None:
    """What was decided, what not, and what happens next."""
    written = sum(outcome.written for outcome in outcomes)
    if as_json:
        decided = [_outcome_json(outcome, lens) for outcome in outcomes]
        _print_json({"job": _job_json(info), "written": written, "decisions": decided})
        return
    for outcome in outcomes:
        _print_line(_outcome_text(outcome, lens))
    if not outcomes:
        print(f"no message of job {info.name!r} failed: nothing was decided")
    if written and info.running:
        print(f"the running job (pid {info.pid}) takes it up within a second")
    elif written:
        print("run the job again to go on")


def _outcome_text(outcome: Outcome, lens: Lens) -> str:
    question, answer = outcome.question, answer_text(answer_json(outcome.decision, lens))
    call = f"call {question.call[:SHOWN_DIGITS]} " if question.call else "action "
    about = f"key {_cut(key_text(question.key), 40)}, message {question.message}, {call}{question.name}"
    if outcome.written:
        return f"decided: {answer}, for {about}"
    return f"already decided: {answer}, nothing changed; {about}"


def _outcome_json(outcome: Outcome, lens: Lens) -> dict[str, Any]:
    question = question_json(outcome.question) | {"answer": answer_json(outcome.decision, lens)}
    where = {"key": key_tree(outcome.question.key), "message": outcome.question.message}
    return where | question | {"written": outcome.written, "same": outcome.same}


def answer_text(answer: dict[str, Any]) -> str:
    """An answer in words, as ``happened 42``."""
    if "happened" in answer:
        return f"happened {_payload(answer['happened'], _CUT_LIST)}"
    if "value" in answer:
        return f"signal {_payload(answer['value'], _CUT_LIST)}"
    if "damaged" in answer:
        return f"unreadable: {answer['damaged']}"
    return "retry" if "retry" in answer else "did not happen"


def _about_what(target: str) -> str:
    try:
        kind, _, numbers = parse_target(target)
    except RecordError:
        return target
    if kind == "retry":
        return f"failure {numbers[0]}"
    return f"call number {numbers[0]}" + (f" in attempt {numbers[1]}" if kind == "resolve" else "")


def _about(summary: MessageSummary, lens: Lens) -> str:
    """What is to be decided, in the words that the commands take, or why nothing can be."""
    if not summary.questions:
        return _cut(summary.reason or "", _CUT_LIST)
    return "; ".join(_question_text(question, summary.reason, lens) for question in summary.questions)


def _question_text(question: Question, reason: str | None, lens: Lens) -> str:
    if question.kind == "retry":
        text = _cut(reason or "", _CUT_LIST)
    elif question.kind == "signal":
        text = f"signal {question.name}"
    else:
        text = f"{(question.call or '')[:SHOWN_DIGITS]} {question.name}"
    return f"{text} (decided: {answer_text(answer_json(question.decision, lens))})" if question.decision else text


def _print_job(info: JobInfo) -> None:
    running = f"running, pid {info.pid} on {info.host}, since {info.since}" if info.running else "not running"
    messages = "1 message" if info.messages == 1 else f"{info.messages:,} messages"
    _print_line(f"job {info.name}: {running}; {messages} on record")


def _print_message_head(info: JobInfo, message: dict[str, Any]) -> None:
    _print_line(f"key {_payload(message['key'], 200)}, message {message['message']}: {message['state']}")
    if message["reason"]:
        _print_line(message["reason"], 2)
    for question in message["questions"]:
        if question["answer"] is not None:
            _print_line(f"decided: {answer_text(question['answer'])}", 2)
        else:
            for command in _how_to(shlex.quote(info.name), message, question):
                _print_line(f"to decide: {command}", 2)


def _how_to(job: str, message: dict[str, Any], question: dict[str, Any]) -> list[str]:
    """The commands that answer *question*."""
    if question["kind"] == "resolve":
        command = f"dalsegno resolve {job} {question['call'][:SHOWN_DIGITS]}"
        return [f"{command} --happened JSON", f"{command} --did-not-happen"]
    if question["kind"] == "signal":
        key = shlex.quote(json.dumps(message["key"]))
        return [f"dalsegno signal {job} {key} {shlex.quote(question['name'])} JSON"]
    name = message["message"]
    return [f"dalsegno retry {job} {'-- ' if name.startswith('-') else ''}{shlex.quote(printable(name))}"]


def _print_call(call: dict[str, Any], cut: int | None) -> None:
    attempt = f", attempt {call['attempt']}" if call["attempt"] > 1 else ""
    lost = ", given up" if call.get("given_up") else ""
    _print_line(f"{call['call'][:SHOWN_DIGITS]}  {call['name']}  {call['effect']}, {call['status']}{attempt}{lost}", 2)
    args = call["args"] if isinstance(call["args"], list) else [call["args"]]  # redacted as a whole
    arguments = [_payload(each, cut) for each in args]
    if isinstance(call["kwargs"], dict):
        arguments += [f"{name}={_payload(value, cut)}" for name, value in call["kwargs"].items()]
    _print_line(f"({', '.join(arguments)})", 4)
    if "result" in call:
        _print_line(f"-> {_payload(call['result'], cut)}", 4)
    if "error" in call:
        _print_line(f"raised {_error_text(call['error'], cut)}", 4)


def _error_text(tree: Any, cut: int | None) -> str:
    if isinstance(tree, dict) and isinstance(tree.get("t"), str) and isinstance(tree.get("str"), str):
        return _cut(f"{tree['t'].rpartition(':')[2]}: {tree['str']}", cut)
    return _payload(tree, cut)


def _job_json(info: JobInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "identity": info.identity,
        "epoch": info.epoch,
        "running": info.running,
        "owner": info.owner,
        "pid": info.pid,
        "host": info.host,
        "since": info.since,
        "pruned_through": info.pruned_through,
        "messages": info.messages,
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value))


def _payload(tree: Any, cut: int | None) -> str:
    return _cut(json.dumps(tree, ensure_ascii=False), cut)


def _cut(text: str, cut: int | None) -> str:
    if cut is None or len(text) <= cut:
        return text
    return f"{text[:cut]}…"


def _table(*columns: str) -> Table:
    """A table without lines; the name of a column of numbers ends with ``>``."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.rstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=False)
    return table


def _texts(*cells: str) -> Iterable[Text]:
    # Not as markup: a key may look like some.
    return (Text(printable(cell)) for cell in cells)


def _print_table(table: Table) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        print(line.rstrip())


def _print_line(text: str, indent: int = 0) -> None:
    """*text* in as many lines as it takes."""
    width = max(Console().width, _NARROWEST)
    prefix = " " * indent
    print(
        textwrap.fill(
            printable(text),
            width,
            initial_indent=prefix,
            subsequent_indent=prefix + "  ",
            break_on_hyphens=False,
        )
    )
