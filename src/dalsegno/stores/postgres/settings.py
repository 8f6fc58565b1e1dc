"""The URL of a PostgreSQL store, and what may be shown of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Composed, Identifier

from dalsegno.errors import DefinitionError

SCHEMA = "dalsegno"
CONNECT_SECONDS = 10
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a store is.

    *parameters* are those of libpq, such as ``host`` and ``sslmode``; *schema* is the schema of the tables. For
    *patience* seconds, and a quarter of that when the store is opened, it is tried to reach a server that is gone.
    """

    parameters: dict[str, Any] = field(repr=False)
    schema: str = SCHEMA
    patience: float = PATIENCE_SECONDS

    def __str__(self) -> str:
        """The place without any secret."""
        user, host = self.parameters.get("user"), self.parameters.get("host") or self.parameters.get("hostaddr")
        port, database = self.parameters.get("port"), self.parameters.get("dbname")
        place = f"{user}@" if user else ""
        place += str(host or "") + (f":{port}" if port else "") + (f"/{database}" if database else "")
        return f"postgresql://{place}" + (f"?schema={self.schema}" if self.schema != SCHEMA else "")

    def statement(self, text: str) -> Composed:
        """*text* with the names of the tables, which it has as ``{records}``, in their schema."""
        names = {table: Identifier(self.schema, table) for table in TABLES}
        return SQL(text).format(schema=Identifier(self.schema), **names)

    def connection(self) -> dict[str, Any]:
        """The arguments of ``connect``; nothing is prepared, as a pooler may give each transaction another session."""
        defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "dalsegno", **KEEPALIVE}
        return {**defaults, **self.parameters, "autocommit": True, "prepare_threshold": None}


TABLES = ("migrations", "jobs", "workers", "records", "decisions")
KEEPALIVE = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""A peer that is gone without a word is noticed within half a minute."""


def parse_url(url: str) -> Settings:
    """Raises `DefinitionError`, which does not repeat the URL, as there may be a password in it."""
    base, _, query = url.partition("?")
    try:
        pairs = [part.partition("=") for part in query.split("&") if part]
        own = {name: unquote(value) for name, _, value in pairs if name in ("schema", "patience")}
        others = "&".join("".join(pair) for pair in pairs if pair[0] not in own)
        parameters = conninfo_to_dict(f"{base}?{others}" if others else base)
        patience = float(own.get("patience", PATIENCE_SECONDS))
    except (ProgrammingError, ValueError):
        raise DefinitionError(
            f"the URL of the PostgreSQL store {_shown(base)!r} cannot be read: write"
            " 'postgresql://USER@HOST:PORT/DATABASE', with special characters of a password percent-encoded; options"
            " after '?' are those of libpq, 'schema' and 'patience'"
        ) from None
    schema = own.get("schema", SCHEMA)
    if not 0 <= patience < math.inf:
        raise DefinitionError(f"patience={own['patience']!r}: give a number of seconds, 0 or more")
    if not schema or len(schema.encode()) > 63 or "\0" in schema:
        raise DefinitionError(f"{schema!r} is no name of a schema in PostgreSQL: it has 1 to 63 bytes")
    return Settings(parameters, schema, patience)


def _shown(base: str) -> str:
    scheme, _, rest = base.partition("://")
    return f"{scheme}://{unquote(rest.rpartition('@')[2])}"
