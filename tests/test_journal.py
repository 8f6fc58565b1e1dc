"""The journal: a call gets its own recorded answer or none; what does not fit is found before anything executes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.core import codec
from dalsegno.core.identity import callable_name, digest, fingerprint, idempotency_key, key_bytes, task_id
from dalsegno.core.journal import Call, Journal
from dalsegno.core.records import FORMAT_VERSION, Record, TaskActionState, as_record, dump_body, fold, new_body
from dalsegno.core.transitions import CALL_TRANSITIONS, CallStatus, advance
from dalsegno.errors import DefinitionError, DivergenceError, RecordError

HEADER = {"action": "act", "event": "InputEvent", "sender": "", "index": 0, "content": "c"}
ERROR = codec.encode_exception(TimeoutError("provider"))


class Tape:
    """The records of one action task. Each `journal` is a new process that has read them."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def journal(self) -> Journal:
        def append(body: dict[str, Any]) -> None:
            header = {} if self.records else {"task": HEADER}
            self.records.append(Record(b"null", "0", "t", dump_body(body | header)))

        states = fold(self.records)
        return Journal(states[0] if states else None, append, "the task")

    @property
    def state(self) -> TaskActionState:
        return fold(self.records)[0]

    def kinds(self) -> list[str]:
        return [orjson.loads(record.body)["kind"] for record in self.records]


@pytest.fixture
def tape() -> Tape:
    return Tape()


def begin(journal: Journal, what: str, *, alone: bool = True, concurrent: bool = False, strand: object = None) -> Call:
    return journal.begin("call", fingerprint([what]), [what], {}, alone=alone, concurrent=concurrent, strand=strand)


def beside(journal: Journal, what: str, *, first: bool = False) -> Call:
    """A call of a task group."""
    return begin(journal, what, alone=first, concurrent=True, strand=what)


def read(journal: Journal, what: str, result: Any) -> None:
    call = begin(journal, what)
    if call.state.status is not CallStatus.COMPLETED:
        journal.start_unrecorded(call)
        journal.complete(call, result)


def once(journal: Journal, what: str, result: Any) -> None:
    call = begin(journal, what)
    journal.request(call, "once")
    journal.complete(call, result)


def test_a_recorded_call_is_played_back(tape: Tape) -> None:
    journal = tape.journal()
    read(journal, "a", 1)
    once(journal, "b", None)
    again = tape.journal()
    a, b = begin(again, "a"), begin(again, "b")
    assert (a.state.status, a.state.result) == (CallStatus.COMPLETED, 1)
    assert (b.state.status, b.state.result) == (CallStatus.COMPLETED, None)
    again.check_complete()
    assert tape.kinds() == ["called", "requested", "completed"]


def test_a_call_that_was_only_requested_is_known_with_its_arguments(tape: Tape) -> None:
    journal = tape.journal()
    journal.request(begin(journal, "a"), "once")
    state = begin(tape.journal(), "a").state
    assert (state.status, state.args, state.effect, state.attempt) == (CallStatus.REQUESTED, ["a"], "once", 1)


@pytest.mark.parametrize(
    ("recorded", "made"),
    [("ab", "b"), ("ab", "axb"), ("ab", "ba"), ("ab", "aB"), ("aab", "ab"), ("abc", "abx"), ("abc", "acb")],
)
def test_sequential_code_that_changed_is_found_before_anything_executes(tape: Tape, recorded: str, made: str) -> None:
    journal = tape.journal()
    for what in recorded:
        read(journal, what, what)
    before = list(tape.records)
    again = tape.journal()
    replayed: list[Call] = []
    with pytest.raises(DivergenceError, match=r"Expected the recorded call call\('.'\); found the call call\('.'\)"):
        replayed.extend(begin(again, what) for what in made)
    assert all(call.state.status is CallStatus.COMPLETED for call in replayed)
    assert tape.records == before


def test_a_recorded_call_that_is_not_made_again_is_found_at_the_end(tape: Tape) -> None:
    journal = tape.journal()
    for what in "ab":
        read(journal, what, what)
    again = tape.journal()
    begin(again, "a")
    with pytest.raises(DivergenceError, match=r"The record has the call call\('b'\), but the action ended without"):
        again.check_complete()


