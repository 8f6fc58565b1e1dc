"""Runs a job whose files may not grow beyond a limit, or live on a full disk: ``FOLDER SMALL WHAT LIMIT``.

*WHAT* says which file is in the folder *SMALL*, all others being in *FOLDER*: the store, the checkpoints or the sink.
With a *LIMIT*, in bytes, no file may be larger; 0 is none.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, RunnerContext, StoreError, action

MESSAGES = 24
SIZE = 40_000


class Fills(Agent):
    def __init__(self, counter: Path) -> None:
        self.counter = counter

    @action(InputEvent)
    async def fill(self, event: InputEvent, ctx: RunnerContext) -> None:
        text = await ctx.durable_execute(self.make, event.input, effect="idempotent")
        ctx.short_term_memory.set(f"of {event.input}", text)
        ctx.send_event(OutputEvent(output=[event.input, text]))

    def make(self, number: int) -> str:
        with self.counter.open("a") as file:
            file.write(f"{number}\n")
        return "r" * SIZE


def main(folder: Path, small: Path, what: str, limit: int) -> int:
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store, checkpoints, sink = (
        (small if what == name else folder) / name for name in ("agent.db", "checkpoints.db", "out.jsonl")
    )
    runner = LocalRunner(
        Fills(folder / "calls"),
        job="fill",
        store=f"sqlite:///{store}",
        checkpoints=checkpoints,
        max_in_flight=2,
        checkpoint_interval=0.05,
    )
    try:
        report = runner.run(range(MESSAGES), sink)
    except StoreError as error:
        print(json.dumps({"error": str(error)}))
        return 3
    print(json.dumps({"messages": report.messages, "memory": sum(len(memory) for _, memory in runner.memories())}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
