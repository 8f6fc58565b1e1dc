"""Sinks: what is written, and that after a crash the file holds exactly what the checkpoint says."""

from __future__ import annotations

import asyncio
import collections
import enum
import errno
import fcntl
import io
import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.errors import CodecError, DefinitionError, RestoreError, StoreError
from dalsegno.runners import sinks
from dalsegno.runners.plain_json import to_json_line
from dalsegno.runners.sinks import CallableSink, JsonLinesSink, NullSink, Sink, StdoutSink, open_sink, to_plain_json

State = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def sink(file: Path) -> Iterator[JsonLinesSink]:
    sink = JsonLinesSink(file)
    yield sink
    sink.close()


def put(sink: Sink, *outputs: object) -> State:
    """Write outputs and take a checkpoint; the state passes through JSON as in a checkpoint."""
    for output in outputs:
        sink.write(output, f"id-{output}")
    state = sink.snapshot()
    sink.flush(state)
    loaded: State = json.loads(json.dumps(state))
    return loaded


def lines(file: Path) -> list[object]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


# Exactly once


def test_outputs_are_lines(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    put(sink, {"text": "é\nβ"}, [1, 2], None)
    assert file.read_bytes().decode() == '{"text": "é\\nβ"}\n[1, 2]\nnull\n'
    assert sink.exactly_once
    assert sink.describe() == str(file)


def test_what_is_after_the_checkpoint_is_cut_off(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    start = put(sink)
    state = put(sink, 1, 2)
    put(sink, 3)
    sink.close()
    sink.open(state)
    put(sink, 4)
    assert lines(file) == [1, 2, 4]
    sink.close()
    sink.open(start)
    assert lines(file) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 30)), max_size=6))
def test_after_any_crashes_each_output_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, bool, int]]
) -> None:
    """Each run writes some outputs, takes a checkpoint or not, and crashes within a line."""
    file = tmp_path_factory.mktemp("sink") / "out.jsonl"
    sink = JsonLinesSink(file)
    sink.open(None)
    committed, done = put(sink), 0
    for count, commits, torn in runs:
        for number in range(done, done + count):
            sink.write({"n": number, "pad": "x" * 2000}, str(number))
        if commits:
            committed, done = put(sink), done + count
        sink.close()
        with file.open("ab") as out:
            out.write(b'{"n": 99, "pad": "half a line'[:torn])
        sink.open(committed)
        assert [line["n"] for line in lines(file)] == list(range(done))  # type: ignore[index]
    sink.close()


