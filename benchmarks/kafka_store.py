"""The Kafka store beside a bare producer in the same run, and what its steps cost with many open keys.

Usage: ``python -m benchmarks.kafka_store [--rounds N] [--open N] [--json]``

Starts a broker of its own, unless ``DALSEGNO_TEST_KAFKA`` names one. Four measurements:

* ``put``: batches of records of 400 bytes through the store, beside a producer with ``acks=all``, the same compression,
  linger and batches, which sends each record as a message and waits for all reports of a batch. Ratio of records per
  second, store to bare, median of the rounds; at least 0.5 is wanted.
* ``claim`` and ``prune`` of one key with 100,000 other open keys, beside 10 of them: ratio of the median times; at most
  1.2 is wanted.
* ``recovery``: opening a job with 100,000 recorded calls, and claiming all of its keys; under 10 seconds are wanted.

Absolute figures vary with how busy the machine is: compare within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dalsegno.core.records import Record, encode_body
from dalsegno.stores.base import Covered
from dalsegno.stores.kafka import KafkaStore
from tests.services.kafka import Kafka

BATCHES = (64, 500, 2000)
PARTITIONS = 4
HEADER = {"action": "act", "event": "input", "sender": "", "index": 0}


def record(key: int, message: str, size: int = 300) -> Record:
    result = secrets.token_hex(size // 2)
    body = {"task": HEADER, "call": 0, "name": "call", "args_digest": "0", "result": result}
    return Record(b'"key-%d"' % key, message, "0123456789abcdef", encode_body("called", body))


@contextmanager
def broker() -> Iterator[str]:
    given = os.environ.get("DALSEGNO_TEST_KAFKA")
    if given:
        yield given
        return
    with Kafka().launch() as kafka:
        yield kafka.url


async def store_rate(url: str, batches: list[list[Record]]) -> float:
    store = KafkaStore(f"kafka://{url}/bench-{secrets.token_hex(6)}?partitions={PARTITIONS}")
    await store.open("job", "the benchmark")
    await store.put([record(0, "warm")])
    begun = time.perf_counter()
    for batch in batches:
        await store.put(batch)
    took = time.perf_counter() - begun
    await store.close()
    return sum(map(len, batches)) / took


def bare_rate(url: str, batches: list[list[Record]]) -> float:
    topic = f"bench-{secrets.token_hex(6)}"
    admin = AdminClient({"bootstrap.servers": url, "log_level": 0})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    producer = Producer(
        {"bootstrap.servers": url, "acks": "all", "linger.ms": 0, "compression.type": "lz4", "batch.size": 1_000_000}
    )
    reports: list[bool] = []
    producer.produce(topic, b"warm", b"warm")
    producer.flush(30)
    begun = time.perf_counter()
    for batch in batches:
        for key, message, task, body in batch:
            value = b"".join((message.encode(), task.encode(), body))
            producer.produce(topic, value, key, on_delivery=lambda error, _: reports.append(error is None))
        assert producer.flush(30) == 0
    took = time.perf_counter() - begun
    assert reports == [True] * sum(map(len, batches))
    admin.delete_topics([topic])[topic].result(30)
    return len(reports) / took


def put_ratio(url: str, size: int, rounds: int) -> dict[str, float]:
    rates = []
    for number in range(rounds):
        batches = [[record(n % 97, f"{number}-{b}-{n}") for n in range(size)] for b in range(max(20_000 // size, 10))]
        bare = bare_rate(url, batches)
        rates.append((asyncio.run(store_rate(url, batches)), bare))
    return {
        "store_per_second": statistics.median(store for store, _ in rates),
        "bare_per_second": statistics.median(bare for _, bare in rates),
        "ratio": statistics.median(store / bare for store, bare in rates),
    }


async def with_open_keys(url: str, count: int, steps: int = 150) -> tuple[float, float, float, float]:
    """Median seconds of a claim of a key with a record, of one without, and of a prune; and seconds of a recovery."""
    prefix = f"bench-{secrets.token_hex(6)}"
    store = KafkaStore(f"kafka://{url}/{prefix}?partitions={PARTITIONS}")
    await store.open("job", "the benchmark")
    for begin in range(0, count, 2000):
        await store.put([record(n, "open") for n in range(begin, min(begin + 2000, count))])
    await store.close()
    begun = time.perf_counter()
    await store.open("job", "the benchmark")
    keys = await store.keys()
    for key in keys:
        assert len(await store.claim(key)) == 1
    recovery = time.perf_counter() - begun
    assert len(keys) == count
    claims, news, prunes = [], [], []
    for number in range(steps):
        mine = record(10_000_000 + number, "m")
        await store.put([mine])
        claims.append(await _timed(store.claim(mine.key)))
        news.append(await _timed(store.claim(b"new %d" % number)))
        prunes.append(await _timed(store.prune(Covered(number + 1, [(mine.key, "m")]))))
    await store.close()
    return (*map(statistics.median, (claims, news, prunes)), recovery)  # type: ignore[return-value]


async def _timed(awaitable: object) -> float:
    begun = time.perf_counter()
    await awaitable  # type: ignore[misc]
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with broker() as url:
        puts = {size: put_ratio(url, size, options.rounds) for size in BATCHES}
        few = asyncio.run(with_open_keys(url, 10))
        many = asyncio.run(with_open_keys(url, options.open))
    found = {
        "put": puts,
        "few": dict(zip(("claim", "claim_new", "prune", "recovery"), few, strict=True)),
        "many": dict(zip(("claim", "claim_new", "prune", "recovery"), many, strict=True)),
    }
    bars = {
        **{f"put {size}: store to bare": (result["ratio"], ">=", 0.5) for size, result in puts.items()},
        "claim: many to few open keys": (many[0] / few[0], "<=", 1.2),
        "claim of a new key: many to few": (many[1] / few[1], "<=", 1.2),
        "prune: many to few open keys": (many[2] / few[2], "<=", 1.2),
        f"recovery of {options.open} calls, seconds": (many[3], "<=", 10.0),
    }
    if options.json:
        print(json.dumps(found | {"bars": bars}))
    else:
        for size, result in puts.items():
            print(
                f"put, batches of {size}: {result['store_per_second']:,.0f}/s, bare {result['bare_per_second']:,.0f}/s"
            )
        for name, (value, sign, bar) in bars.items():
            met = value >= bar if sign == ">=" else value <= bar
            print(f"{name:45} {value:8.2f}   wanted {sign} {bar}   {'met' if met else 'MISSED'}")
        print(
            f"milliseconds, few and many: claim {few[0] * 1e3:.2f} {many[0] * 1e3:.2f}, prune {few[2] * 1e3:.2f} "
            f"{many[2] * 1e3:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
