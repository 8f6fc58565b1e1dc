"""Group commit: what was waited for is durable, in order, and nothing is accepted after a failed write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dalsegno.core.commit import GroupCommit
from dalsegno.core.records import Record
from dalsegno.errors import FencedError, StoreError
from tests.helpers import for_ever, until


class Disk:
    """A store's `put` that a test can hold up or break."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.hold: asyncio.Event | None = None
        self.error: BaseException | None = None
        self.writing = 0

    async def put(self, records: Sequence[Record]) -> None:
        self.writing += 1
        assert self.writing == 1, "two writes at a time"
        try:
            if self.hold is not None:
                await self.hold.wait()
            else:
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            self.batches.append([record.message for record in records])
        finally:
            self.writing -= 1

    @property
    def written(self) -> list[str]:
        return [message for batch in self.batches for message in batch]


def record(name: object, size: int = 2) -> Record:
    return Record(b"null", str(name), "t", b"x" * size)


def test_a_barrier_waits_for_everything_before_it_in_order() -> None:
    async def main() -> None:
        disk = Disk()
        log = GroupCommit(disk.put)
        for n in range(10):
            log.append(record(n))
        await log.barrier()
        assert disk.written == [str(n) for n in range(10)]
        assert (log.appended, log.durable, log.batches) == (10, 10, 1)

    asyncio.run(main())


def test_a_barrier_with_nothing_before_it_returns_at_once() -> None:
    async def main() -> None:
        disk = Disk()
        log = GroupCommit(disk.put)
        await log.barrier()
        log.append(record(1))
        await log.barrier()
        await log.barrier()
        assert log.batches == 1

    asyncio.run(main())


def test_records_of_many_tasks_share_a_batch() -> None:
    async def main() -> None:
        disk = Disk()
        log = GroupCommit(disk.put)

        async def step(n: int) -> None:
            log.append(record(n))
            await log.barrier()
            assert str(n) in disk.written

        await asyncio.gather(*(step(n) for n in range(100)))
        assert len(disk.written) == 100
        assert log.batches <= 3

    asyncio.run(main())


def test_what_comes_during_a_write_goes_into_the_next_one() -> None:
    async def main() -> None:
        disk = Disk()
        disk.hold = asyncio.Event()
        log = GroupCommit(disk.put)
        log.append(record(0))
        first = asyncio.ensure_future(log.barrier())
        await until(lambda: disk.writing)
        for n in range(1, 5):
            log.append(record(n))
        second = asyncio.ensure_future(log.barrier())
        await asyncio.sleep(0.01)
        assert not first.done()
        assert not second.done()
        disk.hold.set()
        await asyncio.gather(first, second)
        assert disk.batches == [["0"], ["1", "2", "3", "4"]]

    asyncio.run(main())


def test_a_record_that_nobody_waits_for_is_written_after_the_linger() -> None:
    async def main() -> None:
        disk = Disk()
        log = GroupCommit(disk.put, linger=0.01)
        log.append(record(1))
        log.append(record(2))
        assert disk.written == []
        await until(lambda: log.durable == 2)
        assert disk.batches == [["1", "2"]]

    asyncio.run(main())


def test_a_barrier_does_not_wait_for_the_linger() -> None:
    async def main() -> None:
        disk = Disk()
        log = GroupCommit(disk.put, linger=3600)
        log.append(record(1))
        async with asyncio.timeout(5):
            await log.barrier()
        log.append(record(2))
        async with asyncio.timeout(5):
            await log.close()
        assert disk.written == ["1", "2"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({"max_batch": 2}, [["0", "1"], ["2", "3"], ["4"]]),
        ({"max_bytes": 25}, [["0", "1"], ["2", "3"], ["4"]]),
        ({"max_bytes": 1}, [["0"], ["1"], ["2"], ["3"], ["4"]]),
    ],
)
def test_batches_are_bounded_and_a_large_record_still_goes_through(limits: Any, batches: list[list[str]]) -> None:
    async def main() -> None:
        disk = Disk()
        log = GroupCommit(disk.put, **limits)
        for n in range(5):
            log.append(record(n, 10))
        await log.barrier()
        assert disk.batches == batches

    asyncio.run(main())


@pytest.mark.parametrize("error", [OSError("no space"), StoreError("no store"), FencedError("taken over")])
def test_after_a_failed_write_every_waiter_and_every_later_step_is_refused(error: Exception) -> None:
    async def main() -> None:
        disk = Disk()
        disk.error = error
        log = GroupCommit(disk.put)
        log.append(record(0))
        waiters = [asyncio.ensure_future(log.barrier()) for _ in range(3)]
        results = await asyncio.gather(*waiters, return_exceptions=True)
        for result in results:
            assert isinstance(result, StoreError)
            assert result is error or result.__cause__ is error
        disk.error = None
        for use in (lambda: log.append(record(1)), log.check):
            with pytest.raises(type(error) if isinstance(error, StoreError) else StoreError):
                use()
        with pytest.raises(StoreError):
            await log.barrier()
        await log.close()
        assert disk.written == []
        assert log.durable == 0

    asyncio.run(main())


def test_what_was_appended_during_a_write_that_fails_is_not_written() -> None:
    async def main() -> None:
        disk = Disk()
        disk.hold = asyncio.Event()
        disk.error = OSError("gone")
        log = GroupCommit(disk.put)
        log.append(record(0))
        first = asyncio.ensure_future(log.barrier())
        await until(lambda: disk.writing)
        log.append(record(1))
        second = asyncio.ensure_future(log.barrier())
        await asyncio.sleep(0)
        disk.hold.set()
        for waiter in (first, second):
            with pytest.raises(StoreError, match=r"OSError: gone"):
                await waiter
        assert disk.written == []

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_does_not_stop_the_others() -> None:
    async def main() -> None:
        disk = Disk()
        disk.hold = asyncio.Event()
        log = GroupCommit(disk.put)
        log.append(record(0))
        first, second = asyncio.ensure_future(log.barrier()), asyncio.ensure_future(log.barrier())
        await until(lambda: disk.writing)
        first.cancel()
        await asyncio.wait([first])
        disk.hold.set()
        await second
        assert first.cancelled()
        assert disk.written == ["0"]

    asyncio.run(main())


def test_a_write_that_never_returns_keeps_the_barrier_closed() -> None:
    async def main() -> None:
        async def never(records: Sequence[Record]) -> None:
            await for_ever()

        log = GroupCommit(never)
        log.append(record(0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await log.barrier()
        assert log.durable == 0

    asyncio.run(main())


def test_a_writer_that_is_cancelled_is_a_failed_write() -> None:
    async def main() -> None:
        disk = Disk()
        disk.hold = asyncio.Event()
        log = GroupCommit(disk.put)
        log.append(record(0))
        waiter = asyncio.ensure_future(log.barrier())
        await until(lambda: disk.writing)
        (writer,) = [task for task in asyncio.all_tasks() if task.get_name() == "dalsegno-group-commit"]
        writer.cancel()
        with pytest.raises(StoreError):
            await waiter
        with pytest.raises(StoreError):
            log.append(record(1))

    asyncio.run(main())
