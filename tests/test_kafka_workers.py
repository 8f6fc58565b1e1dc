"""What fencing and marks of the Kafka store cover when several processes write, on a real broker."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import FencedError
from dalsegno.stores.base import Covered, Worker
from dalsegno.stores.kafka import KafkaStore
from dalsegno.stores.kafka import job as job_module
from dalsegno.stores.kafka.frames import partition_of
from dalsegno.testing.stores import in_loop, states, step
from tests.kafka_helpers import Place, delete_topics, log_starts
from tests.services.kafka import Kafka


@pytest.fixture
def place(kafka_server: Kafka) -> Iterator[Place]:
    found = Place(kafka_server, f"test-{secrets.token_hex(8)}")
    yield found
    delete_topics(kafka_server, found.prefix)


def keys_of(partition: int, count: int, partitions: int = 3) -> list[bytes]:
    found = [b"%d" % number for number in range(1000) if partition_of(b"%d" % number, partitions) + 1 == partition]
    return found[:count]


@in_loop
async def test_a_batch_over_several_partitions_of_a_fenced_worker_leaves_nothing_in_any(place: Place) -> None:
    batch = [step(keys_of(number, 1)[0], "late") for number in (1, 2, 3)]
    async with place.opened(Worker(0, 2)) as zombie, place.opened(Worker(1, 2)) as other:
        await zombie.put([step(b"0", "m")])
        async with place.opened(Worker(0, 2)) as successor:
            with pytest.raises(FencedError):
                await zombie.put(batch)
            with pytest.raises(FencedError):  # and never again
                await zombie.put(batch)
            await other.put([step(b"1", "m")])
            assert sorted(await successor.keys()) == [b"0", b"1"]
            for record in batch:
                assert "late" not in [state.message for state in await successor.claim(record.key)]


@in_loop
async def test_workers_of_another_number_are_fenced_both_ways_and_nothing_is_lost(place: Place) -> None:
    put = [step(b"%d" % number, "m") for number in range(12)]
    before: list[KafkaStore] = []
    for of in (4, 2, 4, 1):
        stores = [place.store() for _ in range(of)]
        for index, store in enumerate(stores):
            await store.open("job", f"worker {index} of {of}", Worker(index, of))
        for zombie in before:
            with pytest.raises(FencedError):
                await zombie.put([step(b"1", "late")])
            with pytest.raises(FencedError):
                await zombie.prune(Covered(99, []))
            await zombie.close()
        for number, record in enumerate(put):
            if of == 4 and not before:
                await stores[number % of].put([record])
            assert await stores[number % of].claim(record.key) == states([record], record.key)
        before = stores
    await before[0].close()


@in_loop
async def test_who_of_two_numbers_opens_last_has_the_job(place: Place) -> None:
    async with place.opened(Worker(0, 2)) as a, place.opened(Worker(0, 3)) as b:
        with pytest.raises(FencedError):
            await a.put([step(b"1", "m")])
        async with place.opened(Worker(0, 2)) as again:
            with pytest.raises(FencedError):
                await b.put([step(b"1", "m")])
            await again.put([step(b"1", "m")])


@in_loop
async def test_a_worker_that_dies_holds_what_it_needs_and_no_more(place: Place) -> None:
    """Two workers write to one partition; one of them is gone for a while, with a message in flight."""
    mine, its = keys_of(2, 2)
    in_flight = step(its, "in flight")
    watcher = 2 % 2  # who keeps partition 2 short
    async with place.opened(Worker(watcher, 2)) as living:
        async with place.opened(Worker(1 - watcher, 2)) as dies:
            await dies.put([step(its, "done")])
            await living.put([step(mine, "m")])
            await dies.prune(Covered(1, [(its, "done")]))
            await dies.put([in_flight])
        for number in range(10):
            await living.put([step(mine, f"m{number}")])
            await living.prune(Covered(number, [(mine, f"m{number}"), (mine, "m")]))
        held = log_starts(place.kafka, place.topic(), 4)[2]
        assert held > 2  # what it had done is gone
        async with place.opened(Worker(1 - watcher, 2)) as successor:
            assert await successor.claim(its) == states([in_flight], its)
            assert (await successor.prune(Covered(20, [(its, "in flight")]))).records == 1
        await living.prune(Covered(21, []))
        assert log_starts(place.kafka, place.topic(), 4)[2] > held + 20


@in_loop
async def test_a_worker_carries_only_what_is_its_own(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "CARRY_AFTER", 10)
    mine, its = keys_of(2, 2)
    async with place.opened(Worker(0, 2)) as a, place.opened(Worker(1, 2)) as b:
        assert await a.claim(mine) == await b.claim(its) == []
        await b.put([step(its, "parked")])
        await a.put([step(mine, "parked too")])
        for number in range(30):
            await a.put([step(mine, f"m{number}")])
            await a.prune(Covered(number, [(mine, f"m{number}")]))
        assert log_starts(place.kafka, place.topic(), 4)[2] == 0
        await b.prune(Covered(1, []))  # now it carries its own
        await a.prune(Covered(40, []))
        assert log_starts(place.kafka, place.topic(), 4)[2] > 40
    async with place.opened() as store:
        assert await store.claim(its) == states([step(its, "parked")], its)
        assert await store.claim(mine) == states([step(mine, "parked too")], mine)


@in_loop
async def test_a_worker_reads_only_the_partitions_that_its_keys_are_in(place: Place) -> None:
    body = "x" * 10_000
    async with place.opened() as store:
        for number in (1, 2, 3):
            await store.put([step(key, "m", result=os.urandom(5000).hex()) for key in keys_of(number, 10)])
    async with place.opened(Worker(0, 3)) as store:
        read = store.bytes_read
        assert await store.claim(keys_of(1, 1)[0]) != []
        one = store.bytes_read - read
        assert 10 * len(body) < one < 11 * len(body)
        for key in keys_of(1, 10):
            assert await store.claim(key) != []
        assert store.bytes_read - read == one
        await store.put([step(keys_of(1, 1)[0], "n", result=body)])
        assert len(await store.claim(keys_of(1, 1)[0])) == 2
        assert store.bytes_read - read == one  # nor what it writes itself


_AGENT = """
import asyncio, os
from pathlib import Path
from dalsegno import Agent, InputEvent, OutputEvent, RunnerContext, action

