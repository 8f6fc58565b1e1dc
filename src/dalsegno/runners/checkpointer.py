"""The checkpointer: takes a checkpoint now and then, and prunes the store of what it covers.

What makes a message *finished* happens in one step without any ``await``. So whatever a snapshot sees, between two such
steps, is consistent, and a checkpoint never covers what a crash could take back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dalsegno.runners.checkpoints import Checkpoint, CheckpointFile
from dalsegno.runners.identities import Identities
from dalsegno.runners.inbox import Entry, Inbox, KeyState
from dalsegno.runners.report import RunReport
from dalsegno.runners.retention import Pruner
from dalsegno.runners.sinks import Sink
from dalsegno.runners.sources import Source

_T = TypeVar("_T")

UNCOVERED = 1_000
"""This many messages that are finished, or bad records set aside, bring about a checkpoint before its time: what they
changed is in memory until then."""


@dataclass(slots=True)
class Reading:
    """How far the input was read: so many *records*, up to the source's *position*."""

    records: int = 0
    position: dict[str, Any] | None = None


class Checkpointer:
    """Takes a checkpoint every *interval* seconds, sooner when it is `due`, as *after* so many finished messages.

    None is taken while nothing `changed`.
    """

    def __init__(
        self,
        checkpoints: CheckpointFile,
        pruner: Pruner,
        source: Source,
        sink: Sink,
        identities: Identities,
        inbox: Inbox,
        reading: Reading,
        report: RunReport,
        interval: float,
        after: int,
    ) -> None:
        self._checkpoints = checkpoints
        self._pruner = pruner
        self._source = source
        self._sink = sink
        self._identities = identities
        self._inbox = inbox
        self._reading = reading
        self._report = report
        self._interval = interval
        self._after = after
        self._thread = pruner.thread
        self.number = 0
        """That of the last checkpoint."""
        self.due = asyncio.Event()
        self.tainted = False
        """Whether no checkpoint may be taken any more, because it would cover what is not so."""
        self._ending = False
        # What changed since the last checkpoint.
        self._changes = 0
        self._memory: dict[bytes, KeyState] = {}
        self._covered: list[tuple[bytes, str]] = []

    def changed(self) -> None:
        """Something changed that a checkpoint is to have."""
        self._changes += 1

    def changed_memory(self, state: KeyState) -> None:
        self._memory[state.key] = state

    def cover(self, key: bytes, message: str) -> None:
        """The message is finished."""
        self._covered.append((key, message))
        if len(self._covered) >= self._after:
            self.due.set()
        self._changes += 1

    def end(self) -> None:
        """Nothing changes any more: take the last checkpoint and return from `run`."""
        self._ending = True
        self.due.set()

    async def close(self) -> None:
        """Wait until a checkpoint that a cancelled run has begun to write is written: it uses what is closed next."""
        written = asyncio.wrap_future(self._thread.submit(int))
        self._thread.shutdown(wait=False)
        await asyncio.wait([written])

    async def run(self) -> None:
        seen = 0  # not the count of now: the reader may be far by the time that this is run first
        last = False
        while not last:
            try:
                async with asyncio.timeout(self._interval):
                    await self.due.wait()
            except TimeoutError:
                pass
            self.due.clear()
            last = self._ending  # asked before the checkpoint: what changes while it is written needs another one
            if self._changes != seen and not self.tainted:
                seen = self._changes
                await self._checkpoint()
            elif not self.tainted:
                await self._pruner.drain(self.due.is_set)  # time passes also where nothing comes

    async def _checkpoint(self) -> None:
        checkpoint, entries = self._snapshot()
        covered, self._covered = self._covered, []
        try:
            await self.in_thread(self._write, checkpoint)
        except BaseException:
            self.tainted = True
            raise
        self.number = checkpoint.number
        if self._identities.known is not None:
            self._identities.known.completed(covered)
        self._report.checkpoints += 1
        self._inbox.written(entries)
        self._inbox.evict(self._memory)
        if checkpoint.position is not None:
            await self._source.checkpointed(checkpoint.position)
        await self._pruner.completed(checkpoint.number, covered, self.due.is_set)

    def _snapshot(self) -> tuple[Checkpoint, list[Entry]]:
        """What changed, taken in one step; only references to the changed keys' memory are copied."""
        entries, finished = self._inbox.snapshot()
        changed, self._memory = self._memory, {}
        checkpoint = Checkpoint(
            self.number + 1,
            self._reading.records,
            self._reading.position,
            self._sink.snapshot(),
            {key: state.memory for key, state in changed.items()},
            [self._identities.inbox_entry(entry.ordinal, entry.message, entry.parked) for entry in entries],
            finished,
            keep=self._pruner.retention.checkpoints,
            taken=self._pruner.now(),
            pruned=self._pruner.pruned_through,
        )
        self._identities.fill(checkpoint, self._covered, retain=self._pruner.retains)
        return checkpoint, entries

    async def in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run *function* where checkpoints are written."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _write(self, checkpoint: Checkpoint) -> None:
        self._sink.flush(checkpoint.sink)
        self._checkpoints.commit(checkpoint)
        self.deliver(checkpoint.sink)

    def deliver(self, state: dict[str, Any]) -> None:
        """Pass on what the last completed checkpoint, which has this *state* of the sink, keeps for it."""
        delivered = self._sink.deliver(state)
        if delivered is not None:
            self._checkpoints.set_sink(delivered)
