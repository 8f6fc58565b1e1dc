"""Kafka topics as a source, with a real broker: what is read, where it goes on, and what it does not read on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from dalsegno import DefinitionError, InputError, LocalRunner, RestoreError, RunnerContext
from dalsegno.runners import kafka_reading
from dalsegno.runners.kafka_client import KafkaAddress, has_code, source_of
from dalsegno.runners.kafka_source import KafkaSource
from dalsegno.runners.sources import NO_RECORD, SourceItem, open_source
from tests.helpers import Scripted, Tools, crashed
from tests.services import Kafka
from tests.topics import MINUTE, Counting, Running, put, put_in_transaction

Topics = Callable[..., str]


def items(source: KafkaSource, position: dict[str, Any] | None = None) -> list[SourceItem]:
    """All that comes after *position*."""

    async def collect() -> list[SourceItem]:
        try:
            return [item async for item in await source.open(position)]
        finally:
            await source.close()

    return asyncio.run(asyncio.wait_for(collect(), MINUTE))


def records(source: KafkaSource, position: dict[str, Any] | None = None) -> list[SourceItem]:
    return [item for item in items(source, position) if item.value is not NO_RECORD]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + MINUTE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def admin(kafka_server: Kafka) -> AdminClient:
    return AdminClient({**kafka_server.client_settings})


def delete_before(admin: AdminClient, topic: str, partition: int, offset: int) -> None:
    for answer in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        answer.result(MINUTE)


def make_again(admin: AdminClient, topic: str, partitions: int = 1) -> None:
    admin.delete_topics([topic])[topic].result(MINUTE)

    def made() -> bool:
        error = admin.create_topics([NewTopic(topic, partitions, 1)])[topic].exception(MINUTE)
        assert error is None or has_code(error, "TOPIC_ALREADY_EXISTS"), error
        return error is None

    until(made)


def test_a_record_is_a_message_with_the_records_key_and_place(kafka_server: Kafka, kafka_topic: Topics) -> None:
    topic = kafka_topic(2)
    put(kafka_server.url, topic, [("a", {"n": 1}), ("a", {"n": 2})], partition=1)
    read = records(KafkaSource(topic, kafka_server.url, until_end=True))
    assert [(item.ordinal, item.id, item.key, item.value) for item in read] == [
        (0, f"{topic}/1/0", "a", {"n": 1}),
        (1, f"{topic}/1/1", "a", {"n": 2}),
    ]


def test_reading_goes_on_after_any_record(kafka_server: Kafka, kafka_topic: Topics) -> None:
    topic = kafka_topic(3)
    put(kafka_server.url, topic, [(f"k{n % 7}", n) for n in range(40)])
    source = KafkaSource([topic], kafka_server.url, until_end=True)
    first = records(source)
    assert {item.value for item in first} == set(range(40))
    for at in (0, 13, 38, 39):
        rest = records(source, json.loads(json.dumps(first[at].position)))
        assert {item.id for item in rest} == {item.id for item in first[at + 1 :]}
        assert [item.ordinal for item in rest] == list(range(at + 1, 40))
    put(kafka_server.url, topic, [("k0", "new")])
    assert [item.value for item in records(source, first[-1].position)] == ["new"]


@pytest.mark.parametrize(
    ("form", "raw", "value"),
    [
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("json", None, None),
        ("text", "Grüße".encode(), "Grüße"),
        ("bytes", b"\xff\x00", b"\xff\x00"),
        ("bytes", None, None),
    ],
)
def test_values_are_read_as_the_source_is_told(
    kafka_server: Kafka, kafka_topic: Topics, form: Any, raw: bytes | None, value: object
) -> None:
    topic = kafka_topic()
    put(kafka_server.url, topic, [(b"k", raw)])
    assert [item.value for item in records(KafkaSource(topic, kafka_server.url, value=form, until_end=True))] == [value]


def test_headers_and_time_are_there_for_who_wants_them(kafka_server: Kafka, kafka_topic: Topics) -> None:
    from confluent_kafka import Producer

    topic = kafka_topic()
    producer = Producer({**kafka_server.client_settings})
    headers: Any = [("who", "Zoë".encode()), ("raw", b"\xff"), ("none", None)]
    producer.produce(topic, b"1", b"\x01\x02", headers=headers, timestamp=1_700_000_000_123)
    producer.flush(MINUTE)
    (item,) = records(KafkaSource(topic, kafka_server.url, key="bytes", metadata=True, until_end=True))
    assert item.key == b"\x01\x02"
    assert item.value == {
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "timestamp": 1_700_000_000_123,
        "headers": [["who", "Zoë"], ["raw", "/w=="], ["none", None]],
        "key": b"\x01\x02",
        "value": 1,
    }


def test_a_bad_record_is_set_aside_with_its_place(kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path) -> None:
    topic = kafka_topic(2)
    put(kafka_server.url, topic, [("a", b"{"), ("a", {"n": 1}), (b"\xff", {"n": 2})], partition=1)
    runner = LocalRunner(Counting(), job="bad", store=f"sqlite:///{tmp_path}/store.db")
    with pytest.raises(InputError, match=f"{topic}, partition 1, offset 0: its value cannot be read: it is not JSON"):
        runner.run(KafkaSource(topic, kafka_server.url, until_end=True))
    outputs: list[Any] = []
    source = KafkaSource(topic, kafka_server.url, until_end=True)
    report = runner.run(source, outputs.append, on_bad_input="park")
    assert (outputs, report.messages, report.set_aside) == ([[{"n": 1}, 1]], 1, 2)
    bad = runner._checkpoints.bad_input()
    assert [record.place for record in bad] == [f"{topic}, partition 1, offset {n}" for n in (0, 2)]
    assert "its key cannot be read: it is not UTF-8" in bad[1].reason


def test_the_key_of_the_job_goes_before_that_of_the_record(
    kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path
) -> None:
    topic = kafka_topic()
    put(kafka_server.url, topic, [("a", {"k": 1}), ("b", {"k": 1})])
    outputs: list[Any] = []
    runner = LocalRunner(Counting(), job="keys", store=f"sqlite:///{tmp_path}/store.db")
    runner.run(KafkaSource(topic, kafka_server.url, until_end=True), outputs.append, key="k")
    assert [n for _, n in outputs] == [1, 2]
    assert [key for key, _ in runner.memories()] == [1]


def test_equal_contents_may_have_two_keys_after_a_crash(
    kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path
) -> None:
    """The key is no part of the content, so what is recorded of one message says nothing of the key of another."""
    topic = kafka_topic()
    put(kafka_server.url, topic, [(key, {"same": True}) for key in "abc"])
    tools = Tools()
    tools.hang_on = {"same"}

    async def body(value: Any, ctx: RunnerContext) -> Any:
        await ctx.durable_execute(tools.call, "first", effect="read")
        await ctx.durable_execute(tools.call, "same", effect="read")
        return value

    runner = LocalRunner(Scripted(body), job="same", store=f"sqlite:///{tmp_path}/store.db")
    crashed(
        runner,
        KafkaSource(topic, kafka_server.url, until_end=True),
        when=lambda: tools.count("same") == 3,
    )
    tools.hang_on = set()
    outputs: list[Any] = []
    runner.run(KafkaSource(topic, kafka_server.url, until_end=True), outputs.append)
    assert outputs == [{"same": True}] * 3


def test_what_is_not_committed_is_not_read(kafka_server: Kafka, kafka_topic: Topics) -> None:
    topic = kafka_topic()
    put_in_transaction(kafka_server.url, topic, ["aborted"], commit=False)
    put_in_transaction(kafka_server.url, topic, ["committed"], commit=True)
    source = KafkaSource(topic, kafka_server.url, until_end=True)
    read = items(source)
    assert [item.value for item in read] == ["committed", NO_RECORD]
    assert source.lag(read[-1].position) == 0
    assert items(source, read[-1].position) == []


def test_marks_of_transactions_that_are_deleted_leave_no_gap(
    kafka_server: Kafka, kafka_topic: Topics, admin: AdminClient
) -> None:
    topic = kafka_topic()
    put_in_transaction(kafka_server.url, topic, ["one"], commit=True)
    source = KafkaSource(topic, kafka_server.url, until_end=True)
    position = items(source)[-1].position
    delete_before(admin, topic, 0, 2)  # the record, and the mark that committed it
    assert items(source, position) == []


def test_a_gap_is_refused_or_skipped(
    kafka_server: Kafka, kafka_topic: Topics, admin: AdminClient, caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka_topic()
    put(kafka_server.url, topic, range(10))
    read = records(KafkaSource(topic, kafka_server.url, until_end=True))
    delete_before(admin, topic, 0, 7)
    with pytest.raises(RestoreError, match=rf"{topic}/0 .* is to be read from offset 3, but starts at 7"):
        items(KafkaSource(topic, kafka_server.url, until_end=True), read[2].position)
    with caplog.at_level(logging.WARNING, "dalsegno"):
        rest = records(KafkaSource(topic, kafka_server.url, until_end=True, on_gap="skip"), read[2].position)
    assert [item.value for item in rest] == [7, 8, 9]
    assert "the 4 offsets between are skipped" in caplog.text


def test_a_topic_that_was_made_again_is_refused(kafka_server: Kafka, kafka_topic: Topics, admin: AdminClient) -> None:
    topic = kafka_topic()
    put(kafka_server.url, topic, range(3))
    source = KafkaSource(topic, kafka_server.url, until_end=True)
    position = records(source)[-1].position
    make_again(admin, topic)
    put(kafka_server.url, topic, range(10))  # as long as it was, and longer
    with pytest.raises(RestoreError, match=f"the topic '{topic}' .* It was deleted and made again"):
        items(source, position)


def test_a_topic_that_is_made_again_while_it_is_read_is_found_out(
    kafka_server: Kafka, kafka_topic: Topics, admin: AdminClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_reading, "_REFRESH_SECONDS", 0.2)
    topic = kafka_topic()
    put(kafka_server.url, topic, range(3))
    outputs: list[Any] = []
    runner = LocalRunner(Counting(), job="again", store=f"sqlite:///{tmp_path}/store.db")
    running = Running(lambda: runner.run(KafkaSource(topic, kafka_server.url), outputs.append), runner.stop)
    until(lambda: len(outputs) == 3)
    make_again(admin, topic)
    with pytest.raises(RestoreError, match="It was deleted and made again"):
        running.result()


def test_fewer_records_than_were_read_are_refused(kafka_server: Kafka, kafka_topic: Topics) -> None:
    topic = kafka_topic()
    put(kafka_server.url, topic, range(3))
    source = KafkaSource(topic, kafka_server.url, until_end=True)
    position = records(source)[-1].position
    position["offsets"] = {f"{topic}/0": [5, -1]}
    with pytest.raises(RestoreError, match="up to offset 5, but it ends at 3 now"):
        items(source, position)


def test_other_topics_than_before_are_refused(kafka_server: Kafka, kafka_topic: Topics) -> None:
    one, other = kafka_topic(), kafka_topic()
    put(kafka_server.url, one, [1])
    position = records(KafkaSource([one, other], kafka_server.url, until_end=True))[-1].position
    with pytest.raises(RestoreError, match=f"has read {one}/0"):
        items(KafkaSource(other, kafka_server.url, until_end=True), position)
    with pytest.raises(RestoreError, match="another kind of source"):
        items(KafkaSource(one, kafka_server.url, until_end=True), {"offset": 1, "ordinal": 1})


def test_new_partitions_are_read_from_their_start(
    kafka_server: Kafka, kafka_topic: Topics, admin: AdminClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_reading, "_REFRESH_SECONDS", 0.2)
    topic = kafka_topic()
    put(kafka_server.url, topic, ["old"])
    outputs: list[Any] = []
    runner = LocalRunner(Counting(), job="more", store=f"sqlite:///{tmp_path}/store.db")
    running = Running(lambda: runner.run(KafkaSource(topic, kafka_server.url), outputs.append), runner.stop)
    until(lambda: outputs)
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(MINUTE)
    until(lambda: _has_partition(kafka_server, topic, 1))
    put(kafka_server.url, topic, ["new"], partition=1)
    until(lambda: len(outputs) == 2)
    running.stop()
    put(kafka_server.url, topic, ["newer"], partition=1)
    runner.run(KafkaSource(topic, kafka_server.url, until_end=True), outputs.append)
    assert [value for value, _ in outputs] == ["old", "new", "newer"]


def _has_partition(server: Kafka, topic: str, partition: int) -> bool:
    return partition in AdminClient({**server.client_settings}).list_topics(topic, MINUTE).topics[topic].partitions


def test_a_job_begins_at_a_time(kafka_server: Kafka, kafka_topic: Topics) -> None:
    from confluent_kafka import Producer

    topic = kafka_topic()
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    producer = Producer({**kafka_server.client_settings})
    for hours in range(4):
        moment = begin + timedelta(hours=hours)
        producer.produce(topic, str(hours).encode(), timestamp=int(moment.timestamp() * 1000))
    producer.flush(MINUTE)
    later = KafkaSource(topic, kafka_server.url, start=begin + timedelta(hours=2), until_end=True)
    assert [item.value for item in records(later)] == [2, 3]
    text = KafkaSource(topic, kafka_server.url, start="2026-01-01T04:00:00+01:00", until_end=True)
    assert [item.value for item in records(text)] == [3]
    assert records(KafkaSource(topic, kafka_server.url, start="2027-01-01T00:00:00Z", until_end=True)) == []


def test_a_group_is_told_how_far_checkpoints_are(kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path) -> None:
    topic = kafka_topic()
    put(kafka_server.url, topic, range(5))
    runner = LocalRunner(Counting(), job="lag", store=f"sqlite:///{tmp_path}/store.db", checkpoint_interval=0.05)
    running = Running(
        lambda: runner.run(KafkaSource(topic, kafka_server.url, group=f"{topic}-watched"), lambda _: None), runner.stop
    )
    watcher = Consumer({**kafka_server.client_settings, "group.id": f"{topic}-watched"})
    until(lambda: watcher.committed([TopicPartition(topic, 0)], MINUTE)[0].offset == 5)
    watcher.close()
    report = running.stop()
    assert report.messages == 5
    assert report.lag == 0


def test_an_unbounded_run_takes_what_comes_and_stops_cleanly(
    kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path
) -> None:
    topic = kafka_topic(2)
    outputs: list[Any] = []
    runner = LocalRunner(Counting(), job="open", store=f"sqlite:///{tmp_path}/store.db")
    running = Running(lambda: runner.run(KafkaSource(topic, kafka_server.url), outputs.append), runner.stop)
    for n in range(3):
        put(kafka_server.url, topic, [("a", n)])
        until(lambda: len(outputs) > n)  # noqa: B023 - called at once
    assert running.stop().stopped_by == "stop()"
    assert outputs == [[0, 1], [1, 2], [2, 3]]


def test_a_missing_topic_and_an_absent_broker_are_told_at_once_or_in_time(
    kafka_server: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"the topic 'nowhere' .* cannot be read: .*Unknown topic"):
        items(KafkaSource("nowhere", kafka_server.url))
    monkeypatch.setattr(kafka_reading, "START_SECONDS", 0.5)
    with pytest.raises(InputError, match="no Kafka broker answers"):
        items(KafkaSource("anything", "127.0.0.1:1"))


def test_wrong_credentials_are_one_clear_error(private_kafka: Callable[..., Kafka]) -> None:
    server = private_kafka(security="SASL_PLAINTEXT", scram_users={"ann": "secret"})
    with server.topic() as topic:
        given = {name: value for name, value in server.client_settings.items() if name != "bootstrap.servers"}
        assert records(KafkaSource(topic, server.url, config=given, until_end=True)) == []
        wrong = {**given, "sasl.password": "wrong"}
        with pytest.raises(InputError, match=r"not let in: .*uthentication failed") as raised:
            items(KafkaSource(topic, server.url, config=wrong))
        assert "wrong" not in str(raised.value).replace("is wrong", "")


def test_a_broker_that_goes_away_is_waited_for(private_kafka: Callable[..., Kafka], tmp_path: Path) -> None:
    server = private_kafka()
    outputs: list[Any] = []
    with server.topic() as topic:
        put(server.url, topic, [1])
        runner = LocalRunner(Counting(), job="away", store=f"sqlite:///{tmp_path}/store.db")
        running = Running(lambda: runner.run(KafkaSource(topic, server.url), outputs.append), runner.stop)
        until(lambda: len(outputs) == 1)
        server.kill()
        time.sleep(3)
        assert not running.has_ended
        server.start()
        put(server.url, topic, [2])
        until(lambda: len(outputs) == 2)
        assert running.stop().messages == 2


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: KafkaSource("", "h"), "topics=''"),
        (lambda: KafkaSource([], "h"), "topics=\\[\\]"),
        (lambda: KafkaSource("t", ""), "servers=''"),
        (lambda: KafkaSource("t", "h", value="xml"), "value='xml'"),  # type: ignore[arg-type]
        (lambda: KafkaSource("t", "h", key="xml"), "key='xml'"),  # type: ignore[arg-type]
        (lambda: KafkaSource("t", "h", on_gap="?"), "on_gap='\\?'"),  # type: ignore[arg-type]
        (lambda: KafkaSource("t", "h", start="now"), "start='now'"),
        (lambda: KafkaSource("t", "h", start=datetime(2026, 1, 1)), "with its zone"),
        (lambda: KafkaSource("t", "h", group=""), "group=''"),
        (lambda: KafkaSource("t", "h", config={"group.id": "g"}), "'group.id' of the Kafka client is not free"),
        (lambda: KafkaSource("t", "h", config_file="/nowhere/at.all"), "cannot be read from '/nowhere/at.all'"),
        (lambda: source_of("kafka://h"), "names no Kafka topic"),
        (lambda: source_of("kafka:///t"), "names no Kafka topic"),
        (lambda: source_of("kafka://h/t?untilend=true"), "no option 'untilend'"),
        (lambda: source_of("kafka://h/t?until_end=yes"), "until_end='yes'"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(DefinitionError, match=what):
        make()


def test_an_address_says_everything_and_does_not_show_the_password(tmp_path: Path) -> None:
    config = tmp_path / "client.properties"
    config.write_text("# ours\nsocket.timeout.ms = 5000\n\nsasl.password=from-file\n")
    url = f"kafka://ann:p%40ss@a:1,b:2/one,two?value=text&until_end=true&ssl.ca.location=/ca&config_file={config}"
    assert KafkaAddress.of(url).servers == "a:1,b:2"
    source = open_source(url)
    assert isinstance(source, KafkaSource)
    assert source.describe() == "kafka://a:1,b:2/one,two"
    assert source._config == {
        "socket.timeout.ms": "5000",
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": "p@ss",
        "ssl.ca.location": "/ca",
    }
    with pytest.raises(DefinitionError) as raised:
        source_of("kafka://ann:secret@host")
    assert "secret" not in str(raised.value)
