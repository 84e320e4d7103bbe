"""From a configuration to a runner with weights and a KV cache, with the progress reported to the supervisor."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from penstock.engine_core import folder
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.cuda_graphs import GraphSizes, absorbed_pairs, graph_sizes
from penstock.engine_core.execution.draft_model import Draft, draft_block_bytes
from penstock.engine_core.execution.dummy_runs import WARMUP_TOKENS, encoder_steps, image_steps, warmup_steps
from penstock.engine_core.execution.encoder import Encoder
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.warmup import compile_steps, used_memory
from penstock.engine_core.loading.live import LiveWeights
from penstock.engine_core.models import registry
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.kv_cache import check_kv_cache, kv_label, with_draft_cache, with_kv_cache
from penstock.engine_core.models.kv_groups import layout_of, with_kv_groups
from penstock.engine_core.models.memory_estimate import (
    CacheShape,
    block_bytes,
    encoder_rows,
    encoder_tokens,
    host_places,
    idle_weights,
    quantization_facts,
    snapshot_bytes,
    weights,
)
from penstock.engine_core.models.quantized_matrix import multiplies_float8
from penstock.engine_core.models.sharding import check_ranks, part_spec, rank_spec, stage_layers
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.tensors import unread_tensors
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import read_names
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.triton_names import set_fp_fusion
from penstock.protocol import groups
from penstock.protocol.config import Config, wrong_output
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.served_models import several
from penstock.protocol.speculation import WITH_MODEL, read_speculative
from penstock.protocol.step_columns import chunk_positions
from penstock.protocol.steps import ExecutorReady
from penstock.services.executor import cpu_trial
from penstock.services.executor.cache_size import StepMemory, count_blocks
from penstock.services.executor.device import NEEDS_GPU, available_memory, gpu_number
from penstock.services.executor.kept_weights import KeptWeights
from penstock.services.executor.kernel_compilers import compilers
from penstock.services.executor.kv_disk import Served, attach_disk, files_digest
from penstock.services.executor.kv_store import attach_store
from penstock.services.executor.loading import (
    Loading,
    build_draft,
    check_agreed,
    check_output,
    find_draft,
    folders_of,
    key_of,
    verification,
)
from penstock.services.executor.prefill_memory import reach_hosts
from penstock.services.executor.process_groups import begin, with_exchange
from penstock.services.executor.product_tuning import log_chip, take_measured, tuned
from penstock.services.executor.rendezvous import Generation
from penstock.services.executor.sleep import FIRST_LIFE, EarlierLife
from penstock.services.supervisor import logs, process
from penstock.services.supervisor.banner import executor_facts
from penstock.services.supervisor.process import StartupPhases

log = logging.getLogger(__name__)

GPU_STEP_TOKENS = 8192
CPU_STEP_TOKENS = 512


@dataclass(frozen=True)
class Engine:
    """A runner that is ready for its first plan, and its description for the scheduler."""

    runner: Runner
    ready: ExecutorReady
    weights: LiveWeights
    loaded: Loading
    warm: tuple[tuple[int, float], ...] = ()  # positions and seconds of each warm-up step
    copies: BlockCopier | None = None  # None: no KV blocks are kept in the host's memory
    life: EarlierLife = FIRST_LIFE  # what the image after this one is told
    facts: tuple[str, ...] = ()  # for the banner


def start(
    config: Config, index: int, generation: Generation | None = None, phases: StartupPhases | None = None,
    earlier: EarlierLife = FIRST_LIFE, kept: KeptWeights | None = None,
) -> Engine:  # fmt: skip
    """Load the model and make its runner, in a group together with its other members. What an `earlier` image of this
    process has found out is not found out again, and weights that it has `kept` are not read.

    Raises ModelError for a wrong folder, ConfigError for a device that is not there or a cache that is too small.
    """
    began = time.monotonic()
    phases = phases if phases is not None else StartupPhases()
    phases.begin("reading the model's configuration")  # while the driver makes a context
    path = folder.resolve(config.model.model, config.model.revision)
    spec, length, drafting = read_model(config, path)
    phases.begin("opening the device")
    device, others = take_shared(config, index)
    log_chip(device, invariant=config.model.batch_invariant)
    if spec.vision is not None:
        put_steps_first(device)
    check_kv_cache(spec, config.model.kv_cache_dtype, chip_of(device).name, writes=multiplies_float8(chip_of(device)))
    if device.type == "cpu":
        phases.begin("trying the processor")
    dtype = choose_dtype(config, spec, device)
    group = ALONE
    if generation is not None:
        phases.begin("meeting the other executors")
        group = begin(config, groups.place(index, config.model), generation, device)
        check_agreed(config, drafting, group)
        dtype = torch.float32 if -group.all_min(-dtype.itemsize) > dtype.itemsize else dtype  # as all can
    key = key_of(config, index, spec, drafting, dtype, device)
    again = earlier.key == key
    folders = folders_of(config, path, drafting)
    files = files_digest(folders) if config.executor.kv_disk or config.executor.kv_store else b""
    with ExitStack() as held:
        # What an earlier image ran is compiled: forks would take longer than they save.
        with nullcontext() if again else compilers(device) as processes:
            checks = held.enter_context(verification(config, index, folders, earlier.verified))  # behind the forks
            group = with_exchange(group, spec.hidden, dtype, device)
            phases.begin("loading weights")
            model = registry.build(
                spec, dtype, device, length,
                group=group, invariant=config.model.batch_invariant, expert_parallel=config.model.expert_parallel,
                adapters=config.model.enable_lora, draft=drafting,
            )  # fmt: skip
            spec, whole = model.spec, spec  # of this stage's layers
            tower, draft = registry.build_tower(model), build_draft(config, drafting, model, length)
            loading = Loading(config, model, tower, draft, path, kept or KeptWeights(), key)
            draft = loading.load()
            options = runner_options(config, spec, model, length, device, dtype, group)
            options = replace(
                options, adapters=make_places(config.model, model, whole), encoder=make_encoder(config, tower)
            )
            if device.type == "cuda":
                phases.begin("compiling kernels")
            if not config.model.batch_invariant:
                take_measured(device)
            compile_steps(model, options, options.step_tokens, draft, processes, again=again)
            changed = config.executor.tune and not config.model.batch_invariant and tuned(device, processes, phases)
            if not group.all_min(0 if changed else 1):  # of any member: the steps are run by all together
                phases.begin("compiling kernels of measured products")
                compile_steps(model, options, options.step_tokens, draft, processes, again=again)
        memory = StepMemory(earlier.measured if again else None)
        runner, shape, copies = make_runner(config, index, model, spec, options, draft, phases, memory, others)
        if loading.restored:  # the files may be others since; an update's weights are those of none
            files = b"" if loading.path else bytes.fromhex(earlier.files)
        served = Served(spec, drafting, length, group, dtype, tuple(folders), files)
        if config.executor.kv_store:
            attach_store(config, copies, served)
        elif config.executor.kv_disk:
            attach_disk(config, index, copies, served)
        warm = warm_up(config, runner, spec, phases, again=again)
        phases.begin("checking the weights")
        verified = "" if checks is None else checks.finish()
        if not loading.path:  # what an update has brought may say something else
            check_output(config, runner, path, encoder=spec.encoder)
    parts = [part for part in (model, draft, tower) if part is not None]
    ready = describe(runner, spec, shape, draft, sum(part.weight_bytes for part in parts), began)
    ready = with_tiers(config, ready, copies)
    log_loaded(ready, options, shape, draft)
    log_notes(config, model, draft, path, device)
    stamp = "" if checks is None else checks.stamp
    life = EarlierLife(key, measured=memory.measured, verified=stamp, files=files.hex())
    facts = executor_facts(verified, 0 if options.adapters is None else options.adapters.memory.nbytes)
    return Engine(runner, ready, live_weights(config, model, tower, path), loading, warm, copies, life, facts)


def describe(
    runner: Runner, spec: ModelSpec, shape: CacheShape, draft: Draft | None, weight_bytes: int, began: float
) -> ExecutorReady:
    """What the scheduler is told of this executor, whose load `began` at these monotonic seconds."""
    options = runner.options
    return ExecutorReady(
        epoch=0,
        blocks=options.blocks,
        block_size=options.block_size,
        step_tokens=options.step_tokens,
        mask_slots=runner.mask_slots,
        draft_tokens=0 if draft is None else draft.tokens,
        windows=spec.kv_windows,
        device=chip_of(options.device).name,
        dtype=str(options.dtype).removeprefix("torch."),
        kv_cache_dtype=kv_label(spec),
        weight_bytes=weight_bytes,
        cache_bytes=(options.blocks + 1) * shape.block_bytes,
        load_seconds=time.monotonic() - began,
        state_bytes=snapshot_bytes(rank_spec(spec, options.group.size), options.dtype.itemsize),
        state_places=options.state_places,
        state_host_places=options.state_host_places,
        adapter_places=0 if options.adapters is None else options.adapters.count,
        encoder_rows=0 if options.encoder is None else len(options.encoder.cache),
    )


def with_tiers(config: Config, ready: ExecutorReady, copies: BlockCopier | None) -> ExecutorReady:
    """The same with the room for blocks that is not on the device."""
    if copies is None:
        return ready
    storage, options = copies.storage, config.executor
    places, size = (0, 0) if storage is None else (storage.store.total, options.kv_disk_size)
    return msgspec.structs.replace(
        ready, host_blocks=copies.host.shape[0], host_bytes=copies.host.nbytes, address=copies.address,
        kv_store=bool(options.kv_store), disk_blocks=places, disk_bytes=size,
    )  # fmt: skip


def live_weights(config: Config, model: Decoder, tower: Tower | None, path: Path) -> LiveWeights:
    """The weights that were read from a folder, to be updated in place."""
    dummy = config.model.load_format == "dummy"
    return LiveWeights(model, tower, path, partial(folder.served_spec, config=config.model), dummy=dummy)


def make_places(config: ModelConfig, model: Decoder, whole: ModelSpec) -> AdapterPlaces | None:
    """Room for adapters beside this executor's share of the model; None where none are served."""
    if not config.enable_lora:
        return None
    places = AdapterPlaces(model, whole, config.max_loras, config.max_lora_rank, experts=config.lora_experts)
    logs.info(log, "adapter_places", count=places.count, rank=places.rank, bytes=places.memory.nbytes)
    return places


