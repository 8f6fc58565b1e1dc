"""The journal of one action task: matches the calls that the code makes with those that are recorded.

**Matching.** A call is its name, its argument fingerprint, and its place. Recorded calls form *groups*: a call that
started while no other call of its action task was in flight begins a new group. Code that awaits one call after the
other makes groups of one; calls under ``asyncio.gather`` or a task group share one. Groups match strictly in order;
within a group calls match in any order, equal ones by the order in which they started. So sequential code that
changed is found before anything executes, and concurrent code replays whatever finishes first. A `read` call that was
seen in flight and has no outcome binds nothing: the code may make it again or not.

**New calls.** A call that is not recorded is new only when nothing recorded is left that had to come first: when
all groups are matched, or, from concurrent code, within the last group, which a crash may have cut short.

**Failures.** An exception that a call raised is recorded when the action goes on, because only then did the action
catch it: when its next call begins, or when it is done. That another call ends, which was in flight beside it, proves
nothing. That another strand of the action begins a call proves little, for the exception may still be on its way out;
such a failure is recorded as ``unsure``. If the exception leaves the action, nothing final is recorded, and an unsure
failure is taken back. So is one that is recorded because the action made calls while the exception was on its way out,
as in a ``finally``; these calls are then given up. So it is with a call that the action cancelled: it is recorded as
abandoned.

**Giving up.** Where the code no longer fits and is to go on (`give_up`), the recorded calls that are still to come are
given up: from there on they bind nothing, in this run and in every later one. One that the code makes all the same,
with equal arguments, keeps its answer, so that nothing recorded is executed again.

No I/O here: records go to the `append` callable, which must keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dalsegno.core import divergence
from dalsegno.core.records import CallState, GivenUp, Park, TaskActionState, new_body
from dalsegno.core.transitions import CallStatus
from dalsegno.errors import DivergenceError

# Looking a member up in its enumeration is slow.
_NEW, _OPEN, _REQUESTED, _FAILED, _COMPLETED, _ABANDONED = CallStatus

Append = Callable[[dict[str, Any]], None]
"""Takes the body of a record of this action task."""


@dataclass(slots=True)
class Call:
    """One call that the code makes, matched with what is recorded of it (``state.status`` is NEW if nothing is)."""

    state: CallState
    occurrence: int
    strand: object
    """What the call is made from: None for the action itself, or a task that it started."""


class Journal:
    """Matching and recording of the calls of one action task. *describe* is formatted only for an error."""

    def __init__(self, recorded: TaskActionState | None, append: Append, describe: object) -> None:
        self._append = append
        self._describe = describe
        self._groups: list[list[CallState]] = []
        self._left_open: list[CallState] = []
        self._given_up: list[CallState] = []
        """Those that are not taken yet, up to the present point."""
        self._later: list[tuple[list[CallState], list[list[CallState]]]] = []
        """For each later point at which calls were given up: these calls, and the groups from there to the next one."""
        self._patches: dict[str, bool] = {}
        self._next_number = 0
        if recorded is not None and recorded.calls:
            self._groups = _group(recorded.calls)
            self._next_number = 1 + max(recorded.calls)
        if recorded is not None:
            self._patches = recorded.patches
            if recorded.given_up:
                self._groups, self._later = _stretches(recorded)
        self._occurrences: dict[tuple[str, str], int] = {}
        self._unannounced: dict[int, CallState] = {}
        self._pending_failures: dict[int, Call] = {}
        self._raised: list[tuple[CallState, BaseException, int]] = []
        """Failures that the action got, each with how many calls had begun by then."""
        self._begun: list[int] = []
        """The numbers of the calls in the order in which they began."""
        self._losses = [*recorded.given_up] if recorded is not None else []
        """All calls that were given up, in this run or before."""
        self._cancelled: set[int] = set()
        self._abandoned: list[CallState] = []

    @property
    def calls_begun(self) -> int:
        """How many calls the action has begun, in this run."""
        return len(self._begun)

    def begin(
        self,
        name: str,
        arguments: str,
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        alone: bool,
        concurrent: bool,
        strand: object,
    ) -> Call:
        """Match a call that is about to be made; raises `DivergenceError` before anything executes.

        *alone* says whether no other call of this action task is in flight; *concurrent*, whether one may be, as in a
        task of a group; *strand*, what makes the call, see `Call`.
        """
        state = self._match(name, arguments, args, kwargs, concurrent)
        if state is not None and state.status is _OPEN:
            state.args, state.kwargs = args, kwargs  # only that it began is recorded
        if state is not None and state.status is _ABANDONED and state.order is None:
            state.status = _REQUESTED  # given up: the code that would cancel it is gone
        if state is None:
            state = CallState(self._next_number, name, arguments, alone=alone, args=args, kwargs=kwargs)
            self._next_number += 1
        occurrence = self._occurrences.get((name, arguments), 0)
        self._occurrences[name, arguments] = occurrence + 1
        self._begun.append(state.number)
        if self._pending_failures:
            self._record_failures(strand)
        return Call(state, occurrence, strand)

    def start_unrecorded(self, call: Call) -> None:
        """The call starts without a record of its own; the next record of anything else mentions it."""
        state = call.state
        state.attempt += 1
        if state.status is _NEW:
            self._unannounced[state.number] = state

    def request(self, call: Call, effect: str, answer: str | None = None) -> None:
        """Record that the call is about to start; it may start only when this is durable.

        *answer* is what a reconcile said, if the call was in doubt.
        """
        state = call.state
        state.attempt += 1
        state.effect = effect
        state.retry_at = None
        body = _request("requested", state)
        if answer is not None:
            body["answer"] = answer
        self._emit(body)
        state.status = _REQUESTED

    def complete(self, call: Call, result: Any, by: str | None = None) -> None:
        """Record that the call returned *result* (a codec tree), or that *by* tells that it did."""
        body = self._outcome(call.state)
        body["result"] = result
        if by is not None:
            body["by"] = by
        self._emit(body)
        call.state.status = _COMPLETED

    def fail(self, call: Call, error: Any) -> None:
        """The call raised *error* (a codec tree): recorded when the action goes on, if it does."""
        call.state.error = error
        self._pending_failures[call.state.number] = call

    def abandon(self, call: Call) -> None:
        """The action cancelled the call: recorded like a failure, when the action goes on, if it does."""
        if call.state.status is _ABANDONED:
            self._abandoned.append(call.state)  # on record, and so again
            return
        self._cancelled.add(call.state.number)
        self._pending_failures[call.state.number] = call

    def slept(self, call: Call) -> None:
        """Record that a sleep has ended, with its place among the outcomes."""
        assert call.state.order is not None
        self._emit(new_body("slept") | {"call": call.state.number, "order": call.state.order.tree})

    def retry(self, call: Call, error: Any, retry_at: datetime) -> None:
        """Record that an attempt raised *error* (a codec tree), and that the next one is due *retry_at*, in UTC."""
        state = call.state
        self._unannounced.pop(state.number, None)
        if state.status is _NEW or state.status is _OPEN:
            body = _request("failed", state)
        else:
            body = new_body("failed") | {"call": state.number}
        self._emit(body | {"attempt": state.attempt, "error": error, "retry_at": retry_at.isoformat()})
        state.status = _FAILED
        state.failures += 1
        state.retry_at = retry_at

    def raised(self, call: Call, error: BaseException) -> None:
        """*error* is what the action gets for the failure of *call*."""
        self._raised.append((call.state, error, self.calls_begun))

    def begun(self, attempt: int) -> None:
        self._emit(new_body("begun") | {"attempt": attempt})

    def park(self, park: Park) -> None:
        body = new_body("parked") | {"reason": park.reason, "why": park.why}
        if park.call is not None:
            body["call"] = park.call
        self._emit(body)

    def leave_failed(self, failure: BaseException) -> None:
        """*failure* left the action. What made it fail is not final: only that an attempt ended is recorded."""
        pending, self._pending_failures = self._pending_failures, {}
        self._reopen()
        left = {id(error) for error in _origins(failure)}
        recorded = [each for each in self._raised if each[0].status is _COMPLETED and id(each[1]) in left]
        self._void([begun for state, _, begun in recorded if not state.unsure])
        for state in [call.state for call in pending.values() if call.state.number not in self._cancelled] + [
            state for state, _, _ in recorded
        ]:
            if state.status in (_REQUESTED, _COMPLETED) or state.failures:
                body = new_body("failed") | {"call": state.number, "error": state.error}
                if state.status is _COMPLETED and not state.unsure:
                    body["left"] = True
                if state.status is _FAILED:  # a `read` call, whose attempts are on record only when they fail
                    body["attempt"] = state.attempt
                self._emit(body)
                state.status = _FAILED

    def _void(self, begun: list[int]) -> None:
        """The calls that began after that many are of a path that the action may not take when it is tried again.

        They no longer bind it, as if changed code had given them up; those that it makes again keep their answers.
        """
        lost = {number for loss in self._losses for number in loss.calls}
        calls = [number for number in self._begun[min(begun) :] if number not in lost] if begun else []
        if calls:
            self._lose(calls)

    def _lose(self, calls: list[int]) -> None:
        """Record that *calls* no longer bind the code after those that have begun by now."""
        loss = GivenUp(calls, self._next_number)
        self._losses.append(loss)
        self._emit(new_body("given_up") | loss._asdict())

    def _reopen(self) -> None:
        """An exception left the action, and with it perhaps the reason why it abandoned calls."""
        for state in self._abandoned:
            if not state.unsure or state.order is None:
                continue
            if state.order.abandoned_from is _COMPLETED:
                body = new_body("completed") | {"call": state.number, "order": state.order.tree}
                body |= {"result": state.result} if state.error is None else {"error": state.error}
                self._emit(body)
                state.status = _COMPLETED
            else:
                self._emit(new_body("reopened") | {"call": state.number})
                state.status = _REQUESTED

    def reopen(self, call: Call) -> None:
        """The call that the action had abandoned is to be made after all."""
        call.state.order = None
        self._emit(new_body("reopened") | {"call": call.state.number})
        call.state.status = _REQUESTED

    def check_complete(self) -> None:
        """At the end of the action: every recorded call was made again. Raises `DivergenceError` otherwise."""
        for state in self._to_come():
            if state.status is not _OPEN:
                raise divergence.missing_call(self._describe, state)

    def give_up(self) -> list[CallState]:
        """From here on, what is recorded and was not made again binds nothing; returns those calls."""
        lost = list(self._to_come())
        for calls, _ in self._later:  # given up before, at a point that is never reached now
            self._given_up += calls
        self._groups, self._later = [], []
        self._given_up += lost
        for state in lost:
            state.order = None
        self._lose([state.number for state in lost])
        return lost

    def dropped(self) -> list[CallState]:
        """The calls that were given up and not made again."""
        return self._given_up

    def patched(self, name: str) -> bool:
        """Whether the code may take its new path at the change *name*: nothing recorded is left that knows the old one.

        The first answer is recorded and holds for the whole action task.
        """
        answer = self._patches.get(name)
        if answer is None:
            answer = self._patches[name] = all(state.status is _OPEN for state in self._to_come())
            self._emit(new_body("patched") | {"name": name, "answer": answer})
        return answer

    def _to_come(self) -> Iterator[CallState]:
        """The recorded calls that the code was to make by now or is to make yet."""
        for group in self._groups + [group for _, groups in self._later for group in groups]:
            yield from group

    @property
    def overlapping(self) -> bool:
        """Whether calls that were in flight together are recorded and not yet made again."""
        return any(not state.alone for group in self._groups for state in group)

    def done(self, body: dict[str, Any]) -> None:
        """Record the end of the action; *body* is that of a ``done`` record."""
        if self._pending_failures:
            self._record_failures(None)
        self._emit(body)

    def _record_failures(self, strand: object) -> None:
        """*strand* goes on, so it may have caught what its calls, or those of strands that it started, raised."""
        pending, self._pending_failures = self._pending_failures, {}
        for call in pending.values():
            call.state.unsure = strand is not None and strand is not call.strand
            if call.state.number in self._cancelled:
                self._record_abandoned(call.state)
                continue
            body = self._outcome(call.state)
            body["error"] = call.state.error
            if call.state.unsure:
                body["unsure"] = True
            self._emit(body)
            call.state.status = _COMPLETED

    def _record_abandoned(self, state: CallState) -> None:
        self._unannounced.pop(state.number, None)
        if state.status is _NEW or state.status is _OPEN:
            body = _request("abandoned", state)
        else:
            body = new_body("abandoned") | {"call": state.number}
        assert state.order is not None
        body["order"] = state.order.tree
        if state.unsure:
            body["unsure"] = True
        self._emit(body)
        state.order.abandoned_from, state.status = state.status, _ABANDONED
        self._abandoned.append(state)

    def out_of_order(self, state: CallState, what: str) -> DivergenceError:
        """The error for outcomes that cannot come in the recorded order, because of *state*'s call."""
        return divergence.out_of_order(self._describe, state, what)

    def _match(
        self, name: str, arguments: str, args: list[Any], kwargs: dict[str, Any], concurrent: bool
    ) -> CallState | None:
        while True:
            if not self._groups and self._later:
                calls, self._groups = self._later.pop(0)
                self._given_up += calls
                continue
            # First of all, because they were still there when what is in the groups was executed.
            found = _take(self._given_up, name, arguments) if self._given_up else None
            if found is not None:
                return found
            if not self._groups:
                return _take(self._left_open, name, arguments)
            group = self._groups[0]
            found = _take(group, name, arguments) or _take(self._left_open, name, arguments)
            if found is not None:
                return found
            if any(state.status is not _OPEN for state in group):
                break
            # Nothing that is left of the group has an answer, so the code need not make it again, as when a call
            # lost a race and was cancelled. If it does, it is found among these.
            self._left_open += group
            del self._groups[0]
        if concurrent and len(self._groups) == 1 and not self._later:
            return None
        found = CallState(-1, name, arguments, False, args=args, kwargs=kwargs)
        raise divergence.unfit_call(self._describe, group, found)

    def _outcome(self, state: CallState) -> dict[str, Any]:
        """The body of the record of an outcome, without the outcome."""
        self._unannounced.pop(state.number, None)
        if state.status is _REQUESTED or state.status is _FAILED:
            body = new_body("completed") | {"call": state.number}
        else:
            body = _request("called", state)
        if state.order is not None:
            body["order"] = state.order.tree
        return body

    def _emit(self, body: dict[str, Any]) -> None:
        if self._unannounced:
            open_calls = [
                [s.number, s.name, s.arguments, s.alone]
                for s in self._unannounced.values()
                if s.number != body.get("call")
            ]
            self._unannounced.clear()
            if open_calls:
                body["open"] = open_calls
        self._append(body)


