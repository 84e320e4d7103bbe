"""Launches of every kernel for a chip, without one: what `benchmarks.chips` compiles.

The product's own functions are called with tensors that have no memory (torch's meta device), on a chip of
`kernels.chip.CHIPS`. Triton's hook takes each launch before it is compiled. So what is compiled is what the product
would launch: the choices of tilings and kernels are its own.

Importing this replaces `kernels.chip.chip_of` in its process, so import it before any other kernel.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from penstock.kernels import chip as chips
from penstock.kernels.chip import Chip


class ChipDriver:
    """Triton's driver for a chip that is not there. Triton caches by device, so each chip is a device of its own."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def get_current_device(self) -> int:
        return self.chip.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.chip.capability, 32)


chips.chip_of = lambda device: driver.active.chip  # type: ignore[assignment, attr-defined]  # the modules below import it

from benchmarks.latent_launches import latents  # noqa: E402
from benchmarks.low_rank_launches import low_rank, low_rank_experts  # noqa: E402
from benchmarks.meta_tensors import SLOTS, memory, numbers  # noqa: E402
from benchmarks.recurrent_launches import recurrent  # noqa: E402
from penstock.engine_core.execution.product_bench import scaled_weight  # noqa: E402
from penstock.kernels import (  # noqa: E402
    attention_device,
    attention_tiling,
    attention_triton,
    block_copies_triton,
    changes_triton,
    gather,
)
from penstock.kernels.activation import activate, activate_rounded  # noqa: E402
from penstock.kernels.attention import E4M3, paged_attention, prepare_attention  # noqa: E402
from penstock.kernels.block_copies import block_lines  # noqa: E402
from penstock.kernels.exchange import Inboxes  # noqa: E402
from penstock.kernels.exchange_triton import exchange_rows  # noqa: E402
from penstock.kernels.experts import expert_mlp, route  # noqa: E402
from penstock.kernels.experts_triton import multiply_sorted  # noqa: E402
from penstock.kernels.grouped_linear import form_named, timed_weight  # noqa: E402
from penstock.kernels.grouped_linear_triton import multiply_by as multiply_grouped_by  # noqa: E402
from penstock.kernels.linear import gated_linear, linear  # noqa: E402
from penstock.kernels.linear_plans import plans_of  # noqa: E402
from penstock.kernels.linear_tilings import SCALED, ExpertTiling, Product, candidates, shared_bytes  # noqa: E402
from penstock.kernels.linear_triton import multiply_by  # noqa: E402
from penstock.kernels.logprobs import token_logprobs  # noqa: E402
from penstock.kernels.norm import add_norm, add_norm_rounded, layer_norm, rms_norm  # noqa: E402
from penstock.kernels.quantize import quantize, row_format  # noqa: E402
from penstock.kernels.quantized import FLOAT8, Float8Weight, Int8Weight, Rows  # noqa: E402
from penstock.kernels.quantized_linear import kind_of, multiply_quantized, multiply_quantized_by  # noqa: E402
from penstock.kernels.records import (  # noqa: E402
    NUMBERS,
    Activation,
    AttentionBatch,
    AttentionOptions,
    Entries,
    ExpertBiases,
    HeadNorms,
    InputRows,
    Routing,
    SlotHistory,
    SlotMemory,
    SlotSampling,
)
from penstock.kernels.rope import gather_rotation, rotate_and_store  # noqa: E402
from penstock.kernels.sampling import accept, sample_entries  # noqa: E402
from penstock.kernels.triton_names import cache_hook, read_launch, set_fp_fusion  # noqa: E402
from penstock.kernels.varlen_attention import varlen_attention  # noqa: E402

ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 1024, 8192)  # of a product
BLOCK_SIZE = 16
LONG = 131072
ENCODED = (32, 64, 72, 80, 96, 128, 256)  # sizes of encoders' heads


@dataclass(frozen=True)
class Model:
    """The shapes of a model that its kernels depend on."""

    name: str
    hidden: int
    width: int  # of the MLP, or of an expert
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0
    norms: bool = False  # of each head
    bias: bool = False


