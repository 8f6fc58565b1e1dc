"""What the URL of a Kafka store says, and what the client library is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote

from dalsegno.errors import DefinitionError

Unreadable = Literal["stop", "skip"]

_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,150}")
_NUMBERS = {"partitions": (1, 1000), "replication": (1, 100), "timeout": (1, 3600), "transaction_timeout": (1, 900)}
_OPTIONS = (*_NUMBERS, "unreadable", "settings")

_OURS = frozenset(
    {
        "bootstrap.servers",
        "metadata.broker.list",
        "acks",
        "request.required.acks",
        "enable.idempotence",
        "transactional.id",
        "group.id",
        "isolation.level",
        "enable.auto.commit",
        "auto.commit.enable",
        "enable.auto.offset.store",
        "auto.offset.reset",
        "enable.partition.eof",
        "partitioner",
        "message.max.bytes",
        "transaction.timeout.ms",
    }
)
"""Settings that the promises of the store rest on; nobody else may choose them."""

_OF_PRODUCERS = re.compile(r"compression\.|linger\.ms|batch\.|queue\.buffering\.|message\.timeout|delivery\.timeout")
_OF_CONSUMERS = re.compile(r"fetch\.|queued\.|check\.crcs|max\.partition\.fetch|receive\.message\.max")


@dataclass(frozen=True)
class Settings:
    """Where a store is and how it is reached. Times are in seconds."""

    servers: str
    prefix: str
    """What the names of its topics begin with."""
    partitions: int = 8
    """Partitions for records of the topic of a new job."""
    replication: int | None = None
    """Replicas of the topic of a new job; None is what the brokers are set to."""
    timeout: float = 30.0
    """How long anything may take before it fails. Recovery may take longer, as long as it gets on."""
    transaction_timeout: float = 30.0
    """How long a write of a worker that died or hangs can hold up the workers that read the same partition."""
    unreadable: Unreadable = "stop"
    """What becomes of a message of the topic that no store has written: an error, or a warning."""
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of librdkafka."""

    def __post_init__(self) -> None:
        for name in self.client.keys() & _OURS:
            raise DefinitionError(
                f"{self}: what the store promises rests on {name!r}, so it cannot be set; leave it out of the URL"
            )

    def __str__(self) -> str:
        return f"kafka://{self.servers}/{self.prefix}"

    def common(self) -> dict[str, str | int | float | bool]:
        """Settings of every client."""
        mine: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.servers,
            "client.id": "dalsegno",
            "reconnect.backoff.max.ms": 2000,
            "retry.backoff.ms": 20,
            "socket.timeout.ms": int(self.timeout * 1000),
            "socket.keepalive.enable": True,
        }
        neither = {
            name: value
            for name, value in self.client.items()
            if not _OF_PRODUCERS.match(name) and not _OF_CONSUMERS.match(name)
        }
        return mine | neither

    def producer(self, largest: int) -> dict[str, str | int | float | bool]:
        """Settings of a producer; *largest* is what the topic takes for a message, in bytes."""
        mine: dict[str, str | int | float | bool] = {
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": "lz4",
            "linger.ms": 0,
            "message.max.bytes": largest,
            "batch.size": largest,
            "queue.buffering.max.kbytes": 1_048_576,
            # The client library wants it no longer than a transaction may take.
            "socket.timeout.ms": int(min(self.timeout, self.transaction_timeout) * 1000),
        }
        return self.common() | mine | {name: v for name, v in self.client.items() if _OF_PRODUCERS.match(name)}

    def consumer(self) -> dict[str, str | int | float | bool]:
        """Settings of a consumer that reads what is decided, from given positions, and says where it ends."""
        mine: dict[str, str | int | float | bool] = {
            "group.id": f"{self.prefix}.dalsegno",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "check.crcs": True,
            # A read goes to an end that is there already; only beyond the last message does a broker wait, for nothing.
            "fetch.wait.max.ms": 10,
        }
        return self.common() | mine | {name: v for name, v in self.client.items() if _OF_CONSUMERS.match(name)}


def parse_url(url: str) -> Settings:
    """The settings in ``kafka://host:port[,host:port]/topic-prefix?option=value``; `DefinitionError` if there are none.

    Options with a dot in their name are librdkafka's.
    """
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    servers, slash, prefix = place.partition("/")
    shown = f"{scheme}://{place}"
    if not servers or not all(_is_server(server) for server in servers.split(",")):
        raise DefinitionError(f"{shown!r} names no brokers: write 'kafka://host:port[,host:port]/topic-prefix'")
    prefix = unquote(prefix)
    if not slash or not _PREFIX.fullmatch(prefix):
        raise DefinitionError(
            f"{shown!r} names no topic prefix of up to 150 letters, digits and ._-: write "
            f"'kafka://{servers}/topic-prefix'"
        )
    return _with_options(shown, servers, prefix, _options(shown, query))


def _is_server(server: str) -> bool:
    host, colon, port = server.rpartition(":")
    return bool(colon and host and port.isdecimal() and "@" not in host and 0 < int(port) < 65536)


def _options(shown: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DefinitionError(f"{shown!r}: what follows the question mark is not 'option=value&option=value'") from None
    options: dict[str, str] = {}
    for name, value in pairs:
        if name in options:
            raise DefinitionError(f"{shown!r}: the option {name!r} is there twice")
        if "." not in name and name not in _OPTIONS:
            raise DefinitionError(
                f"{shown!r}: there is no option {name!r}; there are {', '.join(_OPTIONS)}, and the settings of "
                "librdkafka, which have a dot in their names"
            )
        options[name] = value
    return options


def _with_options(shown: str, servers: str, prefix: str, options: dict[str, str]) -> Settings:
    numbers = {name: _number(shown, name, options[name]) for name in _NUMBERS if name in options}
    unreadable = options.get("unreadable", "stop")
    if unreadable not in ("stop", "skip"):
        raise DefinitionError(f"{shown!r}: unreadable is 'stop' or 'skip', not {unreadable!r}")
    client = _file(shown, options["settings"]) if "settings" in options else {}
    client |= {name: value for name, value in options.items() if "." in name}
    return Settings(
        servers,
        prefix,
        partitions=numbers.get("partitions", Settings.partitions),
        replication=numbers.get("replication"),
        timeout=numbers.get("timeout", Settings.timeout),
        transaction_timeout=numbers.get("transaction_timeout", Settings.transaction_timeout),
        unreadable="skip" if unreadable == "skip" else "stop",
        client=client,
    )


def _number(shown: str, name: str, text: str) -> int:
    low, high = _NUMBERS[name]
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise DefinitionError(f"{shown!r}: {name} is a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _file(shown: str, name: str) -> dict[str, str]:
    """The ``name=value`` lines of a file, so that a password need not be in a URL."""
    try:
        lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{shown!r}: the file of settings {name!r} cannot be read: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        setting, equals, value = line.partition("=")
        if not equals:
            raise DefinitionError(f"{shown!r}: line {number} of {name!r} is not 'name=value'")
        found[setting.strip()] = value.strip()
    return found
