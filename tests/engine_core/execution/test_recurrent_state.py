"""States of slots and snapshots in the runner: what a sequence writes does not depend on how it came to its state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core import loading
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.recurrent_state import StateSizes, recurrent_states
from penstock.engine_core.models import registry
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.memory_estimate import slot_state_bytes, snapshot_bytes, state_places
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec, ring_entries
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.states import ring_length
from penstock.protocol.steps import HOST_PLACES, NO_STATE, StepPlan, keep_window
from tests.engine_core.execution.harness import GREEDY, Life, column, tiny_spec, tokens_of

LENGTH, BLOCK, DRAFTS = 256, 16, 2
TABLES = {0: range(1, 17), 1: range(17, 33)}
LINEAR = GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
PROMPT = [3 + at * at % 90 for at in range(150)]


def hybrid() -> ModelSpec:
    """A recurrent layer before one with attention."""
    spec = tiny_spec()
    first = msgspec.structs.replace(spec.blocks[0], attention=None, recurrence=LINEAR)
    return spec.with_layers((first, spec.blocks[1]))


@pytest.fixture(scope="module")
def runner() -> Runner:
    spec = hybrid()
    model = registry.build(spec, torch.float32, torch.device("cpu"), LENGTH)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy", seed=3)
        pack(model.destinations())
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=40, block_size=BLOCK, max_model_len=LENGTH,
        max_num_seqs=2, row_drafts=DRAFTS, state_places=2,
    )  # fmt: skip
    return Runner(model, spec, options)


def life(slot: int) -> Life:
    return Life(prompt=PROMPT, sampling=GREEDY, slot=slot, blocks=TABLES[slot])


def run(
    runner: Runner,
    slot: int,
    cuts: list[int],
    tokens: int,
    *,
    begin: int = 0,
    state: int = NO_STATE,
    keep: Sequence[int] = (),
    table: int | None = None,
) -> list[int]:
    """Greedy tokens of the prompt in a slot, in chunks that end at `cuts`. keep: positions, kept in places 0, 1, .."""
    blocks = column(*TABLES[slot if table is None else table])
    start = msgspec.structs.replace(life(slot).start(begin), state=state, blocks=blocks)
    found: list[int] = []
    for number, (first, end) in enumerate(zip([begin, *cuts], [*cuts, len(PROMPT)], strict=True)):
        last = end == len(PROMPT)
        plan = StepPlan(
            step=number, epoch=0, starts=(start,) if not number else (), chunks=column(slot, first, end - first, last),
            keep=b"".join(column(slot, at, place, NO_STATE) for place, at in enumerate(keep) if first < at <= end),
        )  # fmt: skip
        found += tokens_of(runner.collect(runner.launch(plan)))
    for number in range(tokens - 1):
        on = column(slot) if not number else b""
        found += tokens_of(runner.collect(runner.launch(StepPlan(step=number, epoch=0, decode_on=on))))
    runner.launch(StepPlan(step=0, epoch=0, decode_off=column(slot)))
    return found


def test_tokens_do_not_depend_on_cuts_or_slots(runner: Runner) -> None:
    """A slot that another sequence has left begins at zero again."""
    expected = run(runner, 0, [], 50)
    assert len(set(expected)) > 3
    assert run(runner, 0, [37, 64, 65, 130], 50) == expected
    assert run(runner, 1, [128], 50) == expected


def test_a_sequence_goes_on_from_a_snapshot(runner: Runner) -> None:
    """In another slot, whose state is another's, over the same blocks."""
    expected = run(runner, 0, [], 40, keep=(64, 128))
    run(runner, 1, [90], 3)
    assert run(runner, 1, [], 40, begin=128, state=1, table=0) == expected
    assert run(runner, 1, [70, 140], 40, begin=64, state=0, table=0) == expected


@pytest.mark.parametrize("cuts", [[], [64, 128], [65], [1, 63, 66, 127, 130], [149]])
def test_snapshots_do_not_depend_on_cuts(runner: Runner, cuts: list[int]) -> None:
    """One that a chunk passes is what its slot would have if the chunk ended there."""
    states = runner._states
    assert states is not None
    snapshots = states._states[runner.options.max_num_seqs + 1 :]
    run(runner, 0, [64, 128], 1, keep=(64, 128))
    expected = snapshots.clone(), states._tails.clone()
    for held in (snapshots, states._tails):
        held.fill_(float("nan"))
    run(runner, 1, cuts, 1, keep=(64, 128))
    assert torch.equal(snapshots, expected[0])
    assert torch.equal(states._tails, expected[1])
    assert not torch.equal(snapshots[0], snapshots[1])


