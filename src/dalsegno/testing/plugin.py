"""What the pytest fixture `crash_everywhere` gives to a test. `_dalsegno_pytest` is the plugin that pytest loads."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from dalsegno.agent import Agent
from dalsegno.testing.crash import crash_everywhere
from dalsegno.testing.report import CrashReport, CrashTestFailed, name_of

_FROM_THE_COMMAND_LINE = ("seed", "pairs", "kills", "case")
_PROGRESS_SECONDS = 0.1


class CrashEverywhere:
    """`crash_everywhere` in a test.

    What a call does not say, the command line says, and what that does not say, the marker. The options
    ``--crash-case`` and ``--crash-inputs``, which are for one failure, count before everything else.
    """

    def __init__(self, item: pytest.Item, part: tuple[int, int] | None, progress: _Progress | None) -> None:
        marker = item.get_closest_marker("crash_everywhere")
        self._marked = (
            {} if marker is None else {name: value for name, value in marker.kwargs.items() if name != "parts"}
        )
        given = {name: getattr(item.config.option, f"crash_{name}") for name in _FROM_THE_COMMAND_LINE}
        self._given = {name: value for name, value in given.items() if value is not None}
        self._inputs: int | None = item.config.option.crash_inputs
        self._part = part
        self._node = item.nodeid
        self._progress = progress
        self.ran: list[dict[str, Any]] = []
        """What each call has run, in plain values."""

    @classmethod
    @contextmanager
    def of(cls, item: pytest.Item, part: tuple[int, int] | None) -> Iterator[CrashEverywhere]:
        progress = _Progress.of(item.config)
        try:
            yield cls(item, part, progress)
        finally:
            if progress is not None:
                progress.end()

    def __call__(
        self,
        agent: Agent | Callable[[], Agent] | Sequence[Agent | Callable[[], Agent]],
        inputs: Iterable[Any],
        **options: Any,
    ) -> CrashReport:
        """As `dalsegno.testing.crash_everywhere`."""
        __tracebackhide__ = True
        options = {"part": self._part, **self._marked, **self._given, **options}
        options["case"] = self._given.get("case", options.get("case"))
        on_case = options.pop("on_case", None)
        given = [*inputs][: self._inputs]
        try:
            report = crash_everywhere(agent, given, on_case=self._watching(on_case), **options)
        except CrashTestFailed as failed:
            self._note(failed.report)
            raise
        self._note(report)
        return report

    def _watching(self, on_case: Callable[[CrashReport, int], None] | None) -> Callable[[CrashReport, int], None]:
        def watch(report: CrashReport, planned: int) -> None:
            if self._progress is not None:
                self._progress.show(report.cases, planned)
            if on_case is not None:
                on_case(report, planned)

        return watch

    def _note(self, report: CrashReport) -> None:
        self.ran.append(
            {
                "histories": report.cases,
                "kills": report.kills_run,
                "killed": report.killed,
                "parked": report.parked,
                "failed": int(not report.passed),
                "again": "" if report.passed else self._again(report),
            }
        )

    def _again(self, report: CrashReport) -> str:
        shortest = report.failures[-1]
        options = ["--crash-seed", str(report.seed), "--crash-inputs", str(shortest.inputs)]
        return shlex.join(["pytest", self._node, *options, "--crash-case", name_of(shortest.case)])


class _Progress:
    """One line in a terminal, written anew as histories are run, and gone at the end."""

    def __init__(
        self, terminal: pytest.TerminalReporter, uncaptured: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._terminal = terminal
        self._uncaptured = uncaptured
        self._shown = -_PROGRESS_SECONDS
        self._begun = False

    @classmethod
    def of(cls, config: pytest.Config) -> _Progress | None:
        """None where nobody would see it."""
        terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or not terminal.isatty or config.get_verbosity() < 0:
            return None
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        return cls(terminal, nullcontext if capture is None else capture.global_and_fixture_disabled)

    def show(self, done: int, planned: int) -> None:
        if time.monotonic() - self._shown < _PROGRESS_SECONDS:
            return
        with self._uncaptured():
            if not self._begun:
                self._terminal.ensure_newline()
                self._begun = True
            self._terminal.rewrite(f"crash_everywhere: {done} of {planned} histories", erase=True)
            self._terminal.flush()
        self._shown = time.monotonic()

    def end(self) -> None:
        if self._begun:
            with self._uncaptured():
                self._terminal.rewrite("", erase=True)
                self._terminal.rewrite("")
                self._terminal.flush()
