"""Sources: what each record is, and that reading goes on exactly where it ended, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.errors import DefinitionError, InputError, RestoreError
from dalsegno.runners import sources
from dalsegno.runners.sources import (
    AsyncIterableSource,
    BadInput,
    CsvSource,
    IterableSource,
    JsonLinesSource,
    Source,
    SourceItem,
    open_source,
)

Position = dict[str, Any]


def read(source: Source, position: Position | None = None, limit: int | None = None) -> list[SourceItem]:
    """Read in a loop of its own, as a new process would; the position passes through JSON as in a checkpoint."""

    async def main() -> list[SourceItem]:
        items: list[SourceItem] = []
        try:
            async for item in await source.open(json.loads(json.dumps(position))):
                items.append(item)
                if limit is not None and len(items) >= limit:
                    break
        finally:
            await source.close()
        return items

    return asyncio.run(main())


def values(items: list[SourceItem]) -> list[object]:
    return [item.value for item in items]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def assert_resumes_everywhere(make: Any, position_before: Position | None = None) -> list[SourceItem]:
    """For every item: a new source, opened at the position after it, gives exactly the items that follow."""
    whole = read(make(), position_before)
    for number, item in enumerate(whole):
        assert read(make(), item.position) == whole[number + 1 :]
    return whole


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "reviews.jsonl"


# JSON Lines


def test_each_line_is_a_numbered_value(file: Path) -> None:
    write(file, b'{"id": "a", "n": 1}\n[1, 2]\n"text"\nnull\n')
    items = read(JsonLinesSource(file))
    assert values(items) == [{"id": "a", "n": 1}, [1, 2], "text", None]
    assert [item.ordinal for item in items] == [0, 1, 2, 3]
    assert items[1].position["offset"] == len(b'{"id": "a", "n": 1}\n[1, 2]\n')


ODD = (
    b'\xef\xbb\xbf{"bom": 1}\r\n'
    b"\n"
    b"  \t\r\n"
    b'{"crlf": true}\r\n'
    b'{"broken": \n'
    b'{"n": 123456789012345678901234567890}\n'
    b'{"latin": "\xe9"}\n'
    b'{"separators": "\xe2\x80\xa8\xc2\x85\x0b"}\n'
    b'{"escaped": "\\u0000\\ud800"}\n'
    b'{"nul": "\x00"}\n'
    b"\n"
    b'{"last": "no newline"}'
)


def test_odd_lines(file: Path) -> None:
    items = read(JsonLinesSource(write(file, ODD)))
    assert [item.ordinal for item in items] == list(range(9))
    good = [item.value for item in items if not isinstance(item.value, BadInput)]
    assert good == [
        {"bom": 1},
        {"crlf": True},
        {"n": 123456789012345678901234567890},
        {"escaped": "\0\ud800"},
        {"last": "no newline"},
    ]


def test_a_bad_line_names_its_place_and_reason(file: Path) -> None:
    items = read(JsonLinesSource(write(file, ODD)))
    bad = {item.ordinal: item.value for item in items if isinstance(item.value, BadInput)}
    assert sorted(bad) == [2, 4, 5, 7]
    assert bad[2].where == f"{file}, line 5"
    assert "not JSON" in bad[2].reason
    assert bad[2].raw == '{"broken": '
    assert "not UTF-8: byte 0xe9, number 12 of the line" in bad[4].reason
    assert bad[4].raw == '{"latin": "�"}'
    assert "Invalid control character" in bad[7].reason


def test_reading_goes_on_after_every_item_of_odd_lines(file: Path) -> None:
    write(file, ODD)
    assert len(assert_resumes_everywhere(lambda: JsonLinesSource(file))) == 9


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b'{"a": 1}', b"", b"  ", b"{", b"\xff", b'"\xe2\x82\xac"', b"12", b"\r", b'"' + b"x" * 5000 + b'"']
        ),
        max_size=8,
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)
def test_reading_goes_on_after_every_item(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, last_end: bool
) -> None:
    file = write(tmp_path_factory.mktemp("lines") / "a.jsonl", end.join(lines) + (end if last_end else b""))
    assert_resumes_everywhere(lambda: JsonLinesSource(file))


def test_numbers_json_cannot_bound(file: Path) -> None:
    items = read(JsonLinesSource(write(file, b"9" * 4000 + b"\n" + b"9" * 5000 + b"\n" + b"[" * 100_000 + b"\n1\n")))
    assert items[0].value == 10**4000 - 1
    assert isinstance(items[1].value, BadInput)
    assert "4300" in items[1].value.reason
    assert isinstance(items[2].value, BadInput)
    assert items[2].value.reason == "it is nested too deeply"
    assert len(items[2].value.raw) == 2000
    assert items[3].value == 1


def test_lines_of_many_megabytes(file: Path) -> None:
    texts = ["a" * 9_000_000, "b", "é" * 3_000_000]
    write(file, "\n".join(json.dumps(text, ensure_ascii=False) for text in texts).encode())
    assert values(assert_resumes_everywhere(lambda: JsonLinesSource(file))) == texts


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_empty_file_has_no_records(file: Path, data: bytes) -> None:
    assert read(JsonLinesSource(write(file, data))) == []


def test_more_than_one_batch(file: Path) -> None:
    write(file, b"".join(b'{"n": %d, "pad": "%s"}\n' % (n, b"x" * 100) for n in range(10_000)))
    items = read(JsonLinesSource(file))
    assert [item.value["n"] for item in items] == list(range(10_000))  # type: ignore[index]
    assert read(JsonLinesSource(file), items[6543].position) == items[6544:]


def test_progress_is_in_bytes(file: Path) -> None:
    source = JsonLinesSource(write(file, b"1\n22\n"))
    assert source.total() == 5
    assert source.progress(None) == 0
    assert [source.progress(item.position) for item in read(source)] == [2, 5]
    assert JsonLinesSource(file.with_name("gone")).total() is None
    assert source.describe() == str(file)


# Files that change


def test_a_file_that_has_grown_is_read_on(file: Path) -> None:
    write(file, b"1\n2\n")
    first = read(JsonLinesSource(file))
    write(file, b"1\n2\n3\n{\n")
    second = read(JsonLinesSource(file), first[-1].position)
    assert [(item.ordinal, item.position["line"]) for item in second] == [(2, 3), (3, 4)]
    assert second == read(JsonLinesSource(file))[2:]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_last_line_gets_its_newline_later(file: Path, newline: bytes) -> None:
    first = read(JsonLinesSource(write(file, b"1\n2")))
    write(file, b"1\n2" + newline)
    assert read(JsonLinesSource(file), first[-1].position) == []
    write(file, b"1\n2" + newline + b"\n{")
    second = read(JsonLinesSource(file), first[-1].position)
    assert second == read(JsonLinesSource(file))[2:]
    assert isinstance(second[0].value, BadInput)
    assert second[0].value.where == f"{file}, line 4"


@pytest.mark.parametrize(("before", "after"), [(b"1\n12", b"1\n123\n"), (b'1\n{"a"', b'1\n{"a": 1}\n')])
def test_a_last_line_that_was_half_written_is_refused(file: Path, before: bytes, after: bytes) -> None:
    first = read(JsonLinesSource(write(file, before)))
    write(file, after)
    with pytest.raises(RestoreError, match="half written"):
        read(JsonLinesSource(file), first[-1].position)


def test_a_shorter_file_is_refused(file: Path) -> None:
    items = read(JsonLinesSource(write(file, b'{"a": 1}\n{"a": 2}\n')))
    write(file, b'{"a": 1}\n')
    with pytest.raises(RestoreError, match=r"up to byte 18 \(line 2\), but the file has only 9 bytes now.*new name"):
        read(JsonLinesSource(file), items[1].position)
    assert values(read(JsonLinesSource(file), items[0].position)) == []


def test_another_file_in_its_place_is_refused(file: Path) -> None:
    items = read(JsonLinesSource(write(file, b'{"a": 1}\n{"a": 2}\n')))
    write(file, b'{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    with pytest.raises(RestoreError, match=r"digest wanted '\w{32}', found '\w{32}'"):
        read(JsonLinesSource(file), items[1].position)
    assert values(read(JsonLinesSource(file), items[0].position)) == [{"a": 3}, {"a": 4}]


def test_the_same_file_elsewhere_is_accepted(file: Path, tmp_path: Path) -> None:
    items = read(JsonLinesSource(write(file, b"1\n2\n")))
    assert values(read(JsonLinesSource(file.rename(tmp_path / "moved.jsonl")), items[0].position)) == [2]


def test_a_file_that_shrinks_while_it_is_read(file: Path) -> None:
    write(file, b'"' + b"x" * 700_000 + b'"\n' + b"1\n" * 300_000)

    async def main() -> None:
        source = JsonLinesSource(file)
        try:
            async for item in await source.open(None):
                if item.ordinal == 0:
                    os.truncate(file, 10)
        finally:
            await source.close()

    with pytest.raises(InputError, match="shrunk to 10 bytes"):
        asyncio.run(main())


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"ordinal": 1},
        {"offset": 2, "ordinal": 1, "line": "1", "tail": ""},
        {"offset": -2, "ordinal": 1, "line": 1, "tail": ""},
        {"offset": True, "ordinal": 1, "line": 1, "tail": ""},
    ],
)
def test_a_position_of_another_source_is_refused(file: Path, position: Position) -> None:
    with pytest.raises(RestoreError, match="Another kind of source"):
        read(JsonLinesSource(write(file, b"1\n2\n")), position)


def test_a_position_without_its_digest_is_refused(file: Path) -> None:
    with pytest.raises(RestoreError, match="wanted None"):
        read(JsonLinesSource(write(file, b"1\n2\n")), {"offset": 2, "ordinal": 1, "line": 1})


# Files that cannot be read


def test_a_missing_file(file: Path) -> None:
    with pytest.raises(InputError, match=r"reviews.jsonl' cannot be opened: No such file"):
        read(JsonLinesSource(file))


def test_a_directory_or_a_pipe_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory"):
        read(JsonLinesSource(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="is a pipe or a device"):
        read(JsonLinesSource(tmp_path / "fifo"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gzip.compress(b"1\n"), "compressed with gzip"),
        ('{"a": 1}\n'.encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04rest", "spreadsheet"),
    ],
    ids=["gzip", "utf-16", "zip"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_file_that_is_no_text(tmp_path: Path, data: bytes, reason: str, suffix: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(open_source(write(tmp_path / f"file{suffix}", data)))


def test_an_error_of_the_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingFile(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sources, "open_regular", lambda path: FailingFile())
    with pytest.raises(InputError, match=r"at byte 0: .*Input/output error"):
        read(JsonLinesSource(file))


# Use


def test_a_source_can_be_opened_again_and_closed_any_time(file: Path) -> None:
    source = JsonLinesSource(write(file, b"1\n2\n3\n"))
    first = read(source, limit=1)
    assert values(read(source, first[0].position)) == [2, 3]

    async def main() -> None:
        await source.close()
        await source.open(None)
        async for _ in await source.open(None):
            break
        await source.close()
        await source.close()

    asyncio.run(main())


def test_cancelling_a_read_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, b"1\n" * 10)
    reading, go_on = threading.Event(), threading.Event()

    def slow(raw: bytes, name: str, line: int) -> object:
        reading.set()
        go_on.wait(10)
        return json.loads(raw)

    monkeypatch.setattr(sources, "read_json", slow)

    async def main() -> None:
        source = JsonLinesSource(file)

        async def consume() -> None:
            async for _ in await source.open(None):
                pass

        task = asyncio.create_task(consume())
        await asyncio.to_thread(reading.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await source.close()
        go_on.set()
        assert len([item async for item in await source.open(None)]) == 10
        await source.close()

    asyncio.run(main())


def test_files_are_read_off_the_event_loop(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def spy(raw: bytes, name: str, line: int) -> object:
        threads.add(threading.current_thread())
        return None

    monkeypatch.setattr(sources, "read_json", spy)
    read(JsonLinesSource(write(file, b"1\n2\n")))
    assert threads
    assert threading.main_thread() not in threads


# CSV


def table(path: Path, text: str) -> Path:
    return write(path.with_suffix(".csv"), text.encode())


def test_rows_are_dicts_of_text(file: Path) -> None:
    path = table(file, 'id,text\r\na,"x, ""y"""\r\nb,\r\n')
    assert values(read(CsvSource(path))) == [{"id": "a", "text": 'x, "y"'}, {"id": "b", "text": ""}]


