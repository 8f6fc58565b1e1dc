"""A proxy before a Kafka broker that loses what it is told to lose; it reads the requests that pass."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tests.services.kafka import Kafka
from tests.services.server import free_ports

END_TRANSACTION = 26

Loses = Callable[[int], str]
"""Is given the API key of a request: ``""`` it passes, ``"request"`` it is lost, ``"answer"`` its answer is lost.
What is lost takes the connection with it."""


class ProxiedKafka(Kafka):
    """A broker that tells its clients to come by way of a proxy; *url* is the proxy."""

    def _listeners(self, clients: int, controller: int, internal: int) -> dict[str, str]:
        (port,) = free_ports(1)
        self.proxy = Proxy(port, clients)
        advertised = f"CLIENT://127.0.0.1:{port},INTERNAL://127.0.0.1:{internal}"
        return super()._listeners(clients, controller, internal) | {"advertised.listeners": advertised}


class Proxy:
    """Listens at *port* on loopback and passes everything on to *target*, after *delay* seconds."""

    def __init__(self, port: int, target: int) -> None:
        self.url = f"127.0.0.1:{port}"
        self.loses: Loses = lambda api: ""
        self.lost: list[str] = []
        self.delay = 0.0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target)) as broker:
            swallow: set[int] = set()
            threading.Thread(target=self._answers, args=(broker, client, swallow), daemon=True).start()
            while frame := _frame(client):
                api, _, correlation = struct.unpack(">hhi", frame[4:12])
                loses = self.loses(api)
                if loses:
                    self.lost.append(loses)
                if loses == "request":
                    _cut(client, broker)
                    return
                if loses == "answer":
                    swallow.add(correlation)
                time.sleep(self.delay)
                broker.sendall(frame)
        client.close()

    def _answers(self, broker: socket.socket, client: socket.socket, swallow: set[int]) -> None:
        with suppress(OSError):
            while frame := _frame(broker):
                if struct.unpack(">i", frame[4:8])[0] in swallow:
                    break
                client.sendall(frame)
        _cut(client, broker)

    def close(self) -> None:
        self._listener.close()


def _frame(source: socket.socket) -> bytes:
    """The next request or answer with its length before it; empty at the end."""
    head = _exactly(source, 4)
    return head + _exactly(source, struct.unpack(">i", head)[0]) if head else b""


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
