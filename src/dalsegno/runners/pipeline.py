"""The local runner's machine: one run of one job, from its last checkpoint to the end of its input.

Four activities share one event loop. The *reader* admits messages, in input order, as long as there is room. One
*worker* per busy key runs that key's messages in order. The *checkpointer* takes a checkpoint now and then. The
*listener* looks for what people decided about parked messages, and for those whose time has come.

When the actions of a message are done, its key's next message starts at once, on the memory that it left: records
become durable in order, so nothing of the next one can outlive what came before it. What makes the message *finished*
happens when its records are durable, in one step without any ``await`` (`_finish`): its outputs are written, its key's
memory as checkpoints know it moves on, its inbox entry goes. So whatever `_snapshot` sees, between two such steps, is
consistent, and a checkpoint never covers what a crash could take back.

A message that cannot go on now is *parked*, and its key's later messages wait behind it: they are in the inbox of the
next checkpoint and leave the process. When it can go on, its key's messages come back from there, one chunk at a time.

A stop, a failed action and a full disk all end in the same way: no new call starts, calls in flight end and are
recorded, and, unless the store or the sink failed, a last checkpoint is taken.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from dalsegno.agent import Agent
from dalsegno.core import codec
from dalsegno.core.commit import GroupCommit
from dalsegno.core.environment import Environment
from dalsegno.core.executor import Executor, Finished, Message, Parked
from dalsegno.core.flight import Stopped
from dalsegno.core.late import LateCalls
from dalsegno.core.records import Park, TaskActionState, by_message
from dalsegno.errors import DalSegnoError, InputError, RestoreError, StoreError
from dalsegno.memory import EMPTY, Node
from dalsegno.runners.checkpoints import Checkpoint, CheckpointFile, InboxEntry, JobIdentity
from dalsegno.runners.closing import close_all
from dalsegno.runners.identities import Identities
from dalsegno.runners.intake import OnBadInput
from dalsegno.runners.message_ids import MessageIds
from dalsegno.runners.quarantine import Quarantine
from dalsegno.runners.report import ParkedMessage, RunReport
from dalsegno.runners.sinks import Sink
from dalsegno.runners.sources import Source
from dalsegno.stores.base import Covered, Decision, TaskActionStore

_logger = logging.getLogger("dalsegno")

OnFailure = Literal["stop", "park"]
OnDivergence = Literal["strict", "rerun"]

_BUFFERED_PER_SLOT = 16
_CACHED_KEYS = 1_000
_UNCOVERED = 1_000
"""This many messages that are finished, or bad records set aside, bring about a checkpoint before its time: what they
changed is in memory until then."""
_SET_ASIDE_IN_MEMORY = 5_000
_INBOX_CHUNK = 500
_MESSAGES_A_TURN = 4
_LISTEN_SECONDS = 0.5

_late_calls: dict[str, LateCalls] = {}
"""By the identity of a job's store: what the runs of this process left in threads."""


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


