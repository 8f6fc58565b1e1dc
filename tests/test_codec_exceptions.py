"""The codec on exceptions: same class, fields, ``str()``, causes and notes, or the one stand-in; never a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import pickle
import sqlite3
import ssl
import subprocess
import sys
import threading
import traceback
import urllib.error
from collections.abc import Iterator
from decimal import Decimal
from email.message import Message
from typing import Any

import pydantic
import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.core import codec_exceptions
from dalsegno.core.codec import (
    MAX_DEPTH,
    canonical,
    decode,
    decode_exception,
    dumps,
    encode,
    encode_exception,
    from_tree,
    loads,
    to_tree,
)
from dalsegno.errors import CodecError, DefinitionError, InDoubtError
from dalsegno.registry import NotRecorded, RecordedError, class_name, register


def again(exc: BaseException) -> Any:
    tree = encode_exception(exc)
    found = decode_exception(loads(dumps(tree)))
    assert canonical(encode_exception(found)) == canonical(tree), "a decoded exception must be recorded as it was"
    return found


def node(exc: BaseException) -> dict[str, Any]:
    tree = encode_exception(exc)
    assert isinstance(tree, dict)
    return tree


def same(found: BaseException, exc: BaseException) -> None:
    assert type(found) is type(exc)
    assert str(found) == str(exc)
    assert repr(found) == repr(exc)
    assert found.args == exc.args
    assert found.__traceback__ is None


calls: list[str] = []


class Response:
    def __init__(self, status: int) -> None:
        self.status = status
        self.lock = threading.Lock()


class RateLimitError(Exception):
    """Shaped like the errors of the model providers' clients: keyword-only, with a live response."""

    def __init__(self, message: str, *, response: Response, body: object | None) -> None:
        calls.append("init")
        super().__init__(message)
        self.message = message
        self.response = response
        self.status_code = response.status
        self.body = body


class Required(ValueError):
    def __new__(cls, *args: Any) -> Required:
        calls.append("new")
        return super().__new__(cls, *args)

    def __init__(self, a: int, b: int) -> None:
        calls.append("init")
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b

    def __setattr__(self, name: str, value: object) -> None:
        calls.append("setattr")
        super().__setattr__(name, value)

    def __str__(self) -> str:
        return f"<{self.a}, {self.b}>"


class Slotted(Exception):
    __slots__ = ("code", "missing", "nothing")
    code: object
    nothing: object


@dataclasses.dataclass
class Data(Exception):
    code: int
    detail: dict[int, str]


class DiskError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOSPC, "no space", path)
        self.path = path


class Parse(UnicodeDecodeError):
    def __init__(self, where: str) -> None:
        super().__init__("utf-8", b"\xff\x00", 0, 1, "bad")
        self.where = where


class Outer:
    class Inner(KeyError):
        pass


class Changed(Exception):
    pass


class TwoBases(ConnectionError, ValueError):
    pass


def with_assigned_args() -> Exception:
    exc = ValueError("a")
    exc.args = ("b", 3)
    return exc


def oserror_by_hand() -> Exception:
    exc = OSError()
    exc.errno, exc.strerror, exc.filename = errno.ENOENT, "gone", "f"
    return exc


def missing_attribute() -> Exception:
    try:
        object().missing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        return error.with_traceback(None)
    raise AssertionError


def json_error() -> Exception:
    try:
        json.loads("{]")
    except ValueError as error:
        return error.with_traceback(None)
    raise AssertionError


def sqlite_error() -> Exception:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute("select nothing")
        except sqlite3.Error as error:
            return error.with_traceback(None)
    raise AssertionError


def syntax_error() -> Exception:
    try:
        compile("a = = b", "agent.py", "exec")
    except SyntaxError as error:
        return error.with_traceback(None)
    raise AssertionError


