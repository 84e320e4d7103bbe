"""Blocks behind windows go back to the pool when a step is applied, and can be found there."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.server import ROOMY, Server
from tests.sim.simulation import check_accounts

WINDOWED = replace(ROOMY, windows=(0, 8), depth=2)  # blocks of 4


def test_a_sequence_holds_what_its_window_needs() -> None:
    server = Server(WINDOWED)
    server.submit(list(range(30)), max_tokens=20)
    state = server.scheduler._state
    held = []
    while server.step() is not None:
        check_accounts(server.scheduler)
        held.append(server.scheduler.statistics().group_blocks)
    assert max(full for full, _ in held) == 12  # 49 positions, the last of which come with its end
    assert max(window for _, window in held) == 3  # its last 8, which begin anywhere
    assert state.kv.pool.held == 0


def test_what_was_given_back_is_a_hit() -> None:
    """The prompt's last window is still in the pool, though nobody holds it."""
    server = Server(WINDOWED)
    server.submit(list(range(30)), max_tokens=20)
    while server.step() is not None:
        pass
    server.submit([*range(30), 7], max_tokens=2)
    plan = server.step()
    assert plan is not None
    assert plan.starts[0].computed == 28
    server.run()


def test_nothing_goes_back_while_a_step_in_flight_may_read_it() -> None:
    server = Server(WINDOWED)
    server.submit(list(range(12)), max_tokens=9)
    server.step()
    before = server.scheduler.statistics().group_blocks
    server.plan()
    assert server.scheduler.statistics().group_blocks >= before  # plans give nothing back
    server.plan()
    server.apply()
    server.apply()
    check_accounts(server.scheduler)
    server.run()
