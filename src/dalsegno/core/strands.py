"""The strands of an action: the action itself and the tasks that it starts, which make calls beside one another.

A call that a strand begins is matched with the record, where strands may come in another order than in the first run.
Outcomes of calls in flight together reach the strands in the order that `dalsegno.core.delivery` keeps.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dalsegno.agent import ActionSpec
from dalsegno.core import divergence
from dalsegno.core.delivery import Delivery
from dalsegno.core.flight import Flight, Stopped, is_being_cancelled
from dalsegno.core.journal import Call, Journal
from dalsegno.core.place import Place
from dalsegno.core.records import TaskActionState
from dalsegno.core.transitions import CallStatus
from dalsegno.errors import DivergenceError

# Looking a member up in its enumeration is slow.
_REQUESTED, _COMPLETED, _ABANDONED = CallStatus.REQUESTED, CallStatus.COMPLETED, CallStatus.ABANDONED

SLEEP = "dalsegno.sleep"
"""The name of the call that is made to sleep; its result is when the sleep is due to end."""

_TURNS = 100
"""Turns of the event loop in which other strands may begin their recorded calls."""
_POLLS = 100
_POLL_SECONDS = 0.01

_logger = logging.getLogger("dalsegno")


class Strands:
    """Those of one action task. *recorded* is what an earlier process recorded of it."""

    overlapping = False
    """Whether calls are in flight together, or were a moment ago."""
    diverged = False
    """Whether the action went on although the code no longer fitted the record."""
    main: asyncio.Task[Any] | None = None
    """The task of the event loop that runs an async action itself."""
    _last_sequential = True
    _order: Delivery | None = None
    _unfit: DivergenceError | None = None
    """The last error of the order for which the record was given up."""
    _abandoned: list[Call] | None = None
    """Calls that the action cancelled since it last went on."""

    def __init__(
        self, place: Place, journal: Journal, flight: Flight, spec: ActionSpec, recorded: TaskActionState | None
    ) -> None:
        self._place = place
        self._environment = place.environment
        self._journal = journal
        self._flight = flight
        self._spec = spec
        self._recorded = recorded
        self._loop = place.environment.loop
        self._begun_at = self._loop.time()
        if recorded is not None and any(state.order is not None for state in recorded.calls.values()):
            self._delivery()

    # The beginning of a call.

    async def match(self, name: str, digest: str, arguments: list[Any], keywords: dict[str, Any]) -> Call:
        """The call that is about to be made, with what is recorded of it."""
        try:
            return self._begin(name, digest, arguments, keywords)
        except DivergenceError as error:
            return await self._begin_in_turn(name, digest, arguments, keywords, error)

    def _begin(self, name: str, digest: str, arguments: list[Any], keywords: dict[str, Any]) -> Call:
        flight = self._flight
        strand = asyncio.current_task(self._loop)
        sequential = self.main is None or strand is self.main
        if self._abandoned:
            self.go_on()
        concurrent = not sequential or flight.calls > 0
        call = self._journal.begin(
            name,
            digest,
            arguments,
            keywords,
            alone=not flight.calls and (sequential or self._last_sequential),
            concurrent=concurrent,
            strand=None if sequential else strand,
        )
        self._last_sequential = sequential
        beside = concurrent or flight.pauses > 0
        if beside or call.state.order is not None or (self._order is not None and self._order.stirred):
            self.overlapping = True
            self._delivery().begin(call.state, beside)
        else:
            self.overlapping = False
        return call

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
                await self._flight.settle()
            if turn == (_TURNS + _POLLS if self._journal.overlapping else _TURNS):
                unfit = divergence.at(unfit, divergence.made_at() or self._defined_at())
                if not self._environment.rerun:
                    await self._flight.stop_with(unfit)
                self._give_up(unfit)
                if self._order is not None:
                    self._order.let_go()
            await asyncio.sleep(0 if turn < _TURNS else _POLL_SECONDS)
            turn += 1
            if self._flight.verdict is not None:
                await self._flight.stop_with(self._flight.verdict)
            try:
                return self._begin(name, digest, arguments, keywords)
            except DivergenceError as error:
                unfit = error

    # What does not fit.

    def check_complete(self) -> None:
        """At the end of the action: whether the code made all that is recorded. Raises `DivergenceError` if not."""
        try:
            self._journal.check_complete()
        except DivergenceError as error:
            unfit = divergence.at(error, self._defined_at())
            if not self._environment.rerun:
                raise unfit from None
            self._give_up(unfit)

    def _give_up(self, unfit: DivergenceError) -> None:
        """Go on, although what is recorded no longer fits."""
        self.diverged = True
        lost = self._journal.give_up()
        harm = divergence.harm_of(lost)
        _logger.warning(
            "%s: the code no longer fits the record. %s It goes on from there; of the %d recorded calls that were to "
            "come, those that it still makes keep their answers.%s",
            self._place,
            unfit.what,
            len(lost),
            harm,
        )

    def _defined_at(self) -> str:
        return divergence.defined_at(self._spec.function, " The action is ", ".")

    # The order of the outcomes of calls that are in flight together.

    def _delivery(self) -> Delivery:
        if self._order is None:
            environment = self._environment
            calls = self._recorded.calls.values() if self._recorded is not None else ()
            self._order = Delivery(self._loop, self._journal, calls, lambda: environment.stopping, self._begun_at)
            self._flight.keeps_back(self._order.close)
        return self._order

    def arrived(self, call: Call) -> None:
        """There is an outcome of the call, which is to come in its turn."""
        if call.state.name != SLEEP:  # its outcome is when it ends, which is no news for the action
            self._delivery().arrive(call.state)

    def slept(self, call: Call) -> None:
        """The sleep that the call began is over, which is to come in its turn."""
        if not self.overlapping:
            self._delivery().be_lonely(call.state)
        self._delivery().arrive(call.state)

    async def plays_back(self, call: Call) -> bool:
        """Wait for the turn of the recorded outcome; of a call that the action abandoned, until it is cancelled again.

        Returns False if the call is to be made after all, because the code no longer cancels it, and is to go on.
        """
        if call.state.order is not None:
            await self.in_turn(call)
        return call.state.status is not _REQUESTED

    async def in_turn(self, call: Call) -> None:
        """Return when it is the turn of the call's outcome."""
        verdict: Exception | None = None
        self._flight.enter()
        try:
            while not await self._has_turn(call):
                pass
        except DivergenceError as error:
            verdict = error
        except asyncio.CancelledError:
            await self.abandon(call)
            raise
        finally:
            self._flight.leave()
        verdict = verdict or self._flight.verdict
        if verdict is None and call.state.status is _ABANDONED:
            verdict = Stopped()
        if verdict is not None:
            await self._flight.stop_with(verdict)

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

    async def deliver_failure(self, call: Call) -> None:
        """The call failed, with the error that its state says: the action gets that in its turn."""
        await self.in_turn(call)
        self._journal.fail(call, call.state.error)

    # Calls that the action cancels.

    async def abandon(self, call: Call) -> None:
        """The call is cancelled. If the action did that, and not the runner, it is recorded when the action goes on."""
        flight = self._flight
        if not self._spec.is_async or self._environment.cancelled or flight.verdict or not is_being_cancelled():
            if self._order is not None:
                self._order.forget(call.state)
            return
        self._delivery().abandon(call.state)
        if call.state.status is not _COMPLETED:
            call.state.error = None
        if not flight.ended:
            flight.enter()
            try:
                await self._delivery().turn(call.state)
            except DivergenceError as error:
                if not self._environment.rerun:
                    flight.condemn(error)
            except asyncio.CancelledError:
                self._delivery().forget(call.state)  # cancelled once more: at once, then
            finally:
                flight.leave()
        self._environment.counters.replayed += call.state.status is _ABANDONED
        self._abandoned = self._abandoned or []
        self._abandoned.append(call)

    def go_on(self) -> None:
        """The action goes on, unless all that it does is to clean up: it knows of the calls that it cancelled."""
        if self._abandoned and not self._environment.cancelled:
            for call in self._abandoned:
                self._journal.abandon(call)
            self._abandoned = None
