"""The demo's agent, as one writes it with this library. `plain` is the same logic without it."""

from __future__ import annotations

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
from dalsegno.demo.world import ask_model, find_mail, send_mail


class Scored(Event):
    number: int
    product: str
    score: int


class ReviewAgent(Agent):
    """Scores a review with a model, and mails the manager when the score is bad."""

    @action(InputEvent)
    async def score(self, event: InputEvent, ctx: RunnerContext) -> None:
        score = await ctx.durable_execute(ask_model, event.input["review"], effect="read")
        ctx.short_term_memory.set("seen", ctx.short_term_memory.get("seen", 0) + 1)
        ctx.send_event(Scored(number=event.input["number"], product=event.input["id"], score=score))

    @action(Scored)
    async def alert(self, event: Scored, ctx: RunnerContext) -> None:
        if event.score <= 2:
            await ctx.durable_execute(notify, event.number, event.product, effect="once", reconcile=was_notified)
        ctx.send_event(OutputEvent(output={"number": event.number, "id": event.product, "score": event.score}))


def notify(number: int, product: str) -> None:
    send_mail(number, product, current_call().idempotency_key)


def was_notified(number: int, product: str) -> Happened | DidNotHappen:
    return Happened() if find_mail(current_call().idempotency_key) else DidNotHappen()
