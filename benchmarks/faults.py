"""Processes that are killed and stopped under open streams: `python -m benchmarks.faults`, on an H200 with `--h200`.

64 streams run undisturbed, once more to see that they are the same, and again for each blow: at a random moment of
them, counted in tokens that their clients have got, one process of a role is killed (kill -9) or stopped (SIGSTOP).
Every stream is held against the undisturbed one, token by token; those of a killed api process end with it. The pause
is the longest time between two events that a client saw. After each blow every block and process has to come back, and
when the server has ended, no process, file, memory or memory of the device may be left of it.

With `--h200` two servers have the 8B shape: one with `--batch-invariant`, which owes the very same tokens, and one
without, whose bf16 sums depend on what shares a step: it owes as many tokens. Reports go to
benchmarks/results/faults_cpu.json or h200/faults.json, written anew after each blow; `--table` prints what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import blows
from benchmarks.blows import EMBEDDED_GOAL, NOBODY, ROLES, Blow, Report, Strike
from benchmarks.h200 import VOCAB_MARGIN, device
from benchmarks.leftovers import REST_LIMIT, device_memory, grown, processes, remains, rests, soon
from benchmarks.load.streams import Answer, play
from benchmarks.report import ROOT, header
from benchmarks.server import Server, serving, with_bytecode
from benchmarks.shapes import EIGHT, SMOKE, make_folder
from benchmarks.soak import below, memory_of
from penstock.services.bench.client import target
from penstock.services.supervisor.restart_policy import DELAYS, LIMIT, WINDOW

RESULTS = ROOT / "benchmarks" / "results"
TWO_EACH = ("--api-processes", "2", "--tokenizer-processes", "2")
DUMMY = ("--load-format", "dummy", "--max-model-len", "4096", "--gpu-memory-utilization", "0.90")
SHARE = (0.05, 0.8)  # of all tokens, between which blows fall


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A server and the streams it gets."""

    name: str
    title: str
    model: tuple[str, ...]  # its folder; nothing: the embedded one
    arguments: tuple[str, ...]
    exact: bool
    goal: float | None
    vocab: int  # ids that prompts draw from are below
    plan: tuple[Blow, ...]
    streams: int
    prompt: int  # tokens
    tokens: int  # of each answer


def settings(options: argparse.Namespace, folder: Path | None) -> list[Setting]:
    """What the options ask for; `folder` is of the 8B shape."""
    extra, roles = tuple(shlex.split(options.server_args)), options.roles.split(",")
    full = blows.plan(options.kills, options.stops, roles)
    if folder is None:
        arguments = (*TWO_EACH, "--max-num-seqs", "96", *extra)
        return [Setting(name="embedded", title="embedded model", model=(), arguments=arguments, exact=True,
                        goal=EMBEDDED_GOAL, vocab=int(SMOKE.vocab * VOCAB_MARGIN), plan=full,
                        streams=options.streams, prompt=16, tokens=options.tokens or 60)]  # fmt: skip
    invariant = Setting(name="8b_invariant", title="8B, --batch-invariant", exact=True, goal=None, plan=full,
                        model=(str(folder),), arguments=(*DUMMY, *TWO_EACH, "--batch-invariant", *extra),
                        vocab=int(EIGHT.vocab * VOCAB_MARGIN), streams=options.streams, prompt=128,
                        tokens=options.tokens or 384)  # fmt: skip
    recomputed = blows.plan(1, 0, [role for role in roles if role in ("executor", "scheduler")])
    fast = msgspec.structs.replace(invariant, name="8b", title="8B", exact=False, plan=recomputed,
                                   arguments=(*DUMMY, *TWO_EACH, *extra))  # fmt: skip
    return [setting for setting in (invariant, fast) if setting.name in options.servers.split(",")]


def bodies(setting: Setting) -> list[bytes]:
    """Requests of random prompts: two greedy ones, then one with a seed, and so on."""
    found = []
    for number in range(setting.streams):
        chance = random.Random(f"fault {number}")
        kind = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 3 == 2 else {"temperature": 0}
        prompt = [chance.randrange(10, setting.vocab) for _ in range(setting.prompt)]
        body = {"prompt": prompt, "max_tokens": setting.tokens, "ignore_eos": True, "stream": True}
        found.append(msgspec.json.encode(body | kind | {"return_token_ids": True}))
    return found


