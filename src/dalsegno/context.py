"""`RunnerContext`: what an action can do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol, TypeVar, overload
from uuid import UUID

from dalsegno.effects import Effect, running
from dalsegno.events import Event
from dalsegno.memory import MemoryObject
from dalsegno.retry import RetryPolicy

T = TypeVar("T")


class CallOptions(NamedTuple):
    """How one durable call is to be made."""

    effect: Effect = "once"
    reconcile: Callable[..., Any] | None = None
    name: str | None = None
    retry: RetryPolicy | None = None
    timeout: float | None = None
    idempotency_key: bool = False


class ActionHost(Protocol):
    """The running action task behind a context."""

    @property
    def short_term(self) -> MemoryObject: ...
    @property
    def sensory(self) -> MemoryObject: ...
    @property
    def job(self) -> str: ...
    @property
    def key(self) -> Any: ...
    @property
    def message_id(self) -> str: ...

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, /
    ) -> Coroutine[Any, Any, Any]: ...
    def call_from_thread(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, /
    ) -> Any: ...
    def patched(self, name: str, /) -> bool: ...
    def now(self) -> Coroutine[Any, Any, datetime]: ...
    def random(self) -> Coroutine[Any, Any, float]: ...
    def uuid(self) -> Coroutine[Any, Any, UUID]: ...
    def sleep(self, duration: float | timedelta, /) -> Coroutine[Any, Any, None]: ...
    async def gather(self, items: Sequence[Any], limit: int | None, /) -> list[Any]: ...
    async def wait_for(self, name: str, limit: float | timedelta | None, /) -> Any: ...
    def wait_for_from_thread(self, name: str, limit: float | timedelta | None, /) -> Any: ...
    def send(self, event: Event, /) -> None: ...


class RunnerContext:
    """The second argument of every action: durable calls, events, and memory of the message key.

    It belongs to one action task; using it after the action has ended raises `RuntimeError`.
    """

    __slots__ = ("_host",)

    def __init__(self, host: ActionHost) -> None:
        self._host = host

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._host.job

    @property
    def key(self) -> Any:
        """The message key. One with parts is a copy, and a dict in it has one order, whatever that of the input is."""
        return self._host.key

    @property
    def message_id(self) -> str:
        """The identity of the message within its job: the same in every replay."""
        return self._host.message_id

    @property
    def short_term_memory(self) -> MemoryObject:
        """The agent's memory for this message key."""
        return self._host.short_term

    @property
    def sensory_memory(self) -> MemoryObject:
        """Scratch memory of this message; gone when the message is done."""
        return self._host.sensory

    @property
    def idempotency_key(self) -> str:
        """The key of the durable call that is being executed, as in `current_call`.

        For callees that are closures or methods. Raises `LookupError` outside of a call and its ``reconcile``.
        """
        call = running.get(None)
        if call is None:
            raise LookupError(
                "ctx.idempotency_key is the key of a durable call, so it is only known inside a function that runs in "
                "ctx.durable_execute, or in its reconcile"
            )
        return call().idempotency_key

    def send_event(self, event: Event) -> None:
        """Send *event* when the action is done; an `OutputEvent` leaves through the sink.

        The event is copied now. Raises `CodecError` when it cannot be recorded and `DefinitionError` when no action
        handles it.
        """
        self._host.send(event)

    @overload
    def durable_execute(
        self,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        effect: Effect = ...,
        reconcile: Callable[..., Any] | None = ...,
        name: str | None = ...,
        retry: RetryPolicy | None = ...,
        timeout: float | None = ...,
        idempotency_key: bool = ...,
        kwargs: Mapping[str, Any] | None = ...,
        **named: Any,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def durable_execute(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        effect: Effect = ...,
        reconcile: Callable[..., Any] | None = ...,
        name: str | None = ...,
        retry: RetryPolicy | None = ...,
        timeout: float | None = ...,
        idempotency_key: bool = ...,
        kwargs: Mapping[str, Any] | None = ...,
        **named: Any,
    ) -> Coroutine[Any, Any, T]: ...
    def durable_execute(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        effect: Effect = "once",
        reconcile: Callable[..., Any] | None = None,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        idempotency_key: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Call *function* once, record what it returns or raises, and play that back in every replay. Must be awaited.

        *effect* says what the call does to the world and so what may happen after a crash in the middle of it:
        ``"read"`` and ``"idempotent"`` calls are made again, a ``"once"`` call only when *reconcile*, called with the
        same arguments, returns `DidNotHappen`. *name* identifies the call instead of the function's own name. A sync
        function runs in a thread. Arguments go to *function* as copies decoded from their record; those that are named
        like an option of this method go into *kwargs*.

        *retry* makes the call again when it raises; failed attempts are recorded, so a restart goes on counting, and
        waits no longer than what is left. *timeout* is in seconds, for each attempt. A ``"read"`` or ``"idempotent"``
        call that takes longer raises `TimeoutError`; a ``"once"`` call is then in doubt. With *idempotency_key* the
        function gets the key of the call as its argument ``idempotency_key``; a parameter that is annotated with
        `IdempotencyKey` gets it anyway.

        Raises what *function* raises, as decoded from its record; `CodecError` when an argument or the result cannot be
        recorded; `DefinitionError` when the function has no stable name or an argument and an option share a name.
        """
        options = CallOptions(effect, reconcile, name, retry, timeout, idempotency_key)
        return self._host.call(function, args, {**named, **kwargs} if kwargs else named, options)

    def durable_execute_sync(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        effect: Effect = "once",
        reconcile: Callable[..., Any] | None = None,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        idempotency_key: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Any:
        """`durable_execute` for an action that is a plain ``def``: waits for the call and returns its result."""
        options = CallOptions(effect, reconcile, name, retry, timeout, idempotency_key)
        return self._host.call_from_thread(function, args, {**named, **kwargs} if kwargs else named, options)

    def patched(self, name: str) -> bool:
        """Whether this action task may take the new path of the change *name* of the code.

        False where the task is replayed from a record that the code made before the change, so that the old path has to
        be taken once more; True everywhere else. Recorded: it is the same in every replay of the action task, wherever
        in the action it is asked for. Not to be awaited. Raises `DefinitionError` for a wrong name.
        """
        return self._host.patched(name)

    def now(self) -> Coroutine[Any, Any, datetime]:
        """The present time in UTC, recorded: the same in every replay. Must be awaited, as all that follows."""
        return self._host.now()

    def random(self) -> Coroutine[Any, Any, float]:
        """A random number from 0 up to, but not including, 1, recorded."""
        return self._host.random()

    def uuid(self) -> Coroutine[Any, Any, UUID]:
        """A random UUID (version 4), recorded."""
        return self._host.uuid()

    def sleep(self, duration: float | timedelta) -> Coroutine[Any, Any, None]:
        """Wait that many seconds, over restarts: when it is over is recorded, and a restart waits only what is left.

        The message keeps its place among those in flight. Raises `DefinitionError` for a negative or endless duration.
        """
        return self._host.sleep(duration)

    async def gather(self, *calls: Awaitable[T] | Callable[[], Awaitable[T]], limit: int | None = None) -> list[T]:
        """Await *calls* side by side, at most *limit* at a time, and return their results in order.

        *calls* are awaitables, and functions without arguments that return one. They begin in order. All of them are
        made and end, also when one raises; then the first exception, in order, is raised. When this is cancelled,
        those in flight are cancelled and the others never begin.
        """
        return await self._host.gather(calls, limit)

    async def wait_for(self, name: str, *, timeout: float | timedelta | None = None) -> Any:  # noqa: ASYNC109  it is durable
        """Wait until somebody sends the signal *name* to this message key, and return what they sent.

        Sent once, by ``dalsegno signal JOB KEY NAME JSON`` or by an `Operator`: a second answer is refused. While it
        waits, the message is set aside: its content leaves memory, it survives restarts, and other keys go on; later
        messages of its key wait behind it. The action is replayed when the answer is there.

        *timeout* is in seconds, counted from the first time that the action gets here. Raises `TimeoutError` when
        nobody answered in time, and `DefinitionError` for a wrong name or timeout.
        """
        return await self._host.wait_for(name, timeout)

    def wait_for_sync(self, name: str, *, timeout: float | timedelta | None = None) -> Any:
        """`wait_for` for an action that is a plain ``def``. While it waits, it holds no thread."""
        return self._host.wait_for_from_thread(name, timeout)
