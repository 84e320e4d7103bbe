"""Self-test of a model after loading: one prompt through the runner, before the first request.

Damaged weights raise no error: logits become NaN, or favour one token whatever the prompt, and a server answers `!!!!`.
A model folder may hold a canary (`self_test.json`): a prompt, and the tokens of its greedy completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.engine_core.execution.model_runner import Runner
from penstock.protocol.errors import ModelError
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.outputs import Logprobs
from penstock.protocol.steps import SlotStart, StepPlan, StepResult

FILE = "self_test.json"
PROMPT_TOKENS = 24  # of the prompt where there is no canary: tokens from all over the vocabulary
BEST = 8  # log-probabilities of each position that are looked at
CERTAIN = -1e-3  # log-probability from which a model leaves no other token a chance
STRIDE = 2654435761  # Knuth's multiplicative hash


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt and its greedy completion."""

    prompt_token_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Probe:
    """The tokens that the model reads; from `answer` on they are its expected completion."""

    token_ids: tuple[int, ...]
    answer: int  # the length of `token_ids` where nothing is expected


def read_probe(folder: Path, vocabulary: int, longest: int) -> Probe:
    """The folder's canary, or an arbitrary prompt. Raises ModelError for a canary that cannot be read."""
    path = folder / FILE
    if not path.is_file():
        count = min(PROMPT_TOKENS, longest - 1)
        return Probe(tuple((number + 1) * STRIDE % 2**32 % vocabulary for number in range(count)), count)
    try:
        canary = msgspec.json.decode(path.read_bytes(), type=Canary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None
    ids = (*canary.prompt_token_ids, *canary.token_ids)
    if not canary.prompt_token_ids or not all(0 <= token < vocabulary for token in ids) or len(ids) >= longest:
        raise ModelError(f"{path}: a prompt and an answer in token ids of this model are expected")
    return Probe(ids, len(canary.prompt_token_ids))


def trouble(runner: Runner, probe: Probe) -> str:
    """What is wrong with what the model says to the probe, in words; empty where nothing is, and on a stage before the
    last. Members of a group call it together. The runner forgets it."""
    size, groups = runner.options.block_size, runner.sizes.groups
    blocks = -(-len(probe.token_ids) // size) * groups
    assert blocks <= runner.options.blocks, "a cache holds one request of full length"
    numbers = np.arange(1, blocks + 1, dtype="<i4").tobytes()
    start = probe_start(runner, probe, blocks=numbers, sampling=Sampling(temperature=0.0, prompt_logprobs=BEST))
    found = [row.logprobs for result in probed(runner, probe, start) for row in result.prompt_logprobs]
    return judged(found, probe) if runner.options.group.ends else ""


def vector_trouble(runner: Runner, probe: Probe) -> str:
    """The same of an encoder, by the vector of the probe."""
    start = probe_start(runner, probe, blocks=b"", sampling=Sampling(temperature=0.0), pooling=Pooling(kind="mean"))
    (result,) = probed(runner, probe, start)
    (found,) = result.vectors
    values = np.frombuffer(found.values, "<f4")
    if not np.isfinite(values).all():
        return "its vectors are not finite"
    return "the numbers of its vectors are all the same" if (values == values[0]).all() else ""


def probe_start(runner: Runner, probe: Probe, **more: Any) -> SlotStart:
    """The probe in the scratch slot."""
    return SlotStart(
        slot=runner.sizes.max_num_seqs,
        token_ids=np.array(probe.token_ids, "<i4").tobytes(),
        prompt_tokens=len(probe.token_ids),
        computed=0,
        seed=0,
        **more,
    )


def probed(runner: Runner, probe: Probe, start: SlotStart) -> list[StepResult]:
    """What the runner gives for it, chunk by chunk."""
    count, found = len(probe.token_ids), []
    step = count if start.pooling is not None else runner.options.step_tokens or count
    for first in range(0, count, step):
        chunk = np.array([(start.slot, first, min(step, count - first), 0)], "<i4")
        plan = StepPlan(step=0, epoch=0, starts=() if first else (start,), chunks=chunk.tobytes())
        found.append(runner.collect(runner.launch(plan)))
    runner.reset()
    return found


def judged(found: Sequence[Logprobs], probe: Probe) -> str:
    """The same of the log-probabilities of positions 1 to the last."""
    values = np.concatenate([np.frombuffer(part.values, "<f4").reshape(-1, part.width) for part in found])
    ids = np.concatenate([np.frombuffer(part.token_ids, "<i4").reshape(-1, part.width) for part in found])
    best, rest = values[:, 1], values[:, -1]  # the first column is of the token that stands there
    if not np.isfinite(values).all():
        return "its logits are not finite"
    if (best == rest).all():
        return "it gives every token the same chance"
    if len(best) > 1 and (best > CERTAIN).all() and (ids[:, 1] == ids[0, 1]).all():
        return f"it says token {ids[0, 1]} whatever it reads"
    expected = np.array(probe.token_ids[probe.answer :], "<i4")
    said = ids[probe.answer - 1 :, 1]
    if len(expected) and (said != expected).any():
        return f"to the prompt of {FILE} it says {said.tolist()} in place of {expected.tolist()}"
    return ""