def test_a_state_is_kept_while_its_slot_decodes(runner: Runner) -> None:
    """In any step that begins within the window: its numbers are those of the first such step."""
    expected = run(runner, 0, [], 70)
    found = run(runner, 0, [], 43)  # the next step begins at 192
    last = keep_window(DRAFTS) - 1
    for number in range(last + 1):
        kept = {0: column(0, 192, 0, NO_STATE), last: column(0, 192, 1, NO_STATE)}.get(number, b"")
        plan = StepPlan(step=number, epoch=0, decode_on=column(0) if not number else b"", keep=kept)
        found += tokens_of(runner.collect(runner.launch(plan)))
    runner.launch(StepPlan(step=0, epoch=0, decode_off=column(0)))
    assert found == expected[: len(found)]
    states = runner._states
    assert states is not None
    assert states._tails[0].abs().min() > 0.0
    assert torch.equal(states._tails[0], states._tails[1])
    first = states._states[runner.options.max_num_seqs + 1 :]
    assert torch.equal(first[0], first[1])
    whole = [*PROMPT, *found]
    start = msgspec.structs.replace(life(0).start(192), token_ids=column(*whole), state=1)
    plan = StepPlan(step=0, epoch=0, starts=(start,), chunks=column(0, 192, len(whole) - 192, 1))
    assert tokens_of(runner.collect(runner.launch(plan))) == expected[len(found) :][:1]


def test_rejected_drafts_leave_no_trace(runner: Runner) -> None:
    expected = run(runner, 0, [], 60)
    run(runner, 1, [], 1)
    found: list[int] = []
    for number in range(30):
        wrong, on = column(1, DRAFTS), column(1) if not number else b""
        plan = StepPlan(step=number, epoch=0, decode_on=on, drafts=wrong, draft_ids=column(1, 2))
        found += [token for token in tokens_of(runner.collect(runner.launch(plan))) if token >= 0]
    runner.launch(StepPlan(step=0, epoch=0, decode_off=column(1)))
    assert found == expected[1 : 1 + len(found)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_snapshots_are_copied_to_the_hosts_memory_in_order(device: str) -> None:
    """Behind what was enqueued before, and before what comes then, however long either takes."""
    states = recurrent_states(hybrid(), StateSizes(2, 1, 1, host=2), torch.float32, torch.device(device))
    assert states is not None

    def wait(stream: torch.cuda.Stream | None = None) -> None:
        if device == "cuda":
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)  # cycles

    for number in (1, 2, 3):
        wait()
        states._states[0].fill_(number)
        states._rings[0].fill_(number)
        kept = column(0, 64, 0, number - 2)  # the first time there is nothing to copy
        wait(states._stream)
        states.spill(kept)
        states.keep(kept, np.array([0], np.int32))
    wait(states._stream)
    states.spill(column(0, 64, 0, 0))
    found = []
    for state in (0, HOST_PLACES + 1, HOST_PLACES):
        start = msgspec.structs.replace(life(1).start(0), slot=1, computed=64, state=state)
        states.start([start])
        found.append((states._states[1].clone(), states._rings[1].clone(), states.bases[1].item()))
    for (state, ring, base), number in zip(found, (3, 2, 3), strict=True):
        assert (state == number).all()
        assert set(ring.unique().tolist()) <= {0.0, float(number), 3.0}
        assert (ring == number).sum() >= 3 * LINEAR.channels, "the convolution's latest inputs"
        assert base == 64


def test_what_states_take() -> None:
    spec = hybrid()
    state = 4 * 8 * 12 * 4
    assert snapshot_bytes(spec, 2) == state + 3 * LINEAR.channels * 2
    assert [ring_entries(steps) for steps in range(1, 70)] == [ring_length(steps) for steps in range(1, 70)]
    entry = (2 * 8 + 2 * 4 * 12) * 2 + 2 * 4 * 4
    assert slot_state_bytes(spec, 2, 2) == state + 80 * entry + (3 + 3 + 19) * LINEAR.channels * 2
    assert (snapshot_bytes(tiny_spec(), 2), slot_state_bytes(tiny_spec(), 2, 4)) == (0, 0)
    assert state_places(7, 100, 0, 2) == 7
    assert state_places(0, 100, 4000, 2) == 10
    assert state_places(0, 100, 1 << 30, 2) == 16
    assert state_places(0, 100, -5, 2) == 0
