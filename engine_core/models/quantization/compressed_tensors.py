"""`quantization_config` of compressed-tensors, the format of llm-compressor: groups of modules, each with a scheme."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.quantization.methods import read_block
from penstock.engine_core.models.quantization.rules import (
    KvScheme,
    Quantization,
    Rule,
    Selector,
    expect,
    group_size,
    literal,
    names_of,
)
from penstock.engine_core.models.quantization.weight_format import Activations, WeightFormat

KEY = "quantization_config"
CLASSES = ("Linear", "LinearBase")
PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


def read_compressed_tensors(file: ConfigFile, names: Collection[str]) -> Quantization:
    """FP8 and INT8 by matrix, output or block; packed integers of 4 and 8 bits; packed NVFP4 and MXFP4.

    Rules come in the library's order: what is ignored, modules that groups name, and classes of modules last."""
    del names
    groups = file.get(f"{KEY}.config_groups")
    kv_scheme = read_kv_scheme(file)
    file.get(f"{KEY}.format")  # of groups without one
    if not isinstance(groups, Mapping) or not (groups or kv_scheme):
        raise file.error(f"{KEY}.config_groups", "an object of groups is expected")
    refuse_other_transforms(file)
    notes: list[str] = []
    rules = [Rule(selector(names_of(file, f"{KEY}.ignore")))]
    classes: list[Rule] = []
    for group in groups:
        at = f"{KEY}.config_groups.{group}"
        if not isinstance(groups[group], Mapping):
            raise file.error(at, "an object is expected")
        targets = names_of(file, f"{at}.targets")
        form = read_group(file, at, notes)
        if not targets:
            raise file.error(f"{at}.targets", "names or classes of modules are expected")
        if any(target in CLASSES for target in targets):
            classes.append(Rule(Selector(every=True), form))
        if named := [target for target in targets if target not in CLASSES]:
            rules.append(Rule(selector(named), form))
    return Quantization(
        method="compressed-tensors",
        rules=(*rules, *classes),
        kv_scheme=kv_scheme,
        notes=tuple(dict.fromkeys(notes)),
    )


def selector(targets: Collection[str]) -> Selector:
    """Names, and after `re:` patterns."""
    patterns = tuple(target.removeprefix("re:") for target in targets if target.startswith("re:"))
    return Selector(literal([target for target in targets if not target.startswith("re:")]), patterns)


