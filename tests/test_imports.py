"""The direction of imports inside the package, read from the sources without importing them.

Imports under ``TYPE_CHECKING`` and inside functions count as well: who knows another module's types depends on it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "dalsegno"

_BASE = "errors registry effects events memory agent context cipher retry recorded"
_ALL = f"{_BASE} core stores operate runners"

# What each part may import besides itself; "core.records" is that module alone, "dalsegno" the package's public names.
ALLOWED = {
    part: allowed.split()
    for part, allowed in {
        "errors": "",
        "registry": "errors",
        "cipher": "errors",
        "effects": "errors registry events memory",
        "events": "errors registry effects memory",
        "memory": "errors registry effects events",
        "agent": "errors registry effects events memory context",
        "context": "errors registry effects events memory agent retry",
        "retry": "errors",
        "recorded": "",
        "core": _BASE,
        "stores": "errors registry cipher core.records core.codec core.identity",
        "operate": f"{_BASE} core stores",
        "runners": f"{_BASE} core stores operate",
        "flink": f"{_BASE} core stores",
        "integrations": f"dalsegno {_BASE} core",
        "testing": f"dalsegno {_ALL}",
        "demo": f"dalsegno {_ALL}",
        "inspect": f"dalsegno {_ALL} demo",
        "dalsegno": _ALL,
        "__main__": "inspect",
    }.items()
}

# The core does no I/O and owns no clock; time, randomness and results are given to it.
NOT_IN_CORE = frozenset(
    {"http", "os", "pathlib", "random", "secrets", "select", "shutil", "signal", "socket", "sqlite3", "ssl"}
    | {"subprocess", "tempfile", "time", "urllib"}
)
CALLS_NOT_IN_CORE = frozenset(
    {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
    | {"uuid.uuid1", "uuid.uuid4", "uuid1", "uuid4", "open"}
)


class Module:
    """One source file: its dotted name below the package ("" for the package itself), its part and its syntax tree."""

    def __init__(self, package: Path, path: Path) -> None:
        self.package, self.path = package, path
        parts = path.relative_to(package).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.parts = parts[:-1] if self.is_package else parts
        self.part = self.parts[0] if self.parts else "dalsegno"
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and absolute dotted name of everything imported."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Import(names=names):
                    yield from ((node.lineno, alias.name) for alias in names)
                case ast.ImportFrom(module=module, names=names, level=level):
                    base = ".".join([*self._anchor(level), *([module] if module else [])])
                    yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
                case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _dotted(node.func).endswith("import_module"):
                    yield node.lineno, name

    def _anchor(self, level: int) -> list[str]:
        if level == 0:
            return []
        up = level - 1 if self.is_package else level
        return ["dalsegno", *self.parts][: len(self.parts) + 1 - up]

    def targets(self) -> Iterator[tuple[int, str]]:
        """Line and name below the package ("dalsegno" for the package itself) of each import from the package."""
        for line, name in self.imports():
            top, *rest = name.split(".")
            if top == "dalsegno":
                yield line, self._existing(rest) or "dalsegno"

    def _existing(self, parts: list[str]) -> str:
        while parts and not self._is_module(parts):
            parts = parts[:-1]
        return ".".join(parts)

    def _is_module(self, parts: list[str]) -> bool:
        path = self.package.joinpath(*parts)
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
    return "?"


def _within(target: str, allowed: str) -> bool:
    return target == allowed or target.startswith(allowed + ".")


def _wrong_direction(module: Module) -> Iterator[tuple[int, str]]:
    if module.part not in ALLOWED:
        yield 1, f"{module.part} has no place in the layers; give it one in {Path(__file__).name}"
        return
    for line, target in dict.fromkeys(module.targets()):
        if not any(_within(target, allowed) for allowed in (module.part, *ALLOWED[module.part])):
            yield line, f"{module.part} must not import {target}"


def _io_in_core(module: Module) -> Iterator[tuple[int, str]]:
    if module.part != "core":
        return
    for line, name in module.imports():
        if (top := name.split(".")[0]) in NOT_IN_CORE:
            yield line, f"core must not import {top}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and (name := ".".join(_dotted(node.func).split(".")[-2:])) in CALLS_NOT_IN_CORE:
            yield node.lineno, f"core must not call {name}"


def violations(package: Path) -> list[str]:
    """Every import or call of the package's sources that the rules above forbid, as "file:line: what"."""
    modules = [Module(package, path) for path in sorted(package.rglob("*.py"))]
    return [
        f"{module.path.relative_to(package)}:{line}: {what}"
        for module in modules
        for rule in (_wrong_direction, _io_in_core)
        for line, what in rule(module)
    ]