RESTORED: list[Exception] = [
    Exception(),
    ValueError("a", 1, (2,), {3: Decimal(4)}, "\x00\ud800"),
    KeyError("k"),
    KeyError(("a", 1)),
    IndexError(3),
    LookupError(None),
    StopIteration(5),
    StopAsyncIteration(),
    with_assigned_args(),
    OSError("only text"),
    OSError(errno.ENOENT, "no such file", "a.txt"),
    OSError(errno.EXDEV, "two files", "a", None, "b"),
    OSError(errno.EXDEV, "two files", b"a", None, b"b"),
    OSError(None, "text"),
    OSError(1, 2, 3, 4, 5, 6),
    oserror_by_hand(),
    FileNotFoundError(errno.ENOENT, "no such file", "a.txt"),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    TimeoutError(),
    BlockingIOError(errno.EAGAIN, "would block", 7),
    ssl.SSLError(1, "handshake"),
    ssl.SSLCertVerificationError("certificate"),
    UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "\ud800é", 0, 1, "ordinal"),
    UnicodeTranslateError("é", 0, 1, "reason"),
    UnicodeError("plain"),
    ImportError("no", name="mod", path="/p"),
    ModuleNotFoundError("No module named 'x'", name="x"),
    NameError("n", name="n"),
    missing_attribute(),
    json_error(),
    sqlite_error(),
    syntax_error(),
    SyntaxError("just text"),
    subprocess.CalledProcessError(3, ["cmd", "-x"], output=b"out", stderr=b"err"),
    asyncio.IncompleteReadError(b"ab", 4),
    asyncio.QueueFull(),
    urllib.error.URLError(TimeoutError("slow")),
    UserWarning("w"),
    Data(3, {1: "x"}),
    DiskError("/data"),
    Parse("here"),
    Outer.Inner("nested class"),
    Required(1, 2),
    TwoBases("two"),
    ExceptionGroup("group", [ValueError(1), ExceptionGroup("inner", (KeyError("k"), OSError(2, "x", "f")))]),
    ExceptionGroup.__new__(ExceptionGroup, "made by hand", [ValueError(1)]),
    InDoubtError("a call is in doubt"),
    DefinitionError("wrong"),
    CodecError("cannot"),
    pydantic_core.PydanticUseDefault(),
    NotImplementedError("later"),
    RecursionError("deep"),
    MemoryError("full"),
    AssertionError(),
]


@pytest.mark.parametrize("exc", RESTORED, ids=lambda exc: type(exc).__name__)
def test_exceptions_come_back_as_what_they_are(exc: Exception) -> None:
    calls.clear()
    found = again(exc)
    assert {"init", "new", "setattr"}.isdisjoint(calls)
    if isinstance(exc, ExceptionGroup):
        assert (found.message, str(found), type(found.args[1])) == (exc.message, str(exc), type(exc.args[1]))
        for left, right in zip(found.exceptions, exc.exceptions, strict=True):
            assert repr(left) == repr(right)
    elif isinstance(exc, urllib.error.URLError):
        assert repr(found) == repr(exc)
    else:
        same(found, exc)
    for name in (
        "errno",
        "strerror",
        "filename",
        "filename2",
        "characters_written",
        "encoding",
        "object",
        "start",
        "end",
    ):
        assert getattr(found, name, "unset") == getattr(exc, name, "unset")
    for name in (
        "reason",
        "name",
        "path",
        "msg",
        "value",
        "lineno",
        "offset",
        "text",
        "end_lineno",
        "doc",
        "pos",
        "cmd",
    ):
        assert repr(getattr(found, name, "unset")) == repr(getattr(exc, name, "unset"))


def test_a_keyword_only_constructor_with_a_live_response() -> None:
    exc = RateLimitError("slow down", response=Response(429), body={"error": {"code": None, "n": (1,)}})
    calls.clear()
    found = again(exc)
    assert calls == []
    same(found, exc)
    assert (found.message, found.status_code, found.body) == ("slow down", 429, {"error": {"code": None, "n": (1,)}})
    assert type(found.response) is NotRecorded
    assert found.response.type_name == f"{__name__}:Response"
    assert "0x" not in found.response.text
    with pytest.raises(RateLimitError):
        raise found


def test_slots_come_back_with_none_and_unset_kept_apart() -> None:
    exc = Slotted("s")
    exc.code, exc.nothing = (1, 2), None
    found = again(exc)
    assert (found.code, found.nothing) == ((1, 2), None)
    assert not hasattr(found, "missing")


def test_attributes_with_odd_names() -> None:
    for exc in (ValueError("odd"), local_class()):
        vars(exc).update({"$": 1, "\ud800": (2,), "": 3})
        found = again(exc)
        assert type(found) is RecordedError or vars(found) == {"$": 1, "\ud800": (2,), "": 3}


def test_exceptions_inside_values() -> None:
    found = decode(encode({"results": [1, KeyError("k"), (ValueError("v"),)]}))
    assert repr(found) == repr({"results": [1, KeyError("k"), (ValueError("v"),)]})


