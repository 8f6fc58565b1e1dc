"""Durable calls per second on SQLite, beside a bare group-commit loop that writes the same bytes in the same run.

Usage: ``python -m benchmarks.throughput [--messages N] [--rounds N] [--json]``

With 64 keys in flight, the review agent, whose rating takes no time (two actions, one or two calls a message), beside
64 coroutines that share one group-commit loop over Python's ``sqlite3`` (WAL, ``synchronous=FULL``, the same table and
index, ``executemany`` in one transaction) and write the very records that the product wrote, message by message:

* ``bare``: each record waits for its commit, as each step of a loop that knows nothing of effects must;
* ``barriers``: a record waits only where the product waits, before a call with effect ``once`` and at the end of a
  message. No less waiting would keep the promises, and nothing is computed, so this is what the disk and SQLite allow.

With one key in flight and five ``read`` calls a message, beside the same ``called`` records committed one by one.

Absolute figures vary tenfold with how busy the machine is: compare within one run. Each ratio is the median of the
ratios of the rounds; a round takes its measurements in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dalsegno import Agent, Event, InputEvent, LocalRunner, OutputEvent, RunnerContext, action
from dalsegno.core.records import Record
from dalsegno.stores.sqlite import SqliteStore

IN_FLIGHT = 64
TEXT = "Comfortable on the first day, and after a month of daily walks the sole still looks like new. " * 2


class Scored(Event):
    product: str
    score: int


async def rate_review(text: str) -> int:
    return random.randint(1, 5)


async def notify_manager(product: str) -> None:
    return None


class ReviewAgent(Agent):
    @action(InputEvent)
    async def score(self, event: InputEvent, ctx: RunnerContext) -> None:
        answer = await ctx.durable_execute(rate_review, event.input["review"], effect="read")
        seen = ctx.short_term_memory.get("seen", 0) + 1
        ctx.short_term_memory.set("seen", seen)
        ctx.send_event(Scored(product=event.input["id"], score=answer))

    @action(Scored)
    async def alert(self, event: Scored, ctx: RunnerContext) -> None:
        if event.score <= 2:
            await ctx.durable_execute(notify_manager, event.product, effect="once")
        ctx.send_event(OutputEvent(output={"id": event.product, "score": event.score}))


class FiveReads(Agent):
    @action(InputEvent)
    async def rate(self, event: InputEvent, ctx: RunnerContext) -> None:
        scores = [
            await ctx.durable_execute(rate_review, f"{number}: {event.input['review']}", effect="read")
            for number in range(5)
        ]
        ctx.send_event(OutputEvent(output={"id": event.input["id"], "scores": scores}))


class KeepingStore(SqliteStore):
    """Remembers what it was given, so that the bare loop can write the same."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.records: list[Record] = []

    async def put(self, records: Sequence[Record]) -> None:
        self.records.extend(records)
        await super().put(records)


def reviews(count: int, keys: int) -> list[dict[str, Any]]:
    return [{"id": f"product-{number % keys:04d}", "review": f"{number} {TEXT}"} for number in range(count)]


def run_product(agent: Agent, folder: Path, messages: int, keys: int) -> tuple[float, list[Record]]:
    """Durable calls per second, and the records written."""
    store = KeepingStore(folder / "product.db")
    report = LocalRunner(agent, job="bench", store=store).run(reviews(messages, keys), key="id")
    return report.calls_executed / report.seconds, store.records


