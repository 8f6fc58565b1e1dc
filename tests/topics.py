"""What the tests of Kafka topics share: they write topics, read them as everybody else does, and look at a job."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition

from dalsegno import Agent, InputEvent, LocalRunner, OutputEvent, RunnerContext, RunReport, action
from dalsegno.runners.kafka_client import has_code
from dalsegno.runners.kafka_sink import OUTPUT_ID, KafkaSink
from dalsegno.runners.kafka_source import KafkaSource

MINUTE = 60.0


class Record(NamedTuple):
    """A record that somebody else has read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]

    @property
    def json(self) -> Any:
        return json.loads(self.value or b"null")

    @property
    def output_id(self) -> str:
        return self.headers[OUTPUT_ID].decode()


def put(servers: str, topic: str, records: Iterable[Any], *, partition: int | None = None) -> None:
    """Write records: values, or pairs of key and value; values that are no bytes become JSON."""
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    place: Any = {} if partition is None else {"partition": partition}
    for record in records:
        key, value = record if isinstance(record, tuple) else (None, record)
        producer.produce(topic, value if isinstance(value, bytes | None) else json.dumps(value).encode(), key, **place)
    assert producer.flush(MINUTE) == 0


def put_in_transaction(servers: str, topic: str, records: Iterable[Any], *, commit: bool) -> None:
    """One transaction of JSON values in partition 0, committed or not."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": f"test-{topic}", "log_level": 0})
    producer.init_transactions(MINUTE)
    producer.begin_transaction()
    for value in records:
        producer.produce(topic, json.dumps(value).encode(), partition=0)
    assert producer.flush(MINUTE) == 0
    if commit:
        producer.commit_transaction(MINUTE)
    else:
        producer.abort_transaction(MINUTE)


def read(servers: str, topic: str, isolation: str = "read_committed") -> list[Record]:
    """All that *topic* has now for a reader with this *isolation*."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "test-reader",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    try:
        partitions = list(consumer.list_topics(topic, MINUTE).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        found, ended = [], 0
        while ended < len(partitions):
            message = consumer.poll(MINUTE)
            assert message is not None, f"{topic} cannot be read"
            if message.error() is not None:
                assert has_code(message.error(), "_PARTITION_EOF"), message.error()
                ended += 1
                continue
            headers: Any = message.headers() or []
            place: Any = message.partition(), message.offset()
            found.append(Record(place[0], place[1], message.key(), message.value(), dict(headers)))
        return found
    finally:
        consumer.close()


class Counting(Agent):
    """Numbers the messages of each key; the output says which it was."""

    @action(InputEvent)
    async def act(self, event: InputEvent, ctx: RunnerContext) -> None:
        n = ctx.short_term_memory.get("n", 0) + 1
        ctx.short_term_memory.set("n", n)
        ctx.send_event(OutputEvent(output=[event.input, n]))


class TopicJob:
    """A job over the topics *source* and *sink* at *servers*, which lives in *folder* across restarts."""

    def __init__(self, folder: Path, servers: str, source: str, sink: str, *, name: str | None = None) -> None:
        self.folder, self.servers, self.source, self.sink = folder, servers, source, sink
        self.name = name or f"job-{sink}"

    def runner(self, agent: Agent | None = None, **options: Any) -> LocalRunner:
        return LocalRunner(agent or Counting(), job=self.name, store=f"sqlite:///{self.folder}/store.db", **options)

    def kafka_source(self, **options: Any) -> KafkaSource:
        return KafkaSource(self.source, self.servers, **{"until_end": True, **options})

    def kafka_sink(self, **options: Any) -> KafkaSink:
        return KafkaSink(self.sink, self.servers, **options)

    def run(
        self,
        agent: Agent | None = None,
        *,
        source: Mapping[str, Any] | None = None,
        sink: Mapping[str, Any] | None = None,
        runner: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RunReport:
        """Run to the end of the topic as it is now."""
        given = self.kafka_source(**(source or {})), self.kafka_sink(**(sink or {}))
        return self.runner(agent, **(runner or {})).run(*given, **options)

    def outputs(self) -> list[Any]:
        """What a read_committed reader sees of the sink, by partition."""
        return [record.json for record in read(self.servers, self.sink)]

    def checkpoints(self) -> Path:
        return self.folder / f"store.{self.name}.checkpoints.db"


class Running:
    """A run in a thread, so that a test can do things meanwhile."""

    def __init__(self, run: Callable[[], RunReport], stop: Callable[[], None]) -> None:
        self._stop = stop
        self._result: RunReport | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], RunReport]) -> None:
        try:
            self._result = run()
        except BaseException as error:
            self._result = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> RunReport:
        self._stop()
        return self.result()

    def result(self) -> RunReport:
        self._thread.join(MINUTE)
        assert not self._thread.is_alive(), "the run hangs"
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result
