"""The ends of a life, and what runs in it, with a boundary around each of their steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from dalsegno.core import codec
from dalsegno.core.journal import Call
from dalsegno.core.place import Place
from dalsegno.core.records import CallState, OpenBody, Record, TaskActionState
from dalsegno.effects import DidNotHappen
from dalsegno.errors import StoreError
from dalsegno.runners.checkpoints import Checkpoint, CheckpointFile
from dalsegno.runners.sinks import Sink
from dalsegno.stores.base import ALONE, Covered, Decision, PruneReport, TaskActionStore, Worker
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.wrapping import WrappingStore
from dalsegno.testing.virtual_loop import VirtualLoop
from dalsegno.testing.world import CallPlace, Life

_T = TypeVar("_T")

acting: ContextVar[str | None] = ContextVar("dalsegno_acting", default=None)
"""Which action runs here."""
calling: ContextVar[tuple[str, str] | None] = ContextVar("dalsegno_calling", default=None)
"""Which durable call is executed here, and its effect."""


class WatchedStore(WrappingStore):
    """The store of a life: what is put after its death is not put."""

    def __init__(
        self, inner: TaskActionStore, life: Life, loop: VirtualLoop, take_over: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(inner)
        self._take_over = take_over
        self._life = life
        self._loop = loop

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return True

    def read_through(self, open_body: OpenBody | None) -> None:
        self._life.world.open_body = open_body
        super().read_through(open_body)

    async def open(self, job: str, owner: str, worker: Worker = ALONE) -> None:
        self._life.check_alive()
        if isinstance(self.inner, MemoryStore) and job in self.inner.jobs:
            self.inner.take_over(job)
        with self._loop.while_busy():
            await super().open(job, owner, worker)

    async def keys(self) -> list[bytes]:
        return await self._read(super().keys)

    async def claim(self, key: bytes) -> list[TaskActionState]:
        return await self._read(super().claim, key)

    async def decisions(self, after: int) -> list[tuple[int, Decision]]:
        return await self._read(super().decisions, after)

    async def put(self, records: Sequence[Record]) -> None:
        acting.set(None)  # the task that writes has the context of the action that began it
        with self._life.boundary("write", f"of {_records(records)}") as strike:
            if strike is not None and strike.how == "failing":
                self._life.write_failed = True
                raise StoreError("the write failed: there is no room left")
            if strike is not None and strike.how == "zombie":
                self._life.displaced = True
                self._take_over()
            self._life.world.tell("putting", [*records])
            with self._loop.while_busy():
                await super().put(records)
            if self._life.displaced:
                self._life.world.blame("P8", f"a process that had lost its job could still write {_records(records)}")
            self._life.world.became_durable(records)
            if strike is not None and strike.how == "unanswered":
                self._life.write_failed = True
                raise StoreError("the connection was lost before the answer came")

    async def prune(self, covered: Covered) -> PruneReport:
        with self._life.boundary("prune", f"of {len(covered.messages)} messages"), self._loop.while_busy():
            report = await super().prune(covered)
        if self._life.displaced:
            self._life.world.blame("P8", "a process that had lost its job could still prune")
        return report

    async def close(self) -> None:
        with self._loop.while_busy():
            await super().close()

    async def _read(self, read: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        self._life.check_alive()
        with self._loop.while_busy():
            return await read(*args)


def _records(records: Sequence[Record]) -> str:
    messages = sorted({record.message for record in records})
    shown = ", ".join(map(repr, messages[:3])) + (", ..." if len(messages) > 3 else "")
    return f"{len(records)} record{'s' if len(records) > 1 else ''} of message {shown}"


class WatchedCheckpoints(CheckpointFile):
    """The checkpoint file of a life."""

    life: Life

    def commit(self, checkpoint: Checkpoint) -> None:
        with self.life.boundary("checkpoint", f"{checkpoint.number}"):
            super().commit(checkpoint)


class KeptOutputs(Sink):
    """An exactly-once sink in the world of a life."""

    exactly_once = True

    def __init__(self, life: Life) -> None:
        self._life = life
        self._outputs = life.world.outputs

    def describe(self) -> str:
        return "the outputs of the test"

    def open(self, state: dict[str, Any] | None) -> None:
        self._life.check_alive()
        del self._outputs[state["length"] if state else 0 :]

    def write(self, output: object, output_id: str) -> None:
        with self._life.boundary("output", repr(output_id)):
            self._outputs.append((output_id, codec.decode(codec.encode(output))))

    def snapshot(self) -> dict[str, Any]:
        return {"length": len(self._outputs)}

    def flush(self, state: dict[str, Any]) -> None:
        self._life.check_alive()

    def close(self) -> None:
        pass


class LifeWatch:
    """Stands beside the actions and calls of a life."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def action(self, place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
        about = f"action {place.action!r} of message {place.message.id!r}"
        return _within(acting, about, function, inspect.iscoroutinefunction(function))

    def call(self, place: Place, call: Call, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        state = call.state
        where = CallPlace(place.message.key_bytes, place.message.id, place.identity, state.number)
        about = f"the call {state.name} of message {place.message.id!r}, action {place.action!r}"
        self._life.check_may_go_on(about)  # now: a thread may begin later with what was started before
        function = _within(calling, (about, state.effect), function, is_async)

        executed = functools.partial(self._executed, where, about, state)

        async def run(*args: Any, **kwargs: Any) -> Any:
            with executed():
                return await function(*args, **kwargs)

        def run_in_thread(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(executed())
                result = function(*args, **kwargs)
                return _ended_by(result, stack.pop_all()) if inspect.isawaitable(result) else result

        return run if is_async else run_in_thread

    @contextmanager
    def _executed(self, where: CallPlace, about: str, state: CallState) -> Iterator[None]:
        with self._life.boundary("call", about.removeprefix("the call ")):
            execution = self._life.world.begin(where, about, state.effect)
            try:
                yield
            except Exception:
                self._life.world.end(execution, "raised")
                raise
            self._life.world.end(execution, "returned")

    def reconcile(self, place: Place, call: Call, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        where = CallPlace(place.message.key_bytes, place.message.id, place.identity, call.state.number)
        world = self._life.world

        def answered(answer: object) -> object:
            if isinstance(answer, DidNotHappen):
                executions = world.settle(where)
                if any(execution.state == "returned" for execution in executions):
                    world.blame(
                        "your agent",
                        f"the reconcile of {executions[-1].about} said DidNotHappen(), but the call had happened: it "
                        "must ask where the call leaves its trace",
                    )
            return answer

        async def ask(*args: Any, **kwargs: Any) -> object:
            return answered(await function(*args, **kwargs))

        def ask_in_thread(*args: Any, **kwargs: Any) -> object:
            answer = function(*args, **kwargs)
            return ask_later(answer) if inspect.isawaitable(answer) else answered(answer)

        async def ask_later(answer: Any) -> object:
            return answered(await answer)

        return ask if is_async else ask_in_thread

    def event(self, place: Place, send: Callable[[], None]) -> None:
        with self._life.boundary("event", f"sent by action {place.action!r} of message {place.message.id!r}"):
            send()

    def done(self, place: Place, record: Callable[[], None]) -> None:
        with self._life.boundary("action", f"{place.action!r} of message {place.message.id!r} done"):
            record()


async def _ended_by(result: Awaitable[Any], stack: ExitStack) -> Any:
    with stack:
        return await result


def _within(variable: ContextVar[Any], value: Any, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """*function*, with *variable* set while it runs."""

    async def run(*args: Any, **kwargs: Any) -> Any:
        token = variable.set(value)
        try:
            return await function(*args, **kwargs)
        finally:
            variable.reset(token)

    @functools.wraps(function)
    def run_sync(*args: Any, **kwargs: Any) -> Any:
        token = variable.set(value)
        try:
            return function(*args, **kwargs)
        finally:
            variable.reset(token)

    return run if is_async else run_sync