ODD_ROWS = (
    "\ufeffid,text\r\n"
    "\r\n"
    'a,"one\r\ntwo\n\nthree"\r\n'
    "too short\r\n"
    "b,too,long\r\n"
    '"c"x,stray quote\r\n'
    "d,nul \x00\r\n"
    "\r\n"
    'e,"é\u2028"\r\n'
    "f,last"
)


def test_odd_rows(file: Path) -> None:
    items = assert_resumes_everywhere(lambda: CsvSource(table(file, ODD_ROWS)))
    assert [item.ordinal for item in items] == list(range(7))
    assert [item.value for item in items if not isinstance(item.value, BadInput)] == [
        {"id": "a", "text": "one\r\ntwo\n\nthree"},
        {"id": "d", "text": "nul \0"},
        {"id": "e", "text": "é\u2028"},
        {"id": "f", "text": "last"},
    ]
    bad = [item.value for item in items if isinstance(item.value, BadInput)]
    assert bad[0] == BadInput(
        f"{file.with_suffix('.csv')}, line 7", "the row has 1 values, the header names 2 columns", "too short"
    )
    assert (bad[1].where, bad[1].raw) == (f"{file.with_suffix('.csv')}, line 8", "b,too,long")
    assert "it is not CSV" in bad[2].reason


