"""A small model that sees images, in a runner: prompts with random pictures, whose rows the encoder has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from penstock.engine_core import loading
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.cuda_graphs import GraphSizes
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.encoder import Encoder
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.images.processor_spec import ProcessorSpec, Size, SmartResize
from penstock.engine_core.models import registry
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.images import EncodeImage
from penstock.protocol.messages import Sampling
from penstock.protocol.step_columns import image_table
from penstock.protocol.steps import SlotStart, StepPlan, StepResult
from tests.engine_core.execution.harness import column, tokens_of
from tests.engine_core.models.specs import small_spec

IMAGE, VOCABULARY, LENGTH, BLOCK = 5, 96, 256, 8
CPU = torch.device("cpu")
SCORED = Sampling(temperature=0.0, logprobs=0, prompt_logprobs=0)
VISION = VisionSpec(
    kind="qwen", token_id=IMAGE, patch=4, merge=2, layers=3, hidden=16, heads=2, width=16, outputs=32, frames=2,
    positions=5, theta=1e4, levels=(0, 2), mrope=True,
    processor=ProcessorSpec(mean=(0.5,) * 3, std=(0.5,) * 3, resize=SmartResize(least=64, most=1 << 14, factor=8)),
)  # fmt: skip
ROPE = RopeSpec(sections=(2, 1, 1), sections_alternate=True)


def seeing_spec(vision: VisionSpec = VISION, *, layers: int = 3) -> ModelSpec:
    """Qwen3-VL's kind, but for the norms of queries and keys."""
    rope = ROPE if vision.mrope else RopeSpec()
    spec = small_spec(layers=layers, vocab_size=VOCABULARY, max_position=LENGTH, longest=LENGTH, rope=rope)
    return replace(spec, vision=vision)


class Scene:
    """A runner over a model, and its vision encoder, which a later stage has not."""

    def __init__(
        self, model: Decoder, tower: Tower | None, draft: Draft | None = None, graphs: GraphSizes | None = None,
        *, adapters: bool = False,
    ) -> None:  # fmt: skip
        assert model.spec.vision is not None, "it sees images"
        self.model, self.vision, slots = model, model.spec.vision, 3
        self.encoder = None if tower is None else Encoder(tower, 64)
        options = RunnerOptions(
            device=model.placement.device, dtype=torch.float32, graphs=graphs, blocks=slots * LENGTH // BLOCK,
            block_size=BLOCK, max_model_len=LENGTH, max_num_seqs=slots, group=model.placement.group,
            step_tokens=LENGTH, encoder=self.encoder, row_drafts=0 if draft is None else draft.tokens,
            adapters=AdapterPlaces(model, model.spec, 1, 8) if adapters else None,
        )  # fmt: skip
        self.runner = Runner(model, model.spec, options, draft)

    def adapt(self, adapter: torch.Tensor | None = None) -> None:
        """Put an adapter, or a random one, into place 1."""
        assert self.runner.adapters is not None, "there are places"
        memory = self.runner.adapters.places.memory
        if adapter is None:
            adapter = torch.randn(memory.shape[1:], generator=torch.Generator().manual_seed(9)).to(memory.dtype) * 0.3
        self.runner.adapters.loaded = {0: adapter}
        self.launch(adapters=column(0, 1))

    def prompt(self, *parts: int | Size, slot: int = 0, adapter: int = 0) -> Prompt:
        """So many random tokens of text, or a picture, one behind the other; its pictures' rows are in the cache.
        adapter: its place."""
        chance = np.random.default_rng(7)
        tokens: list[int] = []
        images: list[tuple[int, Size]] = []
        for part in parts:
            if isinstance(part, int):
                tokens += chance.integers(10, VOCABULARY, part).tolist()
            else:
                images.append((len(tokens), part))
                tokens += [self.vision.token_id] * self.vision.rows(part)
        found = Prompt(tokens, images, slot, adapter)
        for at, row in enumerate(image_table(found.start(self.vision).images)):
            self.encode(images[at][1], at, int(row[2]))
        return found

    def encode(self, size: Size, seed: int, first_row: int) -> None:
        """Put the rows of a random picture into the cache."""
        if self.encoder is None:
            return
        self.encoder.begin(asked(size, seed, first_row, self.vision.rows(size)))
        while not self.encoder.launch().last:
            pass
        assert not self.encoder.trouble()

    def launch(self, **columns: Any) -> StepResult:
        return self.runner.collect(self.runner.launch(StepPlan(step=1, epoch=0, **columns)))

    def run(
        self, prompt: Prompt, cuts: Sequence[int] = (), *, computed: int = 0, read: Sequence[bool] = (),
        decodes: int = 0,
    ) -> list[StepResult]:  # fmt: skip
        """Run the prompt, cut at these positions, and then so many steps of decoding; its output grows."""
        known = len(prompt.token_ids) + len(prompt.output)
        starts = (prompt.start(self.vision, computed=computed, read=read),)
        found, first = [], computed
        for end in (*[cut for cut in cuts if computed < cut < known], known):
            chunks = column(prompt.slot, first, end - first, int(end == known))
            found.append(self.launch(starts=starts, chunks=chunks))
            starts, first = (), end
        found += [self.launch(decode_on=column(prompt.slot) if step == 0 else b"") for step in range(decodes)]
        if decodes:
            self.launch(decode_off=column(prompt.slot))
        prompt.output += [token for result in found for token in tokens_of(result)]
        return found


def made(spec: ModelSpec, group: Group = ALONE, *, adapters: bool = False) -> Scene:
    """With random weights."""
    with torch.inference_mode():
        model = registry.build(spec, torch.float32, CPU, LENGTH, group=group)
        tower = registry.build_tower(model)
        loading.load(model, Path(), "dummy", 3, tower)
    return Scene(model, tower, adapters=adapters)


def asked(size: Size, seed: int, first_row: int, rows: int, number: int = 1) -> EncodeImage:
    """A random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8).tobytes()
    return EncodeImage(
        number=number, first_row=first_row, rows=rows, width=size.width, height=size.height, pixels=pixels
    )


@dataclass
class Prompt:
    """A request: text, and pictures of these sizes, each at a position of its own; the seed of picture i is i."""

    token_ids: Sequence[int]
    images: Sequence[tuple[int, Size]] = ()  # position, size
    slot: int = 0
    adapter: int = 0
    output: list[int] = field(default_factory=list)

    def start(self, vision: VisionSpec, *, computed: int = 0, read: Sequence[bool] = ()) -> SlotStart:
        """read: whether steps read each image; else it has no rows."""
        rows, first = [], 0
        for at, (position, size) in enumerate(self.images):
            count = vision.rows(size)
            held = not read or read[at]
            rows.append((position, count, first if held else -1, size.width, size.height))
            first += count
        blocks = 1 + self.slot * LENGTH // BLOCK + np.arange(LENGTH // BLOCK)
        return SlotStart(
            slot=self.slot, token_ids=column(*self.token_ids, *self.output), prompt_tokens=len(self.token_ids),
            computed=computed, blocks=column(*blocks.tolist()), sampling=SCORED, seed=1,
            images=np.array(rows, "<i4").tobytes(), adapter=self.adapter,
        )  # fmt: skip


def scores(results: Sequence[StepResult]) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens and of the sampled ones."""
    parts = [row.logprobs.values for result in results for row in (*result.prompt_logprobs, *result.logprobs)]
    return torch.cat([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts])
