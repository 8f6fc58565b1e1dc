"""What the source and the sink of Kafka topics share: addresses, options of the client, and what its errors mean.

The client is confluent-kafka, the extra ``kafka`` of this package; it is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from dalsegno.errors import DalSegnoError, DefinitionError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

    from dalsegno.runners.kafka_sink import KafkaSink
    from dalsegno.runners.kafka_source import KafkaSource

_T = TypeVar("_T")

START_SECONDS = 30.0
"""How long the start of a run waits for a broker."""
REQUEST_SECONDS = 5.0
WARN_AFTER_SECONDS = 5.0
"""What is waited for longer than this is worth a warning."""
_WARN_EVERY_SECONDS = 30.0

_logger = logging.getLogger("dalsegno")
_client_logger = logging.getLogger("dalsegno.kafka")
_client_logger.addHandler(logging.NullHandler())
_client_logger.propagate = False
"""What the client itself logs, many lines a second when a broker is away. Set ``propagate`` to see it."""

_OURS = {
    "bootstrap.servers": "give the servers",
    "metadata.broker.list": "give the servers",
    "group.id": "give the source a group",
    "enable.auto.commit": "offsets are kept in the job's checkpoints",
    "enable.auto.offset.store": "offsets are kept in the job's checkpoints",
    "auto.offset.reset": "say what a gap means with on_gap",
    "enable.partition.eof": "the source needs it",
    "enable.idempotence": "the sink needs it",
    "transactional.id": "it is made of the job's name",
}


def admin_module() -> Any:
    """``confluent_kafka.admin``, which does not say what of it is public, nor the types of all of that."""
    import confluent_kafka.admin

    return confluent_kafka.admin


def require_client() -> None:
    """Raise `DefinitionError` with what to install, if the client is not there."""
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise DefinitionError(
            "Kafka topics need the package confluent-kafka, which cannot be imported "
            f"({error}): pip install 'dalsegno[kafka]'"
        ) from error


class KafkaAddress(NamedTuple):
    """What a URL ``kafka://host:9092,host:9092/topic?option=value`` says."""

    servers: str
    topics: list[str]
    options: dict[str, str]
    """Options whose names have no dot."""
    config: dict[str, str]
    """Settings of the client, whose names have one."""

    @classmethod
    def of(cls, url: str) -> KafkaAddress:
        """Raises `DefinitionError` that does not show a password."""
        parts = urlsplit(url)
        account, _, servers = parts.netloc.rpartition("@")
        shown = f"kafka://{servers}{parts.path}"
        topics = [unquote(name) for name in parts.path.removeprefix("/").split(",")]
        if parts.scheme != "kafka" or not servers or parts.fragment or not all(topics) or "/" in "".join(topics):
            raise DefinitionError(f"{shown!r} names no Kafka topic: write kafka://HOST:PORT/TOPIC")
        config = _account(account)
        options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            (config if "." in name else options)[name] = value
        return cls(servers, topics, options, config)


def _account(account: str) -> dict[str, str]:
    if not account:
        return {}
    name, _, password = account.partition(":")
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": unquote(name),
        "sasl.password": unquote(password),
    }


def source_of(url: str, *, until_end: bool = False) -> KafkaSource:
    """The source that *url* names; its options are the arguments of `KafkaSource` that have a text form."""
    from dalsegno.runners.kafka_source import KafkaSource

    address = KafkaAddress.of(url)
    flags: dict[str, Any] = {"until_end": True} if until_end else {}
    for name in ("metadata", "until_end"):
        if name in address.options:
            flags[name] = _flag(name, address.options.pop(name))
    options: Any = _known(address.options, {"value", "key", "group", "start", "on_gap", "config_file"})
    return KafkaSource(address.topics, address.servers, **options, **flags, config=address.config)


def sink_of(url: str, *, append: bool = False) -> KafkaSink:
    """The sink that *url* names; its options are the arguments of `KafkaSink` that have a text form."""
    from dalsegno.runners.kafka_sink import KafkaSink

    address = KafkaAddress.of(url)
    if len(address.topics) > 1:
        raise DefinitionError(f"a sink has one topic, not {address.topics!r}; see topic_of of KafkaSink for more")
    options: Any = _known(address.options, {"value", "key", "on_lost_marker", "config_file"})
    return KafkaSink(address.topics[0], address.servers, **options, append=append, config=address.config)


def _known(options: dict[str, str], known: set[str]) -> dict[str, str]:
    if strange := options.keys() - known:
        raise DefinitionError(
            f"a Kafka address has no option {sorted(strange)[0]!r} here; there are {', '.join(sorted(known))}, and the "
            "settings of the client, all of which have a dot in their names"
        )
    return options


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise DefinitionError(f"{name}={value!r} in a Kafka address: write true or false")
    return value == "true"