def test_a_row_that_is_not_utf8(file: Path) -> None:
    path = write(file.with_suffix(".csv"), b'id,text\na,"x\n\xe9"\nb,y\n')
    items = assert_resumes_everywhere(lambda: CsvSource(path))
    assert isinstance(items[0].value, BadInput)
    assert items[0].value == BadInput(
        f"{file.with_suffix('.csv')}, line 2", "it is not UTF-8: byte 0xe9, number 1 of the line", 'a,"x\n�"'
    )
    assert items[1].value == {"id": "b", "text": "y"}


def test_a_quote_that_is_never_closed_does_not_merge_rows(file: Path) -> None:
    items = assert_resumes_everywhere(lambda: CsvSource(table(file, 'id,text\na,"open\nb,"x"\nc,y\n')))
    assert isinstance(items[0].value, BadInput)
    assert values(items)[1:] == [{"id": "c", "text": "y"}]


def test_a_row_that_was_half_written_is_refused_when_it_has_grown(file: Path) -> None:
    items = read(CsvSource(table(file, 'id,text\na,"first\n')))
    assert isinstance(items[0].value, BadInput)
    assert items[0].value.reason == "the file ends within a quoted field"
    assert read(CsvSource(table(file, 'id,text\na,"first\n')), items[0].position) == []
    with pytest.raises(RestoreError, match="half written"):
        read(CsvSource(table(file, 'id,text\na,"first\nb,second"\n')), items[0].position)