def make_encoder(config: Config, tower: Tower | None) -> Encoder | None:
    """The vision encoder of this executor, with its cache; None: it has none."""
    if tower is None:
        return None
    rows = encoder_rows(tower.spec, config.model.mm_encoder_cache_tokens)
    encoder = Encoder(tower, rows, eager=config.executor.enforce_eager)
    logs.info(
        log, "encoder", rows=len(encoder.cache), cache_bytes=encoder.cache.nbytes, weight_bytes=tower.weight_bytes
    )
    return encoder


def log_notes(config: Config, model: Decoder, draft: Draft | None, path: Path, device: torch.device) -> None:
    """What of the checkpoint is not read, or not served as it says."""
    spec = model.spec
    if (quantized := quantization_facts(spec)) is not None:
        logs.info(log, "quantized", **msgspec.structs.asdict(quantized))
    own = draft.model.destinations().keys() if draft is not None and isinstance(draft.model, EagleHead) else ()
    if left := unread_tensors(spec, read_names(path).difference(own)):
        logs.info(log, "left_unread", tensors=left, reason="images, audio, draft layers, heads for training")
    for reason in quantization_notes(spec, chip_of(device)):
        logs.info(log, "served_otherwise", reason=reason)
    if spec.attention.kv_fp8 and (missing := model.missing_kv_scales):
        logs.info(log, "kv_scales", missing=missing, instead="1.0", reason="the checkpoint has no such tensors")
    for reason in wrong_output(config):
        logs.warning(log, "output_is_wrong", reason=reason)


