"""A process that imports the library once and forks a child for each run of a job, so that a run costs no start-up.

Each child is a process of its own, with its own pid, which opens everything itself and can be killed. Orders come over
the socket whose file descriptor is the only argument, one JSON object a line (see `Order` in ``tests/crash``); back go

* ``{"event": "boundary", "pid", "what"}`` from a child that has frozen at the boundary it was ordered to stop at,
* ``{"event": "result", "pid", "report", "memories", "passed"}`` from a child whose run has ended,
* ``{"event": "ended", "pid", "code"}`` when a child is gone; a signal that killed it is a negative code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from dalsegno.runners.local import LocalRunner
from tests.children import boundaries, three_calls

_connection: socket.socket


def tell(message: dict[str, Any]) -> None:
    _connection.sendall(json.dumps(message).encode() + b"\n")


def run_job(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    points = boundaries.Boundaries(tell, tuple(order["stop_at"]) if order["stop_at"] else None)
    boundaries.install(points)
    three_calls.Hooks.world = three_calls.World(folder / "outside.jsonl", lambda what: points.reach("callee", what))
    runner = LocalRunner(
        three_calls.ThreeCalls(reconcile=order["reconcile"]),
        job="crashing",
        store=boundaries.Store(folder / "store.db"),
        checkpoints=folder / "checkpoints.db",
        max_in_flight=order["max_in_flight"],
        checkpoint_interval=3600,
    )
    three_calls.Hooks.checkpoint_during = _checkpoints(runner, set(order["checkpoint_during"]))
    report = runner.run(folder / "input.jsonl", boundaries.Sink(folder / "output.jsonl"), key="key")
    memories = dict(runner.memories())
    passed = {kind: list(names) for kind, names in points.passed.items()}
    tell(
        {
            "event": "result",
            "pid": os.getpid(),
            "report": dataclasses.asdict(report),
            "memories": memories,
            "passed": passed,
        }
    )


def _checkpoints(runner: LocalRunner, messages: set[str]) -> Any:
    """Take a checkpoint in the middle of these messages, instead of when some time is over: each run is to be alike."""

    async def checkpoint_during(message: str) -> None:
        pipeline = runner._pipeline
        assert pipeline is not None
        if message in messages:
            before = pipeline.report.checkpoints
            pipeline._checkpointer.due.set()
            while pipeline.report.checkpoints == before:  # noqa: ASYNC110 - the runner tells nobody
                await asyncio.sleep(0.001)

    return checkpoint_during


def serve() -> None:
    for line in _connection.makefile("rb"):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_job(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        tell({"event": "ended", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    _connection = socket.socket(fileno=int(sys.argv[1]))
    serve()
