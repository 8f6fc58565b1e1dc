"""A job from topic to topic that is killed from outside.

    python -m tests.children.topics FOLDER SERVERS SOURCE SINK UNTIL_END

Each real execution of a call is a line in FOLDER/made, with the pid that made it. Of the key k0 nobody can tell whether
a call in doubt was made; of the others that file tells. FOLDER/ready/PID is there as soon as the run begins.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from dalsegno import Agent, DidNotHappen, Happened, InputEvent, LocalRunner, OutputEvent, RunnerContext, Unknown, action
from dalsegno.runners.kafka_sink import KafkaSink
from dalsegno.runners.kafka_source import KafkaSource

JOB = "killed"
UNKNOWN_KEY = "k0"


def made(folder: Path) -> dict[str, list[int]]:
    """By call, the processes that made it."""
    path = folder / "made"
    calls: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        call, pid = line.rsplit(" ", 1)
        calls.setdefault(call, []).append(int(pid))
    return calls


def make(folder: str, key: str, number: int) -> str:
    time.sleep(0.02)  # so that it is sometimes killed before or after the line
    with Path(folder, "made").open("a") as file:
        file.write(f"{key} {number} {os.getpid()}\n")
    time.sleep(0.02)
    return f"made {number}"


def was_made(folder: str, key: str, number: int) -> Any:
    if key == UNKNOWN_KEY:
        return Unknown()
    return Happened(f"made {number}") if f"{key} {number}" in made(Path(folder)) else DidNotHappen()


class Making(Agent):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @action(InputEvent)
    async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        key, number = event.input["k"], event.input["n"]
        count = ctx.short_term_memory.get("count", 0) + 1
        ctx.short_term_memory.set("count", count)
        result = await ctx.durable_execute(make, str(self.folder), key, number, effect="once", reconcile=was_made)
        ctx.send_event(OutputEvent(output={"n": number, "count": count, "result": result}))


def runner(folder: Path) -> LocalRunner:
    return LocalRunner(Making(folder), job=JOB, store=f"sqlite:///{folder}/store.db", checkpoint_interval=0.1)


def main() -> None:
    folder, servers, source, sink, until_end = Path(sys.argv[1]), *sys.argv[2:]
    (folder / "ready").mkdir(exist_ok=True)
    (folder / "ready" / str(os.getpid())).touch()
    runner(folder).run(
        KafkaSource(source, servers, until_end=until_end == "yes"),
        KafkaSink(sink, servers, config={"transaction.timeout.ms": 10_000}),
    )


if __name__ == "__main__":
    main()
