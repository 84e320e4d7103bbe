"""How many KV blocks an executor gets: from bytes that are given, measured, or a stated share of the machine's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.models.kv_groups import place_sizes
from penstock.engine_core.models.layer_spec import ExpertSpec, LayerSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.tensors import model_weights
from penstock.engine_core.models.vision_cost import tower_step_bytes, tower_weight_bytes
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.errors import ConfigError

CPU_SHARE = 8  # on a CPU the cache gets an eighth of the available memory
STATE_SHARE = 4  # a quarter of the memory for caches holds snapshots of states
SLOT_SNAPSHOTS = 8  # at most, for each slot
CPU_CEILING = 4 << 30  # and at most this without --kv-cache-memory
ENCODER_ROWS = 16384  # of the encoder cache, unless an image has more or the option says otherwise
CONTEXT_BYTES = 960 << 20  # of the CUDA context, kernels and libraries
ACTIVATION_SHARE = 1.6  # of a layer's own activations are alive at the worst moment, or kept beside graphs
LOGIT_LINES = 5.4  # fp32 rows of a vocabulary per entry: logits, sampling's buffers, penalty counts
DRAFTED = 4  # one row in so many may bring a draft, which is an entry more
SPLIT_BYTES = 256 << 20  # of batch-invariant attention at most, whose keys are cut: kernels/attention_tiling.py
SMALLEST, LARGEST = 1, 1 << 15  # pixels of the side of pictures
GRAPH_PATCHES = 4096  # most of an image whose layers run from CUDA graphs
EXPANDED_BYTES = 256 << 20  # of keys and values that latents are expanded to: kernels/latent_expansion.py
STAGING = 64 << 20  # bytes of staging memory for copies in one direction, unless one block has more
FLOAT = 4  # bytes
GIB = 1 << 30
EXPERTS = ".experts."  # in names of their matrices
ITEM_BYTES: Mapping[str, int] = {"float32": FLOAT, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheShape:
    """Sizes that decide the size of the cache. Bytes are of one executor."""

    block_bytes: int
    layout: BlockLayout
    max_model_len: int
    max_num_seqs: int
    length_given: bool  # --max-model-len was given, not taken from the model

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def request_blocks(self) -> int:
        """Most blocks of a request of full length."""
        return self.layout.most(self.max_model_len)

    def fitting(self, blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold."""
        low, high = 0, max(0, blocks)  # columns: each takes a block at least
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.layout.most(middle * self.block_size) <= blocks else (low, middle - 1)
        return low * self.block_size

    @property
    def useful_blocks(self) -> int:
        """Blocks that all slots together could fill."""
        return self.request_blocks * self.max_num_seqs


def block_bytes(spec: ModelSpec, block_size: int, item_bytes: int) -> int:
    """Keys and values, or latents, of one block over the layers of a KV group; an encoder keeps none. item_bytes: of a
    number in the model's type."""
    if spec.encoder:
        return 0
    return block_size * sum(place_sizes(spec)) * (1 if spec.attention.kv_fp8 else item_bytes)


def drafting_bytes(layers: ModelSpec, block_size: int, item_bytes: int, *, states: bool) -> int:
    """What drafting by these layers adds to a block: keys and values, and of an EAGLE head the `states` it reads."""
    return block_bytes(layers, block_size, item_bytes) + states * block_size * layers.hidden * item_bytes


