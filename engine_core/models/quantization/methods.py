"""`quantization_config` of the methods that say one thing of all matrices: fp8, awq, gptq, mxfp4 and modelopt."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.quantization.rules import (
    UNREAD,
    WRAPPERS,
    KvScheme,
    Quantization,
    Rule,
    Selector,
    expect,
    group_size,
    literal,
    names_of,
    unwrapped,
)
from penstock.engine_core.models.quantization.weight_format import WeightFormat

KEY = "quantization_config"
EVERY = Selector(every=True)
# Where ModelOpt puts the scales of a KV cache: beside the projections.
MODELOPT_KV = KvScheme(keys="self_attn.k_proj.k_scale", values="self_attn.v_proj.v_scale")


def not_converted(names: Collection[str]) -> Selector:
    """Modules that such a list means: transformers takes a name as a module with all below it, as a pattern, and as the
    end of a name."""
    patterns = [rf"{name}(?:\.|\Z)" for name in names if re.search(r"[*^$|()\[\]]", name)]
    ends = [rf"(?:.*\.)?{re.escape(name)}(?:\.|\Z)" for name in names if not name.startswith(WRAPPERS)]
    return Selector(literal(names), tuple(patterns + ends))


def read_fp8(file: ConfigFile, names: Collection[str]) -> Quantization:
    """FP8 in blocks (DeepSeek, Qwen3, GLM) or with one scale for a matrix; activations dynamic or static.

    Tensors are named as transformers or as vLLM does."""
    expect(file, f"{KEY}.fmt", (None, "e4m3", "float8_e4m3fn"), "Penstock serves e4m3")
    expect(file, f"{KEY}.scale_fmt", (None, "float", "ue8m0"), "Penstock serves float and ue8m0")
    scheme = f"{KEY}.activation_scheme"
    expect(file, scheme, (None, "dynamic", "static"), "Penstock serves dynamic and static")
    static = file.get(scheme) == "static"
    block = read_block(file, f"{KEY}.weight_block_size")
    inverse = any(name.endswith(".weight_scale_inv") for name in names)
    inverse = inverse or (block is not None and not any(name.endswith(".weight_scale") for name in names))
    if static and block is not None:
        raise file.error(scheme, "Penstock serves dynamic with weight_block_size")
    form = WeightFormat(
        kind="float8",
        block=block,
        per_tensor=block is None,
        activations="static" if static else "block" if block is not None else "row",
        scale="weight_scale_inv" if inverse else "weight_scale",
        input_scale="activation_scale" if inverse else "input_scale",
    )
    skipped = names_of(file, f"{KEY}.modules_to_not_convert") + names_of(file, f"{KEY}.ignored_layers")
    kv = f"{KEY}.kv_cache_scheme"
    expect(file, kv, (None, "static"), "Penstock serves static")
    rules = (Rule(not_converted(skipped)), Rule(EVERY, form))
    return Quantization(method="fp8", rules=rules, kv_scheme=KvScheme() if file.get(kv) else None)


def read_block(file: ConfigFile, key: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block."""
    value = file.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise file.error(key, "two numbers, of outputs and inputs, are expected")
    return value[0], value[1]


def read_awq(file: ConfigFile, names: Collection[str]) -> Quantization:
    """Integers of 4 bits of AutoAWQ, version gemm.

    Source: Lin et al., 2023."""
    del names
    for key in (f"{KEY}.bits", f"{KEY}.w_bit"):
        expect(file, key, (None, 4), "Penstock serves AWQ of 4 bits")
    for key in (f"{KEY}.version", f"{KEY}.format", f"{KEY}.checkpoint_format"):
        if str(file.get(key) or "gemm").lower() != "gemm":
            raise file.error(key, "Penstock reads the layout of version gemm")
    if not file.flag(f"{KEY}.zero_point", True):
        raise file.error(f"{KEY}.zero_point", "Penstock serves AWQ with zero points")
    key = f"{KEY}.q_group_size" if file.get(f"{KEY}.group_size") is None else f"{KEY}.group_size"
    form = WeightFormat(kind="grouped", packing="awq", bits=4, group=group_size(file, key, 128), symmetric=False)
    skipped = names_of(file, f"{KEY}.modules_to_not_convert") + names_of(file, f"{KEY}.ignore")
    return Quantization(method="awq", rules=(Rule(not_converted(skipped)), Rule(EVERY, form)))


def read_gptq(file: ConfigFile, names: Collection[str]) -> Quantization:
    """Integers of 4 and 8 bits of AutoGPTQ and GPTQModel: gptq and gptq_v2, desc_act, and `dynamic` overrides.

    Source: Frantar et al., 2022."""
    del names
    layout, key = f"{KEY}.checkpoint_format", f"{KEY}.format"
    layout = layout if file.get(layout) is not None else key
    expect(file, key, (None, "gptq", "gptq_v2"), "Penstock reads gptq and gptq_v2")
    expect(file, layout, (None, "gptq", "gptq_v2"), "Penstock reads gptq and gptq_v2")
    expect(file, f"{KEY}.is_marlin_format", (None, False), "Penstock reads gptq and gptq_v2")
    form = WeightFormat(kind="grouped", packing="gptq_v2" if file.get(layout) == "gptq_v2" else "gptq", bits=4)
    form = read_gptq_format(file, KEY, form, 128)
    rules: list[Rule] = []
    overrides = file.get(f"{KEY}.dynamic") or {}
    if not isinstance(overrides, Mapping):
        raise file.error(f"{KEY}.dynamic", "an object of patterns is expected")
    for pattern in overrides:
        selected = Selector(patterns=(pattern.removeprefix("-:").removeprefix("+:"),))
        own = None if pattern.startswith("-:") else read_gptq_format(file, f"{KEY}.dynamic.{pattern}", form, form.group)
        rules.append(Rule(selected, own))
    if file.flag(f"{KEY}.lm_head"):
        rules.append(Rule(Selector(frozenset(("lm_head",))), form))
    skipped = names_of(file, f"{KEY}.modules_to_not_convert")
    rules += (Rule(not_converted(skipped)), Rule(EVERY, form))
    return Quantization(method="gptq", rules=tuple(rules), unread=(*UNREAD, r"\.bias\Z"))  # written where there is none


