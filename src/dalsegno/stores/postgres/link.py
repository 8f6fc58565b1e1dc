"""A connection that comes back: what is done on it is done again when the connection is lost, for a bounded time.

So whatever is done must be safe to do twice; the statements of `job` are, by the numbers of their writes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import errors as failures

from dalsegno.errors import DalSegnoError, StoreError
from dalsegno.stores.postgres.settings import Settings

_T = TypeVar("_T")
Connection = psycopg.AsyncConnection[Any]
logger = logging.getLogger("dalsegno.stores")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0

_FOR_NOW = (
    *("starting up", "shutting down", "recovery mode", "not yet accepting", "too many clients", "connection slots"),
    *("too many connections", "server_login_retry", "server login has been failing", "query_wait_timeout"),
)
"""What a server that refuses a connection says when it may take the next one."""
_FOR_GOOD = (
    *("FATAL:", "certificate", "SSL was required", "does not support SSL", "no password supplied", "invalid sslmode"),
    *("authentication failed", "SASL", "invalid port", "invalid connection option"),
)
"""What tells that the next attempt to connect would fail as well; the error of a connection has no code."""

_ADVICE: tuple[tuple[type[psycopg.Error], str], ...] = (
    (failures.DiskFull, "nothing of it was written and what is recorded is intact: free some space and start again"),
    (
        failures.ConfigurationLimitExceeded,
        "nothing of it was written: raise the limit of the server and start again",
    ),
    (
        failures.InsufficientPrivilege,
        "grant the role what it needs, see 'Use PostgreSQL' in the documentation",
    ),
    (failures.ReadOnlySqlTransaction, "the server or the role may only read: name the primary server"),
    (failures.UndefinedTable, "its tables are gone: put them back, or start the job anew"),
)


class Link:
    """One connection of a store. One at a time uses it; the others wait."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def do(self, what: str, work: Callable[[Connection], Awaitable[_T]], patience: float | None = None) -> _T:
        """What *work* gives, which is begun anew on another connection when one is lost.

        Raises `StoreError` when the server does what it is asked for with an error, or cannot be reached for
        *patience* seconds.
        """
        async with self._lock:
            ends = time.monotonic() + (self._settings.patience if patience is None else patience)
            pause = FIRST_PAUSE
            while True:
                try:
                    return await self._once(work)
                except psycopg.Error as error:
                    if time.monotonic() > ends or not self._may_pass(error):
                        raise self._failed(what, error) from error
                    logger.warning("%s: %s, trying again: %s", self._settings, what, said(error))
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _once(self, work: Callable[[Connection], Awaitable[_T]]) -> _T:
        if self._connection is None:
            self._connection = await Connection.connect(**self._settings.connection())
        try:
            return await work(self._connection)
        except DalSegnoError:
            raise
        except BaseException:
            # Whatever state it is in.
            await self._drop()
            raise

    def _may_pass(self, error: psycopg.Error) -> bool:
        if isinstance(error, failures.SerializationFailure | failures.DeadlockDetected):
            return True  # rolled back, for others were at the same rows
        if error.sqlstate is not None:
            # Class 08: connection; 57P: ended by the administrator, by a crash, or not yet ready; 53300: too many.
            return error.sqlstate[:2] == "08" or error.sqlstate in (
                "57P01",
                "57P02",
                "57P03",
                "57P05",
                "53300",
                "25P03",
            )
        if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return False
        text = str(error)
        return any(part in text for part in _FOR_NOW) or not any(part in text for part in _FOR_GOOD)

    def _failed(self, what: str, error: psycopg.Error) -> StoreError:
        return failed(self._settings, what, error)

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        async with self._lock:
            await self._drop()


def failed(settings: Settings, what: str, error: psycopg.Error) -> StoreError:
    """The error of a store whose server answered with *error*."""
    advice = next((text for kind, text in _ADVICE if isinstance(error, kind)), "")
    if not advice and error.sqlstate is None:
        advice = "see that the server runs, that its address is right and that it lets this user in"
    return StoreError(f"{settings}: cannot {what}: {said(error)}" + (f"; {advice}" if advice else ""))


@contextmanager
def mapped(settings: Settings, what: str) -> Iterator[None]:
    """Errors of the driver become `StoreError`."""
    try:
        yield
    except psycopg.Error as error:
        raise failed(settings, what, error) from error


def said(error: psycopg.Error) -> str:
    """What the server or the driver said, in one line."""
    return " ".join((error.diag.message_primary or str(error) or type(error).__name__).split())
