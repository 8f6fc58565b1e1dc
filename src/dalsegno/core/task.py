"""One action task: runs an action, and is the other side of its `RunnerContext`.

What must not go on (a divergence, a failed write, a call in doubt, a stop) leaves the action as `Unwind`, which no
``except Exception`` catches, and is remembered, so that the action cannot go on even if it catches that too.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from dalsegno import effects, recorded
from dalsegno.agent import ActionSpec, Agent, check_name
from dalsegno.context import CallOptions, RunnerContext
from dalsegno.core import codec, decisions, divergence
from dalsegno.core.callee import Callee, check_options, describe, with_key, with_key_for_reconcile
from dalsegno.core.delivery import Delivery
from dalsegno.core.environment import Environment
from dalsegno.core.gather import check as check_gathered
from dalsegno.core.gather import gather
from dalsegno.core.identity import fingerprint, idempotency_key
from dalsegno.core.journal import Call, Journal
from dalsegno.core.late import CallPlace, MessagePlace
from dalsegno.core.pauses import after, seconds_of
from dalsegno.core.records import COUNTED, Park, TaskActionState, as_record, dump_body, new_body
from dalsegno.core.time_limit import OutOfTime, Watched, in_time
from dalsegno.core.transitions import CallStatus
from dalsegno.effects import CurrentCall, DidNotHappen, Effect, Happened, Unknown
from dalsegno.errors import (
    ActionError,
    CodecError,
    DefinitionError,
    DivergenceError,
    InDoubtError,
    StoreError,
    raised_at,
)
from dalsegno.events import Event, OutputEvent
from dalsegno.memory import MemoryObject, MemoryTransaction, Node
from dalsegno.retry import RetryPolicy

if TYPE_CHECKING:
    from dalsegno.core.executor import Message


# Looking a member up in its enumeration is slow.
_NEW, _COMPLETED, _ABANDONED = CallStatus.NEW, CallStatus.COMPLETED, CallStatus.ABANDONED

SLEEP = "dalsegno.sleep"
"""The name of the call that is made to sleep; its result is when the sleep is due to end."""

_logger = logging.getLogger("dalsegno")

_CALLS_A_TURN = 32
"""Calls that an action may make in a row, if none of them waits, before others get their turn."""
_TURNS = 100
"""Turns of the event loop in which other strands may begin their recorded calls."""
_POLLS = 100
_POLL_SECONDS = 0.01
_WITHOUT_PARTS = frozenset({str, int, bool, float, bytes, type(None)})
_AGAIN = object()
"""In place of an outcome: the attempt failed, and another one is due."""


class Unwind(BaseException):
    """Leaves an action that must not go on. Not an `Exception`, so that the action's own handlers let it pass."""


class Stopped(Exception):
    """The runner is stopping: the action was left at the boundary of a call and is replayed after the restart."""


class SetAside(Exception):
    """The message cannot go on now; the `park` of the action task says why."""


class _Place:
    """Where an action task stands: the place of its records, and what errors say of it."""

    __slots__ = ("_action", "_environment", "_header", "_identity", "_message", "written")

    def __init__(
        self, environment: Environment, message: Message, identity: str, action: str, header: dict[str, Any] | None
    ) -> None:
        self._environment = environment
        self._message = message
        self._identity = identity
        self._action = action
        self._header = header
        self.written = False

    def __str__(self) -> str:
        message = self._message
        return f"job {self._environment.job!r}, key {message.key!r}, message {message.id!r}, action {self._action!r}"

    def append(self, body: dict[str, Any]) -> None:
        """Record *body*, with the header if it is the first of the action task."""
        if self._header is not None:
            body["task"] = self._header
            self._header = None
        self.written = True
        message = self._message
        self._environment.log.append(as_record((message.key_bytes, message.id, self._identity, dump_body(body))))


def record_park(environment: Environment, message: Message, state: TaskActionState, park: Park) -> None:
    """Record that *message* is set aside because of an action task that does not run."""
    place = _Place(environment, message, state.task, state.action, None)
    Journal(None, place.append, place).park(park)


