"""LoRA adapters as PEFT saves them: which matrices of the model a folder adapts, at which rank and scale.

Reads adapter_config.json and the header of adapter_model.safetensors, no weight, and imports no torch: a server can
refuse a folder before an executor hears of it. What the file holds says what is adapted; the configuration must agree.
Source: peft 0.21, `LoraConfig` and `LoraModel`. `fan_in_fan_out` tells how base weights lie and changes nothing here.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.engine_core.models.adapted_modules import LAYER, Modules, expert_shapes, parameters_of
from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.engine_core.models.layer_spec import EXPANSION, ExpertSpec, LayerSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.tensors import layer_weights, mlp_weights
from penstock.engine_core.models.weight_files import STORED_TYPES, StoredTensor, read_header
from penstock.protocol.errors import ModelError

CONFIG = "adapter_config.json"
SAMPLES, SAMPLE = 4, 4096  # of weights, and bytes of one: a training changes every number
RANKS = 16  # that matrix units want: ranks are padded to a multiple
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_RANK = "--max-lora-rank"
HEAD = "lm_head"
EXPERT = ".mlp.experts."
# What PEFT saves beside an adapted output embedding: the base's own embeddings.
SAVED = re.compile(r"base_model\.model\.(?:.+\.)?(?:lm_head\.base_layer|embed_tokens(?:\.base_layer)?)\.weight")
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
# Settings of kinds of adapters that are not served, unless they ask for nothing.
UNSERVED: Mapping[str, str] = {
    "use_dora": "DoRA scales the base's columns, which is not served",
    "use_qalora": "QA-LoRA is not served",
    "use_bdlora": "BD-LoRA is not served",
    "lora_bias": "biases of B are not served",
    "modules_to_save": "modules that were trained as a whole are not served; merge the adapter into its base",
    "trainable_token_indices": "embeddings of tokens are not served",
    "layer_replication": "layers that stand twice are not served",
    "alora_invocation_tokens": "adapters that begin at some tokens are not served",
    "arrow_config": "routing among adapters is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "MonteCLoRA is not served",
}
# Ways to begin that change the base's weights, on top of which such an adapter was trained.
MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdaptedMatrix(msgspec.Struct, frozen=True):
    """One matrix that an adapter changes: by scale * B @ A."""

    name: str  # as in a Llama: model.layers.0.self_attn.q_proj
    stored: str  # what both tensors' names begin with in the file
    rank: int
    scale: float
    experts: int = 0  # whose matrices the two tensors have; 0: of one matrix


class AdapterSpec(msgspec.Struct, frozen=True):
    """What a folder holds, in the order of the model's matrices, then those of experts."""

    weights: Path
    matrices: tuple[AdaptedMatrix, ...]


@functools.lru_cache(maxsize=4)  # a server with a thousand adapters asks as often
def adaptable(spec: ModelSpec) -> Mapping[str, tuple[int, int]]:
    """Every matrix that may be adapted, by its name in a Llama: outputs and inputs."""
    found = {
        f"model.layers.{at}.{name}": shape
        for at, layer in enumerate(spec.blocks)
        for name, shape in adaptable_of(layer, spec.hidden)
    }
    return found if spec.headless else found | {HEAD: (spec.vocab_size, spec.hidden)}