# --- causes, contexts, notes ------------------------------------------------------------------------------------------


def raised(exc: Exception) -> Exception:
    try:
        raise exc
    except Exception as error:
        return error


def test_cause_context_suppression_and_notes_come_back() -> None:
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError as first:
                first.add_note("a note")
                first.add_note("another \ud800")
                raise ValueError("second") from first
        except ValueError:
            raise RuntimeError("third")  # noqa: B904
    except RuntimeError as error:
        third = error
    found = again(third)
    second = found.__context__
    assert found.__cause__ is None
    assert not found.__suppress_context__
    assert repr(second) == "ValueError('second')"
    assert second.__suppress_context__
    assert second.__cause__ is second.__context__
    assert second.__cause__.__notes__ == ["a note", "another \ud800"]
    lines = traceback.format_exception(found)
    assert "KeyError: 'first'\n" in lines[0] or any("KeyError: 'first'" in line for line in lines)
    suppressed = ValueError("quiet")
    suppressed.__suppress_context__ = True
    assert again(suppressed).__suppress_context__
    explicit = ValueError("explicit")
    explicit.__cause__ = KeyError("why")
    explicit.__suppress_context__ = False
    assert not again(explicit).__suppress_context__
    assert repr(again(explicit).__cause__) == "KeyError('why')"


def test_a_signal_may_be_a_context_and_never_the_outcome() -> None:
    exc = TimeoutError()
    exc.__cause__ = asyncio.CancelledError("timeout")
    exc.__context__ = KeyboardInterrupt()
    found = again(exc)
    assert type(found.__cause__) is asyncio.CancelledError
    assert found.__cause__.args == ("timeout",)
    assert type(found.__context__) is KeyboardInterrupt
    signals: list[BaseException] = [
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(1),
        GeneratorExit(),
        BaseException("x"),
        BaseExceptionGroup("g", [KeyboardInterrupt()]),
    ]
    for signal in signals:
        with pytest.raises(CodecError, match=r"never an outcome"):
            encode_exception(signal)
        with pytest.raises(CodecError, match=r"result\['e'\]: .*never an outcome"):
            to_tree({"e": signal}, root="result")


def test_cycles_in_chains_are_cut() -> None:
    a, b, c = ValueError("a"), KeyError("b"), OSError("c")
    a.__context__, b.__context__, c.__context__ = b, c, a
    c.__cause__ = b
    found = again(a)
    assert repr(found.__context__) == "KeyError('b')"
    assert repr(found.__context__.__context__) == "OSError('c')"
    assert found.__context__.__context__.__context__ is None
    assert found.__context__.__context__.__cause__ is None
    own = ValueError("own")
    own.__cause__ = own
    assert again(own).__cause__ is None


def test_an_exception_that_holds_itself_or_its_cause() -> None:
    cause = KeyError("k")
    exc = ValueError("v", cause)
    exc.__cause__ = cause
    exc.me = exc  # type: ignore[attr-defined]
    exc.all = [cause, {"it": cause}]  # type: ignore[attr-defined]
    found = again(exc)
    assert found.me is found
    assert found.args[1] is found.__cause__ is found.all[0] is found.all[1]["it"]


def test_a_chain_and_groups_do_not_blow_up() -> None:
    """Nested as they are written, 60 of these would be 3**60 exceptions."""

    class Wrap(Exception):
        pass

    exc: Exception = ValueError("inner")
    for number in range(60):
        outer = ExceptionGroup(f"g{number}", [exc, exc]) if number % 20 == 0 else OSError(f"w{number}", exc)
        outer.inner = [exc]  # type: ignore[union-attr]
        outer.__cause__ = outer.__context__ = exc
        exc = outer
    assert len(dumps(encode_exception(exc))) < 50_000
    found = again(exc)
    for _ in range(60):
        found = found.__cause__
    assert repr(found) == "ValueError('inner')"


def test_a_long_chain_is_not_a_deep_tree() -> None:
    exc: Exception = ValueError(0)
    for number in range(1, 2000):
        outer = ValueError(number)
        outer.__context__ = exc
        exc = outer
    found, count = again(exc), 0
    while found is not None:
        found, count = found.__context__, count + 1
    assert count == 2000


