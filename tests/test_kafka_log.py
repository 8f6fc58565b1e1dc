"""What may happen to the topic of a Kafka store, and the right outcome of each, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterator

import pytest

from dalsegno.core.records import Record, encode_body
from dalsegno.errors import RecordError, StoreError
from dalsegno.stores.base import Covered, Decision, Worker
from dalsegno.stores.kafka import job as job_module
from dalsegno.stores.kafka.frames import HEADER_BYTES, Placed, encode_records, partition_of
from dalsegno.stores.kafka.writer import OVERHEAD
from dalsegno.testing.stores import decision, in_loop, states, step
from tests.kafka_helpers import (
    Place,
    add_partitions,
    begin_transaction,
    create_topic,
    delete_records,
    delete_topics,
    log_starts,
    topics,
    write_foreign,
)
from tests.services.kafka import Kafka


@pytest.fixture
def place(kafka_server: Kafka) -> Iterator[Place]:
    found = Place(kafka_server, f"test-{secrets.token_hex(8)}")
    yield found
    delete_topics(kafka_server, found.prefix)


def partition(key: bytes, partitions: int = 3) -> int:
    return partition_of(key, partitions) + 1


# --- reading to the end ---


@in_loop
async def test_aborted_transactions_in_the_log_are_read_over(place: Place) -> None:
    async with place.opened() as store:
        await store.put([step(b"1", "m")])
    for number in (0, partition(b"1"), partition(b"2")):
        for _ in range(2):
            begin_transaction(place.kafka, place.topic(), number, b"never seen").abort_transaction(30)
    async with place.opened() as store:
        assert await store.keys() == [b"1"]
        await store.put([step(b"1", "n")])
    begin_transaction(place.kafka, place.topic(), partition(b"1"), b"never seen").abort_transaction(30)
    async with place.opened() as store:
        assert await store.claim(b"1") == states([step(b"1", "m"), step(b"1", "n")], b"1")


@in_loop
async def test_exactly_one_record_and_partitions_without_any(place: Place) -> None:
    async with place.opened(options="partitions=9") as store:
        await store.put([step(b"1", "m")])
    async with place.opened(options="partitions=9") as store:
        assert await store.keys() == [b"1"]
        assert len(await store.claim(b"1")) == 1
        for key in range(2, 30):
            assert await store.claim(b"%d" % key) == []


@in_loop
async def test_an_end_that_cannot_be_reached_fails_in_bounded_time_and_says_what_is_wanted(place: Place) -> None:
    async with place.opened() as store:
        await store.put([step(b"1", "m")])
    hanging = begin_transaction(place.kafka, place.topic(), partition(b"1"), b"somebody's")
    async with place.opened(options="timeout=2&transaction_timeout=2") as store:
        wanted = rf"partition {partition(b'1')} to offset \d+, got to \d+.*transaction of somebody else is open"
        with pytest.raises(StoreError, match=wanted):
            await store.keys()
        hanging.abort_transaction(30)
        assert await store.keys() == [b"1"]


# --- the topic is not what it was ---


@in_loop
async def test_partitions_that_are_added_change_nothing(place: Place) -> None:
    put = [step(b"%d" % number, "m") for number in range(30)]
    async with place.opened() as store:
        await store.put(put[:20])
        add_partitions(place.kafka, place.topic(), 13)
        await store.put(put[20:])
    async with place.opened(options="partitions=12") as store:
        assert sorted(await store.keys()) == sorted(record.key for record in put)
        await store.put([step(b"1", "n")])
        assert [state.message for state in await store.claim(b"1")] == ["m", "n"]
    with place.store().inspect() as outside:
        assert len(list(outside.records("job"))) == 31


@in_loop
async def test_a_log_that_was_cut_is_refused_with_what_is_wanted_and_found(place: Place) -> None:
    number = partition(b"1")
    async with place.opened() as store:
        await store.put([step(b"1", "m")])
        await store.put([step(b"1", "n")])
    delete_records(place.kafka, place.topic(), number, 1)
    async with place.opened() as store:
        wanted = rf"partition {number} begins at offset 1, but .* from offset 0 on may still be needed"
        for read in (store.keys, lambda: store.claim(b"1"), lambda: store.prune(Covered(1, [(b"1", "m")]))):
            with pytest.raises(StoreError, match=wanted):
                await read()
        other = next(key for key in (b"2", b"3", b"4", b"5", b"6", b"7") if partition(key) != number)
        assert await store.claim(other) == []


@in_loop
async def test_a_topic_that_is_made_anew_is_another_store(place: Place) -> None:
    async with place.opened() as store:
        await store.put([step(b"1", "m")])
        before = store.identity
    delete_topics(place.kafka, place.topic())
    async with place.opened() as store:
        assert store.identity != before  # by which a runner sees that its checkpoints belong to another one
        assert await store.keys() == []


@in_loop
async def test_a_topic_that_is_made_anew_under_a_running_job_stops_it(place: Place) -> None:
    async with place.opened(options="timeout=4&transaction_timeout=4") as store:
        for number in range(5):
            await store.put([step(b"1", f"m{number}")])
        delete_topics(place.kafka, place.topic())
        create_topic(place.kafka, place.topic(), 4)

        async def keep_writing() -> None:
            # The log that is being deleted may still take something.
            for number in range(20):
                await store.put([step(b"1", f"n{number}")])
                await asyncio.sleep(0.1)

        with pytest.raises(StoreError) as stopped:
            await keep_writing()
        with pytest.raises(StoreError):
            await store.put([step(b"1", "later")])
    assert place.prefix in str(stopped.value)


@in_loop
async def test_a_topic_that_is_deleted_under_a_running_job_stops_it(place: Place) -> None:
    async with place.opened(options="timeout=3&transaction_timeout=3") as store:
        await store.put([step(b"1", "m")])
        delete_topics(place.kafka, place.topic())
        with pytest.raises(StoreError):
            await store.put([step(b"1", "n")])


@pytest.mark.parametrize("value", [None, b"", b'{"id": 1}', b"dalsegno\x01\x09" + b"\0" * 40])
@pytest.mark.parametrize("control", [True, False])
def test_what_others_wrote_is_named_by_its_place_or_skipped(
    place: Place, value: bytes | None, control: bool, caplog: pytest.LogCaptureFixture
) -> None:
    number = 0 if control else partition(b"1")

    @in_loop
    async def test() -> None:
        async with place.opened() as store:
            await store.put([step(b"1", "m")])
        write_foreign(place.kafka, place.topic(), number, value)
        where = rf"partition {number}, offset \d+: it is .*unreadable=skip"
        with pytest.raises(RecordError, match=where):
            async with place.opened() as store:
                await store.keys()
        async with place.opened(options="unreadable=skip") as store:
            await store.put([step(b"1", "n")])
            assert [state.message for state in await store.claim(b"1")] == ["m", "n"]
        assert f"partition {number}, offset" in caplog.text
        with pytest.raises(RecordError, match=where), place.store().inspect() as outside:
            list(outside.records("job"))

    test()


@in_loop
async def test_a_newer_format_is_refused_also_where_the_unreadable_is_skipped(place: Place) -> None:
    async with place.opened() as store:
        await store.put([step(b"1", "m")])
    write_foreign(place.kafka, place.topic(), partition(b"1"), b"dalsegno\x02\x01" + b"\0" * 40)
    async with place.opened(options="unreadable=skip") as store:
        with pytest.raises(RecordError, match="format version 2"):
            await store.keys()


# --- settings of the topic, and its creation ---


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({}, "it has one replica: what is recorded is lost with the disk of one broker"),
        ({"retention.ms": "3600000"}, "retention.ms=3600000: the broker keeps 3600000 milliseconds only"),
        ({"retention.bytes": "1000000"}, "retention.bytes=1000000: the broker keeps"),
        ({"unclean.leader.election.enable": "true"}, "records are lost when a replica that lags behind"),
    ],
)
def test_settings_with_which_records_may_be_lost_are_said(
    place: Place, config: dict[str, str], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    create_topic(place.kafka, place.topic(), 4, {"retention.ms": "-1", **config})

    @in_loop
    async def test() -> None:
        async with place.opened() as store:
            await store.put([step(b"1", "m")])

    with caplog.at_level(logging.WARNING, logger="dalsegno.kafka"):
        test()
    assert warning in caplog.text
    assert ("retention" in caplog.text) == any("retention" in name for name in config)


@pytest.mark.parametrize(
    ("config", "partitions", "refusal"),
    [
        ({"cleanup.policy": "compact"}, 4, "cleanup.policy=compact, so the broker would remove records"),
        ({"cleanup.policy": "compact,delete"}, 4, "cleanup.policy=compact,delete"),
        ({"min.insync.replicas": "2"}, 4, "min.insync.replicas=2 and 1 replicas, so nothing can be written"),
        ({}, 1, "has 1 partitions.*at least 2"),
    ],
)
def test_settings_that_cannot_do_are_refused(
    place: Place, config: dict[str, str], partitions: int, refusal: str
) -> None:
    create_topic(place.kafka, place.topic(), partitions, config)

    @in_loop
    async def test() -> None:
        with pytest.raises(StoreError, match=refusal):
            await place.store().open("job", "the test")

    test()


@in_loop
async def test_many_workers_may_make_the_topic_at_once(place: Place) -> None:
    stores = [place.store() for _ in range(6)]
    await asyncio.gather(*(store.open("job", "one of six", Worker(n, 6)) for n, store in enumerate(stores)))
    assert len({store.identity for store in stores}) == 1
    await asyncio.gather(*(store.put([step(b"%d" % n, "m")]) for n, store in enumerate(stores)))
    assert sorted(await stores[3].keys()) == [b"%d" % n for n in range(6)]
    for store in stores:
        await store.close()


# --- sizes ---


def body_for(blob_bytes: int) -> bytes:
    """A body with which the blob of its record has so many bytes; it cannot be compressed much."""
    empty = encode_body("called", {"call": 0, "name": "c", "args_digest": "0", "result": "", "task": _HEADER})
    room = blob_bytes - len(encode_records([Placed(0, Record(b"1", "m", "t", empty))]))
    random = os.urandom(room).hex()[:room]
    return encode_body("called", {"call": 0, "name": "c", "args_digest": "0", "result": random, "task": _HEADER})


_HEADER = {"action": "act", "event": "input", "sender": "", "index": 0}


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_values_around_the_limit_of_the_broker(place: Place, pieces: int, beyond: int, compression: str) -> None:
    limit = 20_000
    create_topic(place.kafka, place.topic(), 4, {"max.message.bytes": str(limit)})
    put = [Record(b"1", "m", "t", body_for(pieces * (limit - OVERHEAD - HEADER_BYTES) + beyond))]

    @in_loop
    async def test() -> None:
        async with place.opened(options=f"compression.type={compression}") as store:
            await store.put(put)
            assert await store.list(b"1") == states(put, b"1")
        async with place.opened() as store:
            assert await store.claim(b"1") == states(put, b"1")

    test()


@in_loop
async def test_twenty_megabytes_come_back_equal(place: Place) -> None:
    result = os.urandom(10_000_000).hex()
    put = [step(b"1", "m", result=result), step(b"2", "m"), step(b"1", "n")]
    async with place.opened() as store:
        await store.put(put)
    async with place.opened() as store:
        assert await store.claim(b"1") == states(put, b"1")
        await store.prune(Covered(1, [(b"1", "m"), (b"1", "n")]))
        assert await store.keys() == [b"2"]


# --- what is kept ---


@in_loop
async def test_what_is_kept_is_bounded_by_what_is_not_covered(place: Place) -> None:
    half_done = step(b"half done", "m")
    async with place.opened() as store:
        for number in range(20):
            batch = [step(b"%d" % key, f"m{number}-{n}") for n in range(5) for key in range(20)]
            await store.put(batch)
            await store.prune(Covered(number + 1, [(record.key, record.message) for record in batch]))
        starts = log_starts(place.kafka, place.topic(), 4)
        # A prune leaves nothing behind but its own note, and the marker of its transaction.
        assert min(starts[1:]) >= 2 * 2 * 19
        await store.put([half_done])
        for number in range(20, 25):
            await store.put([step(b"%d" % key, f"m{number}") for key in range(20)])
            await store.prune(Covered(number + 1, [(b"%d" % key, f"m{number}") for key in range(20)]))
        after = log_starts(place.kafka, place.topic(), 4)
    held = partition(b"half done")
    assert all(after[n] > starts[n] + 10 for n in (1, 2, 3) if n != held)
    async with place.opened() as store:
        assert await store.keys() == [b"half done"]
        assert await store.claim(b"half done") == states([half_done], b"half done")


@in_loop
async def test_the_events_of_a_job_do_not_pile_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "SNAPSHOT_AFTER", 10)
    async with place.opened() as store:
        await store.put([step(b"1", "m"), step(b"2", "m")])
        with store.inspect() as outside:
            assert outside.decide("job", _decision(b"1"))
            for number in range(30):
                await store.prune(Covered(number, []))
            (start, *_) = log_starts(place.kafka, place.topic(), 4)
            assert start > 30
            assert outside.decide("job", _decision(b"2"))
            assert not outside.decide("job", _decision(b"1"))
            assert outside.decisions("job") == [_decision(b"1"), _decision(b"2")]
    async with place.opened() as store:
        assert store.pruned_through == 29
        assert [made for _, made in await store.decisions(0)] == [_decision(b"1"), _decision(b"2")]


def _decision(key: bytes) -> Decision:
    return decision(key, "m")


@in_loop
async def test_what_is_parked_for_long_is_carried_forward_in_its_place(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "CARRY_AFTER", 20)
    parked = [step(b"1", "parked", n, result="x" * 100) for n in range(3)]
    later = step(b"1", "later")
    async with place.opened() as store:
        for record in [*parked, later]:
            await store.put([record])
        for number in range(60):
            await store.put([step(b"1", f"m{number}")])
            assert (await store.prune(Covered(number + 1, [(b"1", f"m{number}")]))).records == 1
        starts = log_starts(place.kafka, place.topic(), 4)
        assert starts[partition(b"1")] > 100
        assert await store.list(b"1") == states([*parked, later], b"1")
        with store.inspect() as outside:
            assert list(outside.records("job")) == [*parked, later]
            assert list(outside.messages("job")) == [(b"1", "parked"), (b"1", "later")]
    async with place.opened() as store:
        assert await store.claim(b"1") == states([*parked, later], b"1")
        assert (await store.prune(Covered(99, [(b"1", "parked")]))).records == 3
        assert [state.message for state in await store.list(b"1")] == ["later"]


@in_loop
async def test_looking_makes_no_topic(place: Place) -> None:
    with pytest.raises(StoreError, match="no topic of that prefix"):
        place.store().inspect()

    assert topics(place.kafka, place.prefix) == []
