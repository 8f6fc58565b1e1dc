"""A PostgreSQL server of its own, with a superuser whose password is random."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from tests.services.programs import POSTGRES_WHEEL, from_wheel, postgres_bin
from tests.services.server import Server, ServerFailed, free_ports

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    # A socket's path could be too long, and TCP is what users have.
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "32MB",
    # The crashes of the tests are those of processes, which lose nothing that was written.
    "fsync": "off",
    "log_min_messages": "warning",
}

INITDB = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]


class Postgres(Server):
    """Args:
    settings: server settings on top of `SETTINGS`.
    files: content of files in the data folder, such as certificates; settings name them relative to it.
    hba: lines for the top of ``pg_hba.conf``.
    """

    kind = "postgres"
    stop_signal = signal.SIGINT  # "fast": sessions are ended, nothing is lost
    dies_with_guard = signal.SIGQUIT  # at once, but its shared memory is given back

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        hba: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.settings, self.files, self.hba = {**SETTINGS, **(settings or {})}, dict(files or {}), hba

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new, empty database, which is dropped at the end whoever is still connected."""
        name = f"test_{secrets.token_hex(8)}"
        self._execute("CREATE DATABASE {} TEMPLATE template0", name)
        try:
            yield urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))
        finally:
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: str, name: str) -> None:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def _user(self) -> int | None:
        # PostgreSQL refuses to run as root.
        return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None

    def _prepare(self) -> list[str]:
        programs, data, user = self._programs(), self.folder / "data", self._user()
        if user is not None:
            os.chown(self.folder, user, user)
        password, (port,) = secrets.token_urlsafe(12), free_ports(1)
        self._write_files({"password": password.encode()}, self.folder)
        self._run(
            [str(programs / "initdb"), "--pgdata", str(data), "--username=postgres", "--pwfile=password", *INITDB]
        )
        self._write_files(self.files, data)
        hba = data / "pg_hba.conf"
        hba.write_text("\n".join([*self.hba, hba.read_text()]))
        self.url = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
        settings = {"port": str(port), **self.settings}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(programs / "postgres"), "-D", str(data), *options]

    def _programs(self) -> Path:
        """The programs, where the user that runs the server can reach them: an environment may be root's alone."""
        found = postgres_bin()
        if self._user() is None or found != from_wheel(*POSTGRES_WHEEL):
            return found
        package, copy = found.parents[1], self.folder / "programs"
        # Its libraries are beside the package.
        for part in (package, *package.parent.glob(f"{package.name}.libs")):
            shutil.copytree(part, copy / part.name, symlinks=True)
        return copy.joinpath(*POSTGRES_WHEEL)

    def _probe(self) -> None:
        with psycopg.connect(self.url, connect_timeout=10) as connection:
            if connection.execute("SELECT 1").fetchone() != (1,):
                raise ServerFailed("SELECT 1 gave something else")
