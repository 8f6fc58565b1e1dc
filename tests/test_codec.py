"""The codec on plain values: exact both ways, the same bytes in every process, safe against foreign trees."""

from __future__ import annotations

import collections
import datetime as dt
import hashlib
import io
import json
import math
import os
import struct
import subprocess
import sys
import threading
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import TzInfo

from dalsegno.core import codec_canonical
from dalsegno.core.codec import MAX_DEPTH, canonical, decode, dumps, encode, from_tree, loads, to_tree
from dalsegno.core.codec_dispatch import DECODERS, ENCODERS
from dalsegno.core.identity import fingerprint, key_bytes, task_id
from dalsegno.errors import CodecError

# --- equality that sees types, signs of zero, NaN, zones and the order of dicts --------------------------------------


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, Decimal):
        return str(a) == str(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and sorted(map(show, a)) == sorted(map(show, b))
    if isinstance(a, (dt.datetime, dt.time)):
        plain = a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold
        return plain and type(a.tzinfo) is type(b.tzinfo) and repr(a.tzinfo) == repr(b.tzinfo)
    return bool(a == b) and (type(a) is int or repr(a) == repr(b))


def show(value: Any) -> str:
    """A text that is the same for equal values of equal types, whatever the order of the sets in them."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(show, value)))})"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(show, value))})"
    return f"{type(value).__name__} {value!r}"


# Deferred, since Hypothesis writes out the strategies inside one another in its reports.
text = st.text(st.characters(), max_size=8)  # includes NUL, lone surrogates and astral characters
almost_a_day = dt.timedelta(hours=23, minutes=59)
zones = st.one_of(
    st.none(),
    st.just(dt.UTC),
    st.builds(dt.timezone, st.timedeltas(-almost_a_day, almost_a_day)),
    st.builds(dt.timezone, st.just(dt.timedelta(hours=2)), text),
    st.sampled_from([ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("UTC")]),
    st.builds(TzInfo, st.integers(-86399, 86399)),
)
moments = st.datetimes(dt.datetime(1, 1, 3), dt.datetime(9999, 12, 29))
all_atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**700, -(10**1000)]),
    st.floats(),
    text,
    st.sampled_from(["$", "\x00", "\ud800", "\ud83d\ude00", "\U0001f600", "\udc80$", "é", "\u2028"]),
    st.binary(max_size=12),
    st.decimals(),
    st.uuids(),
    st.dates(),
    st.timedeltas(),
    st.builds(lambda t, zone, fold: t.replace(tzinfo=zone, fold=fold), moments, zones, st.integers(0, 1)),
    st.builds(lambda t, zone, fold: t.replace(tzinfo=zone, fold=fold), st.times(), zones, st.integers(0, 1)),
)
atoms: st.SearchStrategy[Any] = st.deferred(lambda: all_atoms)
members: st.SearchStrategy[Any] = st.deferred(lambda: all_atoms.filter(equals_itself))
hashable: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(members, members, st.tuples(hashable, members), st.frozensets(hashable, max_size=3))
)
anything: st.SearchStrategy[Any] = st.deferred(
    lambda: st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(hashable, inner, max_size=4),
            st.dictionaries(text, inner, max_size=4),
        ),
        max_leaves=12,
    )
)
values: st.SearchStrategy[Any] = st.deferred(lambda: st.one_of(anything, st.sets(hashable, max_size=4), hashable))


def equals_itself(value: Any) -> bool:
    return not (isinstance(value, Decimal) and value.is_nan()) and bool(value == value)


@settings(max_examples=600, deadline=None)
@given(values)
def test_any_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    tree = to_tree(value)
    assert same(from_tree(tree), value)
    assert same(decode(dumps(tree)), value)


@settings(max_examples=300, deadline=None)
@given(values)
def test_a_tree_survives_storage_and_encoding_a_decoded_value_gives_the_same_tree(value: Any) -> None:
    tree = to_tree(value)
    assert same(loads(dumps(tree)), tree)
    assert canonical(to_tree(decode(encode(value)))) == canonical(tree)
    assert json.loads(canonical(tree)) == json.loads(dumps(tree))


@settings(max_examples=300, deadline=None)
@given(values)
def test_a_tree_is_itself_a_value_that_comes_back(value: Any) -> None:
    """What looks like an envelope but is the user's own dict stays the user's own dict."""
    tree = to_tree(value)
    assert same(from_tree(to_tree(tree)), tree)


def assert_plain(tree: Any) -> None:
    if type(tree) is dict:
        assert all(type(key) is str and key.encode().decode() == key for key in tree)
        if "$" in tree:
            assert tree["$"] in DECODERS
        for item in tree.values():
            assert_plain(item)
    elif type(tree) is list:
        for item in tree:
            assert_plain(item)
    else:
        assert type(tree) in (type(None), bool, int, float, str)
        assert type(tree) is not int or -(2**63) <= tree < 2**63
        assert type(tree) is not float or math.isfinite(tree)
        assert type(tree) is not str or tree.encode().decode() == tree


@settings(max_examples=300, deadline=None)
@given(values)
def test_every_part_of_a_tree_is_a_tree(value: Any) -> None:
    assert_plain(to_tree(value))


LISTED: list[Any] = [
    *(None, True, False, 0, -0.0, 0.0, 1, 1.0, "1", "", [], (), {}, set(), frozenset(), b""),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70, -(2**70), 10**400, 2**20000, -(2**20000)),
    *(math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1, 1e16, 1e22, 1e-7),
    *("\x00", "a\x00b", "\ud800", "\udfff", "\ud83d\ude00", "\U0001f600", "\u2028\x7f", "x" * 1_000_000),
    *(b"\x00\xff", bytes(range(256))),
    {1: "int", "1": "str", 1.5: "float", None: "none", (1, (2,)): "tuple", frozenset({1, "1"}): "set", b"k": "bytes"},
    {True: 1, "True": 2},
    {"$": 1},
    {"$": "tuple", "v": [1]},
    {"$": "dict", "v": {}},
    {"\ud800": 1, "b": 2},
    {"z": 1, "a": 2},
    {dt.date(2024, 1, 1): [Decimal("1.10"), Decimal("-0"), Decimal("NaN"), Decimal("sNaN123"), Decimal("1E+5")]},
    {1, 1.5, "a", (1, 2), None, frozenset({1})},
    [[], [[]], ((),), {(): ()}],
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    dt.datetime(1, 1, 1),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
    dt.time(1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=-5, seconds=-1, microseconds=-7))),
    dt.time(0, 0, tzinfo=ZoneInfo("Asia/Tokyo")),
    dt.timezone(dt.timedelta(hours=2), "CEST\x00\ud800"),
    dt.UTC,
    ZoneInfo("Europe/Berlin"),
    TzInfo(0),
    dt.timedelta(-1, 1, 1),
    dt.timedelta.max,
    dt.timedelta.min,
    dt.date.min,
    UUID(int=0),
    UUID(int=2**128 - 1),
]


@pytest.mark.parametrize("value", LISTED, ids=lambda value: type(value).__name__)
def test_listed_values_come_back(value: Any) -> None:
    assert same(decode(encode(value)), value)
    assert same(decode(encode({"in": [value]})), {"in": [value]})


def test_the_order_of_dicts_is_kept_in_storage_and_does_not_count_in_canonical_bytes() -> None:
    a, b = {"x": 1, "y": {2: "b", 1: "a"}}, {"y": {1: "a", 2: "b"}, "x": 1}
    assert list(decode(encode(a))) == ["x", "y"]
    assert list(decode(encode(a))["y"]) == [2, 1]
    assert dumps(to_tree(a)) != dumps(to_tree(b))
    assert canonical(to_tree(a)) == canonical(to_tree(b))


def test_four_keys_that_python_or_text_would_confuse_are_four() -> None:
    keys: list[Any] = [1, "1", True, 1.0, ("a",), "('a',)", b"a", "a", None, "null", -0.0, 0.0, 0, frozenset(), ()]
    assert len({canonical(to_tree(key)) for key in keys}) == len(keys)


def test_canonical_bytes_are_pinned() -> None:
    """These bytes are in records: a change here is a change of the record format."""
    value = {"b": [1, 2.5, 1e16, 1e-05, -0.0, "é\x7f\n"], "a": (None, True), "$": {3: b"x"}, "s": {2, "b", "a"}}
    assert canonical(to_tree(value)).decode() == (
        r'{"$":"dict","v":{"\"$\"":{"$":"dict","v":{"3":{"$":"bytes","v":"eA=="}}},'
        r'"\"a\"":{"$":"tuple","v":[null,true]},"\"b\"":[1,2.5,1e+16,1e-05,-0.0,"é' + "\x7f" + r'\n"],'
        r'"\"s\"":{"$":"set","v":["a","b",2]}}}'
    )


def test_canonical_bytes_of_what_text_and_numbers_can_hold_are_pinned() -> None:
    """By digest, for trees that are written by orjson; made with the standard library."""
    every = "".join(map(chr, [*range(0x600), 0x2028, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F600, 0x10FFFF]))
    tree: dict[str, Any] = {character: number for number, character in enumerate(reversed(every)) if character != "$"}
    tree |= {"text": every, "limits": [-(2**63), 2**63 - 1, 0, -1], "atoms": [None, True, False, {"b": {}, "a": []}]}
    escapes: Any = {"é": '\x00\x1f\x7f\b\t\n\f\r"\\/\u2028', "e": [{"z": 1, "a\n": 2}], "\U00010000": 0, "\uffff": 0}
    assert canonical(escapes).decode() == (
        r'{"e":[{"a\n":2,"z":1}],"é":"\u0000\u001f' + "\x7f" + r'\b\t\n\f\r\"\\/' + "\u2028"
        '","\uffff":0,"\U00010000":0}'
    )  # fmt: skip
    assert hashlib.blake2b(canonical(tree), digest_size=16).hexdigest() == "a1aad94a67eae7daa104a3bc76c07a90"
    assert fingerprint(["product-0001", 3]) == "9f7aa993338c2619aaedce4563acc54b"
    assert fingerprint({"b": 1.0, "a": "é"}) == "44320b430fb02488ecd2953a46c89721"
    assert task_id("17", "", 0, "score") == "5778d15c7b87246457950715965f0f05"


legal_text = st.text(st.characters(exclude_categories=["Cs"]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    legal_text,
    st.sampled_from(["$", "\uffff", "\U00010000", "a\0", "\x7f"]),
)
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(legal_text, inner), max_leaves=20)


@pytest.mark.slow
@settings(max_examples=1000)
@given(trees)
def test_the_quick_writer_of_canonical_bytes_agrees_with_their_definition(tree: Any) -> None:
    assert codec_canonical.quick(tree) == codec_canonical.by_definition(tree)
    assert canonical(json.loads(canonical(tree))) == canonical(tree)


def test_the_quick_writer_is_in_use_and_the_samples_tell_writers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert canonical is codec_canonical.quick
    for other in (
        lambda tree, *_: json.dumps(tree, sort_keys=True, separators=(",", ":")).encode(),
        lambda tree, *_: orjson.dumps(tree),
        lambda tree, *_: orjson.dumps(tree, option=orjson.OPT_SORT_KEYS).replace(b"\\u001f", b"\\u001F"),
        lambda tree, *_: orjson.dumps(tree, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE),
    ):
        monkeypatch.setattr(codec_canonical, "_dumps", other)
        assert not codec_canonical.agree()


@given(st.one_of(text, anything))
def test_the_key_of_a_text_is_the_canonical_form_of_its_tree(key: Any) -> None:
    assert key_bytes(key) == canonical(to_tree(key))


_CANONICAL_SCRIPT = """
import sys, datetime, decimal, uuid
sys.set_int_max_str_digits(640)
from dalsegno.core.codec import canonical, to_tree
words = ["alpha", "beta", "gamma", "delta", "\\ud800", "\\x00", "epsilon"]
value = {
    "set": set(words), "frozen": {frozenset(words), frozenset({1, "1", None, (1, 2)})},
    "mixed": {1, "1", 2.5, b"1", (1,), None, decimal.Decimal(3.25), uuid.UUID(int=7), datetime.date(2024, 1, 1)},
    "keys": {word: hash(word) * 0 for word in set(words)}, "big": {2**20000, 2**70, 1e300},
    "by key": {frozenset(words): 1, ("a", "b"): 2, 3: 4},
}
sys.stdout.write(canonical(to_tree(value)).hex())
"""


@pytest.mark.slow
def test_canonical_bytes_do_not_depend_on_the_hash_seed() -> None:
    outputs = set()
    for seed in ("0", "1", "2", "4242", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", _CANONICAL_SCRIPT], env=env, capture_output=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert outputs.pop()


# --- fresh containers -----------------------------------------------------------------------------------------------


def test_trees_and_values_share_no_container() -> None:
    inner = [1]
    value = {"a": inner, "b": (inner,), 3: {"c": inner}}
    tree = to_tree(value)
    inner.append(2)
    first, second = from_tree(tree), from_tree(tree)
    assert first == second == {"a": [1], "b": ([1],), 3: {"c": [1]}}
    first["a"].append(9)
    assert second["a"] == [1]
    assert from_tree(tree)["a"] == [1]


def test_one_object_in_two_places_becomes_two() -> None:
    shared: list[Any] = []
    found = decode(encode([shared, shared]))
    assert found == [[], []]
    assert found[0] is not found[1]


# --- what cannot be recorded ------------------------------------------------------------------------------------------


class Text(str):
    __slots__ = ()


class Zone(dt.tzinfo):
    def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(0)

    def dst(self, when: dt.datetime | None) -> None:
        return None

    def tzname(self, when: dt.datetime | None) -> str:
        return "here"


class Loud:
    def __repr__(self) -> str:
        raise ValueError("no repr")


class Scalar:
    """Looks like a numpy scalar that is no subclass of a builtin number."""

    dtype = "float32"

    def item(self) -> float:
        return 1.0


class Float(float):
    """Looks like numpy.float64."""


def zone_without_a_key() -> ZoneInfo:
    header = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    return ZoneInfo.from_file(io.BytesIO(header + struct.pack(">lbb", 0, 0, 0) + b"UTC\x00"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Text("a"), ["Text", "str(...)"]),
        (Float(1.0), ["Float", "float(...)"]),
        (Scalar(), ["Scalar", "value.item()"]),
        (collections.OrderedDict(a=1), ["collections.OrderedDict", "dict(...)"]),
        (collections.defaultdict(list), ["defaultdict", "dict(...)"]),
        (collections.Counter("ab"), ["Counter", "dict(...)"]),
        (collections.deque([1]), ["collections.deque", "plain values"]),
        (bytearray(b"a"), ["bytearray", "bytes(...)"]),
        (memoryview(b"a"), ["memoryview", "bytes(...)"]),
        (range(3), ["range"]),
        ((x for x in [1]), ["generator"]),
        (threading.Lock(), ["lock"]),
        (sys.stdout, ["cannot be recorded"]),
        (object, ["builtins.type"]),
        (len, ["builtin_function_or_method"]),
        (object(), ["builtins.object"]),
        (1j, ["complex"]),
        (Loud(), ["Loud"]),
        (dt.datetime(2024, 1, 1, tzinfo=Zone()), [".tzinfo", "Zone", "timezone"]),
        (zone_without_a_key(), ["key", "ZoneInfo('Area/City')"]),
        ({math.nan, float("nan")}, ["two members", "NaN"]),
        ({math.nan: 1, float("nan"): 2}, ["two keys", "NaN"]),
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_cannot_be_recorded_is_refused_with_type_and_remedy(value: Any, words: list[str]) -> None:
    with pytest.raises(CodecError) as caught:
        to_tree(value)
    for word in words:
        assert word in str(caught.value)


def test_the_message_has_the_path() -> None:
    lock = threading.Lock()
    cases: list[tuple[Any, str]] = [
        ({"a": [0, 1, 2, {"b": lock}]}, "result['a'][3]['b']: "),
        ({"a": {1: (lock,)}}, "result['a'][1][0]: "),
        ({(1, Text("k")): 1}, "result[(1, 'k')][1]: "),
        ([{1, 2, (Text("x"),)}], "result[0]{('x',)}[0]: "),
        (lock, "result: "),
    ]
    for value, path in cases:
        with pytest.raises(CodecError) as caught:
            to_tree(value, root="result")
        assert str(caught.value).startswith(f"cannot record {path}")


def nested(levels: int, kind: Any = list) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if kind is dict else {1: value} if kind is int else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, dict, int, tuple, frozenset])
def test_deep_values_come_back_or_are_refused_clearly(kind: Any) -> None:
    levels = MAX_DEPTH if kind in (list, dict) else MAX_DEPTH // 2 - 1
    assert same(decode(encode(nested(levels, kind))), nested(levels, kind))
    canonical(to_tree(nested(levels, kind)))
    for too_many in (MAX_DEPTH + 1, 900):
        with pytest.raises(CodecError, match="nested"):
            to_tree(nested(too_many, kind))


def test_a_stored_value_leaves_room_for_the_record_around_it() -> None:
    tree: Any = to_tree(nested(MAX_DEPTH))
    for _ in range(40):
        tree = {"record": tree}
    assert loads(dumps(tree)) == tree


def test_cycles_are_refused() -> None:
    a_list: list[Any] = []
    a_list.append(a_list)
    a_dict: dict[Any, Any] = {}
    a_dict["x"] = ({1: a_dict},)
    for value in (a_list, a_dict):
        with pytest.raises(CodecError, match="contains itself"):
            to_tree(value)


def test_a_full_stack_is_a_codec_error_too() -> None:
    def deep(levels: int) -> None:
        if levels:
            return deep(levels - 1)
        with pytest.raises(CodecError, match="nested"):
            to_tree(nested(150))
        with pytest.raises(CodecError, match="nested"):
            from_tree(nested(150))
        return None

    frame, used = sys._getframe(), 0
    while frame is not None:
        frame, used = frame.f_back, used + 1  # type: ignore[assignment]
    deep(sys.getrecursionlimit() - used - 120)


def test_a_dict_that_changes_while_it_is_recorded_is_a_codec_error(monkeypatch: pytest.MonkeyPatch) -> None:
    changing: dict[Any, Any] = {"a": 1, "b": Meddler(), "c": 2}

    def meddle(value: object, depth: int) -> None:
        changing["more"] = 1

    monkeypatch.setitem(ENCODERS, Meddler, meddle)
    with pytest.raises(CodecError, match="changed while it was recorded"):
        to_tree(changing)


class Meddler:
    """While it is recorded, another thread changes the dict that it is in."""


# --- damaged and foreign trees ----------------------------------------------------------------------------------------

BAD_TREES: list[Any] = [
    {"$": "nothing known"},
    {"$": "exec", "v": "import os"},
    {"$": None},
    {"$": ["tuple"]},
    {"$": {"$": "str"}},
    {"$": "tuple"},
    {"$": "tuple", "v": [], "w": 1},
    {"$": "tuple", "v": None},
    {"$": "tuple", "v": "ab"},
    {"$": "tuple", "v": {"a": 1}},
    {"$": "set", "v": [[]]},
    {"$": "set", "v": [1, 1]},
    {"$": "set", "v": [1, True]},
    {"$": "frozenset", "v": [1, 1.0]},
    {"$": "dict", "v": []},
    {"$": "dict", "v": {"not json": 1}},
    {"$": "dict", "v": {"[1]": 1}},
    {"$": "dict", "v": {"1": 1, "1.0": 2}},
    {"$": "dict", "v": {"$": 1}},
    {"$": "int", "v": 5.5},
    {"$": "int", "v": "x"},
    {"$": "int", "v": None},
    {"$": "int", "v": "0x"},
    {"$": "float", "v": "1.0"},
    {"$": "float", "v": []},
    {"$": "str", "v": "%%"},
    {"$": "str", "v": "/w=="},
    {"$": "bytes", "v": "a"},
    {"$": "bytes", "v": 1},
    {"$": "decimal", "v": "one"},
    {"$": "decimal", "v": [0, [1], 2]},
    {"$": "uuid", "v": "x"},
    {"$": "uuid", "v": 1},
    {"$": "datetime", "v": "yesterday"},
    {"$": "datetime", "v": "2024-01-01T00:00:00", "tz": "UTC"},
    {"$": "datetime", "v": "2024-01-01T00:00:00", "fold": 2},
    {"$": "datetime", "v": 0},
    {"$": "date", "v": "2024-13-01"},
    {"$": "time", "v": "25:00"},
    {"$": "timedelta", "v": [1]},
    {"$": "timedelta", "v": ["1", 2, 3]},
    {"$": "timedelta", "v": [10**10, 0, 0]},
    {"$": "timezone", "v": "+99:00"},
    {"$": "timezone", "v": ""},
    {"$": "timezone", "v": "+01:00", "name": 3},
    {"$": "timezone.pydantic", "v": "x"},
    {"$": "timezone.pydantic", "v": 10**9},
    {"$": "zoneinfo", "v": "../../etc/passwd"},
    {"$": "zoneinfo", "v": "/etc/passwd"},
    {"$": "zoneinfo", "v": "Nowhere/At_All"},
    {"$": "zoneinfo", "v": 3},
    {"$": "enum", "t": "os:system", "v": "x"},
    {"$": "enum", "t": ["x"], "v": "x"},
    {"$": "data", "t": "subprocess:Popen", "f": {"args": "id"}},
    {"$": "model", "t": "pydantic.main:BaseModel", "f": {}, "set": []},
    {"$": "named", "t": "sys:version_info", "f": {}},
    {"$": "ref", "v": 0},
    {"$": "members", "v": "list"},
    {"a": {"b": [{"$": "?"}]}},
    (1, 2),
    {"a": b"bytes"},
    object(),
]


@pytest.mark.parametrize("tree", BAD_TREES, ids=lambda tree: repr(tree).partition(" at 0x")[0][:40])
def test_a_damaged_or_foreign_tree_is_an_error_and_never_none(tree: Any) -> None:
    with pytest.raises(CodecError):
        from_tree(tree)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
            st.builds(
                lambda kind, rest: {"$": kind, **rest},
                st.sampled_from(sorted(DECODERS)),
                st.dictionaries(
                    st.sampled_from(["v", "t", "f", "x", "set", "args", "str", "state", "cause", "chain", "members"]),
                    inner,
                    max_size=5,
                ),
            ),
        ),
        max_leaves=8,
    )
)
def test_any_json_loads_or_is_a_codec_error(tree: Any) -> None:
    try:
        from_tree(tree)
    except CodecError:
        return


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nul", b"\xff", b'{"a":NaN}', b"[1,]", b'"\\ud800"', b"\x00", b"[" * 5000 + b"]" * 5000],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_json_are_an_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


def test_a_tree_that_is_too_deep_to_be_one_is_an_error() -> None:
    with pytest.raises(CodecError, match="nested too deeply"):
        from_tree(nested(100_000))
    with pytest.raises(CodecError):
        dumps(nested(1000))
    with pytest.raises(CodecError):
        canonical(nested(100_000))


def test_what_is_no_tree_cannot_be_written() -> None:
    not_trees: list[Any] = [object(), {"a": (1, 2), "b": object()}, dt.datetime(2024, 1, 1), "\ud800", 2**70]
    for value in not_trees:
        with pytest.raises(CodecError):
            dumps(value)
    no_json: list[Any] = [object(), math.nan, "\ud800"]
    for value in no_json:
        with pytest.raises(CodecError):
            canonical(value)


_SAFETY_SCRIPT = """
import sys
from dalsegno.core.codec import from_tree
from dalsegno.errors import CodecError
before = set(sys.modules)
for module in ("antigravity", "this", "ctypes.util", "xmlrpc.client", "app_that_is_not_imported"):
    for tree in (
        {"$": "exc", "t": module + ":Error", "str": "", "args": []},
        {"$": "enum", "t": module + ":Error", "v": "A"},
        {"$": "data", "t": module + ":Error", "f": {}},
        {"$": "zoneinfo", "v": module},
    ):
        try:
            from_tree(tree)
        except CodecError:
            continue
        raise SystemExit("loaded " + repr(tree))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"antigravity", "this", "ctypes", "xmlrpc", "app_that_is_not_imported"}, new
"""


@pytest.mark.slow
def test_loading_imports_no_module_that_a_record_names() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _SAFETY_SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