MODELS = (
    Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936, norms=True),
    Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256),
    Model("Qwen2.5-7B", 3584, 18944, 28, 4, 128, 152064, bias=True),
    Model("Phi-3-mini", 3072, 8192, 32, 32, 96, 32064, window=2047),
    Model("Phi-2", 2560, 10240, 32, 32, 80, 51200),
    Model("Gemma-2-9B", 3584, 14336, 16, 8, 256, 256000, window=4096, softcap=50.0),
    Model("Gemma-3-1B", 1152, 6912, 4, 1, 256, 262144, window=512, norms=True),
    Model("Gemma-3-27B", 5376, 21504, 32, 16, 128, 262208, window=1024, norms=True),
    Model("gpt-oss-20b", 2880, 2880, 64, 8, 64, 201088, experts=32, chosen=4, window=128, sinks=True),
    Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, experts=128, chosen=8, norms=True),
    Model("heads of 192", 2048, 1408, 16, 16, 192, 102400, experts=64, chosen=6),
    Model("heads of 512", 4096, 8192, 8, 1, 512, 32000),
)


# Some stand for the others where a kernel does not depend on all of a model: each head size, with what masks go with
# it; small, odd and large vocabularies and widths.
ATTENDED = (
    "Llama-3.1-8B",
    "Phi-3-mini",
    "Phi-2",
    "Gemma-2-9B",
    "gpt-oss-20b",
    "heads of 192",
    "heads of 512",
)
SAMPLED = ("Phi-2", "Gemma-3-27B")
NORMED = ("Qwen3-0.6B", "Phi-2", "Phi-3-mini", "Gemma-2-9B", "gpt-oss-20b", "Gemma-3-27B")
EIGHT_BITS = "Llama-3.1-8B"
MIXTURE = "Qwen3-30B-A3B"  # whose experts have adapters
GROUPS = ("int4-128-bf16", "int8-128-bf16", "e2m1-16-e4m3", "e2m1-32-e8m0")  # forms of weights in groups
INVARIANT = ("Llama-3.1-8B", "Gemma-2-9B", "Gemma-3-4B")
WITH_IMAGES = Model("Gemma-3-4B", 2560, 10240, 8, 4, 256, 262208, window=1024)
CACHED_IN_FP8 = ("Llama-3.1-8B", "Phi-3-mini", "Gemma-2-9B", "gpt-oss-20b")


# Rows, tokens, the longest row's queries and context of steps.
SINGLES = (1, 1, 1, LONG), (256, 256, 1, 8192), (8, 32, 4, 4096)
CHUNKS = (1, 8192, 8192, 8192), (64, 2048, 1985, 4096)
# Heads of values and of keys, their sizes, and whether it is the delta rule: Qwen3.5's recurrent layers, Falcon-H1's.
GEMMA_4 = (8, 256), (2, 512)  # key-value heads of windows and of global layers, and their size
RECURRENT = (32, 16, 128, 128, True), (32, 2, 256, 64, False)


class Launch(NamedTuple):
    """A specialization of a kernel that was launched."""

    module: str
    name: str
    specialization: str  # as Triton's `preload` takes it
    label: str  # what tells it from the kernel's others, the same on every chip that cuts alike
    most: int | None = None  # bytes of shared memory that the product's own rule reckons with


