"""A file to which the processes of one history append what they do; a kill loses no line that was appended."""

from __future__ import annotations

import base64
import os
import pickle
from pathlib import Path
from typing import Any

from dalsegno.testing.watched import acting


class Lines:
    """Python values in *path*, one a line, each written by one system call, which a SIGKILL cannot cut in two.

    Not synced to the disk: a kill of a process loses nothing that the kernel has taken. The file is read only by the
    process that made it, and those that it forked, so its values may be pickled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def append(self, value: Any) -> None:
        line = base64.b64encode(pickle.dumps(value)) + b"\n"
        token = acting.set(None)  # it is not the agent that opens this file
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        finally:
            acting.reset(token)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def all(self) -> list[Any]:
        return self._values(0)[0]

    def new(self) -> list[Any]:
        """What was appended since this was called last."""
        values, self._read = self._values(self._read)
        return values

    def _values(self, start: int) -> tuple[list[Any], int]:
        if not self.path.exists():
            return [], start
        with self.path.open("rb") as file:
            file.seek(start)
            return [pickle.loads(base64.b64decode(line)) for line in file], file.tell()
