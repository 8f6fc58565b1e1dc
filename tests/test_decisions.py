"""Decisions are written and read exactly; what is damaged, foreign or too new is refused, never taken for an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.core import codec, decisions
from dalsegno.core.decisions import Resolved, Retried, Signalled, Target
from dalsegno.core.records import Record, encode_body, fold
from dalsegno.errors import RecordError

TASKS = st.sampled_from(["", "a", "a/b", "/", "a/1", "1/2/3", "0f" * 16]) | st.text(max_size=5)
NUMBERS = st.integers(0, 2**70)
TREES = st.sampled_from([None, False, 0, "", [], {}, 1.5, "é\0", {"v": 9}, [1, [2]], 2**62])


@given(
    st.builds(Resolved, TASKS, NUMBERS, NUMBERS, st.just(True), TREES)
    | st.builds(Resolved, TASKS, NUMBERS, NUMBERS, st.just(False), st.none())
    | st.builds(Signalled, TASKS, NUMBERS, TREES)
    | st.builds(Retried, TASKS, NUMBERS)
)
def test_an_answer_comes_back_as_it_was_written(answer: decisions.Answer) -> None:
    loaded = decisions.load(answer.target, answer.body)
    assert (type(loaded), loaded) == (type(answer), answer)


def test_any_recordable_value_can_be_an_answer() -> None:
    value = {"a": (1, b"\0", float("inf"), 2**70, "\ud800"), 3: {1, 2}, "v": None}
    answer = Signalled("task", 0, codec.to_tree(value))
    loaded = decisions.load(answer.target, answer.body)
    assert isinstance(loaded, Signalled)
    assert codec.from_tree(loaded.value) == value


def test_targets_are_stable() -> None:
    assert decisions.resolve_target("ab", 3, 1) == "resolve/ab/3/1" == Resolved("ab", 3, 1, True, 5).target
    assert decisions.signal_target("ab", 3) == "signal/ab/3"
    assert decisions.retry_target("ab", 2) == "retry/ab/2"
    assert decisions.parse_target("resolve/ab/3/1") == Target("resolve", "ab", (3, 1))
    assert decisions.parse_target("retry/a/b/2") == Target("retry", "a/b", (2,))
    assert json.loads(Resolved("ab", 3, 1, True, 5).body) == {"v": 1, "happened": 5}
    assert json.loads(Resolved("ab", 3, 1, False).body) == {"v": 1, "did_not_happen": True}
    assert json.loads(Signalled("ab", 3, [1]).body) == {"v": 1, "value": [1]}
    assert json.loads(Retried("ab", 3).body) == {"v": 1}


@pytest.mark.parametrize(
    "target",
    ["", "resolve", "resolve/a", "resolve/a/1", "resolve/a/1/x", "signal/a", "signal/a/-1", "signal/a/٣", "drop/a/1"],
)
def test_an_unknown_target_is_refused(target: str) -> None:
    with pytest.raises(RecordError, match="about nothing that this version of dalsegno knows"):
        decisions.parse_target(target)


@pytest.mark.parametrize(
    "target", ["retry/a/", "retry/a/01", "Retry/a/1", "signal/a/1 ", "signal/a/+1", "signal/a/1_0"]
)
def test_a_target_is_written_in_one_way_only(target: str) -> None:
    with pytest.raises(RecordError, match="install the version that wrote it"):
        decisions.load(target, b'{"v":1}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is damaged, it is not JSON"),
        (b"\xff", "is damaged, it is not JSON"),
        (b"null", "is not one of this library"),
        (b"[1]", "is not one of this library"),
        (b"{}", "is not one of this library"),
        (b'{"v":true,"value":1}', "is not one of this library"),
        (b'{"v":0,"value":1}', "is not one of this library"),
        (b'{"v":2,"value":1}', "has format version 2; this version of dalsegno reads up to 1"),
        (b'{"v":1}', "is not what this version writes"),
        (b'{"v":1,"happened":1}', "is not what this version writes"),
    ],
)
def test_a_damaged_or_newer_body_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=f"the decision 'signal/a/1' {message}"):
        decisions.load("signal/a/1", body)


def test_a_resolution_says_one_thing() -> None:
    for body in (b'{"v":1,"value":1}', b'{"v":1,"did_not_happen":false}', b'{"v":1,"did_not_happen":1}'):
        with pytest.raises(RecordError, match="is not what this version writes"):
            decisions.load("resolve/a/1/1", body)


def test_how_often_a_message_was_parked_for_failing_is_counted() -> None:
    header = {"action": "act", "event": "input", "sender": "", "index": 0}
    whys = [None, "failed", "waiting", "attempts", "in_doubt", "failed"]
    bodies = [{"reason": "so"} | ({"why": why} if why else {}) for why in whys]
    bodies[0]["task"] = header  # type: ignore[assignment]
    records = [Record(b"1", "m", "t", encode_body("parked", body)) for body in bodies]
    assert [fold(records[:n])[0].failures for n in range(1, 7)] == [0, 1, 1, 2, 2, 3]
