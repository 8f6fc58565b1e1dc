"""The durable waits of an action: ``ctx.sleep`` and ``ctx.wait_for``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import datetime, timedelta
from typing import Any, NoReturn

from dalsegno.agent import check_name
from dalsegno.core import decisions
from dalsegno.core.attempts import Attempts
from dalsegno.core.callee import encode_arguments
from dalsegno.core.flight import Flight, SetAside, Unrecordable
from dalsegno.core.journal import Call, Journal
from dalsegno.core.pauses import after, seconds_of
from dalsegno.core.place import Place
from dalsegno.core.records import Park
from dalsegno.core.strands import Strands
from dalsegno.core.transitions import CallStatus
from dalsegno.errors import StoreError

# Looking a member up in its enumeration is slow.
_NEW, _FAILED, _COMPLETED, _ABANDONED = CallStatus.NEW, CallStatus.FAILED, CallStatus.COMPLETED, CallStatus.ABANDONED


class Waits:
    """Those of one action task."""

    def __init__(self, place: Place, journal: Journal, flight: Flight, strands: Strands, attempts: Attempts) -> None:
        self._place = place
        self._environment = place.environment
        self._journal = journal
        self._flight = flight
        self._strands = strands
        self._attempts = attempts

    # Until some time has passed.

    async def wake_up_time(self, seconds: float) -> datetime:
        return after(self._environment.clock, seconds)

    async def sleep(self, wake_up_time: Coroutine[Any, Any, datetime], seconds: float, begun: list[Call]) -> None:
        """Wait until *wake_up_time*, a durable call, which is in *begun* by then; record that the wait is over."""
        due = await wake_up_time
        call = begun[0]
        if call.state.order is not None:
            return  # that it ended is on record
        if due > self._environment.clock():
            await self._sleep_until(due, seconds, call)
        self._strands.slept(call)
        try:
            self._journal.slept(call)
        except StoreError as error:
            await self._flight.stop_with(error)
        await self._strands.in_turn(call)

    async def _sleep_until(self, due: datetime, seconds: float, call: Call) -> None:
        try:
            await self._environment.log.barrier()
            await self._flight.pause(due, seconds)
        except StoreError as error:
            await self._flight.stop_with(error)
        except asyncio.CancelledError:
            await self._strands.abandon(call)
            raise
        halt = self._flight.halt()
        if halt is not None:
            await self._flight.stop_with(halt)
        self._flight.check_running()

    # Until somebody sends a signal.

    async def wait_for(self, name: str, limit: float | timedelta | None) -> Any:
        """What the signal *name* brings; until it is there, the message is set aside."""
        check_name(name, "the name of the signal in ctx.wait_for(...)")
        seconds = None if limit is None else seconds_of(limit, "ctx.wait_for(..., timeout=...)")
        arguments, keywords, digest = encode_arguments(decisions.WAIT, (name,), {})
        call = await self._strands.match(decisions.WAIT, digest, arguments, keywords)
        state = call.state
        if (state.status is _COMPLETED or state.status is _ABANDONED) and await self._strands.plays_back(call):
            return await self._attempts.play_back(call)
        if state.status is _NEW or state.status is _FAILED:
            # Also when it was too late before, and that left the action: as any call it is tried again, with its time.
            until = None if seconds is None else after(self._environment.clock, seconds)
            state.kwargs = {} if until is None else {"until": until.isoformat(timespec="milliseconds")}
            self._journal.request(call, "idempotent")
        decided = self._place.decision(decisions.signal_target(self._place.identity, state.number))
        if isinstance(decided, decisions.Signalled):
            return await self._signalled(call, decided)
        self._flight.until = decisions.wait_limit(state)
        if self._flight.until is not None and self._flight.until <= self._environment.clock():
            await self._too_late(call, name)
        self._flight.park = Park.because(f"{self._place}: waits for the signal {name!r}", "waiting", state.number)
        return await self._flight.stop_with(SetAside())

    async def _signalled(self, call: Call, decided: decisions.Signalled) -> Any:
        self._environment.counters.executed += 1
        try:
            value = self._attempts.completed(call, decided.value, "signal")
        except Unrecordable as error:
            await self._flight.stop_with(error.reason)
        if self._strands.overlapping:
            await self._strands.in_turn(call)
        return value

    async def _too_late(self, call: Call, name: str) -> NoReturn:
        self._environment.counters.executed += 1
        late = self._attempts.failed(call, TimeoutError(f"nobody sent the signal {name!r} in time"))
        if self._strands.overlapping:
            await self._strands.deliver_failure(call)
        raise late
