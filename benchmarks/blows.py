"""Blows to processes of a server, and what became of its streams: records of benchmarks/faults.py, goals, the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

KILL, STOP = "SIGKILL", "SIGSTOP"
ROLES = ("executor", "scheduler", "tokenizer", "api")
EMBEDDED_GOAL = 8.0  # seconds of a client's pause when a process of the embedded model's server is killed
ABOVE_LOAD = 3.0  # the same beyond an executor's load time, of a model that takes a while to load
SILENCE = 10.0  # seconds in which a stopped process has to be noticed; its clients pause for so much longer


class Blow(msgspec.Struct, frozen=True):
    """What a process of a role is sent."""

    role: str
    signal: str

    def __str__(self) -> str:
        return f"{self.role}, {'kill -9' if self.signal == KILL else self.signal}" if self.role else "nobody"


NOBODY = Blow("", "")  # the streams once more, undisturbed
BLOWS = (*(Blow(role, KILL) for role in ROLES), *(Blow(role, STOP) for role in ROLES[:3]))


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One blow under open streams. Times in seconds."""

    blow: Blow
    mark: int = 0  # tokens that clients had got together when it fell
    delay: float = 0.0  # by which the launcher puts off the start of one whose like has died within a minute
    streams: int
    own: int = 0  # of them, those that ended with their api process
    same: int  # of the others, those with exactly the undisturbed run's tokens and end
    as_long: int  # those with as many tokens and the same end
    pause: float = 0.0  # the longest time between two events, of the others: median over them
    longest_pause: float = 0.0  # and the longest
    died: float | None = None  # from the blow to the launcher's word of the process's end
    whole: float | None = None  # to its word that every process is there again
    load: float | None = None  # load time of the executor that took the place, by its own word
    blocks: int | None = None  # its KV blocks
    rested: float | None = None  # from the last stream's end until every block and process was back; None: never
    error: str = ""  # of a stream that went wrong, as an example

    @property
    def others(self) -> int:
        """Streams that owe a whole answer."""
        return self.streams - self.own


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One server."""

    name: str
    title: str
    exact: bool  # it owes the very same tokens: its sums do not depend on what shares a step
    goal: float | None  # seconds of a pause; None: load time and ABOVE_LOAD
    tokens: int  # of all streams
    seconds: float  # that they take undisturbed
    start: float  # seconds to readiness
    load: float  # the first executor's load time
    strikes: tuple[Strike, ...] = ()
    left: tuple[str, ...] = ()  # what was left over, in words
    ended: bool = False  # it has come to its end, and what is left was looked for
    environment: dict[str, Any] = {}

    def allowed(self, strike: Strike) -> float:
        """Seconds that a client of this strike may see nothing. The launcher's delay is meant and not load time's."""
        kill = self.goal if self.goal is not None else (strike.load or self.load) + ABOVE_LOAD + strike.delay
        return kill + (SILENCE if strike.blow.signal == STOP else 0.0)

    def kept(self, strike: Strike) -> bool:
        """Whether every stream that owes an answer gave it."""
        return (strike.same if self.exact else strike.as_long) == strike.others

    def met(self, strike: Strike) -> bool:
        """Whether a strike cost no stream, no more time than allowed, and left every block where it belongs."""
        return self.kept(strike) and strike.rested is not None and strike.longest_pause <= self.allowed(strike)


def plan(kills: int, stops: int, roles: Sequence[str] = ROLES) -> tuple[Blow, ...]:
    """So many blows of each kind in rounds, so that the deaths of one process are far apart."""
    times = {KILL: kills, STOP: stops}
    return tuple(
        blow for turn in range(max(kills, stops)) for blow in BLOWS if blow.role in roles and turn < times[blow.signal]
    )


def missed(reports: Sequence[Report]) -> list[str]:
    """What is not as it has to be, in words."""
    found = []
    for report in reports:
        for strike in report.strikes:
            words = f"{report.title}, {strike.blow} after {strike.mark} tokens"
            if not report.kept(strike):
                told = f"{strike.same} the same, {strike.as_long} as long {strike.error}".rstrip()
                found.append(f"{words}: of {strike.others} streams {told}")
            if strike.rested is None:
                found.append(f"{words}: not every block and process came back")
            if strike.longest_pause > report.allowed(strike):
                pause, allowed = strike.longest_pause, report.allowed(strike)
                found.append(f"{words}: a pause of {pause:.1f} s, {allowed:.1f} are allowed")
        found += [f"{report.title}: {what} is left" for what in report.left]
    return found


def table(reports: Sequence[Report]) -> str:
    """Strikes by server and blow, as markdown. A goal that was met stands in bold with what met it."""
    lines = [
        "| Blow | times | streams with the very same tokens | noticed after | load | pause, median | longest | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        lines.append(f"| *{report.title}* | | | | | | | |")
        for blow in (NOBODY, *BLOWS):
            strikes = [strike for strike in report.strikes if strike.blow == blow]
            if strikes:
                lines.append(line(report, strikes))
    return "\n".join(lines)


def line(report: Report, strikes: Sequence[Strike]) -> str:
    """Strikes of one kind; times beside the median are those of the one with the longest pause."""
    worst = max(strikes, key=lambda strike: strike.longest_pause)
    same, others = sum(strike.same for strike in strikes), sum(strike.others for strike in strikes)
    streams = f"{same} of {others}"
    if not report.exact:
        streams += f", {sum(strike.as_long for strike in strikes)} as long"
    longest = seconds(worst.longest_pause)
    met = all(report.met(strike) for strike in strikes)
    cells = [
        str(worst.blow), str(len(strikes)), streams, seconds(worst.died, 2), seconds(worst.load),
        seconds(median(strike.pause for strike in strikes)), f"**{longest}**" if met else longest,
        f"≤ {seconds(report.allowed(worst))}" if worst.blow != NOBODY else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def seconds(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f} s"


def read(file: Path) -> list[Report]:
    """The reports of a file."""
    return msgspec.json.decode(file.read_bytes(), type=list[Report])


def write(file: Path, reports: Sequence[Report]) -> None:
    """Replace a file's reports."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
