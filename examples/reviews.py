"""An agent that scores product reviews with a model and tells the manager about the bad ones.

::

    dalsegno run examples.reviews:agent --job reviews --source reviews.jsonl --key id --sink out.jsonl

Each line of the source is an object with the product's ``id`` and the text of the ``review``. Kill the command whenever
you like and start it again: no notification is sent twice and no result is lost.

Sent notifications are the lines of ``sent_mail.jsonl``, or of the file that ``REVIEWS_SENT_MAIL`` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

from dalsegno import (
    Agent,
    DidNotHappen,
    Event,
    Happened,
    InputEvent,
    OutputEvent,
    RunnerContext,
    action,
    current_call,
)


class Scored(Event):
    product: str
    score: int


class ReviewAgent(Agent):
    @action(InputEvent)
    async def score(self, event: InputEvent, ctx: RunnerContext) -> None:
        answer = await ctx.durable_execute(rate_review, event.input["review"], effect="read")
        seen = ctx.short_term_memory.get("seen", 0) + 1
        ctx.short_term_memory.set("seen", seen)
        ctx.send_event(Scored(product=event.input["id"], score=answer))

    @action(Scored)
    async def alert(self, event: Scored, ctx: RunnerContext) -> None:
        if event.score <= 2:
            await ctx.durable_execute(notify_manager, event.product, effect="once", reconcile=was_notified)
        ctx.send_event(OutputEvent(output={"id": event.product, "score": event.score}))


async def rate_review(review: str) -> int:
    """A random stand-in for a model: a score from 1 to 5 that has nothing to do with the review."""
    await asyncio.sleep(random.uniform(0.01, 0.05))
    return random.randint(1, 5)


def notify_manager(product: str) -> None:
    """Send one notification, marked with the key of the call, which is the same in every attempt."""
    line = json.dumps({"key": current_call().idempotency_key, "product": product}) + "\n"
    file = os.open(sent_mail(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def was_notified(product: str) -> Happened | DidNotHappen:
    """Asked after a crash in the middle of `notify_manager`: look for the call's key in the sent mail."""
    if not sent_mail().exists():
        return DidNotHappen()
    key = current_call().idempotency_key
    with sent_mail().open(encoding="utf-8") as lines:
        return Happened(None) if any(json.loads(line)["key"] == key for line in lines) else DidNotHappen()


def sent_mail() -> Path:
    return Path(os.environ.get("REVIEWS_SENT_MAIL", "sent_mail.jsonl"))


agent = ReviewAgent()