def test_imports_go_in_one_direction() -> None:
    assert violations(PACKAGE) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package in which every part is legal."""
    files = {
        "__init__.py": "from dalsegno.runners.local import LocalRunner\nfrom .errors import DalSegnoError\n",
        "errors.py": "import os, time\n",
        "registry.py": "from dalsegno import errors\n",
        "core/__init__.py": "",
        "core/records.py": "from dalsegno.errors import RecordError\nfrom datetime import datetime\n",
        "core/executor.py": "from ..context import Context\nfrom .records import Record\nclock.now()\nhost.open()\n",
        "context.py": "from .registry import register\n",
        "stores/__init__.py": "from .base import Store\n",
        "stores/base.py": "import sqlite3\nfrom dalsegno.core.records import A\nfrom dalsegno.core import records\n",
        "operate/decide.py": "from dalsegno.stores.base import Store\n",
        "runners/local.py": "import dalsegno.operate.decide, dalsegno.stores.base\nimport dalsegno.core\n",
        "demo/__init__.py": "from dalsegno import LocalRunner\n",
        "inspect/cli.py": "from dalsegno.demo import run\n",
        "testing/__init__.py": "",
    }
    root = tmp_path / "dalsegno"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_checker_accepts_what_is_allowed(package: Path) -> None:
    assert violations(package) == []


@pytest.mark.parametrize(
    ("file", "source", "what"),
    [
        ("errors.py", "from dalsegno.registry import register", "errors must not import registry"),
        ("context.py", "from .core import executor", "context must not import core.executor"),
        ("context.py", "from dalsegno import LocalRunner", "context must not import dalsegno"),
        ("core/records.py", "from ..stores.base import Store", "core must not import stores.base"),
        ("core/records.py", "import dalsegno.runners.local as x", "core must not import runners.local"),
        ("stores/base.py", "from dalsegno.core.executor import Executor", "stores must not import core.executor"),
        ("stores/base.py", "from dalsegno.core import Executor", "stores must not import core"),
        ("stores/base.py", "def f():\n    import dalsegno.testing", "stores must not import testing"),
        ("runners/local.py", "from .. import demo", "runners must not import demo"),
        ("runners/local.py", "import_module('dalsegno.inspect.cli')", "runners must not import inspect.cli"),
        ("operate/decide.py", "from dalsegno.runners.local import x", "operate must not import runners.local"),
        ("demo/__init__.py", "if TYPE_CHECKING:\n    from dalsegno.testing import x", "demo must not import testing"),
        ("core/records.py", "from time import monotonic", "core must not import time"),
        ("core/records.py", "import os.path", "core must not import os"),
        ("core/records.py", "datetime.datetime.now(UTC)", "core must not call datetime.now"),
        ("core/records.py", "uuid4()", "core must not call uuid4"),
        ("core/records.py", "open('x')", "core must not call open"),
        ("sundries.py", "", "sundries has no place in the layers; give it one in test_imports.py"),
    ],
)
def test_the_checker_finds_a_planted_violation(package: Path, file: str, source: str, what: str) -> None:
    (package / file).write_text(source + "\n")
    line = 1 + source.count("\n")
    assert violations(package) == [f"{file}:{line}: {what}"]
