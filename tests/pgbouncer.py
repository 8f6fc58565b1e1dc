"""A pgbouncer in transaction mode in front of a PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from tests.services.server import ServerFailed, free_ports

PROGRAMS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


@contextmanager
def pgbouncer(server_url: str, folder: Path, sessions: int) -> Iterator[str]:
    """The URL of the database of *server_url*, through a pool of *sessions* that each transaction takes one from.

    Raises `ServerFailed` when the program is not there.
    """
    program = shutil.which("pgbouncer", path=PROGRAMS)
    if program is None:
        raise ServerFailed("pgbouncer is not installed; on Debian and Ubuntu: apt-get install pgbouncer")
    parts, (port,) = urlsplit(server_url), free_ports(1)
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={parts.hostname} port={parts.port} user={parts.username} password={parts.password}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = transaction\ndefault_pool_size = {sessions}\nmax_client_conn = 500\n"
    )
    # It refuses to run as root; what it has opened it may read.
    user = {"user": pwd.getpwnam("nobody").pw_uid} if os.geteuid() == 0 else {}
    with (folder / "pgbouncer.ini").open() as settings, (folder / "log").open("w") as log:
        path = f"/dev/fd/{settings.fileno()}"
        process = subprocess.Popen(
            [program, path],
            pass_fds=[settings.fileno()],
            stderr=log,
            cwd="/",
            **user,  # type: ignore[call-overload]
        )
    url = urlunsplit(parts._replace(netloc=f"{parts.username}:unused@127.0.0.1:{port}"))
    try:
        _wait(url, process, folder / "log")
        yield url
    finally:
        process.kill()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(url, connect_timeout=10, prepare_threshold=None).close()
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"pgbouncer did not start: {error}\n{log.read_text()}") from error
            time.sleep(0.05)
        else:
            return
