"""The PostgreSQL store through pgbouncer, over TLS, and on a server that has no room left."""

from __future__ import annotations

import ipaddress
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dalsegno.errors import StoreError
from dalsegno.stores.postgres import PostgresStore
from dalsegno.testing.stores import in_loop, states, step
from tests.pgbouncer import pgbouncer
from tests.services.postgres import Postgres
from tests.test_postgres_conformance import TestPostgresStore as Suite


class TestThroughPgbouncer(Suite):
    """In transaction mode each transaction may be in another session, also two of one client."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with ExitStack() as running:
            url = running.enter_context(pgbouncer(postgres_url, tmp_path_factory.mktemp("pgbouncer"), sessions=3))
            self.url, self.places = url, {}
            yield


def test_nothing_is_left_in_a_session(postgres_url: str, tmp_path: Path) -> None:
    """The one session of a pool, after all kinds of use, is as it was."""

    def session(url: str) -> list[object]:
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
            queries = (
                # This one pgbouncer itself sets for each client.
                "SELECT name FROM pg_settings WHERE source = 'session' EXCEPT VALUES ('application_name')",
                "SELECT name FROM pg_prepared_statements",
                "SELECT name FROM pg_cursors",
                "SELECT * FROM pg_listening_channels()",
                "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
                "SELECT relname FROM pg_class WHERE relnamespace = pg_my_temp_schema()",
            )
            return [connection.execute(query.encode()).fetchall() for query in queries]

    with pgbouncer(postgres_url, tmp_path, sessions=1) as url:
        before = session(url)

        @in_loop
        async def run() -> None:
            store = PostgresStore(url)
            await store.open("job", "owner")
            await store.put([step(b"1", "m")])
            await store.list(b"1")
            with store.inspect() as outside:
                assert len(list(outside.records("job"))) == 1
            await store.close()

        run()
        assert session(url) == before


# --- TLS ---


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    by: ec.EllipticCurvePrivateKey,
    address: str | None = None,
) -> bytes:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=address is None, path_length=None), critical=True)
    )
    if address is not None:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@in_loop
async def _works(url: str) -> None:
    store = PostgresStore(url)
    await store.open("job", "owner")
    await store.put([step(b"1", "m")])
    assert await store.claim(b"1") == states([step(b"1", "m")], b"1")
    with store.inspect() as outside:
        assert outside.jobs()[0].running
    await store.close()


def test_tls_with_a_certificate_that_is_checked(
    private_postgres: Callable[..., Postgres], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, other, key = _key(), _key(), _key()
    trusted, untrusted, forged = tmp_path / "ca.pem", tmp_path / "other.pem", tmp_path / "forged.pem"
    trusted.write_bytes(_certificate("authority", authority, "authority", authority))
    untrusted.write_bytes(_certificate("other", other, "other", other))
    forged.write_bytes(_certificate("authority", other, "authority", other))
    server = private_postgres(
        settings={"ssl": "on", "ssl_cert_file": "server.crt", "ssl_key_file": "server.key"},
        files={
            "server.crt": _certificate("server", key, "authority", authority, "127.0.0.1"),
            "server.key": _pem(key),
        },
        hba=("hostnossl all all 127.0.0.1/32 reject",),
    )
    _works(f"{server.url}?sslmode=verify-full&sslrootcert={trusted}")
    named = server.url.replace("127.0.0.1", "localhost")
    for url, message in (
        (f"{server.url}?sslmode=verify-full&sslrootcert={untrusted}", "certificate verify failed"),
        (f"{server.url}?sslmode=verify-full&sslrootcert={forged}", "signature failure|certificate verify failed"),
        (f"{named}?sslmode=verify-full&sslrootcert={trusted}&hostaddr=127.0.0.1", "does not match host name"),
        (f"{server.url}?sslmode=verify-full&sslrootcert={tmp_path / 'none.pem'}", "does not exist"),
        (f"{server.url}?sslmode=disable", "pg_hba.conf rejects"),
    ):
        with pytest.raises(StoreError, match=message):
            _works(url)
    assert "trying again" not in caplog.text


def test_a_server_that_has_no_tls_is_refused_at_once(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca, key = tmp_path / "ca.pem", _key()
    ca.write_bytes(_certificate("authority", key, "authority", key))
    with pytest.raises(StoreError, match="does not support SSL"):
        _works(f"{postgres_url}?sslmode=verify-full&sslrootcert={ca}")
    assert "trying again" not in caplog.text


# --- no room ---


def limit_files(process: int, size: str) -> None:
    """Limit the size of the files of *process*, and of those that it is going to start, as the user that runs it."""
    of = os.stat(f"/proc/{process}")
    user = {"user": of.st_uid, "group": of.st_gid, "extra_groups": ()} if os.geteuid() == 0 else {}
    subprocess.run(["prlimit", f"--pid={process}", f"--fsize={size}:"], check=True, **user)  # type: ignore[call-overload]


def test_a_server_without_room_writes_nothing_and_goes_on_when_there_is_some(
    private_postgres: Callable[..., Postgres],
) -> None:
    """The limit is that of a process on the size of its files, which root of a container may set as well."""
    server = private_postgres()
    postmaster = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    choose = random.Random(1)
    large = step(b"1", "m", result=choose.randbytes(20_000_000).hex())  # does not compress to less than 20 MB

    @in_loop
    async def run() -> None:
        store = PostgresStore(server.url)
        await store.open("job", "owner")
        await store.put([step(b"1", "a")])
        await store.close()
        # A segment of the write-ahead log must still fit.
        limit_files(postmaster, str(17 * 2**20))
        await store.open("job", "owner")
        with pytest.raises(StoreError, match=r"could not extend file.*free some space"):
            await store.put([step(b"1", "b"), large])
        limit_files(postmaster, "unlimited")
        # Sessions keep the limit that they began with.
        await store.close()
        await store.open("job", "owner")
        assert await store.list(b"1") == states([step(b"1", "a")], b"1")
        await store.put([large])
        assert await store.list(b"1") == states([step(b"1", "a"), large], b"1")
        await store.close()

    run()