@contextmanager
def collected(chip: Chip) -> Iterator[dict[str, Launch]]:
    """Within it launches for the chip do nothing but add to what it gives, each specialization once."""
    found: dict[str, Launch] = {}

    def collect(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        given = labelled(compile, {one.name: one.default for one in fn.jit_function.params if one.has_default})
        launch = read_launch(fn, compile)
        assert launch is not None
        key = f"{fn.module}.{fn.name} {given}"
        if key not in found:
            found[key] = Launch(fn.module, fn.name, launch.specialization, given)
        return True

    driver.set_active(ChipDriver(chip))
    plans_of.cache_clear()  # made for the chip before
    set_fp_fusion()
    with cache_hook(collect) as hooked:
        assert hooked
        yield found


def labelled(compile: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The constants and options of a launch, then a digest of its types and alignment. Whether PDL is used follows from
    the chip, and stays unsaid, as a kernel's defaults do."""
    names = list(compile["signature"])
    constants = {names[place[0]]: value for place, value in compile["constants"].items() if names[place[0]] != "PDL"}
    constants = {name: value for name, value in constants.items() if name not in defaults or value != defaults[name]}
    taken = [name for name, value in constants.items() if isinstance(value, str) and tl.dtype.is_dtype(value)]
    assert not taken, f"{taken}: a kernel that another process compiled takes these words for types"
    words = [f"{name}={value}" for name, value in constants.items()]
    words.append(f"warps={compile['num_warps']} stages={compile['num_stages']}")
    if registers := json.loads(compile["specialization_data"])["options"].get("maxnreg"):
        words.append(f"registers={registers}")
    types = [str(kind).partition(",NVMMA")[0].rstrip(">") for kind in compile["signature"].values()]
    aligned = sorted(place[0] for place, tags in compile["configs"][0].items() if tags)
    return " ".join(words) + f" #{hashlib.sha256(repr((types, aligned)).encode()).hexdigest()[:6]}"


def launches(chip: Chip) -> dict[str, Launch]:
    """Every kernel that the product would launch on the chip, by name and label."""
    plans_of.cache_clear()  # it asks for a device's chip once
    with collected(chip) as found:
        for key, most in tables(chip, found):
            found[key] = found[key]._replace(most=most)
        for model in MODELS:
            products(model)
            if model.name in NORMED:
                norms(model)
            if model.name in ATTENDED:
                attention(model)
            if model.name in CACHED_IN_FP8 and chip.float8:
                attention(model, fp8=True)
            if model.name in SAMPLED:
                sampling(model)
            if model.name == MIXTURE:
                low_rank_experts(model.hidden, model.width, model.experts, model.chosen)
            if model.name == EIGHT_BITS:
                eight_bits(model, chip)
                groups(model)
                low_rank(model.hidden, model.width, model.kv_heads * model.dim)
        attention_rows(chip)
        for window in (0, WITH_IMAGES.window):
            attention(replace(WITH_IMAGES, window=window), limited=True)
        latents()
        quantized_experts(chip)
        encoders()
        slots()
        for kv_heads, dim in GEMMA_4:
            normed_values(8 * kv_heads, kv_heads, dim)
        for layer in RECURRENT:
            recurrent(*layer[:4], delta=layer[4])
    return found


def products(model: Model) -> None:
    """Products of a layer, its experts', and the head."""
    wide = (model.heads + 2 * model.kv_heads) * model.dim
    for invariant in (False, True):
        for rows in ROWS:
            x, inner = memory(rows, model.hidden), memory(rows, model.heads * model.dim)
            linear(x, memory(wide, model.hidden), memory(wide) if model.bias else None, invariant=invariant)
            linear(inner, memory(model.hidden, model.heads * model.dim), invariant=invariant)
            linear(x, memory(model.vocabulary, model.hidden), invariant=invariant)
            if model.experts:
                experts(model, x, invariant=invariant)
            else:
                gated_linear(x, memory(2 * model.width, model.hidden), invariant=invariant)
                linear(memory(rows, model.width), memory(model.hidden, model.width), invariant=invariant)


def groups(model: Model) -> None:
    """The MLP's first product with weights of 4 and 8 bits in groups."""
    for name in GROUPS:
        form = form_named(name)
        values = memory(2 * model.width, form.blocks(model.hidden) * form.run)
        weight = timed_weight(form, 2 * model.width, model.hidden, values)
        for rows in ROWS:
            for gated in (False, True):
                for invariant in (False, True):
                    multiply_quantized(memory(rows, model.hidden), weight, gated=gated, invariant=invariant)


def eight_bits(model: Model, chip: Chip) -> None:
    """The MLP's products with weights of 8 bits, in every way that tuning may try; chips without such numbers have them
    as weights alone."""
    single = torch.float32
    outputs = 2 * model.width
    values = memory(outputs, model.hidden, kind=FLOAT8)
    weights = [Float8Weight(values, memory(outputs, kind=single), activations="none")]
    weights.append(Int8Weight(memory(outputs, model.hidden, kind=torch.int8), memory(outputs, kind=single)))
    if chip.float8:
        blocks = memory(-(-outputs // 128), -(-model.hidden // 128), kind=single)
        weights += Float8Weight(values, memory(outputs, kind=single)), Float8Weight(values, blocks, (128, 128), "block")
    for weight in weights:
        form = row_format(weight)
        for rows, gated in itertools.product(ROWS, (False, True)):
            x: Rows = memory(rows, model.hidden)
            multiply_quantized(x, weight, gated=gated)
            if form is not None:
                x = quantize(memory(rows, model.hidden), form)
            width = model.width if gated else outputs
            product = Product(width, model.hidden, torch.bfloat16, gated, weight=kind_of(weight))
            for way in candidates(product, rows, chip):
                multiply_quantized_by(way, x, weight, None, gated=gated)
        if form is not None:
            hidden = memory(8, model.hidden)
            add_norm_rounded(hidden, hidden, memory(model.hidden), 1e-5, form)
            activate_rounded(memory(8, outputs), form)


def norms(model: Model) -> None:
    """What stands between a layer's products, but for attention."""
    weight, x = memory(model.hidden), memory(8, model.hidden)
    rms_norm(x, weight, 1e-6)
    add_norm(x, x, weight, 1e-6)
    activate(memory(8, 2 * model.width), Activation("gelu_tanh" if model.name.startswith("Gemma") else "silu"))
    if model.name == "Phi-2":
        layer_norm(x, weight, weight, 1e-6)
        add_norm(x, x, weight, 1e-6, weight)
        activate(memory(8, model.width), Activation("gelu_tanh"), gated=False)
    wide = (model.heads + 2 * model.kv_heads) * model.dim
    rotation = gather_rotation(memory(LONG, model.dim, kind=torch.float32), memory(8, kind=torch.int64))
    q, k, v = memory(8, wide).view(8, -1, model.dim).split((model.heads, model.kv_heads, model.kv_heads), dim=1)
    pages = memory(1024, BLOCK_SIZE, model.kv_heads, model.dim)
    own = HeadNorms(memory(model.dim), memory(model.dim), 1e-6) if model.norms else None
    rotate_and_store(q, k, v, rotation, pages, pages, memory(8, kind=torch.int64), own)
    if driver.active.chip.float8:
        narrow, scales = pages.to(E4M3), memory(2, model.kv_heads, kind=torch.float32)
        rotate_and_store(q, k, v, rotation, narrow, narrow, memory(8, kind=torch.int64), own, scales)
    if own is not None:
        rotation = rotation._replace(query_scale=memory(8, kind=torch.float32))
        rotate_and_store(q, k, v, rotation, pages, pages, memory(8, kind=torch.int64), own._replace(turned=True))
    for ranks in (2, 8) if model.name in SAMPLED else ():
        inboxes = Inboxes(memory(ranks, kind=torch.int64), numbers(256), 0, model.hidden, torch.bfloat16)
        exchange_rows(x, x, weight, 1e-6, inboxes)


def normed_values(heads: int, kv_heads: int, dim: int) -> None:
    """Norm, turn and page write of Gemma 4, also where keys and values are another layer's."""
    rotation = gather_rotation(memory(LONG, dim, kind=torch.float32), memory(8, kind=torch.int64))
    q, k = memory(8, (heads + kv_heads) * dim).view(8, -1, dim).split((heads, kv_heads), dim=1)
    pages, slots = memory(1024, BLOCK_SIZE, kv_heads, dim), memory(8, kind=torch.int64)
    own = HeadNorms(memory(dim), memory(dim), 1e-6, values=True)
    rotate_and_store(q, k, k, rotation, pages, pages, slots, own)
    rotate_and_store(q, q[:, :0], q[:, :0], rotation, pages, pages, slots, own._replace(values=False))


def experts(model: Model, x: Tensor, *, invariant: bool) -> None:
    bias = memory(model.experts, kind=torch.float32) if model.sinks else None
    routing = Routing(model.chosen, normalised=True, sigmoid=bias is not None, bias=bias)
    logits = memory(len(x), model.experts)
    for kind in (routing._replace(groups=8, top_groups=4, group_best=2), routing._replace(shared=True), routing):
        routes = route(logits, kind, logits[:, 0] if kind.shared else None, memory(1, kind=torch.int32))
    gate_up = memory(model.experts, 2 * model.width, model.hidden)
    down = memory(model.experts, model.hidden, model.width)
    expert_mlp(x, routes, gate_up, down, invariant=invariant)
    if model.sinks:
        biases = ExpertBiases(memory(model.experts, 2 * model.width), memory(model.experts, model.hidden))
        expert_mlp(x, routes, gate_up, down, biases=biases, activation=Activation("silu", 1.702, 7.0, 1.0))


def quantized_experts(
    chip: Chip, rows: Iterable[int] = ROWS, kinds: Collection[str] = SCALED, groups: Iterable[str] = GROUPS
) -> None:
    """Experts of 8 bits, in every way that tuning may try, and in groups."""
    width, inputs, held = 1024, 2048, 32
    shapes = (held, 2 * width, inputs), (held, inputs, width)
    for tokens in rows:
        x, routes = memory(tokens, inputs), route(memory(tokens, held), Routing(4, normalised=True))
        for kind in kinds if chip.float8 else ("fp8_weights", "int8"):
            scaled = [scaled_weight(kind, shape, x.device) for shape in shapes]
            for invariant in (False, True):
                expert_mlp(x, routes, scaled[0], scaled[1], invariant=invariant)
            for way in candidates(Product(width, inputs, torch.bfloat16, experts=held, weight=kind), tokens, chip):
                assert isinstance(way, ExpertTiling)
                multiply_sorted(x, routes, scaled[0], scaled[1], 0, way)
        for name in groups:
            form = form_named(name)
            planes = [timed_weight(form, held * outputs, own, memory(held * outputs, form.blocks(own) * form.run))
                      for _, outputs, own in shapes]  # fmt: skip
            expert_mlp(x, routes, planes[0], planes[1])


def attention(model: Model, *, fp8: bool = False, limited: bool = False) -> None:
    """Steps of single tokens, few and many, short and long; of a few drafts; of chunks, alone and among tokens. Pages
    are in e4m3 if `fp8`. limited: of chunks with images whose tokens see one another."""
    pages = memory(1 << 14, BLOCK_SIZE, model.kv_heads, model.dim, kind=E4M3 if fp8 else torch.bfloat16)
    sinks = memory(model.heads, kind=torch.float32) if model.sinks else None
    scales = memory(2, model.kv_heads, kind=torch.float32) if fp8 else None
    options = AttentionOptions(model.dim**-0.5, model.window, model.softcap, sinks, scales)
    for invariant in (False, True) if model.name in INVARIANT else (False,):
        for rows, tokens, longest, context in CHUNKS if limited else SINGLES + CHUNKS:
            batch = AttentionBatch(
                numbers(rows + 1), numbers(rows), numbers(rows), numbers(SLOTS, LONG // BLOCK_SIZE),
                memory(tokens, kind=torch.int64), longest, context, invariant=invariant,
                arrivals=attention_device.arrival_counters(pages.device), limits=numbers(tokens) if limited else None,
            )  # fmt: skip
            q = memory(tokens, model.heads, model.dim)
            prepare_attention(q, pages, batch, options)
            paged_attention(q, pages, pages, batch, options)


def attention_rows(chip: Chip) -> None:
    """Every row of attention's table that fits the chip, for heads of its own size."""
    for row in attention_tiling.rows():
        served = row.item == 2 or (row.item == 1 and chip.float8)
        if served and row.shared_bytes(row.dim, chip) <= chip.shared_memory:
            by_row = row.kind not in ("short", "long")
            small = row.kind == "window"
            tiling = attention_tiling.Tiling(
                row.block_m,
                row.block_n,
                1 if small else 8,
                row.warps,
                row.stages,
                by_row,
                one_loop=small,
            )
            options = AttentionOptions(
                1.0, 128 if small else 0, kv_scales=memory(2, 1, kind=torch.float32) if row.item == 1 else None
            )
            kind = E4M3 if row.item == 1 else torch.bfloat16
            q, pages = memory(64, 8, row.dim), memory(1 << 12, BLOCK_SIZE, 1, row.dim, kind=kind)
            batch = AttentionBatch(
                numbers(65), numbers(64), numbers(64), numbers(SLOTS, LONG // BLOCK_SIZE), memory(64, kind=torch.int64),
                1, LONG,
            )  # fmt: skip
            attention_triton.attend_tiles(q, pages, pages, q, batch, options, tiling)


def encoders() -> None:
    """What encoders launch and decoders do not: for heads of each size, with a window and without, in each type."""
    for dim in ENCODED:
        for window in (0, 65):
            for kind in (torch.bfloat16, torch.float16, torch.float32):
                q, k, v = memory(4096, 12, dim, kind=kind).split(4, dim=1)
                varlen_attention(q, k, v, numbers(9), 512, AttentionOptions(dim**-0.5, window))
    for gated in (False, True):
        activate(memory(8, 3072), Activation("gelu"), gated=gated)


def sampling(model: Model) -> None:
    entries, words = 64, -(-model.vocabulary // 32)
    floats = [memory(SLOTS, kind=torch.float32) for _ in range(6)]
    edits, late = numbers(SLOTS, 1024), memory(SLOTS, 1024, kind=torch.float32)
    given = SlotSampling(
        numbers(SLOTS), *floats, memory(SLOTS, kind=torch.int64), *(numbers(SLOTS) for _ in range(4)),
        edits, edits, late, late, numbers(SLOTS), numbers(SLOTS, 64, 8), numbers(SLOTS + 128, words), 128,
    )  # fmt: skip
    history = SlotHistory(numbers(SLOTS, LONG), numbers(SLOTS), numbers(SLOTS, model.vocabulary))
    rows = Entries(numbers(entries + 1), *(numbers(entries) for _ in range(4)))
    logits = memory(entries, model.vocabulary)
    chosen = sample_entries(logits, rows, given, history)
    token_logprobs(logits, chosen.tokens, rows.slots, given.logprobs)
    accept(chosen.tokens, rows, given, history)
    gather.read_drafts(rows, history)


def slots() -> None:
    """What a step does once for all layers, the changes of slots between two, and copies of blocks beside them."""
    tables, known = numbers(SLOTS, LONG // BLOCK_SIZE), numbers(SLOTS)
    rows = InputRows(numbers(65), numbers(64), numbers(64), numbers(2048))
    found = gather.gather_inputs(rows, numbers(SLOTS, LONG), known, tables, BLOCK_SIZE)
    batch = AttentionBatch(rows.query_start, found.context, rows.slots, tables, found.slot_mapping, 64, 4096)
    gather.state_places(found.positions, batch, known, BLOCK_SIZE, 1 << 20)
    changes_triton.launch_changes(numbers(4096), SlotMemory(numbers(SLOTS, LONG), tables, numbers(NUMBERS, SLOTS)))
    lines = block_lines([memory(64, BLOCK_SIZE, 8, 128)] * 64)
    for to_runs in (True, False):
        runs = torch.zeros(32, lines.run_bytes, dtype=torch.uint8, device=lines.starts.device)
        block_copies_triton.launch_copies(numbers(32), lines, runs, gather=to_runs)


def tables(chip: Chip, found: dict[str, Launch]) -> Iterator[tuple[str, int]]:
    """Launch every way of a product that tuning may try on the chip, whatever shape it is for. Gives the launches, and
    the bytes of shared memory that `shared_bytes` reckons with."""
    for gated in (False, True):
        product = Product(14336, 4096, torch.bfloat16, gated)
        weight = memory(2 * product.width if gated else product.width, product.inputs)
        for rows in ROWS:
            for way in candidates(product, rows, chip):
                before = set(found)
                multiply_by(way, memory(rows, product.inputs), weight, None, gated=gated)
                tiles = (key for key in found.keys() - before if "activation" not in key)
                yield from ((key, shared_bytes(way, chip, gated=gated)) for key in tiles)
        product = Product(14336, 4096, torch.bfloat16, gated, weight=GROUPS[0])
        form = form_named(GROUPS[0])
        values = memory(2 * product.width if gated else product.width, form.blocks(product.inputs) * form.run)
        planes = timed_weight(form, len(values), product.inputs, values)
        for rows in ROWS:
            for way in candidates(product, rows, chip):
                before = set(found)
                multiply_grouped_by(way, memory(rows, product.inputs), planes, None, gated=gated)
                yield from ((key, shared_bytes(way, chip, gated=gated)) for key in found.keys() - before)
    mixture = Product(1024, 2048, torch.bfloat16, experts=32)
    for rows in ROWS:
        routes = route(memory(rows, 32), Routing(4, normalised=True))
        gate_up, down = memory(32, 2 * mixture.width, mixture.inputs), memory(32, mixture.inputs, mixture.width)
        for way in candidates(mixture, rows, chip):
            assert isinstance(way, ExpertTiling)
            multiply_sorted(memory(rows, mixture.inputs), routes, gate_up, down, 0, way)
