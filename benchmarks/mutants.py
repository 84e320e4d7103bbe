"""Mutants: does a near test die when the line that holds an invariant is broken? `python -m benchmarks.mutants`.

benchmarks/mutants.json lists them: in `file`, the text `old`, which occurs exactly once, becomes `new`, and one of
`tests` has to fail. Everything happens in copies of the working tree, ignored files left out. Each set of tests runs
without a mutant first; if that fails, its mutants are not judged. A mutant is killed by a failing test, or by time when
its tests take far longer than without it. The exit code is 1 if one survives, is stale (its text is missing or not
unique) or was not judged.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import msgspec

from benchmarks import report
from benchmarks.report import ROOT

LIST = ROOT / "benchmarks" / "mutants.json"
KILLED, BY_TIME, SURVIVED, STALE, UNJUDGED = "killed", "killed by time", "SURVIVED", "stale", "not judged"
SKIPPED = "skipped"  # as all its tests are on this machine: they need a browser, say
PASSED, FAILED, BROKEN = 0, 1, 2  # exit codes of pytest; the last one: a file of tests could not be imported
PYTEST = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line")
BASELINE_LIMIT = 600.0  # seconds for a set of tests on the unbroken tree
SLOWER = 5.0  # times as long as that they may take with a mutant
LEAST = 45.0  # and at least these seconds: a busy machine is no mutant


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One broken line, and the tests that have to notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def applied(self, text: str) -> str | None:
        """The file's text with the mutant in it; None where `old` does not stand there exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a mutant."""

    file: str
    why: str
    tests: tuple[str, ...]
    outcome: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in (KILLED, BY_TIME, SKIPPED)


class Outcome(msgspec.Struct, frozen=True):
    """One run of pytest. `code` is None when its time was over."""

    code: int | None
    seconds: float
    last: str


class Copy:
    """A copy of a tree, in which mutants come and go one at a time."""

    def __init__(self, root: Path, place: Path) -> None:
        self._place = place
        for name in tree(root):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name, follow_symlinks=False)  # penstock/ links to the folders

    def judge(self, mutants: Sequence[Mutant]) -> list[Verdict]:
        """Mutants that share their tests. The tests run unbroken first."""
        texts = {mutant.file: (self._place / mutant.file).read_text(encoding="utf-8")
                 for mutant in mutants if (self._place / mutant.file).is_file()}  # fmt: skip
        broken = [mutant.applied(texts.get(mutant.file, "")) for mutant in mutants]
        base = self.run(mutants[0].tests, BASELINE_LIMIT) if any(broken) else Outcome(PASSED, 0.0, "")
        found = []
        for mutant, text in zip(mutants, broken, strict=True):
            if text is None:
                times = texts.get(mutant.file, "").count(mutant.old)
                found.append(verdict(mutant, STALE, detail=f"its text stands there {times} times"))
            elif base.code != PASSED:
                found.append(verdict(mutant, UNJUDGED, base.seconds, f"unbroken: {base.last}"))
            elif " passed" not in base.last:
                found.append(verdict(mutant, SKIPPED, base.seconds, f"unbroken: {base.last}"))
            else:
                found.append(self._judge(mutant, text, texts[mutant.file], max(LEAST, SLOWER * base.seconds)))
        return found

    def _judge(self, mutant: Mutant, text: str, before: str, limit: float) -> Verdict:
        path = self._place / mutant.file
        path.write_text(text, encoding="utf-8")
        try:
            done = self.run(mutant.tests, limit)
        finally:
            path.write_text(before, encoding="utf-8")
        return verdict(mutant, outcome_of(done.code), done.seconds, done.last)

    def run(self, tests: Sequence[str], limit: float) -> Outcome:
        """pytest over these files in the copy. When it has ended, so has what it started."""
        start = time.monotonic()
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen([sys.executable, *PYTEST, *tests], cwd=self._place, stdout=out,
                                       stderr=subprocess.STDOUT, start_new_session=True,
                                       env=surroundings(self._place, os.environ))  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            lines = out.read().decode(errors="replace").splitlines()
        return Outcome(code, time.monotonic() - start, said(lines))


def verdict(mutant: Mutant, outcome: str, seconds: float = 0.0, detail: str = "") -> Verdict:
    return Verdict(file=mutant.file, why=mutant.why, tests=mutant.tests, outcome=outcome, seconds=round(seconds, 1),
                   detail=detail)  # fmt: skip