def adaptable_of(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The same within a layer: products of attention, recurrence, MLP and the experts that all tokens go to."""
    weights, recurrence = layer_weights(layer, hidden), layer.recurrence
    if isinstance(layer.mlp, ExpertSpec):
        shared, mlp = layer.mlp.shared, f"mlp.{layer.mlp.shared_name}"
        own = dict(mlp_weights(mlp, shared, hidden)) if shared is not None else {}
    else:
        own = {name: weight for name, weight in layer_weights(layer, hidden) if name.startswith("mlp.")}
    products = set() if recurrence is None else {f"{recurrence.place}.{name}" for name in recurrence.products(hidden)}
    if layer.attention is not None:
        products |= {f"self_attn.{name}" for name in layer.attention.matrices(hidden) if name != EXPANSION}
    for name, weight in weights:
        module = name.removesuffix(".weight")
        if module != name and len(weight.shape) == 2 and (name in own or module in products):
            yield module, (weight.shape[0], weight.shape[1])


def adapter_version(folder: Path) -> str:
    """Of what the folder holds, whenever and wherever it was copied: a digest of its configuration, and of its weights'
    size, beginning and samples. Raises ModelError naming the file that cannot be read."""
    found = hashlib.blake2b(digest_size=16)
    try:
        found.update((folder / CONFIG).read_bytes())
        with (folder / WEIGHTS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f" {size} ".encode())
            for at in range(SAMPLES):
                file.seek(at * max(0, size - SAMPLE) // (SAMPLES - 1))
                found.update(file.read(SAMPLE))
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None
    return found.hexdigest()


def place_bytes(
    share: ModelSpec, max_rank: int, item_bytes: int, *, ends: bool = True, experts: bool = False, parallel: int = 1
) -> int:
    """Memory of one adapter's place. share: a rank's, of one stage, which `ends` the model or not. parallel: ranks that
    have whole `experts`, where they have not a share of the width of each."""
    rank = -(-max_rank // RANKS) * RANKS
    shapes = [shape for name, shape in adaptable(share).items() if ends or name != HEAD]
    for own in share.sparse if experts else ():
        held = msgspec.structs.replace(own, width=own.width * parallel)
        shapes += [*expert_shapes(held, share.hidden).values()] * (own.count // parallel)
    return rank * sum(map(sum, shapes)) * item_bytes


def read_adapter_folder(folder: Path, spec: ModelSpec, max_rank: int, *, experts: bool = False) -> AdapterSpec:
    """The adapter in a folder, for the whole model. Raises ModelError naming the file, the key or the tensor, and what
    it has: another method than LoRA or one of its kinds that are not served; a rank above `max_rank`; a matrix that
    the model has not, or of another shape; one of A and B, or both of a target, missing; a file that is cut off."""
    if not os.path.isdir(folder):
        raise ModelError(f"{folder}: no such folder")
    file = read_json(folder / CONFIG)
    check_kind(file)
    path = folder / WEIGHTS
    if not path.exists():
        if (folder / PICKLED).exists():
            why = "is pickled, which runs code when it is read; save the adapter as safetensors"
            raise ModelError(f"{folder / PICKLED}: it {why}")
        raise ModelError(f"{path}: no such file")
    header = read_header(path)
    shapes = adaptable(spec)
    modules, parameters = modules_of(spec, experts=experts), parameters_of(file)
    wanted = dict(modules.wanted_parameters(file, parameters))
    pairs: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
    for tensor, stored in header.items():
        if saved_embedding(spec, path, tensor, stored):
            continue
        module, half = parsed(path, tensor)
        if stored.dtype not in STORED_TYPES:
            raise ModelError(f"{path}: tensor {tensor} is of type {stored.dtype}; {', '.join(STORED_TYPES)} are read")
        pairs.setdefault(module, {})[half] = tensor, stored
    scaling, found = Scaling(file), dict[str, AdaptedMatrix]()
    for module, halves in pairs.items():
        target = modules.target(module, pairs, parameters)
        if target is None:
            raise ModelError(f"{path}: tensor {next(iter(halves.values()))[0]} {modules.unknown(module)}")
        for half in "AB":
            if half not in halves:
                raise ModelError(f"{path}: tensor base_model.model.{module}.lora_{half}.weight is missing")
        if (other := found.get(target.name)) is not None:
            told = f"adapts the same matrix as {other.stored}.lora_A.weight"
            raise ModelError(f"{path}: tensor base_model.model.{module}.lora_A.weight {told}")
        rank, scale = scaling.of(target.module, max_rank)
        for half, (tensor, stored) in halves.items():
            if stored.shape != (shape := target.shape(half, rank)):
                asked = f"the model and the adapter's rank ask for {list(shape)}"
                raise ModelError(f"{path}: tensor {tensor} has shape {list(stored.shape)}; {asked}")
        found[target.name] = AdaptedMatrix(target.name, f"base_model.model.{module}", rank, scale, target.experts)
    if not found:
        raise ModelError(f"{path}: no tensor of an adapter is in it")
    if {bool(matrix.experts) for matrix in found.values() if EXPERT in matrix.name} == {False, True}:
        raise ModelError(f"{path}: experts are adapted one by one and all at once")
    for parameter, name in wanted.items():
        if name not in found:
            raise ModelError(f"{path}: {CONFIG} has {parameter} as a target, and no tensor adapts it")
    if not parameters or file.get("target_modules") is not None:
        check_targets(file, modules, found, path)
    order = {name: at for at, name in enumerate(shapes)}
    ordered = sorted(found.values(), key=lambda matrix: order.get(matrix.name, len(order)))
    return AdapterSpec(path, tuple(ordered))


@functools.lru_cache(maxsize=4)
def modules_of(spec: ModelSpec, *, experts: bool) -> Modules:
    """What folders call the same matrices, and routed experts' where they may be adapted."""
    return Modules(spec, adaptable(spec), experts=experts)


def check_kind(file: ConfigFile) -> None:
    """Raise ModelError unless it is plain LoRA."""
    if file.get("peft_type") != "LORA":
        raise file.error("peft_type", "adapters of type LORA are served")
    if file.get("bias") not in (None, "none"):
        raise file.error("bias", 'adapters with "none" are served: a bias changes the base')
    for key, why in UNSERVED.items():
        if file.get(key):
            raise file.error(key, why)
    begun = file.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(MOVES_BASE):
        raise file.error("init_lora_weights", "it changed the base's weights; convert the adapter as PEFT's guide says")


def saved_embedding(spec: ModelSpec, path: Path, tensor: str, stored: StoredTensor) -> bool:
    """Whether a tensor is the base's own embedding. Raises ModelError for one of another size."""
    shape = (spec.vocab_size, spec.hidden)
    if SAVED.fullmatch(tensor) is None or stored.shape == shape:
        return SAVED.fullmatch(tensor) is not None
    why = f"the model's embeddings have {list(shape)}: a vocabulary of another size is not served"
    raise ModelError(f"{path}: tensor {tensor} has shape {list(stored.shape)}; {why}")


def parsed(path: Path, tensor: str) -> tuple[str, str]:
    """The module of a tensor, and whether it is its A or its B."""
    found = TENSOR.fullmatch(tensor)
    if found is not None:
        return found[1], found[2]
    why = "is not an A or a B of LoRA"
    if "lora_embedding" in tensor:
        why = "adapts an embedding, which is not served"
    elif "magnitude" in tensor:
        why = "is of DoRA, which is not served"
    raise ModelError(f"{path}: tensor {tensor} {why}")


class Scaling:
    """Ranks and scales, from the settings of a folder."""

    def __init__(self, file: ConfigFile) -> None:
        self._file = file
        self._rank = file.integer("r", 8)
        self._alpha = file.number("lora_alpha", 8)
        self._root = file.flag("use_rslora")
        self._ranks, self._alphas = (patterns(file, key) for key in ("rank_pattern", "alpha_pattern"))

    def of(self, module: str, max_rank: int) -> tuple[int, float]:
        """Of one module. Raises ModelError for a rank above `max_rank`."""
        found = matching(self._ranks, module)
        key, rank = ("r", self._rank) if found is None else ("rank_pattern", int(found))
        if rank > max_rank:
            raise self._file.error(key, f"{module} has rank {rank}, and {MAX_RANK} is {max_rank}")
        own = matching(self._alphas, module)
        return rank, (self._alpha if own is None else own) / (math.sqrt(rank) if self._root else rank)


def patterns(file: ConfigFile, key: str) -> list[tuple[re.Pattern[str], float]]:
    """Expressions for the end of a module's name, and the number of each. A rank is a whole one above 0."""
    given = file.get(key) or {}
    found = []
    ranks = key == "rank_pattern"
    for pattern, value in given.items() if isinstance(given, dict) else [("", None)]:
        if type(value) is not int and (ranks or type(value) is not float):
            raise file.error(key, "an object of modules and their numbers is expected")
        if value < ranks or not math.isfinite(value):
            raise file.error(key, f"{value} of {pattern} cannot be")
        try:
            found.append((re.compile(rf"(?:.*\.)?(?:{pattern})"), float(value)))
        except re.error as error:
            raise file.error(key, f"{pattern!r} is not a regular expression: {error}") from None
    return found


def matching(found: list[tuple[re.Pattern[str], float]], module: str) -> float | None:
    """The number of the first expression that fits."""
    return next((value for pattern, value in found if pattern.fullmatch(module)), None)


def check_targets(file: ConfigFile, modules: Modules, found: Mapping[str, AdaptedMatrix], path: Path) -> None:
    """Raise ModelError for a target that names no matrix, for a matrix that is one and is not in the file, and for one
    that is there and is none. What an expression or "all-linear" means is taken from the file as it is."""
    targets = file.get("target_modules")
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise file.error("target_modules", f"it is not a regular expression: {error}") from None
        return
    if not isinstance(targets, list) or not all(type(target) is str for target in targets):
        raise file.error("target_modules", "a list of modules' names is expected, or an expression")
    excluded, kept = file.get("exclude_modules"), file.get("layers_to_transform")
    layers = kept if isinstance(kept, list) else [] if kept is None else [kept]
    if not all(type(layer) is int for layer in layers):
        raise file.error("layers_to_transform", "a layer's number is expected, or a list of them")
    meant = {name for name, matrix in found.items() if matrix.experts}  # by target_parameters
    for target in targets:
        own = dict(modules.wanted(target))
        if not own:
            raise file.error("target_modules", f"{target} names no matrix of the model's text layers that is served")
        for module, name in own.items():
            layer = LAYER.search(module)
            if layers and layer is not None and int(layer[1]) not in layers:
                continue
            meant.add(name)
            if name not in found and not excluded:
                raise ModelError(f"{path}: {CONFIG} has {target} as a target, and no tensor adapts {module}")
    for name, matrix in found.items():
        if name not in meant:
            why = f"adapts what is no target of {CONFIG}, by its target_modules and layers_to_transform"
            raise ModelError(f"{path}: tensor {matrix.stored}.lora_A.weight {why}")
