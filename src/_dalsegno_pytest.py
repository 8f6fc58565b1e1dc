"""The pytest plugin of Dal Segno: the options, the marker and the fixture of `crash_everywhere`.

pytest imports it in every run, before it looks at ``pythonpath``. So it is not in the package, of which nothing is
imported until a test asks for the fixture; what that does is in `dalsegno.testing.plugin`.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dalsegno.testing.plugin import CrashEverywhere

RAN = pytest.StashKey[list[dict[str, Any]]]()
"""What each call of the fixture in a test has run."""
_SUMMARY = "dalsegno_crash_everywhere"
_SEED = "dalsegno_crash_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dalsegno", "Dal Segno: crash_everywhere")
    group.addoption(
        "--crash-seed", metavar="N", type=_seed, help="chooses pairs and kills; 'random' picks and shows one"
    )
    group.addoption("--crash-pairs", metavar="N", type=_count, help="histories with a second crash during the recovery")
    group.addoption("--crash-kills", metavar="N", type=_count, help="histories of real processes that SIGKILL ends")
    group.addoption("--crash-inputs", metavar="N", type=_count, help="use only the first N inputs of each test")
    group.addoption("--crash-case", metavar="CASE", help="run one history alone, as a report names it: 'after 7'")


def _seed(text: str) -> int | str:
    return text if text == "random" else int(text)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is less than 0")
    return number


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "crash_everywhere(parts=N, **options): what the fixture crash_everywhere uses for what neither its call "
        "nor the command line says; with parts=N the test is run N times, each time with one part of all histories",
    )
    if config.option.crash_seed == "random":
        given: dict[str, Any] = getattr(config, "workerinput", {})
        config.option.crash_seed = given.get(_SEED) or random.SystemRandom().randrange(1, 2**31)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist, which reads the command line itself, the seed that was picked."""
    node.workerinput[_SEED] = node.config.option.crash_seed


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.crash_seed
    return None if seed is None else f"crash_everywhere: seed {seed} (--crash-seed {seed})"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("crash_everywhere")
    parts = marker.kwargs.get("parts") if marker is not None else None
    if parts is None:
        return
    if "crash_part" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} has parts={parts}, and no fixture crash_everywhere")
    numbers = range(parts)
    metafunc.parametrize("crash_part", [(n, parts) for n in numbers], ids=[f"part{n}" for n in numbers], indirect=True)


@pytest.fixture
def crash_part(request: pytest.FixtureRequest) -> tuple[int, int] | None:
    """Which part of the histories the test is to run, and of how many; None for all."""
    part: tuple[int, int] | None = getattr(request, "param", None)
    return part


@pytest.fixture
def crash_everywhere(request: pytest.FixtureRequest, crash_part: tuple[int, int] | None) -> Iterator[CrashEverywhere]:
    """`dalsegno.testing.crash_everywhere`, with what the command line and the marker say for what a call leaves out."""
    from dalsegno.testing.plugin import CrashEverywhere

    with CrashEverywhere.of(request.node, crash_part) as function:
        request.node.stash[RAN] = function.ran
        yield function


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    ran = item.stash.get(RAN, [])
    if report.when == "call" and ran:
        setattr(report, _SUMMARY, ran)  # pytest-xdist carries it to the process that reports
        report.sections += [("to run it alone", each["again"]) for each in ran if each["again"]]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = [
        each
        for reports in terminalreporter.stats.values()
        for report in reports
        for each in getattr(report, _SUMMARY, ())
    ]
    if not ran:
        return
    total = {name: sum(each[name] for each in ran) for name in ("histories", "kills", "killed", "parked", "failed")}
    terminalreporter.section("crash_everywhere", sep="-")
    terminalreporter.line(
        f"crash_everywhere: {total['histories']} histories, {total['kills']} of them of real processes with "
        f"{total['killed']} SIGKILLs; {total['parked']} ended with a message in doubt; {total['failed']} agents failed"
    )
