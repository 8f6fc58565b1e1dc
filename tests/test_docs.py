"""Everything that README.md and docs/**/*.md show is run, each page in a process and a temporary folder of its own.

The blocks of one page run in order and share their names, like one script:

- ```` ```python ```` blocks are executed; tracebacks show the page's lines. A block whose first line is a comment with
  nothing but a file name (``# agent.py``) is saved under that name and imported; its names are shared as well.
- ```` ```console ```` blocks: the lines that start with ``$ `` are commands (one that ends with a backslash goes on in
  the next line), run by one ``sh -e``; the other lines show output and are not compared.
- A block right after the comment ``<!-- not run: reason -->`` is left out. Blocks of other languages are only shown.

A page with the comment ``<!-- needs: kafka -->`` has a broker of its own at what it calls ``localhost:9092``, one with
``<!-- needs: postgresql -->`` a database of its own at what it calls ``postgresql://localhost:5432/agents``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.services import Kafka

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS_PER_PAGE = 180

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)[^`]*$")
_BROKER = "localhost:9092"
_NEEDS_KAFKA = "<!-- needs: kafka -->"
_DATABASE = "postgresql://localhost:5432/agents"
_NEEDS_POSTGRES = "<!-- needs: postgresql -->"
_NOT_RUN = re.compile(r"^<!--\s*not run:\s*\S.*-->$")
_FILE_NAME = re.compile(r"#\s*(?P<name>[\w-]+\.py)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line in the page, its text, and whether it is to be run."""

    language: str
    line: int
    text: str
    run: bool


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order; a fence that is never closed is an error."""
    lines = page.splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = _closing(lines, at, fence["ticks"])
        text = textwrap.dedent("\n".join(lines[at + 1 : end]))
        yield Block(fence["language"], at + 2, text, run=not _NOT_RUN.match(_before(lines, at)))
        at = end + 1


def _closing(lines: list[str], opened: int, ticks: str) -> int:
    for at in range(opened + 1, len(lines)):
        rest = lines[at].strip()
        if rest.startswith(ticks) and not rest.strip(ticks[0]):
            return at
    raise AssertionError(f"the block opened in line {opened + 1} is never closed")


def _before(lines: list[str], at: int) -> str:
    return next((line.strip() for line in reversed(lines[:at]) if line.strip()), "")


def commands(text: str) -> str:
    """The shell script of a console block."""
    script: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            script.append(line[2:])
        elif script and script[-1].endswith("\\"):
            script[-1] += "\n" + line.removeprefix("> ")
    return "\n".join(script)


def steps(page: str) -> list[tuple[str, int, str, str | None]]:
    """What is run of a page: kind ("python" or "console"), line number in the page, code, name of the file it is."""
    return [step for block in blocks(page) if block.run for step in _steps(block)]


def _steps(block: Block) -> Iterator[tuple[str, int, str, str | None]]:
    if block.language == "console" and (script := commands(block.text)):
        yield "console", block.line, script, None
    elif block.language == "python" and block.text.strip():
        named = _FILE_NAME.fullmatch(block.text.split("\n")[0].strip())
        yield "python", block.line, block.text, named["name"] if named else None


# Runs in the page's own process, as its __main__. Each block is compiled under the page's path and line numbers, so
# tracebacks show the page.
_DRIVER = """
import sys

def _run_page(page, steps):
    sys.path[0] = ""
    for kind, line, text, file in steps:
        sys.stdout.flush()
        if kind == "console":
            _run_commands(f"{page}, line {line}", text)
        elif file:
            globals().update(_import_saved(file, text))
        else:
            exec(compile("\\n" * (line - 1) + text, page, "exec", dont_inherit=True), globals())

def _run_commands(where, text):
    import subprocess
    print(f"{where}:\\n{text}", flush=True)
    if code := subprocess.run(["sh", "-ec", text], stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"{where}: ended with {code}:\\n{text}")

def _import_saved(file, text):
    import importlib, pathlib
    pathlib.Path(file).write_text(text + "\\n", encoding="utf-8")
    sys.modules.pop(file.removesuffix(".py"), None)
    importlib.invalidate_caches()
    module = importlib.import_module(file.removesuffix(".py"))
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}

