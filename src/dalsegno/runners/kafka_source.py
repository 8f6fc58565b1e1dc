"""Kafka topics as a source: one message per record, exactly once, with the offsets in the job's own checkpoints.

The position says for each partition which offset is read next, and for each topic the id that it has. A topic that was
deleted and made again under the same name has another one, and is not read on. Nothing is asked of a consumer group;
one is told the offsets of completed checkpoints if its name is given, for those who watch how far a job is.

The records of the partitions interleave otherwise in each run; each partition's own come in their order. The id of a
message is ``topic/partition/offset``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dalsegno.errors import DefinitionError, RestoreError
from dalsegno.runners.kafka_client import checked_config, checked_servers, require_client
from dalsegno.runners.kafka_reading import Offsets, Reading, partition_of
from dalsegno.runners.lines import BadInput, count_in, raw_text
from dalsegno.runners.sources import NO_RECORD, Source, SourceItem

if TYPE_CHECKING:
    from confluent_kafka import Message

Form = Literal["json", "text", "bytes"]
OnGap = Literal["refuse", "skip"]


class KafkaSource(Source):
    """The records of *topics*, one name or several, at the brokers *servers*.

    *value* and *key* say how the bytes of a record's value and key are read: ``"json"``, ``"text"`` or ``"bytes"``; a
    null is None. The record's key is the message key, unless the job is given one. With *metadata* a message is a dict
    of ``topic``, ``partition``, ``offset``, ``timestamp`` (milliseconds since 1970, or None), ``headers`` (a list of
    name and text, with base64 for what is not UTF-8), ``key`` and ``value``, and not the value alone.

    A job's first run begins at *start*: ``"earliest"``, or a time, as a `datetime` with its zone or in ISO 8601. With
    *until_end* the source ends where the topics ended when it was opened; else it does not end. *on_gap* says what
    becomes of records that were deleted before they were read: ``"refuse"`` raises, ``"skip"`` goes on after them with
    a warning. *group* is a consumer group that is told how far checkpoints are; nothing is read from it.

    *config* has settings of the client (librdkafka), such as ``security.protocol``; *config_file* is a file of them,
    one ``name=value`` a line.

    Raises `DefinitionError` for a wrong option, or if the package confluent-kafka is not installed.
    """

    replays_in_order: ClassVar[bool] = False
    gives_ids: ClassVar[bool] = True
    gives_keys: ClassVar[bool] = True

    def __init__(
        self,
        topics: str | Iterable[str],
        servers: str | Iterable[str],
        *,
        value: Form = "json",
        key: Form = "text",
        metadata: bool = False,
        until_end: bool = False,
        start: str | datetime = "earliest",
        on_gap: OnGap = "refuse",
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        config_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._topics = _checked_topics(topics)
        self._servers = checked_servers(servers)
        for what, form in (("value", value), ("key", key)):
            if form not in _READERS:
                raise DefinitionError(f"{what}={form!r} is not one of 'json', 'text', 'bytes'")
        if on_gap not in ("refuse", "skip"):
            raise DefinitionError(f"on_gap={on_gap!r} is not one of 'refuse', 'skip'")
        if group == "":
            raise DefinitionError(f"group={group!r}: give the name of a consumer group")
        self._read_value, self._read_key = _READERS[value], _READERS[key]
        self._metadata = metadata
        self._until_end = until_end
        self._start = _start_ms(start)
        self._skip_gaps = on_gap == "skip"
        self._group = group
        self._config = checked_config(config, config_file)
        require_client()
        self._reading: Reading | None = None
        """The last one, which still tells how far it came when it is closed."""
        self._thread: ThreadPoolExecutor | None = None

    def describe(self) -> str:
        return f"kafka://{self._servers}/{','.join(self._topics)}"

    def total(self) -> int | None:
        return None if self._reading is None else self._reading.total()

    def progress(self, position: dict[str, Any] | None) -> int:
        return 0 if self._reading is None else self._reading.progress(self._offsets(position))

    def lag(self, position: dict[str, Any] | None) -> int | None:
        return None if self._reading is None else self._reading.lag(self._offsets(position))

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        await self.close()
        offsets = self._offsets(position)
        topic_ids = {} if position is None else dict(position["topics"])
        ordinal = 0 if position is None else count_in(position, "ordinal", self.describe())
        reading = Reading(
            self.describe(),
            self._topics,
            self._servers,
            self._config,
            self._group,
            begun=position is not None,
            until_end=self._until_end,
            start=self._start,
            skip_gaps=self._skip_gaps,
        )
        self._reading = reading
        # Of its own: the loop's threads may all be taken by what an agent calls, and the client is used in one only.
        self._thread = ThreadPoolExecutor(1, "dalsegno-kafka-source")
        opened = await self._in_thread(reading.open, offsets, topic_ids)
        return self._items(reading, ordinal, opened.offsets, opened.topic_ids)

    async def checkpointed(self, position: dict[str, Any]) -> None:
        if self._group is not None and self._reading is not None:
            self._reading.publish(self._offsets(position))

    async def close(self) -> None:
        """Also ends a wait for a broker."""
        reading = self._reading
        thread, self._thread = self._thread, None
        if reading is None or thread is None:
            return
        reading.closing.set()
        closed = asyncio.wrap_future(thread.submit(reading.close))
        thread.shutdown(wait=False)
        await asyncio.wait([closed])
        closed.result()

    async def _items(
        self, reading: Reading, ordinal: int, offsets: Offsets, topic_ids: dict[str, str]
    ) -> AsyncIterator[SourceItem]:
        position = {"ordinal": ordinal, "offsets": offsets, "topics": topic_ids}
        while (batch := await self._in_thread(reading.next_batch)) is not None:
            for partition, next_offset, epoch, message in batch:
                offsets = offsets | {partition: [next_offset, epoch]}
                if message is not None:
                    ordinal += 1
                position = {"ordinal": ordinal, "offsets": offsets, "topics": topic_ids}
                if message is not None:
                    yield self._item(ordinal - 1, message, position)
                elif ordinal:  # else there is nothing yet that a checkpoint could know of
                    yield SourceItem(ordinal - 1, NO_RECORD, position)

    def _item(self, ordinal: int, message: Message, position: dict[str, Any]) -> SourceItem:
        name = f"{partition_of(message)}/{message.offset()}"
        raw = message.value()
        try:
            key = self._read_key(message.key())
            value = self._read_value(raw)
        except _UnreadableError as error:
            bad = raw if error.raw is raw else error.raw
            what = "value" if error.raw is raw else "key"
            where = f"{message.topic()}, partition {message.partition()}, offset {message.offset()}"
            return SourceItem(
                ordinal, BadInput(where, f"its {what} cannot be read: {error}", raw_text(bad)), position, name
            )
        if self._metadata:
            value = {**_metadata(message), "key": key, "value": value}
        return SourceItem(ordinal, value, position, name, key)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _offsets(self, position: dict[str, Any] | None) -> Offsets:
        """By partition: the offset that is read next, and the leader epoch of the record before it (-1: not known)."""
        if position is None:
            return {}
        offsets = position.get("offsets")
        if not (isinstance(offsets, dict) and isinstance(position.get("topics"), dict)):
            raise RestoreError(
                f"this job has read another kind of source than {self.describe()}, up to {str(position)[:200]}. Put "
                "that back, or give the job a new name"
            )
        return offsets


class _UnreadableError(Exception):
    """Bytes that are not what they were to be."""

    def __init__(self, reason: str, raw: bytes) -> None:
        super().__init__(reason)
        self.raw = raw


def _read_text(raw: bytes | None) -> object:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8: byte {raw[error.start]:#04x}, number {error.start + 1}"
        raise _UnreadableError(reason, raw) from error


def _read_json(raw: bytes | None) -> object:
    text = _read_text(raw)
    if raw is None or not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {error.msg}, at character {error.pos + 1}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise _UnreadableError(reason, raw)


def _read_bytes(raw: bytes | None) -> object:
    return raw


_READERS = {"json": _read_json, "text": _read_text, "bytes": _read_bytes}


def _metadata(message: Message) -> dict[str, Any]:
    kind, milliseconds = message.timestamp()
    headers: Any = message.headers() or ()
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": milliseconds if kind else None,
        "headers": [[name, _header_text(value)] for name, value in headers],
    }


def _header_text(value: str | bytes | None) -> str | None:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _checked_topics(topics: object) -> list[str]:
    names = [topics] if isinstance(topics, str) else list(topics) if isinstance(topics, Iterable) else []
    if not names or not all(isinstance(name, str) and name and "/" not in name for name in names):
        raise DefinitionError(f"topics={topics!r}: give the name of a Kafka topic, or several")
    return list(dict.fromkeys(names))


def _start_ms(start: object) -> int | None:
    """Milliseconds since 1970; None for the beginning."""
    if start == "earliest":
        return None
    try:
        time = datetime.fromisoformat(start) if isinstance(start, str) else start
    except ValueError:
        time = None
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise DefinitionError(
            f"start={start!r}: give 'earliest', or a time with its zone, as in '2026-11-30T12:00:00Z'"
        )
    return math.ceil((time - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