def test_large_fields(file: Path) -> None:
    text = "x" * 3_000_000
    path = table(file, f'id,text\na,"{text}"\nb,y\n')
    assert values(assert_resumes_everywhere(lambda: CsvSource(path))) == [
        {"id": "a", "text": text},
        {"id": "b", "text": "y"},
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.text(st.sampled_from('a,"\r\n é\0'), max_size=6), min_size=2, max_size=2), max_size=6))
def test_what_csv_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    items = assert_resumes_everywhere(lambda: CsvSource(path))
    assert values(items) == [{"a": a, "b": b} for a, b in rows]


@pytest.mark.parametrize("header", ["id,id", "id,", "id, ", '"a\nb","a\nb"'])
def test_a_header_must_name_each_column_once(file: Path, header: str) -> None:
    with pytest.raises(InputError, match="header row"):
        read(CsvSource(table(file, f"{header}\n1,2\n")))


@pytest.mark.parametrize("data", [b'id,"text', b"id,\xff\n", b'"a"b,c\n'])
def test_a_header_that_cannot_be_read(file: Path, data: bytes) -> None:
    with pytest.raises(InputError, match="header row"):
        read(CsvSource(write(file.with_suffix(".csv"), data)))


@pytest.mark.parametrize("text", ["", "\n\n", "id,text", "id,text\n\n"])
def test_a_table_without_rows(file: Path, text: str) -> None:
    assert read(CsvSource(table(file, text))) == []


