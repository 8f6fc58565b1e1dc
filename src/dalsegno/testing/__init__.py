"""Tools for testing what is built on, or plugged into, this library. Imported by tests alone; needs pytest."""

import sys

if "pytest" in sys.modules:
    # So that a failing assertion of the shipped suites shows its values.
    sys.modules["pytest"].register_assert_rewrite("dalsegno.testing.stores")