class Pipeline:
    """One run. Everything is opened by `run` and closed when it ends."""

    def __init__(
        self,
        *,
        agent: Agent,
        environment: Environment,
        log: GroupCommit,
        job: str,
        store: TaskActionStore,
        checkpoints: CheckpointFile,
        source: Source,
        sink: Sink,
        key_of: Callable[[Any], Any],
        ids: MessageIds,
        owner: str,
        max_in_flight: int,
        checkpoint_interval: float,
        on_bad_input: OnBadInput,
        park_failures: bool,
        max_attempts: int | None,
        wait: bool,
        report: RunReport,
    ) -> None:
        self.environment = environment
        self._log = log
        self.report = report
        self.position: dict[str, Any] | None = None
        self._agent = agent
        self._job = job
        self._store = store
        self._checkpoints = checkpoints
        # Of its own: the loop's threads may all be taken by what an agent calls.
        self._thread = ThreadPoolExecutor(1, "dalsegno-checkpoint")
        self._source = source
        self._sink = sink
        self._owner = owner
        self._interval = checkpoint_interval
        self._executor = Executor(agent, environment, park_failures=park_failures, max_attempts=max_attempts)
        self._max_attempts = max_attempts
        self._quarantine: Quarantine | None = None
        """If the last run did not come to its end; see `Quarantine`."""
        self._begun_before: float = math.inf
        """Messages before this ordinal may have been begun by a run that did not come to its end."""
        self._wait = wait
        self._max_in_flight = max_in_flight
        self._slots = asyncio.Semaphore(max_in_flight)
        self._room = max_in_flight * _BUFFERED_PER_SLOT
        self._keys: OrderedDict[bytes, KeyState] = OrderedDict()
        self._workers: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[None]] = set()
        """The tasks that this pipeline itself has cancelled."""
        self._reader: asyncio.Task[None] | None = None
        self._admitted = 0
        self._set_aside = 0
        self._unfinished: dict[int, Entry] = {}
        self._parked: dict[bytes, KeyState] = {}
        """The keys with a parked message."""
        self._parked_told: list[ParkedMessage] | None = None
        """What `parked` gives, until that changes: it is asked for many times a second, and may be long."""
        self._decided = 0
        """The number of the last decision that was taken in."""
        self._news = asyncio.Event()
        """Set when a message was parked or taken up again."""
        self._has_room = asyncio.Event()
        self._checkpoint_due = asyncio.Event()
        self._restored = False
        self._ending = False
        self._failure: BaseException | None = None
        self._tainted = False
        # What changed since the last checkpoint.
        self._number = 0
        self._read_records = 0
        self._changes = 0
        self._changed: dict[bytes, KeyState] = {}
        self._covered: list[tuple[bytes, str]] = []
        self._finished_entries: list[int] = []
        self._writing = False
        """Whether a checkpoint is being written."""
        self._aside_meanwhile: list[Entry] = []
        self._memory_on_disk = False
        self._reordered: set[bytes] = set()
        """Keys whose messages do not go on in the order of the numbers that they had when they came."""
        self._renumbered: set[int] = set()
        """Numbers under which the checkpoint file may have messages that have another one by now."""
        self._identities = Identities(
            job,
            ids,
            source,
            key_of,
            on_bad_input,
            report,
            checkpoints,
            release=self._take_turn,
            fail=self._fail,
            held=self._is_held,
        )
        self._known, self._turns = self._identities.known, self._identities.turns
        self._admit = self._queue if self._turns is None else self._hold_back

    async def run(self) -> None:
        """Run to the end of the input, to a stop, or to the first failure, which is raised."""
        await self._store.open(self._job, self._owner)
        failure: BaseException | None = None
        try:
            self.environment.late = _late_calls.setdefault(self._store.identity, self.environment.late)
            self.environment.late.forget_ended()
            await self._restore()
            self._restored = True
            await self._process_all()
        except BaseException as error:
            failure = error
            raise
        finally:
            closings = [self._end_thread, self._sink.close, self._source.close]
            if self._max_attempts is not None and self._restored:
                closings.append(self._checkpoints.end_run)
            await close_all(failure, [*closings, self._checkpoints.close, self._store.close])

    async def _end_thread(self) -> None:
        """Wait until a checkpoint that a cancelled run has begun to write is written: it uses what is closed next."""
        written = asyncio.wrap_future(self._thread.submit(int))
        self._thread.shutdown(wait=False)
        await asyncio.wait([written])

    def stop(self) -> None:
        """Start no new call, let those in flight end, take a last checkpoint and return from `run`."""
        self.environment.stop()
        self._news.set()
        if self._reader is not None:
            self._cancel(self._reader)

    def _cancel(self, *tasks: asyncio.Task[None]) -> None:
        self._cancelled.update(tasks)
        for task in tasks:
            task.cancel()

    async def _process_all(self) -> None:
        self._reader = self._begin(self._read, f"reading {self._source.describe()}", "reader")
        checkpointer = self._begin(self._checkpoint_now_and_then, "taking checkpoints", "checkpointer")
        listener = self._begin(self._listen, "looking for decisions", "listener")
        if self.environment.stopping:  # asked to before there was anything to stop
            self._cancel(self._reader)
        try:
            await asyncio.wait([self._reader])
            await self._work_off()
            self._cancel(listener)
            await asyncio.wait([listener])
            await self._guarded(self._log.close)  # what no message waits for any more
        except asyncio.CancelledError:
            self._tainted = True  # what becomes durable from now on is for the next run to finish
            self.environment.cancelled = True
            self._cancel(self._reader, checkpointer, listener, *self._workers)
            await asyncio.wait([self._reader, checkpointer, listener, *self._workers])
            raise
        self._ending = True
        self._checkpoint_due.set()
        await checkpointer
        if self._failure is not None:
            raise self._failure

    def _begin(self, activity: Callable[[], Coroutine[Any, Any, None]], about: str, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._guarded(activity, lambda: about), name=f"dalsegno-{name}")

    async def _work_off(self) -> None:
        """Wait for the workers, and, if that is asked for, for the messages that wait for a signal."""
        while True:
            while self._workers:
                await asyncio.wait(self._workers)
            if self.environment.stopping:
                return
            await self._guarded(self._take_in)  # what was decided since the last look
            if self._workers:
                continue
            waiting = any(state.parked and state.parked.park.why == "waiting" for state in self._parked.values())
            if not (self._wait and waiting) or self.environment.stopping:
                return
            self._news.clear()
            await self._news.wait()

    async def _guarded(
        self, activity: Callable[[], Coroutine[Any, Any, None]], about: Callable[[], str] | None = None
    ) -> None:
        """Run one activity; its failure stops the others. *about* says what it does just now."""
        try:
            await activity()
        except asyncio.CancelledError:
            if about is not None and asyncio.current_task() not in self._cancelled:
                self._fail(_cancelled_by_others(self._job, about()))
            elif not self.environment.stopping:
                raise
        except Stopped:
            pass
        except InputError as error:
            # What was read before the bad record is still to be finished.
            self._failure = self._failure or error
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        if isinstance(error, StoreError):
            self._tainted = True
        self.stop()

    # Start: go back to the last checkpoint.

    async def _restore(self) -> None:
        last = self._checkpoints.open(JobIdentity(self._job, self._agent.name, self._store.identity))
        pruned = self._store.pruned_through
        if pruned > (last.number if last else 0):
            raise RestoreError(
                f"job {self._job!r} would go on from checkpoint {last.number if last else 'none'}, but the store has "
                f"already dropped what was needed to replay from before checkpoint {pruned}: the checkpoint file is "
                "older than the store. Put the newer checkpoint file back, or start a new job"
            )
        if last and pruned < last.number - 1:
            raise RestoreError(
                f"job {self._job!r} would go on from checkpoint {last.number}, but the store was last pruned for "
                f"checkpoint {pruned}: it is older than the checkpoint file, so what happened since is not recorded in "
                "it. Put the newer store back, or start a new job"
            )
        keys = await self._store.keys()
        if last is not None:
            self._identities.check_kind(last, any_recorded=bool(keys))
        self._sink.open(last.sink if last else None)
        if last is None:
            # From now on a restart knows how long the sink was before this job wrote to it.
            last = Checkpoint(0, 0, None, self._sink.snapshot(), ids=self._identities.recorded)
            self._sink.flush(last.sink)
            self._checkpoints.commit(last)
        else:
            self._memory_on_disk = True
        self._number = last.number
        self._read_records = last.read
        self.position = last.position
        self._identities.restore(last)
        leftovers = await self._claim_recorded(keys)
        self._identities.settle(last.ids)
        if leftovers or pruned < self._number:
            await self._store.prune(Covered(self._number, leftovers))
        for number, decision in await self._store.decisions(0):
            self._decided = number
            self._note(decision)
        if self._max_attempts is not None and self._checkpoints.begin_run():
            self._quarantine = Quarantine()
            if not self._identities.recovery.missing:
                self._all_came(self._identities.begun())

    async def _claim_recorded(self, keys: Iterable[bytes]) -> list[tuple[bytes, str]]:
        """Claim *keys*, which have records; what the last checkpoint covered but a crash left unpruned."""
        leftovers: list[tuple[bytes, str]] = []
        for key in keys:
            state = self._key_state(key)
            await self._claim(state)
            for message in self._identities.sort_out(key, state.history):
                leftovers.append((key, message))
                del state.history[message]
        return leftovers

    def _all_came(self, ordinal: int) -> None:
        """No recorded message is yet to come: the process had read at most so much beyond the last one of them."""
        waiting = self._turns.waiting if self._turns is not None else 0
        self._begun_before = ordinal + waiting + self._room + 1

    # The reader.

    async def _read(self) -> None:
        try:
            await self._read_inbox()
            await self._read_source()
        finally:
            if self._turns is not None:
                self._turns.close()
        if self._identities.recovery.missing:
            raise self._identities.cut_input(self._read_records)

    async def _read_source(self) -> None:
        identities, intake = self._identities, self._identities.intake
        by_position, recovering = identities.by_position, True
        async for item in await self._source.open(self.position):
            message = intake.message_of(item)
            if message is not None:
                while self._admitted >= self._room or self._set_aside >= _SET_ASIDE_IN_MEMORY:
                    await self._wait_for_room()
                ordinal = item.ordinal if by_position else identities.next_number()
                if recovering and not identities.recovery.missing:
                    recovering = False
                    self._all_came(ordinal)
                self._admit(Entry(ordinal, message, stored=False))
            elif len(intake.bad) >= _UNCOVERED:
                self._checkpoint_due.set()
            self.position = item.position
            self._read_records = item.ordinal + 1
            self._changes += 1

    async def _read_inbox(self) -> None:
        """Take up again what was in flight at the last checkpoint."""
        after = -1
        # From there on are those that got their number in this run.
        end = math.inf if self._identities.by_position else self._identities.end_of_inbox
        while entries := self._checkpoints.inbox(after, _INBOX_CHUNK):
            for found in entries:
                if found.ordinal >= end:
                    return
                while self._admitted >= self._room or self._set_aside >= _SET_ASIDE_IN_MEMORY:
                    await self._wait_for_room()
                self._admit(self._entry(found))
            after = entries[-1].ordinal

    def _entry(self, found: InboxEntry) -> Entry:
        return Entry(found.ordinal, self._identities.message_in(found), stored=True)

    async def _wait_for_room(self) -> None:
        if self._set_aside >= _SET_ASIDE_IN_MEMORY:
            self._checkpoint_due.set()
        self._has_room.clear()
        await self._has_room.wait()

    def _is_held(self, key: bytes) -> bool:
        state = self._keys.get(key)
        return state is not None and state.held

    def _hold_back(self, entry: Entry) -> None:
        """Queue the entry when it is its turn."""
        assert self._turns is not None
        self._unfinished[entry.ordinal] = entry
        self._turns.arrive(entry)

    def _take_turn(self, entry: Entry) -> None:
        """The entry goes on now; if its key was reordered, it gets a number after those that went on before."""
        if entry.waits:
            self._reordered.add(entry.message.key_bytes)
        if entry.waits or (entry.stored and entry.message.key_bytes in self._reordered):
            del self._unfinished[entry.ordinal]
            if entry.stored:
                self._finished_entries.append(entry.ordinal)
                self._renumbered.add(entry.ordinal)
            entry.ordinal, entry.stored, entry.waits = self._identities.next_number(), False, False
            self._changes += 1
        self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        self._unfinished[entry.ordinal] = entry
        state = self._key_state(entry.message.key_bytes)
        if state.held:
            self._put_aside(entry)
            return
        self._admitted += 1
        state.queue.append(entry)
        self._start(state)

    def _start(self, state: KeyState) -> None:
        if not state.busy:
            state.busy = True
            worker = asyncio.create_task(
                self._guarded(functools.partial(self._work, state), functools.partial(_work_on, state))
            )
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    def _key_state(self, key: bytes) -> KeyState:
        state = self._keys.get(key)
        if state is None:
            memory = self._checkpoints.memory(key) if self._memory_on_disk else EMPTY
            state = self._keys[key] = KeyState(key, memory, memory)
        else:
            self._keys.move_to_end(key)
        return state

    # The workers.

    async def _work(self, state: KeyState) -> None:
        try:
            while state.queue and not self.environment.stopping:
                async with self._slots:
                    for _ in range(_MESSAGES_A_TURN):
                        if state.queue and not self.environment.stopping:
                            await self._process(state, state.queue[0])
                await asyncio.sleep(0)  # an action need not have given way to the others
                if not state.queue and state.behind is not None and state.parked is None:
                    self._bring_back(state)
        finally:
            state.busy = False

    async def _process(self, state: KeyState, entry: Entry) -> None:
        if not state.claimed:
            await self._claim(state)
            # Keys with records of an earlier process were claimed at the start; what else is there is done and not yet
            # pruned.
            queued = {queued.message.id for queued in state.queue}
            state.history = {
                message: states
                for message, states in state.history.items()
                if message in queued or not any(task.last for task in states)
            }
        history = state.history.get(entry.message.id, ())
        if self._quarantine is not None and entry.ordinal < self._begun_before:
            async with self._quarantine.enter(alone=any(known.begun for known in history)):
                result = await self._executor.run(entry.message, state.latest, history, mark=True)
        else:
            result = await self._executor.run(entry.message, state.latest, history)
        if isinstance(result, Parked):
            await self._log.barrier()
            self._park(state, entry, result)
            return
        state.queue.popleft()
        state.latest = result.memory
        state.done += 1
        self._log.when_durable(functools.partial(self._finish_if, state, entry, result))

    async def _claim(self, state: KeyState) -> None:
        state.history = by_message(await self._store.claim(state.key))
        state.claimed = True

    def _finish_if(self, state: KeyState, entry: Entry, result: Finished, error: StoreError | None) -> None:
        try:
            if error is not None:
                raise error
            if not self._tainted:
                self._finish(state, entry, result)
        except BaseException as failure:
            self._fail(failure)

    def _finish(self, state: KeyState, entry: Entry, result: Finished) -> None:
        """The message is done and durable. No await in here: a checkpoint sees all of it or nothing."""
        try:
            for output in result.outputs:
                self._sink.write(output.value, output.id)
        except BaseException:
            self._tainted = True  # a part of the message's outputs may be in the sink
            raise
        self.report.outputs += len(result.outputs)
        self.report.messages += 1
        if result.memory is not state.memory:
            state.memory = result.memory
            self._changed[state.key] = state
        state.done -= 1
        state.history.pop(entry.message.id, None)
        if self.environment.decisions:
            self.environment.decisions.pop((state.key, entry.message.id), None)
        del self._unfinished[entry.ordinal]
        if entry.stored:
            self._finished_entries.append(entry.ordinal)
        self._covered.append((state.key, entry.message.id))
        if len(self._covered) >= _UNCOVERED:
            self._checkpoint_due.set()
        self._admitted -= 1
        self._changes += 1
        if self._admitted <= self._room // 2:  # so that the reader admits many at a time
            self._has_room.set()

    def _park(self, state: KeyState, entry: Entry, result: Parked) -> None:
        """Set the message aside; the key's later ones wait behind it, and take no room."""
        if result.park.why != "waiting":
            _logger.warning(
                "message %r of key %r is parked: %s", entry.message.id, entry.message.key, result.park.reason
            )
        entry.parked = result.park.reason
        entry.changed = True  # the inbox is to hold the reason
        state.parked = Held(entry.ordinal, entry.message.id, result.park, result.until)
        self._parked[state.key] = state
        # It may have to be replayed in this process, from what is recorded by then.
        state.claimed, state.history = False, {}
        self._admitted -= len(state.queue)
        self._set_aside += 1
        state.queue.popleft()
        while state.queue:
            self._put_aside(state.queue.popleft())
        self._changes += 1
        self._parking_changed()
        self._has_room.set()

    def _put_aside(self, entry: Entry) -> None:
        self.report.waiting += 1
        self._set_aside += 1
        if self._writing:  # what that checkpoint has in its inbox is not there yet
            self._aside_meanwhile.append(entry)
        else:
            self._forget([entry])

    def _forget(self, entries: Iterable[Entry]) -> None:
        """What is set aside and in the inbox of a completed checkpoint needs no place in memory."""
        for entry in entries:
            kept = entry.stored and not entry.changed
            if kept and self._is_set_aside(entry) and self._unfinished.pop(entry.ordinal, None) is not None:
                self._set_aside -= 1
                if self._known is not None:
                    self._known.forget(entry.message)
        self._has_room.set()

    def _is_set_aside(self, entry: Entry) -> bool:
        if entry.waits:
            return False
        state = self._keys[entry.message.key_bytes]
        return state.parked is not None or (state.behind is not None and entry.ordinal >= state.behind)

    def parked(self) -> list[ParkedMessage]:
        """The messages that are parked now."""
        if self._parked_told is None:
            self._parked_told = [
                ParkedMessage(
                    codec.decode(state.key), state.parked.message, state.parked.park.reason, state.parked.park.why
                )
                for state in self._parked.values()
                if state.parked is not None
            ]
        return self._parked_told

    def in_flight(self) -> int:
        """How many messages are being run."""
        return min(len(self._workers), self._max_in_flight)

    def worked_off(self) -> tuple[int, int]:
        """How many of the records that were read wait for nothing or for a person, and how many were read."""
        return self._read_records - min(self._admitted, self._read_records), self._read_records

    def _parking_changed(self) -> None:
        self._parked_told = None
        self._news.set()

    # The listener.

    async def _listen(self) -> None:
        while True:
            await asyncio.sleep(_LISTEN_SECONDS)
            await self._take_in()

    async def _take_in(self) -> None:
        """Take up again the parked messages that somebody decided about, and those whose time has come."""
        for number, decision in await self._store.decisions(self._decided):
            self._decided = number
            self._note(decision)
            self._take_up_if_parked(decision.key, decision.message)
        for key, message in [*self.environment.late.newly_ended()]:
            self._take_up_if_parked(key, message)
        now = self.environment.clock()
        for state in [*self._parked.values()]:
            if state.parked is not None and state.parked.until is not None and state.parked.until <= now:
                self._take_up(state)

    def _note(self, decision: Decision) -> None:
        made = self.environment.decisions.setdefault((decision.key, decision.message), {})
        made[decision.target] = decision.body

    def _take_up_if_parked(self, key: bytes, message: str) -> None:
        state = self._parked.get(key)
        if state is not None and state.parked is not None and state.parked.message == message:
            self._take_up(state)

    def _take_up(self, state: KeyState) -> None:
        """Let the key's parked message run again, and then those that wait behind it."""
        held = state.parked
        if held is None or self.environment.stopping:
            return
        del self._parked[state.key]
        state.parked, state.behind = None, held.ordinal
        self.report.waiting += 1
        self._parking_changed()
        self._bring_back(state)
        self._start(state)

    def _bring_back(self, state: KeyState) -> None:
        """Put the next messages that are set aside back into the key's queue."""
        taken: list[Entry] = []
        while not taken and state.behind is not None:
            taken, state.behind = self._next_set_aside(state.key, state.behind)
        for entry in taken:
            if entry.ordinal in self._unfinished:
                self._set_aside -= 1
            self._unfinished[entry.ordinal] = entry
            self._admitted += 1
            state.queue.append(entry)
        self.report.waiting -= len(taken)
        self._has_room.set()

    def _next_set_aside(self, key: bytes, start: int) -> tuple[list[Entry], int | None]:
        """The next entries of a key that are set aside, from an ordinal on, and where those after them begin."""
        kept = [entry for entry in self._unfinished.values() if entry.message.key_bytes == key and not entry.waits]
        found = {entry.ordinal: entry for entry in kept if entry.ordinal >= start}
        rows = self._checkpoints.inbox(start - 1, _INBOX_CHUNK + 1, key)  # one more: is there more?
        for row in rows:
            if row.ordinal not in self._unfinished and row.ordinal not in self._renumbered:
                found[row.ordinal] = self._entry(row)
        # Beyond the last row there may be others, which come before what is in memory.
        end = rows[-1].ordinal if len(rows) > _INBOX_CHUNK else math.inf
        taken = [found[ordinal] for ordinal in sorted(found) if ordinal <= end][:_INBOX_CHUNK]
        if len(taken) == len(found) and end == math.inf:
            return taken, None
        return taken, (taken[-1].ordinal if len(taken) == _INBOX_CHUNK else rows[-1].ordinal) + 1

    # The checkpointer.

    async def _checkpoint_now_and_then(self) -> None:
        seen = 0  # not the count of now: the reader may be far by the time that this is run first
        last = False
        while not last:
            try:
                async with asyncio.timeout(self._interval):
                    await self._checkpoint_due.wait()
            except TimeoutError:
                pass
            self._checkpoint_due.clear()
            last = self._ending  # asked before the checkpoint: what changes while it is written needs another one
            if self._changes != seen and not self._tainted:
                seen = self._changes
                await self._checkpoint()

    async def _checkpoint(self) -> None:
        checkpoint, entries = self._snapshot()
        covered, self._covered = self._covered, []
        self._writing = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, checkpoint)
        except BaseException:
            self._tainted = True
            raise
        finally:
            self._writing = False
        self._number = checkpoint.number
        self._memory_on_disk = True
        if self._known is not None:
            self._known.completed(covered)
        self.report.checkpoints += 1
        aside, self._aside_meanwhile = self._aside_meanwhile, []
        self._forget([*entries, *aside])
        self._evict()
        await self._store.prune(Covered(checkpoint.number, covered))

    def _snapshot(self) -> tuple[Checkpoint, list[Entry]]:
        """What changed, taken in one step; only references to the changed keys' memory are copied."""
        entries = [entry for entry in self._unfinished.values() if entry.changed or not entry.stored]
        for entry in entries:
            entry.stored, entry.changed = True, False
        changed, self._changed = self._changed, {}
        finished, self._finished_entries = self._finished_entries, []
        checkpoint = Checkpoint(
            self._number + 1,
            self._read_records,
            self.position,
            self._sink.snapshot(),
            {key: state.memory for key, state in changed.items()},
            [self._identities.inbox_entry(entry.ordinal, entry.message, entry.parked) for entry in entries],
            finished,
        )
        self._identities.fill(checkpoint, self._covered)
        return checkpoint, entries

    def _write(self, checkpoint: Checkpoint) -> None:
        self._sink.flush(checkpoint.sink)
        self._checkpoints.commit(checkpoint)

    def _evict(self) -> None:
        """Forget the keys that were idle for longest; their memory is in the checkpoint."""
        surplus = len(self._keys) - _CACHED_KEYS
        for key, state in list(self._keys.items()) if surplus > 0 else ():
            if surplus == 0:
                break
            if not (state.busy or state.queue or state.done or state.held or state.history or key in self._changed):
                del self._keys[key]
                surplus -= 1


def _work_on(state: KeyState) -> str:
    entry = state.queue[0] if state.queue else None
    about = f", message {entry.message.id!r}" if entry is not None else ""
    return f"running the actions of key {codec.decode(state.key)!r}{about}"


def _cancelled_by_others(job: str, about: str) -> Exception:
    """What is raised for a task that something else cancelled: its work is not done, and nobody said to stop."""
    return DalSegnoError(
        f"job {job!r}: a task of the run was cancelled by other code while it was {about}; what it did not finish is "
        "done by the next run. Cancel only tasks that your code made; a run is stopped with LocalRunner.stop()"
    )
