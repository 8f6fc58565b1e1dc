"""`RunnerContext`: what an action can do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar, overload

from dalsegno.effects import Effect
from dalsegno.events import Event
from dalsegno.memory import MemoryObject

T = TypeVar("T")


class CallOptions(NamedTuple):
    """How one durable call is to be made."""

    effect: Effect = "once"
    reconcile: Callable[..., Any] | None = None
    name: str | None = None


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
    async def wait_for(self, name: str, limit: float | timedelta | None, /) -> Any: ...
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
        """The message key."""
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
        kwargs: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Call *function* once, record what it returns or raises, and play that back in every replay. Must be awaited.

        *effect* says what the call does to the world and so what may happen after a crash in the middle of it:
        ``"read"`` and ``"idempotent"`` calls are made again, a ``"once"`` call only when *reconcile*, called with the
        same arguments, returns `DidNotHappen`. *name* identifies the call instead of the function's own name. A sync
        function runs in a thread. Arguments go to *function* as copies decoded from their record; those that are named
        like an option of this method go into *kwargs*.

        Raises what *function* raises, as decoded from its record; `CodecError` when an argument or the result cannot be
        recorded; `DefinitionError` when the function has no stable name or an argument and an option share a name.
        """
        options = CallOptions(effect, reconcile, name)
        return self._host.call(function, args, {**named, **(kwargs or {})}, options)

    def durable_execute_sync(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        effect: Effect = "once",
        reconcile: Callable[..., Any] | None = None,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Any:
        """`durable_execute` for an action that is a plain ``def``: waits for the call and returns its result."""
        options = CallOptions(effect, reconcile, name)
        return self._host.call_from_thread(function, args, {**named, **(kwargs or {})}, options)

    async def wait_for(self, name: str, *, timeout: float | timedelta | None = None) -> Any:  # noqa: ASYNC109  it is durable
        """Wait until somebody sends the signal *name* to this message key, and return what they sent.

        Sent by ``dalsegno signal JOB KEY NAME JSON`` or `LocalRunner.signal`, once: a second answer is refused. While
        it waits, the message is set aside: it costs no memory, survives restarts, and other keys go on; later messages
        of its key wait behind it. The action is replayed when the answer is there.

        *timeout* is in seconds, counted from the first time that the action gets here. Raises `TimeoutError` when
        nobody answered in time, and `DefinitionError` for a wrong name or timeout.
        """
        return await self._host.wait_for(name, timeout)
