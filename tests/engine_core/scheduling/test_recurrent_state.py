"""States in the schedule: where a sequence begins, and which states are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.messages import SubmitTokens
from penstock.protocol.steps import NO_STATE, StepPlan, keep_window
from tests.sim.executor import ints
from tests.sim.lives import World
from tests.sim.server import Server, chunks

WORLD = World(
    blocks=256, block_size=4, slots=8, budget=64, max_model_len=128, depth=1, recurrent=True, places=16, state_piece=8
)
PROMPT = list(range(2, 32))  # 30 tokens: the last multiple of 8 inside it is 24


def begun(plan: StepPlan | None) -> list[tuple[int, bool]]:
    """Of each start the positions that are computed, and whether a state goes with them."""
    assert plan is not None
    return [(start.computed, start.state != NO_STATE) for start in plan.starts]


def kept(plan: StepPlan | None) -> list[int]:
    """Positions of the states that the step keeps."""
    assert plan is not None
    return [row[1] for row in ints(plan.keep, 4)]


def submit_with_turns(server: Server, prompt: list[int], turns: tuple[int, ...]) -> None:
    """As the tokenizer sends it."""
    submit = server.scheduler.submit

    def with_turns(message: SubmitTokens, *rest: object) -> None:
        submit(with_fields(message, turns=turns), *rest)  # type: ignore[arg-type]

    server.scheduler.submit = with_turns  # type: ignore[method-assign]
    server.submit(prompt)
    server.scheduler.submit = submit  # type: ignore[method-assign]


def test_a_prompt_is_one_step_that_keeps_its_last_multiple():
    server = Server(WORLD)
    server.submit(PROMPT)
    plan = server.step()
    assert [row[1:] for row in chunks(plan)] == [(0, 30, 1)]
    assert kept(plan) == [24]
    server.run()


@pytest.mark.parametrize(("budget", "depth"), [(10, 1), (10, 2), (8, 2)])
def test_chunks_keep_the_states_that_they_pass(budget: int, depth: int):
    server = Server(replace(WORLD, budget=budget, depth=depth))
    submit_with_turns(server, PROMPT, (9, 18))
    found = [kept(server.plan()) for _ in range(depth)]
    while len(found) < 3:
        server.apply()
        found.append(kept(server.plan()))
    assert found == [[8], [16], [24]]
    server.run(depth)


def test_a_hit_begins_from_the_longest_state():
    server = Server(WORLD)
    server.submit(PROMPT)
    server.run()
    server.submit([*PROMPT, 40, 41, 42])
    plan = server.step()
    assert begun(plan) == [(24, True)]
    server.run()
    assert server.seen(2).cached == 24


def test_blocks_without_a_state_are_computed_again():
    server = Server(replace(WORLD, places=0))
    server.submit(PROMPT)
    server.run()
    server.submit(PROMPT)
    assert begun(server.step()) == [(0, False)]
    server.run()


def test_a_state_without_its_blocks_is_no_hit():
    server = Server(WORLD)
    server.submit(PROMPT)
    server.run()
    prefix = server.scheduler._state.kv.prefix
    prefix.forget(next(iter(block for shard in prefix._blocks for block in shard.values())))
    server.submit(PROMPT)
    plan = server.plan()
    assert plan is not None
    assert plan.starts[0].computed < 24
    server.apply()
    server.run()


def test_an_output_is_kept_in_a_place_that_moves_up():
    server = Server(WORLD)
    server.submit(PROMPT, max_tokens=40)
    found = []
    while server.scheduler.unfinished:
        plan = server.step()
        assert plan is not None
        found += [(row[1], row[2]) for row in ints(plan.keep, 4)]
    assert [position for position, _ in found] == [24, 32, 40, 48, 56, 64]
    assert len({place for _, place in found}) == 2, "the prompt's and the one that moved"
    told = PROMPT + server.seen(1).tokens
    server.submit([*told, 50, 51])
    assert begun(server.step()) == [(64, True)]
    server.run()


def test_drafts_keep_states_that_all_of_them_stand_behind():
    speculation = SpeculationOptions(method="ngram", num_speculative_tokens=3)
    server = Server(replace(WORLD, speculation=speculation, depth=2))
    server.submit(PROMPT, max_tokens=60, period=3)
    server.run(depth=2)
    assert server.scheduler.statistics().accepted_tokens > 10
    assert server.scheduler.statistics().snapshots.kept >= 4


def test_ends_of_turns_are_kept():
    server = Server(WORLD)
    submit_with_turns(server, PROMPT, (9, 18))
    assert [kept(server.step()) for _ in range(3)] == [[8, 16, 24], [], []]
    server.run()
    server.submit([*PROMPT[:11], *range(40, 50)])
    assert begun(server.step()) == [(8, True)]
    server.run()


def test_few_ends_of_turns_are_kept():
    server = Server(replace(WORLD, budget=128))
    submit_with_turns(server, list(range(2, 62)) + [3] * 40, tuple(range(8, 100, 8)))
    assert kept(server.step()) == [8, 80, 88, 96]
    server.run()


def test_a_step_values_each_of_its_states_by_what_it_saves_beyond_the_one_before():
    """So the shortest one, which saves most tokens here, outlives the others."""
    server = Server(replace(WORLD, budget=128, places=3))
    submit_with_turns(server, [*range(2, 62), *range(2, 32)], (70, 81))
    assert kept(server.step()) == [64, 80, 88]
    server.run()
    for number in range(2):
        server.submit([number, *range(30, 60)])
        server.run()
    server.submit([*range(2, 62), *range(2, 8), 1, 1, 1])
    assert begun(server.step()) == [(64, True)]
    server.run()


def test_where_two_chains_part_a_state_is_kept():
    server = Server(WORLD)
    server.submit(PROMPT)
    server.run()
    parted = PROMPT[:18]
    server.submit([*parted, *range(40, 52)])
    plan = server.step()
    assert begun(plan) == [(0, False)], "the state as of 24 is of another prefix"
    assert kept(plan) == [16, 24]
    server.run()
    server.submit([*parted, *range(52, 60)])
    assert begun(server.step()) == [(16, True)]
    server.run()


def test_the_second_of_two_waits_for_the_state():
    server = Server(WORLD)
    server.submit(PROMPT)
    server.submit([*PROMPT[:26], 50, 51])
    first = server.step()
    assert begun(first) == [(0, False)]
    assert begun(server.step()) == [(24, True)]
    server.run()


def test_a_leader_is_asked_for_the_state_where_another_parts():
    server = Server(replace(WORLD, budget=10))
    server.submit(PROMPT)
    first = server.step()
    assert [row[1:] for row in chunks(first)] == [(0, 10, 0)]
    server.submit([*PROMPT[:18], *range(40, 50)])
    second = server.step()
    assert [row[1:] for row in chunks(second)] == [(10, 10, 0)], "its chunks are cut before others are admitted"
    server.run()
    server = Server(replace(WORLD, budget=10))
    server.submit(PROMPT)
    server.step()
    server.submit([*PROMPT[:27], *range(40, 50)])
    found = [begun(server.step()) for _ in range(3)]
    assert found == [[], [], [(24, True)]]
    server.run()


def test_a_sequence_that_fails_takes_its_states_along():
    server = Server(WORLD)
    server.submit(PROMPT, fails_at=1)
    server.run()
    assert server.scheduler.statistics().snapshots.held == 0
    server.submit(PROMPT)
    assert begun(server.step()) == [(0, False)]
    server.run()


def test_a_preempted_sequence_begins_from_its_own_state():
    server = Server(replace(WORLD, blocks=24, expected_share=0.0))
    for number in range(3):
        server.submit([number, *PROMPT], max_tokens=30)
    server.run()
    stand = server.scheduler.statistics()
    assert stand.preemptions > 0
    assert stand.snapshots.hits > 0


def test_no_state_outlives_the_executors():
    server = Server(WORLD)
    server.submit(PROMPT)
    server.run()
    server.executor = server.new_executor(1)
    server.scheduler.restart(1, 0.0, state_places=(5, 0))
    assert server.scheduler.statistics().snapshots.total == 5
    server.submit(PROMPT)
    assert begun(server.step()) == [(0, False)]
    server.run()


def test_salts_share_no_state():
    server = Server(WORLD)
    server.submit(PROMPT, salt="a")
    server.run()
    server.submit(PROMPT, salt="bb")
    assert begun(server.step()) == [(0, False)]
    server.run()


def test_rows_that_began_together_are_kept_a_few_at_a_time():
    server = Server(replace(WORLD, budget=256))
    for number in range(8):
        server.submit([number, *PROMPT[1:24]], max_tokens=20)
    sizes = []
    while server.scheduler.unfinished:
        plan = server.step()
        assert plan is not None
        if not plan.chunks:
            sizes.append(len(kept(plan)))
    assert max(sizes) == 4
    assert sum(sizes) >= 16


def test_a_state_that_is_too_far_behind_is_not_kept():
    """Executors have it no more, and the row waits for the next one."""
    speculation = SpeculationOptions(max_row_drafts=0)
    world = replace(
        WORLD, blocks=1024, block_size=16, slots=70, budget=8192, max_model_len=256, places=200, state_piece=64,
        speculation=speculation,
    )  # fmt: skip
    server = Server(world)
    for number in range(70):
        server.submit([number % 35, number // 35, *PROMPT[2:], *PROMPT], max_tokens=100)
    found: list[int] = []
    while server.scheduler.unfinished:
        found += kept(server.step())
    assert {position: found.count(position) for position in found} == {64: 4 * keep_window(0), 128: 4 * keep_window(0)}


def test_a_dense_model_has_none():
    server = Server(replace(WORLD, recurrent=False, places=0))
    server.submit(PROMPT)
    plan = server.step()
    assert plan is not None
    assert plan.keep == b""
    assert server.scheduler.statistics().snapshots is None
    server.run()
