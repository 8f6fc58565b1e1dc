"""A Kafka topic as a sink, exactly once for those who read with ``isolation.level=read_committed``.

The outputs between two checkpoints are a *batch*. It is kept in the checkpoint; as soon as that is durable, the batch
is written in one transaction, which also sets the job's marker to the number of the batch. A crash loses nothing: the
next run finds the batch in the checkpoint, and by the marker whether its transaction was committed. So outputs can be
read when the checkpoint after them is complete, about a second later.

The transactional id is made of the job's name, so Kafka lets one process at a time write the outputs of a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

from dalsegno.errors import DalSegnoError, DefinitionError, RestoreError, StoreError
from dalsegno.runners.kafka_client import checked_config, checked_servers, require_client
from dalsegno.runners.kafka_transactions import Marker, Outgoing, Transactions
from dalsegno.runners.lines import count_in
from dalsegno.runners.message_ids import field_or_function
from dalsegno.runners.plain_json import to_json_line
from dalsegno.runners.sinks import Sink

Form = Literal["json", "text", "bytes"]
OnLostMarker = Literal["refuse", "repeat", "drop"]

OUTPUT_ID = "dalsegno-output-id"
"""The header with the id of an output, which is the same in every replay."""

_FULL_BYTES = 16 << 20
_KIND = "kafka"


class KafkaSink(Sink):
    """Writes outputs to *topic*, at the brokers *servers*; the topic must exist.

    *value* says how an output becomes bytes: as plain ``"json"``, or, for outputs that are text or bytes, as ``"text"``
    or ``"bytes"``, where None is a null. The key is that of the message whose output it is; *key* is a field of the
    output or a function of it that gives another one, None being a null key. Text is UTF-8, bytes stay, other keys are
    plain JSON. *headers* is a function of the output that gives a dict of names and texts or bytes; each record also
    has its output's id in `OUTPUT_ID`. *topic_of* is a function of the output that gives the topic of that one, or None
    for *topic*. Records are partitioned by their keys as Java's clients do it.

    The outputs of a checkpoint are written in one transaction. *on_lost_marker* says what becomes of them if the last
    run was killed and it can no longer be found out whether they were written: ``"refuse"`` raises, ``"repeat"``
    writes them, perhaps once more, ``"drop"`` does not. A new job refuses a name that has written before, unless it is
    told to *append*.

    *config* has settings of the client (librdkafka), such as ``security.protocol``; *config_file* is a file of them,
    one ``name=value`` a line.

    Raises `DefinitionError` for a wrong option, or if the package confluent-kafka is not installed.
    """

    exactly_once: ClassVar[bool] = True
    goes_back: ClassVar[bool] = False
    checkpoint_interval: ClassVar[float | None] = 1.0

    def __init__(
        self,
        topic: str,
        servers: str | Iterable[str],
        *,
        value: Form = "json",
        key: str | Callable[[Any], Any] | None = None,
        headers: Callable[[Any], Mapping[str, str | bytes]] | None = None,
        topic_of: Callable[[Any], str | None] | None = None,
        on_lost_marker: OnLostMarker = "refuse",
        append: bool = False,
        config: Mapping[str, Any] | None = None,
        config_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._topic = _checked_topic(topic)
        self._servers = checked_servers(servers)
        if value not in _WRITERS:
            raise DefinitionError(f"value={value!r} is not one of 'json', 'text', 'bytes'")
        if on_lost_marker not in ("refuse", "repeat", "drop"):
            raise DefinitionError(f"on_lost_marker={on_lost_marker!r} is not one of 'refuse', 'repeat', 'drop'")
        self._write_value = _WRITERS[value]
        self._key_of = field_or_function(key, "key") if key is not None else None
        self._headers_of = headers
        self._topic_of = topic_of
        self._on_lost_marker = on_lost_marker
        self._append = append
        self._config = checked_config(config, config_file)
        require_client()
        self._job = ""
        self._transactions: Transactions | None = None
        self._pending: list[Outgoing] = []
        self._pending_bytes = 0
        self._batch = 0
        """The number of the last batch that a checkpoint has."""
        self._limit = 0

    def describe(self) -> str:
        return f"kafka://{self._servers}/{self._topic}"

    def belongs_to(self, job: str) -> None:
        self._job = job
        self.close()
        self._transactions = Transactions(f"dalsegno-{job}", self.describe(), self._servers, self._config)

    def open(self, state: dict[str, Any] | None) -> None:
        transactions = self._open_transactions()
        self._pending, self._pending_bytes = [], 0
        self._batch = 0 if state is None else self._batch_of(state)
        transactions.connect()
        if state is not None and state["cluster"] != transactions.cluster and state["outputs"]:
            raise RestoreError(
                f"the last checkpoint keeps {len(state['outputs']):,} outputs for {state['topic']!r} of the Kafka "
                f"cluster {state['cluster']}, but {self.describe()} is the cluster {transactions.cluster}. Run the job "
                "once with the cluster that it wrote to, or give it a new name"
            )
        self._limit = transactions.limit_of(self._topic)
        if state is None or (self._moved(state) and not state["outputs"]):
            self._begin(transactions)
        else:
            self._go_on(transactions, state)

    def _begin(self, transactions: Transactions) -> None:
        marker = transactions.read_marker(self._topic)
        if marker is not None and marker.batch > self._batch and not self._append:
            raise RestoreError(
                f"a job {self._job!r} has written {marker.batch:,} batches of outputs to {self.describe()}, and its "
                "checkpoints are not here, so all outputs would be written again. Put its checkpoints and its store "
                "back, or give this job another name. To write them in any case, use append=True (--append)"
            )
        transactions.take_over(self._topic, lambda found: self._batch)

    def _go_on(self, transactions: Transactions, state: dict[str, Any]) -> None:
        kept, topic = bool(state["outputs"]), state["topic"]

        def settled(marker: Marker | None) -> int:
            """The batch that is written, by what the marker says."""
            if marker is not None and marker.batch > self._batch:
                raise RestoreError(
                    f"job {self._job!r} would go on from batch {self._batch:,} of its outputs to {self.describe()}, "
                    f"but batch {marker.batch:,} was written: the checkpoints are older than that, and it would be "
                    "written again. Put the newer checkpoints back, or give the job a new name"
                )
            if not kept:
                return self._batch
            if marker is not None and marker.batch >= self._batch - 1:
                return marker.batch
            return self._without_marker(marker, len(state["outputs"]), topic)

        transactions.take_over(topic, settled)

    def _without_marker(self, marker: Marker | None, outputs: int, topic: str) -> int:
        if self._on_lost_marker == "refuse":
            found = "gone" if marker is None else f"{marker.batch:,}"
            raise RestoreError(
                f"the last run of job {self._job!r} was killed, and whether its last {outputs:,} outputs were written "
                f"to {topic!r} of {self.describe()} can no longer be found out: the offset of group "
                f"'dalsegno-{self._job}', which tells, was to be {self._batch - 1:,} or {self._batch:,} and is "
                f"{found}; Kafka drops it days after it was last set (offsets.retention.minutes), or with the topic. "
                "Look into the topic for their header dalsegno-output-id, then use on_lost_marker=repeat, or drop, once"
            )
        return self._batch if self._on_lost_marker == "drop" else self._batch - 1

    def _batch_of(self, state: dict[str, Any]) -> int:
        if state.get("kind") != _KIND:
            raise RestoreError(
                f"this job has written to another kind of sink than {self.describe()}. Go on with that one, or give "
                "the job a new name"
            )
        return count_in(state, "batch", self.describe(), other="sink was written")

    def check(self, output: object, output_id: str) -> None:
        self._outgoing(None, output, output_id)

    def write(self, output: object, output_id: str) -> None:
        self.write_for(None, output, output_id)

    def write_for(self, key: object, output: object, output_id: str) -> None:
        self._open_transactions()
        outgoing = self._outgoing(key, output, output_id)
        self._pending.append(outgoing)
        self._pending_bytes += outgoing.size

    @property
    def is_full(self) -> bool:
        return self._pending_bytes >= _FULL_BYTES

    def snapshot(self) -> dict[str, Any]:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._batch += bool(pending)
        return self._state([outgoing.as_json() for outgoing in pending])

    def _state(self, outputs: list[Any]) -> dict[str, Any]:
        cluster = self._open_transactions().cluster
        return {"kind": _KIND, "cluster": cluster, "topic": self._topic, "batch": self._batch, "outputs": outputs}

    def _moved(self, state: dict[str, Any]) -> bool:
        cluster = self._open_transactions().cluster
        return bool(state["topic"] != self._topic or state["cluster"] != cluster)

    def flush(self, state: dict[str, Any]) -> None:
        pass

    def deliver(self, state: dict[str, Any]) -> dict[str, Any] | None:
        transactions = self._open_transactions()
        moved = self._moved(state)
        if not state["outputs"] and not moved:
            return None
        if state["outputs"]:
            batch = [Outgoing.of_json(outgoing) for outgoing in state["outputs"]]
            transactions.write(state["topic"], state["batch"], batch)
        if moved:
            transactions.take_over(self._topic, lambda found: state["batch"])
        return {**state, "cluster": transactions.cluster, "topic": self._topic, "outputs": []}

    def interrupt(self, seconds: float) -> None:
        if self._transactions is not None:
            self._transactions.interrupt(seconds)

    def close(self) -> None:
        if self._transactions is not None:
            self._transactions.close()
        self._transactions = None

    def _open_transactions(self) -> Transactions:
        if self._transactions is None:
            raise StoreError(f"{self.describe()} is not open for writing. Call belongs_to() and open() first.")
        return self._transactions

    def _outgoing(self, key: object, output: Any, output_id: str) -> Outgoing:
        name = f"the output {output_id!r}"
        try:
            topic = self._topic_of(output) if self._topic_of is not None else None
            given = dict(self._headers_of(output)) if self._headers_of is not None else {}
            if self._key_of is not None:
                key = self._key_of(output)
        except DalSegnoError:
            raise
        except Exception as error:
            raise StoreError(f"{name} has no topic, key or headers: {type(error).__name__}: {error}") from error
        headers = [(OUTPUT_ID, output_id.encode()), *((header, _bytes(value)) for header, value in given.items())]
        outgoing = Outgoing(topic or self._topic, _key(key, name), self._write_value(output, name), headers)
        if outgoing.size > self._limit and outgoing.topic == self._topic:
            raise StoreError(
                f"{name} takes {outgoing.size:,} bytes with its key and headers, and {self.describe()} takes "
                f"{self._limit:,} (max.message.bytes of the topic). Emit less, or raise the topic's limit"
            )
        return outgoing


def _json(output: object, name: str) -> bytes | None:
    return to_json_line(output, root=name).removesuffix(b"\n")


def _text(output: object, name: str) -> bytes | None:
    if output is None or isinstance(output, str):
        return None if output is None else output.encode(errors="surrogatepass")
    raise StoreError(f"{name} is a {type(output).__name__}, and the sink takes text: emit a str, or use value='json'")


def _raw(output: object, name: str) -> bytes | None:
    if output is None or isinstance(output, bytes):
        return output
    raise StoreError(f"{name} is a {type(output).__name__}, and the sink takes bytes: emit bytes, or use value='json'")


_WRITERS = {"json": _json, "text": _text, "bytes": _raw}


def _key(key: object, name: str) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode(errors="surrogatepass")
    return _json(key, f"the key of {name}")


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


def _checked_topic(topic: object) -> str:
    if not (isinstance(topic, str) and topic and "/" not in topic):
        raise DefinitionError(f"topic={topic!r}: give the name of a Kafka topic")
    return topic
