"""Where task action states are kept: `open_store` chooses by URL.

Modules: ``base`` is the contract, ``memory`` its model, ``sqlite`` the embedded default, ``kafka`` a topic for each
job, ``postgres`` tables of a database, ``wrapping`` the base of stores around another one. A store of another package
registers the scheme of its URLs as an entry point of the group ``dalsegno.stores``; its object takes the URL and
returns a `TaskActionStore`. Whether it keeps the contract is what `dalsegno.testing.stores` tests.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from dalsegno.errors import DefinitionError
from dalsegno.stores.base import Covered, Decision, JobInfo, PruneReport, StoreInspector, TaskActionStore, Worker

__all__ = ["Covered", "Decision", "JobInfo", "PruneReport", "StoreInspector", "TaskActionStore", "Worker", "open_store"]

ENTRY_POINTS = "dalsegno.stores"


def open_store(url: str | TaskActionStore) -> TaskActionStore:
    """The store that *url* names, not yet open; a store is returned as it is.

    ``memory://``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``kafka://host:port/prefix``,
    ``postgresql://user@host/database``, or the scheme of an installed package. Raises `DefinitionError` for
    anything else.
    """
    if isinstance(url, TaskActionStore):
        return url
    if not isinstance(url, str):
        raise DefinitionError(f"a store is a URL or a TaskActionStore, not {url!r} ({type(url).__name__})")
    scheme, separator, rest = url.partition("://")
    shown = _without_password(url)
    if not separator:
        raise DefinitionError(f"{url!r} is not the URL of a store; for a file write {f'sqlite:///{url}'!r}")
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme](url, rest)
    registered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if scheme not in registered:
        known = ", ".join(f"{name}://" for name in sorted({*_BUILT_IN, *registered}))
        raise DefinitionError(f"no store is registered for {shown!r}; there are {known}. Is a package not installed?")
    return _third_party(registered[scheme], url)


def _without_password(url: str) -> str:
    """*url* as a message may show it."""
    return re.sub(r"(?<=://)([^/?#:@]*):[^/?#]*@", r"\1:...@", url.partition("?")[0])


def _memory(url: str, rest: str) -> TaskActionStore:
    from dalsegno.stores.memory import MemoryStore

    if rest:
        raise DefinitionError(f"{url!r}: the memory store has no name; write 'memory://'")
    return MemoryStore()


def _sqlite(url: str, rest: str) -> TaskActionStore:
    from dalsegno.stores.sqlite import SqliteStore

    name = rest.removeprefix("/")
    if name in ("", ":memory:"):
        raise DefinitionError(f"{url!r} names no file; for a store in memory write 'memory://'")
    if name == rest:
        raise DefinitionError(f"{url!r} has two slashes: write 'sqlite:///{rest}', or four for an absolute path")
    if "?" in name:
        raise DefinitionError(
            f"{url!r}: the SQLite store has no options; for a file of that name use SqliteStore(path)"
        )
    return SqliteStore(Path(name).expanduser())


def _kafka(url: str, rest: str) -> TaskActionStore:
    try:
        from dalsegno.stores.kafka import KafkaStore
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "confluent_kafka":
            raise
        raise DefinitionError(
            f"{url.partition('?')[0]!r}: the Kafka store needs the package confluent-kafka: pip install"
            " 'dalsegno[kafka]'"
        ) from error
    return KafkaStore(url)


def _postgres(url: str, rest: str) -> TaskActionStore:
    try:
        from dalsegno.stores.postgres import PostgresStore
    except ImportError as error:  # also psycopg without a library to talk with
        if error.name is not None and error.name.partition(".")[0] != "psycopg":
            raise
        raise DefinitionError(
            "the PostgreSQL store needs the package psycopg: pip install 'dalsegno[postgres]'"
        ) from error
    return PostgresStore(url)


_BUILT_IN = {
    "memory": _memory,
    "sqlite": _sqlite,
    "kafka": _kafka,
    "postgresql": _postgres,
    "postgres": _postgres,
}


def _third_party(point: EntryPoint, url: str) -> TaskActionStore:
    origin = f"{point.value!r}" + (f" of package {point.dist.name!r}" if point.dist else "")
    try:
        factory = point.load()
    except (ImportError, AttributeError) as error:
        raise DefinitionError(
            f"the store of {_without_password(url)!r}, {origin}, cannot be imported: {error}"
        ) from error
    store = factory(url)
    if not isinstance(store, TaskActionStore):
        raise DefinitionError(f"{origin} made {store!r} of {_without_password(url)!r}, which is not a TaskActionStore")
    return store