class Deaths:
    """Of processes, by role and number, within the last minute: what the launcher makes of them."""

    def __init__(self) -> None:
        self._times: defaultdict[tuple[str, int], deque[float]] = defaultdict(deque)

    def wait(self, process: tuple[str, int], now: float) -> float:
        """Seconds until a further death is not the last of too many."""
        recent = self._recent(process, now)
        return recent[0] + WINDOW - now if len(recent) == LIMIT - 1 else 0.0

    def add(self, process: tuple[str, int], now: float) -> float:
        """A process dies; seconds by which the launcher puts off its start."""
        recent = self._recent(process, now)
        recent.append(now)
        return DELAYS[min(len(recent), len(DELAYS)) - 1]

    def _recent(self, process: tuple[str, int], now: float) -> deque[float]:
        times = self._times[process]
        while times and now - times[0] >= WINDOW:
            times.popleft()
        return times


class Injection:
    """One server's blows, one after the other, and what became of its streams."""

    def __init__(self, server: Server, setting: Setting, limit: float, seed: int) -> None:
        self._server, self._setting, self._limit = server, setting, limit
        self._where, self._bodies = target(server.url), bodies(setting)
        self._chance = random.Random(f"blows {seed}")
        self._deaths = Deaths()
        began = time.monotonic()
        self.undisturbed = self._play()
        self.seconds = time.monotonic() - began
        self.tokens = sum(len(answer.tokens) for answer in self.undisturbed)
        self.wrong = next((answer.error for answer in self.undisturbed if answer.error), "")

    def strike(self, blow: Blow) -> Strike:
        """The streams again, with this blow in the midst of them."""
        fell: list[float] = []

        def fall() -> None:
            os.kill(processes(self._server.pid, blow.role)[place], signal.Signals[blow.signal])
            fell.append(time.time())

        if blow == NOBODY:
            mark, delay, found = 0, 0.0, self._play()
        else:
            place = self._chance.randrange(len(processes(self._server.pid, blow.role)))
            time.sleep(self._deaths.wait((blow.role, place), time.monotonic()))
            delay = self._deaths.add((blow.role, place), time.monotonic())
            mark = self._chance.randint(*(int(share * self.tokens) for share in SHARE))
            found = self._play(mark, fall)
        over = time.time()
        rested = short(time.time() - over) if soon(lambda: rests(self._server.url, over), REST_LIMIT) else None
        own = [answer.error.startswith("disconnected") and blow.role == "api" for answer in found]
        pairs = [pair for *pair, lost in zip(found, self.undisturbed, own, strict=True) if not lost]
        errors = [answer.error for answer, _ in pairs if answer.error]
        if blow != NOBODY and not fell:
            errors.append("the streams were over before the blow")
        pauses = [answer.pause for answer, _ in pairs] or [0.0]
        load, blocks = loaded(self._server) if blow.role == "executor" else (None, None)
        return Strike(
            blow=blow, mark=mark, delay=delay, streams=len(found), own=sum(own),
            same=sum(answer.same(before) for answer, before in pairs),
            as_long=sum(answer.as_long(before) for answer, before in pairs),
            pause=short(median(pauses)), longest_pause=short(max(pauses)), rested=rested,
            error=errors[0] if errors else "",
            died=said(self._server, f"process_died child={blow.role}-", fell),
            whole=said(self._server, "serving_again", fell), load=load, blocks=blocks,
        )  # fmt: skip

    def _play(self, mark: int = 0, fall: Callable[[], None] | None = None) -> list[Answer]:
        return asyncio.run(play(self._where, self._bodies, self._limit, mark, fall))


def said(server: Server, words: str, fell: Sequence[float]) -> float | None:
    """Seconds from a blow to the first line of the log with these words after it."""
    for line in server.lines(words) if fell else ():
        stamp = datetime.datetime.fromisoformat(line.split(maxsplit=1)[0].replace("Z", "+00:00")).timestamp()
        if stamp >= fell[0] - 0.001:  # stamps are cut to milliseconds
            return max(0.0, short(stamp - fell[0]))
    return None


def short(value: float) -> float:
    return round(value, 3)


def loaded(server: Server) -> tuple[float, int]:
    """Seconds and KV blocks of the executor that was loaded last."""
    found = re.search(r" loaded .*\bblocks=(\d+).* seconds=(\S+)", server.lines(" loaded ")[-1])
    assert found is not None
    return float(found[2]), int(found[1])


