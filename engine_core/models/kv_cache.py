"""In which type keys and values are cached: as `--kv-cache-dtype` says, or as the checkpoint does. Imports no torch."""

from __future__ import annotations

import msgspec

from penstock.engine_core.models.draft_spec import DraftSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.engine_config import KV_AUTO, KV_FP8, KV_MODEL
from penstock.protocol.errors import ConfigError

OPTION = "--kv-cache-dtype"


def with_kv_cache(spec: ModelSpec, asked: str) -> ModelSpec:
    """The model with keys and values cached in e4m3 if the option asks for it; with `auto` as the checkpoint says.

    Raises ConfigError for an encoder, which caches none, and for latent attention.
    """
    if spec.encoder and asked == KV_FP8:
        raise ConfigError(OPTION, asked, "the model is an encoder, which has no KV cache")
    spec = spec if asked == KV_AUTO else spec.with_attention(kv_fp8=asked == KV_FP8)
    if spec.attention.kv_fp8 and spec.attention.latent is not None:
        raise ConfigError(OPTION, asked, f"latents are cached in the model's type; give {KV_MODEL}")
    return spec


def with_draft_cache(draft: DraftSpec | None, asked: str) -> DraftSpec | None:
    """The same for a draft model or head, whose pages are of the option's type, too."""
    if draft is None:
        return None
    layers = with_kv_cache(draft.layers, asked)
    head = draft.head and msgspec.structs.replace(draft.head, layers=layers)
    return msgspec.structs.replace(draft, layers=layers, head=head)


def check_kv_cache(spec: ModelSpec, asked: str, chip: str, *, writes: bool) -> None:
    """Raise ConfigError for a chip that cannot write e4m3."""
    if spec.attention.kv_fp8 and not writes:
        why = f"keys and values in 8-bit floats need compute capability 8.9 or newer, which {chip} has not"
        raise ConfigError(OPTION, asked, f"{why}; give {KV_MODEL}")


def kv_label(spec: ModelSpec) -> str:
    """The type of the cache in words, where it is not the model's."""
    return "fp8_e4m3" if spec.attention.kv_fp8 else ""
