"""How fast an agent is proven: a two-action, five-call agent over three keys and ten messages, at every boundary.

    python -m benchmarks.crash_everywhere

The bar is 60 seconds on two cores for all single crashes. A bare run of the same job in the same process is the
baseline: how many times the whole proof costs one run.
"""

from __future__ import annotations

import sys
import time

from dalsegno.testing import crash_everywhere
from tests.crashed_agents import Reviewer, inputs, outside

BAR = 60.0


def main() -> int:
    began = time.perf_counter()
    crash_everywhere(Reviewer, inputs(10), key="id", outside=outside, pairs=0, case="no crash")
    bare = time.perf_counter() - began
    report = crash_everywhere(Reviewer, inputs(10), key="id", outside=outside, pairs=0)
    print(report)
    print(f"{60 * report.cases / report.seconds:,.0f} histories a minute; one without a crash took {bare:.3f} s")
    print(f"the bar is {BAR:.0f} s: {'met' if report.seconds < BAR else 'MISSED'}")
    return 0 if report.seconds < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
