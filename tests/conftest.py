"""Fixtures of the tests that run jobs; a module that wants another world defines its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import STORES, Tools, World

pytest_plugins = ["tests.services.fixtures"]
pytest.register_assert_rewrite("tests.mutation")  # whose assertions are to show their values, too


@pytest.fixture(params=STORES)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(request.param, tmp_path)


@pytest.fixture
def tools() -> Tools:
    return Tools()