def cpu_blocks(shape: CacheShape, available: int) -> int:
    """Blocks on a CPU without --kv-cache-memory: an eighth of the available memory, at most 4 GiB and at most what the
    slots could use."""
    return min(min(available // CPU_SHARE, CPU_CEILING) // shape.block_bytes - 1, shape.useful_blocks)


def gpu_blocks(shape: CacheShape, total: int, utilization: float, used: int, step_peak: int) -> int:
    """Blocks on a GPU without --kv-cache-memory.

    What may be used is `utilization` of `total`; of that `used` is taken (weights, tables, the context, other
    processes) and a worst-case step needs `step_peak` on top. All in bytes.
    """
    return (int(total * utilization) - used - step_peak) // shape.block_bytes - 1


def given_blocks(shape: CacheShape, given: int) -> int:
    """Blocks in the bytes of --kv-cache-memory, scratch block included in the bytes."""
    return given // shape.block_bytes - 1


def snapshot_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Of all states of a rank's share of a model as of one position; 0: no layer is recurrent."""
    return sum(recurrence.state().snapshot_bytes(item_bytes) for recurrence in spec.recurrences)


def slot_state_bytes(spec: ModelSpec, item_bytes: int, drafts: int) -> int:
    """What the recurrent layers of a rank's share keep of a running sequence. drafts: of a row at most."""
    return sum(recurrence.state().slot_bytes(item_bytes, 1 + drafts) for recurrence in spec.recurrences)


def state_places(asked: int, each: int, free: int, slots: int) -> int:
    """Snapshots of `each` bytes that are held: as many as are asked for, else a part of the `free` bytes."""
    return asked or max(0, min(free // STATE_SHARE // each, SLOT_SNAPSHOTS * slots))


def host_places(option: str, given: int, each: int, what: str, there: int | None = None) -> int:
    """How many of what takes `each` bytes so many bytes of the host's memory hold. Raises ConfigError where that is
    none, or more than is `there`, if that is known."""
    if not given or not each:
        return 0
    if given < each:
        raise ConfigError(option, given, f"{what} takes {each} bytes; give as many at least, or 0")
    if there is not None and given > there:
        raise ConfigError(option, given, f"the host has {there / (1 << 30):.1f} GiB of memory left")
    return given // each


def staging_blocks(block_bytes: int) -> int:
    """KV blocks that the staging memory of copies in one direction has room for."""
    return max(1, STAGING // block_bytes)


def staging_bytes(block_bytes: int) -> int:
    """What staging memory takes of a GPU, of both directions."""
    return 2 * staging_blocks(block_bytes) * block_bytes if block_bytes else 0


def encoder_tokens(spec: ModelSpec, tokens: int, length: int) -> int:
    """The token budget of a step: an encoder's has room for the longest prompt, which runs as a whole."""
    return max(tokens, length) if spec.encoder else tokens


def check_blocks(shape: CacheShape, blocks: int, option: str, value: object) -> int:
    """Return `blocks` if they hold one request of full length.

    Raises ConfigError with the numbers: naming --max-model-len with the length that fits where any does, else `option`,
    which decides the size of the cache.
    """
    if blocks >= shape.request_blocks:
        return blocks
    fits = min(shape.fitting(blocks), shape.max_model_len)
    need = (shape.request_blocks + 1) * shape.block_bytes
    has = f"the KV cache has room for {fits} tokens ({max(0, blocks)} blocks of {shape.block_size})"
    wish = f"one request of {shape.max_model_len} tokens needs {shape.request_blocks} blocks ({need} bytes)"
    if fits:
        length = shape.max_model_len if shape.length_given else None
        raise ConfigError("--max-model-len", length, f"{has}, but {wish}; give at most {fits}, or raise {option}")
    raise ConfigError(option, value, f"{has}, but {wish}")


@dataclass(frozen=True)
class StepShape:
    """The largest step."""

    tokens: int
    max_num_seqs: int
    max_model_len: int
    item_bytes: int
    invariant: bool = False
    row_drafts: int = 0  # at most


def weights(spec: ModelSpec) -> int:
    """Numbers in a model."""
    return sum(math.prod(weight.shape) for _, weight in model_weights(spec))


def weight_bytes(spec: ModelSpec, item_bytes: int, *, dequantized: bool = False) -> int:
    """Memory of them. item_bytes: of a number that is not quantized, or is `dequantized` on a CPU, as experts never
    are; in fp32 where rows are rounded, too."""
    total, kept = 0, (EXPERTS, *{f".{experts.shared_name}." for experts in spec.sparse if experts.joins})
    for name, weight in model_weights(spec):
        if dequantized and weight.form is not None and not weight.dense and not any(one in name for one in kept):
            rounded = weight.form.activations != "none"
            total += math.prod(weight.shape) * (FLOAT if rounded else item_bytes)
        else:
            total += weight.held_bytes(item_bytes)
    return total


class QuantizationFacts(msgspec.Struct, frozen=True):
    """What quantization does to a model, for people."""

    method: str  # as config.json or the option calls it
    format: str
    bits: int  # of a weight in the first of its formats
    weight_bytes: int
    bfloat16_bytes: int  # of the same model without

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{self.format}, {self.weight_bytes / GIB:.2f} GiB in place of {self.bfloat16_bytes / GIB:.2f} in bfloat16"
        )


def quantization_facts(spec: ModelSpec) -> QuantizationFacts | None:
    """None: the model is not quantized."""
    if (found := spec.quantization) is None:
        return None
    item = ITEM_BYTES["bfloat16"]
    return QuantizationFacts(found.method, found.label, found.bits, weight_bytes(spec, item), weights(spec) * item)


def expert_weights(spec: ModelSpec, experts: ExpertSpec) -> int:
    """Of one expert."""
    parts = len(experts.parts)
    return (parts + 1) * spec.hidden * experts.width + experts.bias * (parts * experts.width + spec.hidden)


def idle_weights(spec: ModelSpec) -> int:
    """Of the experts that a token does not go to, in all layers: the rest is what it is multiplied with."""
    return sum((experts.count - experts.routing.chosen) * expert_weights(spec, experts) for experts in spec.sparse)


def step_bytes(spec: ModelSpec, step: StepShape) -> int:
    """Bytes that slot tables and the largest step take beyond weights and cache."""
    widest = max(mlp_numbers(spec, layer) for layer in set(spec.blocks)) + 4 * spec.hidden
    widest += 2 * spec.body.embedding.layer_inputs + max(
        (attention.activations for attention in spec.attentions), default=0
    )
    activations = step.tokens * widest * step.item_bytes
    lines = (step.max_num_seqs + step.max_num_seqs // DRAFTED) * spec.vocab_size * FLOAT
    tables = step.max_num_seqs * step.max_model_len * FLOAT
    counted = 1.0 if spec.encoder else LOGIT_LINES  # it has no logits
    states = step.max_num_seqs * slot_state_bytes(spec, step.item_bytes, step.row_drafts)
    scratch = SPLIT_BYTES if step.invariant else expanded_bytes(spec, step)
    return int(ACTIVATION_SHARE * activations + counted * lines) + tables + states + scratch


def expanded_bytes(spec: ModelSpec, step: StepShape) -> int:
    """What a layer's expanded latents take: those of one head at the longest length at least."""
    latents = [own.latent for own in spec.attentions if own.latent is not None]
    width = max((max(latent.query_dim, latent.value_dim) for latent in latents), default=0)
    return max(EXPANDED_BYTES, 2 * step.max_model_len * width * step.item_bytes) if latents else 0


def mlp_numbers(spec: ModelSpec, layer: LayerSpec) -> int:
    """That a token has in a layer's MLP: gate, up and their product, and of experts that product and the result of
    each."""
    joined = layer.experts is not None and layer.experts.joins
    dense = 3 * layer.dense.width if layer.dense is not None and not joined else 0
    if layer.experts is None:
        return dense
    return dense + (layer.experts.routing.chosen + joined) * (layer.experts.width + spec.hidden)


def taken_bytes(spec: ModelSpec, step: StepShape) -> int:
    """Bytes that are taken when the cache is made: weights, rotary tables, the context."""
    tables = sum(dim for _, dim in {attention.rotary for attention in spec.attentions}) * FLOAT
    return weight_bytes(spec, step.item_bytes) + step.max_model_len * tables + CONTEXT_BYTES


def image_sizes(spec: VisionSpec) -> tuple[Size, ...]:
    """Sizes of images from the smallest to the largest that the processor makes, each four times the one before."""
    found: dict[Size, None] = {}
    side = SMALLEST
    while side <= LARGEST:
        size = spec.processor.resize.target(Size(side, side))
        assert size is not None, "a square has a shape that every processor takes"
        found[size] = None
        side *= 2
    return tuple(found)


def encoder_rows(spec: VisionSpec, asked: int) -> int:
    """Rows of the encoder cache. asked: --mm-encoder-cache-tokens. Raises ConfigError if no image fits."""
    sizes = image_sizes(spec)
    smallest, largest = spec.rows(sizes[0]), spec.rows(sizes[-1])
    if 0 < asked < smallest:
        raise ConfigError("--mm-encoder-cache-tokens", asked, f"the smallest image of the model takes {smallest}")
    return asked or max(ENCODER_ROWS, largest)


@dataclass(frozen=True)
class VisionBytes:
    """Memory that images take on each rank of the first stage."""

    weights: int  # of the vision encoder
    cache: int  # of the encoder cache
    activations: int  # of the largest image, beside a step: an estimate
    graphs: int  # that CUDA graphs hold for the largest image that they serve: the same


def vision_bytes(spec: VisionSpec, asked: int, item_bytes: int) -> VisionBytes:
    """asked: --mm-encoder-cache-tokens."""
    return VisionBytes(
        weights=tower_weight_bytes(spec, item_bytes),
        cache=encoder_rows(spec, asked) * spec.row_width * item_bytes,
        activations=tower_step_bytes(spec, spec.patches(image_sizes(spec)[-1]), item_bytes),
        graphs=tower_step_bytes(spec, GRAPH_PATCHES, item_bytes),
    )
