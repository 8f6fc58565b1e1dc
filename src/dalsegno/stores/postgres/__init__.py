"""``postgresql://user@host/database``: task action states in a PostgreSQL database, version 12 or later.

* **Durable**: when `put` returns, its records are committed, also where the server's ``synchronous_commit`` is off.
* **Owned**: the epoch of the worker is checked in the statement that writes. Who opens a job displaces the one before
  it, whose next write raises `FencedError`; a session that hangs keeps nobody out.
* **Certain**: each write carries its number. When the answer to a commit was lost, the same write is sent again on a
  new connection, and takes place only if the number says that it has not taken place before.
* **Pooled**: nothing is kept in a session between transactions, so pgbouncer in transaction mode may be in between.

Modules: ``settings`` reads the URL, ``schema`` makes and migrates the tables, ``link`` is a connection that comes back,
``job`` the statements of an owner, ``store`` the store, ``inspector`` the way in for outsiders.
"""

from __future__ import annotations

from dalsegno.stores.postgres.settings import Settings
from dalsegno.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore", "Settings"]
