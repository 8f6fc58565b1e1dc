"""An agent that pays small refunds by itself, and asks a person about the others.

Each line of the source is an object with ``customer``, ``order`` and ``cents``. Run it, see who waits, answer, and run
it again::

    dalsegno run examples.refunds:agent --job refunds --source refunds.jsonl --key customer --sink out.jsonl
    dalsegno show refunds --state waiting
    dalsegno signal refunds ann approval '{"approved": true, "by": "me"}'

With ``--wait`` it keeps running until everybody is answered. Kill it whenever you like: each refund that was approved
has one line in ``refunded.jsonl``. The page ``docs/how-to/wait-for-a-person.md`` goes through it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

from dalsegno import Agent, DidNotHappen, Happened, InputEvent, OutputEvent, RunnerContext, action, current_call

SMALL = 5_000
LEDGER = Path("refunded.jsonl")


class Refunds(Agent):
    def __init__(self, patience: timedelta = timedelta(days=7)) -> None:
        self.patience = patience

    @action(InputEvent)
    async def decide(self, event: InputEvent, ctx: RunnerContext) -> None:
        order, cents = event.input["order"], event.input["cents"]
        approval = {"approved": True, "by": "rule"} if cents <= SMALL else await self.ask(ctx)
        if approval["approved"]:
            await ctx.durable_execute(refund, order, cents, effect="once", reconcile=was_refunded)
        ctx.send_event(OutputEvent(output={"order": order, **approval}))

    async def ask(self, ctx: RunnerContext) -> dict[str, object]:
        try:
            answer: dict[str, object] = await ctx.wait_for("approval", timeout=self.patience)
            return answer
        except TimeoutError:
            return {"approved": False, "by": "nobody"}


def refund(order: str, cents: int) -> None:
    """Pay the money back, that is, write a line into the ledger."""
    line = json.dumps({"order": order, "cents": cents, "key": current_call().idempotency_key})
    with LEDGER.open("a") as ledger:
        ledger.write(line + "\n")


def was_refunded(order: str, cents: int) -> Happened | DidNotHappen:
    lines = LEDGER.read_text().splitlines() if LEDGER.exists() else []
    keys = {json.loads(line)["key"] for line in lines}
    return Happened() if current_call().idempotency_key in keys else DidNotHappen()


agent = Refunds()
