"""Jobs with a cipher: no payload in any file of theirs, the same replay, and one clear error for the wrong cipher."""

from __future__ import annotations

import base64
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dalsegno import (
    AesGcmCipher,
    DefinitionError,
    LocalRunner,
    PayloadCipher,
    RecordError,
    RunnerContext,
    StoreError,
    Unknown,
)
from dalsegno.memory import Leaf, Node
from dalsegno.runners.checkpoints import BadRecord, Checkpoint, CheckpointFile, InboxEntry, JobIdentity
from dalsegno.stores.encrypting import EncryptingStore
from dalsegno.stores.memory import MemoryStore
from tests.children.encrypted import KEY, MARK, OTHER_KEY
from tests.helpers import Scripted, Tools, World, crashed, run

ROOT = Path(__file__).parents[1]
CIPHER = AesGcmCipher(KEY)
SECONDS = 60


def files_with(folder: Path, text: str) -> set[str]:
    """The files of *folder* in which *text* is found, in any of the forms that JSON and base64 give it.

    Not for files that this process has open: SQLite's locks end when any handle of the process is closed.
    """
    forms = [text.encode(), text.lower().encode(), text.encode().hex().encode(), text.encode("utf-16-le")]
    forms += [base64.b64encode(b" " * shift + text.encode())[4:-4] for shift in range(3)]
    return {path.name for path in folder.rglob("*") if any(form in _content(path) for form in forms)}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:  # the log of a database that is closed just now
        return b""


