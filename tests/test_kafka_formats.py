"""What the Kafka store reads and writes, as far as no broker is needed: URLs, pieces, folds of a log, marks."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.core.records import Record
from dalsegno.errors import DefinitionError, RecordError
from dalsegno.stores import open_store
from dalsegno.stores.base import Decision, Worker
from dalsegno.stores.kafka import control
from dalsegno.stores.kafka.frames import (
    COVERED,
    HEADER_BYTES,
    RECORDS,
    Assembler,
    Blob,
    Foreign,
    Placed,
    decode_messages,
    decode_records,
    encode_messages,
    encode_records,
    partition_of,
    pieces,
    read_piece,
)
from dalsegno.stores.kafka.settings import parse_url
from dalsegno.stores.kafka.view import PartitionView

TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates too
KEYS = st.binary(max_size=20)

# --- the URL ---


def test_a_url_says_where_and_how(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# secret\nsasl.password = a=b \n\nsasl.username=ann\n")
    found = parse_url(
        f"kafka://a:1,[::1]:2/agents?partitions=3&replication=2&timeout=5&unreadable=skip&settings={file}"
        "&sasl.username=bob&security.protocol=SASL_SSL&linger.ms=3&fetch.min.bytes=2"
    )
    assert (found.servers, found.prefix, found.partitions, found.replication) == ("a:1,[::1]:2", "agents", 3, 2)
    assert (found.timeout, found.unreadable) == (5, "skip")
    assert found.client["sasl.password"] == "a=b"
    assert found.common()["sasl.username"] == "bob"
    assert found.producer(1000)["linger.ms"] == "3"
    assert "linger.ms" not in found.consumer()
    assert found.consumer()["fetch.min.bytes"] == "2"
    assert "fetch.min.bytes" not in found.producer(1000)
    assert "a=b" not in repr(found) + str(found)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("kafka://", "names no brokers"),
        ("kafka://host/prefix", "names no brokers"),
        ("kafka://host:0/prefix", "names no brokers"),
        ("kafka://host:1,/prefix", "names no brokers"),
        ("kafka://user:secret@host:1/prefix", "names no brokers"),
        ("kafka://host:1", "names no topic prefix"),
        ("kafka://host:1/a b", "names no topic prefix"),
        ("kafka://host:1/" + "a" * 151, "names no topic prefix"),
        ("kafka://host:1/a?partitions=0", "partitions is a whole number from 1 to 1000, not '0'"),
        ("kafka://host:1/a?timeout=soon", "timeout is a whole number"),
        ("kafka://host:1/a?partition=3", "there is no option 'partition'; there are partitions"),
        ("kafka://host:1/a?timeout=1&timeout=2", "there twice"),
        ("kafka://host:1/a?unreadable=ignore", "unreadable is 'stop' or 'skip'"),
        ("kafka://host:1/a?timeout", "is not 'option=value"),
        ("kafka://host:1/a?enable.idempotence=false", "cannot be set"),
        ("kafka://host:1/a?isolation.level=read_uncommitted", "cannot be set"),
        ("kafka://host:1/a?settings=/nowhere/at.all", "cannot be read"),
    ],
)
def test_a_url_that_is_wrong_says_so_without_secrets(url: str, match: str) -> None:
    with pytest.raises(DefinitionError, match=match) as wrong:
        open_store(url)
    assert "secret" not in str(wrong.value) or "@" in url


def test_without_the_driver_the_url_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['confluent_kafka'] = None\n"
        "from dalsegno.stores import open_store\n"
        "open_store('memory://')\n"
        "open_store('kafka://host:1/prefix?sasl.password=secret')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "DefinitionError" in ran.stderr
    assert "pip install 'dalsegno[kafka]'" in ran.stderr
    assert "secret" not in ran.stderr.splitlines()[-1]


# --- which partition ---


def test_the_partition_of_a_key_is_part_of_the_format() -> None:
    keys = (b"", b'"user-1"', b"1", b'"\xf0\x9f\x98\x80"', b"k" * 5000)
    assert [partition_of(key, 8) for key in keys] == [4, 1, 6, 6, 4]
    counts = [0] * 8
    for number in range(8000):
        counts[partition_of(b"%d" % number, 8)] += 1
    assert min(counts) > 850


# --- pieces ---


@given(st.lists(st.builds(Placed, st.integers(0, 2**64 - 1), st.builds(Record, KEYS, TEXTS, TEXTS, KEYS))))
def test_records_come_back(placed: list[Placed]) -> None:
    blob = encode_records(placed)
    assert list(decode_records(blob)) == placed
    for cut in range(max(len(blob) - 30, 1), len(blob)):
        if any(encode_records(placed[:count]) == blob[:cut] for count in range(len(placed))):
            continue  # cut between two records
        with pytest.raises(RecordError, match=r"left where a record should begin|beyond the end"):
            list(decode_records(blob[:cut]))


@given(st.lists(st.tuples(KEYS, TEXTS)))
def test_messages_come_back(messages: list[tuple[bytes, str]]) -> None:
    assert list(decode_messages(encode_messages(messages))) == messages


@given(st.binary(max_size=300), st.integers(1, 50))
def test_a_blob_is_cut_and_put_together(blob: bytes, room: int) -> None:
    values = list(pieces(RECORDS, 7, 9, blob, HEADER_BYTES + room))
    assert all(len(value) <= HEADER_BYTES + room for value in values)
    assembler = Assembler()
    found = [assembler.add(5 + number, read_piece(value)) for number, value in enumerate(values)]
    assert found[:-1] == [None] * (len(values) - 1)
    assert found[-1] == Blob(5, 5 + len(values), RECORDS, 7, 9, blob)
    assert assembler.begin is None


def test_pieces_of_two_writers_may_lie_between_one_another() -> None:
    a, b = (list(pieces(RECORDS, epoch, 1, b"%d" % epoch * 40, HEADER_BYTES + 10)) for epoch in (1, 2))
    assembler = Assembler()
    order = [a[0], b[0], b[1], a[1], a[2], b[2], b[3], a[3]]
    found = [assembler.add(offset, read_piece(value)) for offset, value in enumerate(order)]
    assert [blob.payload for blob in found if blob] == [b"2" * 40, b"1" * 40]
    assert assembler.begin is None


def test_what_is_not_ours_is_told_from_what_is_too_new() -> None:
    (value,) = pieces(RECORDS, 1, 1, b"abc", 1000)
    for foreign in (
        None,
        b"",
        b"{}",
        value[: HEADER_BYTES - 1],
        b"DALSEGNO" + value[8:],
        value[:9] + b"\x09" + value[10:],
    ):
        with pytest.raises(Foreign):
            read_piece(foreign)
    with pytest.raises(RecordError, match="format version 2; this version of dalsegno reads up to 1"):
        read_piece(value[:8] + b"\x02" + value[9:])


def test_a_piece_that_does_not_follow_is_found() -> None:
    values = list(pieces(RECORDS, 1, 1, b"x" * 30, HEADER_BYTES + 10))
    assembler = Assembler()
    assert assembler.add(1, read_piece(values[0])) is None
    assert assembler.begin == 1
    with pytest.raises(Foreign, match="piece 2 of 3 follows piece 0"):
        assembler.add(2, read_piece(values[2]))


# --- a partition ---


def records(
    offset: int, *messages: tuple[bytes, str], order: int | None = None, epoch: int = 1, write: int = 1
) -> Blob:
    placed = [Placed(order or offset * 100 + n, Record(key, m, "t", b"")) for n, (key, m) in enumerate(messages)]
    return Blob(offset, offset + 1, RECORDS, epoch, write, encode_records(placed))


def covered(offset: int, *messages: tuple[bytes, str], epoch: int = 1, write: int = 1) -> Blob:
    return Blob(offset, offset + 1, COVERED, epoch, write, encode_messages(messages))


def test_what_is_covered_is_gone_and_what_comes_later_is_not() -> None:
    view = PartitionView("here")
    for blob in (records(1, (b"1", "m"), (b"2", "m")), covered(2, (b"1", "m"), (b"9", "m")), records(3, (b"1", "m"))):
        view.add(blob)
    assert [r.message for r in view.list(b"1")] == ["m"]
    assert view.messages == 2
    assert view.cover([(b"1", "m"), (b"1", "m"), (b"2", "n")]) == 1
    assert list(view.keys) == [b"2"]


def test_ones_own_writes_are_added_once_in_whatever_order_they_are_seen() -> None:
    view = PartitionView("here", epoch=4)
    own = [covered(5, (b"1", "m"), epoch=4, write=2), records(6, (b"1", "m"), epoch=4, write=2)]
    for blob in (records(1, (b"1", "m"), epoch=3, write=9), *own, *own, records(1, (b"2", "m"), epoch=4, write=1)):
        view.add(blob)
    assert len(view.list(b"1")) == 1
    assert view.list(b"2") == []
    view.add(records(7, (b"2", "m"), epoch=4, write=3))
    assert len(view.list(b"2")) == 1


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_the_mark_is_the_first_offset_that_is_needed(seed: int) -> None:
    chance = random.Random(seed)
    view = PartitionView("here")
    needed: dict[tuple[bytes, str], int] = {}
    for offset in range(1, 60):
        message = (b"%d" % chance.randrange(4), f"m{chance.randrange(6)}")
        if chance.random() < 0.6:
            view.add(records(offset, message, write=offset))
            needed.setdefault(message, offset)
        else:
            view.add(covered(offset, message, write=offset))
            needed.pop(message, None)
        view.position = offset + 1
        gone = {each for each in needed if chance.random() < 0.3}
        assert view.mark(gone) == min([at for each, at in needed.items() if each not in gone], default=offset + 1)
        assert view.mark() == min(needed.values(), default=offset + 1)
        assert view.older_than(offset - 20) == sorted(
            (each for each, at in needed.items() if at < offset - 20), key=lambda each: needed[each]
        )


def test_the_mark_is_not_beyond_pieces_that_wait_for_others() -> None:
    view = PartitionView("here")
    first, *_ = pieces(RECORDS, 1, 1, b"x" * 30, HEADER_BYTES + 10)
    view.read(7, first)
    view.position = 8
    assert view.mark() == 7


def test_carried_records_keep_their_place() -> None:
    view = PartitionView("here")
    view.add(records(1, (b"1", "parked"), order=1))
    view.add(records(2, (b"1", "later"), order=2, write=2))
    view.add(covered(3, (b"1", "parked"), write=3))
    view.add(records(4, (b"1", "parked"), order=1, write=3))
    assert [record.message for record in view.list(b"1")] == ["parked", "later"]
    view.position = 5
    assert view.mark() == 2


def test_damage_names_the_place() -> None:
    view = PartitionView("topic t, partition 3")
    (value,) = pieces(RECORDS, 1, 1, b"x", 1000)
    with pytest.raises(RecordError, match="topic t, partition 3, offset 12, is damaged: 1 bytes are left"):
        view.read(12, value)
    with pytest.raises(RecordError, match=r"topic t, partition 3, offset 13: it is a tombstone.*unreadable=skip"):
        view.read(13, None)
    lenient = PartitionView("here", skip=True)
    assert lenient.read(1, b"foreign") is not None
    with pytest.raises(RecordError, match="is damaged"):
        lenient.read(2, value)


# --- the control partition ---


def fold(events: list[control.Event], start: int = 0) -> control.ControlLog:
    log = control.ControlLog()
    for offset, event in enumerate(events):
        if offset >= start:
            log.add(offset, control.dump(event))
    log.begin()
    log.position = len(events)
    return log


def opened(worker: Worker, by: str = "", job: str = "job\ud800") -> control.Event:
    me = {"pid": 1, "host": "here", "since": "now", "order": 5}
    return control.opened(job, "ann\ud83d\ude00", worker, by, 4, f"identity {by}", **me)


def decide(number: int) -> control.Event:
    made = Decision(b"\xff", f"m{number}\ud83d\ude00", "t\ud800", b"\0")
    return control.decided(made, f"by{number}")


EVENTS = [
    opened(Worker(0, 2), "a"),
    opened(Worker(1, 2), "b"),
    decide(1),
    control.pruned(3, {1: 10, 2: 0}, [], 7),
    decide(1),
    decide(2),
    opened(Worker(0, 3), "c"),
    control.fenced({Worker(0, 2): 1, Worker(1, 2): 2}),
    control.pruned(2, {1: 8, 3: 9}, [3], 9),
]


def test_events_add_up() -> None:
    log = fold(EVENTS)
    state = log.state
    assert (state.job, state.identity, state.partitions, state.epoch) == ("job\ud800", "identity a", 4, 3)
    assert (state.pruned_through, state.marks, state.order) == (3, {1: 10, 2: 0, 3: 9}, 9)
    assert state.writers == {Worker(0, 3): 3}
    assert state.last["owner"] == "ann\ud83d\ude00"
    assert [(number, by) for number, by, _ in state.decisions.values()] == [(6, "by2")]
    assert log.openings["c"] == (3, {Worker(0, 2): 1, Worker(1, 2): 2})


@pytest.mark.parametrize("at", range(1, len(EVENTS) + 1))
def test_a_snapshot_stands_for_what_is_before_it(at: int) -> None:
    nothing = control.pruned(0, {}, [], 0)
    whole = fold([*EVENTS[:at], nothing, *EVENTS[at:]]).state
    # Another event may have come in between, before the snapshot was written.
    for seen in {at, max(at - 1, 1)}:
        events = [*EVENTS[:at], control.snapshot(fold(EVENTS[:seen])), *EVENTS[at:]]
        assert fold(events, start=seen).state == fold(events).state == whole


def test_a_worker_that_came_back_is_not_taken_for_fenced() -> None:
    events = [opened(Worker(0, 2), "a"), opened(Worker(0, 3), "b"), opened(Worker(0, 2), "c")]
    state = fold([*events, control.fenced({Worker(0, 2): 1})]).state
    assert state.writers == {Worker(0, 3): 2, Worker(0, 2): 3}


def test_an_event_that_is_not_known_is_an_error() -> None:
    log = control.ControlLog()
    log.begin()
    for payload in (b"", b"null", b"{}", b'{"event":"new"}', b'{"event":"opened"}'):
        with pytest.raises(RecordError, match="no event that this version knows"):
            log.add(1, payload)
