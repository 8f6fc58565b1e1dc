"""The world outside of the demo's processes: a model, a mail server, and files that outlive every kill.

The files lie in the present folder. Each real execution of the model or of the mail tool appends one line to
``calls.jsonl``, so executions are counted by who is called, not by who calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).with_name("reviews.jsonl")
CALLS = "calls.jsonl"
MAILS = "mails.jsonl"
QUESTIONS = "questions.jsonl"
PROGRESS = "progress.jsonl"
RESULTS = "results.jsonl"
MEMORY = "memory.json"

IN_FLIGHT = 12
"""How many reviews are worked on at a time, with the library and without it."""


def load_reviews() -> list[dict[str, Any]]:
    """The sample: invented reviews of invented products."""
    return read_lines(SAMPLE)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def append_line(path: str, *, durable: bool = False, **fields: Any) -> None:
    """Append one line in one write, which a SIGKILL cannot cut in two; *durable* waits until it is on the disk."""
    line = json.dumps(fields, ensure_ascii=False) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line.encode())
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


async def ask_model(review: str) -> int:
    """A random stand-in for a model: a score from 1 to 5 that has nothing to do with the review.

    Like a model it takes its time, and asked twice it may well answer differently.
    """
    append_line(CALLS, call="ask_model", pid=os.getpid())
    await asyncio.sleep(random.uniform(0.03, 0.09))
    return random.randint(1, 5)


def send_mail(number: int, product: str, call: str | None) -> None:
    """Mail the manager about a bad review: one line in the sent mail, then a wait for the server to say so."""
    append_line(CALLS, call="send_mail", pid=os.getpid())
    append_line(MAILS, durable=True, number=number, product=product, call=call)
    time.sleep(0.02)


def find_mail(call: str) -> bool:
    """Whether the mail of *call* is in the sent mail."""
    append_line(QUESTIONS, call=call, pid=os.getpid())
    return any(mail["call"] == call for mail in read_lines(Path(MAILS)))