def test_deeply_nested_groups_and_args_end_in_something_recorded() -> None:
    group: Exception = ValueError("x")
    for _ in range(3000):
        group = ExceptionGroup("g", [group])
    assert isinstance(again(group), (RecordedError, ExceptionGroup))
    nested: Any = 1
    for _ in range(MAX_DEPTH * 2):
        nested = [nested]
    found = again(ValueError("deep", nested))
    assert type(found) is RecordedError
    deep: Any = ValueError("v")
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(CodecError, match="nested"):
        to_tree(deep)


# --- the stand-in ---------------------------------------------------------------------------------------------------


class NeedsResponse(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response
        self.code = 7

    def __str__(self) -> str:
        return f"status {self.response.status}"


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def local_class() -> Exception:
    class Local(Exception):
        pass

    exc = Local("local", 1)
    exc.code = 5  # type: ignore[attr-defined]
    exc.add_note("noted")
    exc.__cause__ = KeyError("why")
    return exc


def test_an_exception_that_needs_what_is_not_recorded_becomes_the_stand_in() -> None:
    found = again(NeedsResponse(Response(500)))
    assert type(found) is RecordedError
    assert found.type_name == f"{__name__}:NeedsResponse"
    assert found.message == "status 500"
    assert str(found) == f"{__name__}:NeedsResponse: status 500"
    assert found.fields["code"] == 7
    assert type(found.fields["response"]) is NotRecorded


def test_a_class_that_cannot_be_found_again_becomes_the_stand_in() -> None:
    found = again(local_class())
    assert type(found) is RecordedError
    assert found.message == "('local', 1)"
    assert found.fields == {"args": ("local", 1), "code": 5}
    assert found.__notes__ == ["noted"]
    assert repr(found.__cause__) == "KeyError('why')"
    assert node(local_class())["t"] == "dalsegno:RecordedError"


def test_a_registered_local_class_comes_back() -> None:
    @register
    class Local(Exception):
        pass

    same(again(Local("l")), Local("l"))


def test_an_argument_that_cannot_be_recorded() -> None:
    lock = threading.Lock()
    found = again(ValueError(lock))
    assert type(found) is RecordedError
    assert found.message == str(lock)

    class Quiet(ValueError):
        def __str__(self) -> str:
            return "quiet"

    register(Quiet)
    found = again(Quiet(lock, 2))
    assert type(found) is Quiet
    assert type(found.args[0]) is NotRecorded
    assert found.args[1] == 2


def test_str_and_repr_that_raise() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise RuntimeError("loud")

    found = again(Speechless("s", Loud()))
    assert type(found) is RecordedError
    assert "str() raises" in found.message
    assert "Loud" in str(found.fields["args"])


def test_a_broken_link_of_a_chain_or_group_is_replaced_alone() -> None:
    exc = ValueError("fine")
    exc.__cause__ = NeedsResponse(Response(1))
    exc.__cause__.__cause__ = KeyError("k")
    found = again(exc)
    assert type(found) is ValueError
    assert type(found.__cause__) is RecordedError
    assert repr(found.__cause__.__cause__) == "KeyError('k')"
    group = again(ExceptionGroup("g", [NeedsResponse(Response(1)), KeyError("k"), local_class()]))
    assert [type(member) for member in group.exceptions] == [RecordedError, KeyError, RecordedError]


def test_args_that_contain_the_exception_itself() -> None:
    exc = ValueError("x")
    exc.args = (exc,)
    assert type(again(exc)) is RecordedError
    a, b = ValueError("a"), KeyError("b")
    a.args, b.args = (b,), (a,)
    assert isinstance(decode_exception(encode_exception(a)), RecordedError)


def test_the_stand_in_and_not_recorded_are_values_themselves() -> None:
    error = RecordedError("app:Error", "boom", {"a": (1,)})
    same(again(error), error)
    assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
    assert RecordedError("a", "b").fields == {}
    placeholder = NotRecorded("app:Response", "<Response>")
    assert decode(encode(placeholder)) == placeholder
    assert repr(placeholder) == "<not recorded: app:Response <Response>>"


def test_an_http_error_with_an_open_body() -> None:
    headers = Message()
    headers["a"] = "b"
    exc = urllib.error.HTTPError("http://x", 404, "Not Found", headers, None)
    found = again(exc)
    exc.close()
    assert type(found) is urllib.error.HTTPError
    assert (found.code, found.msg, str(found)) == (404, "Not Found", "HTTP Error 404: Not Found")
    assert isinstance(found.hdrs, NotRecorded)


class OwnGroup(ExceptionGroup[Exception]):
    code: int

    def __new__(cls, errors: list[Exception], code: int) -> OwnGroup:
        calls.append("new")
        self = super().__new__(cls, f"{len(errors)} errors", errors)
        self.code = code
        return self

    def derive(self, excs: Any) -> OwnGroup:  # type: ignore[override]
        return OwnGroup(excs, self.code)


def test_a_group_with_its_own_constructor() -> None:
    exc = OwnGroup([ValueError(1), KeyError(2)], 7)
    calls.clear()
    found = again(exc)
    assert calls == []
    assert type(found) is OwnGroup
    assert (str(found), found.code, repr(found.exceptions)) == (str(exc), 7, repr(exc.exceptions))
    assert found.args[0][0] is found.exceptions[0]
    assert found.args[1] == 7
    matched, rest = found.split(ValueError)
    assert type(matched) is OwnGroup
    assert type(rest) is OwnGroup


# --- pydantic -------------------------------------------------------------------------------------------------------


class Order(pydantic.BaseModel):
    number: int
    lines: list[dict[str, float]] = []
    when: pydantic.AwareDatetime | None = None

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, number: int) -> int:
        if number == 13:
            raise ValueError("thirteen")
        if number == 14:
            raise pydantic_core.PydanticCustomError("unlucky", "{number} is unlucky", {"number": number})
        return number