class ActionTask:
    """Runs one action for one event. *recorded* is what an earlier process recorded of it."""

    _short_term: MemoryTransaction | None = None
    _sensory: MemoryTransaction | None = None
    _verdict: Exception | None = None
    park: Park | None = None
    """Why the message has to be set aside, once that is known."""
    until: datetime | None = None
    """When it is to be taken up again, if nobody decides before."""
    _ended = False
    _in_flight = 0
    _idle: asyncio.Event | None = None
    _strand: asyncio.Task[Any] | None = None
    """The task of the event loop that runs an async action itself."""
    _last_sequential = True
    _made = 0
    _pausing = 0
    _callee_owners: dict[str, object] | None = None
    diverged = False
    """Whether the action went on although the code no longer fitted the record."""
    _overlapping = False
    """Whether calls are in flight together, or were a moment ago."""
    _order: Delivery | None = None
    _unfit: DivergenceError | None = None
    """The last error of the order for which the record was given up."""
    _abandoned: list[Call] | None = None
    """Calls that the action cancelled since it last went on."""

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
        # Not this object itself: it would be in a cycle, and so would live until the garbage collector finds it.
        self._place = _Place(environment, message, identity, spec.name, None if recorded else header)
        self._journal = Journal(recorded, self._place.append, self._place)
        self._memory = memory
        self._sensory_memory = sensory
        self.sent: list[Any] = []
        self._not_awaited: dict[int, Coroutine[Any, Any, Any]] = {}
        self._begun_at = environment.loop.time()
        if recorded is not None and any(state.order is not None for state in recorded.calls.values()):
            self._delivery()

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

    # The action from its start to its end.

    async def run(self, event: Event) -> None:
        """Run the action to its end; raises what must be raised, `ActionError` for what the action itself raised."""
        if self._environment.stopping:
            raise Stopped
        failure: BaseException | None = None
        try:
            if self._spec.is_async:
                self._strand = asyncio.current_task(self._loop)
                await self._spec.function(self._agent, event, RunnerContext(self))
            else:
                await self._run_in_thread(event)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                self._ended = True
                raise
            failure = error
        self._ended = True  # what still runs beside it may end its call, but starts none
        if self._pausing:
            self._environment.pauses.cut(self)
        if self._in_flight:
            await self._settle()
        if self._order is not None:
            self._order.close()
        if self.park is not None:
            self.set_aside(self.park)
        if self._verdict is not None:
            raise self._verdict
        if failure is not None:
            self._raise_failure(failure)
        if self._not_awaited:
            await self._check_awaited()
        self._check_complete()
        if self._abandoned:
            self._go_on()

    def set_aside(self, park: Park) -> None:
        """Record that the message is set aside, unless that is already the last thing that the record says."""
        self.park = park
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
        self._journal.done(body)
        return memory, sensory

    async def _run_in_thread(self, event: Event) -> None:
        returned = await self._environment.run_in_thread(
            functools.partial(self._spec.function, self._agent, event, RunnerContext(self))
        )
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise DefinitionError(
                f"action {self._spec.name!r} is a plain def that returns an awaitable, which nobody awaits: declare "
                "it with async def"
            )

    def _raise_failure(self, failure: BaseException) -> NoReturn:
        if isinstance(failure, (KeyboardInterrupt, GeneratorExit)):
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

    async def _settle(self) -> None:
        """Wait until the calls that are in flight are over and recorded."""
        while self._in_flight:
            if self._idle is None or self._idle.is_set():
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def _stop_with(self, verdict: Exception) -> NoReturn:
        self._verdict = self._verdict or verdict
        if self._pausing:
            self._environment.pauses.cut(self)
        if self._order is not None:
            self._order.close()
        # In a task group the other calls would be cancelled, and so in doubt, if this one left at once.
        await self._settle()
        raise Unwind

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
        self._check_running()
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
        self._check_running()
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
        self._check_running()
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
        return self._sleep(self._recorded_call("sleep", self._wake_up_time, seconds, begun=call), seconds, call)

    async def _wake_up_time(self, seconds: float) -> datetime:
        return after(self._environment.clock, seconds)

    async def _sleep(self, wake_up_time: Coroutine[Any, Any, datetime], seconds: float, begun: list[Call]) -> None:
        due = await wake_up_time
        call = begun[0]
        if call.state.order is not None:
            return  # that it ended is on record
        if due > self._environment.clock():
            await self._sleep_until(due, seconds, call)
        if not self._overlapping:
            self._delivery().be_lonely(call.state)
        self._delivery().arrive(call.state)
        try:
            self._journal.slept(call)
        except StoreError as error:
            await self._stop_with(error)
        await self._in_turn(call)

    async def _sleep_until(self, due: datetime, seconds: float, call: Call) -> None:
        try:
            await self._environment.log.barrier()
            await self._pause(due, seconds)
        except StoreError as error:
            await self._stop_with(error)
        except asyncio.CancelledError:
            await self._abandon(call)
            raise
        halt = self._halt()
        if halt is not None:
            await self._stop_with(halt)
        self._check_running()

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
        self._check_running()
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
        self.sent.append(codec.to_tree(event, root=type(event).__name__))

    @property
    def short_term(self) -> MemoryObject:
        return MemoryObject(self._open_short_term)

    @property
    def sensory(self) -> MemoryObject:
        return MemoryObject(self._open_sensory)

    def _open_short_term(self) -> MemoryTransaction:
        self._check_running()
        _check_not_in_callee("ctx.short_term_memory")
        if self._short_term is None:
            self._short_term = MemoryTransaction(self._memory, codec, "short_term_memory")
        return self._short_term

    def _open_sensory(self) -> MemoryTransaction:
        self._check_running()
        _check_not_in_callee("ctx.sensory_memory")
        if self._sensory is None:
            self._sensory = MemoryTransaction(self._sensory_memory, codec, "sensory_memory")
        return self._sensory

    def _check_running(self) -> None:
        if self._ended:
            raise RuntimeError(
                f"{self}: the context was used after its action had ended; await everything that uses it"
            )
        if self._verdict is not None:
            raise Unwind

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
        if self._verdict is not None:
            await self._stop_with(self._verdict)
        self._check_running()
        arguments, keywords, digest = _encode_arguments(name, args, kwargs)
        call = await self._match(name, digest, arguments, keywords)
        if begun is not None:
            begun.append(call)
        status = call.state.status
        if status is not _NEW and (status is _COMPLETED or status is _ABANDONED) and await self._plays_back(call):
            return await self._replayed(call)
        if options.retry is None and not (callee.marked or options.idempotency_key):
            outcome = await self._perform(call, function, callee, options)
        else:
            outcome = await self._perform_in_attempts(call, with_key(function, callee, options), callee, options)
        if self._overlapping:
            await self._in_turn(call)
        return outcome

    async def wait_for(self, name: str, limit: float | timedelta | None) -> Any:
        self._check_running()
        _check_not_nested()
        if not self._spec.is_async:
            raise DefinitionError(
                f"action {self._spec.name!r} is a plain def, where nothing can be awaited: call "
                "ctx.wait_for_sync(...), or declare it with async def to wait for a signal"
            )
        return await self._wait_for(name, limit)

    def wait_for_from_thread(self, name: str, limit: float | timedelta | None) -> Any:
        self._check_running()
        _check_not_nested()
        if self._spec.is_async:
            raise DefinitionError(f"action {self._spec.name!r} is async: write await ctx.wait_for(...)")
        return asyncio.run_coroutine_threadsafe(self._wait_for(name, limit), self._loop).result()

    async def _wait_for(self, name: str, limit: float | timedelta | None) -> Any:
        check_name(name, "the name of the signal in ctx.wait_for(...)")
        seconds = None if limit is None else seconds_of(limit, "ctx.wait_for(..., timeout=...)")
        arguments, keywords, digest = _encode_arguments(decisions.WAIT, (name,), {})
        call = await self._match(decisions.WAIT, digest, arguments, keywords)
        state = call.state
        if (state.status is _COMPLETED or state.status is _ABANDONED) and await self._plays_back(call):
            return await self._replayed(call)
        if state.status is _NEW or state.status is CallStatus.FAILED:
            # Also when it was too late before, and that left the action: as any call it is tried again, with its time.
            until = None if seconds is None else after(self._environment.clock, seconds)
            state.kwargs = {} if until is None else {"until": until.isoformat(timespec="milliseconds")}
            self._journal.request(call, "idempotent")
        decided = self._decision(decisions.signal_target(self.identity, state.number))
        if isinstance(decided, decisions.Signalled):
            self._environment.counters.executed += 1
            try:
                value = self._completed(call, decided.value, "signal")
            except _Unrecordable as error:
                await self._stop_with(error.reason)
            if self._overlapping:
                await self._in_turn(call)
            return value
        self.until = decisions.wait_limit(state)
        if self.until is not None and self.until <= self._environment.clock():
            self._environment.counters.executed += 1
            late = self._failed(call, TimeoutError(f"nobody sent the signal {name!r} in time"))
            if self._overlapping:
                await self._deliver_failure(call)
            raise late
        self.park = Park.because(f"{self}: waits for the signal {name!r}", "waiting", state.number)
        return await self._stop_with(SetAside())

    async def _match(self, name: str, digest: str, arguments: list[Any], keywords: dict[str, Any]) -> Call:
        try:
            return self._begin(name, digest, arguments, keywords)
        except DivergenceError as error:
            return await self._begin_in_turn(name, digest, arguments, keywords, error)

    async def _begin_in_turn(
        self, name: str, digest: str, arguments: list[Any], keywords: dict[str, Any], unfit: DivergenceError
    ) -> Call:
        """Match the call with the record, where it does not fit at once.

        A replayed call takes no time, so the strand that makes it may come too early for what another strand did
        beside it. It waits for the others before that counts as a divergence.
        """
        turn = 0
        while True:
            if self._order is None or not self._order.holds:  # what is held may come only when this call has begun
                await self._settle()
            if turn == (_TURNS + _POLLS if self._journal.overlapping else _TURNS):
                unfit = divergence.at(unfit, divergence.made_at() or self._defined_at())
                if not self._environment.rerun:
                    await self._stop_with(unfit)
                self._give_up(unfit)
                if self._order is not None:
                    self._order.let_go()
            await asyncio.sleep(0 if turn < _TURNS else _POLL_SECONDS)
            turn += 1
            if self._verdict is not None:
                await self._stop_with(self._verdict)
            try:
                return self._begin(name, digest, arguments, keywords)
            except DivergenceError as error:
                unfit = error

    def _give_up(self, unfit: DivergenceError) -> None:
        """Go on, although what is recorded no longer fits."""
        self.diverged = True
        lost = self._journal.give_up()
        harm = divergence.harm_of(lost)
        _logger.warning(
            "%s: the code no longer fits the record. %s It goes on from there; of the %d recorded calls that were to "
            "come, those that it still makes keep their answers.%s",
            self,
            unfit.what,
            len(lost),
            harm,
        )

    def _defined_at(self) -> str:
        return divergence.defined_at(self._spec.function, " The action is ", ".")

    def _check_complete(self) -> None:
        """Whether the code made all that is recorded; raises what is to be done if not."""
        try:
            self._journal.check_complete()
        except DivergenceError as error:
            unfit = divergence.at(error, self._defined_at())
            if not self._environment.rerun:
                raise unfit from None
            self._give_up(unfit)
        for call in self._journal.dropped():
            target = decisions.resolve_target(self.identity, call.number, call.attempt)
            if divergence.in_doubt(call) and self._decision(target) is None:
                self.set_aside(Park.because(f"{self}: {divergence.lost_in_doubt(call)}", "in_doubt", call.number))
                raise SetAside

    def _begin(self, name: str, digest: str, arguments: list[Any], keywords: dict[str, Any]) -> Call:
        strand = asyncio.current_task(self._loop)
        sequential = self._strand is None or strand is self._strand
        if self._abandoned:
            self._go_on()
        concurrent = not sequential or self._in_flight > 0
        call = self._journal.begin(
            name,
            digest,
            arguments,
            keywords,
            alone=not self._in_flight and (sequential or self._last_sequential),
            concurrent=concurrent,
            strand=None if sequential else strand,
        )
        self._last_sequential = sequential
        beside = concurrent or self._pausing > 0
        if beside or call.state.order is not None or (self._order is not None and self._order.stirred):
            self._overlapping = True
            self._delivery().begin(call.state, beside)
        else:
            self._overlapping = False
        return call

    async def _perform_in_attempts(
        self, call: Call, function: Callable[..., Any], callee: Callee, options: CallOptions
    ) -> Any:
        while (outcome := await self._perform(call, function, callee, options)) is _AGAIN:
            pass
        return outcome

    async def _perform(self, call: Call, function: Callable[..., Any], callee: Callee, options: CallOptions) -> Any:
        """Make the call and record its outcome. A signal, as when it is cancelled, is none."""
        if self._environment.stopping:
            await self._stop_with(Stopped())
        failure: Exception | None = None
        verdict: Exception | None = None
        self._in_flight += 1
        try:
            effect, answer, late = options.effect, None, None
            if call.state.status is not _NEW:
                if options.retry is not None and call.state.retry_at is not None:
                    await self._wait_for_retry(call.state.retry_at, options.retry)
                options = with_key_for_reconcile(options)
                effect = _stricter(effect, call.state.effect)
                if effect == "once" and _may_have_happened(call.state.status, options):
                    late = self._ended_late(call)
                    settled = await self._reconcile(call, options) if late is None else None
                    if settled is not None:
                        return self._completed(call, *settled)
                    answer = "did_not_happen"
            # The request is made durable where the outside world could tell that it is not.
            if late is not None:
                pass  # it is made already
            elif effect == "read":
                self._environment.log.check()
                self._journal.start_unrecorded(call)
            else:
                self._journal.request(call, effect, answer)
                await self._environment.log.barrier()
            self._environment.counters.executed += late is None
            try:
                if late is not None:
                    return self._returned(call, _value_of(*late))
                if options.timeout is None:
                    return self._returned(call, await self._invoke(call, function, callee.is_async))
                return self._returned(call, await self._invoke_in_time(call, function, callee, options.timeout))
            except OutOfTime as cut_off:
                if effect == "once":
                    settled = await self._settle_late(call, options, cut_off)
                    if settled is not None:
                        return self._completed(call, *settled)
                failure = self._failed_or_due(call, cut_off.error, options.retry)
            except Exception as error:
                failure = self._failed_or_due(call, error, options.retry)
            except SystemExit as error:
                # As an outcome it would end every replay; out of a task of the action it would end the event loop.
                raise self._unrecordable(
                    call,
                    error,
                    f"raised SystemExit({error.code!r}), which says nothing of its outcome; let it raise an ordinary "
                    f"exception{raised_at(error)}",
                ) from error
        except (StoreError, InDoubtError) as error:
            verdict = error
        except _Unrecordable as error:
            verdict = error.reason
        except asyncio.CancelledError:
            await self._abandon(call)
            raise
        finally:
            self._leave()
        if verdict is not None:
            await self._stop_with(verdict)
        if failure is None:
            return _AGAIN
        if self._overlapping:
            await self._deliver_failure(call)
        raise failure from failure.__cause__  # here, where nothing is being handled that would become its context

    def _leave(self) -> None:
        """A call is no longer in flight."""
        self._in_flight -= 1
        if not self._in_flight and self._idle is not None:
            self._idle.set()

    # The order of the outcomes of calls that are in flight together.

    def _delivery(self) -> Delivery:
        if self._order is None:
            environment = self._environment
            calls = self._recorded.calls.values() if self._recorded is not None else ()
            self._order = Delivery(self._loop, self._journal, calls, lambda: environment.stopping, self._begun_at)
        return self._order

    def _arrived(self, call: Call) -> None:
        if call.state.name != SLEEP:  # its outcome is when it ends, which is no news for the action
            self._delivery().arrive(call.state)

    async def _plays_back(self, call: Call) -> bool:
        """Wait for the turn of the recorded outcome; of a call that the action abandoned, until it is cancelled again.

        Returns False if the call is to be made after all, because the code no longer cancels it, and is to go on.
        """
        if call.state.order is not None:
            await self._in_turn(call)
        return call.state.status is not CallStatus.REQUESTED

    async def _in_turn(self, call: Call) -> None:
        """Return when it is the turn of the call's outcome."""
        verdict: Exception | None = None
        self._in_flight += 1
        try:
            while not await self._has_turn(call):
                pass
        except DivergenceError as error:
            verdict = error
        except asyncio.CancelledError:
            await self._abandon(call)
            raise
        finally:
            self._leave()
        verdict = verdict or self._verdict
        if verdict is None and call.state.status is _ABANDONED:
            verdict = Stopped()
        if verdict is not None:
            await self._stop_with(verdict)

    async def _has_turn(self, call: Call) -> bool:
        """Wait for the turn; returns False if the wait is to begin anew, because the record has been given up."""
        delivery = self._delivery()
        try:
            if call.state.status is _ABANDONED:
                await delivery.until_cancelled(call.state)
            else:
                await delivery.turn(call.state)
            return True
        except DivergenceError as error:
            if not self._environment.rerun:
                raise divergence.at(error, self._defined_at()) from None
            if self._unfit is not error:
                self._unfit = error
                self._give_up(error)
            if call.state.status is not _ABANDONED:
                return False
            self._journal.reopen(call)
            return True

    async def _deliver_failure(self, call: Call) -> None:
        await self._in_turn(call)
        self._journal.fail(call, call.state.error)

    async def _abandon(self, call: Call) -> None:
        """The call is cancelled. If the action did that, and not the runner, it is recorded when the action goes on."""
        if not self._spec.is_async or self._environment.cancelled or self._verdict or not _is_being_cancelled():
            if self._order is not None:
                self._order.forget(call.state)
            return
        self._delivery().abandon(call.state)
        if call.state.status is not _COMPLETED:
            call.state.error = None
        if not self._ended:
            self._in_flight += 1
            try:
                await self._delivery().turn(call.state)
            except DivergenceError as error:
                if not self._environment.rerun:
                    self._verdict = self._verdict or error
            except asyncio.CancelledError:
                self._delivery().forget(call.state)  # cancelled once more: at once, then
            finally:
                self._leave()
        self._environment.counters.replayed += call.state.status is _ABANDONED
        self._abandoned = self._abandoned or []
        self._abandoned.append(call)

    def _go_on(self) -> None:
        """The action goes on, unless all that it does is to clean up: it knows of the calls that it cancelled."""
        if self._abandoned and not self._environment.cancelled:
            for call in self._abandoned:
                self._journal.abandon(call)
            self._abandoned = None

    def _returned(self, call: Call, result: Any) -> Any:
        try:
            tree = codec.to_tree(result, root="result")
        except CodecError as error:
            raise self._unrecordable(
                call, error, f"was made, but what it returned cannot be recorded: {error}"
            ) from error
        return self._completed(call, tree)

    def _completed(self, call: Call, tree: Any, by: str | None = None) -> Any:
        """What the action gets; if calls overlap, when its turn has come, see `_in_turn`."""
        try:
            result = codec.from_tree(tree)
        except CodecError as error:
            raise self._unrecordable(call, error, f"has a result that cannot be loaded: {error}") from error
        if self._overlapping:
            self._arrived(call)
        self._journal.complete(call, tree, by)
        return result

    def _failed(self, call: Call, error: Exception) -> Exception:
        """What the action gets; if calls overlap, after `_deliver_failure`."""
        tree = codec.encode_exception(error)
        if self._overlapping:
            self._arrived(call)
            call.state.error = tree
        else:
            self._journal.fail(call, tree)
        decoded = codec.decode_exception(tree)
        self._journal.raised(call, decoded)
        return decoded.with_traceback(error.__traceback__)

    def _failed_or_due(self, call: Call, error: Exception, retry: RetryPolicy | None) -> Exception | None:
        """What the action gets, or None when the call is to be made again, which is then recorded."""
        if retry is None or call.state.failures + 1 >= retry.attempts or not self._covers(call, error, retry):
            return self._failed(call, error)
        due = after(self._environment.clock, retry.wait(call.state.failures + 1))
        self._journal.retry(call, codec.encode_exception(error), due)
        return None

    def _covers(self, call: Call, error: Exception, retry: RetryPolicy) -> bool:
        try:
            return retry.covers(error)
        except Exception as mistake:
            why = f"raised {error!r}, and retry_on raised {type(mistake).__name__}: {mistake}{raised_at(mistake)}"
            raise self._unrecordable(call, mistake, why) from mistake

    async def _wait_for_retry(self, due: datetime, retry: RetryPolicy) -> None:
        await self._pause(due, retry.longest_wait)
        halt = self._halt()
        if halt is not None:
            raise _Unrecordable(halt)
        self._check_running()

    async def _pause(self, due: datetime, longest: float) -> None:
        """Wait until *due*, but not longer than *longest* seconds, and no longer than the action may go on."""
        if self._ended or self._halt() is not None:
            return
        environment = self._environment
        self._pausing += 1
        try:
            await environment.pauses.until(due, longest, environment.clock, environment.sleep, self)
        finally:
            self._pausing -= 1

    def _halt(self) -> Exception | None:
        """Why the action must not go on."""
        return self._verdict or (Stopped() if self._environment.stopping else None)

    def _unrecordable(self, call: Call, error: BaseException, why: str) -> _Unrecordable:
        reason = ActionError(f"{self}: the call {call.state.name} {why}")
        reason.__cause__ = error
        return _Unrecordable(reason)

    async def _invoke(self, call: Call, function: Callable[..., Any], is_async: bool) -> Any:
        """Call *function* with the call's arguments as they are recorded."""
        state = call.state
        args = codec.from_tree(state.args)
        kwargs = codec.from_tree(state.kwargs) if state.kwargs else {}
        attempt = state.attempt
        token = effects.running.set(lambda: self._current_call(call, attempt))
        try:
            if is_async:
                return await function(*args, **kwargs)
            result = await self._environment.run_in_thread(functools.partial(function, *args, **kwargs))
            return await result if inspect.isawaitable(result) else result
        finally:
            effects.running.reset(token)

    async def _invoke_in_time(self, call: Call, function: Callable[..., Any], callee: Callee, seconds: float) -> Any:
        watched = None if callee.is_async else Watched(function)
        return await in_time(
            self._invoke(call, watched or function, callee.is_async), seconds, call.state.name, watched
        )

    async def _settle_late(self, call: Call, options: CallOptions, late: OutOfTime) -> tuple[Any, str] | None:
        """`_reconcile` for a call that was cut off by its time limit."""
        if late.running is not None:
            reason = (
                f"{self}: {late.error}, and may still happen, because it runs in a thread, which nothing can end; it "
                "has effect='once', so it is not made again: the message waits for the thread, whose outcome counts; "
                "after a restart its reconcile, if it has one, is asked"
            )
            self._environment.late.add(*self._late_place(call), late.running, reason)
            raise self._in_doubt(call, reason)
        try:
            return await self._reconcile(call, with_key_for_reconcile(options))
        except InDoubtError as error:
            raise self._in_doubt(call, f"{error} ({late.error})") from error.__cause__

    def _late_place(self, call: Call) -> tuple[MessagePlace, CallPlace]:
        message, state = self._message, call.state
        return (message.key_bytes, message.id), (self.identity, state.number, state.attempt)

    def _ended_late(self, call: Call) -> tuple[Any, Exception | None] | None:
        """The outcome of an attempt whose thread went on after its time limit; in doubt while it does."""
        late = self._environment.late.take(*self._late_place(call))
        if late is None:
            return None
        if late.watched.runs:
            raise self._in_doubt(call, late.reason)
        decided = self._decision(decisions.resolve_target(self.identity, call.state.number, call.state.attempt))
        # That it happened is for a person to say. That it did not may have been true when it was said.
        return None if isinstance(decided, decisions.Resolved) and decided.happened else late.watched.outcome

    def _current_call(self, call: Call, attempt: int) -> CurrentCall:
        state = call.state
        key = idempotency_key(
            self.job,
            self._message.key_bytes,
            self.message_id,
            self.identity,
            state.name,
            state.arguments,
            call.occurrence,
        )
        return CurrentCall(self.job, state.name, attempt, key)

    async def _reconcile(self, call: Call, options: CallOptions) -> tuple[Any, str] | None:
        """What a call that happened returned, and who says so; None if it did not happen.

        Raises `InDoubtError` if nobody can tell.
        """
        state = call.state
        decided = self._decision(decisions.resolve_target(self.identity, state.number, state.attempt))
        if isinstance(decided, decisions.Resolved):
            return (decided.result, "resolve") if decided.happened else None
        where = f"{self}: the call {state.name} was requested before, and whether it happened is not recorded"
        if options.reconcile is None:
            raise self._in_doubt(
                call,
                f"{where}; it has effect='once' and no reconcile= that could tell whether it happened, so it is not "
                "made again",
            )
        try:
            answer = await self._invoke(call, options.reconcile, inspect.iscoroutinefunction(options.reconcile))
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError) and _is_being_cancelled()
            if cancelled or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
                raise
            raise self._in_doubt(
                call, f"{where}; its reconcile could not tell, it raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(answer, Happened):
            try:
                return codec.to_tree(answer.result, root="result of reconcile"), "reconcile"
            except CodecError as error:
                raise self._in_doubt(
                    call, f"{where}; what its reconcile returned cannot be recorded: {error}"
                ) from error
        if isinstance(answer, DidNotHappen):
            return None
        if isinstance(answer, Unknown):
            raise self._in_doubt(
                call, f"{where}; its reconcile cannot tell{': ' + answer.reason if answer.reason else ''}"
            )
        raise self._in_doubt(
            call,
            f"{where}; its reconcile returned {answer!r}, which is not Happened(result), DidNotHappen() or Unknown()",
        )

    def _in_doubt(self, call: Call, reason: str) -> InDoubtError:
        self.park = Park.because(reason, "in_doubt", call.state.number)
        return InDoubtError(self.park.reason)

    def _decision(self, target: str) -> decisions.Answer | None:
        """What somebody decided about *target*."""
        made = self._environment.decisions.get((self._message.key_bytes, self.message_id))
        body = made.get(target) if made else None
        return decisions.load(target, body) if body is not None else None

    async def _replayed(self, call: Call) -> Any:
        self._environment.counters.replayed += 1
        try:
            if call.state.error is None:
                return codec.from_tree(call.state.result)
            failure = codec.decode_exception(call.state.error)
        except CodecError as error:  # which the action would take for a failure of the call
            why = f"has a recorded outcome that cannot be loaded: {error}"
            await self._stop_with(self._unrecordable(call, error, why).reason)
        self._journal.raised(call, failure)
        raise failure from failure.__cause__


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


def _is_being_cancelled() -> bool:
    """Whether the runner cancels this task, as against an action that raises `CancelledError` of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Unrecordable(BaseException):
    """Carries the reason past the handlers that are for what the callee raises."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


def _value_of(value: Any, error: Exception | None) -> Any:
    """What a call returned; raises what it raised."""
    if error is not None:
        raise error
    return value


def _may_have_happened(status: CallStatus, options: CallOptions) -> bool:
    """Whether a call with effect ``once`` is in doubt; after a failure only if somebody can tell better."""
    return status in (CallStatus.OPEN, CallStatus.REQUESTED) or (
        status is CallStatus.FAILED and options.reconcile is not None
    )


def _stricter(declared: Effect, recorded: str) -> Effect:
    """Of the effect in the code and the one on record, the one that is more harmful to repeat."""
    return max(declared, recorded, key=effects.EFFECTS.index)  # type: ignore[arg-type]


def _encode_arguments(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], str]:
    try:
        arguments: Any = codec.to_tree(list(args), root="args")
        keywords: Any = codec.to_tree(kwargs, root="kwargs") if kwargs else {}
    except CodecError as error:
        raise CodecError(f"the call {name} was not made, because an argument cannot be recorded: {error}") from error
    return arguments, keywords, fingerprint({"args": arguments, "kwargs": keywords} if keywords else arguments)