class BareGroupCommit:
    """The loop to compare with: what is pending goes into one transaction as soon as the last one is done."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute(
            "CREATE TABLE records (n INTEGER PRIMARY KEY, job INTEGER, key BLOB, message TEXT, task TEXT, body BLOB)"
        )
        self._connection.execute("CREATE INDEX records_of_message ON records (job, key, message)")
        self._thread = ThreadPoolExecutor(1)
        self._pending: list[tuple[Record, asyncio.Future[None] | None]] = []
        self._writer: asyncio.Task[None] | None = None

    def append(self, record: Record) -> None:
        self._add(record, None)

    async def append_and_wait(self, record: Record) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._add(record, waiter)
        await waiter

    def _add(self, record: Record, waiter: asyncio.Future[None] | None) -> None:
        self._pending.append((record, waiter))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            await loop.run_in_executor(self._thread, self._commit, [record for record, _ in batch])
            for _, waiter in batch:
                if waiter is not None:
                    waiter.set_result(None)
        self._writer = None

    def _commit(self, records: list[Record]) -> None:
        rows = [(1, record.key, record.message, record.task, record.body) for record in records]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO records (job, key, message, task, body) VALUES (?, ?, ?, ?, ?)", rows)
        self._connection.execute("COMMIT")


def is_barrier(record: Record) -> bool:
    """Whether the product waits for this record: the request of a call with an effect, and the end of a message."""
    body = json.loads(record.body)
    return body["kind"] == "requested" or "last" in body


def run_bare(path: Path, records: Sequence[Record], producers: int, waits: Callable[[Record], bool]) -> float:
    """Seconds that the bare loop takes to write *records*, the messages shared out among *producers*."""
    messages: dict[str, list[tuple[Record, bool]]] = {}
    for record in records:
        messages.setdefault(record.message, []).append((record, waits(record)))

    async def produce(log: BareGroupCommit, queue: Iterator[list[tuple[Record, bool]]]) -> None:
        for message in queue:
            for record, wait in message:
                if wait:
                    await log.append_and_wait(record)
                else:
                    log.append(record)

    async def write() -> float:
        log = BareGroupCommit(path)
        queue = iter(messages.values())
        started = time.perf_counter()
        await asyncio.gather(*(produce(log, queue) for _ in range(producers)))
        return time.perf_counter() - started

    return asyncio.run(write())


def measure_many_keys(messages: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        rate, records = run_product(ReviewAgent(), Path(folder), messages, IN_FLIGHT)
        calls = sum(b'"kind":"called"' in record.body or b'"kind":"completed"' in record.body for record in records)
        bare = calls / run_bare(Path(folder) / "bare.db", records, IN_FLIGHT, lambda record: True)
        barriers = calls / run_bare(Path(folder) / "barriers.db", records, IN_FLIGHT, is_barrier)
    return {
        "calls_per_second": rate,
        "bare": bare,
        "to_bare": rate / bare,
        "barriers": barriers,
        "to_barriers": rate / barriers,
        "records_per_call": len(records) / calls,
    }


def measure_one_key(messages: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        rate, records = run_product(FiveReads(), Path(folder), messages, 1)
        calls = [record for record in records if b'"kind":"called"' in record.body]
        one_by_one = len(calls) / run_bare(Path(folder) / "bare.db", calls, 1, lambda record: True)
    return {"calls_per_second": rate, "one_fsync_each": one_by_one, "times": rate / one_by_one}


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(result[name] for result in rounds), 2) for name in rounds[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    many = median_of([measure_many_keys(options.messages) for _ in range(options.rounds)])
    one = median_of([measure_one_key(options.messages // 10) for _ in range(options.rounds)])
    if options.json:
        print(json.dumps({"many_keys": many, "one_key": one}))
        return 0
    print(f"64 keys in flight: {many['calls_per_second']:,.0f} durable calls/s (wanted: at least 5,000)")
    print(f"  bare group commit of the same bytes: {many['bare']:,.0f}/s, ratio {many['to_bare']:.2f} (wanted: 0.5)")
    print(f"  the same, waiting at barriers only:  {many['barriers']:,.0f}/s, ratio {many['to_barriers']:.2f}")
    print(f"one key, five reads a message: {one['calls_per_second']:,.0f} durable calls/s")
    print(f"  one fsync per call: {one['one_fsync_each']:,.0f}/s, {one['times']:.1f} times as many (wanted: 3)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