def outcome_of(code: int | None) -> str:
    """What pytest's exit code says of a mutant. A negative code is a signal: the mutant took the process with it."""
    if code is None:
        return BY_TIME
    if code == PASSED:
        return SURVIVED
    return KILLED if code in (FAILED, BROKEN) or code < 0 else UNJUDGED


def said(lines: Sequence[str]) -> str:
    """The test that failed, or pytest's last line."""
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            return line.partition(" - ")[0]
    return next((line for line in reversed(lines) if line.strip()), "")


def tree(root: Path) -> list[str]:
    """The files of a working tree that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted({name for name in names if name and ((root / name).is_file() or (root / name).is_symlink())})


def surroundings(place: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which the copy's packages come before installed ones, and no bytecode hides a mutant."""
    return {**environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "",
            "PYTEST_ADDOPTS": "", "NO_COLOR": "1"}  # fmt: skip


def read(path: Path = LIST) -> list[Mutant]:
    """The list. Raises msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=list[Mutant])


def chosen(mutants: Sequence[Mutant], only: Sequence[str], shard: tuple[int, int]) -> list[list[Mutant]]:
    """Groups that share their tests: those whose file fits one of the patterns, and of these every n-th group."""
    groups: defaultdict[tuple[str, ...], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        if not only or any(fnmatch.fnmatch(mutant.file, pattern) for pattern in only):
            groups[mutant.tests].append(mutant)
    number, count = shard
    return [groups[tests] for tests in sorted(groups)][number - 1 :: count]


def judged(
    root: Path, groups: Sequence[Sequence[Mutant]], jobs: int, keep: Callable[[list[Verdict]], None] = lambda _: None
) -> list[Verdict]:
    """Every group in one of `jobs` copies, told as each ends; sorted by file. `keep` gets all so far after each."""
    every: list[Verdict] = []
    ends = Lock()
    with ExitStack() as stack:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(min(jobs, len(groups))):
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-mutants-"))
            copies.put(Copy(root, Path(place)))

        def work(group: Sequence[Mutant]) -> None:
            copy = copies.get()
            try:
                found = copy.judge(group)
            finally:
                copies.put(copy)
            with ends:
                print("\n".join(map(line, found)), flush=True)
                every.extend(found)
                every.sort(key=lambda each: (each.file, each.why))
                keep(every)

        pool = stack.enter_context(ThreadPoolExecutor(max(1, jobs)))
        list(pool.map(work, groups))  # raises what a group raised
    return every


def line(each: Verdict) -> str:
    words = f"{each.outcome:<14} {each.seconds:6.1f} s  {each.file}: {each.why}"
    return words if each.outcome == KILLED else f"{words}\n{'':>25}{' '.join(each.tests)}: {each.detail}"


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(each.outcome for each in verdicts)
    return f"{len(verdicts)} mutants: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())


def shard_of(text: str) -> tuple[int, int]:
    """`2/8`: the second of eight."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; I/N with I from 1 to N")
    return int(number), int(count)


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number from 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    found.add_argument("--list", type=Path, default=LIST, help="another list")
    found.add_argument("--root", type=Path, default=ROOT, help="another tree")
    found.add_argument("--only", action="append", default=[], metavar="GLOB", help="mutants of these files; repeatable")
    found.add_argument("--jobs", type=positive, default=1, help="copies of the tree that work at a time")
    found.add_argument("--shard", type=shard_of, default=(1, 1), metavar="I/N", help="one of N parts of the list")
    found.add_argument("--output", type=Path, help="JSON file for the results: benchmarks/results/mutants.json")
    found.add_argument("--commit", default="", help="the tree's commit, where its copy has no git history")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    groups = chosen(read(options.list), options.only, options.shard)
    if not groups:
        print("no mutant fits --only and --shard", file=sys.stderr)
        return 1
    chosen_count, commit = sum(map(len, groups)), options.commit or report.commit()

    def keep(verdicts: Sequence[Verdict]) -> None:
        """A run that is cut off leaves what it found; `of` says how many it would have judged."""
        results = {"of": chosen_count, "outcomes": Counter(each.outcome for each in verdicts), "mutants": verdicts}
        report.write(options.output, "mutants", results, arguments, commit)

    verdicts = judged(options.root, groups, options.jobs, keep if options.output else lambda _: None)
    print(summary(verdicts))
    return 0 if all(each.good for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
