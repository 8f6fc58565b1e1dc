"""What must have come of a history: the same agent without a crash, with the answers that stand on record.

All records of the history, those that were pruned too, are put into a store in memory, except that no action is done
yet. A life on it has nothing to execute: it gets every answer from the record, computes memory and outputs afresh, and
parks a message at the first call that has no recorded outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from dalsegno.core.journal import Call
from dalsegno.core.place import Place
from dalsegno.core.records import Record
from dalsegno.core.watch import Watch
from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.memory import MemoryStore
from dalsegno.testing.lives import Ended, Job, Lives
from dalsegno.testing.virtual_loop import VirtualLoop
from dalsegno.testing.world import Life, World


class NotRecorded(BaseException):
    """A call would have been executed."""


class _Recorded:
    """A `Watch` that lets nothing be executed."""

    def action(self, place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def call(self, place: Place, call: Call, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        async def refuse(*_: Any, **__: Any) -> Any:
            raise NotRecorded(f"{call.state.name} has no recorded outcome")

        def refuse_in_thread(*_: Any, **__: Any) -> Any:
            raise NotRecorded(f"{call.state.name} has no recorded outcome")

        return refuse if is_async else refuse_in_thread

    reconcile = call

    def event(self, place: Place, send: Callable[[], None]) -> None:
        send()

    def done(self, place: Place, record: Callable[[], None]) -> None:
        record()


def replayed(job: Job, world: World, folder: Path) -> tuple[Ended, World]:
    """How *job* ends with nothing but what *world* has on record."""
    options = {**job.options, "on_failure": "park", "cipher": None}
    calm = World(folder, world.job, clock=world.clock)
    job = dataclasses.replace(job, options=options, store="memory://", outside=None)
    return _Replays(job, calm, _calls(world)).live(), calm


class _Replays(Lives):
    """Lives on *records*."""

    def __init__(self, job: Job, world: World, records: Sequence[Record]) -> None:
        super().__init__(job, world)
        self._kept = MemoryStore()
        loop = VirtualLoop()
        loop.run_until_complete(self._keep(records))
        loop.close()

    async def _keep(self, records: Sequence[Record]) -> None:
        await self._kept.open(self.world.job, "the history")
        await self._kept.put(records)
        await self._kept.close()

    def store(self) -> TaskActionStore:
        return self._kept

    def watch(self, life: Life) -> Watch:
        return _Recorded()


def _calls(world: World) -> list[Record]:
    """All records but those that say that an action is done, in clear."""
    opened = [(record, _body(world, record)) for record in world.order]
    return [record._replace(body=body) for record, body in opened if orjson.loads(body)["kind"] != "done"]


def _body(world: World, record: Record) -> bytes:
    return record.body if world.open_body is None else world.open_body(record, "a record of the history")
