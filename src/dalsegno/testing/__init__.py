"""Tools for testing what is built on, or plugged into, this library. Imported by tests alone.

`crash_everywhere` proves that an agent survives a crash at each of its steps; `Outside` stands for the world that its
tools act on; a `FaultStore` fails where a test wants it to. `dalsegno.testing.stores` is the conformance suite of
stores, which needs pytest.
"""

import sys

from dalsegno.testing.crash import crash_everywhere
from dalsegno.testing.faults import Fault, FaultStore
from dalsegno.testing.outside import Outside
from dalsegno.testing.report import CrashReport, CrashTestFailed

__all__ = ["CrashReport", "CrashTestFailed", "Fault", "FaultStore", "Outside", "crash_everywhere"]

if "pytest" in sys.modules:
    # So that a failing assertion of the shipped suites shows its values.
    sys.modules["pytest"].register_assert_rewrite("dalsegno.testing.stores")