def quantization_notes(spec: ModelSpec, chip: Chip) -> tuple[str, ...]:
    """What is computed otherwise than the checkpoint says."""
    found = spec.quantization
    if found is None:
        return ()
    rounded = any(form.kind == "float8" and form.activations != "none" for form in found.formats)
    if rounded and not multiplies_float8(chip):
        return (*found.notes, f"{chip.name} has no products of 8-bit floats: weights alone are of them")
    return found.notes


def runner_options(
    config: Config, spec: ModelSpec, model: Decoder, length: int, device: torch.device, dtype: torch.dtype, group: Group
) -> RunnerOptions:
    """Of a runner whose cache is not made yet."""
    asked = read_speculative(config.scheduler.speculative_config)
    return RunnerOptions(
        device=device,
        dtype=dtype,
        blocks=0,
        block_size=config.model.block_size,
        max_model_len=length,
        max_num_seqs=config.model.max_num_seqs,
        graphs=choose_graphs(config, spec, model, length, device),
        group=group,
        step_tokens=encoder_tokens(spec, step_tokens(config.model, device), length),
        synthetic_acceptance=asked.synthetic_acceptance,
        row_drafts=asked.num_speculative_tokens,
    )


def read_model(config: Config, path: Path) -> tuple[ModelSpec, int, DraftSpec | None]:
    """The model in a folder, the length of its longest sequence, and its draft model. Raises ModelError, and
    ConfigError for a model that does not go with these options or cannot be split among so many executors."""
    asked = config.model.kv_cache_dtype
    spec = with_kv_cache(folder.served_spec(path, config.model), asked)
    length = folder.model_length(spec, config.model)
    drafting = with_draft_cache(find_draft(config, path, spec, length), asked)
    spec = with_kv_groups(spec, length, config.model.block_size, drafting=drafting is not None)
    ranks = config.model.tensor_parallel_size
    stage_layers(spec, config.model.pipeline_parallel_size, drafting, ranks)
    check_ranks(spec, ranks, expert_parallel=config.model.expert_parallel)
    return spec, length, drafting


