"""Settles calls with effect ``once`` that may or may not have happened.

Who can tell, in this order: the thread in which such a call still runs after its time limit, a person who decided, the
call's ``reconcile``. If nobody can, the call is in doubt, and its message is set aside.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from dalsegno.context import CallOptions
from dalsegno.core import codec, decisions
from dalsegno.core.callee import with_key_for_reconcile
from dalsegno.core.flight import Flight, is_being_cancelled, is_thrown_away
from dalsegno.core.invoke import invoke
from dalsegno.core.journal import Call
from dalsegno.core.late import CallPlace, MessagePlace
from dalsegno.core.place import Place
from dalsegno.core.records import Park
from dalsegno.core.time_limit import OutOfTime
from dalsegno.core.transitions import CallStatus
from dalsegno.effects import DidNotHappen, Happened, Unknown
from dalsegno.errors import CodecError, InDoubtError


class Settlement:
    """That of the calls of one action task."""

    __slots__ = ("_environment", "_flight", "_place")

    def __init__(self, place: Place, flight: Flight) -> None:
        self._place = place
        self._environment = place.environment
        self._flight = flight

    async def reconcile(self, call: Call, options: CallOptions) -> tuple[Any, str] | None:
        """What a call that happened returned, and who says so; None if it did not happen.

        Raises `InDoubtError` if nobody can tell.
        """
        decided = self._decision(call)
        if isinstance(decided, decisions.Resolved):
            return (decided.result, "resolve") if decided.happened else None
        where = (
            f"{self._place}: the call {call.state.name} was requested before, and whether it happened is not recorded"
        )
        if options.reconcile is None:
            raise self._in_doubt(
                call,
                f"{where}; it has effect='once' and no reconcile= that could tell whether it happened, so it is not "
                "made again",
            )
        present = asyncio.current_task()
        try:
            is_async = inspect.iscoroutinefunction(options.reconcile)
            answer = await invoke(self._place, call, options.reconcile, is_async, settles=True)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError) and is_being_cancelled()
            thrown_away = isinstance(error, GeneratorExit) and is_thrown_away(present)
            if cancelled or thrown_away or isinstance(error, KeyboardInterrupt):
                raise
            raise self._in_doubt(
                call, f"{where}; its reconcile could not tell, it raised {type(error).__name__}: {error}"
            ) from error
        return self._answered(call, answer, where)

    def _answered(self, call: Call, answer: object, where: str) -> tuple[Any, str] | None:
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

    # Calls that were cut off by their time limit.

    async def settle_late(self, call: Call, options: CallOptions, late: OutOfTime) -> tuple[Any, str] | None:
        """`reconcile` for a call that was cut off by its time limit."""
        if late.running is not None:
            reason = (
                f"{self._place}: {late.error}, and may still happen, because it runs in a thread, which nothing can "
                "end; it has effect='once', so it is not made again: the message waits for the thread, whose outcome "
                "counts; after a restart its reconcile, if it has one, is asked"
            )
            self._environment.late.add(*self._late_place(call), late.running, reason)
            raise self._in_doubt(call, reason)
        try:
            return await self.reconcile(call, with_key_for_reconcile(options))
        except InDoubtError as error:
            raise self._in_doubt(call, f"{error} ({late.error})") from error.__cause__

    def ended_late(self, call: Call) -> tuple[Any, Exception | None] | None:
        """The outcome of an attempt whose thread went on after its time limit; in doubt while it does."""
        late = self._environment.late.take(*self._late_place(call))
        if late is None:
            return None
        if late.watched.runs:
            raise self._in_doubt(call, late.reason)
        decided = self._decision(call)
        # That it happened is for a person to say. That it did not may have been true when it was said.
        return None if isinstance(decided, decisions.Resolved) and decided.happened else late.watched.outcome

    def _late_place(self, call: Call) -> tuple[MessagePlace, CallPlace]:
        message, state = self._place.message, call.state
        return (message.key_bytes, message.id), (self._place.identity, state.number, state.attempt)

    def _decision(self, call: Call) -> decisions.Answer | None:
        state = call.state
        return self._place.decision(decisions.resolve_target(self._place.identity, state.number, state.attempt))

    def _in_doubt(self, call: Call, reason: str) -> InDoubtError:
        self._flight.park = park = Park.because(reason, "in_doubt", call.state.number)
        return InDoubtError(park.reason)


def may_have_happened(status: CallStatus, options: CallOptions) -> bool:
    """Whether a call with effect ``once`` is in doubt; after a failure only if somebody can tell better."""
    return status in (CallStatus.OPEN, CallStatus.REQUESTED) or (
        status is CallStatus.FAILED and options.reconcile is not None
    )
