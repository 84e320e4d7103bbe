"""The draft model beside the model: found, held against it, loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from engine_core import folder, loading
from engine_core.execution.drafting import Draft
from engine_core.loading.heads import load_head
from engine_core.models import registry
from engine_core.models.decoder import Decoder
from engine_core.models.spec import ModelSpec, read_spec
from engine_core.text.codec import read_codec
from protocol.config import Config
from protocol.errors import ConfigError
from protocol.speculation import FLAG, WITH_MODEL, read_speculative

OPTION = f"{FLAG} model"


def load_draft(config: Config, model: Decoder, target: Path, length: int) -> Draft | None:
    """What the executors draft with, in the model's type on its device; None without such a method.

    target: the model's folder. length: of the longest sequence. Raises ModelError for a wrong folder and for an EAGLE
    head of another model, ConfigError for a draft model that does not go with the model.
    """
    asked = read_speculative(config.scheduler.speculative_config)
    if asked.method not in WITH_MODEL:
        return None
    path = folder.resolve_draft(asked.model)
    if asked.method == "eagle":
        with torch.inference_mode():
            head = load_head(path, model, length, config.model.load_format, config.model.seed + 1)
        return Draft(head, head.spec.layers, asked.num_speculative_tokens, head.weight_bytes)
    spec = read_spec(path)
    check_draft(path, spec, target, model.spec, length)
    placement = model.placement
    draft = registry.build(spec, placement.dtype, placement.device, length, invariant=placement.invariant)
    with torch.inference_mode():
        loading.load(draft, path, config.model.load_format, config.model.seed + 1)
    return Draft(draft, spec, asked.num_speculative_tokens, draft.weight_bytes)


def check_draft(path: Path, spec: ModelSpec, target: Path, target_spec: ModelSpec, length: int) -> None:
    """Raise ConfigError unless the draft model's tokens are the model's and its positions reach as far.

    Tables may be padded to different sizes, as in models of one family, but both must hold every token.
    """
    if spec.longest < length:
        allowed = f"its positions end at {spec.longest}, but --max-model-len is {length}"
        raise ConfigError(OPTION, str(path), f"{allowed}; give at most {spec.longest}, or another draft model")
    mine, others = read_codec(path).tokens(), read_codec(target).tokens()
    if mine != others:
        place = next((at for at, pair in enumerate(zip(mine, others, strict=False)) if pair[0] != pair[1]), None)
        where = f"{len(mine)} tokens against {len(others)}"
        if place is not None:
            where = f"token {place} is {mine[place]!r} in {path} and {others[place]!r} in {target}"
        raise ConfigError(OPTION, str(path), f"its tokenizer must be the model's ({target}): {where}")
    if spec.vocab_size != target_spec.vocab_size and min(spec.vocab_size, target_spec.vocab_size) < len(mine):
        sizes = f"vocab_size is {spec.vocab_size} in {path} and {target_spec.vocab_size} in {target}"
        raise ConfigError(OPTION, str(path), f"both models must have a row for each of {len(mine)} tokens: {sizes}")
