"""An agent with two actions and three durable calls, whose callees leave a line each in a file outside of the job."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dalsegno import Agent, DidNotHappen, Event, Happened, InputEvent, OutputEvent, RunnerContext, action, current_call


class World:
    """What is outside of the job: a file that only grows, with one line for each execution of a call."""

    def __init__(self, path: Path, reach: Callable[[str], None]) -> None:
        self.path = path
        self.reach = reach

    def note(self, call: str, message: str, **fields: Any) -> None:
        self.reach(f"before {call} of message {message}")
        line = json.dumps({"pid": os.getpid(), "call": call, "message": message, **fields}) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
        self.reach(f"after {call} of message {message}")

    def executions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


class Hooks:
    """What a process sets before it runs the agent."""

    world: World
    checkpoint_during: Callable[[str], Awaitable[None]]
    """Awaited in `upsert` with the message: may take a checkpoint while that is in flight."""


class Judged(Event):
    answer: int


async def ask(message: str, text: str) -> int:
    """A model: a different answer each time."""
    answer = secrets.randbelow(10**12)
    await asyncio.sleep(0)
    Hooks.world.note("ask", message, answer=answer, text=text)
    return answer


async def upsert(message: str, answer: int) -> str:
    await Hooks.checkpoint_during(message)
    Hooks.world.note("upsert", message, answer=answer, key=current_call().idempotency_key)
    return current_call().idempotency_key


def send(message: str, answer: int) -> str:
    receipt = secrets.token_hex(8)
    Hooks.world.note("send", message, answer=answer, receipt=receipt)
    return receipt


def find_sent(message: str, answer: int) -> Happened | DidNotHappen:
    for line in Hooks.world.executions():
        if (line["call"], line["message"], line.get("answer")) == ("send", message, answer):
            return Happened(line["receipt"])
    return DidNotHappen()


class ThreeCalls(Agent):
    def __init__(self, *, reconcile: bool) -> None:
        self._reconcile = find_sent if reconcile else None

    @action(InputEvent)
    async def judge(self, event: InputEvent, ctx: RunnerContext) -> None:
        answer = await ctx.durable_execute(ask, ctx.message_id, event.input["text"], effect="read")
        seen = ctx.short_term_memory.get("seen", 0) + 1
        ctx.short_term_memory.set("seen", seen)
        ctx.send_event(OutputEvent(output={"message": ctx.message_id, "answer": answer, "seen": seen}))
        ctx.send_event(Judged(answer=answer))

    @action(Judged)
    async def act(self, event: Judged, ctx: RunnerContext) -> None:
        key = await ctx.durable_execute(upsert, ctx.message_id, event.answer, effect="idempotent")
        receipt = await ctx.durable_execute(send, ctx.message_id, event.answer, reconcile=self._reconcile)
        answers = [*ctx.short_term_memory.get("answers", []), event.answer]
        ctx.short_term_memory.set("answers", answers)
        output = {"message": ctx.message_id, "answer": event.answer, "key": key, "receipt": receipt, "answers": answers}
        ctx.send_event(OutputEvent(output=output))
