"""Checks before the first process starts, so that a mistake is one line and not a crash loop; and which processes run
on this host, where they listen, and where they connect to those of other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.engine_core import folder
from penstock.engine_core.distributed import nixl
from penstock.engine_core.models.adapter_folder import place_bytes
from penstock.engine_core.models.draft_spec import DraftSpec, check_mtp, read_draft
from penstock.engine_core.models.memory_estimate import ITEM_BYTES
from penstock.engine_core.models.sharding import check_ranks, held_bytes, part_spec, stage_layers, stage_spec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.engine_core.models.weight_files import stored_names
from penstock.engine_core.text.template import find_sources, read_template
from penstock.engine_core.tokenizer.codec import check_tokenizer
from penstock.engine_core.tokenizer.vocabulary import read_special
from penstock.protocol import groups
from penstock.protocol.config import ApiConfig, Config, adjusted
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.kv_store import store_bytes
from penstock.protocol.links import HostAddress, Role, ports_of, read_address
from penstock.protocol.parts import ORDER, Parts, count, parts_of
from penstock.protocol.served_models import engines, names, several, with_options
from penstock.protocol.speculation import HEADS, WITH_MODEL, read_speculative
from penstock.services.client.model_info import read_model_info
from penstock.services.executor.device import NEEDS_GPU, Gpu, available_memory, find_gpus, foreign_accelerator
from penstock.services.http.security import OPERATOR, Keys
from penstock.services.http.server import admin_options, check_admin_reach, tls
from penstock.services.links.curve import read_keys
from penstock.services.supervisor import address
from penstock.services.supervisor.unused_options import Facts, warn_of_unused_options

MIN_CAPABILITY = 80  # bfloat16 and asynchronous copies begin there, and so does Triton


def checked(config: Config, parts: Parts) -> Config:
    """`config` resolved, once everything that processes of this host need is found in order: addresses, model, memory.

    Raises AddressError, ConfigError and ModelError. Of weights only the headers are read.
    """
    executors = len(parts.get(Role.EXECUTOR, ()))
    with ThreadPoolExecutor(1, "driver") as driver:  # which takes a quarter of a second, outside of Python
        wanted = any(each.executor.device != "cpu" for each in engines(config))
        gpus = driver.submit(find_gpus) if executors and wanted else None
        if Role.API in parts:
            check_api(config.api)
        if not several(config):
            check_topology(config, parts)
            one = checked_engine(config, parts, gpus)
            check_together(((one, parts),), gpus)
            return one
        found: dict[str, dict[str, object]] = {}
        loaded: list[tuple[Config, Parts]] = []
        for name, each in zip(names(config), engines(config), strict=True):
            try:
                engine = checked_engine(each, parts_of(each), gpus)
            except ConfigError as error:
                raise ConfigError(f"models.{name}: {error.option}", error.value, error.allowed) from None
            except ModelError as error:
                raise ModelError(f"models.{name}: {error}") from None
            loaded.append((engine, parts_of(each)))
            found[name] = {"model": engine.model.model, "served_model_name": engine.model.served_model_name}
        check_together(loaded, gpus)
    return with_options(config, found)


def check_together(loaded: Sequence[tuple[Config, Parts]], gpus: Future[tuple[Gpu, ...]] | None) -> None:
    """What concerns all models: memory of the host, and options that none of them has a use for."""
    check_kept(loaded, gpus)
    warn_of_unused_options([
        Facts(config, read_spec(Path(config.model.model), config.model.quantization), has_gpus(config, parts, gpus))
        for config, parts in loaded
    ])  # fmt: skip


def has_gpus(config: Config, parts: Parts, gpus: Future[tuple[Gpu, ...]] | None) -> bool | None:
    """Whether a model's executors on this host have GPUs; None: there are no executors here."""
    if not parts.get(Role.EXECUTOR, ()):
        return None
    return gpus is not None and config.executor.device != "cpu" and bool(gpus.result())


