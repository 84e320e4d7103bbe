"""`penstock plan`: the GPU memory that a model needs, and how many requests of each length run at once.

Weights, bytes per token and blocks come from the formulas that an executor uses for its cache; for the rest, which an
executor measures, see `engine_core.models.memory_estimate`. With tensor parallelism each GPU has its share of weights
and cache, and all of the logits; with pipeline parallelism the figures are those of the stage with the fewest blocks.
A draft model is on the last stage, whole on each GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.engine_core import folder
from penstock.engine_core.execution.block_files import places_in, too_small
from penstock.engine_core.models.adapter_folder import place_bytes
from penstock.engine_core.models.draft_spec import DraftSpec, read_draft
from penstock.engine_core.models.kv_cache import kv_label, with_draft_cache, with_kv_cache
from penstock.engine_core.models.kv_groups import kv_groups_text, layout_of, with_kv_groups
from penstock.engine_core.models.memory_estimate import (
    ITEM_BYTES,
    CacheShape,
    StepShape,
    block_bytes,
    check_blocks,
    drafting_bytes,
    encoder_rows,
    encoder_tokens,
    given_blocks,
    gpu_blocks,
    host_places,
    idle_weights,
    quantization_facts,
    snapshot_bytes,
    staging_bytes,
    state_places,
    step_bytes,
    taken_bytes,
    vision_bytes,
    weight_bytes,
    weights,
)
from penstock.engine_core.models.sharding import check_ranks, held_bytes, part_spec, stage_spec
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.vision_cost import tower_weights
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv_store import store_bytes
from penstock.protocol.speculation import WITH_MODEL, read_speculative
from penstock.services.commands.progress import fitted
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

MIB, GIB = 1 << 20, 1 << 30
# Bytes that the driver leaves to programs. The H200's was measured; the others are rounded down from data sheets.
GPUS: Mapping[str, int] = {
    "h200": 150_109_880_320,
    "b200": 178 * GIB,
    "h100": 79 * GIB,
    "h100-nvl": 93 * GIB,
    "a100": 79 * GIB,
    "a100-40gb": 39 * GIB,
    "l40s": 44 * GIB,
    "l4": 22 * GIB,
    "a10": 22 * GIB,
    "rtx-4090": 23 * GIB,
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)(GB|GiB)", re.IGNORECASE)
STEP_TOKENS = 8192  # per step on a GPU without --max-num-batched-tokens
SHORTEST = 512  # tokens of a request in the first row; each row doubles it


class Concurrency(msgspec.Struct, frozen=True):
    """How many requests of a length (prompt and output) run at once, and what limits them: blocks, slots, or an
    encoder's step."""

    tokens: int
    requests: int
    limit: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a model. Bytes are per GPU."""

    model: str
    dtype: str
    gpu: str
    gpus: int  # sharing the model
    gpu_bytes: int
    usable_bytes: int
    parameters: int
    active_parameters: int  # used for each token: in a mixture of experts, not all
    quantization: str  # how its weights are quantized, in words; empty: they are not
    weight_bytes: int
    step_bytes: int  # estimate: the largest step and the tables of slots
    other_bytes: int  # estimate: CUDA context, kernels, rotary tables; LoRA's places, which are reckoned exactly
    kv_bytes_per_token: int  # with all KV groups
    held_bytes_per_token: int  # what a request of full length holds, by its tokens: windows give the rest back
    kv_cache_dtype: str
    block_size: int
    blocks: int
    kv_groups: str  # in words; empty: all layers hold every token
    cache_tokens: int  # if all KV groups held them
    max_model_len: int
    max_num_seqs: int
    concurrency: tuple[Concurrency, ...]
    snapshot_bytes: int = 0  # of one state of the recurrent layers, on a GPU; 0: there are none
    snapshots: int = 0
    adapter_bytes: int = 0  # of all places for LoRA adapters
    kept_bytes: int = 0  # of the host's memory for each GPU, for weights while executors sleep (--keep-weights)
    host_tokens: int = 0  # that --kv-host-memory of each executor has room for, if all KV groups held them
    disk_tokens: int = 0  # the same of --kv-disk-size
    store_bytes: int = 0  # of the host's memory for each executor, for its part of the store of --kv-store
    encoder_bytes: int = 0  # of the vision encoder's weights, which are among the others, and of the encoder cache
    encoder_rows: int = 0  # image tokens that the cache has room for; 0: the model sees no images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        default="",
        metavar="NAME",
        help=f"one of {', '.join(GPUS)}, or its memory as 80GB or 79.1GiB; left out: each of these",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Print the plan. Raises ConfigError, as an executor would, if not even one request of full length fits."""
    found = plan(effective.config, namespace.gpu) if namespace.gpu else plans(effective.config)
    if namespace.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print(fitted(text(found) if isinstance(found, Plan) else comparison(found)))
    return ExitCode.ORDERLY


