"""What the SQLite file of a store is: its tables, how it is opened, created and migrated, and what its errors mean.

Tables: ``jobs`` has the epoch, the owner and the latest pruned checkpoint of each job; ``records`` has the records in
the order in which they were put; ``decisions`` what was decided about them from outside, since schema 2.
``application_id`` says that it is a store, ``user_version`` which schema it has.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from dalsegno.errors import RecordError, StoreError

APPLICATION_ID = 0x44534753
SCHEMA_VERSION = 2
_STEPS = (
    (
        """CREATE TABLE jobs (
            id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, identity TEXT NOT NULL, epoch INTEGER NOT NULL,
            owner TEXT, pid INTEGER, host TEXT, since TEXT, pruned_through INTEGER NOT NULL)""",
        """CREATE TABLE records (
            n INTEGER PRIMARY KEY, job INTEGER NOT NULL, key BLOB NOT NULL, message TEXT NOT NULL, task TEXT NOT NULL,
            body BLOB NOT NULL)""",
        "CREATE INDEX records_of_message ON records (job, key, message)",
        f"PRAGMA application_id = {APPLICATION_ID}",
    ),
    (
        # AUTOINCREMENT: the number of a decision that was pruned is never given to another one.
        """CREATE TABLE decisions (
            n INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL, key BLOB NOT NULL, message TEXT NOT NULL,
            target TEXT NOT NULL, body BLOB NOT NULL, UNIQUE (job, key, message, target))""",
    ),
)
"""What makes each schema version of the one before it."""
WITH_DECISIONS = 2

BUSY_SECONDS = 30.0
OWNER_SECONDS = 0.5
"""How long `open` waits for an owner that may just be going, before it says who that is."""
LOG_BYTES = 16 * 2**20

_ADVICE = {
    sqlite3.SQLITE_FULL: "nothing of it was written and what is recorded is intact: free some space and start again",
    sqlite3.SQLITE_BUSY: f"another process has held the file for {BUSY_SECONDS:.0f} seconds: end it and start again",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable; SQLite keeps its log beside the file",
    sqlite3.SQLITE_CANTOPEN: "it must be a file, and its folder must be writable; SQLite keeps its log beside the file",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: put a copy of it back, or give the job a new file",
    sqlite3.SQLITE_IOERR: "the disk or the file system failed: see to it and start again, what is recorded is intact",
    sqlite3.SQLITE_TOOBIG: "a record may have up to 1,000,000,000 bytes",
}


Mode = Literal["ro", "rw", "rwc"]


def connect(path: Path, mode: Mode, *, timeout: float = BUSY_SECONDS, options: str = "") -> sqlite3.Connection:
    # Threads take turns at a connection, so SQLite's own check of the creator's thread is in the way.
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}{options}",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
    )


def connect_durably(path: Path, mode: Mode) -> sqlite3.Connection:
    """A connection for writing."""
    connection = connect(path, mode)
    with ExitStack() as undo:
        undo.callback(connection.close)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        undo.pop_all()
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check(connection: sqlite3.Connection, path: Path) -> None:
    # In a transaction, as another process may be creating the tables.
    with transaction(connection, "DEFERRED"):
        schema_version(connection, path)


def schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema of the store that the file holds, 0 if it is empty; raises `RecordError` for anything else."""
    ((application,),) = connection.execute("PRAGMA application_id")
    ((version,),) = connection.execute("PRAGMA user_version")
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master")
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise RecordError(
            f"{path} is an SQLite database of something else (application id {application:#x}, {tables} tables and"
            f" indexes), so nothing is recorded in it: name another file"
        )
    if not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema version {version}; this version of dalsegno reads up to {SCHEMA_VERSION}: install the"
            f" version that wrote it, or a newer one"
        )
    return int(version)


def create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, or bring those of an earlier version up to date, in one transaction."""
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL")
    if mode != "wal":
        raise StoreError(f"{path}: SQLite cannot keep a write-ahead log there (mode {mode!r}): use a local disk")
    with transaction(connection):
        # Another process may have been quicker.
        version = schema_version(connection, path)
        for step in _STEPS[version:]:
            for statement in step:
                connection.execute(statement)
        if version != SCHEMA_VERSION:
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def lock_path(path: Path, job: str) -> Path:
    """The file that the owner of *job* locks. It is empty and stays: a process may be about to lock it."""
    digest = blake2b(job.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return path.with_name(f"{path.name}.{digest}.lock")


def is_running(path: Path, job: str) -> bool:
    """Whether a process owns *job* at this moment.

    The owner's lock is exclusive, so that all it takes to see it is to read the file: nothing is created, two that look
    do not see each other, and a job that starts meanwhile is held up for as long as the reading takes.
    """
    try:
        with closing(connect(lock_path(path, job), "ro", timeout=0)) as lock:
            lock.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        if code(error) == sqlite3.SQLITE_BUSY:
            return True
        if code(error) == sqlite3.SQLITE_CANTOPEN and not lock_path(path, job).exists():
            return False
        raise
    return False


def text(text: str) -> str | bytes:
    """What SQLite keeps exactly for *text*: a BLOB where it has no TEXT, for lone surrogates."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text


def string(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode(errors="surrogatepass")


def code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def patiently(action: Callable[[], object]) -> None:
    """Do *action*; SQLite does not wait by itself for a process that creates or recovers the same file."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


@contextmanager
def errors(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if code(error) == sqlite3.SQLITE_NOTADB:
            raise RecordError(f"{path} is not an SQLite database, so it is left alone: name another file") from error
        advice = _ADVICE.get(code(error), "see the cause")
        raise StoreError(f"{path}: cannot {doing}: {error}; {advice}") from error
    except (OSError, OverflowError) as error:
        raise StoreError(f"{path}: cannot {doing}: {error}") from error
