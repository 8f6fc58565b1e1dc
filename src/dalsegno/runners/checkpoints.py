"""Checkpoints of the local runner: one SQLite file per job.

A checkpoint is the consistent snapshot that a restart goes on from: how far the input is read, the short-term memory of
every key that has any, as of its last finished message, the *inbox* (messages that were read and are not finished), and
how long the sink's output is. It is incremental: only what changed since the last one is written, in one transaction.

`CheckpointFile` is synchronous. `commit` runs in a thread; reads use a connection of their own and never wait for it.

With a cipher, every column that holds values is sealed, see `sealed_rows`. A file is encrypted from its beginning or
not at all; the table ``seal`` says that it is, and its one row, that the key is the right one.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dalsegno.cipher import PayloadCipher, needs_cipher
from dalsegno.core import codec
from dalsegno.errors import RecordError, RestoreError, StoreError
from dalsegno.memory import EMPTY, Node, to_json
from dalsegno.runners import kept_rows
from dalsegno.runners.checkpoint_rows import RowReader
from dalsegno.runners.kept_rows import FinishedMessage, write
from dalsegno.runners.sealed_rows import Row, SealedRows
from dalsegno.stores.sqlite_schema import text, transaction

_APPLICATION_ID = 0x44532E43  # "DS.C"
_VERSION = 3
_SCHEMA = """
CREATE TABLE job (name TEXT NOT NULL, agent TEXT NOT NULL, store TEXT NOT NULL);
CREATE TABLE checkpoint (
    number INTEGER NOT NULL, read INTEGER NOT NULL, position TEXT, sink TEXT NOT NULL
);
CREATE TABLE memory (key BLOB PRIMARY KEY, tree BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE inbox (ordinal INTEGER PRIMARY KEY, key BLOB NOT NULL, content BLOB NOT NULL, parked TEXT);
CREATE TABLE bad_input (ordinal INTEGER PRIMARY KEY, place TEXT NOT NULL, reason TEXT NOT NULL, raw BLOB NOT NULL);
"""
_STEPS = {
    # The ids of messages, where they are not the numbers of their input records. A message has no declared type, so
    # that text which SQLite cannot hold as TEXT is kept too.
    2: """
ALTER TABLE checkpoint ADD COLUMN ids TEXT NOT NULL DEFAULT 'position';
ALTER TABLE checkpoint ADD COLUMN numbered INTEGER NOT NULL DEFAULT 0;
ALTER TABLE inbox ADD COLUMN message;
CREATE INDEX inbox_of_message ON inbox (key, message) WHERE message IS NOT NULL;
CREATE TABLE covered (key BLOB NOT NULL, message NOT NULL, content TEXT);
""",
    3: kept_rows.SCHEMA,
}
"""What makes each version of the file of the one before it."""
_SEALED_AS = {"retained": "covered"}


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """What a job's checkpoints belong to; none of it may change between runs."""

    name: str
    agent: str
    store: str
    """The identity of the task action store, see `TaskActionStore.identity`."""


@dataclass(frozen=True, slots=True)
class InboxEntry:
    """A message that was read and is not finished. *key* is canonical, *tree* its content; *parked* says why.

    *message* is its id, None if that is the ordinal.
    """

    ordinal: int
    key: bytes
    tree: Any
    parked: str | None = None
    message: str | None = None


class CoveredMessage(NamedTuple):
    """A message that was finished since the checkpoint before; *content* is the fingerprint of its content."""

    key: bytes
    message: str
    content: str | None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """An input record that could not be read and was set aside."""

    ordinal: int
    place: str
    reason: str
    raw: str


@dataclass(slots=True)
class Checkpoint:
    """What changed since the last checkpoint, and where input and sink are now."""

    number: int
    read: int
    """How many input records were read."""
    position: dict[str, Any] | None
    sink: dict[str, Any]
    memory: dict[bytes, Node] = field(default_factory=dict)
    inbox: list[InboxEntry] = field(default_factory=list)
    """Entries that are new or changed."""
    finished: list[int] = field(default_factory=list)
    """Ordinals of inbox entries that are finished."""
    bad_input: list[BadRecord] = field(default_factory=list)
    ids: str = "position"
    """How the ids of messages are made, see `dalsegno.runners.message_ids`."""
    numbered: int = 0
    """Numbers below this one were given to messages as ids, where ids are claimed by content."""
    covered: list[CoveredMessage] = field(default_factory=list)
    """The messages that this checkpoint is the first to cover, where their ids do not tell."""
    retained: list[CoveredMessage] | None = None
    """All that it is the first to cover, if they are kept in the store for now."""
    keep: int = 1
    """So many checkpoints, with this one, can be restored from now on."""
    taken: float = 0.0
    """When it was taken, in seconds since 1970."""
    pruned: int = 0
    """The checkpoint that the store had been pruned through before this one."""


class CheckpointInfo(NamedTuple):
    """A checkpoint that can be restored."""

    number: int
    taken: datetime | None
    """When it was taken, None if a release took it that did not note this."""
    read: int
    """How many input records were read by then."""


class CheckpointFile:
    """The checkpoints of one job in the file *path*, or in memory if it is None; then closing keeps them.

    Raises `RestoreError` when the file belongs to something else, `RecordError` when it is encrypted and there is no
    *cipher*, or the wrong one, or the other way round, and `StoreError` when SQLite fails.
    """

    def __init__(self, path: Path | None, cipher: PayloadCipher | None = None) -> None:
        self._path = path
        self._cipher = cipher
        self._sealed: SealedRows | None = None
        self._rows = RowReader(f"the checkpoint file {path or 'in memory'}")
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._keeps = True
        """Whether there may be something of earlier checkpoints."""

    def open(self, job: JobIdentity) -> Checkpoint | None:
        """The last completed checkpoint of *job* (without memory and inbox), None for a new job."""
        with self._lock, self._errors():
            if self._path:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._writer or self._connect()
            self._reader = self._connect() if self._path else self._writer
            self._prepare(self._writer, job)
            rows = self._reader.execute("SELECT number, read, position, sink, ids, numbered FROM checkpoint LIMIT 2")
            opened = self._opened("checkpoint", rows.fetchall())
            inbox = self._reader.execute("SELECT min(ordinal), max(ordinal) FROM inbox").fetchone()
            head = self._rows.head(opened, inbox)
        if head is None:
            return None
        number, read, position, sink, ids, numbered = head
        return Checkpoint(number, read, position, sink, ids=ids, numbered=numbered)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make *checkpoint* the completed one, or leave the last one as it was."""
        rows = _rows(checkpoint)
        if self._sealed is not None:
            rows = {table: self._sealed.seal(_SEALED_AS.get(table, table), rows[table]) for table in rows}
        with self._lock, self._errors():
            connection = self._open(self._writer)
            connection.execute("BEGIN IMMEDIATE")
            try:
                if checkpoint.keep > 1:
                    changed = {*checkpoint.finished, *(entry.ordinal for entry in checkpoint.inbox)}
                    kept_rows.remember(connection, [*checkpoint.memory], changed)
                connection.execute("DELETE FROM checkpoint")
                connection.execute("INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?)", rows["checkpoint"][0])
                write(connection, "INSERT OR REPLACE INTO memory VALUES {}", rows["memory"])
                write(
                    connection,
                    "DELETE FROM memory WHERE (key) IN (VALUES {})",
                    [(key,) for key, node in checkpoint.memory.items() if not node.fields],
                )
                write(
                    connection,
                    "DELETE FROM inbox WHERE (ordinal) IN (VALUES {})",
                    [(ordinal,) for ordinal in checkpoint.finished],
                )
                write(
                    connection,
                    "INSERT OR REPLACE INTO inbox (ordinal, key, message, content, parked) VALUES {}",
                    rows["inbox"],
                )
                connection.execute("DELETE FROM covered")
                write(connection, "INSERT INTO covered VALUES {}", rows["covered"])
                write(connection, "INSERT OR REPLACE INTO bad_input VALUES {}", rows["bad_input"])
                connection.execute("DELETE FROM taken WHERE number <= ?", (checkpoint.number - checkpoint.keep,))
                times = (checkpoint.number, checkpoint.taken, checkpoint.pruned)
                connection.execute("INSERT OR REPLACE INTO taken VALUES (?, ?, ?)", times)
                kept_rows.finish(connection, checkpoint.number, checkpoint.taken, rows["retained"])
                if checkpoint.keep > 1 or self._keeps:
                    kept_rows.trim(connection, checkpoint.number - checkpoint.keep + 1)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self._keeps = checkpoint.keep > 1 or checkpoint.retained is not None

    def memory(self, key: bytes) -> Node:
        """The short-term memory of *key* in the last completed checkpoint."""
        with self._reading() as connection:
            rows = connection.execute("SELECT key, tree FROM memory WHERE key = ?", (key,)).fetchall()
            nodes = [self._rows.memory(row)[1] for row in self._opened("memory", rows)]
        return nodes[0] if nodes else EMPTY

    def memories(self) -> Iterator[tuple[bytes, Node]]:
        """Every key that has something in its memory, in the order of the keys' canonical bytes."""
        with self._reading() as connection:
            rows = connection.execute("SELECT key, tree FROM memory ORDER BY key").fetchall()
            opened = self._opened("memory", rows)
        for row in opened:
            key, node = self._rows.memory(row)
            if node.fields:  # earlier releases kept empty ones
                yield key, node

    def inbox(self, after: int, limit: int, key: bytes | None = None) -> Sequence[InboxEntry]:
        """Up to *limit* unfinished messages, of *key* if that is given, with an ordinal beyond *after*, in order."""
        return self._inbox("ordinal > ?1 AND (?2 IS NULL OR key = ?2) ORDER BY ordinal LIMIT ?3", (after, key, limit))

    def find_in_inbox(self, key: bytes, message: str) -> InboxEntry | None:
        """The message of *key* with this id, if it was unfinished at the last completed checkpoint.

        Only for messages whose ids are not their ordinals.
        """
        found = self._inbox("message IS NOT NULL AND key = ? AND message = ?", (key, text(message)))
        return found[0] if found else None

    def _inbox(self, condition: str, values: tuple[Any, ...]) -> Sequence[InboxEntry]:
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT ordinal, key, message, content, parked FROM inbox WHERE {condition}", values
            ).fetchall()
            return [InboxEntry(*self._rows.inbox(row)) for row in self._opened("inbox", rows)]

    def end_of_inbox(self) -> int:
        """An ordinal beyond those of all messages that were unfinished at the last completed checkpoint."""
        with self._reading() as connection:
            return int(connection.execute("SELECT ifnull(max(ordinal) + 1, 0) FROM inbox").fetchone()[0])

    def in_inbox(self, ordinal: int) -> bool:
        """Whether the message *ordinal* was unfinished at the last completed checkpoint."""
        with self._reading() as connection:
            return connection.execute("SELECT 1 FROM inbox WHERE ordinal = ?", (ordinal,)).fetchone() is not None

    def covered(self) -> Sequence[CoveredMessage]:
        """What the last completed checkpoint was the first to cover, where the ids of messages do not tell."""
        with self._reading() as connection:
            rows = connection.execute("SELECT key, message, content FROM covered").fetchall()
            return [CoveredMessage(*self._rows.covered(row)) for row in self._opened("covered", rows)]

    # What is kept beside the last checkpoint.

    def kept(self) -> Sequence[CheckpointInfo]:
        """The checkpoints that can be restored, oldest first. Needs no cipher. Raises `StoreError` for no file."""
        with self._looking() as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            older = "UNION ALL SELECT number, read FROM kept" if "kept" in tables else ""
            at = "(SELECT at FROM taken WHERE taken.number = c.number)" if "taken" in tables else "NULL"
            rows = connection.execute(
                f"SELECT number, {at}, read FROM (SELECT number, read FROM checkpoint {older}) AS c ORDER BY number"
            ).fetchall()
        return [
            CheckpointInfo(number, None if not at else datetime.fromtimestamp(at, UTC), read)
            for number, at, read in rows
        ]

    def kept_of(self, job: str) -> Sequence[CheckpointInfo]:
        """The same, if the file is that of *job*; raises `RestoreError` otherwise."""
        with self._looking() as connection:
            names = [name for (name,) in connection.execute("SELECT name FROM job")]
        if names and names != [job]:
            raise RestoreError(f"{self._path} holds the checkpoints of job {names[0]!r}, not of {job!r}")
        return self.kept()

    def kept_head(self, number: int) -> Checkpoint:
        """The kept checkpoint *number*, without memory and inbox."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT number, read, position, sink, ids, numbered FROM kept WHERE number = ?", (number,)
            ).fetchall()
            head = self._rows.head(self._opened("checkpoint", rows), (None, None))
        assert head is not None
        return Checkpoint(*head[:4], ids=head[4], numbered=head[5])

    def go_back(self, number: int) -> None:
        """Make the kept checkpoint *number* the last completed one, or leave everything as it was."""
        with self._writing() as connection:
            kept_rows.go_back(connection, number)

    def oldest(self) -> int:
        """The number of the oldest checkpoint that can be restored; there is one."""
        with self._reading() as connection:
            return kept_rows.oldest(connection)

    def pruned_before(self, last: Checkpoint) -> int:
        """The checkpoint that the store had been pruned through when *last* was taken."""
        with self._reading() as connection:
            row = connection.execute("SELECT pruned FROM taken WHERE number = ?", (last.number,)).fetchone()
        return last.number - 1 if row is None else int(row[0])

    def retains(self) -> bool:
        """Whether messages that a checkpoint covers are kept in the store."""
        with self._reading() as connection:
            return connection.execute("SELECT 1 FROM finished WHERE NOT pruned LIMIT 1").fetchone() is not None

    def first_finished(self, limit: int) -> Sequence[FinishedMessage]:
        """Up to *limit* messages that are covered and kept in the store, those first that were covered first."""
        with self._reading() as connection:
            return [self._finished(row) for row in kept_rows.first_finished(connection, limit)]

    def find_finished(self, key: bytes, message: str) -> FinishedMessage | None:
        """A message that is covered and may be kept in the store."""
        with self._reading() as connection:
            row = kept_rows.find_finished(connection, key, message)
        return None if row is None else self._finished(row)

    def mark_pruned(self, messages: Sequence[FinishedMessage]) -> None:
        """The store does not have *messages* any more."""
        with self._writing() as connection:
            kept_rows.mark_pruned(connection, [each.n for each in messages], kept_rows.oldest(connection))

    def covered_since(self, oldest: int) -> dict[int, list[CoveredMessage]]:
        """What each checkpoint after *oldest* and itself was the first to cover, where that is kept."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT number, key, message, content FROM finished WHERE number >= ? ORDER BY n", (oldest,)
            ).fetchall()
            opened = self._opened("covered", [row[1:] for row in rows])
        found: dict[int, list[CoveredMessage]] = {}
        for (number, *_), row in zip(rows, opened, strict=True):
            found.setdefault(number, []).append(CoveredMessage(*self._rows.covered(row)))
        return found

    def _finished(self, row: Row) -> FinishedMessage:
        key, message, _ = self._rows.covered((row[3], row[4], None))
        return FinishedMessage(row[0], row[1], row[2], key, message, bool(row[5]))

    def set_ids(self, ids: str) -> None:
        """From now on ids are made in another way; the job has nothing in flight."""
        with self._lock, self._errors():
            self._open(self._writer).execute("UPDATE checkpoint SET ids = ?", (ids,))

    def set_sink(self, sink: dict[str, Any]) -> None:
        """From now on the last completed checkpoint has this state of the sink."""
        with self._lock, self._errors():
            connection = self._open(self._writer)
            row = connection.execute("SELECT number, read, position, sink FROM checkpoint").fetchone()
            changed = [(*row[:2], None, json.dumps(sink))]
            if self._sealed is not None:
                changed = self._sealed.seal("checkpoint", changed)
            connection.execute("UPDATE checkpoint SET sink = ?", (changed[0][3],))

    def begin_run(self) -> bool:
        """Note that a run begins; whether the last one that was noted did not come to `end_run`."""
        with self._lock, self._errors():
            connection = self._open(self._writer)
            # Not in the schema: files that have no such table are fine as they are.
            connection.execute("CREATE TABLE IF NOT EXISTS running (one INTEGER PRIMARY KEY)")
            return connection.execute("INSERT OR IGNORE INTO running VALUES (1)").rowcount == 0

    def end_run(self) -> None:
        with self._lock, self._errors():
            self._open(self._writer).execute("DELETE FROM running")

    def bad_input(self) -> Sequence[BadRecord]:
        """The input records that were set aside."""
        with self._reading() as connection:
            rows = connection.execute("SELECT ordinal, place, reason, raw FROM bad_input ORDER BY ordinal").fetchall()
            return [BadRecord(*self._rows.bad_input(row)) for row in self._opened("bad_input", rows)]

    def close(self) -> None:
        if self._path is None:
            return
        with self._lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._reader = self._writer = None
            self._sealed = None
            self._keeps = True

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path or ":memory:", isolation_level=None, check_same_thread=False, timeout=30
        )
        if self._path:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _prepare(self, connection: sqlite3.Connection, job: JobIdentity) -> None:
        application, version, tables = (
            connection.execute(query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if application == 0 and tables == 0:
            connection.executescript(
                f"BEGIN IMMEDIATE; PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_VERSION}; "
                f"{_SCHEMA} {' '.join(_STEPS.values())} COMMIT;"
            )
            self._begin_job(connection, job)
            return
        if application != _APPLICATION_ID:
            raise RestoreError(
                f"{self._path} is an SQLite database, but not one of this library's checkpoint files; give another path"
            )
        if version > _VERSION:
            raise RestoreError(
                f"{self._path} has checkpoint format {version}; this version of dalsegno reads up to {_VERSION}: "
                "install the version that wrote it, or a newer one"
            )
        self._check_job(connection, job)
        for number in range(version + 1, _VERSION + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {_STEPS[number]} PRAGMA user_version={number}; COMMIT;")

    def _check_job(self, connection: sqlite3.Connection, job: JobIdentity) -> None:
        row = connection.execute("SELECT name, agent, store FROM job").fetchone()
        if row is None:  # the process ended between the two statements that make a new file
            self._begin_job(connection, job)
            return
        found = JobIdentity(*row)
        if found.name != job.name:
            raise RestoreError(
                f"{self._path} holds the checkpoints of job {found.name!r}, not of {job.name!r}; give another path"
            )
        if found.agent != job.agent:
            raise RestoreError(
                f"job {job.name!r} belongs to the agent {found.agent!r}, but {job.agent!r} was given. If the class was "
                f"renamed, keep its recorded name: class {job.agent}(Agent, name={found.agent!r}); for another agent, "
                "choose another job name"
            )
        if found.store != job.store:
            raise RestoreError(
                f"the checkpoints of job {job.name!r} in {self._path} belong to another task action store, so what "
                "happened since the last checkpoint is not known. Put the store back, or delete both and start afresh"
            )
        self._check_seal(connection)

    def _begin_job(self, connection: sqlite3.Connection, job: JobIdentity) -> None:
        row = (job.name, job.agent, job.store)
        if self._cipher is None:
            connection.execute("INSERT INTO job VALUES (?, ?, ?)", row)
            return
        self._sealed = SealedRows(self._cipher, job.name, job.store, self._where(job.name))
        (proof,) = self._sealed.seal("seal", [("",)])
        # In one transaction, so that no crash leaves the job without its seal.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO job VALUES (?, ?, ?)", row)
        connection.execute("CREATE TABLE seal (proof BLOB NOT NULL)")
        connection.execute("INSERT INTO seal VALUES (?)", proof)
        connection.execute("COMMIT")

    def _check_seal(self, connection: sqlite3.Connection) -> None:
        """Raise `RecordError` unless the file is encrypted with this cipher, or there is neither seal nor cipher."""
        name, store = connection.execute("SELECT name, store FROM job").fetchone() or ("", "")
        where = self._where(name)
        sealed = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'seal'").fetchone() is not None
        if sealed and self._cipher is None:
            raise needs_cipher(where)
        if self._cipher is None:
            return
        if not sealed:
            raise RecordError(
                f"{where} is not encrypted, but this run was given a cipher; nothing was read or changed. Run the job "
                "as it was begun, without the cipher, or give a job with the cipher a new name"
            )
        self._sealed = SealedRows(self._cipher, name, store, where)
        self._sealed.open("seal", connection.execute("SELECT proof FROM seal").fetchall() or [(b"",)])

    def _where(self, job: str) -> str:
        return f"the checkpoint file {self._path or 'in memory'} of job {job!r}"

    def _opened(self, table: str, rows: Sequence[Row]) -> Sequence[Row]:
        return rows if self._sealed is None else self._sealed.open(table, rows)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to read with; in memory it is the writer's, which must not be used while it commits."""
        with self._errors(), nullcontext() if self._path else self._lock:
            if self._reader is None and self._path and self._path.exists():
                with closing(
                    sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
                ) as connection:
                    self._check_seal(connection)
                    yield connection
            else:
                yield self._open(self._reader)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction of the writer's connection."""
        with self._lock, self._errors(), transaction(self._open(self._writer)):
            yield self._open(self._writer)

    @contextmanager
    def _looking(self) -> Iterator[sqlite3.Connection]:
        """A connection to look with, also from another process than the one that runs the job; its cipher or not."""
        if self._path is None:
            with self._reading() as connection:
                yield connection
            return
        if not self._path.exists():
            raise StoreError(f"there is no checkpoint file {self._path}: the job has not run yet, or has another one")
        with (
            self._errors(),
            closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as connection,
        ):
            if connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
                raise RestoreError(f"{self._path} is not one of this library's checkpoint files; give another path")
            yield connection

    def _open(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise StoreError("the checkpoint file is not open")
        return connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            place = self._path or "the checkpoints in memory"
            raise StoreError(f"the checkpoint file {place} failed ({type(error).__name__}: {error})") from error


def _rows(checkpoint: Checkpoint) -> dict[str, Sequence[Row]]:
    """What a checkpoint adds to each table, or changes in it."""
    position = json.dumps(checkpoint.position) if checkpoint.position is not None else None
    return {
        "checkpoint": [
            (
                checkpoint.number,
                checkpoint.read,
                position,
                json.dumps(checkpoint.sink),
                checkpoint.ids,
                checkpoint.numbered,
            )
        ],
        "memory": [(key, codec.dumps(to_json(node))) for key, node in checkpoint.memory.items() if node.fields],
        "inbox": [_inbox_row(entry) for entry in checkpoint.inbox],
        "covered": [(key, text(message), content) for key, message, content in checkpoint.covered],
        "retained": [(key, text(message), content) for key, message, content in checkpoint.retained or ()],
        "bad_input": [
            (bad.ordinal, bad.place, bad.reason, bad.raw.encode("utf-8", "surrogatepass"))
            for bad in checkpoint.bad_input
        ],
    }


def _inbox_row(entry: InboxEntry) -> Row:
    message = None if entry.message is None else text(entry.message)
    return (entry.ordinal, entry.key, message, codec.dumps(entry.tree), entry.parked)