def test_a_snapshot_counts_what_is_written_and_flush_may_come_later(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    sink.write(1, "1")
    state = sink.snapshot()
    sink.write(2, "2")
    asyncio.run(asyncio.to_thread(sink.flush, state))
    sink.close()
    sink.open(state)
    assert lines(file) == [1]


def test_a_new_job_does_not_share_the_file_of_another(sink: JsonLinesSink, file: Path) -> None:
    file.write_bytes(b"1\n")
    for _ in range(2):
        with pytest.raises(RestoreError, match=r"out\.jsonl' already holds 2 bytes.*Give another file, or remove it"):
            sink.open(None)
        assert file.read_bytes() == b"1\n"
    file.write_bytes(b"")
    sink.open(None)
    put(sink, 2)
    assert lines(file) == [2]


def test_a_new_job_appends_if_told_to(file: Path) -> None:
    file.write_bytes(b'"kept"\n')
    sink = JsonLinesSink(file, append=True)
    sink.open(None)
    assert sink.snapshot()["length"] == 7
    state = put(sink)
    put(sink, 1)
    sink.close()
    sink.open(state)
    put(sink, 2)
    sink.close()
    assert lines(file) == ["kept", 2]


def test_a_new_job_does_not_append_to_half_a_line(file: Path) -> None:
    file.write_bytes(b'1\n{"half')
    with pytest.raises(RestoreError, match="has no newline"):
        JsonLinesSink(file, append=True).open(None)
    assert file.read_bytes() == b'1\n{"half'


KILLED = """
import json, sys
from dalsegno.runners.sinks import JsonLinesSink

sink = JsonLinesSink(sys.argv[1])
sink.open(None)
for number in range(10**9):
    sink.write({"n": number, "pad": "x" * 5000}, str(number))
    if number % 10 == 9:
        state = sink.snapshot()
        sink.flush(state)
        print(json.dumps([number + 1, state]), flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_file_that_goes_on(sink: JsonLinesSink, file: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        committed = [process.stdout.readline() for _ in range(20)]
        process.kill()
    assert process.returncode == -signal.SIGKILL
    count, state = json.loads(committed[-2])
    assert file.stat().st_size > state["length"]
    sink.open(state)
    put(sink, {"n": count})
    assert [line["n"] for line in lines(file)] == list(range(count + 1))  # type: ignore[index]


# Files that are not what they were


def test_missing_bytes_are_counted(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    state = put(sink, 1, 22, 333)
    sink.close()
    os.truncate(file, 5)
    with pytest.raises(RestoreError, match=r"has written 9 bytes .* but 4 of them are missing: the file has only 5"):
        sink.open(state)
    assert file.read_bytes() == b"1\n22\n"
    file.unlink()
    with pytest.raises(RestoreError, match=r"9 of them are missing: the file is empty or gone"):
        sink.open(state)
    assert not file.exists()


def test_nothing_written_needs_no_file(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    state = put(sink)
    sink.close()
    file.unlink()
    sink.open(state)
    put(sink, 1)
    assert lines(file) == [1]


def test_another_file_in_its_place_is_not_cut(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    state = put(sink, 1, 2)
    sink.close()
    file.write_bytes(b"3\n4\n5\n")
    with pytest.raises(RestoreError, match="is not what this job has written"):
        sink.open(state)
    assert file.read_bytes() == b"3\n4\n5\n"


@pytest.mark.parametrize("state", [{}, {"length": -1}, {"length": "2"}, {"length": 2}])
def test_a_state_of_another_sink_is_refused(sink: JsonLinesSink, file: Path, state: State) -> None:
    file.write_bytes(b"1\n2\n")
    with pytest.raises(RestoreError):
        sink.open(state)
    assert file.read_bytes() == b"1\n2\n"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_moved_away_is_noticed_before_the_checkpoint(
    sink: JsonLinesSink, file: Path, tmp_path: Path, replaced: bool
) -> None:
    sink.open(None)
    put(sink, 1)
    file.rename(tmp_path / "moved.jsonl")
    if replaced:
        file.write_bytes(b"1\n2\n")
    sink.write(2, "2")
    with pytest.raises(StoreError, match="moved, removed or replaced"):
        sink.flush(sink.snapshot())


def test_a_file_cut_by_others_is_noticed_before_the_checkpoint(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    put(sink, 1, 2)
    os.truncate(file, 2)
    with pytest.raises(StoreError, match=r"has been cut to 2 bytes .* it has written 4"):
        sink.flush(sink.snapshot())


def test_one_job_a_file(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    state = put(sink, 1)
    sink.write(2, "2")
    other = JsonLinesSink(file)
    for opened_with in (None, state):
        with pytest.raises(StoreError, match="is being written by another job"):
            other.open(opened_with)
    assert lines(file) == [1, 2]
    sink.close()
    other.open(state)
    other.close()


def test_a_file_system_without_locks(sink: JsonLinesSink, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    sink.open(None)
    state = put(sink, 1)
    monkeypatch.setattr(sinks, "fcntl", None)
    sink.open(state)
    put(sink, 2)


def test_a_symbolic_link_is_followed(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    sink = JsonLinesSink(link)
    sink.open(None)
    put(sink, 1)
    sink.close()
    assert lines(file) == [1]


# Files that cannot be written


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        JsonLinesSink(tmp_path / "missing" / "out.jsonl").open(None)
    with pytest.raises(StoreError, match="cannot be opened: Is a directory"):
        JsonLinesSink(tmp_path).open(None)
    with pytest.raises(StoreError, match="is not a regular file"):
        JsonLinesSink("/dev/null").open(None)


def test_a_closed_sink_does_not_write(sink: JsonLinesSink) -> None:
    for use in (lambda: sink.write(1, "1"), lambda: sink.flush({"length": 0})):
        with pytest.raises(StoreError, match="not open"):
            use()
    sink.open(None)
    sink.close()
    sink.close()
    with pytest.raises(StoreError, match="not open"):
        sink.write(1, "1")


FULL_DISK = """
import resource, sys
from dalsegno.errors import StoreError
from dalsegno.runners.sinks import JsonLinesSink

sink = JsonLinesSink(sys.argv[1])
sink.open(None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sink.write("x" * 500, "first")
try:
    sink.write("y" * 600, "second")
except StoreError as error:
    print(error)
sink.write("z" * 100, "third")
state = sink.snapshot()
sink.flush(state)
print(state["length"])
"""


@pytest.mark.slow
def test_nothing_half_written_counts_when_the_disk_is_full(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, str(file)], capture_output=True, text=True, check=True
    )
    message, length = done.stdout.splitlines()
    assert "The output 'second' cannot be written" in message
    assert "File too large" in message
    assert lines(file) == ["x" * 500, "z" * 100]
    assert int(length) == file.stat().st_size


def test_partial_writes_are_completed(sink: JsonLinesSink, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    sink.open(None)
    put(sink, {"text": "longer than three bytes"})
    assert lines(file) == [{"text": "longer than three bytes"}]


def fails(*args: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_a_failed_flush_is_never_tried_again(sink: JsonLinesSink, monkeypatch: pytest.MonkeyPatch) -> None:
    sink.open(None)
    state = put(sink, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(StoreError, match="could not be made durable: Input/output error"):
            sink.flush(sink.snapshot())
    for use in (lambda: sink.write(2, "2"), lambda: sink.flush(sink.snapshot())):
        with pytest.raises(StoreError, match="could not be made durable"):
            use()
    sink.open(state)
    put(sink, 3)


def test_a_failed_write_that_cannot_be_taken_back_ends_the_sink(
    sink: JsonLinesSink, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.open(None)
    state = put(sink, 1)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:2]) if len(data) > 6 else fails())
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(StoreError, match="cannot be written"):
            sink.write("12345", "2")
    with pytest.raises(StoreError):
        sink.write(3, "3")
    sink.open(state)
    put(sink, 4)
    assert lines(file) == [1, 4]


def test_a_failed_open_leaves_no_descriptor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(os, "ftruncate", fails)
    with pytest.raises(StoreError, match="cut back"):
        JsonLinesSink(file).open(None)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreError, match="cannot be opened"):
        JsonLinesSink(file.with_name("new.jsonl")).open(None)
    assert len(os.listdir("/dev/fd")) == before


def test_the_directory_is_synced_when_the_file_is_new(
    sink: JsonLinesSink, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync

    def spy(fd: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        real(fd)

    monkeypatch.setattr(os, "fsync", spy)
    sink.open(None)
    state = put(sink, 1)
    assert synced == [True, False]
    sink.open(state)
    assert synced == [True, False]


def test_an_output_without_plain_form_names_its_id(sink: JsonLinesSink, file: Path) -> None:
    sink.open(None)
    with pytest.raises(CodecError, match=r"the output 'id-7'\['a'\]\[1\] cannot be written as JSON: a object"):
        sink.write({"a": [1, object()]}, "id-7")
    assert file.read_bytes() == b""


# Plain JSON


class Colour(enum.Enum):
    RED = "red"
    ODD = object()


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Order:
    id: uuid.UUID
    tags: frozenset[str] = frozenset()
    unset: int = field(init=False)


class Review(pydantic.BaseModel):
    at: datetime
    score: float
    raw: bytes = b"ok"
    orders: list[Order] = []


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


UID = uuid.UUID(int=7)
AT = datetime(2026, 5, 17, 8, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, True),
        (2**80, 2**80),
        (-0.5, -0.5),
        (float("nan"), "NaN"),
        ([float("inf"), float("-inf")], ["Infinity", "-Infinity"]),
        ((1, "a"), [1, "a"]),
        ({3, 20, 1}, [1, 3, 20]),
        (frozenset({"b", 1, None}), ["b", 1, None]),
        ({1: "a", None: "b", (1, 2): "d"}, {"1": "a", "null": "b", "[1, 2]": "d"}),
        ({True: "c"}, {"true": "c"}),
        ({1: "a", "1": "b"}, [[1, "a"], ["1", "b"]]),
        ({Colour.RED: AT.date()}, {"red": "2026-05-17"}),
        (Colour.ODD, "ODD"),
        (Level.LOW | Level.HIGH, 3),
        (Point(1, 2.5), {"x": 1, "y": 2.5}),
        (Order(UID, frozenset("ba")), {"id": str(UID), "tags": ["a", "b"]}),
        (Review(at=AT, score=1.5), {"at": "2026-05-17T08:30:00Z", "score": 1.5, "raw": "ok", "orders": []}),
        (
            Review(at=AT, score=float("nan"), raw=b"\xff", orders=[Order(UID)]),
            {
                "at": "2026-05-17T08:30:00+00:00",
                "score": "NaN",
                "raw": "/w==",
                "orders": [{"id": str(UID), "tags": []}],
            },
        ),
        (AT, "2026-05-17T08:30:00+00:00"),
        (date(2026, 5, 17), "2026-05-17"),
        (time(8, 30), "08:30:00"),
        (timedelta(days=1, seconds=2), "P1DT2S"),
        (timezone(timedelta(hours=2)), "UTC+02:00"),
        (Decimal("1.50"), "1.50"),
        (b"\x00\xff", "AP8="),
        (bytearray(b"a"), "YQ=="),
        (Path("a/b"), "a/b"),
        (ValueError("no", 1), {"type": "builtins:ValueError", "message": "('no', 1)"}),
        (Text("text"), "text"),
        (collections.OrderedDict(a=1), {"a": 1}),
    ],
)
def test_plain_json(value: object, plain: object) -> None:
    assert to_plain_json(value) == plain
    assert json.loads(to_json_line(value)) == plain


def test_an_integer_of_too_many_digits_is_hexadecimal_text() -> None:
    assert to_plain_json([10**5000]) == [hex(10**5000)]


def test_a_line_is_one_line_of_valid_utf8() -> None:
    assert to_json_line({"é": "\n\u2028\0"}) == '{"é": "\\n\u2028\\u0000"}\n'.encode()
    assert to_json_line("\ud800é") == b'"\\ud800\\u00e9"\n'


def test_deep_values() -> None:
    deep: Any = 1
    for level in range(200):
        deep = {"a": deep} if level % 2 else (deep,)
    to_json_line(deep)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CodecError, match="nested too deeply"):
        to_plain_json(deep)
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(CodecError, match="contains itself"):
        to_plain_json(cycle)


@pytest.mark.parametrize("value", [object(), 1j, Order, len, iter([])])
def test_what_has_no_plain_form(value: object) -> None:
    with pytest.raises(CodecError, match=r"output\['a'\] cannot be written as JSON"):
        to_plain_json({"a": value})


# Other sinks


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    sink = open_sink("-")
    sink.open(None)
    assert put(sink, {"a": "é"}, 2) == {}
    sink.close()
    assert capsys.readouterr().out == '{"a": "é"}\n2\n'
    assert not sink.exactly_once
    assert "at least once" in sink.describe()


def test_standard_output_in_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "backslashreplace"):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors, newline="\n"))
        put(StdoutSink(), "é")
        assert raw.getvalue() == b'"\\u00e9"\n'


def test_standard_output_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    for stdout in (Broken(), None):
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(StoreError, match="cannot be written to standard output"):
            StdoutSink().write(1, "1")


def test_a_callable_gets_the_value_itself() -> None:
    got: list[object] = []
    value = Point(1, 2)
    sink = open_sink(got.append)
    sink.open({"length": 3})
    put(sink, value)
    assert got == [value]
    assert got[0] is value
    assert sink.describe() == "list.append (at least once)"
    assert not sink.exactly_once


def test_a_callable_may_get_the_id() -> None:
    got: dict[str, object] = {}
    put(CallableSink(lambda output, output_id: got.update({output_id: output}), with_id=True), 1, 2)
    assert got == {"id-1": 1, "id-2": 2}


def test_a_callable_that_fails() -> None:
    def broken(output: object) -> None:
        raise KeyError("x")

    with pytest.raises(StoreError, match=r"broken' failed with KeyError\('x'\) on the output 'id-1'") as caught:
        put(CallableSink(broken), 1)
    assert isinstance(caught.value.__cause__, KeyError)


def test_async_callables_are_refused() -> None:
    async def later(output: object) -> None:
        pass

    with pytest.raises(DefinitionError, match="is async"):
        CallableSink(later)
    with pytest.raises(DefinitionError, match="awaitable"):
        put(CallableSink(lambda output: later(output)), 1)


def test_nowhere() -> None:
    sink = open_sink(None)
    assert isinstance(sink, NullSink)
    sink.open(None)
    assert put(sink, object()) == {}
    sink.close()


def test_open_sink(file: Path) -> None:
    own = NullSink()
    assert open_sink(own) is own
    assert isinstance(open_sink(file), JsonLinesSink)
    assert isinstance(open_sink(str(file)), JsonLinesSink)
    assert isinstance(open_sink(print), CallableSink)


@pytest.mark.parametrize("spec", [3, b"path", [], JsonLinesSink, "out.csv", ""])
def test_what_is_no_sink(spec: object) -> None:
    with pytest.raises(DefinitionError):
        open_sink(spec)
