"""One action task: runs an action, and is the other side of its `RunnerContext`.

What it does not do itself: `Flight` knows whether the action may go on, `Strands` matches its calls with the record and
keeps the order of their outcomes, `Attempts` makes them, `Waits` sleeps and waits for signals.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from dalsegno import effects, recorded
from dalsegno.agent import ActionSpec, Agent, check_name
from dalsegno.context import CallOptions, RunnerContext
from dalsegno.core import codec, decisions, divergence
from dalsegno.core.attempts import Attempts
from dalsegno.core.callee import Callee, check_options, describe, encode_arguments
from dalsegno.core.environment import Environment
from dalsegno.core.flight import Flight, SetAside, Stopped, is_being_cancelled, is_thrown_away
from dalsegno.core.gather import check as check_gathered
from dalsegno.core.gather import gather
from dalsegno.core.journal import Call, Journal
from dalsegno.core.pauses import seconds_of
from dalsegno.core.place import Place
from dalsegno.core.records import COUNTED, Park, TaskActionState, new_body
from dalsegno.core.strands import Strands
from dalsegno.core.transitions import CallStatus
from dalsegno.core.waits import Waits
from dalsegno.errors import ActionError, DefinitionError, raised_at
from dalsegno.events import Event, OutputEvent
from dalsegno.memory import MemoryObject, MemoryTransaction, Node

if TYPE_CHECKING:
    from dalsegno.core.executor import Message


# Looking a member up in its enumeration is slow.
_COMPLETED, _ABANDONED = CallStatus.COMPLETED, CallStatus.ABANDONED

_CALLS_A_TURN = 32
"""Calls that an action may make in a row, if none of them waits, before others get their turn."""
_WITHOUT_PARTS = frozenset({str, int, bool, float, bytes, type(None)})


def record_park(environment: Environment, message: Message, state: TaskActionState, park: Park) -> None:
    """Record that *message* is set aside because of an action task that does not run."""
    place = Place(environment, message, state.task, state.action, None)
    Journal(None, place.append, place).park(park)


class ActionTask:
    """Runs one action for one event. *recorded* is what an earlier process recorded of it."""

    _short_term: MemoryTransaction | None = None
    _sensory: MemoryTransaction | None = None
    _made = 0
    _callee_owners: dict[str, object] | None = None

    def __init__(
        self,
        environment: Environment,
        agent: Agent,
        spec: ActionSpec,
        message: Message,
        identity: str,
        header: dict[str, Any],
        recorded: TaskActionState | None,
        memory: Node,
        sensory: Node,
    ) -> None:
        self._environment = environment
        self._loop = environment.loop
        self._agent = agent
        self._spec = spec
        self._message = message
        self.identity = identity
        self._recorded = recorded
        # No part knows this object, or it would be in a cycle and live until the garbage collector finds it.
        self._place = place = Place(environment, message, identity, spec.name, None if recorded else header)
        self._journal = journal = Journal(recorded, place.append, place)
        self._flight = flight = Flight(place)
        self._strands = strands = Strands(place, journal, flight, spec, recorded)
        self._attempts = Attempts(place, journal, flight, strands)
        self._memory = memory
        self._sensory_memory = sensory
        self.sent: list[Any] = []
        self._not_awaited: dict[int, Coroutine[Any, Any, Any]] = {}

    def __str__(self) -> str:
        return str(self._place)

    @property
    def job(self) -> str:
        return self._environment.job

    @property
    def key(self) -> Any:
        key = self._message.key
        # If it has parts, a copy with the order that it has in a checkpoint, from where a parked message comes back.
        return key if type(key) in _WITHOUT_PARTS else codec.decode(self._message.key_bytes)

    @property
    def message_id(self) -> str:
        return self._message.id

    @property
    def park(self) -> Park | None:
        """Why the message has to be set aside, once that is known."""
        return self._flight.park

    @property
    def until(self) -> datetime | None:
        """When it is to be taken up again, if nobody decides before."""
        return self._flight.until

    @property
    def diverged(self) -> bool:
        """Whether the action went on although the code no longer fitted the record."""
        return self._strands.diverged

    # The action from its start to its end.

    async def run(self, event: Event) -> None:
        """Run the action to its end; raises what must be raised, `ActionError` for what the action itself raised."""
        if self._environment.stopping:
            raise Stopped
        failure: BaseException | None = None
        present = asyncio.current_task(self._loop)
        try:
            watch = self._environment.watch
            function = self._spec.function if watch is None else watch.action(self._place, self._spec.function)
            if self._spec.is_async:
                self._strands.main = present
                await function(self._agent, event, RunnerContext(self))
            else:
                await self._run_in_thread(function, event)
        except BaseException as error:
            thrown_away = isinstance(error, GeneratorExit) and is_thrown_away(present)
            if thrown_away or (isinstance(error, asyncio.CancelledError) and is_being_cancelled()):
                self._flight.ended = True
                raise
            failure = error
        flight = self._flight
        await flight.end()
        if flight.park is not None:
            self.set_aside(flight.park)
        if flight.verdict is not None:
            raise flight.verdict
        if failure is not None:
            self._raise_failure(failure)
        if self._not_awaited:
            await self._check_awaited()
        self._check_complete()
        self._strands.go_on()

    def set_aside(self, park: Park) -> None:
        """Record that the message is set aside, unless that is already the last thing that the record says."""
        self._flight.park = park
        known = self._recorded.parked if self._recorded is not None and not self._place.written else None
        if park != known or park.why in COUNTED:
            self._journal.park(park)

    async def begin(self, attempt: int) -> None:
        """Record, durably, that the message is begun once more after a crash, for the *attempt*-th time."""
        self._journal.begun(attempt)
        await self._environment.log.barrier()

    def commit(self, *, last: bool, order: list[str] | None = None) -> tuple[Node, Node]:
        """Record that the action is done, *last* of its message; returns the message's two memories from now on.

        *order* is that of the message's action tasks, if it is not the recorded one.
        """
        body = new_body("done")
        memory, sensory = self._memory, self._sensory_memory
        if self._short_term is not None and self._short_term.updates:
            body["memory"], memory = self._short_term.updates, self._short_term.root
        if self._sensory is not None and self._sensory.updates:
            body["sensory"], sensory = self._sensory.updates, self._sensory.root
        if self.sent:
            body["events"] = self.sent
        if last:
            body["last"] = True
        if order is not None:
            body["order"] = order
        if (watch := self._environment.watch) is None:
            self._journal.done(body)
        else:
            watch.done(self._place, functools.partial(self._journal.done, body))
        return memory, sensory

    async def _run_in_thread(self, function: Callable[..., Any], event: Event) -> None:
        returned = await self._environment.run_in_thread(
            functools.partial(function, self._agent, event, RunnerContext(self))
        )
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise DefinitionError(
                f"action {self._spec.name!r} is a plain def that returns an awaitable, which nobody awaits: declare "
                "it with async def"
            )

    def _raise_failure(self, failure: BaseException) -> NoReturn:
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        self._journal.leave_failed(failure)
        raise ActionError(f"{self}: {type(failure).__name__}: {failure}{raised_at(failure)}") from failure

    async def _check_awaited(self) -> None:
        """Fail for calls that nobody awaited; one whose task was cancelled before it began is none of them."""
        names = {
            token: inspect.getcoroutinelocals(coroutine)["name"]
            for token, coroutine in self._not_awaited.items()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
        }
        await asyncio.sleep(0)  # so that a task that was cancelled just now is over
        for token, name in names.items():
            coroutine = self._not_awaited.get(token)
            if coroutine is None or inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                if coroutine is not None:
                    coroutine.close()
                self._raise_failure(
                    DefinitionError(
                        f"durable_execute({name}, ...) was never awaited, so it never ran: write await before it"
                    )
                )

    def _check_complete(self) -> None:
        """Whether the code made all that is recorded; raises what is to be done if not."""
        self._strands.check_complete()
        for call in self._journal.dropped():
            target = decisions.resolve_target(self.identity, call.number, call.attempt)
            if divergence.in_doubt(call) and self._place.decision(target) is None:
                self.set_aside(Park.because(f"{self}: {divergence.lost_in_doubt(call)}", "in_doubt", call.number))
                raise SetAside

    # The context's side.

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        begun: list[Call] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """The call, to be awaited; when it has begun, it is appended to *begun*."""
        self._flight.check_running()
        _check_not_nested()
        if not self._spec.is_async:
            raise DefinitionError(
                f"action {self._spec.name!r} is a plain def, where nothing can be awaited: call "
                "ctx.durable_execute_sync(...), or declare the action with async def"
            )
        callee, name, token = self._prepare(function, args, kwargs, options)
        coroutine = self._call(function, callee, name, args, kwargs, options, token, begun)
        self._not_awaited[token] = coroutine
        return coroutine

    def call_from_thread(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> Any:
        self._flight.check_running()
        _check_not_nested()
        if self._spec.is_async:
            raise DefinitionError(
                f"action {self._spec.name!r} is async: write await ctx.durable_execute(...), so that other messages "
                "can go on"
            )
        callee, name, token = self._prepare(function, args, kwargs, options)
        coroutine = self._call(function, callee, name, args, kwargs, options, token)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _prepare(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> tuple[Callee, str, int]:
        """What is called, under which name, and as the how-manieth call of the action; checks all of it."""
        callee = describe(function)
        name = check_options(function, callee, args, kwargs, options)
        if options.name is None and inspect.ismethod(function):
            self._callee_owners = self._callee_owners or {}
            owner = self._callee_owners.setdefault(name, function.__self__)
            if owner is not function.__self__ and owner != function.__self__:
                raise DefinitionError(
                    f"{name} is called on two objects, {owner!r} and {function.__self__!r}, so one could be given the "
                    'answer that is recorded for the other: give each call a name, as in name="send-invoice"'
                )
        self._made += 1
        return callee, name, self._made

    def patched(self, name: str) -> bool:
        self._flight.check_running()
        _check_not_in_callee("ctx.patched(...)")
        check_name(name, "the name of the change in ctx.patched(...)")
        if self._spec.is_async:
            return self._journal.patched(name)
        return asyncio.run_coroutine_threadsafe(self._patched(name), self._loop).result()

    async def _patched(self, name: str) -> bool:
        return self._journal.patched(name)

    def now(self) -> Coroutine[Any, Any, datetime]:
        return self._recorded_call("now", self._tell_time)

    async def _tell_time(self) -> datetime:
        return self._environment.clock().astimezone(UTC)

    def random(self) -> Coroutine[Any, Any, float]:
        return self._recorded_call("random", recorded.random_number)

    def uuid(self) -> Coroutine[Any, Any, UUID]:
        return self._recorded_call("uuid", recorded.new_uuid)

    def sleep(self, duration: float | timedelta) -> Coroutine[Any, Any, None]:
        seconds = seconds_of(duration, "ctx.sleep(...)")
        call: list[Call] = []
        waits = self._waits()
        return waits.sleep(self._recorded_call("sleep", waits.wake_up_time, seconds, begun=call), seconds, call)

    async def wait_for(self, name: str, limit: float | timedelta | None) -> Any:
        self._flight.check_running()
        _check_not_nested()
        if not self._spec.is_async:
            raise DefinitionError(
                f"action {self._spec.name!r} is a plain def, where nothing can be awaited: call "
                "ctx.wait_for_sync(...), or declare it with async def to wait for a signal"
            )
        return await self._waits().wait_for(name, limit)

    def wait_for_from_thread(self, name: str, limit: float | timedelta | None) -> Any:
        self._flight.check_running()
        _check_not_nested()
        if self._spec.is_async:
            raise DefinitionError(f"action {self._spec.name!r} is async: write await ctx.wait_for(...)")
        return asyncio.run_coroutine_threadsafe(self._waits().wait_for(name, limit), self._loop).result()

    def _waits(self) -> Waits:
        return Waits(self._place, self._journal, self._flight, self._strands, self._attempts)

    async def gather(self, items: Sequence[Any], limit: int | None) -> list[Any]:
        not_yet = set(self._not_awaited)
        check_gathered(items, limit)
        self._check_async("gather")
        try:
            return await gather(items, limit)
        except asyncio.CancelledError:
            for token in not_yet:  # those that now never begin
                self._not_awaited.pop(token, None)
            raise

    def _recorded_call(
        self, what: str, function: Callable[..., Any], *args: Any, begun: list[Call] | None = None
    ) -> Coroutine[Any, Any, Any]:
        self._check_async(what)
        return self.call(function, args, {}, CallOptions("read", None, f"dalsegno.{what}"), begun)

    def _check_async(self, what: str) -> None:
        if not self._spec.is_async:
            raise DefinitionError(
                f"ctx.{what}(...) must be awaited, and action {self._spec.name!r} is a plain def, where nothing can "
                "be: declare it with async def, or record what a function of yours returns with "
                "ctx.durable_execute_sync(...)"
            )

    def send(self, event: Event) -> None:
        self._flight.check_running()
        _check_not_in_callee("ctx.send_event(...)")
        if not isinstance(event, Event):
            raise DefinitionError(
                "send_event takes an event, that is an instance of a subclass of dalsegno.Event, not "
                f"{type(event).__name__}: {event!r}"
            )
        if not isinstance(event, OutputEvent) and not self._agent.handlers(type(event)):
            raise DefinitionError(
                f"no action of agent {self._agent.name!r} handles {type(event).__name__}, so the event would be "
                f"lost: mark one with @action({type(event).__name__}), or send an OutputEvent"
            )
        tree = codec.to_tree(event, root=type(event).__name__)
        if (watch := self._environment.watch) is None:
            self.sent.append(tree)
        else:
            watch.event(self._place, functools.partial(self.sent.append, tree))

    @property
    def short_term(self) -> MemoryObject:
        return MemoryObject(self._open_short_term)

    @property
    def sensory(self) -> MemoryObject:
        return MemoryObject(self._open_sensory)

    def _open_short_term(self) -> MemoryTransaction:
        self._flight.check_running()
        _check_not_in_callee("ctx.short_term_memory")
        if self._short_term is None:
            self._short_term = MemoryTransaction(self._memory, codec, "short_term_memory")
        return self._short_term

    def _open_sensory(self) -> MemoryTransaction:
        self._flight.check_running()
        _check_not_in_callee("ctx.sensory_memory")
        if self._sensory is None:
            self._sensory = MemoryTransaction(self._sensory_memory, codec, "sensory_memory")
        return self._sensory

    # One durable call.

    async def _call(
        self,
        function: Callable[..., Any],
        callee: Callee,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        token: int,
        begun: list[Call] | None = None,
    ) -> Any:
        self._not_awaited.pop(token, None)
        if token % _CALLS_A_TURN == 0:
            await self._environment.give_way()
        if self._flight.verdict is not None:
            await self._flight.stop_with(self._flight.verdict)
        self._flight.check_running()
        arguments, keywords, digest = encode_arguments(name, args, kwargs)
        call = await self._strands.match(name, digest, arguments, keywords)
        if begun is not None:
            begun.append(call)
        status = call.state.status
        if (status is _COMPLETED or status is _ABANDONED) and await self._strands.plays_back(call):
            return await self._attempts.play_back(call)
        return await self._attempts.make(call, function, callee, options)


def _check_not_nested() -> None:
    """A call inside a call would be on record without the other one, or wait for the other one to end."""
    if effects.running.get(None) is not None:
        raise DefinitionError(
            "a durable call is made inside the function of another one; return to the action and make it from there"
        )


def _check_not_in_callee(what: str) -> None:
    """A replay does not run the function of a recorded call, so what it sends, writes or sees would be lost."""
    if effects.running.get(None) is not None:
        raise DefinitionError(
            f"{what} is used inside the function of a durable call, which a replay does not run, so it would be lost "
            "there; give what is needed as arguments, return the result, and use it in the action"
        )
