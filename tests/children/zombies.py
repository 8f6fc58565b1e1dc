"""An agent whose only call waits for a byte, to be stopped in the middle of it.

``ZOMBIE_OUTSIDE`` names a file with one line for each execution; ``ZOMBIE_GATE`` a named pipe that a call of the first
message waits on.
"""

from __future__ import annotations

import os

from dalsegno import Agent, InputEvent, OutputEvent, RunnerContext, action


def _note(line: str) -> None:
    with open(os.environ["ZOMBIE_OUTSIDE"], "a") as file:
        file.write(f"{os.getpid()} {line}\n")


def ship(order: str) -> str:
    _note(f"ship {order}")
    if order == "first" and "ZOMBIE_GATE" in os.environ:
        with open(os.environ["ZOMBIE_GATE"]) as gate:
            gate.read(1)
    return f"shipped {order}"


def tell(order: str) -> str:
    _note(f"tell {order}")
    return f"told {order}"


class Orders(Agent):
    @action(InputEvent)
    async def handle(self, event: InputEvent, ctx: RunnerContext) -> None:
        order = event.input["order"]
        shipped = await ctx.durable_execute(ship, order, effect="once")
        told = await ctx.durable_execute(tell, order, effect="once")
        ctx.send_event(OutputEvent(output=[shipped, told]))


agent = Orders()