def checked_engine(config: Config, parts: Parts, gpus: Future[tuple[Gpu, ...]] | None) -> Config:
    """The same for one model: its folder is read and its memory checked against that of its GPUs."""
    config = resolved(config)
    model = Path(config.model.model)
    spec = read_spec(model, config.model.quantization)
    check_files(config, parts, model, spec)
    if executors := len(parts.get(Role.EXECUTOR, ())):
        check_folder(config.executor.kv_disk)
        check_nixl(config)
        check_store(config.executor.kv_store)
        shown = () if gpus is None or config.executor.device == "cpu" else gpus.result()
        check_device(config, spec, executors, shown)
    return config


def check_nixl(config: Config) -> None:
    """Raise ConfigError where KV blocks go between hosts and this one's executors could not take part."""
    model = config.model
    if model.prefill_replicas and config.links.scheduler_address and not nixl.installed():
        raise ConfigError("--prefill-replicas", model.prefill_replicas, nixl.NEEDED.format(nixl.MISSING))


def resolved(config: Config) -> Config:
    """`config` with the model's local folder and its served names filled in.

    Raises ConfigError and ModelError for a model that no process could serve, and for a platform or an accelerator
    that is not supported.
    """
    check_platform(config.executor.device)
    model = folder.resolve(config.model.model, config.model.revision)
    names = folder.served_names(model, config.model)
    spec = read_spec(model, config.model.quantization)
    folder.model_length(spec, config.model)
    folder.check_prefill_replicas(spec, config.model)
    check_ranks(spec, config.model.tensor_parallel_size, expert_parallel=config.model.expert_parallel)
    if config.model.lora_experts and not spec.sparse:
        raise ConfigError("--lora-experts", True, "the model has no experts")
    return adjusted(config, model=str(model), served_model_name=",".join(names))


def check_platform(device: str) -> None:
    """Raise ConfigError for another system than Linux, and for a torch whose GPUs no kernel here serves."""
    if sys.platform != "linux":
        why = f"Penstock runs on Linux, and this is {sys.platform}; Metal and other systems' GPUs are not supported"
        raise ConfigError("--device", device, f"{why}: run it in a Linux container with --device cpu")
    if device != "cpu" and (found := foreign_accelerator()):
        why = f"the installed torch is built for {found}, which is not supported: Penstock serves NVIDIA GPUs and CPUs"
        raise ConfigError("--device", device, f"{why}; give --device cpu, or install a torch built for CUDA")


def check_files(config: Config, parts: Parts, model: Path, spec: ModelSpec) -> None:
    """Raise ModelError or ConfigError for files of the model or of a draft model that a process of this host could not
    read."""
    info = read_model_info(config)
    if info.adapters is not None:
        info.adapters.check()
    if Role.TOKENIZER in parts:
        names, _ = read_special(model)
        read_template(model, names, config.tokenizer.chat_template)
        check_tokenizer(model, spec.vocab_size)
    if Role.EXECUTOR not in parts:
        return
    real = config.model.load_format != "dummy"
    asked = read_speculative(config.scheduler.speculative_config)
    draft: DraftSpec | None = None
    if real:
        check_weights(model, spec)
    if asked.method in WITH_MODEL:
        path = folder.draft_folder(asked, model)
        draft = read_draft(asked.method, path, spec, stored_names(path) if real and asked.method in HEADS else None)
        if real and draft.head is None:
            check_weights(path, draft.layers)
        if real and draft.head is not None:
            check_mtp(path, draft.head)
    stage_layers(spec, config.model.pipeline_parallel_size, draft, config.model.tensor_parallel_size)


def check_folder(path: str) -> None:
    """Make the folder of --kv-disk if it is missing. Raises ConfigError where this user cannot use it."""
    if not path:
        return
    try:
        Path(path).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--kv-disk", path, f"there is no such folder, and none can be made: {error.strerror}"
        ) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError("--kv-disk", path, "this user may not write there")


def check_store(url: str) -> None:
    """Raise ConfigError where the library of --kv-store cannot be imported. Another process tries: it has threads."""
    if not url:
        return
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
        why = (
            f"Mooncake's client cannot be imported ({reason}): pip install 'penstock[mooncake]', and the system's "
            "libibverbs (Debian: apt install libibverbs1)"
        )
        raise ConfigError("--kv-store", url, why)