def test_a_changed_header_is_refused(file: Path) -> None:
    items = read(CsvSource(table(file, "id,text\na,b\n")))
    with pytest.raises(RestoreError, match=r"had the columns \['id', 'text'\].*has \['id', 'next'\] now"):
        read(CsvSource(table(file, "id,next\na,b\nc,d\n")), items[0].position)


def test_a_table_that_has_grown_is_read_on(file: Path) -> None:
    items = read(CsvSource(table(file, "id,text\na,b")))
    path = table(file, "id,text\na,b\nc,d\n")
    assert read(CsvSource(path), items[-1].position) == read(CsvSource(path))[1:]


# Standard input


@contextlib.contextmanager
def piped(monkeypatch: pytest.MonkeyPatch, *writes: bytes) -> Iterator[None]:
    reader, writer = os.pipe()

    def feed() -> None:
        with os.fdopen(writer, "wb", buffering=0) as out:
            for data in writes:
                out.write(data)

    thread = threading.Thread(target=feed)
    thread.start()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield
    thread.join()


def test_standard_input_skips_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'\xef\xbb\xbf1\r\n\n{\n"' + b"x" * 200_000 + b'"\n\n4'
    with piped(monkeypatch, data):
        whole = read(JsonLinesSource("-"))
    assert [item.ordinal for item in whole] == [0, 1, 2, 3]
    assert [item.position["ordinal"] for item in whole] == [1, 2, 3, 4]
    assert isinstance(whole[1].value, BadInput)
    assert whole[1].value.where == "standard input, line 3"
    for number, item in enumerate(whole):
        with piped(monkeypatch, data):
            assert read(JsonLinesSource("-"), item.position) == whole[number + 1 :]


def test_standard_input_that_ends_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(monkeypatch, b"1\n"), pytest.raises(RestoreError, match=r"has read 2 records .* only 1 came"):
        read(JsonLinesSource("-"), {"ordinal": 2})


def test_standard_input_that_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(monkeypatch, b"1\n2\n"):
        items = read(JsonLinesSource("-"))
    with piped(monkeypatch, b"1\n3\n4\n"), pytest.raises(RestoreError, match="Record 2 of standard input"):
        read(JsonLinesSource("-"), items[1].position)


def test_a_last_line_on_standard_input_may_get_its_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(monkeypatch, b"1\n2"):
        items = read(JsonLinesSource("-"))
    with piped(monkeypatch, b"1\n2\r\n3\n"):
        assert values(read(JsonLinesSource("-"), items[1].position)) == [3]


def test_what_was_read_from_a_file_can_be_piped_in(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = read(JsonLinesSource(write(file, b"1\n2\n3\n")))
    with piped(monkeypatch, file.read_bytes()):
        assert values(read(JsonLinesSource("-"), items[1].position)) == [3]


def test_compressed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped(monkeypatch, gzip.compress(b"1\n")), pytest.raises(InputError, match=r"'standard input' .* gzip"):
        read(JsonLinesSource("-"))


def test_standard_input_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n2")))
    assert values(read(JsonLinesSource("-"))) == [1, 2]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="closed"):
        read(JsonLinesSource("-"))


def test_a_line_comes_as_soon_as_it_is_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()

    async def main() -> list[object]:
        source, got = JsonLinesSource("-"), []
        os.write(writer, b"0\n")
        async for item in await source.open(None):
            got.append(item.value)
            if len(got) == 3:
                break
            os.write(writer, b"%d\n" % len(got))
        await source.close()
        return got

    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert asyncio.run(asyncio.wait_for(main(), 10)) == [0, 1, 2]
        os.close(writer)


