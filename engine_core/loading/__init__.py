"""Weights: from safetensors files, or random ones for speed work, straight into a model's own memory."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine_core.loading.checkpoint import read_checkpoint
from penstock.engine_core.loading.dummy import fill_random
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import beside_mtp
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.spec import stored_name
from penstock.engine_core.models.tensors import FIRST, leftover, named_as
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import read_names
from penstock.protocol.errors import ModelError

# The target's embeddings, which tokens of the target the head knows (d2t says it, too), and frequencies.
HEAD_LEFTOVER = re.compile(r"(^embed_tokens\.weight|^lm_head\.weight|^t2d|\.rotary_emb\.inv_freq)\Z")


def load(model: Decoder, folder: Path, load_format: str = "auto", seed: int = 0, tower: Tower | None = None) -> None:
    """Fill `model`, and the vision encoder that feeds it, from `folder`; the format is auto, safetensors or dummy
    (random, nothing is read).

    Raises ModelError naming the file and the tensor: missing, truncated, of a wrong shape or type, unknown, pickled.
    """
    places = {**model.destinations(), **({} if tower is None else tower.destinations())}
    if load_format == "dummy":
        fill_random({**places, **dict(model.projection.destinations())}, seed, model.dtype)
    else:
        left = unread(model, vision=tower is None)
        read_checkpoint(folder, named_as(model.spec, read_names(folder), places), left)
        for layer in model.projection.layers:
            read_checkpoint(folder / layer.spec.folder, dict(layer.destinations()))


def unread(model: Decoder, *, vision: bool = False) -> re.Pattern[str]:
    """Names of tensors that a model may have and that are not read: other stages' of a pipeline among them. vision:
    also those of its vision encoder."""
    group, own = model.placement.group, range(model.first, model.first + model.spec.layers)
    spec = model.spec.without_vision() if vision else model.spec
    if group.stages == 1:
        return leftover(spec)
    others = [rf"(^|\.)layers\.(?!({'|'.join(map(str, own))})\.)\d+\."]
    if model.embedding is None:
        others.append(rf"(^|\.){re.escape(stored_name(model.spec, FIRST))}$")
    if not group.ends:
        norm = re.escape(stored_name(model.spec, "model.norm.").removeprefix("model."))
        others.append(rf"^(((language_)?model|backbone)\.)*{norm}(weight|bias)$")
    return leftover(spec, others)


def fill_head(head: EagleHead, folder: Path, load_format: str = "auto", seed: int = 0) -> None:
    """The weights of a head; the format is auto, safetensors or dummy (random). Raises ModelError naming the file and
    the tensor: one that is missing, truncated, of a wrong shape or type, unknown, pickled."""
    spec, target = head.spec, head.target
    if load_format == "dummy":
        fill_random(head.destinations(), seed, target.dtype)
    elif spec.mtp is not None:
        wanted = named_as(spec.layers, read_names(folder), head.destinations())
        read_checkpoint(folder, wanted, beside_mtp(spec.layers, spec.mtp))
    else:
        read_checkpoint(folder, head.destinations(), HEAD_LEFTOVER)
        if head.tokens is not None:
            check_tokens(folder, head.tokens, target.spec.vocab_size)


def check_tokens(folder: Path, tokens: Tensor, vocabulary: int) -> None:
    """Raise ModelError unless a head's tokens are different ones of the target's."""
    counts = torch.bincount(tokens.clamp(0, vocabulary - 1), minlength=vocabulary)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary or int(counts.max()) > 1:
        raise ModelError(f"{folder}: tensor d2t does not map to different tokens of a vocabulary of {vocabulary}")
