"""The process that is killed: ``python -m dalsegno.demo.child with|without FOLDER``.

It goes on from whatever an earlier process left in FOLDER, and ends when its work is done, or when its standard input
ends because the process that started it is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

from dalsegno.demo import plain
from dalsegno.demo.agent import ReviewAgent
from dalsegno.demo.world import IN_FLIGHT, MEMORY, PROGRESS, RESULTS, SAMPLE, append_line
from dalsegno.runners.local import LocalRunner
from dalsegno.runners.report import Progress


def main(kind: str, folder: str) -> None:
    os.chdir(folder)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    memory = _with_library() if kind == "with" else asyncio.run(plain.run())
    Path(MEMORY).write_text(json.dumps(memory))


def _with_library() -> dict[str, int]:
    runner = LocalRunner(
        ReviewAgent(), job="demo", store="sqlite:///agent.db", max_in_flight=IN_FLIGHT, checkpoint_interval=0.25
    )
    runner.run(SAMPLE, RESULTS, key="id", on_progress=_note)
    return {product: memory["seen"] for product, memory in runner.memories()}


def _note(progress: Progress) -> None:
    append_line(PROGRESS, pid=os.getpid(), replayed=progress.report.calls_replayed)


def _end_with_parent() -> None:
    # Not sys.stdin: its lock would be held when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