def plans(config: Config) -> list[Plan]:
    """The plans for the known GPUs on which the model fits, the smallest first. Raises ConfigError if it fits none."""
    found, errors = [], []
    for name in sorted(GPUS, key=lambda name: GPUS[name]):
        try:
            found.append(plan(config, name))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    return found


def plan(config: Config, gpu: str) -> Plan:
    """The memory of the model of `config` on a GPU.

    Raises ModelError for its folder and that of a draft model; ConfigError for an unknown GPU or too little memory.
    """
    total = gpu_bytes(gpu)
    path = folder.resolve(config.model.model, config.model.revision, folder.CONFIG)
    spec = with_kv_cache(folder.served_spec(path, config.model), config.model.kv_cache_dtype)
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    length = folder.model_length(spec, config.model)
    tokens = config.model.max_num_batched_tokens or max(STEP_TOKENS, config.model.max_num_seqs)
    tokens = encoder_tokens(spec, tokens, length)
    drafts = read_speculative(config.scheduler.speculative_config).num_speculative_tokens
    invariant = config.model.batch_invariant
    step = StepShape(tokens, config.model.max_num_seqs, length, ITEM_BYTES[dtype], invariant, drafts)
    ranks, stages = config.model.tensor_parallel_size, config.model.pipeline_parallel_size
    check_ranks(spec, ranks)
    draft, quantized = planned_draft(config, spec, path), quantization_facts(spec)
    spec = with_kv_groups(spec, length, config.model.block_size, drafting=draft is not None)
    shares = [stage_share(config, spec, draft, stage, step, total) for stage in range(stages)]
    share, parameters = min(shares, key=lambda share: share.blocks), weights(spec)
    parameters += 0 if spec.vision is None else tower_weights(spec.vision)
    shape, blocks = share.shape, share.blocks
    return Plan(
        model=folder.served_names(Path(path), config.model)[0],
        dtype=dtype,
        gpu=gpu,
        gpus=ranks * stages,
        gpu_bytes=total,
        usable_bytes=int(total * config.executor.gpu_memory_utilization),
        parameters=parameters,
        active_parameters=parameters - idle_weights(spec),
        quantization="" if quantized is None else quantized.text,
        weight_bytes=share.weight_bytes,
        step_bytes=share.step_bytes,
        other_bytes=share.other_bytes,
        kv_bytes_per_token=shape.block_bytes * shape.layout.groups // shape.block_size,
        held_bytes_per_token=shape.block_bytes * shape.layout.steady(length) // length,
        kv_cache_dtype=kv_label(spec) or dtype,
        block_size=shape.block_size,
        blocks=blocks,
        kv_groups=kv_groups_text(spec),
        cache_tokens=blocks // shape.layout.groups * shape.block_size,
        max_model_len=length,
        max_num_seqs=shape.max_num_seqs,
        concurrency=tuple(concurrency(own, blocks, shape, tokens) for own in lengths(length)),
        snapshot_bytes=share.snapshot_bytes,
        snapshots=share.snapshots,
        adapter_bytes=share.adapter_bytes,
        host_tokens=host_tokens(config, shape),
        disk_tokens=disk_tokens(config, shape),
        store_bytes=store_bytes(config.executor.kv_store),
        kept_bytes=share.weight_bytes if config.executor.keep_weights else 0,
        encoder_bytes=share.encoder_bytes,
        encoder_rows=0 if spec.vision is None else encoder_rows(spec.vision, config.model.mm_encoder_cache_tokens),
    )


class Share(msgspec.Struct, frozen=True):
    """The part of the model on each GPU of one stage. Bytes."""

    shape: CacheShape
    blocks: int
    weight_bytes: int
    step_bytes: int
    other_bytes: int
    snapshot_bytes: int
    snapshots: int
    adapter_bytes: int
    encoder_bytes: int


def planned_draft(config: Config, spec: ModelSpec, path: Path) -> DraftSpec | None:
    """The draft model of --speculative-config, by its config.json."""
    asked = read_speculative(config.scheduler.speculative_config)
    if asked.method not in WITH_MODEL:
        return None
    draft = read_draft(asked.method, folder.draft_folder(asked, path, folder.CONFIG), spec, None)
    return with_draft_cache(draft, config.model.kv_cache_dtype)