def put_steps_first(device: torch.device) -> None:
    """Have this thread's work on a GPU go before that of streams of the lowest priority, which the default stream has
    as well: before the vision encoder's."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def take_device(config: Config, index: int) -> torch.device:
    """The device of executor number `index`, made this process's current one. Raises ConfigError."""
    device = choose_device(config.executor.device, gpu_number(config.executor, index))
    if config.model.batch_invariant and device.type == "cpu":
        raise ConfigError("--batch-invariant", True, NEEDS_GPU)
    if device.type != "cpu":
        if not set_fp_fusion():
            logs.warning(log, "fp_fusion_unset", instead="Triton's default decides on fusing products with sums")
        torch.cuda.set_device(device)
    return device


def take_shared(config: Config, index: int) -> tuple[torch.device, int]:
    """The same, and the bytes that other models have of it before this one is loaded."""
    device = take_device(config, index)
    return device, used_memory(device)[0] if several(config) and device.type != "cpu" else 0


def log_loaded(ready: ExecutorReady, options: RunnerOptions, shape: CacheShape, draft: Draft | None) -> None:
    """Log what the memory is used for."""
    logs.info(
        log,
        "loaded",
        device=ready.device,
        dtype=ready.dtype,
        kv_cache_dtype=ready.kv_cache_dtype or ready.dtype,
        weight_bytes=ready.weight_bytes,
        blocks=ready.blocks,
        tokens=ready.blocks // len(ready.windows) * options.block_size,
        kv_windows=ready.windows,
        full_length_requests=round(ready.blocks / shape.request_blocks, 2),
        cache_bytes=ready.cache_bytes,
        seconds=round(ready.load_seconds, 2),
        **({} if draft is None else draft_figures(draft, options, shape)),
    )


def draft_figures(draft: Draft, options: RunnerOptions, shape: CacheShape) -> dict[str, float]:
    """Log fields of a draft model: its weights, and its share of the cache."""
    own = draft_block_bytes(draft, options.block_size, options.dtype.itemsize)
    return {"draft_weight_bytes": draft.weight_bytes, "draft_cache_share": round(own / shape.block_bytes, 4)}


def make_runner(
    config: Config, index: int, model: Decoder, spec: ModelSpec, options: RunnerOptions, draft: Draft | None,
    phases: StartupPhases, memory: StepMemory, others: int = 0,
) -> tuple[Runner, CacheShape, BlockCopier | None]:  # fmt: skip
    """A runner whose cache is as large as the options or the memory allow, the cache's shape, and its blocks in the
    host's memory, if there are any. `others`: bytes of the device that other models had before this one. Raises
    ConfigError."""
    phases.begin("making the KV cache")
    sizes = options.block_size, options.dtype.itemsize
    shape = CacheShape(
        block_bytes=block_bytes(rank_spec(spec, options.group.size), *sizes)
        + (0 if draft is None else draft_block_bytes(draft, *sizes)),
        layout=layout_of(spec, options.block_size, options.step_tokens, config.model.pipeline_parallel_size),
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        length_given=bool(config.model.max_model_len),
    )
    tokens = step_tokens(config.model, options.device)
    blocks, places = count_blocks(config, shape, model, spec, options, draft, tokens, memory, others)
    each = snapshot_bytes(rank_spec(spec, options.group.size), sizes[1])
    state_memory = config.executor.state_host_memory
    host = host_places("--state-host-memory", state_memory, each, "a snapshot", available_memory())
    options = replace(options, blocks=blocks, state_places=places, state_host_places=host)
    try:
        runner = Runner(model, spec, options, draft)
    except MemoryError as error:
        cache = "--kv-cache-memory", config.executor.kv_cache_memory
        option, given = ("--state-host-memory", state_memory) if host else cache
        raise ConfigError(option, given, f"{error}; give it less memory") from None
    return runner, shape, make_copier(config, index, runner, shape)


