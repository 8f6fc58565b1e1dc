"""The fixtures, and the servers that all workers of one test run share.

The process that leads the run owns them: it holds the write end of a named pipe open, which every guard reads.
Whichever worker needs a server first starts it, under a lock; the others find its address in a file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.services.kafka import Kafka
from tests.services.postgres import Postgres
from tests.services.server import Server

RUN = pytest.StashKey["Run"]()
OWN_SERVERS = {"postgres": "DALSEGNO_TEST_POSTGRES", "kafka": "DALSEGNO_TEST_KAFKA"}
NEED_SERVERS = {
    "postgres_server",
    "postgres_url",
    "kafka_server",
    "kafka_topic",
    "private_postgres",
    "private_kafka",
}
AnyServer = TypeVar("AnyServer", bound=Server)


class Run:
    """One test run: a folder that its processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._owner = folder, -1

    @classmethod
    def begin(cls) -> Run:
        """Makes this process the owner of the servers that are going to be started."""
        run = cls(Path(tempfile.mkdtemp(prefix="dalsegno-run-")))
        os.mkfifo(run.folder / "owner")
        run._owner = os.open(run.folder / "owner", os.O_RDWR | os.O_CLOEXEC)
        return run

    def end(self) -> None:
        """Lets the guards stop the servers, and waits for them."""
        with self._locked():
            # The guards may remove this run's folder as soon as its owner has gone.
            started = [Path(path.read_text()) for path in self.folder.glob("*.folder")]
            os.close(self._owner)
            deadline = time.monotonic() + 60
            while any(folder.exists() for folder in started) and time.monotonic() < deadline:
                time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)

    def server(self, kind: type[AnyServer]) -> AnyServer:
        """The shared server of a kind: the one that the environment names, or the run's, started when it is not yet."""
        if given := os.environ.get(OWN_SERVERS[kind.kind]):
            return kind.at(given)
        address = self.folder / f"{kind.kind}.url"
        with self._locked():
            if not address.exists():
                self._start(kind, address)
        return kind.at(address.read_text())

    def _start(self, kind: type[Server], address: Path) -> None:
        # Not blocking: if the owner is gone already, the guard reads the end of the file and ends.
        owner = os.open(self.folder / "owner", os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.set_blocking(owner, True)
            server = kind().launch(owner, self.folder)
        finally:
            os.close(owner)
        address.with_suffix(".folder").write_text(str(server.folder))
        server.release()
        address.write_text(server.url)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def pytest_configure(config: pytest.Config) -> None:
    shared = getattr(config, "workerinput", {}).get("services")
    config.stash[RUN] = Run(Path(shared)) if shared else Run.begin()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["services"] = str(node.config.stash[RUN].folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (run := config.stash.get(RUN, None)):
        run.end()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who asks for a server is marked, so that no test is forgotten."""
    for item in items:
        if NEED_SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.services)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Postgres:
    """The PostgreSQL that the tests of a run share; it cannot be stopped."""
    return request.config.stash[RUN].server(Postgres)


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """The URL of a new, empty database."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture(scope="session")
def kafka_server(request: pytest.FixtureRequest) -> Kafka:
    """The Kafka that the tests of a run share; it cannot be stopped."""
    return request.config.stash[RUN].server(Kafka)


@pytest.fixture
def kafka_topic(kafka_server: Kafka) -> Iterator[Callable[..., str]]:
    """Makes a topic (`partitions`, `config`) and returns its name; it is deleted at the end of the test."""
    with ExitStack() as topics:

        def make(partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
            return topics.enter_context(kafka_server.topic(partitions, config))

        yield make


@pytest.fixture
def private_postgres() -> Iterator[Callable[..., Postgres]]:
    """Starts a PostgreSQL of the test's own, given the arguments of `Postgres`; it ends with the test."""
    yield from _private(Postgres)


@pytest.fixture
def private_kafka() -> Iterator[Callable[..., Kafka]]:
    """Starts a Kafka of the test's own, given the arguments of `Kafka`; it ends with the test."""
    yield from _private(Kafka)


def _private(kind: Callable[..., AbstractContextManager[AnyServer]]) -> Iterator[Callable[..., AnyServer]]:
    with ExitStack() as servers:

        def start(**settings: Any) -> AnyServer:
            server: Any = kind(**settings)
            servers.callback(server.close)
            return server.launch()  # type: ignore[no-any-return]

        yield start
