"""Which processes of a server run on this host, as `--parts` names them, and the addresses that they need.

A part is a role, or numbers of its processes: `api,tokenizer,scheduler,executor:0-3` here, `executor:4-7` there.
Numbers are those in the server. Nothing named is everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role

OPTION = "--parts"
FORM = re.compile(r"(api|tokenizer|scheduler|executor)(?::([0-9]{1,4})(?:-([0-9]{1,4}))?)?")
LIKE = "it must be like api,tokenizer,scheduler,executor:0-3"
COUNTS: Mapping[Role, str] = {
    Role.API: "--api-processes",
    Role.TOKENIZER: "--tokenizer-processes",
    Role.SCHEDULER: "--data-parallel-size",
    Role.EXECUTOR: "--tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size",
}
ORDER = (Role.API, Role.TOKENIZER, Role.SCHEDULER, Role.EXECUTOR)  # from the clients to the device
Parts = Mapping[Role, Sequence[int]]  # numbers of the processes of each role, ascending


class Part(msgspec.Struct, frozen=True):
    """One word of the option."""

    role: Role
    numbers: range | None  # None: all there are

    def __str__(self) -> str:
        if self.numbers is None:
            return self.role.value
        first, last = self.numbers[0], self.numbers[-1]
        return f"{self.role}:{first}" + (f"-{last}" if last > first else "")


def read_parts(text: str) -> tuple[Part, ...]:
    """The words of the option. Raises ConfigError."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        form = FORM.fullmatch(word)
        if form is None:
            raise ConfigError(OPTION, word, LIKE)
        role, first, last = Role(form[1]), form[2], form[3] or form[2]
        if first is not None and int(last) < int(first):
            raise ConfigError(OPTION, word, f"{last} comes before {first}")
        found.append(Part(role, None if first is None else range(int(first), int(last) + 1)))
    if text and not found:
        raise ConfigError(OPTION, text, LIKE)
    return tuple(found)


def count(role: Role, config: Config) -> int:
    """How many processes of a role a server has; 0 where that is left to the host's cores."""
    match role:
        case Role.API:
            return config.api.api_processes
        case Role.TOKENIZER:
            return config.tokenizer.tokenizer_processes
        case Role.SCHEDULER:
            return config.model.data_parallel_size
        case Role.EXECUTOR:
            return groups.executors(config.model)


def parts_of(config: Config) -> Parts:
    """The processes that run on this host: numbers by role, of roles that have any here."""
    named = read_parts(config.run.parts) or tuple(Part(role, None) for role in ORDER)
    found: dict[Role, list[int]] = {}
    for part in named:
        numbers = range(count(part.role, config)) if part.numbers is None else part.numbers
        found.setdefault(part.role, []).extend(numbers)
    return {role: tuple(sorted(found[role])) for role in ORDER if role in found}


def spelled(parts: Parts) -> str:
    """Parts as the option spells them, every number named."""
    words = []
    for role, numbers in parts.items():
        begun: list[int] = []
        for number in numbers:
            if begun and number != begun[-1] + 1:
                words.append(str(Part(role, range(begun[0], begun[-1] + 1))))
                begun = []
            begun.append(number)
        if begun:
            words.append(str(Part(role, range(begun[0], begun[-1] + 1))))
    return ",".join(words)


def check_parts(config: Config) -> None:
    """Raise ConfigError for parts that do not exist, for numbers that each host would choose by itself, and for parts
    of several hosts without an address to connect to."""
    named = read_parts(config.run.parts)
    if not named:
        return
    check_numbers(named, config)
    parts = parts_of(config)
    if (Role.API in parts) != (Role.TOKENIZER in parts) and not config.tokenizer.tokenizer_processes:
        why = "it must be given, the same everywhere, where api and tokenizer processes are on different hosts"
        raise ConfigError("--tokenizer-processes", 0, why)
    check_addresses(parts, {part.role for part in named if part.numbers is None}, config)


def check_numbers(named: Sequence[Part], config: Config) -> None:
    """Raise ConfigError for processes that do not exist, or that are named twice."""
    seen: dict[Role, set[int]] = {}
    for part in named:
        known, there = seen.setdefault(part.role, set()), count(part.role, config)
        if part.numbers is None:
            if sum(other.role is part.role for other in named) > 1:
                raise ConfigError(OPTION, config.run.parts, f"{part.role} without numbers is all of them already")
            continue
        if not there:
            raise ConfigError(OPTION, str(part), f"numbers need {COUNTS[part.role]}, the same on every host")
        if part.numbers[-1] >= there:
            few = f"{COUNTS[part.role]} make {there} of them, the last is number {there - 1}"
            raise ConfigError(OPTION, str(part), few)
        if twice := known.intersection(part.numbers):
            raise ConfigError(OPTION, str(part), f"{part.role} {min(twice)} is named twice")
        known.update(part.numbers)


def check_addresses(parts: Parts, whole: set[Role], config: Config) -> None:
    """Raise ConfigError where a process here needs one on another host without an address. `whole`: roles of which all
    processes are here."""

    def apart(one: Role, other: Role) -> bool:
        return any(
            role in parts and far not in whole and len(parts.get(far, ())) < max(1, count(far, config))
            for role, far in ((one, other), (other, one))
        )

    links = config.links
    if apart(Role.API, Role.TOKENIZER) and not links.tokenizer_address:
        raise missing("--tokenizer-address", "api and tokenizer processes are not all on this host")
    if apart(Role.TOKENIZER, Role.SCHEDULER) and not links.scheduler_address:
        raise missing("--scheduler-address", "tokenizer and scheduler processes are not all on this host")
    schedulers, executors = set(parts.get(Role.SCHEDULER, ())), set(parts.get(Role.EXECUTOR, ()))
    for replica in range(config.model.data_parallel_size):
        members = set(groups.members(replica, config.model))
        ours, scheduled = members & executors, replica in schedulers
        if (ours != members if scheduled else ours) and not links.scheduler_address:
            raise missing("--scheduler-address", f"scheduler {replica} and its executors are not all on this host")
        if ours and ours != members and not config.executor.rendezvous:
            raise missing("--rendezvous", f"executors {min(members)} to {max(members)}, a group, are on several hosts")


def missing(option: str, why: str) -> ConfigError:
    return ConfigError(option, "", f"{why}, as --parts says, so they need tcp://HOST:PORT at which they meet")