def make_copier(config: Config, index: int, runner: Runner, shape: CacheShape) -> BlockCopier | None:
    """The memory for KV blocks on the host, with what copies them; None: there is none. Raises ConfigError."""
    given = config.executor.kv_host_memory
    blocks = host_places("--kv-host-memory", given, shape.block_bytes, "a KV block", available_memory())
    if not blocks:
        return None
    options = runner.options
    label = f"{chip_of(options.device).name} {options.dtype} {config.model.kv_cache_dtype}"
    role = groups.replica_role(groups.place(index, config.model).replica, config.model)
    shared = role is groups.ReplicaRole.PREFILL
    try:
        found = BlockCopier(runner.block_memory(), blocks, options.device, label=label, shared=shared)
    except MemoryError as error:
        raise ConfigError("--kv-host-memory", given, str(error)) from None
    logs.info(log, "kv_host_memory", blocks=blocks, bytes=found.host.nbytes)
    reach_hosts(config, index, found)
    return found


def warm_up(
    config: Config, runner: Runner, spec: ModelSpec, phases: StartupPhases, *, again: bool
) -> tuple[tuple[int, float], ...]:
    """Run every kind of step once and capture the graphs, or as few as there must be before the first request of a
    server that loads `again`. Returns the steps' positions and seconds."""
    phases.begin("warming up")
    took = []
    if spec.encoder:
        plans = encoder_steps(runner.sizes, runner.options.step_tokens, classifies=spec.classifier is not None)
    else:
        device = runner.options.device  # a GPU compiles a variant of attention for long chunks
        longest = WARMUP_TOKENS if device.type == "cpu" else step_tokens(config.model, device)
        images = () if spec.vision is None else image_steps(runner.sizes, spec.vision, longest)
        plans = [*images, *warmup_steps(runner.sizes, longest)]
    for plan in runner.drafted(plans):
        began = time.perf_counter()
        runner.collect(runner.launch(plan))
        took.append((chunk_positions(plan.chunks), time.perf_counter() - began))
    if runner.options.graphs is not None:
        phases.begin("capturing graphs")
    runner.prepare(largest=again)
    runner.reset()
    return tuple(took)


def choose_device(option: str, place: int) -> torch.device:
    """The device of a host's executor number `place`: the visible GPU of this number, or the only one where a
    supervisor shows each executor its own.

    Raises ConfigError when a GPU is asked for and there is none for it, or when only some executors would have one.
    """
    count = torch.cuda.device_count() if option != "cpu" else 0
    if count == 0 and option != "cuda":
        return torch.device("cpu")
    if place < count:
        return torch.device("cuda", place)
    if count == 1 and process.PARENT not in os.environ:
        return torch.device("cuda", 0)
    found = f"{count} GPUs that torch {torch.__version__} can use"
    why = f"this host's executor {place}, counted from --first-executor, finds {found}"
    raise ConfigError("--device", option, why)


def step_tokens(model: ModelConfig, device: torch.device) -> int:
    """Token budget of one step. On a CPU a long step would stall every stream for seconds."""
    if model.max_num_batched_tokens:
        return model.max_num_batched_tokens
    return max(CPU_STEP_TOKENS if device.type == "cpu" else GPU_STEP_TOKENS, model.max_num_seqs)


def choose_dtype(config: Config, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's type on a GPU, and what a trial says on a CPU, whose threads are set here."""
    if device.type == "cpu":
        return cpu_trial.choose(config, spec)
    kind = getattr(torch, spec.dtype if config.model.dtype == "auto" else config.model.dtype)
    assert isinstance(kind, torch.dtype)
    return kind


def choose_graphs(
    config: Config, spec: ModelSpec, model: Decoder, length: int, device: torch.device
) -> GraphSizes | None:
    """Which steps are graphs: none on a CPU, none of an encoder and none with --enforce-eager."""
    if device.type == "cpu" or config.executor.enforce_eager or spec.encoder:
        return None
    size = model.placement.size
    used = weights(part_spec(model.spec, size)) - idle_weights(model.spec) // size  # by a token
    used = model.placement.group.all_min(used)  # all have the same graphs
    asked = read_speculative(config.scheduler.speculative_config)
    drafts = asked.num_speculative_tokens if asked.method in WITH_MODEL else 0
    seqs, tokens = config.model.max_num_seqs, step_tokens(config.model, device)
    adapters = config.model.enable_lora
    pairs = 0 if config.model.batch_invariant else absorbed_pairs(spec, size)
    return graph_sizes(
        spec.layers, used, seqs, tokens, length, drafts, recurrent=len(spec.recurrences), adapters=adapters,
        long_pairs=pairs, images=spec.vision is not None,
    )  # fmt: skip