def _request(kind: str, state: CallState) -> dict[str, Any]:
    body = new_body(kind)
    body["call"] = state.number
    body["name"] = state.name
    body["args_digest"] = state.arguments
    body["effect"] = state.effect
    if state.alone:
        body["alone"] = True
    if state.attempt > 1:
        body["attempt"] = state.attempt
    body["args"] = state.args
    if state.kwargs:
        body["kwargs"] = state.kwargs
    return body


def _origins(failure: BaseException) -> Iterator[BaseException]:
    """*failure*, what it was raised from or in the handling of, and the members of groups."""
    seen: set[int] = set()
    left = [failure]
    while left:
        error = left.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        left += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        left += [each for each in (error.__cause__, error.__context__) if each is not None]


def _group(calls: dict[int, CallState]) -> list[list[CallState]]:
    groups: list[list[CallState]] = []
    for _, state in sorted(calls.items()):
        if state.alone or not groups:
            groups.append([])
        groups[-1].append(state)
    return groups


def _stretches(
    recorded: TaskActionState,
) -> tuple[list[list[CallState]], list[tuple[list[CallState], list[list[CallState]]]]]:
    """The groups up to the point where calls were first given up; those calls and the groups after it, and so on."""
    lost = {number for each in recorded.given_up for number in each.calls}
    kept = {number: state for number, state in recorded.calls.items() if number not in lost}
    ends = [each.before for each in recorded.given_up] + [1 + max(recorded.calls, default=0)]
    groups = [
        _group({number: state for number, state in kept.items() if start <= number < end})
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    calls = [[recorded.calls[number] for number in each.calls] for each in recorded.given_up]
    return groups[0], list(zip(calls, groups[1:], strict=True))


def _take(calls: list[CallState], name: str, arguments: str) -> CallState | None:
    """Take the first of *calls* that fits out of the list."""
    for position, state in enumerate(calls):
        if state.name == name and state.arguments == arguments:
            return calls.pop(position)
    return None