IDLE = """
import asyncio
from dalsegno.runners.sources import JsonLinesSource

async def main():
    items = await JsonLinesSource("-").open(None)
    print((await anext(items)).value, flush=True)
    waiting = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0.1)
    waiting.cancel()

asyncio.run(main())
print("stopped", flush=True)
"""


@pytest.mark.slow
def test_an_idle_pipe_does_not_keep_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", IDLE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"1\n2")
        process.stdin.flush()
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read().split() == [b"1", b"stopped"]
        assert process.stderr is not None
        assert process.stderr.read() == b""


# Iterables


async def arriving(*records: object) -> AsyncIterator[object]:
    for record in records:
        await asyncio.sleep(0)
        yield record


class Feed:
    def __init__(self, *records: object) -> None:
        self.records = records

    def __aiter__(self) -> AsyncIterator[object]:
        return arriving(*self.records)


@pytest.mark.parametrize(
    "make", [lambda: IterableSource(["a", "b", "c"]), lambda: AsyncIterableSource(Feed("a", "b", "c"))]
)
def test_iterables_skip_what_was_read(make: Any) -> None:
    items = assert_resumes_everywhere(make)
    assert items == [SourceItem(n, value, {"ordinal": n + 1}) for n, value in enumerate("abc")]
    with pytest.raises(RestoreError, match=r"has read 4 records of an .*iterable .* only 3 came"):
        read(make(), {"ordinal": 4})
    with pytest.raises(RestoreError, match="Another kind of source"):
        read(make(), {"offset": 4})


def test_an_iterable_can_say_how_many() -> None:
    assert IterableSource([1, 2]).total() == 2
    assert IterableSource(iter([1, 2])).total() is None
    assert AsyncIterableSource(Feed()).total() is None
    assert IterableSource([1, 2]).progress({"ordinal": 1}) == 1


@pytest.mark.parametrize("make", [lambda: IterableSource(iter([1, 2])), lambda: AsyncIterableSource(arriving(1, 2))])
def test_a_one_shot_iterator_is_read_once(make: Any) -> None:
    source = make()
    assert len(read(source)) == 2
    with pytest.raises(InputError, match="only once"):
        read(source)


def test_an_iterable_that_fails() -> None:
    def records() -> Iterator[int]:
        yield 1
        raise ValueError("boom")

    async def later() -> AsyncIterator[int]:
        yield 1
        raise InputError("the topic is gone")

    with pytest.raises(InputError, match=r"failed before record 2 with ValueError\('boom'\)"):
        read(IterableSource(records()))
    with pytest.raises(InputError, match="the topic is gone"):
        read(AsyncIterableSource(later()))


def test_closing_closes_an_async_generator() -> None:
    closed = []

    async def records() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    assert values(read(AsyncIterableSource(records()), limit=1)) == [1]
    assert closed == [True]


def test_a_long_iterable_leaves_the_loop_room() -> None:
    async def main() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(beat())
        async for _ in await IterableSource(range(50_000)).open({"ordinal": 30_000}):
            pass
        task.cancel()
        return beats

    assert asyncio.run(main()) >= 20


# From a specification


def test_open_source(file: Path) -> None:
    own = IterableSource([])
    assert open_source(own) is own
    assert isinstance(open_source("a.jsonl"), JsonLinesSource)
    assert isinstance(open_source(file), JsonLinesSource)
    assert isinstance(open_source("A.CSV"), CsvSource)
    assert open_source("-").describe() == "standard input"
    assert isinstance(open_source([1]), IterableSource)
    assert isinstance(open_source(n for n in range(3)), IterableSource)
    assert isinstance(open_source(Feed()), AsyncIterableSource)
    assert values(read(open_source(write(file.with_suffix(".tsv"), b"a\tb\n1,0\t2\n")))) == [{"a": "1,0", "b": "2"}]


@pytest.mark.parametrize("spec", [None, 3, b"path", {"id": 1}])
def test_what_is_no_source(spec: object) -> None:
    with pytest.raises(DefinitionError, match="A source cannot be made of"):
        open_source(spec)


def test_an_empty_path_is_no_source() -> None:
    with pytest.raises(DefinitionError, match="The path of the source is empty"):
        open_source("")