def stage_share(
    config: Config, spec: ModelSpec, draft: DraftSpec | None, stage: int, step: StepShape, total: int
) -> Share:
    """Raises ConfigError if it does not fit."""
    model, stages = config.model, config.model.pipeline_parallel_size
    ranks, ends = model.tensor_parallel_size, stage == stages - 1
    part = part_spec(stage_spec(spec, stages, stage, draft, ranks), ranks)
    drafting = draft if ends else None
    sizes = model.block_size, step.item_bytes
    beside = 0 if drafting is None else drafting_bytes(drafting.layers, *sizes, states=drafting.head is not None)
    shape = CacheShape(
        block_bytes=block_bytes(part, *sizes) + beside,
        layout=layout_of(spec, model.block_size, step.tokens, stages),
        max_model_len=step.max_model_len,
        max_num_seqs=model.max_num_seqs,
        length_given=bool(model.max_model_len),
    )
    head = drafting is not None and drafting.head is not None
    held = held_bytes(part, step.item_bytes, begins=stage == 0, ends=ends, head=head)
    other = taken_bytes(part, step) - weight_bytes(part, step.item_bytes)
    needed = step_bytes(msgspec.structs.replace(part, vocab_size=spec.vocab_size), step)  # each GPU has all logits
    if drafting is not None:
        held += drafting.weight_bytes(step.item_bytes)
        more = dataclasses.replace(step, max_model_len=0, invariant=False)  # over the same tables, in turn
        needed += step_bytes(drafting.layers, more)
    place = place_bytes(
        part, model.max_lora_rank, step.item_bytes, ends=ends, experts=model.lora_experts,
        parallel=ranks if model.expert_parallel else 1,
    )  # fmt: skip
    adapters = model.max_loras * place if model.enable_lora else 0
    encoder = 0
    if part.vision is not None and stage == 0:
        images = vision_bytes(part.vision, model.mm_encoder_cache_tokens, step.item_bytes)
        encoder = images.weights + images.cache
        graphs = 0 if config.executor.enforce_eager else images.graphs
        held, needed, other = held + images.weights, needed + images.activations + graphs, other + images.cache
    other += adapters + (staging_bytes(shape.block_bytes) if config.executor.kv_host_memory else 0)
    each, places = snapshot_bytes(part, step.item_bytes), 0
    if each:
        limit = config.executor.kv_cache_memory or int(total * config.executor.gpu_memory_utilization) - held - needed
        places = state_places(config.executor.state_snapshots, each, limit - other, step.max_num_seqs)
    blocks = planned_blocks(config, shape, total, held, other + places * each, needed, step.tokens)
    return Share(shape, blocks, held, needed, other, each, places, adapters, encoder)


def gpu_bytes(name: str) -> int:
    """Memory of a GPU by its name, or as given. Raises ConfigError."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if found := SIZE.fullmatch(name):
        return int(float(found[1]) * (GIB if found[2].lower() == "gib" else 10**9))
    raise ConfigError("--gpu", name, f"it must be one of {', '.join(GPUS)}, or a size such as 80GB or 79.1GiB")


def planned_blocks(config: Config, shape: CacheShape, total: int, held: int, other: int, peak: int, tokens: int) -> int:
    """KV blocks as an executor counts them. Raises ConfigError with the numbers if the weights, or a request of full
    length, do not fit."""
    taken = held + other
    given, utilization = config.executor.kv_cache_memory, config.executor.gpu_memory_utilization
    if taken + peak + given > int(total * utilization if not given else total):
        raise ConfigError(
            "--gpu-memory-utilization" if not given else "--kv-cache-memory",
            given or utilization,
            f"of {gib(total)} GiB weights take {gib(held)} GiB, a step of {tokens} "
            f"tokens{', LoRA adapters' if config.model.enable_lora else ''} and what CUDA needs {gib(peak + other)} GiB"
            + (f", the cache {gib(given)} GiB" if given else ""),
        )
    if not shape.block_bytes:
        return 0
    if given:
        return check_blocks(shape, given_blocks(shape, given), "--kv-cache-memory", given)
    blocks = gpu_blocks(shape, total, utilization, taken, peak)
    return check_blocks(shape, blocks, "--gpu-memory-utilization", utilization)


def host_tokens(config: Config, shape: CacheShape) -> int:
    """Tokens that the host's memory for KV blocks has room for. Raises ConfigError where that is not one block."""
    given = config.executor.kv_host_memory
    return (
        host_places("--kv-host-memory", given, shape.block_bytes, "a KV block")
        // shape.layout.groups
        * shape.block_size
    )


def disk_tokens(config: Config, shape: CacheShape) -> int:
    """The same of the disk."""
    given = config.executor.kv_disk_size
    if not given or not shape.block_bytes:
        return 0
    if not (places := places_in(given, shape.block_bytes)):
        raise ConfigError("--kv-disk-size", given, too_small(shape.block_bytes))
    return places // shape.layout.groups * shape.block_size