def checked_config(config: Mapping[str, Any] | None, config_file: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The client's settings of a file of ``name=value`` lines and of *config*, which goes before it."""
    merged = {**(_read_config(Path(config_file)) if config_file is not None else {}), **(config or {})}
    for name in merged.keys() & _OURS.keys():
        raise DefinitionError(f"the setting {name!r} of the Kafka client is not free: {_OURS[name]}")
    return merged


def _read_config(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"the settings of the Kafka client cannot be read from {str(path)!r}: {error}") from error
    config = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not (equals and name.strip()):
            raise DefinitionError(f"{path}, line {number}: settings of the Kafka client are written name=value")
        config[name.strip()] = value.strip()
    return config


def checked_servers(servers: object) -> str:
    """Servers as the client takes them: one text, or several."""
    if isinstance(servers, Iterable) and not isinstance(servers, str | bytes):
        servers = ",".join(map(str, servers))
    if not (isinstance(servers, str) and servers.strip()):
        raise DefinitionError(f"servers={servers!r}: give the address of a Kafka broker, as in 'localhost:9092'")
    return servers


class Watch:
    """Remembers what the client says of its connections, and warns of it now and then. Used in several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.refused: KafkaError | None = None
        """The client was not let in: wrong credentials, wrong certificates."""
        self.last: KafkaError | None = None
        self._warned = -_WARN_EVERY_SECONDS

    def on_error(self, error: KafkaError) -> None:
        self.last = error
        if error.code() in _codes("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
            self.refused = error

    def warn(self, what: str) -> None:
        """Warn, unless that was done a moment ago."""
        if time.monotonic() - self._warned >= _WARN_EVERY_SECONDS:
            self._warned = time.monotonic()
            _logger.warning("%s: %s", self._name, what)

    def why(self, error: object) -> str:
        """*error*, with what is behind it."""
        said = [text_of(error)] + ([text_of(self.last)] if self.last is not None else [])
        return "; ".join(dict.fromkeys(said))


def client_config(servers: str, config: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
    return {
        "client.id": "dalsegno",
        "reconnect.backoff.ms": 250,
        "reconnect.backoff.max.ms": 5_000,
        **config,
        "bootstrap.servers": servers,
        "error_cb": watch.on_error,
        "logger": _client_logger,
    }


def made(make: Callable[[], _T]) -> _T:
    """What *make*, the constructor of a client, gives; `DefinitionError` for settings that it does not take."""
    from confluent_kafka import KafkaException

    try:
        return make()
    except (KafkaException, ValueError, TypeError) as error:
        raise DefinitionError(f"the Kafka client does not take its settings: {text_of(error)}") from error


def ask(
    admin: AdminClient,
    watch: Watch,
    request: Callable[[], _T],
    failed: type[DalSegnoError],
    about: str,
    seconds: Callable[[], float],
) -> _T:
    """The answer to *request*, tried again while no broker answers, for so many *seconds* as are left each time.

    Raises *failed* when they are over, or at once when the client is not let in. What else the broker answers is raised
    as it is, a `KafkaException`.
    """
    from confluent_kafka import KafkaException

    while True:
        admin.poll(0)
        try:
            return request()
        except (KafkaException, TimeoutError) as error:
            admin.poll(0.1)  # for what is said of the connection
            code = code_of(error)
            if watch.refused is not None:
                raise failed(f"{about}: the Kafka client is not let in: {text_of(watch.refused)}") from error
            if code is not None and not is_passing(code):
                raise
            if seconds() <= 0:
                raise failed(
                    f"{about}: no Kafka broker answers ({watch.why(error)}). Check the address and whether the broker "
                    "runs, then start the job again"
                ) from error


def is_passing(code: int) -> bool:
    """Whether an error of that code goes away when a broker is back, or has made up its mind."""
    return code in _codes(
        "_TRANSPORT",
        "_ALL_BROKERS_DOWN",
        "_TIMED_OUT",
        "_TIMED_OUT_QUEUE",
        "_RESOLVE",
        "_WAIT_COORD",
        "_DESTROY",
        "_RETRY",
        "_NOENT",
        "REQUEST_TIMED_OUT",
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION",
        "BROKER_NOT_AVAILABLE",
        "NETWORK_EXCEPTION",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "NOT_COORDINATOR",
        "NOT_ENOUGH_REPLICAS",
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "CONCURRENT_TRANSACTIONS",
        "KAFKA_STORAGE_ERROR",
        "FENCED_LEADER_EPOCH",
        "UNKNOWN_LEADER_EPOCH",
        "UNSTABLE_OFFSET_COMMIT",
    )


def has_code(error: object, *names: str) -> bool:
    """Whether *error*, of the client, has the code of one of these *names*."""
    return code_of(error) in _codes(*names)


def code_of(error: object) -> int | None:
    """The code of an error of the client, None if it is none of those."""
    inner = error.args[0] if isinstance(error, Exception) and error.args else error
    code = getattr(inner, "code", None)
    return int(code()) if callable(code) else None


def text_of(error: object) -> str:
    """What an error of the client says."""
    inner: Any = error.args[0] if isinstance(error, Exception) and error.args else error
    with contextlib.suppress(AttributeError):
        return str(inner.str() or inner.name())
    return str(inner) or type(error).__name__


def _codes(*names: str) -> set[int]:
    from confluent_kafka import KafkaError

    return {getattr(KafkaError, name) for name in names if hasattr(KafkaError, name)}
