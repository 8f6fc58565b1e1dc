"""What test modules share: a place where a job lives across restarts, a store to spy on, tools that count, and crashes.

A restart is a new `LocalRunner` from the same `World`. A crash inside the process is the cancellation of ``run_async``:
no new checkpoint is taken, what was not yet durable is lost.
"""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, RunnerContext, RunReport, action
from dalsegno.core.records import Record, TaskActionState
from dalsegno.stores.base import ALONE, Covered, PruneReport, TaskActionStore, Worker
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.stores.wrapping import WrappingStore

STORES = ("memory", "sqlite")
PATIENCE = 10.0
"""Seconds after which a test that waits has failed."""

Hook = Callable[[Sequence[Record]], Awaitable[None]]


class SpyStore(WrappingStore):
    """Passes everything on to *inner*, and lets a test look at, delay or break each write."""

    persistent: ClassVar[bool] = True

    def __init__(self, inner: TaskActionStore) -> None:
        super().__init__(inner)
        self.before_put: Hook | None = None
        self.after_put: Hook | None = None
        self.before_open: Callable[[], None] | None = None
        self.before_prune: Callable[[Covered], None] | None = None
        self.batches: builtins.list[builtins.list[Record]] = []
        self.pruned: builtins.list[Covered] = []
        self.kept = 0
        self.most_kept = 0

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        if self.before_open is not None:
            self.before_open()
        await self.inner.open(job, owner, worker)

    async def put(self, records: Sequence[Record]) -> None:
        if self.before_put is not None:
            await self.before_put(records)
        await self.inner.put(records)
        self.batches.append(list(records))
        self.kept += len(records)
        self.most_kept = max(self.most_kept, self.kept)
        if self.after_put is not None:
            await self.after_put(records)

    async def prune(self, covered: Covered) -> PruneReport:
        if self.before_prune is not None:
            self.before_prune(covered)
        report = await self.inner.prune(covered)
        self.pruned.append(covered)
        self.kept -= report.records
        return report

    def bodies(self) -> builtins.list[dict[str, Any]]:
        """The bodies of everything that was written through this store, in order."""
        return [json.loads(record.body) for batch in self.batches for record in batch]

    def kinds(self) -> builtins.list[str]:
        return [body["kind"] for body in self.bodies()]


class World:
    """Where the records, checkpoints and output of jobs lie; it survives every runner. *kind* is one of `STORES`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.jobs: dict[str, Any] = {}
        self.out = folder / "out.jsonl"

    def store(self) -> SpyStore:
        if self.kind == "memory":
            return SpyStore(MemoryStore(self.jobs))
        return SpyStore(SqliteStore(self.folder / "store.db"))

    def checkpoints(self, job: str = "job") -> Path:
        return self.folder / f"{job}.checkpoints.db"

    def runner(
        self, agent: Agent, job: str = "job", *, store: TaskActionStore | None = None, **options: Any
    ) -> LocalRunner:
        """A new process, so to speak. No checkpoint is taken before the end unless *checkpoint_interval* is given."""
        options = {"checkpoint_interval": 3600.0, "checkpoints": self.checkpoints(job), **options}
        return LocalRunner(agent, job=job, store=store or self.store(), **options)

    def outputs(self) -> list[Any]:
        """The lines of the output file."""
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def recorded(self, job: str = "job") -> dict[bytes, list[TaskActionState]]:
        """What the store holds of *job* now."""
        return asyncio.run(self.recorded_async(job))

    async def recorded_async(self, job: str = "job") -> dict[bytes, list[TaskActionState]]:
        store = self.store()
        await store.open(job, "a look")
        try:
            return {key: await store.list(key) for key in await store.keys()}
        finally:
            await store.close()

    def add_records(self, records: Sequence[Record], job: str = "job") -> None:
        """Write *records* into the store, past everything that checks them."""

        async def write() -> None:
            store = self.store()
            await store.open(job, "an intruder")
            await store.put(records)
            await store.close()

        asyncio.run(write())


async def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* is true, or fail."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def crash(
    runner: LocalRunner, source: object, sink: object = None, *, when: Callable[[], bool], **options: Any
) -> None:
    """Run until *when* is true, then crash. Fails if the run ends before."""
    run = asyncio.ensure_future(runner.run_async(source, sink, **options))
    async with asyncio.timeout(PATIENCE):
        while not when():
            if run.done():
                raise AssertionError(f"the run ended before the crash: {run.exception() or run.result()}")
            await asyncio.sleep(0.001)
        run.cancel()
        await asyncio.wait([run])
    assert run.cancelled(), f"the run was to crash, but ended with {run.exception() or run.result()}"


def crashed(
    runner: LocalRunner, source: object, sink: object = None, *, when: Callable[[], bool], **options: Any
) -> None:
    """`crash` for a test without an event loop of its own."""
    asyncio.run(crash(runner, source, sink, when=when, **options))


def run(runner: LocalRunner, source: object, sink: object = None, **options: Any) -> RunReport:
    """Run to the end, or fail the test if it hangs."""

    async def bounded() -> RunReport:
        async with asyncio.timeout(PATIENCE):
            return await runner.run_async(source, sink, **options)

    return asyncio.run(bounded())


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class Tools:
    """Fake tools. `made` is what was really executed, in order, by all processes."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.hang_on: set[Any] = set()
        """Calls that are made and then never return."""
        self.hanging: set[Any] = set()
        self.fail_on: dict[Any, BaseException] = {}
        self.results: dict[Any, Any] = {}
        self.delays: dict[Any, float] = {}

    async def call(self, what: Any) -> Any:
        self.made.append(what)
        if what in self.hang_on:
            self.hanging.add(what)
            await for_ever()
        if what in self.delays:
            await asyncio.sleep(self.delays[what])
        if what in self.fail_on:
            raise self.fail_on[what]
        return self.results.get(what, f"done {what}")

    def call_sync(self, what: Any) -> Any:
        self.made.append(what)
        if what in self.fail_on:
            raise self.fail_on[what]
        return self.results.get(what, f"done {what}")

    def count(self, what: Any) -> int:
        return self.made.count(what)


Body = Callable[[Any, RunnerContext], Awaitable[Any]]


class Scripted(Agent):
    """An agent with one action, whose body a test gives; what the body returns is the output, unless it is None."""

    def __init__(self, body: Body) -> None:
        self.body = body

    @action(InputEvent)
    async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        output = await self.body(event.input, ctx)
        if output is not None:
            ctx.send_event(OutputEvent(output=output))