def validation_error(make: Any) -> pydantic.ValidationError:
    try:
        make()
    except pydantic.ValidationError as error:
        return error.with_traceback(None)
    raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        lambda: Order.model_validate({"number": "x", "lines": [{"a": "b"}, 3], "when": "2024-01-01T00:00:00"}),
        lambda: Order.model_validate({}),
        lambda: Order.model_validate({"number": 13}),
        lambda: Order.model_validate({"number": 14}),
        lambda: Order.model_validate_json('{"number": [1], "lines": {}}'),
        lambda: Order.model_validate_json('{"number": '),
    ],
)
def test_validation_errors_of_pydantic_come_back(make: Any) -> None:
    exc = validation_error(make)
    found = again(exc)
    assert type(found) is pydantic.ValidationError
    assert str(found) == str(exc)
    assert repr(found.errors()) == repr(exc.errors())
    assert found.title == exc.title


def test_a_validation_error_about_what_cannot_be_recorded_is_the_stand_in() -> None:
    exc = validation_error(lambda: Order.model_validate({"number": object()}))
    found = again(exc)
    assert type(found) is RecordedError
    assert found.message == str(exc)


# --- loading --------------------------------------------------------------------------------------------------------


def test_an_exception_class_that_is_not_loaded_is_an_error_that_names_it() -> None:
    tree = node(Changed("c"))
    for name in ("not_imported:Error", f"{__name__}:Gone", f"{__name__}:Outer", "builtins:int", "os:error", "x", ""):
        with pytest.raises(CodecError, match="is not loaded in this process"):
            decode_exception({**tree, "t": name})
    cause = ValueError("v")
    cause.__cause__ = Changed("c")
    chained = node(cause)
    chained["chain"][0]["t"] = "not_imported:Error"
    with pytest.raises(CodecError, match="'not_imported:Error'"):
        decode_exception(chained)
    assert "not_imported" not in sys.modules


def test_a_renamed_exception_is_registered_under_its_old_name() -> None:
    tree = node(Changed("c"))

    class Renamed(Exception):
        pass

    register(Renamed, name="old.module:Changed")
    found = decode_exception({**tree, "t": "old.module:Changed"})
    assert type(found) is Renamed
    assert node(found)["t"] == "old.module:Changed"


