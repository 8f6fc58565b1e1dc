"""What the files outside of the processes say when everything is over. Nothing here knows which run it looks at."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.demo.lives import Life
from dalsegno.demo.world import CALLS, MAILS, MEMORY, PROGRESS, QUESTIONS, RESULTS, load_reviews, read_lines


@dataclass(frozen=True, slots=True)
class Counts:
    """What one run did."""

    messages: int
    kills: int
    """Processes that really ended with SIGKILL at their kill point."""
    calls_executed: int
    """Real executions of model and mail tool."""
    calls_replayed: int
    """Calls answered from the record, as each process last said; what a killed one did in its last 0.1 s is missing."""
    in_doubt: int
    """Calls of which a restarted process had to find out whether they had happened."""
    once_calls: int
    """Mails sent."""
    once_repeated: int
    """Mails that were sent again for the same review."""
    outputs: int
    outputs_repeated: int
    outputs_lost: int
    """Reviews without a result."""
    contradictions: int
    """Reviews whose last result and whose mail disagree: mailed about a good score, or not mailed about a bad one."""
    memory_wrong: int
    """Products whose count of reviews in the agent's memory is not their number of reviews."""

    @property
    def faults(self) -> int:
        return self.once_repeated + self.outputs_repeated + self.outputs_lost + self.contradictions + self.memory_wrong


def measure(folder: Path, lives: Sequence[Life]) -> Counts:
    """Count what the run in *folder* left behind."""
    reviews = load_reviews()
    mailed = Counter(mail["number"] for mail in read_lines(folder / MAILS))
    results = read_lines(folder / RESULTS)
    last_score = {result["number"]: result["score"] for result in results}
    return Counts(
        messages=len(reviews),
        kills=sum(life.killed for life in lives),
        calls_executed=len(read_lines(folder / CALLS)),
        calls_replayed=_replayed(read_lines(folder / PROGRESS)),
        in_doubt=len({question["call"] for question in read_lines(folder / QUESTIONS)}),
        once_calls=mailed.total(),
        once_repeated=mailed.total() - len(mailed),
        outputs=len(results),
        outputs_repeated=len(results) - len(last_score),
        outputs_lost=len({review["number"] for review in reviews} - last_score.keys()),
        contradictions=sum((score <= 2) != (number in mailed) for number, score in last_score.items()),
        memory_wrong=_wrong_counts(folder / MEMORY, reviews),
    )


def _replayed(notes: list[dict[str, Any]]) -> int:
    last = {note["pid"]: note["replayed"] for note in notes}
    return sum(last.values())


def _wrong_counts(memory: Path, reviews: list[dict[str, Any]]) -> int:
    wanted = Counter(review["id"] for review in reviews)
    found: dict[str, int] = json.loads(memory.read_text())
    return sum(found.get(product) != wanted[product] for product in found.keys() | wanted.keys())
