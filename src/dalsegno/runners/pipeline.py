"""The local runner's machine: one run of one job, from its last checkpoint to the end of its input.

Four activities share one event loop. The *reader* (`Reader`) admits messages to the `Inbox`, in input order, as long as
there is room. One *worker* per busy key runs that key's messages in order. The *checkpointer* (`Checkpointer`) takes a
checkpoint now and then. The *listener* (`Parking`) looks for what people decided about parked messages, and for those
whose time has come.

When the actions of a message are done, its key's next message starts at once, on the memory that it left: records
become durable in order, so nothing of the next one can outlive what came before it. What makes the message *finished*
happens when its records are durable, in one step without any ``await`` (`_finish`): its outputs are written, its key's
memory as checkpoints know it moves on, its inbox entry goes.

A stop, a failed action and a full disk all end in the same way: no new call starts, calls in flight end and are
recorded, and, unless the store or the sink failed, a last checkpoint is taken.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal

from dalsegno.agent import Agent
from dalsegno.core import codec
from dalsegno.core.commit import GroupCommit
from dalsegno.core.environment import Environment
from dalsegno.core.executor import Executor, Finished, Parked
from dalsegno.core.flight import Stopped
from dalsegno.core.late import LateCalls
from dalsegno.core.records import by_message
from dalsegno.errors import DalSegnoError, InputError, RestoreError, StoreError
from dalsegno.runners.checkpointer import Checkpointer, Reading
from dalsegno.runners.checkpoints import Checkpoint, CheckpointFile, JobIdentity
from dalsegno.runners.closing import close_all
from dalsegno.runners.identities import Identities
from dalsegno.runners.inbox import Entry, Inbox, KeyState
from dalsegno.runners.intake import OnBadInput
from dalsegno.runners.message_ids import KeyOf, MessageIds
from dalsegno.runners.parking import Parking
from dalsegno.runners.quarantine import Quarantine
from dalsegno.runners.reader import Reader
from dalsegno.runners.report import ParkedMessage, RunReport
from dalsegno.runners.retention import Pruner, Retention
from dalsegno.runners.sinks import Sink
from dalsegno.runners.sources import Source
from dalsegno.stores.base import TaskActionStore

OnFailure = Literal["stop", "park"]
OnDivergence = Literal["strict", "rerun"]

_BUFFERED_PER_SLOT = 16
_MESSAGES_A_TURN = 4
_DELIVER_SECONDS = 10.0
"""How long a run that is stopped tries to deliver outputs; they are in the checkpoint if it cannot."""

_logger = logging.getLogger("dalsegno")

_late_calls: dict[str, LateCalls] = {}
"""By the identity of a job's store: what the runs of this process left in threads."""


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
        key_of: KeyOf,
        ids: MessageIds,
        owner: str,
        max_in_flight: int,
        checkpoint_interval: float,
        checkpoint_after: int,
        on_bad_input: OnBadInput,
        park_failures: bool,
        max_attempts: int | None,
        wait: bool,
        report: RunReport,
        retention: Retention,
        go_back_to: int | None,
    ) -> None:
        self.environment = environment
        self.report = report
        self.reading = reading = Reading()
        self._log = log
        self._agent = agent
        self._job = job
        self._store = store
        self._checkpoints = checkpoints
        self._source = source
        self._sink = sink
        sink.belongs_to(job)
        self._owner = owner
        self._go_back_to = go_back_to
        self.went_back = False
        """Whether the checkpoint file is back where it was to go."""
        self._executor = Executor(agent, environment, park_failures=park_failures, max_attempts=max_attempts)
        self._max_attempts = max_attempts
        self._quarantine: Quarantine | None = None
        """If the last run did not come to its end; see `Quarantine`."""
        self._begun_before: float = math.inf
        """Messages before this ordinal may have been begun by a run that did not come to its end."""
        self._wait = wait
        self._max_in_flight = max_in_flight
        self._slots = asyncio.Semaphore(max_in_flight)
        self._workers: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[None]] = set()
        """The tasks that this pipeline itself has cancelled."""
        self._reads: asyncio.Task[None] | None = None
        self._restored = False
        self._failure: BaseException | None = None
        self._identities = identities = Identities(
            job,
            ids,
            source,
            key_of,
            on_bad_input,
            report,
            checkpoints,
            release=lambda entry: self._reader.take_turn(entry),
            fail=self._fail,
            held=lambda key: self._inbox.is_held(key),
            kept_checkpoints=retention.checkpoints,
        )
        room = max_in_flight * _BUFFERED_PER_SLOT
        self._inbox = inbox = Inbox(checkpoints, identities, report, room, self._start, lambda: sink.is_full)
        self._parking = Parking(store, environment, inbox, report)
        self._pruner = Pruner(store, checkpoints, retention, environment.clock)
        self._checkpointer = Checkpointer(
            checkpoints,
            self._pruner,
            source,
            sink,
            identities,
            inbox,
            reading,
            report,
            checkpoint_interval,
            checkpoint_after,
        )
        self._reader = Reader(source, identities, inbox, self._checkpointer, reading, self._all_came, self._pruner)

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
            self._sink.interrupt(0)
            closings = [self._checkpointer.close, self._sink.close, self._source.close]
            if self._max_attempts is not None and self._restored:
                closings.append(self._checkpoints.end_run)
            await close_all(failure, [*closings, self._checkpoints.close, self._store.close])

    def stop(self) -> None:
        """Start no new call, let those in flight end, take a last checkpoint and return from `run`."""
        self.environment.stop()
        self._sink.interrupt(_DELIVER_SECONDS)
        self._parking.news.set()
        if self._reads is not None:
            self._cancel(self._reads)

    def _cancel(self, *tasks: asyncio.Task[None]) -> None:
        self._cancelled.update(tasks)
        for task in tasks:
            task.cancel()

    async def _process_all(self) -> None:
        self._reads = self._begin(self._reader.run, f"reading {self._source.describe()}", "reader")
        checkpointer = self._begin(self._checkpointer.run, "taking checkpoints", "checkpointer")
        listener = self._begin(self._parking.listen, "looking for decisions", "listener")
        if self.environment.stopping:  # asked to before there was anything to stop
            self._cancel(self._reads)
        try:
            await asyncio.wait([self._reads])
            await self._work_off()
            self._cancel(listener)
            await asyncio.wait([listener])
            await self._guarded(self._log.close)  # what no message waits for any more
        except asyncio.CancelledError:
            self._checkpointer.tainted = True  # what becomes durable from now on is for the next run to finish
            self.environment.cancelled = True
            self._cancel(self._reads, checkpointer, listener, *self._workers)
            await asyncio.wait([self._reads, checkpointer, listener, *self._workers])
            raise
        self._checkpointer.end()
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
            await self._guarded(self._parking.take_up)  # what was decided since the last look
            if self._workers:
                continue
            if not (self._wait and self._parking.waits_for_signal) or self.environment.stopping:
                return
            self._parking.news.clear()
            await self._parking.news.wait()

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
            self._checkpointer.tainted = True
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
        if last and pruned < self._checkpoints.pruned_before(last):
            raise RestoreError(
                f"job {self._job!r} would go on from checkpoint {last.number}, but the store was last pruned for "
                f"checkpoint {pruned}: it is older than the checkpoint file, so what happened since is not recorded in "
                "it. Put the newer store back, or start a new job"
            )
        keys = await self._store.keys()
        if last is not None:
            self._identities.check_kind(last, any_recorded=bool(keys))
        await self._checkpointer.in_thread(self._sink.open, last.sink if last else None)
        if self._go_back_to is not None:
            last = self._go_back(last, self._go_back_to)
            self.went_back = True
            await self._checkpointer.in_thread(self._sink.open, last.sink)
        self.environment.check_output = self._sink.check
        if last is None:
            # From now on a restart knows how long the sink was before this job wrote to it.
            last = Checkpoint(0, 0, None, self._sink.snapshot(), ids=self._identities.recorded)
            last.taken = self._pruner.now()
            self._sink.flush(last.sink)
            self._checkpoints.commit(last)
        else:
            self._inbox.memory_on_disk = True
            await self._checkpointer.in_thread(self._checkpointer.deliver, last.sink)
        self._checkpointer.number = last.number
        self.reading.records, self.reading.position = last.read, last.position
        self._identities.restore(last)
        leftovers = await self._claim_recorded(keys)
        self._identities.settle(last.ids)
        await self._pruner.restored(leftovers)
        await self._parking.read_decisions()
        if self._max_attempts is not None and self._checkpoints.begin_run():
            self._quarantine = Quarantine()
            if not self._identities.recovery.missing:
                self._all_came(self._identities.begun())

    async def _claim_recorded(self, keys: Iterable[bytes]) -> list[tuple[bytes, str]]:
        """Claim *keys*, which have records; what the last checkpoint covered but a crash left unpruned."""
        leftovers: list[tuple[bytes, str]] = []
        for key in keys:
            state = self._inbox.state_of(key)
            await self._claim(state)
            covering = self._identities.sort_out(key, state.history)
            leftovers += [(key, message) for message in covering.leftovers]
            for message in [*covering.leftovers, *covering.retained]:
                del state.history[message]
        return leftovers

    def _go_back(self, last: Checkpoint | None, number: int) -> Checkpoint:
        """Make the kept checkpoint *number* the last one. All that was recorded after it is on record and replayed."""
        kept = [checkpoint.number for checkpoint in self._checkpoints.kept()] if last else []
        if last is None or number not in kept:
            raise _not_kept(self._job, number, kept)
        if number == last.number:
            return last
        if not self._sink.goes_back:
            raise RestoreError(
                f"job {self._job!r} cannot go back to checkpoint {number}: what was written to "
                f"{self._sink.describe()} since cannot be taken back, and would be written twice"
            )
        head = self._checkpoints.kept_head(number)
        if head.ids != self._identities.recorded:
            raise RestoreError(
                f"job {self._job!r} cannot go back to checkpoint {number}: the ids of its messages were made as "
                f"{head.ids!r} then, and would now be made as {self._identities.recorded!r}; give what was given then"
            )
        self._checkpoints.go_back(number)
        _logger.warning(
            "job %r went back from checkpoint %d to %d: the input from record %d on is read again, and what is recorded"
            " of it is replayed",
            self._job,
            last.number,
            number,
            head.read + 1,
        )
        return head

    def _all_came(self, ordinal: int) -> None:
        """No recorded message is yet to come: the process had read at most so much beyond the last one of them."""
        turns = self._identities.turns
        waiting = turns.waiting if turns is not None else 0
        self._begun_before = ordinal + waiting + self._inbox.room + 1

    # The workers.

    def _start(self, state: KeyState) -> None:
        if not state.busy:
            state.busy = True
            worker = asyncio.create_task(
                self._guarded(functools.partial(self._work, state), functools.partial(_work_on, state))
            )
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self, state: KeyState) -> None:
        try:
            while state.queue and not self.environment.stopping:
                async with self._slots:
                    for _ in range(_MESSAGES_A_TURN):
                        if state.queue and not self.environment.stopping:
                            await self._process(state, state.queue[0])
                await asyncio.sleep(0)  # an action need not have given way to the others
                if not state.queue and state.behind is not None and state.parked is None:
                    self._inbox.bring_back(state)
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
            self._parking.park(state, entry, result)
            self._checkpointer.changed()
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
            if not self._checkpointer.tainted:
                self._finish(state, entry, result)
        except BaseException as failure:
            self._fail(failure)

    def _finish(self, state: KeyState, entry: Entry, result: Finished) -> None:
        """The message is done and durable. No await in here: a checkpoint sees all of it or nothing."""
        try:
            for output in result.outputs:
                self._sink.write_for(entry.message.key, output.value, output.id)
        except BaseException:
            self._checkpointer.tainted = True  # a part of the message's outputs may be in the sink
            raise
        self.report.outputs += len(result.outputs)
        self.report.messages += 1
        if result.memory is not state.memory:
            state.memory = result.memory
            self._checkpointer.changed_memory(state)
        state.done -= 1
        state.history.pop(entry.message.id, None)
        if self.environment.decisions:
            self.environment.decisions.pop((state.key, entry.message.id), None)
        self._inbox.finish(entry)
        self._checkpointer.cover(state.key, entry.message.id)

    # What is told of the run.

    def parked(self) -> list[ParkedMessage]:
        """The messages that are parked now."""
        return self._parking.messages()

    def in_flight(self) -> int:
        """How many messages are being run."""
        return min(len(self._workers), self._max_in_flight)

    def worked_off(self) -> tuple[int, int]:
        """How many of the records that were read wait for nothing or for a person, and how many were read."""
        return self.reading.records - min(self._inbox.queued, self.reading.records), self.reading.records


def _not_kept(job: str, number: int, kept: list[int]) -> RestoreError:
    if not kept:
        return RestoreError(f"job {job!r} cannot go back to checkpoint {number}: it has not taken one yet")
    if number > kept[-1]:
        what = f"its last checkpoint is {kept[-1]}"
    else:
        what = (
            f"the oldest checkpoint that is kept is {kept[0]}, and what was needed to replay from before that is gone"
        )
    return RestoreError(
        f"job {job!r} cannot go back to checkpoint {number}: {what}. Restore one from {kept[0]} to {kept[-1]}, and "
        "keep more of them with keep_checkpoints (--keep-checkpoints)"
    )


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