class Command:
    """``dalsegno run`` of the marked agent over *messages* in *folder*."""

    def __init__(self, folder: Path, messages: int) -> None:
        self.folder = folder
        self.kept = folder / ".dalsegno"
        with (folder / "in.jsonl").open("w") as file:
            for n in range(messages):
                text = f"{MARK}input {n}" + " pay" * (n == 7)
                file.write(json.dumps({"n": n, "k": n % 3, "text": text}) + "\n")

    def start(self, cipher: str | None = "cipher", **environment: str) -> subprocess.Popen[str]:
        options = ["--cipher", f"tests.children.encrypted:{cipher}"] if cipher else []
        options += ["--job=job", "--source=in.jsonl", "--sink=out.jsonl", "--key=k", "--on-bad-input=park"]
        options += ["--checkpoint-interval=0.02", "--max-in-flight=2"]
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "dalsegno", "run", "tests.children.encrypted:agent", *options],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
                "ENCRYPTED_OUTSIDE": str(self.folder),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, cipher: str | None = "cipher", **environment: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        with self.start(cipher, **environment) as process:
            output, errors = process.communicate(timeout=SECONDS)
        return process.returncode, output, errors

    def calls(self) -> list[tuple[int, int]]:
        """Number and process of each execution."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [(int(n), int(pid)) for n, pid in map(str.split, lines)]

    def outputs(self) -> list[str]:
        return sorted(json.loads(line)["text"] for line in (self.folder / "out.jsonl").read_text().splitlines())


# --- what lies in the files -----------------------------------------------------------------------------------------


def run_and_search(folder: Path, cipher: str | None) -> set[str]:
    """The files of a job with marked text everywhere that show it, at any of many moments while it runs, and after."""
    command = Command(folder, messages=200)
    with (folder / "in.jsonl").open("a") as file:
        file.write(f"{{{MARK}bad input\n")
    found, logs = set[str](), set[str]()
    with command.start(cipher) as process:
        while process.poll() is None:
            logs |= {path.name for path in command.kept.glob("*-wal")}
            found |= files_with(command.kept, MARK)
        assert process.stderr is not None
        assert process.wait() == 3, process.stderr.read()  # for the bad input
        assert process.stdout is not None
        assert process.stdout.read()
    assert logs == {"job.db-wal", "job.checkpoints.db-wal"}
    assert command.outputs() == sorted(f"{MARK}event {n}" for n in range(200))
    return found | files_with(command.kept, MARK)


@pytest.mark.slow
def test_no_payload_is_in_any_file_while_a_job_runs_and_after(tmp_path: Path) -> None:
    assert run_and_search(tmp_path, "cipher") == set()


@pytest.mark.slow
def test_the_search_finds_payloads_that_are_not_encrypted(tmp_path: Path) -> None:
    assert {"job.checkpoints.db", "job.db-wal", "job.checkpoints.db-wal"} <= run_and_search(tmp_path, None)


def test_no_payload_is_in_the_files_that_a_crash_leaves(tmp_path: Path) -> None:
    """Messages in flight, parked ones and those behind them, with reasons, in the store and in the inbox."""
    world, hanging = World("sqlite", tmp_path), Tools()
    hanging.hang_on = {f"{MARK}hang", f"{MARK}pay"}

    def cannot_tell(what: Any) -> Unknown:
        return Unknown(f"{MARK}reason")

    async def body(value: Any, ctx: RunnerContext) -> Any:
        ctx.short_term_memory.set("last", value["text"])
        await ctx.durable_execute(hanging.call, value["text"], reconcile=cannot_tell)
        return value["text"]

    inputs = [{"k": k, "text": f"{MARK}{what}"} for k, what in ((1, "pay"), (1, "later"), (2, "a"), (3, "hang"))]
    both = lambda: len(hanging.hanging) == 2  # noqa: E731
    crashed(world.runner(Scripted(body), cipher=CIPHER), inputs, world.out, key="k", when=both)
    hanging.hang_on.clear()
    report = run(world.runner(Scripted(body), cipher=CIPHER), inputs, world.out, key="k")
    assert len(report.parked) == 2
    assert all(f"{MARK}reason" in parked.reason for parked in report.parked)
    world.out.unlink()
    assert files_with(tmp_path, MARK) == set()
    with closing(sqlite3.connect(world.checkpoints())) as database:
        assert database.execute("SELECT count(*), count(parked) FROM inbox").fetchone() == (3, 2)


def test_positions_and_digests_of_the_input_are_not_in_clear(tmp_path: Path) -> None:
    """An unkeyed digest of a short text can be guessed."""
    world = World("sqlite", tmp_path)
    (tmp_path / "in.csv").write_text(f"k,{MARK}column\n1,2\n")
    run(world.runner(Scripted(echo), cipher=CIPHER), tmp_path / "in.csv", world.out, key="k")
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("*.db*"))
    assert [clear for clear in (MARK.encode(), b'"tail"', b'"offset"', b'"length"') if clear in stored] == []


async def echo(value: Any, ctx: RunnerContext) -> Any:
    return value


# --- live equals replay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result", [None, "", b"", {"a": (1, {2})}, "x" * 3_000_000, "\0\ud800é😀"], ids=lambda r: repr(r)[:9]
)
def test_a_replay_gives_the_same_values(world: World, tools: Tools, result: Any) -> None:
    seen: list[Any] = []
    tools.results["a"] = result
    tools.fail_on["b"] = LookupError("gone", 7)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        answer = await ctx.durable_execute(tools.call, "a")
        try:
            await ctx.durable_execute(tools.call, "b")
        except LookupError as error:
            seen.append((answer, error.args))
        ctx.short_term_memory.set("answer", answer)
        await ctx.durable_execute(tools.call, "end", effect="idempotent")
        return len(seen)

    tools.hang_on.add("end")
    crashed(world.runner(Scripted(body), cipher=CIPHER), [1], world.out, when=lambda: "end" in tools.hanging)
    tools.hang_on.clear()
    runner = world.runner(Scripted(body), cipher=CIPHER)
    report = run(runner, [1], world.out)
    assert seen[0] == seen[1] == (result, ("gone", 7))
    assert (tools.count("a"), tools.count("b"), report.calls_replayed) == (1, 1, 2)
    assert dict(runner.memories()) == {None: {"answer": result}}


def test_a_job_in_memory_goes_on_encrypted_in_the_same_process(tools: Tools) -> None:
    async def body(value: Any, ctx: RunnerContext) -> None:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        await ctx.durable_execute(tools.call, value)

    runner = LocalRunner(Scripted(body), job="job", store="memory://", cipher=CIPHER)
    assert run(runner, [1, 2]).messages == 2
    assert run(runner, [1, 2, 3]).messages == 1
    assert dict(runner.memories()) == {None: {"n": 3}}
    assert tools.made == [1, 2, 3]


ODD_KEYS = ["", "\0", "a%", "é", "\ud800", "k" * 5000, 1, "1", True, 1.5, None, ("a", 1), b"\xff", 2**70]


def test_any_key_keeps_its_own_records_and_memory(world: World, tools: Tools) -> None:
    inputs = [(key, n) for n in range(2) for key in ODD_KEYS]

    async def body(value: Any, ctx: RunnerContext) -> Any:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        await ctx.durable_execute(tools.call, ctx.message_id, effect="idempotent")
        return [ctx.message_id, ctx.short_term_memory.get("n")]

    last = str(len(inputs) - 1)
    tools.hang_on.add(last)
    options: Any = {"key": lambda value: value[0]}
    hanging = lambda: last in tools.hanging  # noqa: E731
    crashed(world.runner(Scripted(body), cipher=CIPHER), inputs, world.out, when=hanging, **options)
    tools.hang_on.clear()
    runner = world.runner(Scripted(body), cipher=CIPHER)
    run(runner, inputs, world.out, **options)
    assert sorted(tools.made, key=int) == [*(str(n) for n in range(len(inputs))), last]
    assert [memory for _, memory in runner.memories()] == [{"n": 2}] * len(ODD_KEYS)
    assert sorted(world.outputs()) == sorted([str(n), 1 + (n >= len(ODD_KEYS))] for n in range(len(inputs)))


def test_keys_rotate_between_runs(world: World, tools: Tools) -> None:
    old, both, new = AesGcmCipher({"o": KEY}), AesGcmCipher({"o": KEY, "n": OTHER_KEY}), AesGcmCipher({"n": OTHER_KEY})

    async def body(value: Any, ctx: RunnerContext) -> Any:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + value)
        answers = [await ctx.durable_execute(tools.call, (value, part), effect="idempotent") for part in "ab"]
        return [value, answers, ctx.short_term_memory.get("n")]

    tools.hang_on.add((2, "b"))
    crashed(
        world.runner(Scripted(body), cipher=old, checkpoint_interval=0.01),
        [1, 2],
        world.out,
        when=lambda: bool(tools.hanging),
    )
    with pytest.raises(RecordError, match="encrypted with the key 'o', and the cipher has 'n'"):
        run(world.runner(Scripted(body), cipher=new), [1, 2], world.out)
    tools.hang_on.clear()
    run(world.runner(Scripted(body), cipher=both), [1, 2, 3], world.out)
    assert [tools.count((value, "a")) for value in (1, 2, 3)] == [1, 1, 1]
    assert [output[2] for output in world.outputs()] == [1, 3, 6]
    if world.kind == "memory":
        return
    with pytest.raises(RecordError, match="encrypted with the key 'o', and the cipher has 'n'"):
        list(world.runner(Scripted(body), cipher=new).memories())


# --- the wrong cipher -----------------------------------------------------------------------------------------------


WRONG: list[tuple[PayloadCipher | None, PayloadCipher | None, str]] = [
    (CIPHER, None, r"job 'job' is encrypted, but this job is run without a cipher"),
    (CIPHER, AesGcmCipher(OTHER_KEY), "the key '1' does not fit"),
    (CIPHER, AesGcmCipher({"2": OTHER_KEY}), "encrypted with the key '1', and the cipher has '2'"),
    (None, CIPHER, r"job 'job' is not encrypted, but this run was given a cipher"),
]


@pytest.mark.parametrize("begun", ["nothing", "finished", "in flight"])
@pytest.mark.parametrize(("first", "then", "match"), WRONG, ids=["forgotten", "wrong key", "unknown key", "too many"])
def test_another_cipher_is_refused_before_anything_is_processed_and_nothing_is_lost(
    tmp_path: Path, tools: Tools, begun: str, first: Any, then: Any, match: str
) -> None:
    world = World("sqlite", tmp_path)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value, effect="idempotent")

    inputs = [] if begun == "nothing" else [1, 2]
    if begun == "in flight":
        tools.hang_on.add(2)
        crashed(world.runner(Scripted(body), cipher=first), inputs, world.out, when=lambda: bool(tools.hanging))
        tools.hang_on.clear()
    else:
        run(world.runner(Scripted(body), cipher=first), inputs, world.out)
    made, before = len(tools.made), (world.out.read_bytes() if world.out.exists() else b"")
    for _ in range(2):
        with pytest.raises(RecordError, match=match):
            run(world.runner(Scripted(body), cipher=then), [1, 2, 3], world.out)
        with pytest.raises(RecordError, match=match):
            list(world.runner(Scripted(body), cipher=then).memories())
    assert len(tools.made) == made
    assert (world.out.read_bytes() if world.out.exists() else b"") == before
    run(world.runner(Scripted(body), cipher=first), [1, 2, 3], world.out)
    assert world.outputs() == ["done 1", "done 2", "done 3"]
    assert tools.count(1) == 1


def test_a_plain_store_is_found_where_the_checkpoints_are_gone(tmp_path: Path, tools: Tools) -> None:
    world = World("sqlite", tmp_path)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        return await ctx.durable_execute(tools.call, value)

    tools.hang_on.add(1)
    for first, then, match in ((CIPHER, None, "without a cipher"), (None, CIPHER, "run with a cipher")):
        job = f"job {match}"
        crashed(world.runner(Scripted(body), job, cipher=first), [1], when=lambda: bool(tools.hanging))
        world.checkpoints(job).unlink()
        tools.hanging.clear()
        with pytest.raises(RecordError, match=match):
            run(world.runner(Scripted(body), job, cipher=then), [1])


def test_what_is_no_cipher_is_refused() -> None:
    for wrong in (KEY, "key", AesGcmCipher):
        with pytest.raises(DefinitionError, match="is not a PayloadCipher"):
            LocalRunner(Scripted(echo), job="job", store="memory://", cipher=wrong)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="leaves the checkpoints in clear"):
        LocalRunner(Scripted(echo), job="job", store=EncryptingStore(MemoryStore(), CIPHER))


class FailsLater(AesGcmCipher):
    left = 25

    def encrypt(self, plain: bytes, bound_to: bytes) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the key service is down")
        return super().encrypt(plain, bound_to)


@pytest.mark.parametrize("left", range(0, 30, 2))
def test_a_cipher_that_fails_stops_the_run_and_nothing_is_lost(tmp_path: Path, tools: Tools, left: int) -> None:
    world = World("sqlite", tmp_path)

    async def body(value: Any, ctx: RunnerContext) -> Any:
        ctx.short_term_memory.set("n", ctx.short_term_memory.get("n", 0) + 1)
        await ctx.durable_execute(tools.call, value, effect="idempotent")
        return ctx.short_term_memory.get("n")

    failing = FailsLater(KEY)
    failing.left = left
    inputs = list(range(20))
    with pytest.raises(StoreError, match="the key service is down"):
        run(world.runner(Scripted(body), cipher=failing), inputs, world.out)
    run(world.runner(Scripted(body), cipher=CIPHER), inputs, world.out)
    assert world.outputs() == list(range(1, 21))


# --- the checkpoint file --------------------------------------------------------------------------------------------

IDENTITY = JobIdentity("job", "Agent", "store")


def checkpoint_file(path: Path) -> CheckpointFile:
    file = CheckpointFile(path, CIPHER)
    assert file.open(IDENTITY) is None
    memory = {key: Node({"n": Leaf(key.decode())}) for key in (b"1", b"2")}
    inbox = [InboxEntry(n, b"1", {"n": n}, f"reason {n}") for n in (3, 4)] + [InboxEntry(5, b"1", {}, None)]
    bad = [BadRecord(n, f"line {n}", "damaged", "\ud800raw") for n in (6, 7)]
    file.commit(Checkpoint(1, 8, {"offset": 9}, {"length": 10}, memory, inbox, [], bad))
    return file


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    checkpoint_file(path).close()
    file = CheckpointFile(path, CIPHER)
    found = file.open(IDENTITY)
    assert found is not None
    assert (found.number, found.read, found.position, found.sink) == (1, 8, {"offset": 9}, {"length": 10})
    assert [(e.ordinal, e.key, e.tree, e.parked) for e in file.inbox(-1, 9)] == [
        (3, b"1", {"n": 3}, "reason 3"),
        (4, b"1", {"n": 4}, "reason 4"),
        (5, b"1", {}, None),
    ]
    assert file.bad_input()[0] == BadRecord(6, "line 6", "damaged", "\ud800raw")
    assert [key for key, _ in file.memories()] == [b"1", b"2"]
    file.close()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (
            "UPDATE memory SET tree = (SELECT tree FROM memory WHERE key = CAST('2' AS BLOB))",
            "row 1 of the table 'memory'",
        ),
        (
            "UPDATE inbox SET content = (SELECT content FROM inbox WHERE ordinal = 4)",
            "'content' of row 3, 1 of the table",
        ),
        ("UPDATE inbox SET parked = (SELECT parked FROM inbox WHERE ordinal = 4)", "'parked' of row 3, 1"),
        ("UPDATE inbox SET key = CAST('2' AS BLOB)", "row 3, 2 of the table 'inbox'"),
        ("UPDATE inbox SET content = parked WHERE parked IS NOT NULL", "'content' of row 3, 1"),
        (
            "UPDATE inbox SET content = CAST('{}' AS BLOB)",
            "'content' of row 3, 1 of the table 'inbox' is not encrypted",
        ),
        ("UPDATE bad_input SET raw = reason", "'raw' of row 6 of the table 'bad_input'"),
        ("UPDATE bad_input SET reason = 'damaged'", "'reason' of row 6 of the table 'bad_input' is not encrypted"),
        ("UPDATE checkpoint SET sink = position", "'sink' of row 1, 8 of the table 'checkpoint'"),
        ("UPDATE checkpoint SET read = 7", "'position' of row 1, 7 of the table 'checkpoint'"),
        ("UPDATE checkpoint SET position = substr(position, 1, 30)", "'position' of row 1, 8"),
        ("UPDATE seal SET proof = (SELECT position FROM checkpoint)", "'proof' of row 1 of the table 'seal'"),
        ("DELETE FROM seal", "'proof' of row 1 of the table 'seal'"),
        ("DROP TABLE seal", "is not encrypted, but this run was given a cipher"),
        ("UPDATE memory SET tree = (SELECT proof FROM seal)", "row 1 of the table 'memory'"),
    ],
)
def test_a_payload_in_another_place_is_refused(tmp_path: Path, change: str, where: str) -> None:
    path = tmp_path / "c.db"
    checkpoint_file(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(change)
    with pytest.raises(RecordError, match=where):
        read_all(CheckpointFile(path, CIPHER))


def read_all(file: CheckpointFile) -> None:
    try:
        file.open(IDENTITY)
        file.memory(b"1")
        file.inbox(-1, 9)
        file.bad_input()
    finally:
        file.close()


def test_a_checkpoint_of_another_job_or_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    checkpoint_file(path).close()
    for column in ("name", "store"):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(f"UPDATE job SET {column} = 'other'")
        file = CheckpointFile(path, CIPHER)
        identity = JobIdentity("other", "Agent", "store" if column == "name" else "other")
        with pytest.raises(RecordError, match="cannot be decrypted"):
            file.open(identity)
        file.close()


def test_a_file_whose_making_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    path, failing = tmp_path / "c.db", FailsLater(KEY)
    failing.left = 0
    file = CheckpointFile(path, failing)
    with pytest.raises(StoreError, match="the key service is down"):
        file.open(IDENTITY)
    file.close()
    again = CheckpointFile(path, CIPHER)
    assert again.open(IDENTITY) is None
    again.close()
    plain = CheckpointFile(path)
    with pytest.raises(RecordError, match="without a cipher"):
        plain.open(IDENTITY)
    plain.close()


# --- processes that are killed --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_again_and_again_an_encrypted_job_loses_and_repeats_nothing(tmp_path: Path) -> None:
    command = Command(tmp_path, messages=30)
    key = base64.b64encode(KEY).decode()
    for number, kill in enumerate(("kill-1", "kill-pay", "kill-17-after", "kill-26")):
        (tmp_path / kill).touch()
        code, _, errors = command.run(("cipher", "from_environment")[number % 2], ENCRYPTED_KEY=key)
        assert code == -signal.SIGKILL, errors
        assert not (tmp_path / kill).exists()
        assert files_with(command.kept, MARK) == set()
        for wrong in (None, "wrong"):
            code, _, errors = command.run(wrong)
            assert (code, errors.count("\n")) == (1, 1), errors
            assert "RecordError" in errors
    code, output, errors = command.run("rotated")
    assert code == 3, errors
    assert f"{MARK}reason" in output
    assert files_with(command.kept, MARK) == set()
    made = Counter(n for n, _ in command.calls())
    waiting = {n for n in range(8, 30) if n % 3 == 7 % 3}
    assert command.outputs() == sorted(f"{MARK}event {n}" for n in range(30) if n not in {7, *waiting})
    assert (made[7], made[17]) == (1, 2)
    assert sum(made.values()) - len(made) <= 2 * 4, "only what was in flight at a kill is made again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cipher", "match"),
    [
        ("nothing", "'tests.children.encrypted:nothing' is not a cipher but NoneType"),
        ("agent", "is not a cipher but Marked"),
        ("missing", "has no 'missing'; its ciphers are 'cipher', 'rotated', 'wrong'"),
        ("from_environment", "the environment variable 'ENCRYPTED_KEY' is not set"),
        ("_kill_if", "the cipher 'tests.children.encrypted:_kill_if' cannot be made: TypeError"),
    ],
)
def test_a_wrong_name_of_a_cipher_is_wrong_usage(tmp_path: Path, cipher: str, match: str) -> None:
    code, _, errors = Command(tmp_path, messages=1).run(cipher)
    assert code == 2, errors
    assert match in errors
    assert not (tmp_path / ".dalsegno").exists()
