"""Random checkpoints as transformers writes them, and our model driven over them by chunks through shuffled pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from penstock.engine_core.execution.forward import kv_pages
from penstock.engine_core.execution.long_rows import find_long_rows
from penstock.engine_core.execution.recurrent_state import StateSizes, recurrent_states
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.loading import load
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.kernels.records import DECODING, AttentionBatch, InputRows
from tests.engine_core.models.specs import tensor_shapes

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHUNKS = (17, 1, 40, 1, 1, 23)  # of one prompt
PROMPT = sum(CHUNKS)
GREEDY = 64  # tokens behind it


def write_checkpoint(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **save: Any) -> None:
    """Random weights, biases and norms of a scale at which every part of the model matters to the logits. States fade
    slowly: what is read of one that has a token or two is sometimes near nothing, and norms make its rounding large."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            mean = -2.0 if name.endswith("A_log") else 0.0 if name.endswith("bias") else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.3)
    model.to(dtype).save_pretrained(folder, **save)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def ours(folder: Path, dtype: torch.dtype = torch.float32, length: int = 0) -> Decoder:
    spec = read_spec(folder)
    model = build(spec, dtype, torch.device("cpu"), length or spec.max_position)
    load(model, folder)
    return model


class Sequence:
    """One request's tokens, how many of them are in the pages, and the logits found so far."""

    def __init__(self, ids: list[int], table: Tensor) -> None:
        self.ids = ids
        self.table = table
        self.computed = 0
        self.logits: list[Tensor] = []


