"""What is built is what users get: the wheel holds every file of the package and works without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that sees neither the source tree nor a registry; its output, which a failure shows whole."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_file_of_the_package_is_in_the_wheel(names: set[str]) -> None:
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert "dalsegno/py.typed" in wanted


def test_the_demo_has_its_data(names: set[str]) -> None:
    assert [name for name in names if name.startswith("dalsegno/demo/") and not name.endswith(".py")]


def test_the_wheel_says_its_licence_and_what_it_needs(wheel: Path, names: set[str]) -> None:
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    with zipfile.ZipFile(wheel) as archive:
        licence = archive.read(f"{info}/licenses/LICENSE")
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = {line.split(">")[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == {"orjson", "pydantic", "rich", "typer"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel; its dependencies are borrowed from the running one."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python")
    run(*pip, "install", "--no-deps", wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Folders named in a .pth come after the environment's own, and .pth files inside them are not followed.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return folder / "bin"


def test_the_installed_package_is_imported_without_warnings(installed: Path, tmp_path: Path) -> None:
    code = "import dalsegno; print(dalsegno.__file__)"
    where = run(installed / "python", "-W", "error", "-c", code, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_every_public_name_of_the_installed_package_exists(installed: Path, tmp_path: Path) -> None:
    code = "import dalsegno; assert dalsegno.__all__; [getattr(dalsegno, name) for name in dalsegno.__all__]"
    run(installed / "python", "-c", code, cwd=tmp_path)


def test_the_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    assert "demo" in run(installed / "dalsegno", "--help", cwd=tmp_path)
