"""The inbox: the messages that were admitted and are not finished, in the queues of their keys or set aside.

What is *set aside* are a parked message and the later ones of its key. As soon as a completed checkpoint has them in
its inbox, they leave the process. They come back from there, one chunk at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from dalsegno.core.executor import Message
from dalsegno.core.records import Park, TaskActionState
from dalsegno.memory import EMPTY, Node
from dalsegno.runners.checkpoints import CheckpointFile, InboxEntry
from dalsegno.runners.identities import Identities
from dalsegno.runners.report import RunReport

_CACHED_KEYS = 1_000
_SET_ASIDE_IN_MEMORY = 5_000
_CHUNK = 500


@dataclass(slots=True, eq=False)
class Entry:
    """An admitted message that is not finished."""

    ordinal: int
    """Its number; those of one key go on in this order. Where ids are positions, that of its input record."""
    message: Message
    stored: bool
    """Whether the last checkpoint has it in its inbox, if perhaps not as it is now."""
    changed: bool = field(default=False, kw_only=True)
    """Whether the next checkpoint is to have it anew."""
    parked: str | None = None
    """Why it is parked, for the inbox."""
    waits: bool = False
    """Whether it waits until it is its turn, see `Turns`."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parked message, without its content."""

    ordinal: int
    message: str
    park: Park
    until: datetime | None
    """When it is taken up again, if nobody decides before."""


@dataclass(slots=True)
class KeyState:
    """What the process holds of one message key."""

    key: bytes
    memory: Node
    """As of the last message that is finished."""
    latest: Node
    """As of the last message whose actions are done."""
    queue: deque[Entry] = field(default_factory=deque)
    history: dict[str, list[TaskActionState]] = field(default_factory=dict)
    busy: bool = False
    done: int = 0
    """Messages whose actions are done and that are not yet finished."""
    claimed: bool = False
    parked: Held | None = None
    """The message of the key that is parked; later ones wait behind it."""
    behind: int | None = None
    """Messages from this ordinal on are set aside and come back when the queue is empty."""

    @property
    def held(self) -> bool:
        """Whether new messages of the key are set aside."""
        return self.parked is not None or self.behind is not None