_run_page(PAGE, STEPS)
"""


def run_page(
    page: Path, folder: Path, broker: str = _BROKER, database: str = _DATABASE
) -> subprocess.CompletedProcess[str]:
    """Run everything of ``page`` in ``folder`` with these servers; standard error is part of the output."""
    # The stem of the script is part of the names of classes that a page defines.
    script = folder.parent / "page.py"
    driver = _DRIVER.replace("PAGE", repr(str(page))).replace(
        "STEPS", repr(steps(page.read_text("utf-8").replace(_BROKER, broker).replace(_DATABASE, database)))
    )
    script.write_text(driver, "utf-8")
    return subprocess.run(
        [sys.executable, "-B", "-W", "error", script],
        cwd=folder,
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=SECONDS_PER_PAGE,
    )


def _environment(folder: Path) -> dict[str, str]:
    first_on_path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return os.environ | {
        "PATH": os.pathsep.join(first_on_path),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONIOENCODING": "utf-8",
        "HOME": str(folder.parent),
        "NO_COLOR": "1",
        "COLUMNS": "120",
        **_plugins(),
    }


def _plugins() -> dict[str, str]:
    """pytest finds the plugin of what is installed; an installation from before there was one needs to be told."""
    known = {plugin.value for plugin in entry_points(group="pytest11")}
    return {} if "_dalsegno_pytest" in known else {"PYTEST_PLUGINS": "_dalsegno_pytest"}


def _runs(page: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{page.relative_to(ROOT)} does not run:\n{done.stdout[-20_000:]}"


def _needs(page: Path, server: str) -> bool:
    return server in page.read_text("utf-8")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if not (_needs(page, _NEEDS_KAFKA) or _needs(page, _NEEDS_POSTGRES))], ids=_name
)
def test_page(page: Path, tmp_path: Path) -> None:
    if not steps(page.read_text("utf-8")):
        return
    folder = tmp_path / "page"
    folder.mkdir()
    _runs(page, run_page(page, folder))


@pytest.mark.parametrize("page", [page for page in PAGES if _needs(page, _NEEDS_KAFKA)], ids=_name)
def test_page_with_kafka(page: Path, tmp_path: Path, private_kafka: Callable[..., Kafka]) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    _runs(page, run_page(page, folder, private_kafka().url))


@pytest.mark.parametrize("page", [page for page in PAGES if _needs(page, _NEEDS_POSTGRES)], ids=_name)
def test_page_with_postgres(page: Path, tmp_path: Path, postgres_url: str) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    _runs(page, run_page(page, folder, database=postgres_url))


# ---------------------------------------------------------------------------------------- the runner of pages itself


def write_page(tmp_path: Path, text: str) -> tuple[Path, Path]:
    page, folder = tmp_path / "some.md", tmp_path / "page"
    page.write_text(textwrap.dedent(text), "utf-8")
    folder.mkdir()
    return page, folder


def test_blocks_are_found_with_their_lines_and_what_is_not_run_is_left_out() -> None:
    page = textwrap.dedent(
        """\
        # Title
        ```python
        a = 1
        ```
        <!-- not run: needs a model -->

        ```python
        ask()
        ```
        - in a list
          ```console
          $ echo a \\
          >   b
          a b
          $ true
          ```
        ```json
        {}
        ```
        ````python
        s = '''
        ```
        '''
        ````
        """
    )
    assert steps(page) == [
        ("python", 3, "a = 1", None),
        ("console", 12, "echo a \\\n  b\ntrue", None),
        ("python", 21, "s = '''\n```\n'''", None),
    ]


def test_a_reason_is_needed_to_leave_a_block_out() -> None:
    assert steps("<!-- not run: -->\n```python\na = 1\n```\n") == [("python", 3, "a = 1", None)]


def test_an_open_fence_is_an_error() -> None:
    with pytest.raises(AssertionError, match="line 2 is never closed"):
        steps("text\n```python\na = 1\n")


@pytest.mark.slow
def test_blocks_of_a_page_share_names_and_folder(tmp_path: Path) -> None:
    page, folder = write_page(
        tmp_path,
        """
        ```python
        # helper.py
        from __future__ import annotations
        VALUE = "héllo"
        ```
        ```console
        $ cd . && python -c 'import helper; print(helper.VALUE, end="")' > out.txt
        5
        ```
        ```python
        import helper
        assert (__name__, VALUE) == ("__main__", helper.VALUE)
        with open("out.txt") as file:
            assert file.read() == VALUE
        print("done")
        ```
        """,
    )
    page_done = run_page(page, folder)
    assert (page_done.returncode, page_done.stdout.splitlines()[-1]) == (0, "done")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ("```python\nx = {}\nx['wanted']\n```", ['some.md", line 4', "x['wanted']", "KeyError"]),
        ("```python\nx = (\n```", ['some.md", line 3', "SyntaxError"]),
        ("```python\nimport warnings\nwarnings.warn('old')\n```", ['some.md", line 4', "UserWarning: old"]),
        ("```console\n$ false\n$ echo never\n```", ["some.md, line 3: ended with 1", "echo never"]),
    ],
)
def test_a_failure_shows_the_page(tmp_path: Path, block: str, shown: list[str]) -> None:
    page, folder = write_page(tmp_path, f"\n{block}\n")
    done = run_page(page, folder)
    assert done.returncode == 1
    assert [text for text in shown if text not in done.stdout] == []
