"""`FaultStore`, and what the runner makes of a store that fails in each of its ways."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dalsegno import Agent, DefinitionError, FencedError, InputEvent, LocalRunner, OutputEvent, RunnerContext, action
from dalsegno.core.records import fold
from dalsegno.errors import StoreError
from dalsegno.stores.base import Covered, TaskActionStore
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.sqlite import SqliteStore
from dalsegno.testing import Fault, FaultStore
from dalsegno.testing.stores import step


class Pays(Agent):
    def __init__(self, paid: list[str]) -> None:
        self.paid = paid

    @action(InputEvent)
    async def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        receipt = await ctx.durable_execute(self.transfer, event.input, effect="idempotent")
        ctx.short_term_memory.set("receipt", receipt)
        ctx.send_event(OutputEvent(output=receipt))

    async def transfer(self, order: str) -> str:
        self.paid.append(order)
        return f"receipt of {order}"


def run(place: Path, paid: list[str], outputs: list[Any], *faults: Fault) -> LocalRunner:
    store = FaultStore(SqliteStore(place / "agent.db"), *faults)
    runner = LocalRunner(
        Pays(paid), job="pay", store=store, checkpoints=place / "checkpoints.db", max_in_flight=1, linger=0
    )
    runner.run(["a", "b", "c"], place / "out.jsonl")
    outputs += (place / "out.jsonl").read_text().splitlines()
    return runner


METHODS = ["open", "keys", "put", "claim", "decisions", "prune"]
PUTS = [(number, when) for number in range(1, 5) for when in ("before", "after", "lost")]


@pytest.mark.parametrize("when", ["before", "after", "lost"])
@pytest.mark.parametrize("method", METHODS)
def test_a_failure_ends_the_run_and_the_next_one_does_what_is_left(tmp_path: Path, method: Any, when: Any) -> None:
    paid: list[str] = []
    with pytest.raises(StoreError):
        run(tmp_path, paid, [], Fault(method, when=when))
    before = [*paid]
    outputs: list[str] = []
    run(tmp_path, paid, outputs)
    assert outputs == ['"receipt of a"', '"receipt of b"', '"receipt of c"']
    assert sorted({*paid}) == ["a", "b", "c"]
    assert len(paid) <= 3 + len(before[-1:])  # only the one that was in flight may be made again


@pytest.mark.parametrize(("number", "when"), PUTS)
def test_nothing_is_paid_past_a_failed_write_and_nothing_recorded_twice(tmp_path: Path, number: int, when: Any) -> None:
    paid: list[str] = []
    with pytest.raises(StoreError):
        run(tmp_path, paid, [], Fault("put", number, when))
    # The n-th write holds the outcome of call n - 1 and the request of call n.
    assert len(paid) <= number - 1
    outputs: list[str] = []
    run(tmp_path, paid, outputs)
    assert outputs == ['"receipt of a"', '"receipt of b"', '"receipt of c"']
    assert len(paid) <= 4


def test_a_write_whose_answer_was_lost_is_found_and_not_assumed(tmp_path: Path) -> None:
    paid: list[str] = []
    with pytest.raises(StoreError):
        run(tmp_path, paid, [], Fault("put", 2, "after"))  # the outcome of the first call
    assert paid == ["a"]
    run(tmp_path, paid, [])
    assert paid == ["a", "b", "c"]


def test_a_delay_changes_nothing_else(tmp_path: Path) -> None:
    paid: list[str] = []
    outputs: list[str] = []
    run(tmp_path, paid, outputs, Fault("put", 1, "never", times=3, delay=0.02))
    assert paid == ["a", "b", "c"]
    assert len(outputs) == 3


def opened(inner: TaskActionStore, *faults: Fault) -> FaultStore:
    store = FaultStore(inner, *faults)
    asyncio.run(inner.open("job", "owner"))
    return store


def test_each_fault_does_what_it_says() -> None:
    record, other = step(b"1", "m", 1), step(b"1", "m", 2)
    inner = MemoryStore()
    store = opened(
        inner, Fault("put", 1, "before"), Fault("put", 2, "after"), Fault("put", 3, "torn"), Fault("put", 4, "lost")
    )

    async def written() -> int:
        before = len(inner.jobs["job"].records.get(b"1", {}))
        with pytest.raises(StoreError):
            await store.put([record, other])
        return len(inner.jobs["job"].records.get(b"1", {})) - before

    async def main() -> None:
        assert [await written() for _ in range(4)] == [0, 2, 1, 0]
        assert not store.connected
        with pytest.raises(StoreError, match="connection is lost"):
            await store.list(b"1")
        store.reconnect()
        await store.prune(Covered(1, [(b"1", "m")]))
        await store.put([record])
        assert await store.list(b"1") == fold([record])
        assert store.calls == {"put": 5, "list": 2, "prune": 1}

    asyncio.run(main())


def test_it_raises_the_error_that_it_is_given() -> None:
    store = opened(MemoryStore(), Fault("put", error=FencedError("taken over")))
    with pytest.raises(FencedError, match="taken over"):
        asyncio.run(store.put([step(b"1", "m")]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "write"}, "none of those that can fail"),
        ({"method": "put", "when": "during"}, "when='during'"),
        ({"method": "claim", "when": "torn"}, "only a put"),
        ({"method": "put", "number": 0}, "from 1 on"),
        ({"method": "put", "delay": -1.0}, "delay"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DefinitionError, match=words):
        Fault(**options)
