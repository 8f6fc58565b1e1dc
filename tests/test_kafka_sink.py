"""A Kafka topic as a sink, with a real broker: each output once for read_committed readers, whatever happens."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from dalsegno import (
    ActionError,
    AesGcmCipher,
    DefinitionError,
    FencedError,
    LocalRunner,
    PayloadCipher,
    RestoreError,
    RunnerContext,
    StoreError,
)
from dalsegno.runners import kafka_transactions
from dalsegno.runners.kafka_client import admin_module, sink_of
from dalsegno.runners.kafka_sink import KafkaSink
from dalsegno.runners.kafka_transactions import Marker, Outgoing, Transactions
from tests.helpers import Scripted, crash
from tests.services import Kafka
from tests.topics import MINUTE, Counting, Running, TopicJob, put, read

Topics = Callable[..., str]


@pytest.fixture
def job(kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path) -> TopicJob:
    """With 20 messages of 4 keys in 3 partitions."""
    source, sink = kafka_topic(3), kafka_topic(2)
    put(kafka_server.url, source, [(f"k{n % 4}", n) for n in range(20)])
    return TopicJob(tmp_path, kafka_server.url, source, sink)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + MINUTE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete(job: TopicJob, count: int = 20) -> bool:
    """Whether each output is there once, in order for each key."""
    found = read(job.servers, job.sink)
    of_key: dict[Any, list[int]] = {}
    for record in found:
        of_key.setdefault(record.key, []).append(record.json[1])
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in of_key.values()), of_key
    assert len({record.output_id for record in found}) == len(found)
    return sorted(record.json[0] for record in found) == list(range(count))


def sink_state(job: TopicJob) -> dict[str, Any]:
    with closing(sqlite3.connect(job.checkpoints())) as connection:
        return json.loads(connection.execute("SELECT sink FROM checkpoint").fetchone()[0])  # type: ignore[no-any-return]


def marker(job: TopicJob, topic: str | None = None) -> int:
    consumer = Consumer({"bootstrap.servers": job.servers, "group.id": f"dalsegno-{job.name}", "log_level": 0})
    try:
        return int(consumer.committed([TopicPartition(topic or job.sink, 0)], MINUTE)[0].offset)
    finally:
        consumer.close()


def lose_marker(job: TopicJob, topic: str | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": job.servers})
    group = f"dalsegno-{job.name}"
    admin.delete_consumer_groups([group])[group].result(MINUTE)
    assert marker(job, topic) < 0


class Crash(BaseException):
    """As if the process had ended there."""


def crash_in(monkeypatch: pytest.MonkeyPatch, step: str, when: str, times: int = 1) -> list[str]:
    """The next calls of a step of `Transactions` raise, before or after it was done."""
    real = getattr(Transactions, step)
    done: list[str] = []

    def step_and_crash(self: Transactions, *args: Any) -> Any:
        crashing = len(done) < times and not (step == "_transaction" and not args[2])
        if crashing:
            done.append(when)
        if crashing and when == "before":
            raise Crash
        result = real(self, *args)
        if crashing:
            raise Crash
        return result

    monkeypatch.setattr(Transactions, step, step_and_crash)
    return done


def test_outputs_are_there_once_with_key_value_and_id(job: TopicJob) -> None:
    report = job.run()
    assert (report.messages, report.outputs) == (20, 20)
    assert complete(job)
    found = read(job.servers, job.sink)
    assert {record.key for record in found} == {b"k0", b"k1", b"k2", b"k3"}
    assert len({record.partition for record in found if record.key == b"k0"}) == 1
    assert job.run().outputs == 0
    assert complete(job)


def test_outputs_are_not_seen_before_their_checkpoint(job: TopicJob) -> None:
    runner = job.runner(checkpoint_interval=3600.0)
    source = job.kafka_source(until_end=False)
    running = Running(lambda: runner.run(source, job.kafka_sink()), runner.stop)
    until(lambda: runner._pipeline is not None and runner._pipeline.report.outputs == 20)
    assert read(job.servers, job.sink, "read_uncommitted") == []
    running.stop()
    assert complete(job)


def test_a_sink_of_topics_takes_a_checkpoint_each_second(job: TopicJob) -> None:
    runner = job.runner()
    running = Running(lambda: runner.run(job.kafka_source(until_end=False), job.kafka_sink()), runner.stop)
    until(lambda: complete(job))
    put(job.servers, job.source, [("k0", 20)])
    until(lambda: complete(job, 21))
    assert running.stop().checkpoints >= 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["write", "_transaction", "_produce", "_new_producer", "connect", "take_over"])
def test_a_crash_at_any_step_loses_and_doubles_nothing(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    done = crash_in(monkeypatch, step, when)
    with pytest.raises(Crash):
        job.run()
    assert done == [when]
    job.run()
    assert complete(job)


@pytest.mark.parametrize("step", ["_transaction", "_produce", "_new_producer", "connect", "take_over"])
def test_a_second_crash_while_the_first_is_settled_does_no_harm(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patched:
        crash_in(patched, "_transaction", "after")
        with pytest.raises(Crash):
            job.run()
    put(job.servers, job.source, [("k0", 20)])
    for when in ("before", "after"):
        with monkeypatch.context() as patched:
            crash_in(patched, step, when)
            with pytest.raises(Crash):
                job.run()
    job.run()
    assert complete(job, 21)


def test_a_batch_that_is_delivered_is_kept_no_longer(job: TopicJob) -> None:
    job.run()
    state = sink_state(job)
    assert state["outputs"] == []
    assert state["batch"] == marker(job) >= 1


def test_a_process_that_was_killed_in_its_transaction_does_not_hold_up_the_next_one(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had begun is ended by the next run and not by its time, which is a quarter of an hour."""
    real = Transactions._in_steps
    left: list[Any] = []

    def killed(self: Transactions, request: Callable[[float], Any]) -> None:
        producer = self._producer
        if producer is not None and request == producer.commit_transaction and self._written == 0:
            producer.flush(MINUTE)
            left.append(producer)
            self._producer = None  # else it would end the transaction when it is closed
            raise Crash
        real(self, request)

    with monkeypatch.context() as patched:
        patched.setattr(Transactions, "_in_steps", killed)
        with pytest.raises(Crash):
            job.run(sink={"config": {"transaction.timeout.ms": 900_000}})
    assert len(left) == 1
    runner = job.runner()
    Running(lambda: runner.run(job.kafka_source(), job.kafka_sink()), runner.stop).result()
    assert complete(job)


