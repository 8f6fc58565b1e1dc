"""Runs one life of a job after the other, in this process and in virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from dalsegno.agent import Agent
from dalsegno.core import codec
from dalsegno.core.watch import Watch
from dalsegno.runners.local import LocalRunner
from dalsegno.runners.report import RunReport
from dalsegno.runners.sinks import Sink
from dalsegno.stores import open_store
from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.memory import MemoryStore
from dalsegno.testing.outside import Outside, looking_out
from dalsegno.testing.virtual_loop import VirtualLoop
from dalsegno.testing.watched import KeptOutputs, LifeWatch, WatchedCheckpoints, WatchedStore
from dalsegno.testing.world import START, Life, Strike, World

MakeStore = str | Callable[[Path], TaskActionStore]

_TURNS_TO_DIE = 200
"""Turns of the event loop that what was left running by a crash gets to end; then it is thrown away."""


@dataclass(frozen=True)
class Job:
    """What is run in each life. *store* is a URL, with ``{folder}`` for the folder of a history, or makes a store."""

    agent: Agent | Callable[[], Agent]
    inputs: Sequence[Any]
    store: MakeStore = "memory://"
    outside: Outside | None = None
    checkpoint_after: int = 3
    clock_jumps: float = 0.0
    seed: int = 0
    key: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def make_agent(self) -> Agent:
        return self.agent if isinstance(self.agent, Agent) else self.agent()


@dataclass(frozen=True)
class Ended:
    """How a life ended: struck by a crash, with an error, or with a report and what is in memory then."""

    life: Life
    error: BaseException | None = None
    report: RunReport | None = None
    memories: dict[bytes, Any] = field(default_factory=dict)

    @property
    def crashed(self) -> bool:
        return self.life.dead


class Lives:
    """All lives of one case, in one *world*."""

    def __init__(self, job: Job, world: World) -> None:
        self.job = job
        self.world = world
        self.successors: list[Ended] = []
        """How those lives ended that took over from one that went on."""
        self._memory: dict[str, Any] = {}

    def store(self) -> TaskActionStore:
        """The store, as a new process opens it."""
        made = self.job.store
        if made == "memory://":
            return MemoryStore(self._memory)
        if isinstance(made, str):
            return open_store(made.replace("{folder}", str(self.world.folder)))
        return made(self.world.folder)

    def watch(self, life: Life) -> Watch:
        return LifeWatch(life)

    def sink(self, life: Life) -> Sink:
        return KeptOutputs(life)

    def live(self, strike: Strike | None = None) -> Ended:
        """One life, to its crash or to its end."""
        random.seed(f"{self.world.seed} {len(self.world.lives)}")
        loop = VirtualLoop(self.world.clock)
        try:
            with _quiet(loop):
                try:
                    return loop.run_until_complete(self._live(strike, loop))
                finally:
                    loop.run_until_complete(_throw_away())
                    _bury(asyncio.all_tasks(loop))
        finally:
            self.world.clock = loop.time()
            loop.close()

    async def _live(self, strike: Strike | None, loop: VirtualLoop) -> Ended:
        life = Life(self.world, strike, loop, self.job.clock_jumps)
        store = WatchedStore(self.store(), life, loop, self._take_over)
        runner = self._runner(store, life, loop)
        checkpoints = WatchedCheckpoints(self.world.checkpoint_file, self.job.options.get("cipher"))
        checkpoints.life = life
        runner._checkpoints = checkpoints
        with looking_out(life):
            run = asyncio.ensure_future(runner.run_async(self.job.inputs, self.sink(life), key=self.job.key))
            over = asyncio.ensure_future(life.over.wait())
            await asyncio.wait([run, over], return_when=asyncio.FIRST_COMPLETED)
            if life.dead:
                await _throw_away()
                run.cancelled() or run.exception()
                return Ended(life)
            over.cancel()
            error = run.exception()
        if error is not None:
            return Ended(life, error)
        return Ended(life, None, run.result(), {codec.encode(key): memory for key, memory in runner.memories()})

    def _take_over(self) -> None:
        """Let another process have the job, and do all of it, while this one stands still."""
        self.world.copy_checkpoints()
        thread = threading.Thread(target=self._succeed)
        thread.start()
        thread.join()

    def _succeed(self) -> None:
        self.successors.append(self.live())

    def _runner(self, store: TaskActionStore, life: Life, loop: VirtualLoop) -> LocalRunner:
        runner = LocalRunner(
            self.job.make_agent(),
            job=self.world.job,
            store=store,
            checkpoints=self.world.checkpoint_file,
            **self.job.options,
        )
        runner._watch = self.watch(life)
        runner._checkpoint_after = self.job.checkpoint_after
        runner._clock = lambda: START + timedelta(seconds=loop.time() + life.clock_error)
        return runner


async def _throw_away() -> None:
    """Cancel what a life left running. After a crash it can touch nothing any more, and need not end."""
    quiet = 0
    for _ in range(_TURNS_TO_DIE):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        quiet = 0 if left else quiet + 1
        if quiet > 1:  # what was to be called soon may have begun another task
            return
        for task in left:
            task.cancel()
        await asyncio.sleep(0)


def _bury(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End what still has not ended, or not begun, here and not in whatever the garbage collector interrupts later."""
    for task in tasks:
        coroutine = task.get_coro()
        if isinstance(coroutine, Coroutine):
            with suppress(BaseException):  # what it raises on its way out concerns nobody any more
                coroutine.close()


@contextmanager
def _quiet(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """What a crash tears is nothing to be warned of."""
    logger = logging.getLogger("dalsegno")
    disabled, logger.disabled = logger.disabled, True
    loop.set_exception_handler(lambda *_: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = disabled