def test_a_call_after_the_last_recorded_one_is_new(tape: Tape) -> None:
    read(tape.journal(), "a", 1)
    again = tape.journal()
    begin(again, "a")
    call = begin(again, "b")
    assert call.state.status is CallStatus.NEW
    assert call.state.number == 1


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_calls_that_were_in_flight_together_match_in_any_order(tape: Tape, order: str) -> None:
    journal = tape.journal()
    calls = {what: beside(journal, what, first=what == "a") for what in "abc"}
    for call in calls.values():
        journal.start_unrecorded(call)
    for what in "cab":
        journal.complete(calls[what], what.upper())
    read(journal, "d", "D")
    again = tape.journal()
    for position, what in enumerate(order):
        assert beside(again, what, first=position == 0).state.result == what.upper()
    assert begin(again, "d").state.result == "D"
    again.check_complete()


def test_what_was_in_flight_beside_a_recorded_call_is_known_to_have_begun(tape: Tape) -> None:
    journal = tape.journal()
    a, b, c = beside(journal, "a", first=True), beside(journal, "b"), beside(journal, "c")
    for call in (a, b, c):
        journal.start_unrecorded(call)
    journal.complete(b, "B")
    assert {n: state.status for n, state in tape.state.calls.items()} == {
        0: CallStatus.OPEN,
        1: CallStatus.COMPLETED,
        2: CallStatus.OPEN,
    }
    again = tape.journal()
    reopened = beside(again, "a", first=True)
    assert reopened.state.args == ["a"]
    again.start_unrecorded(reopened)
    again.complete(reopened, "A")
    assert beside(again, "b").state.result == "B"
    assert tape.state.calls[0].result == "A"


def test_equal_calls_keep_their_own_results(tape: Tape) -> None:
    journal = tape.journal()
    calls = [begin(journal, "x", alone=n == 0, concurrent=True, strand=n) for n in range(3)]
    for call in calls:
        journal.start_unrecorded(call)
    for n in (2, 0):
        journal.complete(calls[n], n)
    again = tape.journal()
    replayed = [begin(again, "x", alone=n == 0, concurrent=True, strand=n) for n in range(3)]
    assert [call.state.result for call in replayed] == [0, None, 2]
    assert [call.state.status is CallStatus.COMPLETED for call in replayed] == [True, False, True]
    assert [call.occurrence for call in replayed] == [0, 1, 2]


def test_a_group_that_a_crash_cut_short_goes_on(tape: Tape) -> None:
    journal = tape.journal()
    a = beside(journal, "a", first=True)
    journal.request(a, "once")
    journal.complete(a, 1)
    again = tape.journal()
    b = beside(again, "b", first=True)
    assert b.state.status is CallStatus.NEW
    assert beside(again, "a").state.result == 1


def test_an_earlier_group_takes_no_new_calls(tape: Tape) -> None:
    journal = tape.journal()
    for what in "ab":
        call = beside(journal, what, first=what == "a")
        journal.start_unrecorded(call)
        journal.complete(call, what)
    read(journal, "c", "c")
    with pytest.raises(DivergenceError):
        beside(tape.journal(), "x", first=True)


# --- failures -------------------------------------------------------------------------------------------------------


def failing(journal: Journal, what: str, effect: str = "once", strand: object = None) -> tuple[Call, Exception]:
    call = begin(journal, what, concurrent=strand is not None, strand=strand)
    if effect == "read":
        journal.start_unrecorded(call)
    else:
        journal.request(call, effect)
    journal.fail(call, ERROR)
    error = codec.decode_exception(ERROR)
    journal.raised(call, error)
    return call, error


@pytest.mark.parametrize("effect", ["read", "once"])
def test_a_failure_that_the_action_caught_is_recorded_with_its_next_call(tape: Tape, effect: str) -> None:
    journal = tape.journal()
    failing(journal, "a", effect)
    begin(journal, "b")
    state = begin(tape.journal(), "a").state
    assert (state.status, state.error, state.unsure) == (CallStatus.COMPLETED, ERROR, False)


def test_a_failure_that_the_action_caught_is_recorded_when_it_is_done(tape: Tape) -> None:
    journal = tape.journal()
    failing(journal, "a")
    journal.done(new_body("done") | {"last": True})
    assert tape.state.done
    assert tape.state.calls[0].error == ERROR


@pytest.mark.parametrize(("effect", "kinds"), [("read", []), ("once", ["requested", "failed"])])
def test_a_failure_that_leaves_the_action_is_not_final(tape: Tape, effect: str, kinds: list[str]) -> None:
    journal = tape.journal()
    _, error = failing(journal, "a", effect)
    journal.leave_failed(error)
    assert tape.kinds() == kinds
    assert begin(tape.journal(), "a").state.status is not CallStatus.COMPLETED


