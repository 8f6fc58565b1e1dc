"""The order in which the outcomes of calls that are in flight together reach their action.

An action can only tell which of its calls ended first by the order in which their outcomes reach it. So that it sees
the same in a replay, where recorded outcomes are there at once, it gets them by one rule, in the first run too:

- An outcome waits until the action has been *quiet*: for some turns of the event loop it has begun no call and been
  given no outcome. By then it has done what it does about the last one.
- All that has come by then is given to it in one turn.

Each turn, and how many calls had begun by then, is recorded (`Order`). A replay gives the recorded turns one after the
other, each when as many calls have begun; what is not on record comes after them. That a call was cancelled reaches the
action in the same way, so how long a callee takes to end makes no difference. In a replay a call that the action
abandoned waits until it is cancelled again, and what came later waits for that.

What cannot come in its order, as when the code no longer begins a call, is found after a bounded time.

A call that is made and awaited while the action does nothing else has nothing to do with any of this.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections.abc import Callable, Iterable

from dalsegno.core.journal import Journal
from dalsegno.core.records import CallState, Order
from dalsegno.core.transitions import CallStatus

_QUIET = 16
"""Turns of the event loop without anything of the action; each level of tasks that await tasks takes two or three."""
_QUIET_IN_REPLAY = 64
_LONGEST = 100 * _QUIET_IN_REPLAY
"""Turns after which outcomes come although the action goes on beginning calls."""
_POLL_SECONDS = 0.01
_POLLS = 100
_SLOW_POLL_SECONDS = 0.1


class Delivery:
    """The order of the outcomes of one action task. *recorded* is what an earlier run recorded of its calls."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        journal: Journal,
        recorded: Iterable[CallState],
        stopping: Callable[[], bool],
        begun_at: float,
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._stopping = stopping
        self._begun_at = begun_at
        calls = {state.order: state for state in recorded if state.order is not None}
        known = sorted(calls, key=_key)
        self._end_of_record = known[-1].key if known else (-1, -1)
        self._turn = max((order.turn for order in known), default=0)
        self._position = max((order.position for order in known), default=-1)
        # In order, what has not reached the action yet and what comes later waits for. What is made once more keeps its
        # place, but nothing waits for it, as it may come only because of what is later.
        self._due = [order for order in known if calls[order].status in _FINAL]
        self._calls = {order: calls[order] for order in self._due}
        self._given_up = False
        self._last = (-1, -1)
        self._waiting: dict[Order, asyncio.Future[None]] = {}
        self._pending: dict[Order, asyncio.Future[None]] = {}
        self._quiet_in = 0
        self._ticks = 0
        self._tick_handle: asyncio.Handle | None = None
        self._poll_handle: asyncio.Handle | None = None
        self._polls = 0
        self._made_again: set[int] = set()
        self._lonely: CallState | None = None
        self._closed = False

    @property
    def _is_behind(self) -> bool:
        """Whether recorded outcomes have not reached the action yet."""
        return bool(self._due) and self._due[0].key <= self._end_of_record

    @property
    def holds(self) -> bool:
        """Whether calls wait for their turn."""
        return bool(self._waiting or self._pending)

    @property
    def stirred(self) -> bool:
        """Whether the action is not quiet."""
        return self._quiet_in > 0

    def begin(self, state: CallState, beside: bool) -> None:
        """The action began the call; *beside* says whether others may be in flight."""
        self._lonely = None if beside else state
        if state.order is not None and state.status not in _FINAL:
            self._made_again.add(state.number)
        self.stir()

    def be_lonely(self, state: CallState) -> None:
        """The action did nothing else while it waited for the call, so it stays quiet when that has ended."""
        self._lonely = state

    def stir(self) -> None:
        """The action did something: it begins to be quiet from now on."""
        self._polls = 0
        if self._poll_handle is not None:
            self._poll_handle.cancel()
            self._poll_handle = None
        if self._ticks < _LONGEST:
            self._quiet_in = _QUIET_IN_REPLAY if self._is_behind else _QUIET
        if self._tick_handle is None and not self._closed:
            self._tick_handle = self._loop.call_soon(self._tick)

    def arrive(self, state: CallState) -> None:
        """There is an outcome of a call that was made in this run: gives it its place, then `turn` waits for that."""
        self._made_again.discard(state.number)
        if state.order is None or state.order.key <= self._last:
            self._position += 1
            key = self._turn + 1, self._position
        else:
            key = state.order.key
        state.order = Order(*key, self._journal.calls_begun, self._elapsed())
        self._calls[state.order] = state
        if not self._due or self._due[-1].key < key:
            self._due.append(state.order)
        else:
            insort(self._due, state.order, key=_key)

    def abandon(self, state: CallState) -> None:
        """The action cancelled the call: like `arrive`, but an outcome that has not reached the action is replaced."""
        if state.order not in self._calls:
            self.arrive(state)

    def forget(self, state: CallState) -> None:
        """The outcome will not reach the action, because that is being cancelled. What comes yet is of a later turn."""
        if state.order is not None and state.order in self._calls:
            self._due.remove(state.order)
            del self._calls[state.order]
            self._turn = max(self._turn, state.order.turn)

    def let_go(self) -> None:
        """From now on nothing waits for what is recorded of calls that the action has not begun."""
        self._given_up = True
        self._due = [order for order in self._due if order in self._waiting or order in self._pending]
        self._calls = {order: self._calls[order] for order in self._due}

    async def turn(self, state: CallState) -> None:
        """Return when the outcome's turn has come, or at once after `close`.

        Raises `DivergenceError` if the outcomes cannot come in the recorded order any more.
        """
        await self._wait(state.order, self._waiting)

    async def until_cancelled(self, state: CallState) -> None:
        """Wait as a call does that the action abandoned in an earlier run; returns and raises as `turn` does."""
        await self._wait(state.order, self._pending)

    async def _wait(self, order: Order | None, waiting: dict[Order, asyncio.Future[None]]) -> None:
        if order not in self._calls or self._closed:
            return
        future = waiting[order] = self._loop.create_future()
        try:
            if not self._quiet_in and self._poll_handle is None:
                self._look()
            if not future.done():
                await future
            future.result()
        finally:
            waiting.pop(order, None)

    def close(self) -> None:
        """Nothing is kept back any more, because the action must not go on, or has ended."""
        self._closed = True
        for handle in (self._tick_handle, self._poll_handle):
            if handle is not None:
                handle.cancel()
        for future in (*self._waiting.values(), *self._pending.values()):
            if not future.done():
                future.set_result(None)

    def _elapsed(self) -> int:
        return int((self._loop.time() - self._begun_at) * 1000)

    def _tick(self) -> None:
        self._tick_handle = None
        self._quiet_in -= 1
        self._ticks += 1
        if self._quiet_in > 0:
            self._tick_handle = self._loop.call_soon(self._tick)
        else:
            self._quiet_in = self._ticks = 0
            self._look()

    def _look(self) -> None:
        """The action is quiet: give it what is next."""
        turn = self._next()
        if turn:
            del self._due[: len(turn)]
            self._last = turn[-1].key
            self._turn = max(self._turn, turn[0].turn)
            calls = [self._calls.pop(order) for order in turn]
            for order in turn:
                if not self._waiting[order].done():
                    self._waiting[order].set_result(None)
            # What else goes on in the action than what waited for this call was quiet before, and still is.
            if calls[0] is not self._lonely:
                self.stir()
        elif (self._waiting or self._pending) and self._poll_handle is None:
            seconds = _POLL_SECONDS if self._polls < _POLLS else _SLOW_POLL_SECONDS
            self._poll_handle = self._loop.call_later(seconds, self._poll)

    def _next(self) -> list[Order]:
        """The outcomes of the next turn; none if it has not come."""
        turn = self._next_turn()
        return [] if any(order not in self._waiting or self._is_early(order) for order in turn) else turn

    def _next_turn(self) -> list[Order]:
        return list(itertools.takewhile(lambda order: order.turn == self._due[0].turn, self._due))

    def _is_early(self, order: Order) -> bool:
        return self._journal.calls_begun < order.begun and not self._given_up

    def _poll(self) -> None:
        self._poll_handle = None
        self._polls += not self._made_again
        if self._stopping():
            self.close()
            return
        missing = [order for order in self._next_turn() if order not in self._waiting or self._is_early(order)]
        if missing and self._polls > _POLLS + 10 + missing[0].after / 1000 / _SLOW_POLL_SECONDS:
            self._give_up(missing[0])
        else:
            self._look()

    def _give_up(self, missing: Order) -> None:
        self._polls = 0
        if missing in self._pending:
            what = "which the action cancelled in the earlier run, but now goes on waiting for"
        elif missing not in self._waiting:
            what = "which the action has not begun"
        else:
            begun = self._journal.calls_begun
            what = f"whose outcome came when {missing.begun} calls had begun, but now only {begun} have"
        error = self._journal.out_of_order(self._calls[missing], what)
        self.let_go()
        for order in self._pending:
            self._due.remove(order)
            del self._calls[order]
        for future in (*self._waiting.values(), *self._pending.values()):
            if not future.done():
                future.set_exception(error)


_FINAL = (CallStatus.COMPLETED, CallStatus.ABANDONED)


def _key(order: Order) -> tuple[int, int]:
    return order.key
