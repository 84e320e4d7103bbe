"""What is installed is one package, `penstock`, which nothing hides and which hides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from penstock.protocol.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("services", "engine_core", "kernels", "protocol")
SOURCES = ("penstock", *PARTS, "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(tree: Path, kind: str, place: Path) -> Path:
    """What the build backend makes of a source tree: `kind` is build_wheel or build_sdist."""
    place.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(place)],
        cwd=tree, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (found,) = (path for path in place.iterdir() if path.suffix in (".whl", ".gz"))
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree. Built from a copy, since a build leaves files behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    return build(tree, "build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A user's folder with packages of the names of ours, each of which fails when it is imported."""
    for name in PARTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return tmp_path


def test_a_wheel_holds_one_package_and_every_file_of_the_tree(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"penstock", f"penstock-{VERSION}.dist-info"}
    for part in PARTS:
        tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / part).rglob("*.py")}
        assert {f"penstock/{path}" for path in tree} <= set(names)
    static = {path.relative_to(ROOT).as_posix() for path in (ROOT / "services" / "http" / "static").iterdir()}
    assert {f"penstock/{path}" for path in static} <= set(names)
    assert any(
        name.startswith("penstock/engine_core/embedded/demo/") and name.endswith("safetensors") for name in names
    )


@pytest.mark.long
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    unpacked = zipfile.ZipFile(wheel)
    shutil.copytree(
        ROOT, tmp_path / "tree", symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "tests", "*.egg-info")
    )
    sdist = build(tmp_path / "tree", "build_sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = zipfile.ZipFile(build(source, "build_wheel", tmp_path / "again"))
    code = {name for name in unpacked.namelist() if not name.endswith("RECORD")}
    assert {name for name in again.namelist() if not name.endswith("RECORD")} == code
    assert all(again.read(name) == unpacked.read(name) for name in code if name.startswith("penstock/"))


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "from penstock import LLM, AsyncLLM; import penstock.services.openai.api_server, penstock.kernels.norm"),
        ("-m", "penstock", "--version"),
        (str(ROOT / "penstock/__main__.py"), "--version"),
    ],
)
@pytest.mark.parametrize("path", ["", "."])
def test_packages_of_a_users_folder_hide_nothing(crowded: Path, words: tuple[str, ...], path: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=crowded, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_unpacked_wheel_runs_from_its_folder(wheel: Path, crowded: Path, tmp_path: Path) -> None:
    """Started by its path, as the launcher starts its processes, with no installation to help it."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = "import penstock.services.supervisor.launcher as launch; print(launch.ENTRY)"
    here = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=crowded, env=here, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(tmp_path / "site/penstock/__main__.py")
    done = subprocess.run(
        [sys.executable, found.stdout.strip(), "--version"], cwd=crowded, capture_output=True, text=True, timeout=120
    )
    assert VERSION in done.stdout


def test_another_package_named_kernels_stands_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("HUB = 'theirs'\n")
    script = "import kernels, penstock.kernels, penstock.kernels.norm; print(kernels.HUB, kernels is penstock.kernels)"
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["theirs", "False"], found.stderr
