"""Memory of the process and size of its files, from 3,000 to 100,000 messages.

Usage: ``python -m benchmarks.memory_growth [--messages N] [--json]``

The review agent runs over a stream of 64 keys, then over one where each message has a key of its own. What is printed
is the resident memory of the process (from ``/proc/self/statm``), the records that the store holds, and the bytes of
the store's file, each time the message count passes a mark, and the ratio of the last mark's resident memory to the
first one's. Flat means that it is near 1 and that a longer run (``--messages 400000``) does not raise it. Until the
caches of SQLite are full, up to 2 MiB for each of its connections, memory grows a little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.throughput import TEXT, ReviewAgent
from dalsegno import LocalRunner

MARKS = (3_000, 10_000, 30_000, 100_000)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stream(messages: int, keys: int, marks: list[dict[str, Any]], store: Path) -> Iterator[dict[str, Any]]:
    for number in range(messages):
        if number in MARKS:
            marks.append(look(number, store))
        yield {"id": f"product-{number % keys}", "review": f"{number} {TEXT}"}
    marks.append(look(messages, store))


def look(number: int, store: Path) -> dict[str, Any]:
    gc.collect()
    with sqlite3.connect(store) as connection:
        (records,) = connection.execute("SELECT count(*) FROM records").fetchone()
    return {"messages": number, "resident": resident_bytes(), "records": records, "file": store.stat().st_size}


def run(messages: int, keys: int) -> list[dict[str, Any]]:
    """One run in this process; call it in a process of its own."""
    marks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "agent.db"
        runner = LocalRunner(ReviewAgent(), job="memory", store=f"sqlite:///{store}", checkpoint_interval=1)
        runner.run(stream(messages, keys, marks, store), key="id")
    return marks


def in_child(messages: int, keys: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.memory_growth", "--child", str(keys), "--messages", str(messages)]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=MARKS[-1])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.messages, options.child)))
        return 0
    results = {
        "64 keys": in_child(options.messages, 64),
        "a key per message": in_child(options.messages, options.messages),
    }
    if options.json:
        print(json.dumps(results))
        return 0
    for name, marks in results.items():
        print(name)
        for mark in marks:
            print(
                f"  {mark['messages']:>8,} messages  {mark['resident'] / 2**20:7.1f} MiB resident  "
                f"{mark['records']:>8,} records  {mark['file'] / 2**20:7.1f} MiB file"
            )
        print(f"  last to first: {marks[-1]['resident'] / marks[0]['resident']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