def lengths(longest: int) -> list[int]:
    """Powers of two from SHORTEST up to the longest, which is always included."""
    found = []
    tokens = SHORTEST
    while tokens < longest:
        found.append(tokens)
        tokens *= 2
    return [*found, longest]


def concurrency(tokens: int, blocks: int, shape: CacheShape, step: int) -> Concurrency:
    """step: the token budget of one, which holds prompts of an encoder as a whole."""
    if not shape.block_bytes:
        fit = step // tokens
        return Concurrency(tokens, min(fit, shape.max_num_seqs), "step" if fit < shape.max_num_seqs else "slots")
    fit = blocks // shape.layout.steady(tokens)
    return Concurrency(tokens, min(fit, shape.max_num_seqs), "blocks" if fit < shape.max_num_seqs else "slots")


def gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def comparison(found: list[Plan]) -> str:
    """The plans as a table with a row for each GPU."""
    first = found[0]
    lines = [
        f"{first.model} in {first.dtype}: {first.parameters:,} parameters, {first.kv_bytes_per_token:,} bytes of keys "
        "and values per token" + (f" on each of {first.gpus} GPUs" if first.gpus > 1 else ""),
        f"  {'GPU':<10} {'GiB':>6}   tokens in the cache   requests of {first.max_model_len:,} tokens at once",
    ]
    for one in found:
        at_once = one.concurrency[-1].requests
        lines.append(f"  {one.gpu:<10} {one.gpu_bytes / GIB:>6.1f}   {one.cache_tokens:>19,}   {at_once:>7,}")
    too_small = sorted(set(GPUS) - {one.gpu for one in found})
    lines += [f"  too small: {', '.join(too_small)}"] if too_small else []
    return "\n".join([*lines, "--gpu NAME tells how its memory is used."])


def text(found: Plan) -> str:
    """The plan as text."""
    active = "" if found.active_parameters == found.parameters else f", {found.active_parameters:,} for each token"
    free = found.usable_bytes - found.weight_bytes - found.step_bytes - found.other_bytes
    reckoned = found.other_bytes - found.adapter_bytes
    images = f"{gib(found.encoder_bytes):>8} GiB, the vision encoder and {found.encoder_rows:,} rows of embeddings"
    states = f"{found.snapshots:>8,} snapshots of recurrent states, {found.snapshot_bytes / MIB:,.1f} MiB each"
    lines = [
        f"{found.model} in {found.dtype} on {found.gpu}" + (f", each of {found.gpus}" if found.gpus > 1 else ""),
        f"  GPU memory          {gib(found.gpu_bytes):>8} GiB, of which Penstock may use {gib(found.usable_bytes)}",
        f"  weights             {gib(found.weight_bytes):>8} GiB, {found.parameters:,} parameters{active}",
        *([f"  quantized           {found.quantization}"] if found.quantization else []),
        f"  largest step        {gib(found.step_bytes):>8} GiB, reckoned; the executor measures it",
        f"  CUDA and tables     {gib(reckoned):>8} GiB, reckoned",
        *([f"  LoRA adapters       {gib(found.adapter_bytes):>8} GiB"] if found.adapter_bytes else []),
        *([f"  images              {images}"] if found.encoder_bytes else []),
        f"  left for the cache  {gib(max(0, free)):>8} GiB",
        f"  keys and values     {found.kv_bytes_per_token:>8,} bytes per token, in {found.kv_cache_dtype}",
        *([f"  states              {states}"] if found.snapshot_bytes else []),
        *([f"  KV groups           {found.kv_groups}"] if found.kv_groups else []),
        *(
            [f"  held at {found.max_model_len:,} tokens: {found.held_bytes_per_token:,} bytes per token"]
            if found.kv_groups
            else []
        ),
        f"  KV cache            {found.cache_tokens:>8,} tokens, {found.blocks:,} blocks of {found.block_size}",
        *([f"  in host memory      {found.host_tokens:>8,} tokens"] if found.host_tokens else []),
        *([f"  on disk             {found.disk_tokens:>8,} tokens"] if found.disk_tokens else []),
        *([f"  shared store        {gib(found.store_bytes):>8} GiB of host memory"] if found.store_bytes else []),
        *([f"  kept while asleep   {gib(found.kept_bytes):>8} GiB of host memory"] if found.kept_bytes else []),
        "",
        "  tokens of a request   at once",
    ]
    for row in found.concurrency:
        why = " (--max-num-seqs)" if row.limit == "slots" else ""
        lines.append(f"  {row.tokens:>19,}   {row.requests:>7,}{why}")
    return "\n".join(lines)
