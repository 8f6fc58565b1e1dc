"""A review agent for ``dalsegno run``, whose calls are visible from outside of the process.

``REVIEWS_OUTSIDE`` names a file that gets one line for each execution of a call. ``REVIEWS_PIPE`` is a file descriptor
that gets one line for each step that the parent may want to act on, and ``REVIEWS_GATE``, if given, one that the calls
of the model wait on: each takes a byte from it before it goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from typing import Any

from dalsegno import Agent, DidNotHappen, Happened, InputEvent, LocalRunner, OutputEvent, RunnerContext, action

LINE = 64
_pipe = int(os.environ["REVIEWS_PIPE"])
_gate = int(os.environ["REVIEWS_GATE"]) if "REVIEWS_GATE" in os.environ else None
_outside = os.open(os.environ["REVIEWS_OUTSIDE"], os.O_RDWR | os.O_CREAT | os.O_APPEND)


def tell(what: str, message: str = "") -> None:
    """Lines of one length: a pipe of 4,096 bytes keeps the process at most 64 of them ahead of whoever reads it."""
    os.write(_pipe, f"{what} {message}".ljust(LINE - 1).encode() + b"\n")


def note(call: str, message: str, **fields: Any) -> None:
    line = {"pid": os.getpid(), "call": call, "message": message, **fields}
    os.write(_outside, json.dumps(line).encode() + b"\n")


async def score(message: str, review: str) -> int:
    """A model: a different answer each time."""
    answer = _answer(message)
    if _gate is None:
        await asyncio.sleep(0)
    else:
        await _pass_gate(_gate)
    return answer


def score_in_thread(message: str, review: str) -> int:
    """The same, in a thread that nothing can end."""
    answer = _answer(message)
    if _gate is not None:
        os.read(_gate, 1)
    return answer


async def score_in_pool(message: str, review: str) -> int:
    """The same, in a thread of the event loop's own pool."""
    return await asyncio.to_thread(score_in_thread, message, review)


def _answer(message: str) -> int:
    answer = secrets.randbelow(10**12)
    note("score", message, answer=answer)
    if _gate is not None:
        tell("score", message)
    return answer


_passes: asyncio.Semaphore | None = None


async def _pass_gate(gate: int) -> None:
    global _passes
    if _passes is None:
        passes = _passes = asyncio.Semaphore(0)

        def release() -> None:
            for _ in os.read(gate, 4096):
                passes.release()

        asyncio.get_running_loop().add_reader(gate, release)
    await _passes.acquire()


async def notify(message: str, answer: int) -> str:
    receipt = secrets.token_hex(8)
    note("notify", message, answer=answer, receipt=receipt)
    tell("notify", message)
    return receipt


def find_notification(message: str, answer: int) -> Happened | DidNotHappen:
    with open(os.environ["REVIEWS_OUTSIDE"]) as file:
        for line in file:
            if '"notify"' in line and (found := json.loads(line))["message"] == message:
                assert found["answer"] == answer
                return Happened(found["receipt"])
    return DidNotHappen()


class Reviews(Agent):
    def __init__(self, model: Callable[[str, str], Any]) -> None:
        self._model = model

    @action(InputEvent)
    async def review(self, event: InputEvent, ctx: RunnerContext) -> None:
        answer = await ctx.durable_execute(self._model, ctx.message_id, event.input["review"], effect="read")
        receipt = await ctx.durable_execute(notify, ctx.message_id, answer, reconcile=find_notification)
        count = ctx.short_term_memory.get("reviews", 0) + 1
        ctx.short_term_memory.set("reviews", count)
        output = {"message": ctx.message_id, "id": ctx.key, "answer": answer, "receipt": receipt, "count": count}
        ctx.send_event(OutputEvent(output=output))


agent = Reviews(score)
agent_in_thread = Reviews(score_in_thread)
agent_in_pool = Reviews(score_in_pool)

_stop = LocalRunner.stop


def _told_stop(self: LocalRunner) -> None:
    _stop(self)
    tell("stopping")


LocalRunner.stop = _told_stop  # type: ignore[method-assign]
