"""What is recorded as plain data: how messages stand, what can be decided, and that nothing is shown past the lens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from dalsegno.core import codec
from dalsegno.core.decisions import WAIT, Resolved, Retried, Signalled
from dalsegno.core.identity import key_bytes
from dalsegno.core.records import Record, encode_body
from dalsegno.errors import InspectError, RecordError
from dalsegno.inspect.redact import MARK, Redactor
from dalsegno.operate.lookup import find_key, printable
from dalsegno.operate.views import Lens, MessageSummary, call_id, message_json, summarize, summary_json
from dalsegno.stores.base import Decision
from dalsegno.testing.stores import ODD_KEYS, ODD_TEXTS

HEADER = {"action": "act", "event": "InputEvent", "sender": "", "index": 0, "content": "c"}
KEY = b'"k"'


def records(*steps: tuple[str, dict[str, Any]], key: bytes = KEY, task: str = "t") -> list[Record]:
    """The records of one action task."""
    return [
        Record(key, "m", task, encode_body(kind, fields if at else {"task": HEADER} | fields))
        for at, (kind, fields) in enumerate(steps)
    ]


def requested(number: int = 0, name: str = "pay", *args: object, **fields: Any) -> tuple[str, dict[str, Any]]:
    call = {"call": number, "name": name, "args_digest": f"{number}", "effect": "once", "args": list(args)}
    return "requested", call | fields


def called(number: int = 0, name: str = "ask", **fields: Any) -> tuple[str, dict[str, Any]]:
    call = {"call": number, "name": name, "args_digest": f"{number}", "effect": "read", "args": []}
    return "called", call | {"result": None} | fields


def completed(number: int = 0, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "completed", {"call": number, "result": None} | fields


def parked(why: str, call: int | None = None) -> tuple[str, dict[str, Any]]:
    return "parked", {"reason": f"because {why}", "why": why} | ({} if call is None else {"call": call})


def look(recorded: Sequence[Record], *decided: Decision) -> MessageSummary:
    return summarize(KEY, "m", recorded, decided)


DONE: tuple[str, dict[str, Any]] = ("done", {"last": True})
WAITS = requested(0, WAIT, "approved", kwargs={"until": "2026-12-01T00:00:00+00:00"})


@pytest.mark.parametrize(
    ("steps", "state", "kinds"),
    [
        ([requested()], "in-flight", []),
        ([called()], "in-flight", []),
        ([called(), ("done", {})], "in-flight", []),
        ([called(), DONE], "done", []),
        ([requested(), parked("in_doubt", 0)], "in-doubt", ["resolve"]),
        ([requested(), parked("in_doubt", 0), completed()], "in-flight", []),
        ([requested(), parked("in_doubt", 0), requested(attempt=2)], "in-flight", []),
        ([requested(), parked("in_doubt", 0), called(1)], "in-flight", []),
        ([requested(), requested(1), called(2), parked("in_doubt", 1)], "in-doubt", ["resolve", "resolve"]),
        ([requested(), ("failed", {"call": 0, "error": 1}), parked("in_doubt", 0)], "in-doubt", ["resolve"]),
        ([WAITS], "waiting", ["signal"]),
        ([WAITS, parked("waiting", 0)], "waiting", ["signal"]),
        ([WAITS, parked("waiting", 0), completed()], "in-flight", []),
        ([WAITS, parked("waiting", 0), completed(), DONE], "done", []),
        ([called(), parked("failed")], "failed", ["retry"]),
        ([parked("failed")], "failed", ["retry"]),
        ([parked("failed"), called()], "in-flight", []),
        ([parked("failed"), called(), parked("failed")], "failed", ["retry"]),
        ([parked("attempts")], "attempts", ["retry"]),
        ([parked("in_doubt", 0), DONE], "done", []),
        ([parked("something else")], "parked", []),
    ],
)
def test_how_a_message_stands_and_what_can_be_decided(steps: list[Any], state: str, kinds: list[str]) -> None:
    summary = look(records(*steps))
    assert (summary.state, [question.kind for question in summary.questions]) == (state, kinds)
    assert (summary.reason is None) is (state in ("in-flight", "done") or steps == [WAITS])


def test_a_question_names_its_target_and_knows_its_answer() -> None:
    recorded = records(requested(0), requested(1, attempt=3), parked("in_doubt", 1))
    made = Decision(KEY, "m", "resolve/t/1/3", Resolved("t", 1, 3, True, 42).body)
    stale = Decision(KEY, "m", "resolve/t/0/9", Resolved("t", 0, 9, False).body)
    first, second = look(recorded, made, stale).questions
    assert (first.target, first.decision, first.name) == ("resolve/t/0/1", None, "pay")
    assert (second.target, second.decision) == ("resolve/t/1/3", made)
    assert (second.call, second.key, second.message) == (call_id(KEY, "m", "t", 1), KEY, "m")

    (waiting,) = look(records(WAITS, parked("waiting", 0))).questions
    assert (waiting.target, waiting.name) == ("signal/t/0", "approved")

    for times in (1, 2, 3):
        (failed,) = look(records(*[parked("failed")] * times)).questions
        assert (failed.target, failed.name, failed.call) == (f"retry/t/{times}", "act", None)


def test_an_answer_to_an_earlier_failure_is_none_to_the_next() -> None:
    made = Decision(KEY, "m", "retry/t/1", Retried("t", 1).body)
    assert look(records(parked("failed")), made).questions[0].decision == made
    assert look(records(parked("failed"), parked("failed")), made).questions[0].decision is None


def test_a_damaged_message_is_one_that_says_so() -> None:
    for body in (b"", b"{", b'{"v":99,"kind":"called"}', b'{"v":1,"kind":"done"}'):
        summary = look([Record(KEY, "m", "t", body)])
        assert (summary.state, summary.questions) == ("damaged", ())
        assert "message 'm'" in (summary.reason or "")
        with pytest.raises(RecordError):
            message_json(KEY, "m", [Record(KEY, "m", "t", body)], [])


def test_ids_of_calls_are_stable_short_and_apart() -> None:
    places = [(key, text, task, n) for key in ODD_KEYS for text in ODD_TEXTS for task in ("", "t") for n in (0, 1)]
    ids = [call_id(*place) for place in places]
    assert len(set(ids)) == len(places)
    assert all(len(each) == 32 and set(each) <= set("0123456789abcdef") for each in ids)
    assert call_id(b'"A"', "0", "a" * 32, 1) == "507302e3b99352c6f73f9c32371ea5cc"


def test_any_key_and_id_can_be_written_as_json() -> None:
    for key in ODD_KEYS:
        for text in ODD_TEXTS:
            recorded = [each._replace(message=text) for each in records(requested(), key=key)]
            written = json.dumps(
                message_json(key, text, recorded, []) | summary_json(summarize(key, text, recorded, []))
            )
            # JSON cannot tell a pair of surrogates from the character that it stands for.
            assert json.loads(written)["message"].encode("utf-16", "surrogatepass") == text.encode(
                "utf-16", "surrogatepass"
            )


SECRET = "s3cr3t"
FULL = [
    called(0, args=[SECRET], kwargs={"x": SECRET}, result={"y": [SECRET]}),
    called(1, error=codec.encode_exception(ValueError(SECRET))),
    ("called", called(2)[1] | {"result": SECRET}),
    (
        "done",
        {
            "memory": [
                {"op": "set", "path": ["user", "name"], "value": SECRET},
                {"op": "set", "path": ["$"], "value": {"z": SECRET}},
                {"op": "delete", "path": ["a"]},
                {"op": "create", "path": ["b"]},
            ],
            "sensory": [{"op": "set", "path": ["c"], "value": SECRET}],
            "events": [{"$": "model", "t": "m:E", "f": {"w": SECRET}}],
        },
    ),
]
ANSWERS = [
    Decision(KEY, "m", "resolve/t/0/1", Resolved("t", 0, 1, True, SECRET).body),
    Decision(KEY, "m", "resolve/t/1/1", Resolved("t", 1, 1, False).body),
    Decision(KEY, "m", "signal/t/2", Signalled("t", 2, SECRET).body),
    Decision(KEY, "m", "retry/t/1", Retried("t", 1).body),
    Decision(KEY, "m", "retry/t/2", b"{"),
]


def test_a_message_in_full() -> None:
    shown = message_json(KEY, "m", records(*FULL), ANSWERS)
    (task,) = shown["tasks"]
    assert (shown["key"], shown["message"], shown["state"], shown["calls"]) == ("k", "m", "in-flight", 3)
    assert (task["action"], task["event"], task["done"]) == ("act", "InputEvent", True)
    assert [("result" in call, "error" in call) for call in task["calls"]] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert [call["call"] for call in task["calls"]] == [call_id(KEY, "m", "t", number) for number in range(3)]
    about = {"call": call_id(KEY, "m", "t", 0), "number": 0, "name": "ask", "effect": "read", "status": "completed"}
    payloads = {"args": [SECRET], "kwargs": {"x": SECRET}, "result": {"y": [SECRET]}}
    assert task["calls"][0] == about | {"attempt": 1} | payloads
    assert task["memory"] == FULL[-1][1]["memory"]
    assert [made["answer"] for made in shown["decisions"][:4]] == [
        *({"happened": SECRET}, {"did_not_happen": True}, {"value": SECRET}, {"retry": True})
    ]
    assert "is damaged" in shown["decisions"][4]["answer"]["damaged"]


def test_nothing_is_shown_that_the_lens_takes_away() -> None:
    def redact(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: redact(value) for name, value in tree.items()}
        if isinstance(tree, list):
            return [redact(value) for value in tree]
        return "***" if isinstance(tree, str) and SECRET in tree else tree

    lens = Lens(redact=redact)
    shown = message_json(KEY, "m", records(*FULL), ANSWERS, lens)
    assert SECRET not in json.dumps(shown)
    assert shown["tasks"][0]["memory"][0] == {"op": "set", "path": ["user", "name"], "value": "***"}
    question = records(requested(), parked("in_doubt", 0))
    assert SECRET not in json.dumps(summary_json(summarize(KEY, "m", question, ANSWERS[:1], lens), lens))


def test_the_value_of_a_memory_update_is_redacted_by_the_names_of_its_path() -> None:
    for path, value, expected in (
        (["password"], 1, MARK),
        (["user", "password"], 1, MARK),
        (["password", "old"], 1, MARK),
        (["user"], {"password": 1, "name": 2}, {"password": MARK, "name": 2}),
        (["user", "name"], 1, 1),
    ):
        update = {"op": "set", "path": path, "value": value}
        shown = message_json(
            KEY, "m", records(called(), ("done", {"memory": [update]})), [], Lens(redact=Redactor().redact)
        )
        assert shown["tasks"][0]["memory"] == [update | {"value": expected}]


def test_bodies_are_read_through_the_lens() -> None:
    hidden = [each._replace(body=each.body[::-1]) for each in records(*FULL)]
    lens = Lens(decode=lambda record: record.body[::-1])
    assert message_json(KEY, "m", hidden, [], lens) == message_json(KEY, "m", records(*FULL), [])
    assert summarize(KEY, "m", hidden, [], lens) == look(records(*FULL))
    assert look(hidden).state == "damaged"


# --- keys that people type ---


@pytest.mark.parametrize(
    ("text", "keys", "found"),
    [
        ("a", ["a", "b"], "a"),
        ('"a"', ["a", "b"], "a"),
        ('"a"', ['"a"'], '"a"'),
        ("1", [1, 2], 1),
        ("1", ["1", 2], "1"),
        ("true", [True, 1], True),
        ("null", [None], None),
        ("1.0", [1.0, 1], 1.0),
        ("[1]", [[1]], [1]),
        ('{"$":"tuple","v":["a",1]}', [("a", 1)], ("a", 1)),
        ("", ["", "a"], ""),
        ("NaN", ["NaN"], "NaN"),
        ("a\0", ["a\0"], "a\0"),
        ("\udcff", ["\udcff"], "\udcff"),
    ],
)
def test_a_key_is_found_as_json_or_as_text(text: str, keys: list[Any], found: Any) -> None:
    assert find_key(text, map(key_bytes, keys)) == key_bytes(found)


def test_a_key_that_could_be_two_is_refused() -> None:
    keys = [key_bytes(key) for key in (1, "1", '"1"')]
    with pytest.raises(InspectError, match=r"'1' names 2 keys, \"1\" and 1: say with --key-json"):
        find_key("1", keys)
    with pytest.raises(InspectError, match=r"names 2 keys"):
        find_key('"1"', keys)
    assert find_key("1", keys, as_json=True) == b"1"
    assert find_key('"1"', keys, as_json=True) == b'"1"'
    with pytest.raises(InspectError, match="is not JSON; text has quotes there"):
        find_key("a", keys, as_json=True)


def test_a_key_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InspectError, match=r"nothing is recorded of a key 'c'; the keys are \"a\", \"b\"$"):
        find_key("c", [key_bytes("a"), key_bytes("b"), key_bytes("a")])
    with pytest.raises(InspectError, match=r"; there are none$"):
        find_key("c", [])
    with pytest.raises(InspectError, match=r"and 990 more$"):
        find_key("c", [b"%d" % number for number in range(1000)])


def test_what_could_upset_a_terminal_is_escaped() -> None:
    assert printable("é 😀 \\") == "é 😀 \\"
    assert printable("a\x1b[31m\n\x07\u202e\x9b\ud800") == "a\\x1b[31m\\n\\x07\\u202e\\x9b\\ud800"
    assert orjson.dumps(printable("".join(ODD_TEXTS)))