def test_the_end_of_a_call_beside_it_does_not_make_a_failure_final(tape: Tape) -> None:
    journal = tape.journal()
    b = beside(journal, "b", first=True)
    journal.request(b, "once")
    failing(journal, "a", strand="a")
    journal.complete(b, 1)
    assert tape.state.calls[1].status is CallStatus.REQUESTED


def test_a_failure_beside_which_another_strand_goes_on_is_taken_back_when_it_leaves_the_action(tape: Tape) -> None:
    journal = tape.journal()
    _, error = failing(journal, "a", strand="a")
    beside(journal, "b")
    assert tape.state.calls[0].unsure
    group = ExceptionGroup("of a task group", [error])
    journal.leave_failed(group)
    assert tape.state.calls[0].status is CallStatus.FAILED
    again = tape.journal()
    call = begin(again, "a")
    again.request(call, "once")
    assert call.state.attempt == 2
    again.complete(call, "at last")
    assert tape.state.calls[0].result == "at last"
    assert tape.state.calls[0].error is None


def test_a_caught_failure_stays_when_something_else_fails_later(tape: Tape) -> None:
    journal = tape.journal()
    failing(journal, "a", strand="a")
    beside(journal, "b")
    journal.leave_failed(ValueError("of the action's own"))
    assert tape.state.calls[0].status is CallStatus.COMPLETED


def test_an_exception_with_an_odd_equality_is_told_apart(tape: Tape) -> None:
    class Odd(Exception):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    journal = tape.journal()
    failing(journal, "a", strand="a")
    beside(journal, "b")
    journal.leave_failed(Odd())
    assert tape.state.calls[0].status is CallStatus.COMPLETED


def test_attempts_are_counted_across_restarts(tape: Tape) -> None:
    for attempt in (1, 2, 3):
        journal = tape.journal()
        call, error = failing(journal, "a")
        assert call.state.attempt == attempt
        journal.leave_failed(error)
    assert tape.state.calls[0].attempt == 3


# --- records --------------------------------------------------------------------------------------------------------


def record(body: bytes | dict[str, Any], task: str = "t") -> Record:
    return Record(b'"k"', "m-7", task, body if isinstance(body, bytes) else orjson.dumps(body))


def test_a_record_made_of_its_fields_is_a_record() -> None:
    made = as_record((b"k", "m", "t", b"{}"))
    assert type(made) is Record
    assert made == Record(key=b"k", message="m", task="t", body=b"{}")
    assert made.body == b"{}"


FIRST = {"v": 1, "kind": "requested", "task": HEADER, "call": 0, "name": "n", "args_digest": "d", "effect": "once"}
FIRST |= {"args": []}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\xff",
        b"null",
        b"[]",
        b"{}",
        b'"pickle"',
        b'{"v":1',
        {"kind": "done"},
        {"v": "1", "kind": "done"},
        {"v": None, "kind": "done"},
        {**FIRST, "kind": "unheard-of"},
        {**FIRST, "task": None},
        {**FIRST, "task": {"action": "a"}},
        {key: value for key, value in FIRST.items() if key != "task"},
        {key: value for key, value in FIRST.items() if key != "call"},
        {key: value for key, value in FIRST.items() if key != "name"},
        {key: value for key, value in FIRST.items() if key != "effect"},
        {key: value for key, value in FIRST.items() if key != "kind"},
        {**FIRST, "open": [[1, "n"]]},
        {**FIRST, "open": 7},
        {**FIRST, "kind": "completed", "result": 1},
        {**FIRST, "kind": "called"},
        {"v": 1, "task": HEADER, "kind": "parked"},
    ],
)
def test_a_damaged_or_foreign_record_is_an_error_that_names_it(body: Any) -> None:
    with pytest.raises(RecordError, match=r"record of key \"k\", message 'm-7', action task 't'"):
        fold([record(body)])


def test_a_record_of_a_newer_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(RecordError, match=f"format version {FORMAT_VERSION + 1}.*install the version that wrote it"):
        fold([record({**FIRST, "v": FORMAT_VERSION + 1})])


def test_a_record_after_the_end_of_its_action_task_is_damage() -> None:
    done = record({"v": 1, "kind": "done", "task": HEADER})
    with pytest.raises(RecordError, match="follows the end of its action task"):
        fold([done, done])