class PagedRun:
    """Sequences that share pages; every page is full of NaN until it is written, and tables are shuffled.

    expanded: queries of a row from which latents are expanded; 0: never.
    """

    def __init__(
        self, model: Decoder, prompts: list[list[int]], block_size: int = 8, room: int = 256, expanded: int = 0
    ) -> None:
        self.expanded = expanded
        if isinstance(model, Decoder):
            pack(model.destinations())
        self.model = model
        self.block_size = block_size
        wide = -(-room // block_size)
        blocks = 1 + wide * len(prompts)
        spec = model.spec
        self.cache = kv_pages(spec, blocks - 1, block_size, model.dtype, torch.device("cpu"))
        for part in itertools.chain(*self.cache):
            part.fill_(math.nan)
        tables = (torch.randperm(blocks - 1) + 1).int().view(len(prompts), wide)
        sizes = StateSizes(len(prompts), 0, 1)
        self.states = recurrent_states(spec, sizes, model.dtype, torch.device("cpu"))
        self.sequences = [Sequence(list(ids), table) for ids, table in zip(prompts, tables, strict=True)]

    def step(self, counts: list[int]) -> None:
        """Run so many positions of each sequence; one with none stays out of the batch."""
        slots_of = torch.tensor([at for at, count in enumerate(counts) if count], dtype=torch.int32)
        rows = [(sequence, count) for sequence, count in zip(self.sequences, counts, strict=True) if count]
        ids, positions, slots = [], [], []
        for sequence, count in rows:
            new = torch.arange(sequence.computed, sequence.computed + count)
            ids += sequence.ids[sequence.computed :][:count]
            positions.append(new)
            slots.append(sequence.table[new // self.block_size].long() * self.block_size + new % self.block_size)
            sequence.computed += count
        sizes = [count for _, count in rows]
        context = [sequence.computed for sequence, _ in rows]
        states = None
        if self.states is not None:
            starts = [DECODING if count == 1 else end - count for end, count in zip(context, sizes, strict=True)]
            ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
            step = InputRows(ends, slots_of, torch.tensor(starts, dtype=torch.int32), ends)
            keys = torch.tensor(context, dtype=torch.int32)
            states = self.states.step(step, keys, len(ids), max(sizes), len(rows))
        long_rows = None
        if self.expanded:
            starts = np.array([end - count for end, count in zip(context, sizes, strict=True)], np.int32)
            query_start = np.array([0, *itertools.accumulate(sizes)], np.int32)
            long_rows = find_long_rows(query_start, starts, Upload(torch.device("cpu")), self.expanded)
        batch = AttentionBatch(
            states=states,
            long_rows=long_rows,
            query_start=torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32),
            context=torch.tensor(context, dtype=torch.int32),
            slots=torch.arange(len(rows), dtype=torch.int32),
            block_tables=torch.stack([sequence.table for sequence, _ in rows]),
            slot_mapping=torch.cat(slots),
            max_query=max(sizes),
            max_context=max(context),
        )
        hidden = self.model.forward(torch.tensor(ids), torch.cat(positions), batch, self.cache)
        for (sequence, _), part in zip(rows, self.model.logits(hidden).split(sizes), strict=True):
            sequence.logits.append(part)

    def prefill(self, chunks: tuple[int, ...] = CHUNKS) -> None:
        """All prompts, each by the chunks in an order of its own, so that chunks of all sizes meet in one batch."""
        orders = [chunks[turn:] + chunks[:turn] for turn in range(len(self.sequences))]
        for counts in zip(*orders, strict=True):
            self.step(list(counts))

    def greedy(self, tokens: int) -> list[list[int]]:
        """Continue every sequence by so many most likely tokens."""
        found: list[list[int]] = [[] for _ in self.sequences]
        for _ in range(tokens):
            for sequence, out in zip(self.sequences, found, strict=True):
                out.append(int(sequence.logits[-1][-1].argmax()))
                sequence.ids.append(out[-1])
            self.step([1] * len(self.sequences))
        return found


def random_prompts(count: int, length: int = PROMPT) -> list[list[int]]:
    return torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(3)).tolist()


@torch.inference_mode()
def check_parity(
    folder: Path, config: PreTrainedConfig, *, block_size: int = 8, chance: float = 1.1, expanded: int = 0
) -> None:
    """fp32: logits within 1e-4 at every position, GREEDY tokens identical. bf16: as near to fp32 as theirs is.

    chance: of rounding; more where it decides which experts a token goes to. expanded: as of `PagedRun`; 0: not tried.
    """
    write_checkpoint(folder, config)
    reference = theirs(folder)
    prompts = random_prompts(3)
    expected = reference(torch.tensor(prompts)).logits
    model = ours(folder)
    check_weights(folder, model.spec)  # as before a start, by names and shapes alone
    assert tensor_shapes(model.spec) == {name: place.shape for name, place in model.destinations().items()}
    run = PagedRun(model, prompts, block_size)
    run.prefill()
    for sequence, logits in zip(run.sequences, expected, strict=True):
        torch.testing.assert_close(torch.cat(sequence.logits), logits, atol=1e-4, rtol=0)
    check_greedy(reference, run, prompts)
    check_bfloat16(folder, prompts, expected, block_size, chance)
    if expanded:
        run = PagedRun(model, prompts, block_size, expanded=expanded)
        run.prefill()
        for sequence, logits in zip(run.sequences, expected, strict=True):
            torch.testing.assert_close(torch.cat(sequence.logits), logits, atol=1e-4, rtol=0)


def check_greedy(reference: PreTrainedModel, run: PagedRun, prompts: list[list[int]]) -> None:
    generated = reference.generate(
        torch.tensor(prompts), do_sample=False, min_new_tokens=GREEDY, max_new_tokens=GREEDY, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    assert run.greedy(GREEDY) == generated[:, PROMPT:].tolist()


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Virtual machines exist that announce AMX, which oneDNN then takes for bfloat16, and trap on it."""
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def check_bfloat16(folder: Path, prompts: list[list[int]], exact: Tensor, block_size: int, chance: float) -> None:
    """Our error against fp32 is no larger than transformers' own, up to the chance of rounding."""
    with without_mkldnn():
        rounded = theirs(folder, torch.bfloat16)(torch.tensor(prompts)).logits.float()
        run = PagedRun(ours(folder, torch.bfloat16), prompts, block_size)
        run.prefill()
    found = torch.stack([torch.cat(sequence.logits) for sequence in run.sequences])
    their_error, our_error = (rounded - exact).abs(), (found - exact).abs()
    assert our_error.mean() <= chance * their_error.mean()
    assert our_error.max() <= 2.0 * chance * their_error.max()
