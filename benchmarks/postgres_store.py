"""What the PostgreSQL store costs, each figure beside another one of the same run on the same server.

Usage: ``python -m benchmarks.postgres_store [URL] [--quick]``; without URL, a server of its own is started.

* ``in flight``: records of 64 coroutines through the group commit's kind of batch, per second, beside one transaction
  for each record, and beside a bare loop of multi-row inserts of the same bytes.
* ``ways``: the same rows by ``unnest``, by ``executemany`` in a pipeline, and by ``COPY``, each in one transaction.
* ``keys``: the claim, and the prune, of one key beside 10 and beside 100,000 other open keys.
* ``recovery``: the claims of 1,000 keys with 100,000 recorded calls.
* ``checkpoints``: the size of the table over 50 checkpoints, under the server's own autovacuum.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg

from dalsegno.core.records import Record, encode_body
from dalsegno.stores.base import Covered
from dalsegno.stores.postgres import PostgresStore
from dalsegno.stores.postgres.schema import place, text

IN_FLIGHT = 64
RESULT = "Comfortable on the first day, and after a month of daily walks the sole still looks like new. " * 2


def called(key: int, message: str, call: int = 0) -> Record:
    header = {"action": "act", "event": "input", "sender": "", "index": 0}
    body = {"task": header, "call": call, "name": "shop:rate", "args_digest": "0" * 24, "result": RESULT}
    return Record(b"%d" % key, message, f"{message}-task", encode_body("called", body))


async def seconds(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def opened(url: str, job: str) -> PostgresStore:
    store = PostgresStore(url)
    await store.open(job, "benchmark")
    return store


# --- in flight ---


def batches(prefix: str, count: int) -> list[list[Record]]:
    return [[called(n, f"{prefix}-{batch}-{n}") for n in range(IN_FLIGHT)] for batch in range(count)]


async def in_flight(url: str, count: int, turn: int) -> dict[str, float]:
    """Records per second."""
    store = await opened(url, f"flight{turn}")
    made = batches("a", count)

    async def grouped() -> None:
        for batch in made:
            await store.put(batch)

    async def single() -> None:
        for record in batches("b", 1)[0] * 2:
            await store.put([record])

    records = count * IN_FLIGHT
    found = {"store": records / await seconds(grouped), "one by one": 2 * IN_FLIGHT / await seconds(single)}
    await store.close()
    for way, insert in WAYS.items():
        found[way] = records / await bare(url, insert, made)
    return found


TABLE = "CREATE TABLE bare (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job integer, kh bigint, mh bigint,"
TABLE += " key bytea, message bytea, task bytea, body bytea)"
COLUMNS = "job, kh, mh, key, message, task, body"


def rows(batch: Sequence[Record]) -> list[tuple[Any, ...]]:
    return [(1, place(r.key), place(text(r.message)), r.key, text(r.message), text(r.task), r.body) for r in batch]


async def by_unnest(connection: psycopg.AsyncConnection[Any], batch: Sequence[Record]) -> None:
    columns = [list(column) for column in zip(*rows(batch), strict=True)]
    types = ("int", "bigint", "bigint", "bytea", "bytea", "bytea", "bytea")
    arrays = ", ".join(f"%b::{kind}[]" for kind in types)
    await connection.execute(f"INSERT INTO bare ({COLUMNS}) SELECT * FROM unnest({arrays})".encode(), columns)


async def by_executemany(connection: psycopg.AsyncConnection[Any], batch: Sequence[Record]) -> None:
    async with connection.transaction(), connection.cursor() as cursor:
        await cursor.executemany(
            f"INSERT INTO bare ({COLUMNS}) VALUES (%b, %b, %b, %b, %b, %b, %b)".encode(), rows(batch)
        )


async def by_copy(connection: psycopg.AsyncConnection[Any], batch: Sequence[Record]) -> None:
    async with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY bare ({COLUMNS}) FROM STDIN (FORMAT BINARY)".encode()) as copy,
    ):
        copy.set_types(["int4", "int8", "int8", "bytea", "bytea", "bytea", "bytea"])
        for row in rows(batch):
            await copy.write_row(row)


WAYS = {"bare, unnest": by_unnest, "bare, executemany": by_executemany, "bare, copy": by_copy}


async def bare(url: str, insert: Any, made: Sequence[Sequence[Record]]) -> float:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("DROP TABLE IF EXISTS bare")
        await connection.execute(TABLE.encode())
        await connection.execute("CREATE INDEX ON bare (job, kh, mh)")

        async def all_of_them() -> None:
            for batch in made:
                await insert(connection, batch)

        return await seconds(all_of_them)


# --- keys ---


async def one_key(store: PostgresStore, turns: int, prefix: str) -> dict[str, float]:
    """Milliseconds of the claim and the prune of one key with ten calls."""
    claims, prunes = [], []
    for turn in range(turns):
        message = f"{prefix}{turn}"
        await store.put([called(-1, message, call) for call in range(10)])
        claims.append(await seconds(lambda: store.claim(b"-1")))
        covered = Covered(turn, [(b"-1", message)])
        prunes.append(await seconds(lambda covered=covered: store.prune(covered)))  # type: ignore[misc]
    return {"claim": 1000 * statistics.median(claims), "prune": 1000 * statistics.median(prunes)}


async def keys(url: str, many: int, turns: int) -> dict[str, list[float]]:
    few_store, many_store = await opened(url, "few"), await opened(url + "?schema=many", "many")
    await few_store.put([called(key, "open") for key in range(10)])
    for start in range(0, many, 10_000):
        await many_store.put([called(key, "open") for key in range(start, min(start + 10_000, many))])
    found: dict[str, list[float]] = {"claim": [], "prune": []}
    for rounds in range(5):
        few = await one_key(few_store, turns, f"{rounds}-")
        lot = await one_key(many_store, turns, f"{rounds}-")
        for what in found:
            found[what].append(lot[what] / few[what])
    await few_store.close()
    await many_store.close()
    return found


# --- recovery and checkpoints ---


async def recovery(url: str, calls: int) -> float:
    store = await opened(url, "recovery")
    for start in range(0, calls, 10_000):
        await store.put([called(n % 1000, f"m{n % 1000}", n // 1000) for n in range(start, start + 10_000)])
    await store.close()

    async def recover() -> None:
        again = await opened(url, "recovery")
        found = [await again.claim(key) for key in await again.keys()]
        assert sum(len(state.calls) for states in found for state in states) == calls
        await again.close()

    return await seconds(recover)


async def checkpoints(url: str, pause: float) -> list[int]:
    store, sizes = await opened(url + "?schema=checkpoints", "checkpoints"), []
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        for checkpoint in range(50):
            names = [(b"%d" % (n % 50), f"{checkpoint}-{n}") for n in range(1000)]
            await store.put([called(int(key), name, call) for key, name in names for call in range(3)])
            await asyncio.sleep(pause)
            await store.prune(Covered(checkpoint, names))
            row = await (await connection.execute("SELECT pg_total_relation_size('checkpoints.records')")).fetchone()
            assert row is not None
            sizes.append(row[0])
    await store.close()
    return sizes


async def measure(url: str, quick: bool) -> None:
    rounds = [await in_flight(url, 20 if quick else 200, turn) for turn in range(3 if quick else 5)]
    for what in rounds[0]:
        print(f"{what:20} {statistics.median(one[what] for one in rounds):10,.0f} records/s")
    for other in ("one by one", "bare, unnest", "bare, executemany", "bare, copy"):
        ratio = statistics.median(one["store"] / one[other] for one in rounds)
        print(f"store / {other:18} {ratio:6.2f}")
    many = 5_000 if quick else 100_000
    for what, ratios in (await keys(url, many, 20 if quick else 200)).items():
        print(f"{what} of a key beside {many:,} others / beside 10: {statistics.median(ratios):.2f}")
    calls = 10_000 if quick else 100_000
    print(f"recovery of {calls:,} calls: {await recovery(url, calls):.2f} s")
    sizes = await checkpoints(url, 0.05 if quick else 0.5)
    print("table after checkpoint 1, 10, 25, 50: " + ", ".join(f"{sizes[n] / 2**20:.1f} MiB" for n in (0, 9, 24, 49)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    given = parser.parse_args()
    with ExitStack() as servers:
        url = given.url
        if url is None:
            from tests.services import Postgres

            # As it is installed, but with its disk awaited and its tables looked at every few seconds.
            server = Postgres(settings={"fsync": "on", "shared_buffers": "128MB", "autovacuum_naptime": "5s"})
            servers.callback(server.close)
            url = servers.enter_context(server.launch().database())
        asyncio.run(measure(url, given.quick))


if __name__ == "__main__":
    main()