def refuse_other_transforms(file: ConfigFile) -> None:
    """Raise ModelError for sparse or rotated weights."""
    sparsity = file.get(f"{KEY}.sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity:
        expect(file, f"{KEY}.sparsity_config.format", (None, "dense"), "Penstock serves dense weights, no sparse ones")
        file.asked.update(key for key in file.values if key.startswith(f"{KEY}.sparsity_config."))
    for key in (f"{KEY}.transform_config", f"{KEY}.moe_sparsity_config"):
        if file.get(key):
            raise file.error(key, "Penstock serves weights without it")


def read_group(file: ConfigFile, at: str, notes: list[str]) -> WeightFormat | None:
    """The format of a group; None: its weights stay as they are."""
    key = f"{at}.format" if file.get(f"{at}.format") is not None else f"{KEY}.format"
    weights = file.get(f"{at}.weights")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise file.error(f"{at}.weights", "an object is expected")
    if file.get(f"{at}.output_activations") is not None:
        raise file.error(f"{at}.output_activations", "Penstock rounds no outputs")
    if file.get(key) in PLAIN:
        return read_plain(file, at, notes)
    if file.get(key) in PACKED:
        return read_packed(file, at, notes)
    raise file.error(key, f"Penstock reads {', '.join((*PLAIN, *PACKED))}")


def read_plain(file: ConfigFile, at: str, notes: list[str]) -> WeightFormat:
    """Eight bits a value, float or integer."""
    weights = f"{at}.weights"
    expect(file, f"{weights}.num_bits", (8,), "Penstock serves 8 in this format")
    expect(file, f"{weights}.type", ("float", "int"), "Penstock serves float and int")
    expect(file, f"{weights}.symmetric", (None, True), "Penstock serves weights of 8 bits without zero points")
    expect(file, f"{weights}.dynamic", (None, False), "scales of weights are stored")
    strategy, real = file.get(f"{weights}.strategy"), file.get(f"{weights}.type") == "float"
    served = ("tensor", "channel", "block") if real else ("tensor", "channel")
    expect(file, f"{weights}.strategy", served, f"Penstock serves {', '.join(served)}")
    expect(file, f"{weights}.group_size", (None, -1), "Penstock serves no groups in this format")
    expect(file, f"{weights}.actorder", (None, False), "without groups there is no order")
    block = read_block(file, f"{weights}.block_structure")
    if (strategy == "block") != (block is not None):
        raise file.error(f"{weights}.block_structure", f"strategy is {strategy!r}")
    return WeightFormat(
        kind="float8" if real else "int8",
        block=block,
        per_tensor=strategy == "tensor",
        activations=read_activations(file, at, block, notes),
    )


def read_activations(file: ConfigFile, at: str, block: tuple[int, int] | None, notes: list[str]) -> Activations:
    """How rows of x are rounded to the weights' type."""
    inputs = f"{at}.input_activations"
    if file.get(inputs) is None:
        return "none"
    kind = file.get(f"{at}.weights.type")
    if file.get(f"{inputs}.num_bits") != 8 or file.get(f"{inputs}.type") != kind:
        raise file.error(f"{inputs}.num_bits", f"Penstock serves activations of 8 bits, {kind} as the weights")
    expect(file, f"{inputs}.symmetric", (None, True), "Penstock serves activations without zero points")
    expect(file, f"{inputs}.actorder", (None, False), "activations have no order")
    dynamic, strategy = file.get(f"{inputs}.dynamic"), file.get(f"{inputs}.strategy")
    size = file.get(f"{inputs}.group_size")
    if dynamic is True and block is not None and strategy == "group" and size == block[1]:
        return "block"
    if dynamic is True and block is None and strategy in ("token", "tensor"):
        if strategy == "tensor":
            notes.append("activations have a scale for each token in place of one for a batch")
        return "row"
    if not dynamic and block is None and strategy == "tensor":
        return "static"
    raise file.error(f"{inputs}.strategy", "Penstock serves token (dynamic), tensor (static), and groups with blocks")


def read_packed(file: ConfigFile, at: str, notes: list[str]) -> WeightFormat:
    """Several values in an element; activations stay as they are."""
    weights, inputs = f"{at}.weights", f"{at}.input_activations"
    if file.get(inputs) is not None:
        notes.append("packed weights are multiplied with activations of 16 bits: the file asks for fewer")
        file.asked.update(key for key in file.values if key.startswith(f"{inputs}."))
    expect(file, f"{weights}.dynamic", (None, False), "scales of weights are stored")
    strategy, kind = file.get(f"{weights}.strategy"), file.get(f"{weights}.type")
    order = file.get(f"{weights}.actorder")
    expect(file, f"{weights}.actorder", (None, False, "weight", "static", "group", "dynamic"), "an order is unknown")
    size = group_size(file, f"{weights}.group_size", -1)
    if kind == "float":
        expect(file, f"{weights}.num_bits", (4,), "Penstock serves packed floats of 4 bits")
        expect(file, f"{weights}.symmetric", (None, True), "floats have no zero points")
        expect(file, f"{weights}.strategy", ("tensor_group", "group"), "Penstock serves groups")
        if size != (16 if strategy == "tensor_group" else 32):
            raise file.error(f"{weights}.group_size", "Penstock serves NVFP4 in groups of 16 and MXFP4 of 32")
        return WeightFormat(kind="float4", packing="packed", bits=4, group=size)
    expect(file, f"{weights}.type", ("int", "float"), "Penstock serves int and float")
    expect(file, f"{weights}.num_bits", (4, 8), "Penstock serves packed integers of 4 and 8 bits")
    expect(file, f"{weights}.strategy", ("group", "channel"), "Penstock serves group and channel")
    if (strategy == "group") != (size > 0):
        raise file.error(f"{weights}.group_size", f"strategy is {strategy!r}")
    return WeightFormat(
        kind="grouped",
        packing="packed",
        bits=file.integer(f"{weights}.num_bits"),
        group=size,
        symmetric=file.flag(f"{weights}.symmetric", True),
        ordered=order in ("group", "dynamic") and size > 0,
    )


def read_kv_scheme(file: ConfigFile) -> KvScheme | None:
    """Of the KV cache: a scale for each layer, or for each of its heads."""
    at = f"{KEY}.kv_cache_scheme"
    if file.get(at) is None:
        return None
    expect(file, f"{at}.num_bits", (8,), "Penstock serves a KV cache of 8 bits")
    expect(file, f"{at}.type", ("float",), "Penstock serves float")
    expect(file, f"{at}.symmetric", (None, True), "Penstock serves it without zero points")
    expect(file, f"{at}.dynamic", (None, False), "Penstock serves stored scales")
    expect(file, f"{at}.strategy", ("tensor", "attn_head"), "Penstock serves tensor and attn_head")
    expect(file, f"{at}.group_size", (None, -1), "Penstock serves no groups")
    expect(file, f"{at}.actorder", (None, False), "a cache has no order")
    return KvScheme(per_head=file.get(f"{at}.strategy") == "attn_head")
