"""Agents that tests crash everywhere, right ones and wrong ones, and the world that they act on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Callable
from typing import Any

from dalsegno import (
    Agent,
    DidNotHappen,
    Event,
    Happened,
    IdempotencyKey,
    InputEvent,
    OutputEvent,
    RetryPolicy,
    RunnerContext,
    action,
)
from dalsegno.testing import Outside

outside = Outside()


def inputs(number: int, keys: int = 3) -> list[dict[str, Any]]:
    return [{"id": f"k{index % keys}", "text": f"text {index}"} for index in range(number)]


class Approved(Event):
    text: str
    receipt: str


async def ask(question: str) -> str:
    """A model: it takes its time, and answers otherwise each time."""
    await asyncio.sleep(random.random())
    return f"{question}? {random.random()}"


def charge(account: str, text: str) -> str:
    outside.did("charge", account, text)
    return f"receipt {random.random()}"


def find_charge(account: str, text: str) -> Happened | DidNotHappen:
    return Happened("found") if outside.has("charge", account, text) else DidNotHappen()


async def notify(text: str, key: IdempotencyKey) -> float:
    outside.did("notify", text)
    return random.random()


class Reviewer(Agent):
    """Two actions with five calls of every effect, two of them side by side."""

    @action(InputEvent)
    async def review(self, event: InputEvent, ctx: RunnerContext) -> None:
        answer = await ctx.durable_execute(ask, event.input["text"], effect="read")
        receipt = await ctx.durable_execute(charge, event.input["id"], answer, reconcile=find_charge)
        ctx.short_term_memory.set("seen", [*ctx.short_term_memory.get("seen", []), answer])
        ctx.send_event(Approved(text=answer, receipt=receipt))

    @action(Approved)
    async def tell(self, event: Approved, ctx: RunnerContext) -> None:
        one, other = await asyncio.gather(
            ctx.durable_execute(ask, "one", effect="read"), ctx.durable_execute(ask, "other", effect="read")
        )
        sent = await ctx.durable_execute(notify, one + other, effect="idempotent")
        ctx.send_event(OutputEvent(output=[event.text, event.receipt, one, other, sent]))


async def _stubborn() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.ensure_future(asyncio.sleep(0))


async def ask_with_company(question: str) -> str:
    """A client that leaves a task running that begins others, and never ends."""
    stubborn = asyncio.ensure_future(_stubborn())
    stubborn.add_done_callback(print)
    return question


class LeavesTasks(Agent):
    """Ends with tasks that will not end, and with others that have not begun."""

    @action(InputEvent)
    async def ask(self, event: InputEvent, ctx: RunnerContext) -> None:
        ctx.send_event(
            OutputEvent(output=await ctx.durable_execute(ask_with_company, event.input["text"], effect="read"))
        )


class LeavesFiles(Agent):
    """Ends with a connection open, if a crash comes at the right time."""

    @action(InputEvent)
    async def ask(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(ask_over_a_connection, event.input["text"], effect="read")


async def ask_over_a_connection(question: str) -> str:
    one, other = socket.socketpair()
    pool: list[Any] = [one, other]
    pool.append(pool)  # only the garbage collector finds it
    await asyncio.sleep(random.random())
    one.close()
    other.close()
    return question


class Asking(Agent):
    """Waits for nothing but models, so each run takes the same steps."""

    @action(InputEvent)
    async def ask(self, event: InputEvent, ctx: RunnerContext) -> None:
        answer = await ctx.durable_execute(ask, event.input["text"], effect="read")
        ctx.send_event(OutputEvent(output=await ctx.durable_execute(ask, answer, effect="read")))


class Unsettled(Agent):
    """Its charge is in doubt after a crash, and nobody can tell."""

    @action(InputEvent)
    async def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        ctx.send_event(OutputEvent(output=await ctx.durable_execute(charge, event.input["id"], event.input["text"])))


class Plain(Agent):
    """An action that is a plain def."""

    @action(InputEvent)
    def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        receipt = ctx.durable_execute_sync(charge, event.input["id"], event.input["text"], reconcile=find_charge)
        ctx.short_term_memory.set("receipt", receipt)
        ctx.send_event(OutputEvent(output=receipt))


async def unsteady(items: list[str]) -> list[str]:
    """Fails now and then, and changes what it is given."""
    if random.random() < 0.3:
        raise ConnectionError("the provider is down")
    items.append("changed")
    return items


class Failing(Agent):
    """A call that fails now and then, whose failure leaves the action."""

    @action(InputEvent)
    async def look_up(self, event: InputEvent, ctx: RunnerContext) -> None:
        found = await ctx.durable_execute(unsteady, [event.input["text"]], effect="read")
        ctx.send_event(OutputEvent(output=found))


async def unsteady_model(question: str) -> str:
    if random.random() < 0.5:
        raise ConnectionError("the provider is down")
    return f"{question}? {random.random()}"


class Waits(Agent):
    """Asks for the time, sleeps, and waits between attempts."""

    @action(InputEvent)
    async def wait(self, event: InputEvent, ctx: RunnerContext) -> None:
        began = await ctx.now()
        await ctx.sleep(30)
        retry = RetryPolicy(attempts=20, backoff=0.5, max_backoff=4)
        answer = await ctx.durable_execute(unsteady_model, began.isoformat(), effect="read", retry=retry)
        ctx.short_term_memory.set("answer", answer)
        ctx.send_event(OutputEvent(output=[began, answer, await ctx.now()]))


# Mistakes of users.


class ActsBesideTheRecord(Agent):
    @action(InputEvent)
    async def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        outside.did("charge", event.input["id"])
        ctx.send_event(OutputEvent(output=await ctx.durable_execute(ask, "why", effect="read")))


class WritesAFile(Agent):
    def __init__(self, path: str) -> None:
        self.path = path

    @action(InputEvent)
    async def note(self, event: InputEvent, ctx: RunnerContext) -> None:
        with open(self.path, "a") as file:
            file.write("noted")


class CallsAWriteRead(Agent):
    @action(InputEvent)
    async def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(charge, event.input["id"], "x", effect="read")


class GuessesArguments(Agent):
    @action(InputEvent)
    async def guess(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(ask, str(random.random()), effect="read")
        await ctx.durable_execute(charge, event.input["id"], "x", reconcile=find_charge)


def opened() -> Any:
    return itertools.count()


class ReturnsWhatCannotBeRecorded(Agent):
    @action(InputEvent)
    async def read(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(opened, effect="read")


def never(account: str, text: str) -> DidNotHappen:
    return DidNotHappen()


class ReconcilesBlindly(Agent):
    @action(InputEvent)
    async def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(charge, event.input["id"], event.input["text"], reconcile=never)


class CountsInItself(Agent):
    """Keeps in the process what a restart forgets."""

    def __init__(self) -> None:
        self.seen = 0

    @action(InputEvent)
    async def count(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(ask, "how many", effect="read")
        self.seen += 1
        ctx.send_event(OutputEvent(output=self.seen))


MISTAKES: dict[str, tuple[Callable[[], Agent], str]] = {
    "an effect outside of a durable call": (ActsBesideTheRecord, r"charge.* outside of a durable call"),
    "a file written outside of a durable call": (lambda: WritesAFile("/dev/null"), r"open.* outside of a durable call"),
    "a read that acts": (CallsAWriteRead, r"charge of .* has effect 'read' and does charge"),
    "arguments that are not recorded": (GuessesArguments, r"\[P7\].*no longer fits the record.*not recorded"),
    "a result that cannot be recorded": (ReturnsWhatCannotBeRecorded, r"opened.*cannot be recorded"),
    "a reconcile that does not look": (ReconcilesBlindly, r"reconcile of .*charge.* said DidNotHappen"),
    "state that is kept in the process": (CountsInItself, r"\[P3\] the output .* is"),
}
