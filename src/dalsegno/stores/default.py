"""Where a job's records lie unless a store is given: in a file of its own, named after it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from dalsegno.core.identity import digest


def file_name(job: str, longest: int = 150) -> str:
    """*job* as a part of a file name, of at most *longest* characters; two jobs never share one."""
    name = quote(job, safe=" @+=,").replace(".", "%2E")
    return name if len(name) <= longest else f"{name[: longest - 33]}~{digest(job)}"


def default_store_path(job: str) -> Path:
    """Where a job's records lie unless a store is given."""
    return Path(".dalsegno") / f"{file_name(job)}.db"
