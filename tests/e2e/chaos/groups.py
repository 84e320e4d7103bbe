"""A group of executors under streams of all kinds, one member of which is killed or stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.e2e.chaos.leftovers import at_rest
from tests.e2e.chaos.streams import Answer, answers, bodies, marks
from tests.e2e.server import Server, command_line, descendants

STREAMS = 16
TOKENS = 16


def executors(server: Server) -> list[int]:
    """Pids by rank."""
    found = {}
    for pid in descendants(server.process.pid):
        words = command_line(pid)
        if b"executor" in words:
            found[next(word for word in words if word.startswith(b"--index="))] = pid
    return [found[index] for index in sorted(found)]


def calm(server: Server) -> list[Answer]:
    """What all streams say when nobody is disturbed."""
    found = answers(server.url, bodies(STREAMS, TOKENS))
    at_rest(server)
    return found


def disturbed(server: Server, undisturbed: Sequence[Answer], number: int, member: int) -> None:
    """Send a signal to one member in a run of all streams, and see its group back."""
    total = sum(len(ids) for answer in undisturbed for ids in answer.tokens.values())
    died = f"process_died child=executor-{member}"
    deaths = server.log.read_text().count(died)

    def disturb(_: int) -> None:
        os.kill(executors(server)[member], number)

    found = answers(server.url, bodies(STREAMS, TOKENS), marks(1, total, 1), disturb)
    for expected, answer in zip(undisturbed, found, strict=True):
        assert answer.said == expected.said
        assert answer.error is None
        assert answer.done == 1
    server.logged(died, deaths + 1)  # which may be later: engines are ahead of clients
    at_rest(server)
    print(
        f"\nmember {member}, signal {number}: the longest pause {max(answer.longest_pause for answer in found):.1f} s"
    )
