"""A job over two merged parts that ends its process at one write of the store, before or after it is there.

    python -m tests.children.merging FOLDER WRITE MOMENT IDS SEED

Each real execution of a call is a line in FOLDER/made; exit code 9 is the end that was asked for.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, RunnerContext, action
from dalsegno.core.records import Record
from dalsegno.effects import Effect
from dalsegno.runners.merged import MergedSource
from dalsegno.stores.sqlite import SqliteStore
from tests.helpers import SpyStore

PARTS = 2
RECORDS = 12
KEYS = 2
KILLED = 9


def make(folder: str, call: str) -> str:
    with Path(folder, "made").open("a") as file:
        file.write(f"{call}\n")
    return call


class Merging(Agent):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @action(InputEvent)
    async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        call = f"{event.input['k']} {n} {event.input['id']}"
        effects: tuple[Effect, ...] = ("read", "idempotent")
        for effect in effects:
            await ctx.durable_execute(make, str(self.folder), f"{effect} {call}", effect=effect)
        ctx.send_event(OutputEvent(output=[event.input["k"], n, event.input["id"]]))


async def part(number: int, chance: random.Random) -> AsyncIterator[Any]:
    for n in range(RECORDS):
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        yield {"id": f"{number}-{n}", "k": n % KEYS}


def main() -> None:
    folder, write, moment, ids, seed = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    store = SpyStore(SqliteStore(folder / "store.db"))
    writes = 0

    async def count(records: Sequence[Record]) -> None:
        nonlocal writes
        writes += 1
        if writes == write:
            os._exit(KILLED)

    if moment == "before":
        store.before_put = count
    else:
        store.after_put = count
    chance = random.Random(int(seed))
    runner = LocalRunner(
        Merging(folder),
        job="merging",
        store=store,
        checkpoints=folder / "checkpoints.db",
        checkpoint_interval=chance.choice([0.01, 60.0]),
    )
    source = MergedSource({f"part {number}": part(number, chance) for number in range(PARTS)})
    runner.run(source, folder / "out.jsonl", key="k", message_id="id" if ids == "given" else None)


if __name__ == "__main__":
    main()