class Run:
    """One go over some servers; what is done stands in the file."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str] | None = None) -> None:
        self.options = options
        self.reports: list[Report] = []
        self.environment = header("faults", words, options.commit)

    def server(self, setting: Setting, place: Path) -> None:
        """Start one, strike it, end it. Raises TimeoutError when it does not start."""
        run_dir, memory = place / f"run-{setting.name}", device_memory()
        caches = {name: os.environ.get(name, str(place)) for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
        caches |= with_bytecode(place)
        with serving([*setting.model, *setting.arguments, "--run-dir", str(run_dir)], caches) as server:
            chip = device(server)
            injection = Injection(server, setting, self.options.limit, self.options.seed)
            load, kv = loaded(server)
            print(f"{setting.title}: ready after {server.seconds:.1f} s, loaded in {load:.2f} s, {kv} blocks")
            took = f"{injection.tokens} tokens in {injection.seconds:.2f} s {injection.wrong}"
            print(f"{took}\n{server.tail()}", flush=True)
            report = Report(
                name=setting.name, title=setting.title, exact=setting.exact, goal=setting.goal, tokens=injection.tokens,
                seconds=round(injection.seconds, 3), start=round(server.seconds, 2), load=load,
                environment={**self.environment, "chip": chip, "server_arguments": " ".join(setting.arguments)},
            )  # fmt: skip
            self.keep(report)
            had: dict[str, float] = {}
            for blow in (NOBODY, *setting.plan):
                strike = injection.strike(blow)
                had = had or memory_of(server.pid)
                report = msgspec.structs.replace(report, strikes=(*report.strikes, strike))
                self.keep(report)
                print(f"{msgspec.json.encode(strike).decode()}\n{server.tail()}", flush=True)
                if not server.running or strike.rested is None:
                    break
            left, pids = grown(had, memory_of(server.pid)), [server.pid, *below(server.pid)]
        left += remains(server, pids, run_dir, memory)
        self.keep(msgspec.structs.replace(report, left=tuple(left), ended=True))

    def keep(self, report: Report) -> None:
        self.reports = [one for one in self.reports if one.name != report.name] + [report]
        blows.write(self.options.output, self.reports)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--h200", action="store_true", help="the 8B shape on a GPU, in place of the embedded model")
    found.add_argument("--servers", default="8b_invariant,8b", help="with --h200: of these, with commas")
    found.add_argument("--roles", default=",".join(ROLES), help="whose processes are struck, with commas")
    found.add_argument("--kills", type=int, default=2, help="kill -9 of each role")
    found.add_argument("--stops", type=int, default=1, help="SIGSTOP of each role but the api")
    found.add_argument("--streams", type=int, default=64)
    found.add_argument("--tokens", type=int, default=0, help="of each stream; 0: 60, and 384 with --h200")
    found.add_argument("--limit", type=float, default=240.0, help="seconds that the streams of one blow may take")
    found.add_argument("--seed", type=int, default=1, help="of the moments and of who is struck")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--output", type=Path, help="file of the reports")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    found.add_argument("--table", action="store_true", help="print the table of the reports that are there, and end")
    found.add_argument("--smoke", action="store_true", help="few short streams, one kill and no stop")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.output = options.output or RESULTS / ("h200/faults.json" if options.h200 else "faults_cpu.json")
    if unknown := set(options.roles.split(",")) - set(ROLES):
        print(f"--roles: {unknown.pop()!r} is not allowed; of {', '.join(ROLES)}", file=sys.stderr)
        return 2
    if options.smoke:
        options.streams, options.tokens, options.kills, options.stops = 4, 16, 1, 0
    failed = False
    reports = blows.read(options.output) if options.table else []
    if not options.table:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended, too
        run = Run(options, arguments)
        with tempfile.TemporaryDirectory(prefix="penstock-faults-") as place:
            folder = make_folder(EIGHT, Path(place)) if options.h200 else None
            for setting in settings(options, folder):
                try:
                    run.server(setting, Path(place))
                except TimeoutError as error:
                    failed = True
                    print(f"{setting.title}: {error}", file=sys.stderr, flush=True)
        reports = run.reports
    print(blows.table(reports))
    for complaint in blows.missed(reports):
        print(complaint)
    return int(failed or bool(blows.missed(reports)))


if __name__ == "__main__":
    sys.exit(main())