@pytest.mark.parametrize("code", ["_TRANSPORT", "_TIMED_OUT", "_FENCED", "UNKNOWN_PRODUCER_ID"])
def test_an_answer_that_was_lost_is_found_out(job: TopicJob, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """The transaction is committed, and the client says that it failed."""
    from confluent_kafka import KafkaError

    real = Transactions._transaction
    lost: list[int] = []

    def losing(self: Transactions, topic: str, batch: int, outgoing: list[Outgoing]) -> None:
        real(self, topic, batch, outgoing)
        if outgoing and not lost:
            lost.append(batch)
            raise KafkaException(KafkaError(getattr(KafkaError, code)))

    monkeypatch.setattr(Transactions, "_transaction", losing)
    job.run()
    assert lost
    assert complete(job)


def test_a_transaction_that_kafka_ended_for_its_time_is_written_again(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Transactions._in_steps
    slow: list[float] = []

    def delayed(self: Transactions, request: Callable[[float], Any]) -> None:
        producer = self._producer
        if producer is not None and request == producer.commit_transaction and self._written == 0 and not slow:
            producer.flush(MINUTE)
            slow.append(time.monotonic())
            assert _end_for_committed(job) == 0
            until(lambda: _end_for_committed(job) > 0)
        real(self, request)

    monkeypatch.setattr(Transactions, "_in_steps", delayed)
    job.run(sink={"config": {"transaction.timeout.ms": 1000}})
    assert slow
    assert complete(job)


def _end_for_committed(job: TopicJob) -> int:
    """Where the sink ends for read_committed readers: before a transaction that is not yet ended."""
    admin = AdminClient({"bootstrap.servers": job.servers})
    partitions = [TopicPartition(job.sink, partition) for partition in range(2)]
    asked = admin.list_offsets(
        dict.fromkeys(partitions, admin_module().OffsetSpec.latest()), isolation_level=IsolationLevel.READ_COMMITTED
    )
    return sum(int(answer.result(MINUTE).offset) for answer in asked.values())


def test_a_zombie_writes_nothing_any_more(job: TopicJob, tmp_path: Path) -> None:
    """Another process runs the job, from a copy of its files; the first one finds that out at its next batch."""
    runner = job.runner(checkpoint_interval=0.2)
    running = Running(lambda: runner.run(job.kafka_source(until_end=False), job.kafka_sink()), runner.stop)
    until(lambda: complete(job) and sink_state(job)["outputs"] == [])
    other = tmp_path / "copy"
    other.mkdir()
    for path in tmp_path.glob("store.*db"):
        _copy(path, other / path.name)
    copy = TopicJob(other, job.servers, job.source, job.sink, name=job.name)
    assert copy.run().messages == 0
    put(job.servers, job.source, [("k0", 20)])
    with pytest.raises(FencedError, match="another process writes the outputs"):
        running.result()
    assert complete(job)
    assert copy.run().messages == 1
    assert complete(job, 21)


def _copy(path: Path, to: Path) -> None:
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as copy:
        source.backup(copy)


def test_a_lost_marker_is_noticed_and_what_then_is_for_the_user(job: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        crash_in(patched, "_transaction", "after")
        with pytest.raises(Crash):
            job.run()
    lose_marker(job)
    with pytest.raises(RestoreError, match=r"whether its last 20 outputs were written .* was to be 0 or 1 and is gone"):
        job.run()
    job.run(sink={"on_lost_marker": "drop"})
    assert complete(job)


def test_a_lost_marker_of_a_batch_that_is_not_written_can_be_repeated(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        crash_in(patched, "_transaction", "before")
        with pytest.raises(Crash):
            job.run()
    lose_marker(job)
    job.run(sink={"on_lost_marker": "repeat"})
    assert complete(job)


def test_a_job_that_ended_well_needs_no_marker(job: TopicJob) -> None:
    job.run()
    lose_marker(job)
    put(job.servers, job.source, [("k0", 20)])
    job.run()
    assert complete(job, 21)
    assert marker(job) == 2


def test_older_checkpoints_than_what_was_written_are_refused(job: TopicJob, tmp_path: Path) -> None:
    job.run()
    old = tmp_path / "old.db"
    _copy(job.checkpoints(), old)
    put(job.servers, job.source, [("k0", 20)])
    job.run()
    runner = LocalRunner(Counting(), job=job.name, store="memory://")
    with pytest.raises(RestoreError, match="has written 2 batches of outputs"):
        runner.run(job.kafka_source(), job.kafka_sink())
    sink = job.kafka_sink()
    sink.belongs_to(job.name)
    with closing(sqlite3.connect(old)) as connection:
        state = json.loads(connection.execute("SELECT sink FROM checkpoint").fetchone()[0])
    with pytest.raises(RestoreError, match=r"from batch 1 .* but batch 2 was written"):
        sink.open(state)
    sink.close()
    assert complete(job, 21)


def test_a_new_job_refuses_a_name_that_has_written_unless_it_is_to_append(job: TopicJob) -> None:
    job.run()
    fresh = LocalRunner(Counting(), job=job.name, store="memory://")
    with pytest.raises(RestoreError, match=r"its checkpoints are not here"):
        fresh.run(job.kafka_source(), job.kafka_sink())
    again = LocalRunner(Counting(), job=job.name, store="memory://")
    again.run(job.kafka_source(), job.kafka_sink(append=True))
    assert len(job.outputs()) == 40


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_another_topic_takes_over_when_the_old_one_has_its_outputs(
    job: TopicJob, kafka_topic: Topics, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "never":
        job.run()
    else:
        with monkeypatch.context() as patched:
            crash_in(patched, "_transaction", when)
            with pytest.raises(Crash):
                job.run()
    put(job.servers, job.source, [("k0", 20)])
    other = TopicJob(job.folder, job.servers, job.source, kafka_topic(), name=job.name)
    other.run()
    assert complete(job)
    assert other.outputs() == [[20, 6]]
    assert sink_state(other)["topic"] == other.sink
    put(job.servers, job.source, [("k0", 21)])
    other.run()
    assert other.outputs() == [[20, 6], [21, 7]]
    put(job.servers, job.source, [("k0", 22)])
    job.run()  # and back
    assert [22, 8] in job.outputs()


def test_another_kind_of_sink_does_not_drop_what_is_kept(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        crash_in(patched, "_transaction", "before")
        with pytest.raises(Crash):
            job.run()
    for sink in (None, "-", lambda output: None, tmp_path / "out.jsonl"):
        with pytest.raises(RestoreError):
            job.runner().run(job.kafka_source(), sink)
    job.run()
    assert complete(job)


def test_a_file_job_does_not_go_on_into_a_topic(job: TopicJob, tmp_path: Path) -> None:
    job.runner().run(job.kafka_source(), tmp_path / "out.jsonl")
    with pytest.raises(RestoreError, match="another kind of sink"):
        job.run()


def test_an_output_that_is_too_large_fails_its_action_with_the_sizes(
    kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path
) -> None:
    source, sink = kafka_topic(), kafka_topic(config={"max.message.bytes": "20000"})
    put(kafka_server.url, source, [("a", 10), ("b", 30_000), ("b", 5), ("c", 19_000)])
    job = TopicJob(tmp_path, kafka_server.url, source, sink)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return "x" * value

    with pytest.raises(ActionError, match=r"takes 30,1\d\d bytes .* takes 20,000 \(max.message.bytes"):
        job.run(Scripted(body))
    report = job.run(Scripted(body), runner={"on_failure": "park"})
    assert [(parked.key, parked.why) for parked in report.parked] == [("b", "failed")]
    assert sorted(map(len, job.outputs())) == [10, 19_000]
    admin = AdminClient({**kafka_server.client_settings})
    names = admin_module()
    entry = names.ConfigEntry("max.message.bytes", "1000000", incremental_operation=names.AlterConfigOpType.SET)
    resource = names.ConfigResource(names.ResourceType.TOPIC, sink, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(MINUTE)
    runner = job.runner(Scripted(body))
    runner.operator().retry("b")
    assert job.run(Scripted(body)).parked == []
    assert sorted(map(len, job.outputs())) == [5, 10, 19_000, 30_000]


def test_many_records_fit_a_topic_with_a_small_limit(kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path) -> None:
    """The client puts records into batches, which the limit is for."""
    source, sink = kafka_topic(), kafka_topic(config={"max.message.bytes": "3000"})
    put(kafka_server.url, source, [("a", n) for n in range(100)])
    job = TopicJob(tmp_path, kafka_server.url, source, sink)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return [value, "x" * 1000]

    job.run(Scripted(body))
    assert [value for value, _ in job.outputs()] == list(range(100))


def test_keys_values_headers_and_topics_are_made_as_told(
    kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path
) -> None:
    source, sink, alerts = kafka_topic(), kafka_topic(), kafka_topic()
    put(kafka_server.url, source, [("a", "one"), ("b", "ALERT")])
    job = TopicJob(tmp_path, kafka_server.url, source, sink)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return value

    job.run(
        Scripted(body),
        sink={
            "value": "text",
            "key": lambda output: {"of": output},
            "headers": lambda output: {"length": str(len(output)), "raw": b"\xff"},
            "topic_of": lambda output: alerts if output.isupper() else None,
        },
    )
    (one,) = read(kafka_server.url, sink)
    assert (one.key, one.value, one.headers["length"], one.headers["raw"]) == (b'{"of": "one"}', b"one", b"3", b"\xff")
    (alert,) = read(kafka_server.url, alerts)
    assert (alert.value, alert.headers["length"]) == (b"ALERT", b"5")


@pytest.mark.parametrize(("form", "value"), [("text", 7), ("bytes", "text"), ("text", b"raw")])
def test_an_output_that_has_no_bytes_fails_its_action(
    kafka_server: Kafka, kafka_topic: Topics, tmp_path: Path, form: str, value: object
) -> None:
    source, sink = kafka_topic(), kafka_topic()
    put(kafka_server.url, source, [1])
    job = TopicJob(tmp_path, kafka_server.url, source, sink)

    async def body(_: Any, ctx: RunnerContext) -> Any:
        return value

    with pytest.raises(ActionError, match=f"is a {type(value).__name__}, and the sink takes {form}"):
        job.run(Scripted(body), sink={"value": form})


def test_what_is_kept_of_outputs_is_encrypted_with_the_job(job: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    cipher: PayloadCipher = AesGcmCipher(b"k" * 32)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return f"secret-{value}"

    with monkeypatch.context() as patched:
        crash_in(patched, "_transaction", "before")
        with pytest.raises(Crash):
            job.run(Scripted(body), runner={"cipher": cipher})
    assert all(b"secret-" not in path.read_bytes() for path in job.folder.glob("store.*"))
    job.run(Scripted(body), runner={"cipher": cipher})
    assert sorted(job.outputs()) == sorted(f"secret-{n}" for n in range(20))
    assert all(b"secret-" not in path.read_bytes() for path in job.folder.glob("store.*"))


def test_a_full_batch_holds_the_reader_back_until_a_checkpoint(job: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from dalsegno.runners import kafka_sink

    monkeypatch.setattr(kafka_sink, "_FULL_BYTES", 500)
    put(job.servers, job.source, [(f"k{n % 4}", n) for n in range(20, 200)])
    report = job.run(runner={"checkpoint_interval": 3600.0, "max_in_flight": 1})
    assert complete(job, 200)
    assert report.checkpoints > 5


def test_a_missing_topic_and_an_absent_broker_are_clear(job: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"the topic 'nowhere' .* cannot be written: .*Create it"):
        TopicJob(job.folder, job.servers, job.source, "nowhere", name=job.name).run()
    monkeypatch.setattr(kafka_transactions, "START_SECONDS", 0.5)
    with pytest.raises(StoreError, match="no Kafka broker answers"):
        job.runner().run(job.kafka_source(), KafkaSink("out", "127.0.0.1:1"))


def test_outputs_wait_for_a_broker_that_is_away_and_are_kept_when_the_run_is_stopped(
    private_kafka: Callable[..., Kafka], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dalsegno.runners.pipeline._DELIVER_SECONDS", 0.5)
    server = private_kafka()
    with server.topic() as sink:
        job = TopicJob(tmp_path, server.url, "unused", sink)
        records: asyncio.Queue[int] = asyncio.Queue()

        async def source() -> Any:
            while True:
                yield await records.get()

        async def scenario() -> None:
            runner = job.runner(checkpoint_interval=0.1)
            run = asyncio.ensure_future(runner.run_async(source(), job.kafka_sink()))
            await records.put(1)
            await asyncio.to_thread(until, lambda: sink_state_if_any(job).get("batch") == 1)
            await asyncio.to_thread(until, lambda: sink_state(job)["outputs"] == [])
            server.kill()
            await records.put(2)
            await asyncio.to_thread(until, lambda: sink_state(job)["outputs"])
            await asyncio.sleep(2)
            assert not run.done()
            runner.stop()
            with pytest.raises(StoreError, match="They are kept in the checkpoint"):
                await asyncio.wait_for(run, MINUTE)

        asyncio.run(scenario())
        server.start()
        runner = job.runner()
        report = runner.run([1, 2], job.kafka_sink())
        assert report.messages == 0
        assert sorted(value for value, _ in job.outputs()) == [1, 2]


def sink_state_if_any(job: TopicJob) -> dict[str, Any]:
    try:
        return sink_state(job)
    except (sqlite3.Error, TypeError):
        return {}


def test_a_cancelled_run_leaves_what_the_next_one_settles(job: TopicJob) -> None:
    async def scenario() -> None:
        runner = job.runner(checkpoint_interval=0.05)
        await crash(
            runner,
            job.kafka_source(until_end=False),
            job.kafka_sink(),
            when=lambda: runner._pipeline is not None and runner._pipeline.report.checkpoints >= 1,
        )

    asyncio.run(scenario())
    job.run()
    assert complete(job)


def test_a_record_survives_the_checkpoint_as_it_was() -> None:
    record = Outgoing("t", b"\xff", None, [("h", b"\x80"), ("g", b"text")])
    assert Outgoing.of_json(json.loads(json.dumps(record.as_json()))) == record
    assert Outgoing("t", None, b"", []) == Outgoing.of_json(Outgoing("t", None, b"", []).as_json())
    assert Marker(1, "r").batch == 1


def test_wrong_credentials_are_one_clear_error(private_kafka: Callable[..., Kafka], tmp_path: Path) -> None:
    server = private_kafka(security="SASL_PLAINTEXT", scram_users={"ann": "secret"})
    given = {name: value for name, value in server.client_settings.items() if name != "bootstrap.servers"}
    with server.topic() as sink:
        job = TopicJob(tmp_path, server.url, "unused", sink)
        with pytest.raises(StoreError, match=r"not let in: .*uthentication failed"):
            job.runner().run([1], job.kafka_sink(config={**given, "sasl.password": "wrong"}))
        assert job.runner().run([1], job.kafka_sink(config=given)).outputs == 1


def test_settings_that_the_broker_refuses_end_the_run(job: TopicJob) -> None:
    with pytest.raises(StoreError, match="Transaction timeout is larger"):
        job.run(sink={"config": {"transaction.timeout.ms": 2_000_000}})
    with pytest.raises(DefinitionError, match="the Kafka client does not take its settings"):
        job.run(sink={"config": {"no.such.setting": 1}})
    job.run()
    assert complete(job)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: KafkaSink("", "h"), "topic=''"),
        (lambda: KafkaSink("t", ""), "servers=''"),
        (lambda: KafkaSink("t", "h", value="xml"), "value='xml'"),  # type: ignore[arg-type]
        (lambda: KafkaSink("t", "h", on_lost_marker="?"), "on_lost_marker='\\?'"),  # type: ignore[arg-type]
        (lambda: KafkaSink("t", "h", config={"transactional.id": "x"}), "it is made of the job's name"),
        (lambda: sink_of("kafka://h/a,b"), "one topic"),
        (lambda: sink_of("kafka://h/a?metadata=true"), "no option 'metadata'"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(DefinitionError, match=what):
        make()
