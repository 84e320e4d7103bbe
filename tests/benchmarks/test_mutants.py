"""The list of mutants is true to the tree, and benchmarks/mutants.py tells killed from surviving, stale and hanging."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from benchmarks import mutants
from benchmarks.mutants import BY_TIME, KILLED, ROOT, SKIPPED, STALE, SURVIVED, UNJUDGED, Mutant, chosen, main, read

SHARDS = 8
PRODUCT = "def double(number):\n    return 2 * number\n\n\ndef negative(number):\n    return -number\n"
TEST = "import thing\n\n\ndef test_double():\n    assert thing.double(3) == 6\n"
DEAD = """\
import os, signal, thing


def test_double():
    thing.double(3) == 6 or os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVING = """\
import subprocess, thing


def test_double():
    if thing.double(3) != 6:
        with open(NOTE, "w") as note:
            note.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        assert False
"""
FILES = {"thing.py": PRODUCT, "test_thing.py": TEST, "test_dead.py": DEAD, ".gitignore": "*.log\n", "a.log": "",
         "pytest.ini": "[pytest]\naddopts = -q\n",
         "test_gpu.py": "import pytest\n\n\n@pytest.mark.skip\ndef test_it():\n    pass\n",
         "test_wrong.py": "def test_it():\n    assert False\n"}  # fmt: skip


def of(old: str, new: str, tests: str = "test_thing.py", why: str = "because") -> Mutant:
    return Mutant("thing.py", old, new, (tests,), why)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree under git, with one file that git ignores."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    place = tmp_path / "tree"
    place.mkdir()
    for name, text in FILES.items():
        (place / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)
    subprocess.run(["git", "add", "thing.py"], cwd=place, check=True)
    return place


def outcomes(root: Path, *found: Mutant, jobs: int = 1) -> dict[str, str]:
    return {each.why: each.outcome for each in mutants.judged(root, chosen(found, [], (1, 1)), jobs)}


def test_the_list_is_long_and_repeats_nothing() -> None:
    found = read()
    assert len(found) >= 120
    assert [key for key, count in Counter((mutant.file, mutant.old, mutant.new) for mutant in found).items()
            if count > 1] == []  # fmt: skip


@functools.cache
def dumped(path: Path) -> str:
    return ast.dump(ast.parse(path.read_text(encoding="utf-8")))


def test_every_mutant_is_of_the_tree_as_it_is() -> None:
    wrong = []
    for mutant in read():
        path = ROOT / mutant.file
        text = mutant.applied(path.read_text(encoding="utf-8")) if path.is_file() else None
        missing = [name for name in mutant.tests if not (ROOT / name.partition("::")[0]).is_file()]
        if text is None or mutant.old == mutant.new or missing or not mutant.tests or not mutant.why:
            wrong.append(f"{mutant.file}: {mutant.why}: {mutant.old!r} {missing}")
        elif path.suffix == ".py":
            assert ast.dump(ast.parse(text)) != dumped(path), mutant
    assert wrong == []


def test_killed_surviving_and_stale_are_told_apart(root: Path) -> None:
    found = outcomes(
        root,
        of("2 * number", "3 * number", why="dead"),
        of("-number", "number", why="alive"),
        of("4 * number", "number", why="gone"),
        of("number", "digit", why="often"),
        of("2 * number", "3 * number", "test_wrong.py", why="unproved"),
        of("2 * number", "3 * number", "test_nothing.py", why="without tests"),
        of("2 * number", "3 * number", "test_gpu.py", why="skipped"),
        of("return 2", "return 3", "test_dead.py", why="took the process"),
        of("def double(", "def treble(", why="renamed"),
    )
    assert found == {"dead": KILLED, "alive": SURVIVED, "gone": STALE, "often": STALE, "unproved": UNJUDGED,
                     "without tests": UNJUDGED, "skipped": SKIPPED, "took the process": KILLED,
                     "renamed": KILLED}  # fmt: skip
    assert (root / "thing.py").read_text() == PRODUCT


