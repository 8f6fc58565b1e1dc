"""A TCP proxy in front of PostgreSQL that can lose what is on its way, and cut every connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """`url` leads through it. While `answering` is false, the server gets everything, and its answers are lost."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self.url = ""
        self.answering = True
        self.delay = 0.0
        self.connections = 0
        self.lost = asyncio.Event()
        """Set when an answer was lost."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        user = self._server.netloc.rpartition("@")[0]
        self.url = urlunsplit(self._server._replace(netloc=f"{user}@127.0.0.1:{port}"))
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cut all connections on both sides, without a word."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, to_server = await asyncio.open_connection(self._server.hostname, self._server.port)
        self._writers |= {writer, to_server}
        for task in (self._copy(reader, to_server, False), self._copy(there, writer, True)):
            running = asyncio.create_task(task)
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                if answers and not self.answering:
                    self.lost.set()
                    continue
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.close()


def secret_of(url: str) -> str:
    return urlsplit(url).password or ""
