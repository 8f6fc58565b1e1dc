"""What of finished messages stays, and for how long: the checkpoints that can be restored, and history for inspection.

A message that a completed checkpoint covers is never replayed from there, so the store may be pruned of it. Where it is
*retained*, because an older checkpoint is kept that does not cover it, or because its history is, the checkpoint file
remembers that it is due, and the store is asked later. It is forgotten there only once the store has done it: a crash
in between asks twice.

The store is asked in chunks, so that no prune is long and the messages in flight write in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any

from dalsegno.runners.checkpoints import CheckpointFile
from dalsegno.runners.kept_rows import FinishedMessage
from dalsegno.stores.base import Covered, TaskActionStore

PRUNE_CHUNK = 500
"""Messages that the store is asked to prune at a time."""
_LEAST_AT_ONCE = 4 * PRUNE_CHUNK
"""So many are pruned after a checkpoint, even if the next one is due: more than it can cover."""


@dataclass(frozen=True, slots=True)
class Retention:
    """So many *checkpoints* can be restored, and covered messages stay in the store for *history*."""

    checkpoints: int = 1
    history: timedelta = timedelta(0)

    @property
    def retains(self) -> bool:
        return self.checkpoints > 1 or self.history > timedelta(0)


class Pruner:
    """Prunes *store* of what the checkpoints of the job in *checkpoints* cover and *retention* does not keep."""

    def __init__(
        self, store: TaskActionStore, checkpoints: CheckpointFile, retention: Retention, clock: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self.retention = retention
        self._clock = clock
        # Of its own: the loop's threads may all be taken by what an agent calls.
        self.thread = ThreadPoolExecutor(1, "dalsegno-checkpoint")
        """Where the checkpoint file is written."""
        self._alone = asyncio.Lock()
        self._oldest = 0
        """The oldest checkpoint that can be restored."""
        self.retains = retention.retains
        """Whether what is covered goes through the checkpoint file, as while something of an earlier run does."""

    def now(self) -> float:
        """Seconds since 1970."""
        return self._clock().timestamp()

    @property
    def pruned_through(self) -> int:
        return self._store.pruned_through

    async def restored(self, leftovers: Sequence[tuple[bytes, str]]) -> None:
        """The job goes on from its last checkpoint; *leftovers* are covered, and not retained."""
        self._oldest = self._checkpoints.oldest()
        self.retains = self.retains or self._checkpoints.retains()
        if leftovers or self._store.pruned_through < self._oldest:
            await self._prune(leftovers)
        await self.drain(lambda: False)

    async def completed(self, number: int, covered: Sequence[tuple[bytes, str]], hurry: Callable[[], bool]) -> None:
        """Checkpoint *number* is completed, and the first to cover *covered*. Ends early when it is to *hurry*."""
        if not self.retains:
            self._oldest = number
            await self._prune(covered)
            return
        self._oldest = self._checkpoints.oldest()
        await self._prune(())
        await self.drain(hurry)

    async def drain(self, hurry: Callable[[], bool]) -> None:
        """Prune what was retained and is due by now."""
        pruned = 0
        while self.retains and not (pruned >= _LEAST_AT_ONCE and hurry()):
            async with self._alone:
                due = await self._in_thread(self._due)
                await self._drop(due)
            pruned += len(due)
            if len(due) < PRUNE_CHUNK:
                return

    async def make_way(self, key: bytes, message: str) -> None:
        """A new message has come with the id that perhaps a retained one had, whose record it must not get."""
        if not self.retains:
            return
        found = self._checkpoints.find_finished(key, message)
        if found is not None and not found.pruned:
            async with self._alone:
                await self._drop([found])

    def _due(self) -> list[FinishedMessage]:
        until = self.now() - self.retention.history.total_seconds()
        first = self._checkpoints.first_finished(PRUNE_CHUNK)
        return [*takewhile(lambda each: each.number <= self._oldest and each.at <= until, first)]

    async def _drop(self, messages: Sequence[FinishedMessage]) -> None:
        if messages:
            await self._store.prune(Covered(self._oldest, [(each.key, each.message) for each in messages]))
            await self._in_thread(self._checkpoints.mark_pruned, messages)

    async def _prune(self, covered: Sequence[tuple[bytes, str]]) -> None:
        async with self._alone:
            # The first chunk is there even when it is empty: the store notes the checkpoint.
            for start in range(0, max(len(covered), 1), PRUNE_CHUNK):
                await self._store.prune(Covered(self._oldest, covered[start : start + PRUNE_CHUNK]))

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)