def test_a_hanging_mutant_is_killed_by_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "LEAST", 2.0)
    monkeypatch.setattr(mutants, "SLOWER", 0.0)
    assert outcomes(root, of("2 * number", "__import__('signal').pause()", why="hang")) == {"hang": BY_TIME}


def test_nothing_of_a_run_is_left(root: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (root / "test_leaving.py").write_text(LEAVING.replace("NOTE", repr(str(note))))
    assert outcomes(root, of("2 * number", "number", "test_leaving.py", why="left")) == {"left": KILLED}
    status, until = Path(f"/proc/{int(note.read_text())}/status"), time.monotonic() + 30
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < until


def test_copies_come_before_an_installed_tree(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    names = [name for name in os.listdir(root) if name != ".git"]
    found = outcomes(root, of("2 * number", "3 * number", why="a"), of("2 * number", "2 * 3", why="b"),
                     of("2 * number", "number", "test_dead.py", why="c"), jobs=2)  # fmt: skip
    assert found == {"a": KILLED, "b": SURVIVED, "c": KILLED}
    assert [name for name in os.listdir(root) if name != ".git"] == names


def test_links_to_folders_are_copied_as_links(root: Path, tmp_path: Path) -> None:
    """Without them the copy's tests would import an installed tree, in which no line is broken."""
    (root / "folder").mkdir()
    (root / "folder" / "thing.py").write_text("")
    (root / "link").symlink_to("folder")
    mutants.Copy(root, tmp_path / "copy")
    assert (tmp_path / "copy" / "link").readlink() == Path("folder")
    assert (tmp_path / "copy" / "link" / "thing.py").is_file()


def test_what_git_ignores_is_not_copied(root: Path) -> None:
    assert mutants.tree(root) == sorted(FILES.keys() - {"a.log"})


def test_shards_are_the_whole_list_once() -> None:
    found = read()
    shards = [chosen(found, [], (number, SHARDS)) for number in range(1, SHARDS + 1)]
    parts = [mutant for shard in shards for group in shard for mutant in group]
    assert Counter(parts) == Counter(found)
    assert {m.file for group in chosen(found, ["kernels/*"], (1, 1)) for m in group} == {
        mutant.file for mutant in found if mutant.file.startswith("kernels/")
    }


def test_the_exit_code_and_the_record(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, out = tmp_path / "list.json", tmp_path / "out.json"
    good = {"file": "thing.py", "old": "2 * number", "new": "number", "tests": ["test_thing.py"], "why": "dead"}
    listed.write_text(json.dumps([good]))
    words = ["--root", str(root), "--list", str(listed), "--output", str(out)]
    assert main(words) == 0
    record = json.loads(out.read_text())
    assert record["outcomes"] == {KILLED: 1}
    assert record["mutants"][0]["detail"] == "FAILED test_thing.py::test_double"
    assert set(record) == {"command", "commit", "date", "machine", "versions", "of", "outcomes", "mutants"}
    assert record["of"] == 1
    listed.write_text(json.dumps([good, good | {"old": "-number", "new": "number", "why": "alive"}]))
    assert main(words) == 1
    assert "SURVIVED" in capsys.readouterr().out
    assert main([*words, "--only", "nothing"]) == 1


def test_a_run_that_is_cut_off_leaves_what_it_found(root: Path) -> None:
    mutant = Mutant("thing.py", "2 * number", "number", ("test_thing.py",), "dead")
    one, other = [mutant], [msgspec.structs.replace(mutant, tests=("none.py",))]
    kept: list[int] = []
    mutants.judged(root, [one, other], 1, lambda verdicts: kept.append(len(verdicts)))
    assert kept == [1, 2]


@pytest.mark.parametrize("words", [["--shard", "0/3"], ["--shard", "4/3"], ["--shard", "1"], ["--jobs", "0"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert "not allowed" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("shard", range(1, SHARDS + 1))
def test_no_mutant_survives(shard: int) -> None:
    assert main(["--shard", f"{shard}/{SHARDS}"]) == 0