def read_gptq_format(file: ConfigFile, at: str, base: WeightFormat, group: int) -> WeightFormat:
    """The format that an object of the file describes, `base` where it is silent."""
    bits = file.get(f"{at}.bits")
    bits = base.bits if bits is None else bits
    if bits not in (4, 8) or isinstance(bits, bool):
        raise file.error(f"{at}.bits", "Penstock serves GPTQ of 4 and 8 bits")
    size = group_size(file, f"{at}.group_size", group or -1)
    ordered = file.flag(f"{at}.desc_act", base.ordered)
    return msgspec.structs.replace(
        base, bits=bits, group=size, symmetric=file.flag(f"{at}.sym", base.symmetric), ordered=ordered and size > 0
    )


def read_mxfp4(file: ConfigFile, names: Collection[str]) -> Quantization:
    """Experts of 4 bits with a power of two for each 32 inputs, as gpt-oss has them."""
    del names
    form = WeightFormat(kind="float4", packing="blocks", bits=4, group=32)
    skipped = names_of(file, f"{KEY}.modules_to_not_convert")
    experts = Selector(patterns=(r"(?:.*\.)?experts(?:\.|\Z)",))
    return Quantization(method="mxfp4", rules=(Rule(not_converted(skipped)), Rule(experts, form)))


def read_modelopt(file: ConfigFile, names: Collection[str]) -> Quantization:
    """NVIDIA ModelOpt's FP8, NVFP4 as weights alone, and mixtures of both (MIXED_PRECISION)."""
    del names
    rules = [Rule(wildcards(names_of(file, f"{KEY}.ignore") + names_of(file, f"{KEY}.exclude_modules")))]
    notes: list[str] = []
    algorithm = f"{KEY}.quant_algo"
    file.asked.update(key for key in file.values if key.startswith(f"{KEY}.config_groups."))  # the same in other words
    if file.get(algorithm) == "MIXED_PRECISION":
        layers = file.get(f"{KEY}.quantized_layers")
        if not isinstance(layers, Mapping) or not layers:
            raise file.error(f"{KEY}.quantized_layers", "an object of module names and algorithms is expected")
        modules: dict[WeightFormat, list[str]] = {}
        for name in layers:
            at = f"{KEY}.quantized_layers.{name}"
            form = modelopt_format(file, f"{at}.quant_algo", f"{at}.group_size", notes)
            modules.setdefault(form, []).append(name)
        rules += (Rule(wildcards(named), form) for form, named in modules.items())
    else:
        rules.append(Rule(EVERY, modelopt_format(file, algorithm, f"{KEY}.group_size", notes)))
    return Quantization(
        method="modelopt",
        rules=tuple(rules),
        kv_scheme=modelopt_kv_scheme(file),
        notes=tuple(dict.fromkeys(notes)),
    )


def modelopt_format(file: ConfigFile, key: str, group: str, notes: list[str]) -> WeightFormat:
    """The format that an algorithm's name stands for."""
    algorithm, size = file.get(key), group_size(file, group, 16)
    if algorithm == "FP8":
        return WeightFormat(kind="float8", per_tensor=True, activations="static")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return WeightFormat(kind="float8", activations="row")
    if algorithm in ("NVFP4", "W4A16_NVFP4") and size == 16:
        if algorithm == "NVFP4":
            notes.append("NVFP4 weights are multiplied with activations of 16 bits, which loses less than with 4")
        return WeightFormat(kind="float4", packing="nvfp4", bits=4, group=16)
    raise file.error(key, "Penstock serves FP8, FP8_PER_CHANNEL_PER_TOKEN and NVFP4 in groups of 16")


def modelopt_kv_scheme(file: ConfigFile) -> KvScheme | None:
    """By the algorithm's name, or in newer files as compressed-tensors has it."""
    key, at = f"{KEY}.kv_cache_quant_algo", f"{KEY}.kv_cache_scheme"
    expect(file, key, (None, "", "FP8"), "Penstock serves FP8")
    if isinstance(file.get(at), Mapping):
        expect(file, f"{at}.num_bits", (8,), "Penstock serves a KV cache of 8 bits")
        expect(file, f"{at}.type", ("float",), "Penstock serves float")
        expect(file, f"{at}.dynamic", (None, False), "Penstock serves stored scales")
        return MODELOPT_KV
    return MODELOPT_KV if file.get(key) else None


def wildcards(names: Collection[str]) -> Selector:
    """Names in which * stands for anything, and modules below them."""
    patterns = [re.escape(unwrapped(name)).replace(r"\*", ".*") + r"(?:\.|\Z)" for name in names if "*" in name]
    return Selector(literal([name for name in names if "*" not in name]), tuple(patterns))
