"""Makes durable calls, each in one attempt or several, and records what becomes of them.

What the action gets of a call is always the decoded record, in the first run too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dalsegno import effects
from dalsegno.context import CallOptions
from dalsegno.core import codec
from dalsegno.core.callee import Callee, with_key, with_key_for_reconcile
from dalsegno.core.flight import Flight, Stopped, Unrecordable, is_thrown_away
from dalsegno.core.invoke import invoke, invoke_in_time
from dalsegno.core.journal import Call, Journal
from dalsegno.core.pauses import after
from dalsegno.core.place import Place
from dalsegno.core.settlement import Settlement, may_have_happened
from dalsegno.core.strands import Strands
from dalsegno.core.time_limit import OutOfTime
from dalsegno.core.transitions import CallStatus
from dalsegno.effects import Effect
from dalsegno.errors import ActionError, CodecError, InDoubtError, StoreError, raised_at
from dalsegno.retry import RetryPolicy

_NEW = CallStatus.NEW  # looking a member up in its enumeration is slow

_AGAIN = object()
"""In place of an outcome: the attempt failed, and another one is due."""


class Attempts:
    """The calls of one action task."""

    def __init__(self, place: Place, journal: Journal, flight: Flight, strands: Strands) -> None:
        self._place = place
        self._environment = place.environment
        self._journal = journal
        self._flight = flight
        self._strands = strands

    async def make(self, call: Call, function: Callable[..., Any], callee: Callee, options: CallOptions) -> Any:
        """Make the call, and return or raise its outcome when it is its turn."""
        if options.retry is None and not (callee.marked or options.idempotency_key):
            outcome = await self._attempt(call, function, callee, options)
        else:
            function = with_key(function, callee, options)
            while (outcome := await self._attempt(call, function, callee, options)) is _AGAIN:
                pass
        if self._strands.overlapping:
            await self._strands.in_turn(call)
        return outcome

    async def play_back(self, call: Call) -> Any:
        """Return or raise the recorded outcome of the call."""
        self._environment.counters.replayed += 1
        try:
            if call.state.error is None:
                return codec.from_tree(call.state.result)
            failure = codec.decode_exception(call.state.error)
        except CodecError as error:  # which the action would take for a failure of the call
            why = f"has a recorded outcome that cannot be loaded: {error}"
            await self._flight.stop_with(self._unrecordable(call, error, why).reason)
        self._journal.raised(call, failure)
        raise failure from failure.__cause__

    async def _attempt(self, call: Call, function: Callable[..., Any], callee: Callee, options: CallOptions) -> Any:
        """Make the call and record its outcome. A signal, as when it is cancelled, is none."""
        if self._environment.stopping:
            await self._flight.stop_with(Stopped())
        failure: Exception | None = None
        verdict: Exception | None = None
        present = asyncio.current_task(self._environment.loop)
        self._flight.enter()
        try:
            effect, answer, late = options.effect, None, None
            if call.state.status is not _NEW:
                if options.retry is not None and call.state.retry_at is not None:
                    await self._wait_for_retry(call.state.retry_at, options.retry)
                options = with_key_for_reconcile(options)
                effect = _stricter(effect, call.state.effect)
                if effect == "once" and may_have_happened(call.state.status, options):
                    settlement = Settlement(self._place, self._flight)
                    late = settlement.ended_late(call)
                    settled = await settlement.reconcile(call, options) if late is None else None
                    if settled is not None:
                        return self.completed(call, *settled)
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
                    return self._returned(call, await invoke(self._place, call, function, callee.is_async))
                return self._returned(call, await invoke_in_time(self._place, call, function, callee, options.timeout))
            except OutOfTime as cut_off:
                if effect == "once":
                    settled = await Settlement(self._place, self._flight).settle_late(call, options, cut_off)
                    if settled is not None:
                        return self.completed(call, *settled)
                failure = self._failed_or_due(call, cut_off.error, options.retry)
            except Exception as error:
                failure = self._failed_or_due(call, error, options.retry)
            except (SystemExit, GeneratorExit) as error:
                if isinstance(error, GeneratorExit) and is_thrown_away(present):
                    raise
                # As an outcome it would end every replay; out of a task of the action it would end the event loop.
                raise self._unrecordable(
                    call,
                    error,
                    f"raised {error!r}, which says nothing of its outcome; let it raise an ordinary "
                    f"exception{raised_at(error)}",
                ) from error
        except (StoreError, InDoubtError) as error:
            verdict = error
        except Unrecordable as error:
            verdict = error.reason
        except asyncio.CancelledError:
            await self._strands.abandon(call)
            raise
        finally:
            self._flight.leave()
        if verdict is not None:
            await self._flight.stop_with(verdict)
        if failure is None:
            return _AGAIN
        if self._strands.overlapping:
            await self._strands.deliver_failure(call)
        raise failure from failure.__cause__  # here, where nothing is being handled that would become its context

    # Its outcome.

    def _returned(self, call: Call, result: Any) -> Any:
        try:
            tree = codec.to_tree(result, root="result")
        except CodecError as error:
            raise self._unrecordable(
                call, error, f"was made, but what it returned cannot be recorded: {error}"
            ) from error
        return self.completed(call, tree)

    def completed(self, call: Call, tree: Any, by: str | None = None) -> Any:
        """Record the result *tree*, which *by* tells, if it is no answer of the call itself.

        Returns what the action gets; if calls overlap, when its turn has come, see `Strands.in_turn`.
        """
        try:
            result = codec.from_tree(tree)
        except CodecError as error:
            raise self._unrecordable(call, error, f"has a result that cannot be loaded: {error}") from error
        if self._strands.overlapping:
            self._strands.arrived(call)
        self._journal.complete(call, tree, by)
        return result

    def failed(self, call: Call, error: Exception) -> Exception:
        """What the action gets; if calls overlap, after `Strands.deliver_failure`."""
        tree = codec.encode_exception(error)
        if self._strands.overlapping:
            self._strands.arrived(call)
            call.state.error = tree
        else:
            self._journal.fail(call, tree)
        decoded = codec.decode_exception(tree)
        self._journal.raised(call, decoded)
        return decoded.with_traceback(error.__traceback__)

    def _failed_or_due(self, call: Call, error: Exception, retry: RetryPolicy | None) -> Exception | None:
        """What the action gets, or None when the call is to be made again, which is then recorded."""
        if retry is None or call.state.failures + 1 >= retry.attempts or not self._covers(call, error, retry):
            return self.failed(call, error)
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
        await self._flight.pause(due, retry.longest_wait)
        halt = self._flight.halt()
        if halt is not None:
            raise Unrecordable(halt)
        self._flight.check_running()

    def _unrecordable(self, call: Call, error: BaseException, why: str) -> Unrecordable:
        reason = ActionError(f"{self._place}: the call {call.state.name} {why}")
        reason.__cause__ = error
        return Unrecordable(reason)


def _value_of(value: Any, error: Exception | None) -> Any:
    """What a call returned; raises what it raised."""
    if error is not None:
        raise error
    return value


def _stricter(declared: Effect, recorded: str) -> Effect:
    """Of the effect in the code and the one on record, the one that is more harmful to repeat."""
    return max(declared, recorded, key=effects.EFFECTS.index)  # type: ignore[arg-type]
