"""The tests that stand beside what has changed: `python -m tests.changed [REV]` prints them, `make check` runs them.

Changed is what differs from REV (default: the branch's upstream, else the last commit but one), new files included.
A module's tests are its own file in the mirrored folder, or the whole folder where it has none. End-to-end
tests, the matrix and simulations are `make test`'s.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("services", "engine_core", "kernels", "protocol", "benchmarks", "deploy")
SLOW = ("tests/e2e", "tests/matrix", "tests/sim", "tests/deploy")
ALWAYS = ("tests/rules",)


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n") if done.returncode == 0 else []


def base() -> str:
    """What the tree is compared with, if nobody says."""
    for name in ("@{upstream}", "HEAD~1"):
        if found := git("rev-parse", "--verify", "--quiet", name):
            return found[0]
    return "HEAD"


def changed(revision: str) -> set[str]:
    """Files of the tree that differ from the revision, or that git does not know yet."""
    return set(
        filter(None, [*git("diff", "--name-only", revision), *git("ls-files", "--others", "--exclude-standard")])
    )


def beside(path: str, root: Path) -> set[str]:
    """The quick tests of one file, by paths from the root."""
    place = Path(path)
    if path.startswith("tests/"):
        if place.suffix != ".py" or path.startswith(SLOW) or not (root / path).exists():
            return set()
        found = path if place.name.startswith("test_") else place.parent.as_posix()
        return set() if found == "tests" else {found}
    if place.suffix != ".py" or place.parts[0] not in PRODUCT:
        return set()
    folder = Path("tests") / place.parent
    own = sorted((root / folder).glob(f"test_{place.stem}*.py"))
    if not own and (root / folder).is_dir() and folder.parts[1:2] != ("deploy",):
        own = sorted((root / folder).glob("test_*.py"))
    return {test.relative_to(root).as_posix() for test in own}


def main(words: list[str]) -> int:
    found = {test for path in changed(words[0] if words else base()) for test in beside(path, ROOT)}
    print(*sorted({*ALWAYS, *found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
