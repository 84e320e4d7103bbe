"""Which modules of a checkpoint are quantized in which format: ordered rules over names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.quantization.weight_format import WeightFormat

# What stands before a layer's name depends on the library that saved the model.
WRAPPERS = ("model.", "language_model.", "text_model.")
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")
# Modules that a rule for every linear layer means only where the files say so: embeddings, routers, betas and decays
# of Gated DeltaNet, and vision encoders.
SPECIAL = re.compile(
    r"(^|\.)(lm_head|embed_tokens|gate|shared_expert_gate|in_proj_(a|b|ba)|router(\.\w+)?)\Z"
    r"|^(visual|vision_tower|multi_modal_projector)\."
)
MARKERS = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")
# Scales of a KV cache and of attention in FP8: read where the cache is of that type.
UNREAD = (r"\.((q|k|v|kv|prob)_(output_)?scale|[qkv]_zero_point)\Z",)
# Settings that only tools read, or that name what is true anyway.
HARMLESS = re.compile(
    r"observer|damp|true_sequential|static_groups|model_name|model_file|quantizer|\.meta(\.|\Z)|tokenizer|batch_size"
    r"|exllama|max_input|cache_block|dataset|block_name|module_name|modules_in_block|pad_token|backend|fuse|producer"
    r"|\.version\Z|compression_ratio|quantization_status|dequantize|config_groups\.[^.]+\.targets|(scale|zp|pack)_dtype\Z|offload"
    r"|\.(autoround_version|iters|nsamples|seqlen|lr|minmax_lr|enable_\w+|low_gpu_mem_usage|amp|hyb_act|uri|adapter)\Z"
)


class Selector(msgspec.Struct, frozen=True):
    """Modules: by name, with everything below them, by regular expressions from a name's beginning, or all."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    every: bool = False

    def matches(self, module: str) -> bool:
        """module: without what wraps its model."""
        if self.every:
            return True
        if self.names:
            parts = module.split(".")
            if any(".".join(parts[:count]) in self.names for count in range(1, len(parts) + 1)):
                return True
        if not self.patterns:
            return False
        match = either(self.patterns).match
        return any(match(prefix + module) for prefix in PREFIXES)


@lru_cache(maxsize=64)
def either(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


class Rule(msgspec.Struct, frozen=True):
    """The format of the modules that are selected; None: they are not quantized."""

    modules: Selector
    form: WeightFormat | None = None


class KvScheme(msgspec.Struct, frozen=True):
    """Scales of an FP8 KV cache that a checkpoint has, in tensors beside each layer's attention."""

    per_head: bool = False  # a scale for each key-value head, else one a layer
    keys: str = "self_attn.k_scale"  # names within a layer
    values: str = "self_attn.v_scale"


class Markers(msgspec.Struct, frozen=True):
    """Modules of a checkpoint by what the files hold of them."""

    quantized: frozenset[str]
    dense: frozenset[str]


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's weights are quantized."""

    method: str  # as the configuration calls it
    rules: tuple[Rule, ...]  # the first that selects a module counts; none: it is not quantized
    kv_scheme: KvScheme | None = None
    unread: tuple[str, ...] = UNREAD  # patterns of tensors that such checkpoints have and that may be passed over
    notes: tuple[str, ...] = ()  # what is served otherwise than the checkpoint says, as sentences for the log
    quantized: frozenset[str] = frozenset()  # modules of which the files say so, against the rules
    dense: frozenset[str] = frozenset()

    def format_of(self, module: str) -> WeightFormat | None:
        """Of a matrix by its name in the checkpoint, `model.layers.0.self_attn.q_proj`, or without what wraps the
        model; None: it is not quantized."""
        module = unwrapped(module)
        if module in self.dense:
            return None
        known = module in self.quantized
        for rule in self.rules:
            if rule.modules.matches(module) and not (known and rule.form is None):
                return None if rule.modules.every and not known and SPECIAL.search(module) else rule.form
        return self.formats[0] if known else None

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        return tuple(dict.fromkeys(rule.form for rule in self.rules if rule.form is not None))

    @property
    def bits(self) -> int:
        """Of a weight in the first of the formats."""
        return self.formats[0].bits if self.formats else 16

    @property
    def label(self) -> str:
        """For people: the method and its formats."""
        return f"{self.method} ({', '.join(dict.fromkeys(form.label for form in self.formats))})"

    def settled(self, markers: Markers) -> Quantization:
        """The same with what the files say where the rules say otherwise, or nothing for sure."""
        if not self.formats:
            return self
        # The weights of other formats have names of their own.
        telling = not any(form.packing in ("plain", "nvfp4") for form in self.formats)
        return msgspec.structs.replace(
            self,
            quantized=frozenset(module for module in markers.quantized if self.format_of(module) is None),
            dense=frozenset(
                module
                for module in markers.dense
                if (telling or SPECIAL.search(module)) and self.format_of(module) is not None
            ),
        )


def unwrapped(module: str) -> str:
    """A module's name without the names of what wraps the model."""
    while module.startswith(WRAPPERS):
        module = module.partition(".")[2]
    return module


def markers(names: Collection[str]) -> Markers:
    """What the tensors of a checkpoint say about its modules."""
    quantized = {unwrapped(name.rpartition(".")[0]) for name in names if name.endswith(MARKERS)}
    weights = {unwrapped(name.removesuffix(".weight")) for name in names if name.endswith(".weight")}
    return Markers(frozenset(quantized), frozenset(name for name in weights - quantized if not name.endswith("norm")))


def literal(names: Collection[str]) -> frozenset[str]:
    return frozenset(unwrapped(name) for name in names)


def flattened(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested objects as one, with dots between the keys; the objects stay there, too."""
    found: dict[str, Any] = {prefix: values}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        found[name] = value
        if isinstance(value, Mapping):
            found.update(flattened(value, name))
    return found


def refuse_unread_keys(file: ConfigFile) -> None:
    """Raise ModelError naming a key that nobody read, with a value that asks for something."""
    for key, value in file.values.items():
        if key in file.asked or isinstance(value, Mapping) or value in (None, False, "", [], 0) or HARMLESS.search(key):
            continue
        raise file.error(key, "Penstock does not know what it changes, and does not pass it over")


def names_of(file: ConfigFile, key: str) -> list[str]:
    """A list of module names, empty where there is none."""
    value = file.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise file.error(key, "a list of module names is expected")
    return value


def group_size(file: ConfigFile, key: str, default: int | None = None) -> int:
    """Inputs of a group, 0 where a scale is an output's (-1 in files)."""
    value = file.get(key)
    value = default if value is None else value
    if value == -1:
        return 0
    if type(value) is not int or not 8 <= value <= 1 << 20 or value % 8:
        raise file.error(key, "it must be -1 or a multiple of 8")
    return value


def expect(file: ConfigFile, key: str, served: tuple[object, ...], complaint: str) -> None:
    """Raise ModelError unless the key has one of these values."""
    if file.get(key) not in served:
        raise file.error(key, complaint)
