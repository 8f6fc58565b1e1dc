"""`open_store` chooses a store by URL, and says what is wrong with a URL."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from dalsegno import stores
from dalsegno.errors import DefinitionError
from dalsegno.stores import open_store
from dalsegno.stores.memory import MemoryStore
from dalsegno.stores.sqlite import SqliteStore


class Elsewhere(MemoryStore):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url


def not_a_store(url: str) -> object:
    return object()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "elsewhere": f"{__name__}:Elsewhere",
        "broken": "no_such_module_of_ours:Store",
        "wrong": f"{__name__}:not_a_store",
        "sqlite": f"{__name__}:Elsewhere",
    }
    points = EntryPoints(EntryPoint(name, value, "dalsegno.stores") for name, value in found.items())
    monkeypatch.setattr(stores, "entry_points", lambda group: points.select(group=group))


def test_a_relative_and_an_absolute_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in (
        ("sqlite:///agent.db", tmp_path / "agent.db"),
        ("sqlite:///a b/ä%20.db", tmp_path / "a b" / "ä%20.db"),
        ("sqlite:////somewhere/agent.db", Path("/somewhere/agent.db")),
        ("sqlite:///~/agent.db", Path.home() / "agent.db"),
    ):
        store = open_store(url)
        assert isinstance(store, SqliteStore)
        assert store.path == path.resolve()
    assert list(tmp_path.iterdir()) == []


def test_memory_and_stores_as_they_are() -> None:
    store = open_store("memory://")
    assert isinstance(store, MemoryStore)
    assert open_store(store) is store


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "memory://"),
        ("sqlite:///", "memory://"),
        ("sqlite://:memory:", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://agent.db", "'sqlite:///agent.db'"),
        ("sqlite:///agent.db?timeout=5", "no options"),
        ("memory://x", "'memory://'"),
        ("agent.db", "'sqlite:///agent.db'"),
        ("", "not the URL"),
        ("mysql://localhost/agents", "memory://, postgres://, postgresql://, sqlite://"),
        ("SQLITE:///agent.db", "sqlite://"),
        (None, "NoneType"),
        (Path("agent.db"), "Path"),
    ],
)
def test_what_is_refused(url: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message) as refused:
        open_store(url)
    assert repr(url) in str(refused.value)


def test_no_password_is_shown() -> None:
    with pytest.raises(DefinitionError, match=r"'postgresql\+psycopg://ann:\.\.\.@host/db'") as refused:
        open_store("postgresql+psycopg://ann:se:cr@et@host/db?password=secret")
    assert not any(part in str(refused.value) for part in ("se:cr", "et@", "secret"))


@pytest.mark.usefixtures("registered")
class TestThirdParty:
    def test_a_registered_scheme(self) -> None:
        store = open_store("elsewhere://host/name?x=1")
        assert isinstance(store, Elsewhere)
        assert store.url == "elsewhere://host/name?x=1"

    def test_a_built_in_scheme_cannot_be_replaced(self) -> None:
        assert isinstance(open_store("sqlite:///agent.db"), SqliteStore)

    def test_an_unknown_scheme_lists_the_registered_ones(self) -> None:
        with pytest.raises(
            DefinitionError, match=r"broken://, elsewhere://, kafka://, memory://,.* sqlite://, wrong://"
        ):
            open_store("unknown://")

    def test_what_cannot_be_imported(self) -> None:
        with pytest.raises(DefinitionError, match="no_such_module_of_ours") as refused:
            open_store("broken://")
        assert isinstance(refused.value.__cause__, ImportError)

    def test_what_is_not_a_store(self) -> None:
        with pytest.raises(DefinitionError, match="not a TaskActionStore"):
            open_store("wrong://")
