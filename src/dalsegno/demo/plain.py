"""The logic of `agent` as an ordinary script: no library, but as careful as such scripts are.

It works on as many reviews at a time as the agent does, in order per product, and saves its position together with its
memory, atomically, after every `BATCH` reviews, when their results are written. After a crash it goes on from there: it
loses nothing, and does again what it had not saved. Saved before the work, a crash would lose results instead.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from dalsegno.demo.world import IN_FLIGHT, RESULTS, append_line, ask_model, load_reviews, send_mail

BATCH = 25
_SAVED = Path("saved.json")


async def run() -> dict[str, int]:
    """Work through the sample; returns how many reviews of each product were seen."""
    position, seen = _load()
    reviews = load_reviews()
    while position < len(reviews):
        batch = reviews[position : position + BATCH]
        await _process(batch, seen)
        position += len(batch)
        _save(position, seen)
    return seen


async def _process(batch: list[dict[str, Any]], seen: dict[str, int]) -> None:
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def in_order(product: str) -> None:
        for review in batch:
            if review["id"] == product:
                async with slots:
                    await _handle(review, seen)

    async with asyncio.TaskGroup() as group:
        for product in sorted({review["id"] for review in batch}):
            group.create_task(in_order(product))


async def _handle(review: dict[str, Any], seen: dict[str, int]) -> None:
    number, product = review["number"], review["id"]
    score = await ask_model(review["review"])
    seen[product] = seen.get(product, 0) + 1
    if score <= 2:
        await asyncio.to_thread(send_mail, number, product, None)
    append_line(RESULTS, number=number, id=product, score=score)


def _load() -> tuple[int, dict[str, int]]:
    if not _SAVED.exists():
        return 0, {}
    saved = json.loads(_SAVED.read_text())
    return saved["position"], saved["seen"]


def _save(position: int, seen: dict[str, int]) -> None:
    fresh = _SAVED.with_suffix(".new")
    with fresh.open("w") as file:
        json.dump({"position": position, "seen": seen}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(_SAVED)
