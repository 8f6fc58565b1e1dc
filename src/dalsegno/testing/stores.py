"""The conformance suite of task action stores: every store passes all of it, as one subclass.

::

    class TestMyStore(StoreSuite):
        def make(self, place: Path) -> TaskActionStore:
            return MyStore(place / "store")

        async def displace(self, place: Path, job: str) -> None:
            ...  # make the present owner lose its job, behind its back

The class attributes are capabilities. One that is declared and not found is a failure, never a skip. Test methods are
coroutines run by `asyncio.run`; no pytest plugin is needed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dalsegno.core.records import Record, TaskActionState, encode_body, fold
from dalsegno.errors import FencedError, OwnershipError, RecordError, StoreError
from dalsegno.stores.base import ALONE, Covered, Decision, TaskActionStore, Worker

ODD_KEYS = (
    *(b'""', b'" "', b"1", b'"1"', b"true", b"1.0", b'["a"]', b'"[\\"a\\"]"', b'"a"', b'"a', b'"a%"', b'"a_"', b'"A"'),
    *(
        b"'",
        b"\\",
        b"*",
        b"[a-z]",
        b"{}",
        b"a/b",
        b"a:b",
        b"",
        b"\0",
        b"\0\0",
        b"a\0",
        b"a\0b",
        b"\xff\xfe",
        b"\xed\xa0\x80",
    ),
    *('"é"'.encode(), '"e\u0301"'.encode(), '"😀"'.encode(), b"k" * 5000, b"k" * 5000 + b"1"),
)
"""Message keys in the form in which stores see them; they are bytes, and nothing else is known of them."""

ODD_TEXTS = (
    *("", " ", "0", "00", "1", "10", "2", "1.0", "a", "A", "a ", "a%", "a_b", "a:b", "a/b", "'", '"', "\\", "*", "\n"),
    *("\0", "a\0", "a\0b", "é", "e\u0301", "😀", "\ud83d\ude00", "\ud800", "\udc80a", "x" * 5000, "x" * 5000 + "1"),
)
"""Ids of messages and action tasks."""


def step(key: bytes, message: str, number: int = 0, *, task: str = "task", result: object = None) -> Record:
    """The record of call *number* of an action task."""
    header = {"action": "act", "event": "input", "sender": "", "index": 0}
    body = {"task": header, "call": number, "name": "call", "args_digest": "0", "result": result}
    return Record(key, message, task, encode_body("called", body))


def decision(key: bytes, message: str, target: str = "target", by: int = 0, *, body: str = "") -> Decision:
    """A decision of the *by*-th person."""
    return Decision(key, message, target, json.dumps({"v": 1, "by": by, "body": body}).encode())


def files(place: Path) -> list[Path]:
    return sorted(place.rglob("*"))


def states(records: Sequence[Record], key: bytes) -> list[TaskActionState]:
    """What a store must say of *key* when *records* were put in this order."""
    return fold(record for record in records if record.key == key)


def in_loop(method: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test method of a coroutine."""

    @functools.wraps(method)
    def test(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            await method(*args, **kwargs)

        asyncio.run(main())

    return test


class StoreSuite(ABC):
    """Subclass it under a name that pytest collects. *place* is an empty folder of each test."""

    persistent: ClassVar[bool] = True
    """Whether records outlive the process."""
    takes_over: ClassVar[bool] = False
    """Whether opening a job that has a living owner displaces that owner; otherwise it is refused."""
    shared: ClassVar[bool] = False
    """Whether several workers may run one job together."""
    largest_body: ClassVar[int] = 20_000_000
    """Bytes that the body of one record may have."""

    @abstractmethod
    def make(self, place: Path) -> TaskActionStore:
        """A store object that is not open; all those made for one *place* have the same data."""

    @abstractmethod
    async def displace(self, place: Path, job: str) -> None:
        """Make the present owner of *job* lose it as it would to a new owner, but do not tell it."""

    @asynccontextmanager
    async def opened(self, place: Path, job: str = "job", worker: Worker = ALONE) -> AsyncIterator[TaskActionStore]:
        """A store that is open within the ``async with`` statement."""
        store = self.make(place)
        await store.open(job, "the conformance suite", worker)
        try:
            yield store
        finally:
            await store.close()

    # --- opening and closing ---

    @in_loop
    async def test_capabilities_are_declared_alike(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        assert (store.persistent, store.shared) == (self.persistent, self.shared)

    @in_loop
    async def test_a_new_job_has_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            assert await store.keys() == []
            assert await store.claim(b"1") == []
            assert await store.list(b"1") == []
            assert await store.get(b"1", "task") is None
            assert store.pruned_through == 0

    @in_loop
    async def test_closing_twice_or_unopened_does_no_harm(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        await store.close()
        await store.open("job", "owner")
        await store.close()
        await store.close()

    @in_loop
    async def test_a_store_that_is_not_open_says_so(self, tmp_path: Path) -> None:
        never = self.make(tmp_path)
        async with self.opened(tmp_path) as closed:
            pass
        for store in (never, closed):
            uses: list[Awaitable[object]] = [
                *(store.keys(), store.list(b"1"), store.claim(b"1"), store.get(b"1", "task")),
                *(store.put([step(b"1", "m")]), store.prune(Covered(1, [])), store.decisions(0)),
            ]
            for use in uses:
                with pytest.raises(StoreError, match="not open"):
                    await use
            with pytest.raises(StoreError, match="not open"):
                _ = store.identity
            with pytest.raises(StoreError, match="not open"):
                _ = store.pruned_through

    @in_loop
    async def test_a_closed_store_can_be_opened_again(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        record = step(b"1", "m")
        await store.open("job", "owner")
        await store.put([record])
        await store.close()
        await store.open("job", "owner")
        assert await store.claim(b"1") == states([record], b"1")
        await store.close()

    @in_loop
    async def test_identity_stays_with_the_data(self, tmp_path: Path) -> None:
        here, elsewhere = tmp_path / "a", tmp_path / "b"
        here.mkdir()
        elsewhere.mkdir()
        async with self.opened(here) as store:
            first = store.identity
        async with self.opened(here) as store:
            assert store.identity == first
        async with self.opened(elsewhere) as store:
            assert store.identity != first
        assert len(first) >= 16

    # --- writing and reading ---

    @in_loop
    async def test_what_was_put_is_read_in_order(self, tmp_path: Path) -> None:
        put: list[Record] = []
        async with self.opened(tmp_path) as store:
            for number in range(40):
                batch = [
                    step(key, f"m{number % 3}", number, task=task, result=[number, task])
                    for key in (b"1", b"2", b'"1"')
                    for task in ("t10", "t9")
                ]
                await store.put(batch)
                put += batch
            for key in (b"1", b"2", b'"1"'):
                assert await store.list(key) == states(put, key)
        async with self.opened(tmp_path) as store:
            assert sorted(await store.keys()) == sorted([b"1", b"2", b'"1"'])
            for key in (b"1", b"2", b'"1"', b"3"):
                assert await store.claim(key) == states(put, key)

    @in_loop
    async def test_steps_add_up_across_batches(self, tmp_path: Path) -> None:
        call = {"call": 0, "name": "pay", "args_digest": "0"}
        header = {"action": "act", "event": "input", "sender": "", "index": 0}
        bodies = [
            encode_body("requested", {**call, "task": header, "args": [1], "kwargs": {}, "effect": "once"}),
            encode_body("completed", {**call, "result": "paid"}),
            encode_body("done", {"memory": [{"op": "set", "path": "n", "value": 1}], "events": [], "last": True}),
        ]
        async with self.opened(tmp_path) as store:
            for number, body in enumerate(bodies):
                await store.put([Record(b"1", "m", "task", body)])
                (state,) = await store.list(b"1")
                assert (state.calls[0].status.value, state.done) == (
                    ("requested", "completed")[number > 0],
                    number == 2,
                )

    @in_loop
    async def test_a_claim_sees_what_this_owner_put(self, tmp_path: Path) -> None:
        record = step(b"1", "m")
        async with self.opened(tmp_path) as store:
            assert await store.claim(b"1") == []
            await store.put([record])
            assert await store.claim(b"1") == states([record], b"1")

    @in_loop
    async def test_get_finds_one_action_task(self, tmp_path: Path) -> None:
        put = [step(key, "m", task=task, result=task) for key in (b"1", b"2") for task in ("a", "b")]
        async with self.opened(tmp_path) as store:
            await store.put(put)
            assert [await store.get(b"1", "a"), await store.get(b"1", "b")] == states(put, b"1")
            assert await store.get(b"1", "c") is None
            assert await store.get(b"3", "a") is None

    @in_loop
    async def test_any_key_is_itself(self, tmp_path: Path) -> None:
        put = [step(key, "m", result=number) for number, key in enumerate(ODD_KEYS)]
        async with self.opened(tmp_path) as store:
            await store.put(put)
        async with self.opened(tmp_path) as store:
            assert sorted(await store.keys()) == sorted(ODD_KEYS)
            for key in ODD_KEYS:
                assert await store.claim(key) == states(put, key)

    @in_loop
    async def test_any_id_is_itself(self, tmp_path: Path) -> None:
        put = [step(b"1", text, task=text, result=number) for number, text in enumerate(ODD_TEXTS)]
        async with self.opened(tmp_path) as store:
            await store.put(put)
        async with self.opened(tmp_path) as store:
            assert await store.claim(b"1") == states(put, b"1")
            for number, text in enumerate(ODD_TEXTS):
                assert await store.get(b"1", text) == states(put, b"1")[number]

    @in_loop
    async def test_an_empty_batch_is_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.put([])
            assert await store.keys() == []

    @in_loop
    async def test_a_large_batch(self, tmp_path: Path) -> None:
        put = [step(b"%d" % (number % 7), f"m{number // 7}", number) for number in range(20_001)]
        async with self.opened(tmp_path) as store:
            await store.put(put)
            for key in range(7):
                assert await store.list(b"%d" % key) == states(put, b"%d" % key)

    @in_loop
    async def test_a_large_body(self, tmp_path: Path) -> None:
        put = [step(b"1", "m", result="x" * (self.largest_body - 1000)), step(b"1", "n")]
        async with self.opened(tmp_path) as store:
            await store.put(put)
        async with self.opened(tmp_path) as store:
            assert await store.claim(b"1") == states(put, b"1")

    @in_loop
    async def test_a_damaged_record_is_an_error_of_its_key_alone(self, tmp_path: Path) -> None:
        for number, body in enumerate((b"", b"\0\xff", b"null", b'{"v":1}', b'{"v":999,"kind":"called"}')):
            async with self.opened(tmp_path, f"job{number}") as store:
                await store.put([Record(b"1", "the-message", "the-task", body), step(b"2", "m")])
                for read in (store.list(b"1"), store.claim(b"1"), store.get(b"1", "the-task")):
                    with pytest.raises(RecordError, match="the-message"):
                        await read
                assert len(await store.list(b"2")) == 1

    @in_loop
    async def test_bodies_of_another_form_are_read_through_what_opens_them(self, tmp_path: Path) -> None:
        put = [step(key, "m", result=number) for number, key in enumerate((b"1", b"2"))]
        async with self.opened(tmp_path) as store:
            await store.put([record._replace(body=b"stored " + record.body) for record in put])
            store.read_through(lambda record, where: record.body.removeprefix(b"stored "))
            for key in (b"1", b"2"):
                assert await store.list(key) == await store.claim(key) == states(put, key)
                assert [await store.get(key, "task")] == states(put, key)
            store.read_through(None)
            for read in (store.list(b"1"), store.claim(b"1"), store.get(b"1", "task")):
                with pytest.raises(RecordError, match="not JSON"):
                    await read

    # --- pruning ---

    @in_loop
    async def test_pruning_removes_the_covered_messages_only(self, tmp_path: Path) -> None:
        put = [step(key, f"m{number}", task=f"t{number}") for number in range(12) for key in (b"1", b"2")]
        covered = [(b"1", "m1"), (b"2", "m10"), (b"3", "m1"), (b"1", "m")]
        async with self.opened(tmp_path) as store:
            await store.put(put)
            report = await store.prune(Covered(5, covered))
            assert report.records == 2
            assert (await store.prune(Covered(5, covered))).records == 0
            put = [record for record in put if (record.key, record.message) not in covered]
            for key in (b"1", b"2"):
                assert await store.list(key) == states(put, key)
            assert await store.get(b"1", "t1") is None
        async with self.opened(tmp_path) as store:
            for key in (b"1", b"2"):
                assert await store.claim(key) == states(put, key)

    @in_loop
    async def test_what_an_earlier_owner_wrote_can_be_pruned(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.put([step(key, message) for key in (b"1", b"2") for message in ("m", "n")])
        async with self.opened(tmp_path) as store:
            assert (await store.prune(Covered(1, [(b"1", "m"), (b"2", "m"), (b"2", "n")]))).records == 3
            assert await store.keys() == [b"1"]
            await store.put([step(b"2", "o")])
            assert await store.claim(b"2") == states([step(b"2", "o")], b"2")
        async with self.opened(tmp_path) as store:
            assert await store.claim(b"1") == states([step(b"1", "n")], b"1")

    @in_loop
    async def test_pruning_any_key_and_id(self, tmp_path: Path) -> None:
        put = [step(key, text) for key in ODD_KEYS[::3] for text in ODD_TEXTS]
        put += [step(key, "m") for key in ODD_KEYS]
        async with self.opened(tmp_path) as store:
            await store.put(put)
            while put:
                covered = [(record.key, record.message) for record in put[:: len(put) // 6 + 1]]
                assert (await store.prune(Covered(1, covered))).records == len(covered)
                put = [record for record in put if (record.key, record.message) not in covered]
                assert sorted(await store.keys()) == sorted({record.key for record in put})
                for key in ODD_KEYS:
                    assert await store.list(key) == states(put, key)

    @in_loop
    async def test_pruning_many_messages(self, tmp_path: Path) -> None:
        put = [step(b"%d" % (number % 50), f"m{number}") for number in range(3000)]
        async with self.opened(tmp_path) as store:
            await store.put(put)
            covered = [(record.key, record.message) for record in put[:-1]]
            assert (await store.prune(Covered(1, covered))).records == 2999
            assert await store.keys() == [put[-1].key]

    @in_loop
    async def test_the_latest_pruned_checkpoint_is_kept(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.prune(Covered(3, []))
            assert store.pruned_through == 3
            await store.prune(Covered(2, [(b"1", "m")]))
            assert store.pruned_through == 3
        async with self.opened(tmp_path) as store:
            assert store.pruned_through == 3
        async with self.opened(tmp_path, "other") as store:
            assert store.pruned_through == 0

    @in_loop
    async def test_a_pruned_key_may_be_used_again(self, tmp_path: Path) -> None:
        later = step(b"1", "n")
        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", "m")])
            await store.prune(Covered(1, [(b"1", "m")]))
            assert await store.keys() == []
            await store.put([later])
            assert await store.claim(b"1") == states([later], b"1")
        async with self.opened(tmp_path) as store:
            assert await store.claim(b"1") == states([later], b"1")

    # --- jobs and owners ---

    @in_loop
    async def test_jobs_do_not_meet(self, tmp_path: Path) -> None:
        names = ("job", "Job", "job ", "jo", "j%", "", "é", "a/b", "a\0", "\ud800")
        for name in names:
            async with self.opened(tmp_path, name) as store:
                assert await store.keys() == []
                await store.put([step(b"1", "m", task=name), step(b"1", "n")])
        async with self.opened(tmp_path, "job") as store:
            await store.prune(Covered(1, [(b"1", "m")]))
        for name in names[1:]:
            async with self.opened(tmp_path, name) as store:
                assert [state.message for state in await store.claim(b"1")] == ["m", "n"]
                assert await store.get(b"1", name) is not None

    @in_loop
    async def test_two_jobs_at_a_time(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path, "a") as a, self.opened(tmp_path, "b") as b:
            await asyncio.gather(a.put([step(b"1", "m", result="a")]), b.put([step(b"1", "m", result="b")]))
            for name, store in (("a", a), ("b", b)):
                (state,) = await store.list(b"1")
                assert state.calls[0].result == name

    @in_loop
    async def test_a_job_has_one_owner(self, tmp_path: Path) -> None:
        second = self.make(tmp_path)
        async with self.opened(tmp_path, "the-job") as first:
            if self.takes_over:
                await second.open("the-job", "second")
                with pytest.raises(FencedError):
                    await first.put([step(b"1", "m")])
                assert await second.claim(b"1") == []
            else:
                with pytest.raises(OwnershipError, match="the-job") as refused:
                    await second.open("the-job", "second")
                assert "conformance suite" in str(refused.value)
                await first.put([step(b"1", "m")])
        if not self.takes_over:
            await second.open("the-job", "second")
            assert len(await second.claim(b"1")) == 1
        await second.close()

    @in_loop
    async def test_a_former_owner_can_do_nothing(self, tmp_path: Path) -> None:
        record = step(b"1", "m")
        async with self.opened(tmp_path) as store:
            await store.put([record])
            await self.displace(tmp_path, "job")
            with pytest.raises(FencedError):
                await store.put([step(b"1", "n"), step(b"2", "n")])
            with pytest.raises(FencedError):
                await store.put([step(b"2", f"n{number}") for number in range(10_000)])
            with pytest.raises(FencedError):
                await store.prune(Covered(9, [(b"1", "m")]))
        async with self.opened(tmp_path) as store:
            assert await store.claim(b"1") == states([record], b"1")
            assert await store.claim(b"2") == []
            assert await store.keys() == [b"1"]
            assert store.pruned_through == 0

    @in_loop
    async def test_workers_share_a_job_or_are_refused(self, tmp_path: Path) -> None:
        if not self.shared:
            with pytest.raises(StoreError, match="worker 1 of 2"):
                await self.make(tmp_path).open("job", "one of two", Worker(1, 2))
            return
        put = [step(b"%d" % index, "m", result=index) for index in range(2)]
        async with self.opened(tmp_path, "job", Worker(0, 2)) as a, self.opened(tmp_path, "job", Worker(1, 2)) as b:
            assert a.identity == b.identity
            await asyncio.gather(a.put(put[:1]), b.put(put[1:]))
            assert sorted(await a.keys()) == [b"0", b"1"]
            await asyncio.gather(a.prune(Covered(2, [(b"0", "m")])), b.prune(Covered(1, [])))
            await b.put([step(b"1", "n")])
        async with self.opened(tmp_path) as store:
            assert await store.keys() == [b"1"]
            assert len(await store.claim(b"1")) == 2
            assert store.pruned_through == 2

    @in_loop
    async def test_a_worker_takes_over_from_its_predecessor_alone(self, tmp_path: Path) -> None:
        if not self.shared:
            return
        a, b, again = (self.make(tmp_path) for _ in range(3))
        await a.open("job", "the first", Worker(0, 2))
        await b.open("job", "the other", Worker(1, 2))
        if not self.takes_over:
            with pytest.raises(OwnershipError, match="the first"):
                await again.open("job", "another", Worker(0, 2))
            await a.close()
        await again.open("job", "another", Worker(0, 2))
        if self.takes_over:
            await self._check_that_nothing_can_be_written(a)
        await b.put([step(b"1", "m")])
        await again.put([step(b"2", "m")])
        for store in (a, b, again):
            await store.close()

    @in_loop
    async def test_another_number_of_workers_takes_over_from_all(self, tmp_path: Path) -> None:
        if not self.shared:
            return
        before = [self.make(tmp_path) for _ in range(2)]
        for index, store in enumerate(before):
            await store.open("job", f"worker {index} of 2", Worker(index, 2))
            await store.put([step(b"%d" % index, "m")])
        after = self.make(tmp_path)
        if not self.takes_over:
            for store in before:
                with pytest.raises(OwnershipError, match="of 2"):
                    await after.open("job", "worker 0 of 3", Worker(0, 3))
                await store.close()
        await after.open("job", "worker 0 of 3", Worker(0, 3))
        if self.takes_over:
            for store in before:
                await self._check_that_nothing_can_be_written(store)
        assert [len(await after.claim(b"%d" % index)) for index in range(2)] == [1, 1]
        for store in (*before, after):
            await store.close()

    async def _check_that_nothing_can_be_written(self, store: TaskActionStore) -> None:
        with pytest.raises(FencedError):
            await store.put([step(b"1", "late")])
        with pytest.raises(FencedError):
            await store.prune(Covered(9, []))

    @in_loop
    async def test_there_is_no_worker_beyond_their_number(self, tmp_path: Path) -> None:
        for index, of in ((1, 1), (-1, 1), (0, 0), (2, 2)):
            with pytest.raises(StoreError, match=f"worker {index} of {of}"):
                await self.make(tmp_path).open("job", "nobody", Worker(index, of))

    # --- decisions, and looking in from outside ---

    @in_loop
    async def test_decisions_come_in_the_order_in_which_they_were_made(self, tmp_path: Path) -> None:
        made = [decision(key, "m", f"t{number}", number) for number in range(12) for key in (b"2", b"1")]
        async with self.opened(tmp_path) as store:
            assert await store.decisions(0) == []
            await store.put([step(b"1", "m"), step(b"2", "m")])
            with store.inspect() as outside:
                assert [outside.decide("job", each) for each in made] == [True] * len(made)
                assert outside.decisions("job") == made
            numbered = await store.decisions(0)
            assert [each for _, each in numbered] == made
            numbers = [number for number, _ in numbered]
            assert numbers == sorted(set(numbers))
            assert numbers[0] > 0
            for after in (numbers[0], numbers[7], numbers[-1], numbers[-1] + 10):
                assert await store.decisions(after) == [each for each in numbered if each[0] > after]
            assert await store.decisions(0) == numbered  # also once there was nothing new
        async with self.opened(tmp_path) as store:
            assert await store.decisions(0) == numbered

    @in_loop
    async def test_a_target_is_decided_once(self, tmp_path: Path) -> None:
        first, other = decision(b"1", "m", "t", 1), decision(b"1", "m", "t", 2)
        elsewhere = [decision(b"1", "m", "t2"), decision(b"1", "n", "t"), decision(b"2", "m", "t")]
        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", "m"), step(b"1", "n"), step(b"2", "m")])
            with store.inspect() as outside:
                assert outside.decide("job", first) is True
                assert outside.decide("job", first) is False
                assert outside.decide("job", other) is False
                assert [outside.decide("job", each) for each in elsewhere] == [True] * 3
                assert outside.decisions("job") == [first, *elsewhere]
        with self.make(tmp_path).inspect() as outside:
            assert outside.decide("job", other) is False
            assert outside.decisions("job") == [first, *elsewhere]

    @in_loop
    async def test_any_target_is_itself(self, tmp_path: Path) -> None:
        made = [decision(key, text, text, number) for key in ODD_KEYS[::5] for number, text in enumerate(ODD_TEXTS)]
        made += [decision(key, "m") for key in ODD_KEYS]
        async with self.opened(tmp_path) as store:
            await store.put([step(each.key, each.message) for each in made])
            with store.inspect() as outside:
                assert all(outside.decide("job", each) for each in made)
                assert not any(outside.decide("job", each) for each in made)
                assert outside.decisions("job") == made
            assert [each for _, each in await store.decisions(0)] == made
            covered = [(each.key, each.message) for each in made[::2]]
            await store.prune(Covered(1, covered))
            left = [each for each in made if each[:2] not in set(covered)]
            assert [each for _, each in await store.decisions(0)] == left

    @in_loop
    async def test_bodies_of_decisions_are_exact(self, tmp_path: Path) -> None:
        bodies = (b"", b"\0", b"\xff\xfe", b"{}", b"x" * 1_000_000)
        made = [Decision(b"1", "m", str(number), body) for number, body in enumerate(bodies)]
        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", "m")])
            with store.inspect() as outside:
                assert all(outside.decide("job", each) for each in made)
            assert [each for _, each in await store.decisions(0)] == made

    @in_loop
    async def test_what_nobody_would_take_up_is_not_decided(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store, self.opened(tmp_path, "other") as other:
            await store.put([step(b"1", "m"), step(b"2", "n")])
            await other.put([step(b"3", "m")])
            with store.inspect() as outside:
                for key, message in ((b"1", "n"), (b"2", "m"), (b"3", "m"), (b"1", ""), (b"", "m")):
                    with pytest.raises(StoreError, match=r"nothing is recorded of message"):
                        outside.decide("job", decision(key, message))
                await store.prune(Covered(1, [(b"1", "m")]))
                with pytest.raises(StoreError, match="nothing is recorded of message 'm'"):
                    outside.decide("job", decision(b"1", "m"))
                assert outside.decisions("job") == []

    @in_loop
    async def test_pruning_removes_decisions_with_their_message(self, tmp_path: Path) -> None:
        made = [decision(key, f"m{n}", target) for n in range(12) for key in (b"1", b"2") for target in ("a", "b")]
        covered = [(b"1", "m1"), (b"2", "m10"), (b"3", "m1"), (b"1", "m")]
        left = [each for each in made if each[:2] not in covered]
        async with self.opened(tmp_path) as store:
            await store.put([step(each.key, each.message) for each in made[::2]])
            with store.inspect() as outside:
                assert all(outside.decide("job", each) for each in made)
                assert (await store.prune(Covered(5, covered))).records == 2
                assert outside.decisions("job") == left
            assert [each for _, each in await store.decisions(0)] == left

    @in_loop
    async def test_numbers_of_decisions_are_never_given_again(self, tmp_path: Path) -> None:
        seen: list[int] = []
        for turn in range(4):
            async with self.opened(tmp_path) as store:
                assert await store.decisions(0) == []
                await store.put([step(b"1", f"m{turn}")])
                with store.inspect() as outside:
                    assert outside.decide("job", decision(b"1", f"m{turn}"))
                ((number, _),) = await store.decisions(max(seen, default=0))
                seen.append(number)
                await store.prune(Covered(turn, [(b"1", f"m{turn}")]))
        assert seen == sorted(set(seen))

    @in_loop
    async def test_decisions_of_two_jobs_do_not_meet(self, tmp_path: Path) -> None:
        names = ("job", "Job", "", "é", "a\0", "\ud800")
        for name in names:
            async with self.opened(tmp_path, name) as store:
                await store.put([step(b"1", "m")])
                assert await store.decisions(0) == []
                with store.inspect() as outside:
                    assert outside.decide(name, decision(b"1", "m", body=name.encode(errors="replace").decode()))
        async with self.opened(tmp_path, "job") as store:
            assert len(await store.decisions(0)) == 1
            await store.prune(Covered(1, [(b"1", "m")]))
        with self.make(tmp_path).inspect() as outside:
            assert outside.decisions("job") == []
            assert [len(outside.decisions(name)) for name in names[1:]] == [1] * 5

    @in_loop
    async def test_the_owner_sees_what_is_decided_while_it_writes(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", "m")])

            def decide() -> list[bool]:
                with store.inspect() as outside:
                    return [outside.decide("job", decision(b"1", "m", str(number))) for number in range(50)]

            deciding = asyncio.ensure_future(asyncio.to_thread(decide))
            seen: list[tuple[int, Decision]] = []
            number = 0
            while not deciding.done():
                number += 1
                await store.put([step(b"2", f"m{number}", result="x" * 1000)])
                seen += await store.decisions(seen[-1][0] if seen else 0)
                await asyncio.sleep(0.001)  # a store need not wait for anything by itself
            assert await deciding == [True] * 50
            seen += await store.decisions(seen[-1][0] if seen else 0)
            assert [each.target for _, each in seen] == [str(number) for number in range(50)]
            assert len(await store.list(b"2")) == number

    @in_loop
    async def test_of_many_who_decide_at_once_one_does(self, tmp_path: Path) -> None:
        targets = [str(number) for number in range(20)]

        def decide(who: int) -> list[bool]:
            with self.make(tmp_path).inspect() as outside:
                return [outside.decide("job", decision(b"1", "m", target, who)) for target in targets]

        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", "m")])
            results = await asyncio.gather(*(asyncio.to_thread(decide, who) for who in range(8)))
            made = await store.decisions(0)
            assert [sum(result) for result in zip(*results, strict=True)] == [1] * len(targets)
            assert [each.target for _, each in made] == targets
            for at, (_, each) in enumerate(made):
                assert results[json.loads(each.body)["by"]][at] is True

    @in_loop
    async def test_an_outsider_sees_jobs(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path, "b") as first:
            await first.put([step(b"1", "m"), step(b"1", "m", 1), step(b"1", "n"), step(b"2", "m")])
        async with self.opened(tmp_path, "b") as running:
            async with self.opened(tmp_path, "a\ud800") as over:
                await over.prune(Covered(7, []))
                identity = over.identity
            with running.inspect() as outside, self.make(tmp_path).inspect() as other:
                a, b = outside.jobs()
                assert list(other.jobs()) == [a, b]
                await running.prune(Covered(3, [(b"1", "m")]))
                b_later = outside.jobs()[1]
        assert (a.name, a.identity, a.epoch, a.pruned_through) == ("a\ud800", identity, 1, 7)
        assert (a.running, a.messages) == (False, 0)
        assert (b.name, b.epoch, b.running, b.messages, b.pruned_through) == ("b", 2, True, 3, 0)
        assert (b.owner, b.pid) == ("the conformance suite", os.getpid())
        assert b.host
        assert datetime.fromisoformat(b.since).tzinfo is not None
        assert (b_later.messages, b_later.pruned_through) == (2, 3)
        with self.make(tmp_path).inspect() as outside:
            assert [job.running for job in outside.jobs()] == [False, False]

    @in_loop
    async def test_an_outsider_reads_records_in_order(self, tmp_path: Path) -> None:
        put = [
            step(key, f"m{number % 5}", number, task=f"t{number % 2}", result="x" * (number % 3) * 10_000)
            for number in range(700)
            for key in (b"2", b"1", b"\xff\0")
        ]
        async with self.opened(tmp_path) as store, self.opened(tmp_path, "other") as other:
            for start in range(0, len(put), 50):
                await store.put(put[start : start + 50])
                await other.put([step(b"1", "m0", task="of another job")])
            with store.inspect() as outside:
                assert list(outside.records("job")) == put
                for key in (b"1", b"2", b"\xff\0", b"", b"\xff"):
                    assert list(outside.records("job", key)) == [each for each in put if each.key == key]
                    of_message = [each for each in put if each[:2] == (key, "m3")]
                    assert list(outside.records("job", key, "m3")) == of_message
                assert list(outside.records("job", None, "m1")) == [each for each in put if each.message == "m1"]
                assert list(outside.messages("job")) == list(dict.fromkeys((each.key, each.message) for each in put))
                assert len(list(outside.records("other"))) == len(put) // 50

    @in_loop
    async def test_an_outsider_reads_any_key_and_id(self, tmp_path: Path) -> None:
        put = [step(key, text, task=text) for key in ODD_KEYS[::4] for text in ODD_TEXTS]
        put += [step(key, "m") for key in ODD_KEYS]
        async with self.opened(tmp_path) as store:
            await store.put(put)
        with self.make(tmp_path).inspect() as outside:
            assert list(outside.records("job")) == put
            assert list(outside.messages("job")) == [each[:2] for each in put]
            for each in put[::7]:
                assert list(outside.records("job", each.key, each.message)) == [each]

    @in_loop
    async def test_an_outsider_may_read_while_the_owner_writes_and_prunes(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", f"m{number}", result="x" * 2000) for number in range(1000)])
            with store.inspect() as outside:
                reading = outside.records("job")
                first = next(reading)
                await store.prune(Covered(1, [(b"1", f"m{number}") for number in range(1000)]))
                await store.put([step(b"2", f"n{number}") for number in range(1000)])
                # As of one moment, though much has changed since.
                assert [each.message for each in [first, *reading]] == [f"m{number}" for number in range(1000)]
                assert [each.message for each in outside.records("job")] == [f"n{number}" for number in range(1000)]

    @in_loop
    async def test_an_outsider_knows_no_job_that_was_never_opened(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path, "the-job") as store:
            with store.inspect() as outside:
                uses: list[Callable[[], object]] = [
                    *(lambda: outside.messages("jo"), lambda: outside.records("jo"), lambda: outside.decisions("jo")),
                    lambda: outside.decide("jo", decision(b"1", "m")),
                ]
                for use in uses:
                    with pytest.raises(StoreError, match=r"no job 'jo'.*'the-job'"):
                        use()
                assert [job.name for job in outside.jobs()] == ["the-job"]
                outside.close()
                outside.close()

    def test_looking_where_nothing_is_makes_nothing(self, tmp_path: Path) -> None:
        try:
            with self.make(tmp_path).inspect() as outside:
                assert list(outside.jobs()) == []
        except StoreError:
            pass
        assert files(tmp_path) == []

    @in_loop
    async def test_looking_in_leaves_nothing_behind(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.put([step(b"1", "m")])
        before = files(tmp_path)
        with self.make(tmp_path).inspect() as outside:
            assert len(outside.jobs()) == len(list(outside.records("job"))) == 1
            assert outside.decisions("job") == []
        assert files(tmp_path) == before

    # --- much at a time ---

    @in_loop
    async def test_everything_at_a_time(self, tmp_path: Path) -> None:
        batches = [[step(b"%d" % key, f"m{number}", result=number) for key in range(10)] for number in range(60)]
        written = [asyncio.Event() for _ in batches]

        async def write(store: TaskActionStore) -> None:
            for batch, done in zip(batches, written, strict=True):
                await store.put(batch)
                done.set()

        async def read(store: TaskActionStore, key: bytes) -> None:
            while not written[-1].is_set():
                listed = await store.list(key)
                numbers = [state.calls[0].result for state in listed]
                assert numbers == sorted(numbers)
                assert all(state.key == key and state.message == f"m{state.calls[0].result}" for state in listed)
                assert {state.key for state in await store.claim(key)} <= {key}
                got = await store.get(key, "task")
                assert got is None or got.key == key
                await asyncio.sleep(0)

        async def prune(store: TaskActionStore) -> None:
            for number, batch in enumerate(batches[:50]):
                await written[number].wait()
                covered = Covered(number, [(record.key, record.message) for record in batch])
                assert (await store.prune(covered)).records == len(batch)

        async with self.opened(tmp_path) as store:
            await asyncio.gather(write(store), prune(store), *(read(store, b"%d" % key) for key in range(10)))
            put = [record for batch in batches[50:] for record in batch]
            for key in range(10):
                assert await store.list(b"%d" % key) == states(put, b"%d" % key)

    @in_loop
    async def test_a_cancelled_put_is_done_or_not(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for turns in range(30):
                first, last = step(b"1", f"a{turns}"), step(b"1", f"z{turns}")
                writing = asyncio.create_task(store.put([first, *(step(b"2", f"m{n}") for n in range(50)), last]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                await store.put([step(b"3", f"n{turns}")])
            ones = [state.message for state in await store.list(b"1")]
            assert ones == [f"{end}{turns}" for turns in range(30) for end in "az" if f"a{turns}" in ones]
            assert len(await store.list(b"3")) == 30
