"""tests/changed.py: which tests stand beside a changed file."""

from __future__ import annotations

from pathlib import Path

from tests import changed


def tree(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def test_a_module_has_its_own_tests_or_its_folders(tmp_path: Path) -> None:
    tree(tmp_path, "tests/kernels/test_norm.py", "tests/kernels/test_norm_wide.py", "tests/kernels/test_rope.py")
    assert changed.beside("kernels/norm.py", tmp_path) == {
        "tests/kernels/test_norm.py",
        "tests/kernels/test_norm_wide.py",
    }
    assert changed.beside("kernels/tile.py", tmp_path) == {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("test_*")
    }
    assert changed.beside("kernels/notes.md", tmp_path) == changed.beside("README.md", tmp_path) == set()


def test_a_test_is_its_own_and_what_tests_share_is_the_folders(tmp_path: Path) -> None:
    tree(
        tmp_path, "tests/kernels/test_norm.py", "tests/kernels/shapes.py", "tests/e2e/test_chat.py", "tests/conftest.py"
    )
    assert changed.beside("tests/kernels/test_norm.py", tmp_path) == {"tests/kernels/test_norm.py"}
    assert changed.beside("tests/kernels/shapes.py", tmp_path) == {"tests/kernels"}
    for path in ("tests/e2e/test_chat.py", "tests/conftest.py", "tests/kernels/test_gone.py"):
        assert changed.beside(path, tmp_path) == set(), path