FOLDER = Path(os.environ["FOLDER"])


async def pay(order):
    with (FOLDER / "paid").open("a") as file:
        file.write(f"{order}\\n")
    await asyncio.sleep(float(os.environ.get("HOLD", "0")))
    return order


class Shop(Agent):
    @action(InputEvent)
    async def buy(self, event: InputEvent, ctx: RunnerContext) -> None:
        await ctx.durable_execute(pay, event.input["order"], effect="once")
        await ctx.durable_execute(pay, event.input["order"] + "-second", effect="once")
        ctx.send_event(OutputEvent(output=event.input))
"""


def test_a_zombie_stops_before_it_does_anything_more(place: Place, tmp_path: Path) -> None:
    """Stopped in the middle of a call, replaced, and woken up: it writes nothing, so it does nothing more."""
    (tmp_path / "shop.py").write_text(_AGENT + "\n\nagent = Shop()\n")
    (tmp_path / "orders.jsonl").write_text('{"order": "a"}\n')

    def start(name: str, hold: str) -> subprocess.Popen[str]:
        command = [
            *(sys.executable, "-m", "dalsegno"),
            *("run", "shop:agent", "--job", "job", "--source", "orders.jsonl", "--key", "order"),
            *("--sink", f"{name}.jsonl", "--store", f"kafka://{place.kafka.url}/{place.prefix}?partitions=2"),
            *("--checkpoints", f"{name}.db"),
        ]
        environment = {**os.environ, "HOLD": hold, "FOLDER": str(tmp_path)}
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    zombie = start("first", "3")
    while not (tmp_path / "paid").exists():
        assert zombie.poll() is None, zombie.communicate()[0]
        asyncio.run(asyncio.sleep(0.05))
    zombie.send_signal(signal.SIGSTOP)
    successor = start("second", "0")
    said = successor.communicate(timeout=120)[0]
    zombie.send_signal(signal.SIGCONT)
    complaint = zombie.communicate(timeout=120)[0]
    assert successor.returncode == 3, said  # finished, with the message parked: the call is in doubt
    assert zombie.returncode == 1, complaint
    assert "no longer owns" in complaint
    assert (tmp_path / "paid").read_text() == "a\n"
    with place.store().inspect() as outside:
        bodies = [record.body for record in outside.records("job")]
    assert sum(b'"requested"' in body for body in bodies) == 1
    assert not any(b'"completed"' in body for body in bodies)