def check_device(config: Config, spec: ModelSpec, executors: int, gpus: Sequence[Gpu]) -> None:
    """Raise ConfigError unless this host has a GPU for each of its executors, or may do without, and the weights and
    the places for adapters fit into memory. What else needs memory is measured once they are loaded."""
    option, model = config.executor.device, config.model
    if not gpus and option == "cuda":
        why = "the driver shows no GPU; give --device cpu, or see whether nvidia-smi finds one"
        raise ConfigError("--device", option, why)
    if not gpus and model.batch_invariant:
        raise ConfigError("--batch-invariant", True, NEEDS_GPU)
    first = config.executor.base_gpu_id
    if gpus and len(gpus) < first + executors:
        behind = f" from number {first} on" if first else ""
        why = f"this host's {executors} executors need a GPU each{behind}, and the driver shows {len(gpus)}"
        raise ConfigError("--device", option, f"{why}; lower --tensor-parallel-size, or give --device cpu")
    gpus = gpus[first : first + executors]
    for place, gpu in enumerate(gpus, first):
        if gpu.capability < MIN_CAPABILITY:
            found = f"GPU {place}, {gpu.name}, has compute capability {decimal(gpu.capability)}"
            why = f"{found}, and the kernels need {decimal(MIN_CAPABILITY)} (Ampere) or newer"
            raise ConfigError("--device", option, f"{why}; give --device cpu, or hide it with CUDA_VISIBLE_DEVICES")
    name = dtype_of(config, spec, on_gpu=bool(gpus))
    ranks, stages = model.tensor_parallel_size, model.pipeline_parallel_size
    shares = [part_spec(stage_spec(spec, stages, stage), ranks) for stage in range(stages)]
    need = rank_bytes(config, spec, on_gpu=bool(gpus))
    if gpus and need > (room := int(min(gpu.memory for gpu in gpus) * config.executor.gpu_memory_utilization)):
        share = f"{config.executor.gpu_memory_utilization} of a GPU's memory"
        why = f"the weights take {gib(need)} on each GPU in {name}, and {share} is {gib(room)}"
        raise ConfigError("--tensor-parallel-size", ranks, f"{why}; spread them over more GPUs")
    if not gpus and need * executors > (room := available_memory()):
        why = f"the weights take {gib(need * executors)} in {name}, and this machine has {gib(room)} of memory free"
        raise ConfigError("--dtype", model.dtype, f"{why}; take a smaller type or a smaller model")
    places = model.max_loras * max(
        place_bytes(
            share,
            model.max_lora_rank,
            ITEM_BYTES[name],
            ends=stage == stages - 1,
            experts=model.lora_experts,
            parallel=ranks if model.expert_parallel else 1,
        )
        for stage, share in enumerate(shares)
    )
    if model.enable_lora and need + places > (room := room if gpus else room // executors):
        what = f"places of rank {model.max_lora_rank}{', experts among them,' if model.lora_experts else ''}"
        why = f"{what} take {gib(places)} beside {gib(need)} of weights, of {gib(room)}"
        raise ConfigError("--max-loras", model.max_loras, f"{why}; lower it or --max-lora-rank")


def dtype_of(config: Config, spec: ModelSpec, *, on_gpu: bool) -> str:
    """Of weights, as far as it is known before a CPU has been tried."""
    asked = config.model.dtype
    return asked if asked != "auto" else spec.dtype if on_gpu else "float32"


def rank_bytes(config: Config, spec: ModelSpec, *, on_gpu: bool) -> int:
    """Memory of the weights of the executor that has the most."""
    item, stages = ITEM_BYTES[dtype_of(config, spec, on_gpu=on_gpu)], config.model.pipeline_parallel_size
    shares = [part_spec(stage_spec(spec, stages, stage), config.model.tensor_parallel_size) for stage in range(stages)]
    return max(
        held_bytes(share, item, begins=stage == 0, ends=stage == stages - 1, dequantized=not on_gpu)
        for stage, share in enumerate(shares)
    )


def check_kept(loaded: Sequence[tuple[Config, Parts]], gpus: Future[tuple[Gpu, ...]] | None) -> None:
    """Raise ConfigError unless this host's memory has room for the weights that models keep while they sleep, beside
    what it is to hold of KV blocks and states."""
    if not any(config.executor.keep_weights for config, _ in loaded):
        return
    kept = beside = 0
    for config, parts in loaded:
        count, options = len(parts.get(Role.EXECUTOR, ())), config.executor
        on_gpu = bool(has_gpus(config, parts, gpus))
        need = count * rank_bytes(config, read_spec(Path(config.model.model), config.model.quantization), on_gpu=on_gpu)
        kept += need if options.keep_weights else 0
        tiers = options.kv_host_memory + options.state_host_memory + store_bytes(options.kv_store)
        beside += count * tiers + (0 if on_gpu else need)
    if kept + beside > (room := available_memory()):
        other = f", beside {gib(beside)} that executors take of it" if beside else ""
        why = f"kept weights take {gib(kept)} of the host's memory{other}, and {gib(room)} are free"
        raise ConfigError("--keep-weights", True, f"{why}; leave it out, or give it to fewer models")


def decimal(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def check_api(options: ApiConfig) -> None:
    """Raise ConfigError or AddressError for an address, a certificate or a key file that no api process could use."""
    check_address(options)
    if options.metrics_port:
        with address.named("--metrics-port", options.metrics_port):
            address.check(options.host, options.metrics_port)
    if (admin := admin_options(options)) is not None:
        check_admin_reach(admin)
        with address.named("--admin-address", options.admin_address):
            check_address(admin)
        Keys(options, OPERATOR)
    if options.weights_dir and not Path(options.weights_dir).is_dir():
        raise ConfigError("--weights-dir", options.weights_dir, "it must be a directory")
    tls(options)
    Keys(options)


def check_address(options: ApiConfig) -> None:
    """Raise AddressError unless a process could listen there."""
    if options.uds:
        address.check_file(Path(options.uds))
    else:
        address.check(options.host, options.port)


def has_template(model: Path, given: str) -> bool:
    """Whether the model has a chat template, so that the server can answer chats."""
    return bool(given or find_sources(model)[0])


def check_topology(config: Config, parts: Parts) -> None:
    """Raise ConfigError or AddressError for a mistake that would end a process of this host at its start: unusable
    keys, an address that belongs to another host or process, a --first-executor that contradicts --parts."""
    first = config.executor.first_executor
    if first and first != min(parts.get(Role.EXECUTOR, (first,))):
        raise ConfigError("--first-executor", first, "executors that `penstock serve` starts are counted by --parts")
    links = config.links
    if links.scheduler_address or links.tokenizer_address or config.executor.rendezvous:
        read_keys(links.link_keys)
    for option, where in listening(config, parts):
        with address.named(option, str(where)):
            address.check(where.bare, where.port)


def listening(config: Config, parts: Parts) -> Iterator[tuple[str, HostAddress]]:
    """Every address at which processes of this host listen for other hosts, with its option."""
    links, model = config.links, config.model
    for role, given in ((Role.SCHEDULER, links.scheduler_address), (Role.TOKENIZER, links.tokenizer_address)):
        option, ports = f"--{role}-address", ports_of(role)
        for number in parts.get(role, ()) if given else ():
            for port in range(number * ports, (number + 1) * ports):
                yield option, read_address(option, given).after(port)
    if config.executor.rendezvous and groups.group_size(model) > 1:
        for replica in range(model.data_parallel_size):
            if groups.members(replica, model)[0] in parts.get(Role.EXECUTOR, ()):
                yield "--rendezvous", read_address("--rendezvous", config.executor.rendezvous).after(replica)


def elsewhere(config: Config, parts: Parts) -> dict[str, str]:
    """Parts of the server on other hosts and the addresses where they are found, as fields of a log line."""
    away = [role for role in ORDER if role not in parts or len(parts[role]) < count(role, config)]
    places = {
        "tokenizers": config.links.tokenizer_address,
        "schedulers": config.links.scheduler_address,
        "groups": config.executor.rendezvous,
    }
    return {"elsewhere": ",".join(away), **{name: where for name, where in places.items() if where}}


def executor_config(config: Config, parts: Parts, index: int) -> Config:
    """`config` for executor number `index`: `index - first_executor` is its position among the executors of this
    host."""
    place = tuple(parts[Role.EXECUTOR]).index(index)
    return adjusted(config, first_executor=index - place)