class Inbox:
    """Has *room* for that many messages in queues.

    *start* is called with each key that got something to do; *crowded* says whether something else waits for a
    checkpoint that makes room.
    """

    def __init__(
        self,
        checkpoints: CheckpointFile,
        identities: Identities,
        report: RunReport,
        room: int,
        start: Callable[[KeyState], None],
        crowded: Callable[[], bool],
    ) -> None:
        self._checkpoints = checkpoints
        self._identities = identities
        self._report = report
        self.room = room
        self._start = start
        self._crowded = crowded
        self._keys: OrderedDict[bytes, KeyState] = OrderedDict()
        self.memory_on_disk = False
        """Whether the checkpoint file has memory of keys."""
        self._unfinished: dict[int, Entry] = {}
        self.queued = 0
        """How many messages are in queues."""
        self._set_aside = 0
        """How many are set aside and still in memory."""
        self._has_room = asyncio.Event()
        self._finished: list[int] = []
        """Numbers that the next checkpoint takes out of its inbox."""
        self._renumbered: set[int] = set()
        """Numbers under which the checkpoint file may have messages that have another one by now."""
        self._unread: tuple[float, float] | None = None
        """From which number on, and below which, messages of the checkpoint are yet to be admitted in this run."""
        self._writing = False
        """Whether a checkpoint is being written."""
        self._aside_meanwhile: list[Entry] = []

    # Room.

    @property
    def is_full(self) -> bool:
        return self.queued >= self.room or self.is_crowded

    @property
    def is_crowded(self) -> bool:
        """Whether only a checkpoint makes room."""
        return self._set_aside >= _SET_ASIDE_IN_MEMORY or self._crowded()

    async def wait_for_room(self) -> None:
        """Wait until there may be room."""
        self._has_room.clear()
        await self._has_room.wait()

    # Keys.

    def state_of(self, key: bytes) -> KeyState:
        state = self._keys.get(key)
        if state is None:
            memory = self._checkpoints.memory(key) if self.memory_on_disk else EMPTY
            state = self._keys[key] = KeyState(key, memory, memory)
        else:
            self._keys.move_to_end(key)
        return state

    def is_held(self, key: bytes) -> bool:
        """Whether messages of the key may be set aside and not in memory."""
        state = self._keys.get(key)
        return state is not None and state.held

    def evict(self, changed: Container[bytes]) -> None:
        """Forget the keys that were idle for longest, whose memory is in the checkpoint: not those that *changed*."""
        surplus = len(self._keys) - _CACHED_KEYS
        for key, state in list(self._keys.items()) if surplus > 0 else ():
            if surplus == 0:
                break
            if not (state.busy or state.queue or state.done or state.held or state.history or key in changed):
                del self._keys[key]
                surplus -= 1

    # From admitted to finished.

    def stored(self, end: float) -> Iterator[Entry]:
        """The messages that were in flight at the last checkpoint, with numbers below *end*, to be admitted again."""
        for row in self._rows_below(end):
            self._unread = (row.ordinal, end)
            yield self._entry(row)
        self._unread = None

    def _rows_below(self, end: float) -> Iterator[InboxEntry]:
        after = -1
        while rows := self._checkpoints.inbox(after, _CHUNK):
            for row in rows:
                if row.ordinal >= end:
                    return
                yield row
            after = rows[-1].ordinal

    def _entry(self, row: InboxEntry) -> Entry:
        return Entry(row.ordinal, self._identities.message_in(row), stored=True)

    def hold_back(self, entry: Entry) -> None:
        """The entry is admitted, and does not go on before it is queued."""
        self._unfinished[entry.ordinal] = entry

    def renumber(self, entry: Entry, number: int) -> None:
        """Give an entry that was held back another number."""
        del self._unfinished[entry.ordinal]
        if entry.stored:
            self._finished.append(entry.ordinal)
            self._renumbered.add(entry.ordinal)
        entry.ordinal, entry.stored, entry.waits = number, False, False

    def queue(self, entry: Entry) -> None:
        """The entry goes on when those before it of its key are done."""
        self._unfinished[entry.ordinal] = entry
        state = self.state_of(entry.message.key_bytes)
        if state.held:
            self._put_aside(entry)
            return
        self.queued += 1
        state.queue.append(entry)
        self._start(state)

    def finish(self, entry: Entry) -> None:
        del self._unfinished[entry.ordinal]
        if entry.stored:
            self._finished.append(entry.ordinal)
        self.queued -= 1
        if self.queued <= self.room // 2:  # so that the reader admits many at a time
            self._has_room.set()

    # Set aside, and back.

    def set_aside(self, state: KeyState) -> None:
        """Set the key's queue aside, whose first message was parked."""
        self.queued -= len(state.queue)
        self._set_aside += 1
        state.queue.popleft()
        while state.queue:
            self._put_aside(state.queue.popleft())
        self._has_room.set()

    def _put_aside(self, entry: Entry) -> None:
        self._report.waiting += 1
        self._set_aside += 1
        if self._writing:  # what that checkpoint has in its inbox is not there yet
            self._aside_meanwhile.append(entry)
        else:
            self._forget([entry])

    def _forget(self, entries: Iterable[Entry]) -> None:
        """What is set aside and in the inbox of a completed checkpoint needs no place in memory."""
        known = self._identities.known
        for entry in entries:
            kept = entry.stored and not entry.changed
            if kept and self._is_set_aside(entry) and self._unfinished.pop(entry.ordinal, None) is not None:
                self._set_aside -= 1
                if known is not None:
                    known.forget(entry.message)
        self._has_room.set()

    def _is_set_aside(self, entry: Entry) -> bool:
        if entry.waits:
            return False
        state = self._keys[entry.message.key_bytes]
        return state.parked is not None or (state.behind is not None and entry.ordinal >= state.behind)

    def bring_back(self, state: KeyState) -> None:
        """Put the next messages that are set aside back into the key's queue."""
        taken: list[Entry] = []
        while not taken and state.behind is not None:
            taken, state.behind = self._next_set_aside(state.key, state.behind)
        for entry in taken:
            if entry.ordinal in self._unfinished:
                self._set_aside -= 1
            self._unfinished[entry.ordinal] = entry
            self.queued += 1
            state.queue.append(entry)
        self._report.waiting -= len(taken)
        self._has_room.set()
        self._start(state)

    def _next_set_aside(self, key: bytes, start: int) -> tuple[list[Entry], int | None]:
        """The next entries of a key that are set aside, from an ordinal on, and where those after them begin."""
        kept = [entry for entry in self._unfinished.values() if entry.message.key_bytes == key and not entry.waits]
        found = {entry.ordinal: entry for entry in kept if entry.ordinal >= start}
        rows = self._admitted_rows(key, start, _CHUNK + 1)  # one more: is there more?
        for row in rows:
            if row.ordinal not in self._unfinished and row.ordinal not in self._renumbered:
                found[row.ordinal] = self._entry(row)
        # Beyond the last row there may be others, which come before what is in memory.
        end = rows[-1].ordinal if len(rows) > _CHUNK else math.inf
        taken = [found[ordinal] for ordinal in sorted(found) if ordinal <= end][:_CHUNK]
        if len(taken) == len(found) and end == math.inf:
            return taken, None
        return taken, (taken[-1].ordinal if len(taken) == _CHUNK else rows[-1].ordinal) + 1

    def _admitted_rows(self, key: bytes, start: int, limit: int) -> Sequence[InboxEntry]:
        """Those of a key in the checkpoint, without those that are admitted later, which would then be there twice."""
        rows = self._checkpoints.inbox(start - 1, limit, key)
        if self._unread is None:
            return rows
        first, end = self._unread
        admitted = [row for row in rows if not first <= row.ordinal < end]
        if len(admitted) < len(rows) and end < math.inf:
            admitted = [row for row in admitted if row.ordinal < first]
            admitted += self._checkpoints.inbox(int(end) - 1, limit - len(admitted), key)
        return admitted

    # To the checkpoint.

    def snapshot(self) -> tuple[list[Entry], list[int]]:
        """What a checkpoint is to put into its inbox, and the numbers that it takes out; then it is being written."""
        entries = [entry for entry in self._unfinished.values() if entry.changed or not entry.stored]
        for entry in entries:
            entry.stored, entry.changed = True, False
        finished, self._finished = self._finished, []
        self._writing = True
        return entries, finished

    def written(self, entries: list[Entry]) -> None:
        """The checkpoint that has *entries* is complete."""
        self._writing = False
        self.memory_on_disk = True
        aside, self._aside_meanwhile = self._aside_meanwhile, []
        self._forget([*entries, *aside])
