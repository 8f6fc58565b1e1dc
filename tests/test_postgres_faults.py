"""The PostgreSQL store when the server, the network or the settings fail. Everything here is real."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import random
import secrets
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from dalsegno.core.records import Record
from dalsegno.errors import DefinitionError, FencedError, RecordError, StoreError
from dalsegno.stores import open_store
from dalsegno.stores.base import Covered
from dalsegno.stores.postgres import PostgresStore
from dalsegno.stores.postgres.schema import INSPECTOR_GRANTS, SCHEMA_VERSION, WORKER_GRANTS
from dalsegno.stores.postgres.settings import parse_url
from dalsegno.testing.stores import decision, in_loop, states, step
from tests.postgres_proxy import Proxy, secret_of
from tests.services.postgres import Postgres
from tests.services.server import free_ports


def with_user(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}"))


def execute(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Behind the back of the store; the rows of the last statement."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


# --- lost connections ---


@in_loop
async def _lost_answer(url: str) -> None:
    put = [step(b"1", f"m{number}") for number in range(5)]
    async with Proxy(url).running() as proxy:
        store = PostgresStore(proxy.url)
        await store.open("job", "owner")
        await store.put(put[:1])
        proxy.answering = False
        writing = asyncio.create_task(store.put(put[1:3]))
        await proxy.lost.wait()
        recorded = execute(url, "SELECT count(*) FROM dalsegno.records")
        assert recorded == [(3,)], "the write was to be committed before its answer was lost"
        proxy.answering = True
        proxy.cut()
        await writing
        await store.put(put[3:])
        assert await store.claim(b"1") == states(put, b"1")
        await store.close()


def test_a_write_whose_answer_was_lost_takes_place_once(postgres_url: str) -> None:
    _lost_answer(postgres_url)


@in_loop
async def _lost_prune(url: str) -> None:
    async with Proxy(url).running() as proxy:
        store = PostgresStore(proxy.url)
        await store.open("job", "owner")
        await store.put([step(b"1", f"m{number}") for number in range(7)])
        # The commit of a prune is its own message, so the answer before it must come through: lose what comes after
        # the records are gone for everyone.
        pruning = asyncio.create_task(_prune_and_lose(store, proxy, url))
        assert await pruning == 5
        assert store.pruned_through == 3
        assert len(await store.list(b"1")) == 2
        await store.close()


async def _prune_and_lose(store: PostgresStore, proxy: Proxy, url: str) -> int:
    covered = Covered(3, [(b"1", f"m{number}") for number in range(5)])
    blocker = await psycopg.AsyncConnection.connect(url)
    await blocker.execute("SELECT FROM dalsegno.records WHERE message = 'm0' FOR UPDATE")
    pruning = asyncio.create_task(store.prune(covered))
    watcher = await psycopg.AsyncConnection.connect(url, autocommit=True)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    seen = await (await watcher.execute(waiting)).fetchone()
    while seen == (0,):
        await asyncio.sleep(0.01)
        seen = await (await watcher.execute(waiting)).fetchone()
    # It waits in the middle: the connection goes, and its transaction may still go through or not.
    proxy.cut()
    await blocker.rollback()
    await blocker.close()
    await watcher.close()
    return (await pruning).records


def test_a_prune_that_lost_its_connection_is_done_and_counted(postgres_url: str) -> None:
    _lost_prune(postgres_url)


@pytest.mark.parametrize("seed", range(3))
def test_connections_cut_at_any_moment_lose_and_repeat_nothing(postgres_url: str, seed: int) -> None:
    choose = random.Random(seed)

    @in_loop
    async def run() -> None:
        async with Proxy(postgres_url).running() as proxy:
            store = PostgresStore(proxy.url)
            await store.open("job", "owner")
            put: list[Record] = []

            async def cut() -> None:
                while True:
                    await asyncio.sleep(choose.uniform(0, 0.02))
                    proxy.cut()
                    await asyncio.sleep(0.1)

            cutting = asyncio.create_task(cut())
            for number in itertools.count():
                if number >= 150 and proxy.connections > 5:  # a quick machine comes to 150 before that
                    break
                batch = [step(b"1", f"m{number}", part) for part in range(3)]
                await store.put(batch)
                put += batch
            removed = (await store.prune(Covered(1, [(b"1", f"m{number}") for number in range(50)]))).records
            cutting.cancel()
            assert removed == 150
            assert await store.list(b"1") == states(put[150:], b"1")
            await store.close()

    run()


@in_loop
async def _given_up(url: str) -> None:
    async with Proxy(url).running() as proxy:
        store = PostgresStore(f"{proxy.url}?patience=0.3")
        await store.open("job", "owner")
        await store.put([step(b"1", "before")])
        proxy.answering = False
        writing = asyncio.create_task(store.put([step(b"1", "given up")]))
        await proxy.lost.wait()
        # Lost for good: for longer than the store is patient nobody answers.
        losing = asyncio.create_task(_keep_cutting(proxy))
        with pytest.raises(StoreError, match="record a step"):
            await writing
        losing.cancel()
        proxy.answering = True
        await store.put([step(b"1", "after")])
        messages = [state.message for state in await store.list(b"1")]
        # What was given up had been committed; the next write is not taken for it.
        assert messages == ["before", "given up", "after"]
        await store.close()


async def _keep_cutting(proxy: Proxy) -> None:
    while True:
        proxy.cut()
        await asyncio.sleep(0.01)


def test_a_write_that_was_given_up_is_not_taken_for_the_next_one(postgres_url: str) -> None:
    _given_up(postgres_url)


@in_loop
async def _slow(url: str) -> None:
    async with Proxy(url).running() as proxy:
        store = PostgresStore(proxy.url)
        await store.open("job", "owner")
        proxy.delay = 0.1
        await asyncio.gather(
            store.put([step(b"1", "m", result="x" * 300_000)]), store.decisions(0), store.claim(b"2"), store.keys()
        )
        assert len(await store.list(b"1")) == 1
        await store.close()


def test_a_slow_server_is_waited_for(postgres_url: str) -> None:
    _slow(postgres_url)


def test_a_server_that_restarts_amid_writes_loses_and_repeats_nothing(
    private_postgres: Callable[..., Postgres],
) -> None:
    server = private_postgres(settings={"fsync": "on"})

    @in_loop
    async def run() -> None:
        store = PostgresStore(server.url)
        await store.open("job", "owner")
        put: list[Record] = []
        ended = asyncio.Event()

        progress = asyncio.Semaphore(0)

        async def write() -> None:
            while not ended.is_set():
                batch = [step(b"1", f"m{len(put)}", part) for part in range(2)]
                await store.put(batch)
                put.extend(batch)
                progress.release()

        async def expect_writes() -> None:
            for _ in range(progress._value + 20):
                await progress.acquire()

        writing = asyncio.create_task(write())
        for end in (server.stop, server.kill):
            await expect_writes()
            await asyncio.to_thread(end)
            assert not server.is_running()
            await asyncio.to_thread(server.start)
        await expect_writes()
        ended.set()
        await writing
        assert await store.list(b"1") == states(put, b"1")
        await store.close()

    run()


# --- opening ---


@in_loop
async def _refused(url: str, message: str, secret: str, *, patience: float = 60) -> None:
    store = PostgresStore(url + ("&" if "?" in url else "?") + f"patience={patience}")
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(StoreError, match=message) as refused:
        await store.open("job", "owner")
    if patience == 60:
        assert loop.time() - began < 14, "it was tried again"
    with pytest.raises(StoreError) as also:
        store.inspect()
    for error in (refused.value, also.value):
        chain: BaseException | None = error
        while chain is not None:
            assert secret not in str(chain) + repr(chain) + repr(store)
            chain = chain.__cause__


def test_wrong_credentials_are_one_error_and_no_secret(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    secret = secrets.token_hex(8)
    _refused(with_user(postgres_url, "postgres", secret), "password authentication failed", secret)
    _refused(with_user(postgres_url, "nobody-there", secret), "nobody-there", secret)
    _refused(postgres_url.rpartition("/")[0] + "/no_such_database", "no_such_database", secret_of(postgres_url))
    assert "trying again" not in caplog.text
    assert secret not in caplog.text


def test_a_server_that_is_down_is_one_error_after_some_patience(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    secret = secrets.token_hex(8)
    _refused(f"postgresql://ann:{secret}@127.0.0.1:{port}/db", "refused", secret, patience=2)
    assert "trying again" in caplog.text
    assert secret not in caplog.text


def test_a_server_that_comes_up_is_waited_for(private_postgres: Callable[..., Postgres]) -> None:
    server = private_postgres()
    server.stop()

    @in_loop
    async def run() -> None:
        store = PostgresStore(f"{server.url}?patience=400")
        opening = asyncio.create_task(store.open("job", "owner"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.start)
        await opening
        await store.close()

    run()


def test_a_url_that_cannot_be_read_shows_no_secret() -> None:
    for url in (
        "postgresql://ann:se%zzcret@host/db",
        "postgresql://ann:secret@host/db?no_such_option=secret",
        "postgresql://ann:secret@host/db?patience=secret",
    ):
        with pytest.raises(DefinitionError, match="cannot be read") as refused:
            open_store(url)
        assert "cret" not in str(refused.value)
        assert refused.value.__cause__ is None
    for wrong in ("schema=", f"schema={'x' * 64}", "patience=-1", "patience=nan"):
        with pytest.raises(DefinitionError, match=r"schema|patience"):
            open_store(f"postgresql://host/db?{wrong}")


def test_options_of_the_library_and_of_libpq_are_told_apart() -> None:
    settings = parse_url("postgresql://ann:pw@host:1/db?schema=a%20b&sslmode=require&patience=5&options=-c%20x%3D1")
    assert (settings.schema, settings.patience) == ("a b", 5)
    assert settings.parameters["sslmode"] == "require"
    assert settings.parameters["options"] == "-c x=1"
    assert str(settings) == "postgresql://ann@host:1/db?schema=a b"
    assert "pw" not in repr(settings)


def test_without_the_driver_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dalsegno.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "psycopg":
            raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DefinitionError, match=r"pip install 'dalsegno\[postgres\]'"):
        open_store("postgresql://ann:pw@host/db")


# --- the schema, and who may do what ---


def test_many_workers_start_at_once_on_an_empty_database(postgres_url: str) -> None:
    @in_loop
    async def run() -> None:
        stores = [PostgresStore(postgres_url) for _ in range(8)]
        await asyncio.gather(*(store.open(f"job{n}", "owner") for n, store in enumerate(stores)))
        for store in stores:
            await store.close()

    run()
    assert execute(postgres_url, "SELECT version FROM dalsegno.migrations ORDER BY version") == [
        (version,) for version in range(1, SCHEMA_VERSION + 1)
    ]


@in_loop
async def _open_and_close(url: str) -> None:
    store = PostgresStore(url)
    await store.open("job", "owner")
    await store.close()


def test_a_newer_schema_is_refused(postgres_url: str) -> None:
    _open_and_close(postgres_url)
    execute(postgres_url, f"INSERT INTO dalsegno.migrations VALUES ({SCHEMA_VERSION + 1})")
    with pytest.raises(RecordError, match=f"schema version {SCHEMA_VERSION + 1}"):
        _open_and_close(postgres_url)
    with pytest.raises(RecordError, match=f"schema version {SCHEMA_VERSION + 1}"):
        PostgresStore(postgres_url).inspect()


@pytest.fixture
def roles(postgres_url: str) -> Any:
    """A worker and an inspector with the grants that the documentation names, and one with none; dropped at the end."""
    names = {kind: f"{kind}_{secrets.token_hex(6)}" for kind in ("worker", "inspector", "stranger")}
    _open_and_close(postgres_url)
    tables = {table: f"dalsegno.{table}" for table in ("migrations", "jobs", "workers", "records", "decisions")}
    for kind, name in names.items():
        execute(postgres_url, f"CREATE ROLE {name} LOGIN PASSWORD 'pw'")
        grants = {"worker": WORKER_GRANTS, "inspector": INSPECTOR_GRANTS, "stranger": ()}[kind]
        execute(postgres_url, *(grant.format(schema="dalsegno", role=name, **tables) for grant in grants))
    yield {kind: with_user(postgres_url, name, "pw") for kind, name in names.items()}
    execute(postgres_url, *(f"DROP OWNED BY {name}; DROP ROLE {name}" for name in names.values()))


def test_roles_have_what_they_need_and_no_more(postgres_url: str, roles: dict[str, str]) -> None:
    @in_loop
    async def run() -> None:
        store = PostgresStore(roles["worker"])
        await store.open("job", "owner")
        await store.put([step(b"1", "m"), step(b"1", "n")])
        with PostgresStore(roles["inspector"]).inspect() as outside:
            assert outside.decide("job", decision(b"1", "m"))
            assert not outside.decide("job", decision(b"1", "m"))
            assert outside.jobs()[0].running
            assert len(list(outside.records("job"))) == 2
        assert len(await store.decisions(0)) == 1
        assert (await store.prune(Covered(1, [(b"1", "m")]))).records == 1
        assert await store.decisions(0) == []
        await store.close()
        for kind in ("inspector", "stranger"):
            with pytest.raises(StoreError, match=r"permission denied.*grant"):
                await PostgresStore(roles[kind]).open("job", "owner")
        with pytest.raises(StoreError, match="permission denied"):
            PostgresStore(roles["stranger"]).inspect()

    run()
    for kind, statements in {
        "worker": ("DROP TABLE dalsegno.records", "UPDATE dalsegno.records SET body = ''", "DELETE FROM dalsegno.jobs"),
        "inspector": (
            "DELETE FROM dalsegno.decisions",
            "UPDATE dalsegno.workers SET epoch = 9",
            "INSERT INTO dalsegno.migrations VALUES (99)",
        ),
    }.items():
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                execute(roles[kind], statement)


# --- durability and limits ---


def test_a_write_is_durable_where_the_server_would_not_wait_for_its_disk(postgres_url: str) -> None:
    """The local setting of each write is what the server commits by."""
    name = urlsplit(postgres_url).path[1:]
    execute(postgres_url, f"ALTER DATABASE {name} SET synchronous_commit = off")
    _open_and_close(postgres_url)
    execute(
        postgres_url,
        "CREATE TABLE seen (setting text)",
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END$$",
        "CREATE CONSTRAINT TRIGGER see AFTER INSERT OR DELETE ON dalsegno.records DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION see()",
    )

    @in_loop
    async def run() -> None:
        store = PostgresStore(postgres_url)
        await store.open("job", "owner")
        await store.put([step(b"1", "m")])
        await store.prune(Covered(1, [(b"1", "m")]))
        await store.close()

    run()
    assert execute(postgres_url, "SELECT setting FROM seen") == [("on",), ("on",)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_isolation_by_default_changes_nothing(postgres_url: str, level: str) -> None:
    name = urlsplit(postgres_url).path[1:]
    execute(postgres_url, f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")

    @in_loop
    async def run() -> None:
        store = PostgresStore(postgres_url)
        await store.open("job", "owner")
        for number in range(20):
            await asyncio.gather(
                store.put([step(b"1", f"m{number}")]), store.prune(Covered(1, [(b"1", f"m{number - 1}")]))
            )
        assert [state.message for state in await store.list(b"1")] == ["m19"]
        await store.close()

    run()


@in_loop
async def _in_parts(url: str) -> None:
    """More than fits into one statement is still one batch."""
    large = "x" * 30_000_000
    store = PostgresStore(url)
    await store.open("job", "owner")
    put = [step(b"1", "m", number, result=large) for number in range(4)]
    await store.put(put)
    assert len((await store.list(b"1"))[0].calls) == 4
    other = PostgresStore(url)
    await other.open("job", "another")
    with pytest.raises(FencedError):
        await store.put(put)
    assert execute(url, "SELECT count(*) FROM dalsegno.records") == [(4,)]
    await store.close()
    await other.close()


def test_a_batch_of_several_statements_is_atomic(postgres_url: str) -> None:
    _in_parts(postgres_url)


@in_loop
async def _large_result(url: str) -> None:
    record = step(b"1", "m", result="ä\0" * 7_000_000)
    store = PostgresStore(url)
    await store.open("job", "owner")
    await store.put([record])
    assert await store.claim(b"1") == states([record], b"1")
    await store.close()


def test_a_result_of_twenty_megabytes_is_itself(postgres_url: str) -> None:
    _large_result(postgres_url)
