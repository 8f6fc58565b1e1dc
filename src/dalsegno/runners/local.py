"""The local runner: an agent over a stream, in one process, safe against crashes.

::

    runner = LocalRunner(ReviewAgent(), job="reviews")
    report = runner.run("reviews.jsonl", "out.jsonl", key="id")

Many keys at a time, in order per key. Run the same job again after a crash, and it goes on from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from dalsegno.agent import Agent, check_agent
from dalsegno.cipher import PayloadCipher
from dalsegno.core import codec
from dalsegno.core.commit import GroupCommit
from dalsegno.core.environment import Environment
from dalsegno.core.watch import Watch
from dalsegno.errors import DefinitionError
from dalsegno.memory import Leaf, Node
from dalsegno.operate.operator import Operator
from dalsegno.runners.checkpointer import UNCOVERED
from dalsegno.runners.checkpoints import CheckpointFile, CheckpointInfo
from dalsegno.runners.intake import OnBadInput
from dalsegno.runners.message_ids import FieldOrFunction, KeyOf, MessageIds
from dalsegno.runners.pipeline import OnDivergence, OnFailure, Pipeline
from dalsegno.runners.report import OnProgress, Progress, RunReport
from dalsegno.runners.retention import Retention
from dalsegno.runners.sinks import open_sink
from dalsegno.runners.sources import Source, open_source
from dalsegno.stores import open_store
from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.default import default_store_path, file_name
from dalsegno.stores.encrypting import EncryptingStore
from dalsegno.stores.sqlite import SqliteStore

_PROGRESS_SECONDS = 0.1
_CHECKPOINT_SECONDS = 5.0


class LocalRunner:
    """Runs *agent* as the job *job*. The same job name is the same history; a new name starts afresh.

    *store* is a URL or a store; unless given, ``.dalsegno/<job>.db`` below the present directory. *checkpoints* is the
    file that holds the job's checkpoints; unless given, it lies beside an SQLite store, or in memory with a store
    that is in memory. *max_in_flight* bounds the messages that are processed at a time, *checkpoint_interval* is in
    seconds (unless given 5, or 1 with a sink that passes outputs on with each checkpoint), and a thousand finished
    messages bring about a checkpoint before its time; *linger* is how long, in seconds, a record that nobody waits for
    may wait for company. With a *cipher* all payloads in the store and the checkpoints are encrypted; a job has the
    same one, or none, in all of its runs.

    *on_failure* says what becomes of a message whose action raises: ``"stop"`` ends the run with the error, and the
    next run tries the message again; ``"park"`` sets the message aside until it is retried. *max_attempts*, 3 or
    more, parks a message during which the process was killed that many times, the last of them while nothing else ran,
    so that one that kills the process does not do so for ever; unless given, there is no limit.

    *on_divergence* says what becomes of a message in flight whose record the changed code no longer fits:
    ``"strict"`` ends the run with `DivergenceError`, before anything executes; ``"rerun"`` goes on with a warning:
    recorded calls that the code still makes keep their answers, the others are given up, new ones are executed.

    *keep_checkpoints* is how many of the last checkpoints can be restored: what they need stays in the store. *restore*
    is the number of one of them, see `checkpoints`: the next run goes back to it, cuts the sink back and reads the
    input again from there; what is recorded since is replayed, not executed. *keep_history* is how long finished
    messages stay in the store for `dalsegno show` after a checkpoint covers them; they are never replayed.

    Raises `DefinitionError` for a wrong agent or option.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        job: str,
        store: str | TaskActionStore | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        max_in_flight: int = 64,
        checkpoint_interval: float | None = None,
        linger: float = 0.002,
        on_failure: OnFailure = "stop",
        max_attempts: int | None = None,
        on_divergence: OnDivergence = "strict",
        cipher: PayloadCipher | None = None,
        keep_checkpoints: int = 1,
        keep_history: timedelta | None = None,
        restore: int | None = None,
    ) -> None:
        self.agent = check_agent(agent)
        self.job = _checked_job(job)
        _check_options(max_in_flight, checkpoint_interval, linger, on_failure, max_attempts, on_divergence)
        self._retention = _checked_retention(keep_checkpoints, keep_history)
        self._go_back_to = _checked_restore(restore)
        self._store = open_store(store if store is not None else f"sqlite:///{default_store_path(job)}")
        self._cipher = _checked_cipher(cipher, self._store)
        self._checkpoints = CheckpointFile(checkpoint_path(job, self._store, checkpoints), cipher)
        self._max_in_flight = max_in_flight
        self._interval = checkpoint_interval
        self._linger = linger
        self._park_failures = on_failure == "park"
        self._max_attempts = max_attempts
        self._rerun = on_divergence == "rerun"
        self._clock: Callable[[], datetime] = functools.partial(datetime.now, UTC)
        self._checkpoint_after = UNCOVERED
        self._watch: Watch | None = None
        self._pipeline: Pipeline | None = None
        self._at_once: Callable[[str], None] | None = None
        """Told of the second signal during `run`, for a command that must end even if the run cannot."""

    def run(
        self,
        source: object,
        sink: object = None,
        *,
        key: FieldOrFunction = None,
        message_id: FieldOrFunction = None,
        on_bad_input: OnBadInput = "stop",
        wait: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RunReport:
        """`run_async` for code that has no event loop. The first SIGINT or SIGTERM stops the run cleanly.

        While it runs, Python's garbage collector looks for cycles less often, and threads take turns more often.
        """
        with _tuned_interpreter(), asyncio.Runner() as runner:
            runner.get_loop()  # first, as Ctrl-C while it is made would leave a coroutine that nobody awaits
            return runner.run(
                self._run(
                    source,
                    sink,
                    key=key,
                    message_id=message_id,
                    on_bad_input=on_bad_input,
                    wait=wait,
                    on_progress=on_progress,
                    signals=True,
                )
            )

    async def run_async(
        self,
        source: object,
        sink: object = None,
        *,
        key: FieldOrFunction = None,
        message_id: FieldOrFunction = None,
        on_bad_input: OnBadInput = "stop",
        wait: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RunReport:
        """Run to the end of *source*, starting where the last run of this job ended.

        *source* is a path (JSON Lines, CSV), ``"-"`` for standard input, an iterable or async iterable; *sink* a path,
        ``"-"`` for standard output, a function that takes an output, or None to drop outputs. *key* is the field that
        the stream is partitioned by, or a function of the record; without it all messages have one key, so that one
        is processed at a time. *message_id*, in the same forms, gives a string or an int that names the message among
        those of its key; without it the source names it. With *wait* the run does not end while a message waits for a
        signal.

        Raises `ActionError` when an action fails, `DivergenceError` when code or input no longer fits the record,
        `InputError` for a bad record, `RestoreError` when source, sink, store and checkpoints do not fit together,
        `RecordError` when what is recorded cannot be read, for want of the right cipher for one, `StoreError` when
        something could not be made durable. Whatever it raises, running the job again goes on from the last checkpoint.
        """
        return await self._run(
            source,
            sink,
            key=key,
            message_id=message_id,
            on_bad_input=on_bad_input,
            wait=wait,
            on_progress=on_progress,
            signals=False,
        )

    def stop(self) -> None:
        """Stop the run cleanly: no new call starts, calls in flight end, a last checkpoint is taken.

        Not thread-safe.
        """
        if self._pipeline is not None:
            self._pipeline.report.stopped_by = self._pipeline.report.stopped_by or "stop()"
            self._pipeline.stop()

    def operator(self) -> Operator:
        """An `Operator` of this job: sees what is parked and decides about it, also while this runner runs it."""
        return Operator(job=self.job, store=self._store, cipher=self._cipher)

    def memories(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Each key that has something in its short-term memory, with it as nested dicts, after a run."""
        for key, node in self._checkpoints.memories():
            yield codec.decode(key), _plain(node)

    def checkpoints(self) -> Sequence[CheckpointInfo]:
        """The checkpoints that *restore* may name, oldest first, also while the job runs.

        Raises `StoreError` if the job has not run yet.
        """
        return self._checkpoints.kept()

    async def _run(
        self,
        source: object,
        sink: object,
        *,
        key: FieldOrFunction,
        message_id: FieldOrFunction,
        on_bad_input: OnBadInput,
        wait: bool,
        on_progress: OnProgress | None,
        signals: bool,
    ) -> RunReport:
        if self._pipeline is not None:
            raise DefinitionError(
                f"job {self.job!r} is already running in this LocalRunner; wait for it, or use another runner and job"
            )
        if on_bad_input not in ("stop", "skip", "park"):
            raise DefinitionError(f"on_bad_input={on_bad_input!r} is not one of 'stop', 'skip', 'park'")
        report = RunReport(self.job)
        opened = open_source(source)
        key_of, ids = KeyOf.choose(key, opened), MessageIds.choose(message_id, opened)
        opened_sink = open_sink(sink)
        started = time.monotonic()
        # Each message may hold one thread with a plain action, which waits for a call that needs another one.
        pool = ThreadPoolExecutor(2 * self._max_in_flight, "dalsegno-call")
        try:
            store = self._store if self._cipher is None else EncryptingStore(self._store, self._cipher)
            log = GroupCommit(store.put, linger=self._linger)
            environment = Environment(self.job, log, _in_pool(pool), self._clock, rerun=self._rerun, watch=self._watch)
            self._pipeline = Pipeline(
                agent=self.agent,
                environment=environment,
                log=log,
                job=self.job,
                store=store,
                checkpoints=self._checkpoints,
                source=opened,
                sink=opened_sink,
                key_of=key_of,
                ids=ids,
                owner=f"process {os.getpid()}",
                max_in_flight=self._max_in_flight,
                checkpoint_interval=self._interval or opened_sink.checkpoint_interval or _CHECKPOINT_SECONDS,
                checkpoint_after=self._checkpoint_after,
                on_bad_input=on_bad_input,
                park_failures=self._park_failures,
                max_attempts=self._max_attempts,
                wait=wait,
                report=report,
                retention=self._retention,
                go_back_to=self._go_back_to,
            )
            refresh = _Refresh(self._pipeline, opened, started, on_progress)
            try:
                with _signals(self.stop, report, self._at_once) if signals else nullcontext():
                    refresh.start()
                    await self._pipeline.run()
            finally:
                if self._pipeline.went_back:
                    self._go_back_to = None
                refresh.end()
                self._pipeline = None
        finally:
            # After a cancellation a call may still sit in its thread; waiting for it here would block the event loop.
            pool.shutdown(wait=False, cancel_futures=True)
        return report


def checkpoint_path(job: str, store: TaskActionStore, given: str | os.PathLike[str] | None) -> Path | None:
    """Where the checkpoints of *job* are, None for in memory; *given* is what the user says about it."""
    if not store.persistent:
        if given is not None:
            raise DefinitionError(
                "checkpoints= with a store in memory: after a restart they would not fit together; give both a "
                "file, or neither"
            )
        return None
    if given is not None:
        return Path(given)
    if isinstance(store, SqliteStore):
        stem = store.path.with_suffix("") if store.path.suffix == ".db" else store.path
        own = stem.name == file_name(job)  # as in the default layout
        name = stem.name if own else f"{stem.name}.{file_name(job, longest=80)}"
        return stem.with_name(f"{name}.checkpoints.db")
    return Path(".dalsegno") / f"{file_name(job)}.checkpoints.db"


def _checked_retention(keep_checkpoints: object, keep_history: object) -> Retention:
    if not (type(keep_checkpoints) is int and keep_checkpoints >= 1):
        raise DefinitionError(f"keep_checkpoints={keep_checkpoints!r}: give a whole number from 1 on")
    if keep_history is None:
        return Retention(keep_checkpoints)
    if not (isinstance(keep_history, timedelta) and keep_history >= timedelta(0)):
        raise DefinitionError(f"keep_history={keep_history!r}: give a timedelta, or None to keep no history")
    return Retention(keep_checkpoints, keep_history)


def _checked_restore(restore: object) -> int | None:
    if restore is None:
        return None
    if not (type(restore) is int and restore >= 0):
        raise DefinitionError(f"restore={restore!r}: give the number of a checkpoint, see LocalRunner.checkpoints()")
    return restore


def _check_options(
    max_in_flight: object,
    checkpoint_interval: object,
    linger: object,
    on_failure: object,
    max_attempts: object,
    on_divergence: object,
) -> None:
    if on_divergence not in ("strict", "rerun"):
        raise DefinitionError(f"on_divergence={on_divergence!r} is not one of 'strict', 'rerun'")
    if on_failure not in ("stop", "park"):
        raise DefinitionError(f"on_failure={on_failure!r} is not one of 'stop', 'park'")
    if max_attempts is not None and not (type(max_attempts) is int and max_attempts >= 3):
        raise DefinitionError(
            f"max_attempts={max_attempts!r}: give a whole number from 3 on, or None for no limit; twice a message runs "
            "beside others, so only the third time, alone, tells which one kills the process"
        )
    if not (isinstance(max_in_flight, int) and max_in_flight >= 1):
        raise DefinitionError(f"max_in_flight={max_in_flight!r}: at least 1 message must be in flight, a whole number")
    if checkpoint_interval is not None and not (
        isinstance(checkpoint_interval, (int, float)) and 0 < checkpoint_interval < math.inf
    ):
        raise DefinitionError(f"checkpoint_interval={checkpoint_interval!r}: give a positive number of seconds")
    if not (isinstance(linger, (int, float)) and 0 <= linger < math.inf):
        raise DefinitionError(f"linger={linger!r}: give a number of seconds, 0 or more")


def _checked_cipher(cipher: object, store: TaskActionStore) -> PayloadCipher | None:
    if isinstance(store, EncryptingStore):
        raise DefinitionError(
            "the store is an EncryptingStore, which leaves the checkpoints in clear: give the runner the store that it "
            "wraps, and cipher=, which encrypts both"
        )
    if not (cipher is None or isinstance(cipher, PayloadCipher)):
        raise DefinitionError(f"cipher={cipher!r} is not a PayloadCipher: give one, such as AesGcmCipher(key)")
    return cipher


def _checked_job(job: object) -> str:
    if not (isinstance(job, str) and job.strip()):
        raise DefinitionError(f"job={job!r}: give the job a name, a string of at least one character that is not blank")
    try:
        job.encode()
    except UnicodeEncodeError:
        raise DefinitionError(f"job={job!r}: a job name is text that can be written as UTF-8") from None
    return job


def _in_pool(pool: ThreadPoolExecutor) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    async def run_in_thread(function: Callable[[], Any]) -> Any:
        context = contextvars.copy_context()
        returned, value = await asyncio.get_running_loop().run_in_executor(pool, context.run, _outcome, function)
        if returned:
            return value
        raise value

    return run_in_thread


def _outcome(function: Callable[[], Any]) -> tuple[bool, Any]:
    """What *function* returned or raised. A future could not carry a StopIteration."""
    try:
        return True, function()
    except BaseException as error:
        return False, error


def _plain(node: Node) -> dict[str, Any]:
    return {
        name: codec.from_tree(field.tree) if isinstance(field, Leaf) else _plain(field)
        for name, field in node.fields.items()
    }


class _Refresh:
    """Keeps the report's counts and clock up to date, and tells *on_progress*."""

    def __init__(self, pipeline: Pipeline, source: Source, started: float, on_progress: OnProgress | None) -> None:
        self._pipeline = pipeline
        self._source = source
        self._started = started
        self._on_progress = on_progress
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._update()
        if self._on_progress is not None:
            self._timer = asyncio.get_running_loop().call_later(_PROGRESS_SECONDS, self.start)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._update()

    def _update(self) -> None:
        report, counters = self._pipeline.report, self._pipeline.environment.counters
        report.calls_executed, report.calls_replayed = counters.executed, counters.replayed
        report.diverged = counters.diverged
        report.parked = self._pipeline.parked()
        report.seconds = time.monotonic() - self._started
        report.lag = self._source.lag(self._pipeline.reading.position)
        if self._on_progress is not None:
            read = self._source.progress(self._pipeline.reading.position)
            done, of = self._pipeline.worked_off()
            in_flight = self._pipeline.in_flight()
            self._on_progress(Progress(report, read, self._source.total(), in_flight, read * done // max(of, 1)))


@contextmanager
def _tuned_interpreter() -> Iterator[None]:
    """Python's defaults cost an agent whose calls take no time about a quarter of its speed.

    Many small objects live until a commit, and the garbage collector would look at all of them every few messages.
    The thread that writes would wait for up to 5 ms, at each step, for the one that runs the agent.
    """
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(max(thresholds[0], 20_000) if thresholds[0] else 0, *thresholds[1:])
    sys.setswitchinterval(min(interval, 0.0003))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


@contextmanager
def _signals(stop: Callable[[], None], report: RunReport, at_once: Callable[[str], None] | None) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the run cleanly, the second one at once.

    *at_once* is told of the second one when it comes, between any two steps of the program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    seen = False

    def in_loop(name: str) -> None:
        if report.stopped_by is not None and main is not None:
            # The loop would wait for its own threads, too, and a callee may sit in one for ever.
            loop.set_default_executor(ThreadPoolExecutor(1))
            main.cancel(name)
            return
        report.stopped_by = name
        stop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        name = signal.Signals(number).name
        if at_once is not None and (seen or report.stopped_by is not None):
            at_once(name)  # here, as an action may block the loop
        seen = True
        loop.call_soon_threadsafe(in_loop, name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
