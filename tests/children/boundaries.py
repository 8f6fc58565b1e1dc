"""Boundaries of a run at which a process can be killed: it says which one it has reached and freezes there.

Everything here wraps what the runner is given, or the standard library below it, so what runs between two boundaries is
the library as it is. A boundary has a *kind* and a number within its kind:

========== =========================================================================================================
kind       before and after
========== =========================================================================================================
record     each record; a put of many records is split into puts of one
callee     each effect of a durable call on the outside world
sink       each line of the sink, and within it, when half of it is in the file
checkpoint flushing the sink, and each statement that writes to the checkpoint file, COMMIT among them
store      each statement that creates, owns or prunes the store, COMMIT among them; pruning itself
========== =========================================================================================================
"""

from __future__ import annotations

import functools
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from dalsegno.core.records import Record
from dalsegno.runners.sinks import JsonLinesSink
from dalsegno.stores import sqlite
from dalsegno.stores.base import Covered, PruneReport
from dalsegno.stores.sqlite import SqliteStore

_WRITES = ("BEGIN", "COMMIT", "CREATE", "DELETE", "INSERT", "PRAGMA USER_VERSION =", "UPDATE")
MESSAGES_PER_PRUNE = 2


class Boundaries:
    """Counts the boundaries that a process passes; at number *stop_at* of one kind (from 1) it says so and freezes."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], stop_at: tuple[str, int] | None) -> None:
        self.passed: dict[str, list[str]] = {}
        self._tell = tell
        self._stop_at = stop_at
        self._lock = threading.Lock()

    def reach(self, kind: str, what: str) -> None:
        with self._lock:
            names = self.passed.setdefault(kind, [])
            names.append(what)
            if (kind, len(names)) != self._stop_at:
                return
        self._tell({"event": "boundary", "pid": os.getpid(), "what": what})
        os.kill(os.getpid(), signal.SIGSTOP)  # all threads, so that the crash leaves what is there now
        threading.Event().wait()


class Store(SqliteStore):
    """Writes each record on its own, and prunes in small chunks."""

    boundaries: Boundaries

    async def put(self, records: Sequence[Record]) -> None:
        for record in records:
            kind = record.body.split(b'"kind":"', 1)[1].split(b'"', 1)[0].decode()
            self.boundaries.reach("record", f"before {kind} of message {record.message}")
            await super().put([record])
            self.boundaries.reach("record", f"after {kind} of message {record.message}")

    async def prune(self, covered: Covered) -> PruneReport:
        self.boundaries.reach("store", "before pruning")
        report = await super().prune(covered)
        self.boundaries.reach("store", "after pruning")
        return report


class Sink(JsonLinesSink):
    """Writes each line in two halves."""

    boundaries: Boundaries

    def write(self, output: object, output_id: str) -> None:
        self.boundaries.reach("sink", "before a line")
        with mock.patch.object(os, "write", _in_halves(os.write, self.boundaries)):
            super().write(output, output_id)
        self.boundaries.reach("sink", "after a line")

    def flush(self, state: dict[str, Any]) -> None:
        self.boundaries.reach("checkpoint", "before flushing the sink")
        super().flush(state)
        self.boundaries.reach("checkpoint", "after flushing the sink")


def _in_halves(write: Callable[..., int], boundaries: Boundaries) -> Callable[..., int]:
    halved = False

    def write_half(fd: int, data: Any) -> int:
        nonlocal halved
        if halved:
            return write(fd, data)
        halved = True
        written = write(fd, data[: len(data) // 2])
        boundaries.reach("sink", "half a line")
        return written

    return write_half


class _Connection(sqlite3.Connection):
    kind = ""
    boundaries: Boundaries

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        statement = " ".join(sql.split())
        if not self.kind or not statement.upper().startswith(_WRITES) or statement.startswith("INSERT INTO records"):
            return super().execute(sql, parameters)
        self.boundaries.reach(self.kind, f"before {statement[:40]}")
        try:
            return super().execute(sql, parameters)
        finally:
            self.boundaries.reach(self.kind, f"after {statement[:40]}")


def install(boundaries: Boundaries) -> None:
    """Make this process reach *boundaries*: call it before any file is opened."""
    Store.boundaries = Sink.boundaries = _Connection.boundaries = boundaries
    sqlite.PRUNE_CHUNK = MESSAGES_PER_PRUNE
    connect = sqlite3.connect

    @functools.wraps(connect)
    def announcing(path: Any, **options: Any) -> sqlite3.Connection:
        connection: _Connection = connect(path, factory=_Connection, **options)
        if not str(path).split("?")[0].endswith(".lock"):
            connection.kind = "checkpoint" if "checkpoints" in str(path) else "store"
        return connection

    sqlite3.connect = announcing  # type: ignore[assignment]
