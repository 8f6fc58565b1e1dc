"""What PostgreSQL and Kafka have in common: a guarded process, an address, and that only its starter ends it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, Self

GUARD = Path(__file__).with_name("guard.py")
# A server that is not ready after this many seconds has failed; a machine under load may need most of it.
PATIENCE = 120.0
# Below the ports that systems give to outgoing connections: one of those would take the port of a stopped server.
PORTS = range(20_000, 32_000)
PORT_TRIES = 5


class ServerFailed(Exception):
    """A server did not start, or ended by itself."""


class NotOurs(Exception):
    """A server that somebody else started may be used, but not stopped."""


class Server(ABC):
    """A server that is started here, or, made by `at`, one that runs already.

    `url` says how to reach it. `close` stops it and removes its data; so does the end of this process.
    """

    kind: str
    # The signal for a controlled, quick stop, and the one that the kernel sends when the guard dies.
    stop_signal = signal.SIGTERM
    dies_with_guard = signal.SIGKILL

    def __init__(self) -> None:
        self.url = ""
        self.folder = Path()
        self._guard: subprocess.Popen[bytes] | None = None
        self._commands = False
        self._log_file: IO[bytes] | None = None

    @classmethod
    def at(cls, url: str) -> Self:
        """The server at `url`, started by somebody else.

        Raises:
            ServerFailed: there is none.
        """
        server = cls()
        server.url = url
        server._wait_until_ready(10.0)
        return server

    def launch(self, owner: int | None = None, run: Path | None = None) -> Self:
        """Starts it with new data on ports that are free, and returns when it takes connections.

        Args:
            owner: a descriptor whose other end the owner of the server holds; `None` when that is this process.
            run: with `owner`, the folder that the owner shares with those who use its servers.

        Raises:
            ServerFailed: it did not start; the error shows the end of its log.
        """
        for remaining in reversed(range(PORT_TRIES)):
            self.folder = Path(tempfile.mkdtemp(prefix=f"dalsegno-{self.kind}-"))
            try:
                self._begin(owner, run)
                return self
            except ServerFailed:
                self.close()
                # Somebody else may have taken a port since it was found free.
                if not remaining:
                    raise
            except BaseException:
                self.close()
                raise
        raise AssertionError("unreachable")

    def _begin(self, owner: int | None, run: Path | None) -> None:
        spec = {
            "command": self._prepare(),
            "folder": str(self.folder),
            "user": self._user(),
            "stop": self.stop_signal,
            "dies_with_guard": self.dies_with_guard,
            "run": str(run) if run else None,
        }
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), json.dumps(spec)],
            stdin=subprocess.PIPE if owner is None else owner,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._commands = owner is None
        self._answer()
        # Held open: the guard may remove the folder before the log has been shown.
        self._log_file = (self.folder / "log").open("rb")
        self._wait_until_ready(PATIENCE)

    @abstractmethod
    def _prepare(self) -> list[str]:
        """Makes the data in `folder`, sets `url`, and returns the command that runs the server."""

    @abstractmethod
    def _probe(self) -> None:
        """Raises unless the server takes connections."""

    def _user(self) -> int | None:
        """Who the server runs as; `None` for this process's user."""
        return None

    # -- what the starter may do --

    def stop(self) -> None:
        """Stops it in good order; its data and its address stay. Raises `NotOurs` if it was not started here."""
        self._command("stop")

    def kill(self) -> None:
        """Ends it by SIGKILL; its data and its address stay. Raises `NotOurs` if it was not started here."""
        self._command("kill")

    def start(self) -> None:
        """Starts it again after `stop` or `kill`, with the data and at the address that it had."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._command("start")
            try:
                return self._wait_until_ready(PATIENCE)
            except ServerFailed:
                # What a killed server left, such as processes that are about to end, may be in the way for a moment.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def restart(self) -> None:
        self.stop()
        self.start()

    def is_running(self) -> bool:
        """Whether the process runs. Raises `NotOurs` if it was not started here."""
        return self._command("alive") == "yes"

    def close(self) -> None:
        """Stops it and removes its data; nothing happens to a server that was not started here."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.terminate()
            for pipe in (guard.stdin, guard.stdout):
                if pipe is not None:
                    pipe.close()
            guard.wait()
        self._forget()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _forget(self) -> None:
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    def release(self) -> None:
        """Leaves it to the owner that `launch` was given."""
        self._forget()
        if self._guard is not None and self._guard.stdout is not None:
            self._guard.stdout.close()
            # Its end is waited for by nobody here.
            self._guard.returncode = 0
        self._guard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- how --

    def _command(self, command: str) -> str:
        if self._guard is None or not self._commands:
            raise NotOurs(
                f"Cannot {command} the {self.kind} server at {self.url}: others use it, or it was not started here. "
                f"A test that has to do so asks for the fixture `private_{self.kind}`."
            )
        _pipe(self._guard.stdin).write(f"{command}\n".encode())
        _pipe(self._guard.stdin).flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._guard is not None
        if line := _pipe(self._guard.stdout).readline():
            return line.decode().strip()
        raise ServerFailed(f"The guard of the {self.kind} server ended with {self._guard.wait()}.{self._log()}")

    def _wait_until_ready(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._probe()
            except Exception as exc:
                if self._has_ended():
                    raise ServerFailed(f"The {self.kind} server ended before it was ready.{self._log()}") from exc
                if time.monotonic() > deadline:
                    raise ServerFailed(
                        f"The {self.kind} server at {self.url!r} takes no connections: {exc}.{self._log()}"
                    ) from exc
            time.sleep(0.05)

    def _has_ended(self) -> bool:
        if self._guard is None:
            return False
        return not self.is_running() if self._commands else self._guard.poll() is not None

    def _log(self) -> str:
        if self._log_file is None:
            return ""
        self._log_file.seek(0)
        return "\n" + "\n".join(self._log_file.read().decode(errors="replace").splitlines()[-40:])

    # -- for the kinds of servers --

    def _write_files(self, files: dict[str, bytes], folder: Path) -> None:
        """Files that only the server's user can read, as PostgreSQL demands of keys."""
        user = self._user()
        for name, content in files.items():
            path = folder / name
            path.touch(mode=0o600)
            path.write_bytes(content)
            if user is not None:
                os.chown(path, user, user)

    def _run(self, command: list[str], **options: Any) -> None:
        user = self._user()
        if user is not None:
            options |= {"user": user, "group": user, "extra_groups": []}
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, errors="replace", check=False, **options
        )
        if done.returncode:
            raise ServerFailed(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def free_ports(count: int) -> list[int]:
    """Ports of loopback on which nothing listens now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    raise ServerFailed(f"No free port of 127.0.0.1 from {PORTS.start} to {PORTS.stop - 1}.")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