def test_records_of_two_action_tasks_are_kept_apart() -> None:
    states = fold([record(FIRST, "t1"), record(FIRST, "t2")])
    assert [state.task for state in states] == ["t1", "t2"]


@pytest.mark.parametrize("status", CallStatus)
@pytest.mark.parametrize("kind", ["open", "requested", "called", "failed", "completed", "unheard-of"])
def test_a_transition_is_in_the_table_or_an_error(status: CallStatus, kind: str) -> None:
    if (status, kind) in CALL_TRANSITIONS:
        assert advance(status, kind, "here") is CALL_TRANSITIONS[status, kind]
    else:
        with pytest.raises(RecordError, match="here: a"):
            advance(status, kind, "here")


def test_nothing_follows_a_result_and_a_failure_only_reopens_a_failure() -> None:
    result = record({**FIRST, "kind": "called", "result": 1})
    failed = record({"v": 1, "kind": "failed", "call": 0, "error": ERROR})
    with pytest.raises(RecordError):
        fold([result, failed])


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_that_could_run_into_each_other_are_different() -> None:
    assert digest("a", "bc") != digest("ab", "c")
    assert task_id("1", "1", 1, "a") != task_id("1", "11", 1, "a")
    assert task_id("0", "", 1, "1a") != task_id("0", "", 11, "a")
    assert idempotency_key("j", b"k", "m", "t", "n", "a", 1) != idempotency_key("j", b"k", "m", "t", "n", "a", 2)
    assert idempotency_key("j1", b"k", "m", "t", "n", "a", 1) != idempotency_key("j2", b"k", "m", "t", "n", "a", 1)


def test_keys_with_the_same_text_are_different() -> None:
    keys: list[Any] = [1, "1", True, 1.0, None, "None", "null", ("a",), "('a',)", ["a"], b"a", "a", "", (), [], {}]
    assert len({key_bytes(key) for key in keys}) == len(keys)


def test_an_idempotency_key_is_legal_in_an_http_header() -> None:
    key = idempotency_key("jöb\n", key_bytes("k\0\ud800"), "m", "t", "n", "a", 0)
    assert key.isascii()
    assert key.isalnum()


class Callee:
    async def method(self) -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @staticmethod
    def static() -> None: ...

    def __call__(self) -> None: ...


class Heir(Callee):
    pass


def test_functions_and_methods_have_stable_names() -> None:
    module = __name__
    assert callable_name(test_keys_with_the_same_text_are_different).endswith(
        ":test_keys_with_the_same_text_are_different"
    )
    assert callable_name(Callee().method) == f"{module}:Callee.method"
    assert callable_name(Heir().method) == f"{module}:Heir.method"
    assert callable_name(Callee.static) == f"{module}:Callee.static"
    assert callable_name(len) == "builtins:len"


def test_what_has_no_stable_name_says_how_to_give_one() -> None:
    import functools

    captured = 1

    def closure() -> int:
        return captured

    for nameless in (lambda: 1, functools.partial(len, []), closure, Callee(), Callee):
        with pytest.raises(DefinitionError, match=r'give the call one.*name="send-invoice"'):
            callable_name(nameless)


# --- any sequential program, any crash ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["read", "once", "fails"])), max_size=6),
    st.integers(0, 20),
)
def test_any_sequential_program_replays_after_any_crash(program: list[tuple[str, str]], kept: int) -> None:
    tape = Tape()

    def play() -> tuple[list[Any], int]:
        journal = tape.journal()
        outcomes: list[Any] = []
        executed = 0
        for number, (what, kind) in enumerate(program):
            call = begin(journal, what)
            if call.state.status is CallStatus.COMPLETED:
                outcomes.append(call.state.result if call.state.error is None else call.state.error)
            else:
                executed += 1
                outcomes.append(ERROR if kind == "fails" else number)
                if kind == "read":
                    journal.start_unrecorded(call)
                else:
                    journal.request(call, "once")
                if kind == "fails":
                    journal.fail(call, ERROR)
                else:
                    journal.complete(call, number)
        journal.check_complete()
        journal.done(new_body("done") | {"last": True})
        return outcomes, executed

    first, _ = play()
    everything = list(tape.records)
    tape.records = everything[: min(kept, len(everything) - 1)]
    final = sum(orjson.loads(r.body)["kind"] in ("called", "completed") for r in tape.records)
    again, executed = play()
    assert again == first
    assert executed == len(program) - final
