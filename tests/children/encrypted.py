"""An agent for ``dalsegno run`` that puts marked text wherever a job keeps values, and kills its process once.

``ENCRYPTED_OUTSIDE`` names the folder with what is seen from outside: a line in ``calls`` for each execution of a call,
and the file ``kill-N``, which lets call N kill the process before, and ``kill-N-after`` when its work is done.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dalsegno import AesGcmCipher, Agent, Event, InputEvent, OutputEvent, RunnerContext, Unknown, action

MARK = "MARKED-"
OUTSIDE = Path(os.environ.get("ENCRYPTED_OUTSIDE", "."))
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))

cipher = AesGcmCipher(KEY)
rotated = AesGcmCipher({"1": KEY, "2": OTHER_KEY})
wrong = AesGcmCipher(OTHER_KEY)
nothing = None


def from_environment() -> AesGcmCipher:
    return AesGcmCipher.from_environment("ENCRYPTED_KEY")


class Seen(Event):
    text: str


def _kill_if(name: str) -> None:
    try:
        (OUTSIDE / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def ask(n: int, text: str, *, option: str) -> str:
    _kill_if(f"kill-{n}")
    with (OUTSIDE / "calls").open("a") as file:
        file.write(f"{n} {os.getpid()}\n")
    _kill_if(f"kill-{n}-after")
    return f"{MARK}result of {text}"


def refuse(text: str) -> None:
    raise ValueError(f"{MARK}exception about {text}")


def pay(text: str) -> str:
    _kill_if("kill-pay")
    return text


def cannot_tell(text: str) -> Unknown:
    return Unknown(f"{MARK}reason")


class Marked(Agent):
    @action(InputEvent)
    async def see(self, event: InputEvent, ctx: RunnerContext) -> None:
        n, text = event.input["n"], event.input["text"]
        answer = await ctx.durable_execute(ask, n, text, option=f"{MARK}option", effect="idempotent")
        try:
            await ctx.durable_execute(refuse, text, effect="read")
        except ValueError as error:
            ctx.short_term_memory.set(f"{MARK}field", {"error": str(error), "answer": answer})
        ctx.sensory_memory.set("answer", answer)
        ctx.send_event(Seen(text=f"{MARK}event {n}"))

    @action(Seen)
    async def tell(self, event: Seen, ctx: RunnerContext) -> None:
        if "pay" in ctx.sensory_memory.get("answer"):
            await ctx.durable_execute(pay, event.text, reconcile=cannot_tell)
        ctx.send_event(OutputEvent(output={"text": event.text, "answer": ctx.sensory_memory.get("answer")}))


agent = Marked()