def test_damaged_exceptions_are_errors() -> None:
    good = node(OSError(2, "x", "f"))
    group = node(ExceptionGroup("g", [ValueError(1)]))
    bad: list[dict[str, Any]] = [
        {**good, "args": 3},
        {**good, "args": [{"$": "nothing"}]},
        {**good, "t": 3},
        {**good, "t": None},
        {**good, "fields": []},
        {**good, "fields": {"no_such": 1}},
        {**good, "state": [1]},
        {**good, "state": {"$": "dict", "v": {"1": 2}}},
        {**good, "cause": 5},
        {**good, "cause": -1},
        {**good, "cause": True},
        {**good, "cause": "0"},
        {**good, "suppress": "yes"},
        {**good, "chain": 3},
        {**good, "chain": [3]},
        {**good, "chain": [{}]},
        {**good, "chain": [{"t": "builtins:ValueError"}]},
        {**good, "more": 1},
        {**group, "members": []},
        {**group, "members": [0]},
        {**group, "members": [9]},
        {**group, "message": 3},
        {key: item for key, item in group.items() if key != "members"},
        {key: item for key, item in good.items() if key != "args"},
        {"$": "exc", "t": "pydantic_core._pydantic_core:ValidationError", "str": "", "args": [], "validation": {}},
    ]
    for tree in bad:
        with pytest.raises(CodecError):
            from_tree(tree)
    with pytest.raises(CodecError, match="an exception was expected"):
        decode_exception(to_tree([1]))
    with pytest.raises(CodecError, match="an exception was expected"):
        decode_exception({"$": "exc", "t": "builtins:SystemExit", "str": "", "args": []})
    with pytest.raises(CodecError, match="outside of one"):
        from_tree({"$": "ref", "v": 0})


def test_an_exception_that_hides_its_own_attributes() -> None:
    class Hiding(ExceptionGroup[Exception]):
        message = property(lambda self: calls.append("message"))
        exceptions = property(lambda self: calls.append("exceptions"))
        args = property(lambda self: calls.append("args"))
        __cause__ = property(lambda self: calls.append("cause"))
        __dict__ = property(lambda self: calls.append("dict"))

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    register(Hiding)
    calls.clear()
    found = encode_exception(Hiding("group", [KeyError("k")]))
    assert isinstance(found, dict)
    assert found["t"] == class_name(Hiding)
    assert type(decode_exception(found)) is Hiding
    assert calls == []


def test_nothing_is_left_behind_in_the_thread() -> None:
    with pytest.raises(CodecError):
        from_tree({"$": "exc", "t": "no:thing", "str": "", "args": []})
    assert codec_exceptions._current.build is None
    again(local_class())
    assert codec_exceptions._current.graph is None
    assert decode(encode([ValueError("a"), ValueError("b")]))[1].args == ("b",)


# --- any exception ----------------------------------------------------------------------------------------------------

simple: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(), st.text(max_size=4), st.binary(max_size=3), st.floats()
)
anything: st.SearchStrategy[Any] = st.one_of(
    simple,
    st.lists(simple, max_size=2),
    st.tuples(simple),
    st.dictionaries(simple.filter(lambda x: x == x), simple, max_size=2),
)
classes: Any = st.sampled_from(
    [
        *(Exception, ValueError, KeyError, OSError, ConnectionError, BlockingIOError, ImportError, StopIteration),
        *(SyntaxError, NameError, AttributeError, UnicodeError, Changed, TwoBases, Slotted, Outer.Inner, ssl.SSLError),
        InDoubtError,
    ]
)


@st.composite
def exceptions(draw: Any) -> Exception:
    made: list[Exception] = []
    for _ in range(draw(st.integers(1, 5))):
        cls = draw(classes)
        try:
            exc = cls(*draw(st.lists(anything, max_size=6)))
        except (TypeError, ValueError):
            exc = cls()
        if made and draw(st.booleans()):
            exc = ExceptionGroup(
                draw(st.text(max_size=3)), draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
            )
        for name in draw(st.lists(st.sampled_from(["code", "errno", "name", "value", "detail"]), max_size=3)):
            with contextlib.suppress(TypeError, AttributeError):
                setattr(exc, name, draw(st.one_of(anything, st.sampled_from([*made, threading.Lock()]))))
        exc.__cause__ = draw(st.sampled_from([None, *made]))
        exc.__context__ = draw(st.sampled_from([None, *made]))
        exc.__suppress_context__ = draw(st.booleans())
        made.append(exc)
    return made[-1]


def described(exc: BaseException | None) -> Iterator[str]:
    while exc is not None:
        yield f"{type(exc).__name__} {exc!s} {exc.__suppress_context__}"
        if isinstance(exc, BaseExceptionGroup):
            for member in exc.exceptions:
                yield from described(member)
        exc = exc.__cause__ or exc.__context__


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(exceptions())
def test_any_exception_is_recorded_and_what_is_loaded_is_recorded_alike(exc: Exception) -> None:
    found = again(exc)
    if type(found) is not RecordedError:
        assert type(found) is type(exc)
        assert str(found) == str(exc)
    assert repr(again(found)) == repr(found)
    if not any("RecordedError" in line or "lock" in line for line in described(found)):
        assert list(described(found)) == list(described(exc))
