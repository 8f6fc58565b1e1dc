"""A process between the owner of a server and the server; it ends both the server and the data when the owner is gone.

    python guard.py '{"command": [...], "folder": "...", "user": null, "stop": 2, "dies_with_guard": 3, "run": null}'

The owner holds the other end of the guard's standard input: however the owner ends, SIGKILL included, the guard reads
the end of the file there, stops the server and removes its folder. The server in turn dies with the guard.
Lines read are commands, and each is answered with one line; the first answer, to no command, says that it started.
Where several guards share an owner, "run" is the folder that they share as well and that goes with the owner; nobody
sends commands then, and a guard ends when its server does.

This file is run as a script: it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# How long a server may take to stop when asked, before it is killed.
PATIENCE = 20.0
PR_SET_PDEATHSIG = 1


class Guarded:
    """The server of one guard, which may run, or have been stopped, or have died."""

    def __init__(
        self, command: list[str], folder: str, user: int | None, stop: int, dies_with_guard: int, run: str | None
    ) -> None:
        self.command, self.folder, self.user = command, Path(folder), user
        self.stop_signal, self.dies_with_guard, self.run = stop, dies_with_guard, run
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        if self.alive() == "no":
            as_user: dict[str, Any] = {}
            if self.user is not None:
                as_user = {"user": self.user, "group": self.user, "extra_groups": []}
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,
                    preexec_fn=self._die_with_guard,
                    **as_user,
                )
        return str(self.process.pid) if self.process else "no"

    def _die_with_guard(self) -> None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, self.dies_with_guard)

    def alive(self) -> str:
        return "yes" if self.process is not None and self.process.poll() is None else "no"

    def stop(self) -> str:
        if self.process is not None:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
                return "killed"
        return "stopped"

    def kill(self) -> str:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        return "killed"


def lines() -> Any:
    """Lines of standard input; unbuffered, so that nothing is read beyond the command that is carried out."""
    line = b""
    while byte := os.read(0, 1):
        if byte == b"\n":
            yield line.decode()
            line = b""
        else:
            line += byte


def main() -> None:
    server = Guarded(**json.loads(sys.argv[1]))
    # Ctrl-C is the owner's business; whoever terminates the guard ends the server in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if server.run:
        signal.signal(signal.SIGCHLD, lambda *_: sys.exit())
    commands = {"start": server.start, "stop": server.stop, "kill": server.kill, "alive": server.alive}
    try:
        answer(server.start())
        for line in lines():
            answer(commands[line]())
        if server.run:
            shutil.rmtree(server.run, ignore_errors=True)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


def answer(line: str) -> None:
    with suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
