"""A Kafka broker of its own: one process that is broker and controller (KRaft)."""

from __future__ import annotations

import base64
import secrets
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.services.programs import java, kafka_jars
from tests.services.server import Server, ServerFailed, free_ports

SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "log.dirs": "{folder}/data",
    "auto.create.topics.enable": "false",
    # A killed broker comes back once its predecessor is taken for dead, after 9 seconds unless set.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
    "log.cleaner.dedupe.buffer.size": "4194304",
}
# Small and quick to start: it need not last.
JVM = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
LOGGING = b"""
rootLogger.level=WARN
rootLogger.appenderRef.out.ref=out
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %c: %m%n
"""


class Kafka(Server):
    """`url` is what clients call `bootstrap.servers`.

    Args:
        settings: of the broker, on top of `SETTINGS`; ``{folder}`` in a value is the server's folder.
        files: content of files in that folder, such as key stores.
        security: how clients connect: ``PLAINTEXT``, ``SSL``, ``SASL_PLAINTEXT`` or ``SASL_SSL``.
        scram_users: name and password of users that log in by SCRAM-SHA-256, with SASL.
        client: further settings that clients need, such as user and password.
    """

    kind = "kafka"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        security: str = "PLAINTEXT",
        scram_users: Mapping[str, str] | None = None,
        client: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.settings, self.files = {**SETTINGS, **(settings or {})}, dict(files or {})
        self.security, self.scram_users, self.client = security, dict(scram_users or {}), dict(client or {})

    @property
    def client_settings(self) -> dict[str, str]:
        """What a producer, consumer or admin client needs to connect."""
        user = next(iter(self.scram_users.items()), None)
        scram = {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": user[0], "sasl.password": user[1]} if user else {}
        return {"bootstrap.servers": self.url, "security.protocol": self.security, **scram, **self.client}

    @contextmanager
    def topic(self, partitions: int = 1, config: Mapping[str, str] | None = None) -> Iterator[str]:
        """The name of a new topic, which is deleted at the end."""
        name, admin = f"test-{secrets.token_hex(8)}", AdminClient({**self.client_settings})
        admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])[name].result(60)
        try:
            yield name
        finally:
            admin.delete_topics([name])[name].result(60)

    def _prepare(self) -> list[str]:
        clients, controller, internal = free_ports(3)
        self.url = f"127.0.0.1:{clients}"
        settings = self._listeners(clients, controller, internal) | self.settings | self._sasl()
        content = "".join(f"{name}={value.replace('{folder}', str(self.folder))}\n" for name, value in settings.items())
        self._write_files(
            {"server.properties": content.encode(), "log4j2.properties": LOGGING, **self.files}, self.folder
        )
        self._run(self._java("kafka.tools.StorageTool", "format", "-c", "server.properties", *self._identity()))
        return self._java("kafka.Kafka", "server.properties")

    def _listeners(self, clients: int, controller: int, internal: int) -> dict[str, str]:
        # The broker speaks to itself without TLS and passwords, whatever clients need.
        at = {"CLIENT": clients, "CONTROLLER": controller, "INTERNAL": internal}
        protocols = {"CLIENT": self.security, "CONTROLLER": "PLAINTEXT", "INTERNAL": "PLAINTEXT"}
        return {
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in at.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "inter.broker.listener.name": "INTERNAL",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        }

    def _sasl(self) -> dict[str, str]:
        if not self.scram_users:
            return {}
        login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        return {
            "sasl.enabled.mechanisms": "SCRAM-SHA-256",
            "listener.name.client.scram-sha-256.sasl.jaas.config": login,
        }

    def _identity(self) -> list[str]:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        users = [f"SCRAM-SHA-256=[name={name},password={secret}]" for name, secret in self.scram_users.items()]
        # Joined by "=", since an identity may begin with a dash.
        return [f"--cluster-id={cluster}", *(part for user in users for part in ("--add-scram", user))]

    def _java(self, *arguments: str) -> list[str]:
        classpath = ":".join(map(str, kafka_jars()))
        logging = f"-Dlog4j2.configurationFile={self.folder}/log4j2.properties"
        return [str(java()), *JVM, logging, "-cp", classpath, *arguments]

    def _probe(self) -> None:
        # Without a logger the client writes to standard error that the broker cannot be reached yet.
        admin = AdminClient({**self.client_settings, "log_level": 0, "socket.connection.setup.timeout.ms": 2000})
        if not admin.list_topics(timeout=3).brokers:
            raise ServerFailed("the answer names no broker")
