"""The terminal output of `penstock serve`: progress while its processes start, and then where it listens."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.engine_core.kv.block_layout import BlockLayout, capacity_tokens
from penstock.engine_core.models.memory_estimate import quantization_facts
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.adapters import host_adapters, read_modules
from penstock.protocol.config import ApiConfig, Config, wrong_output
from penstock.protocol.control import EngineStatus
from penstock.protocol.media import LIMIT, image_limit
from penstock.protocol.option import words
from penstock.protocol.served_models import engines, names
from penstock.services.supervisor import address

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from penstock.services.supervisor.child import Child

KEY_VARIABLE = "PENSTOCK_API_KEY"
ENGINE = "X_PENSTOCK_ENGINE"  # field of an api process's notice: the engine's status once it is ready
WEIGHTS = "X_PENSTOCK_WEIGHTS"  # field of an executor's notice: how the weights were verified
ADAPTERS = "X_PENSTOCK_ADAPTERS"  # the same: memory of the places for adapters


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of the banner."""

    url: str
    model: str
    engine: EngineStatus
    max_num_seqs: int
    seconds: float  # from the launcher's start to readiness
    chat: bool  # the model has a chat template
    locked: bool  # clients need a key
    wrong_output: tuple[str, ...] = ()  # reasons why the output is wrong
    headless: bool = False  # the model has no output embedding: it makes vectors alone
    exposed: bool = False  # other machines reach it, and clients need no key
    quantized: str = ""  # how the weights are
    weights: str = ""  # how they were verified
    inputs: tuple[tuple[str, str], ...] = ()  # names and facts of images and adapters, where they are served
    replicas: int = 1  # blocks and `max_num_seqs` are those of one
    prefill_replicas: int = 0  # of these

    @property
    def tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        engine = self.engine
        return capacity_tokens(engine.blocks, engine.block_size, engine.windows, engine.max_model_len)

    @property
    def concurrency(self) -> int:
        """Requests of full length that fit at once."""
        engine = self.engine
        if not engine.blocks:
            return self.max_num_seqs
        layout = BlockLayout(engine.block_size, engine.windows, ahead=1)
        return min(self.max_num_seqs, engine.blocks // layout.steady(engine.max_model_len))


def engine_facts(status: EngineStatus) -> tuple[str, ...]:
    """The engine's facts as lines of an api process's notice to the launcher, wherever the engine runs."""
    return (f"{ENGINE}={msgspec.json.encode(status).decode()}",)


def executor_facts(verified: str, adapter_bytes: int) -> tuple[str, ...]:
    """The same of an executor's: how its weights were verified, empty if not, and the memory of places for adapters."""
    weights = (f"{WEIGHTS}={verified}",) if verified else ()
    return (*weights, f"{ADAPTERS}={adapter_bytes / (1 << 30):.2f} GiB") if adapter_bytes else weights


def serving(
    config: Config, children: Sequence[Child], model: str, seconds: float, spec: ModelSpec, *, chat: bool
) -> Serving:
    """The banner's facts, from the notices of the processes."""
    quantized = quantization_facts(spec)
    fields: dict[str, str] = {}
    for child in children:
        fields.update(child.fields)
    return Serving(
        url=fields["X_PENSTOCK_URL"],
        model=model,
        engine=msgspec.json.decode(fields[ENGINE], type=EngineStatus),
        max_num_seqs=config.model.max_num_seqs,
        seconds=seconds,
        chat=chat,
        headless=spec.headless,
        quantized="" if quantized is None else quantized.text,
        locked=bool(config.api.api_key or config.api.api_key_file),
        replicas=config.model.data_parallel_size,
        prefill_replicas=config.model.prefill_replicas,
        wrong_output=wrong_output(config),
        exposed=exposed(config.api),
        weights=fields.get(WEIGHTS, ""),
        inputs=(
            *((("images", images(config)),) if spec.vision is not None else ()),
            *((("LoRA", adapters(config, fields.get(ADAPTERS, ""))),) if config.model.enable_lora else ()),
        ),
    )


def adapters(config: Config, memory: str) -> str:
    """Where LoRA adapters may be, and by which names clients ask for them. memory: of the places, where it is known."""
    model, api = config.model, config.api
    known = [f"{len(read_modules(api.lora_modules))} of --lora-modules"] if api.lora_modules else []
    known += [f"the folders of {api.lora_dir}"] if api.lora_dir else []
    places = f"{model.max_loras} in places of rank {model.max_lora_rank}" + (f" ({memory})" if memory else "")
    served = " and ".join(known) or "none can be asked for, without --lora-modules and --lora-dir"
    return f"{served}; {places}, {host_adapters(model)} in the host's memory"


def images(config: Config) -> str:
    """How many images a prompt may have, and where they may come from."""
    limit, hosts = image_limit(config.model), words(config.api.allowed_media_domains)
    if not limit:
        return f"refused: {LIMIT} is 0, and the vision encoder is not loaded"
    return f"{limit} in a prompt at most, as data: URLs" + (f" or by https from {', '.join(hosts)}" if hosts else "")


def exposed(options: ApiConfig) -> bool:
    """Whether anybody who reaches this machine may use the server."""
    return not (options.api_key or options.api_key_file or options.uds or address.only_here(options))


def curl(facts: Serving) -> str:
    """A command line for a first request to this server."""
    body: dict[str, object]
    if facts.headless:
        path, body = "/v1/embeddings", {"input": "Once upon a time"}
    elif facts.chat:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Tell me a short story."}]}
    else:
        path, body = "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}
    file = facts.url.removeprefix("unix:")
    target = [facts.url + path] if file == facts.url else ["--unix-socket", file, "http://localhost" + path]
    line = shlex.join(["curl", *target, "-H", "Content-Type: application/json", "-d", json.dumps(body)])
    return f'{line} -H "Authorization: Bearer ${KEY_VARIABLE}"' if facts.locked else line


def banner(facts: Serving) -> list[str]:
    """The lines that are printed once the server is ready."""
    engine = facts.engine
    cache = "none: an encoder keeps nothing of a text"
    if engine.blocks:
        cache = f"{engine.blocks:,} blocks of {engine.block_size} tokens: at most {facts.tokens:,} tokens"
        cache += f", in {engine.kv_cache_dtype}" if engine.kv_cache_dtype else ""
        cache += f"; {engine.host_blocks:,} in the host's memory" if engine.host_blocks else ""
        cache += f", {engine.disk_blocks:,} on disk" if engine.disk_blocks else ""
    rows = {
        "model": facts.model,
        "device": f"{engine.device}, {engine.dtype}",
        "KV cache": cache,
        "concurrency": f"{facts.concurrency:,} requests of full length ({engine.max_model_len:,} tokens), "
        f"{facts.max_num_seqs:,} of any length",
        "started in": f"{facts.seconds:.1f} s",
    }
    if facts.quantized:
        rows["quantized"] = facts.quantized
    if facts.headless:
        rows["texts"] = "refused: the weights have no output embedding (lm_head.weight), so there are vectors alone"
    elif not facts.chat:
        rows["chats"] = "refused: the model has no chat template; --chat-template FILE gives it one"
    if facts.weights:
        rows["weights"] = facts.weights
    rows.update(facts.inputs)
    if facts.wrong_output:
        rows["WRONG OUTPUT"] = "; ".join(facts.wrong_output)
    if facts.exposed:
        rows["NO KEY"] = "whoever reaches this address may use the server; --api-key asks clients for a key"
    if facts.replicas > 1:
        rows["replicas"] = f"{facts.replicas}, each with as large a cache and as many requests"
    if facts.prefill_replicas:
        rows["replicas"] += f"; {facts.prefill_replicas} compute prompts for the others"
    lines = ["", f"Penstock listens on {facts.url}"]
    lines += [f"  {name:<12} {value}" for name, value in rows.items()]
    lines += ["", "Try it:" + (f" (with the key in ${KEY_VARIABLE})" if facts.locked else ""), f"  {curl(facts)}", ""]
    return lines


def several_models(config: Config, url: str, seconds: float) -> list[str]:
    """The lines that are printed once a server of several models is ready."""
    rows = {}
    for name, engine in zip(names(config), engines(config), strict=True):
        share = f"{engine.executor.gpu_memory_utilization:g} of a GPU's memory"
        aliases = [f"also {alias}" for alias in words(engine.model.served_model_name)[1:]]
        rows[name] = ", ".join((engine.model.model, share, *aliases))
    if exposed(config.api):
        rows["NO KEY"] = "whoever reaches this address may use the server; --api-key asks clients for a key"
    rows["started in"] = f"{seconds:.1f} s"
    wide = max(map(len, rows))
    lines = ["", f"Penstock serves {len(names(config))} models on {url}"]
    lines += [f"  {name:<{wide}}  {value}" for name, value in rows.items()]
    return [*lines, "", f"GET {url}/v1/models tells which are loaded; the others are when they are asked for.", ""]


def part(here: str, elsewhere: Mapping[str, str], seconds: float) -> list[str]:
    """The lines that are printed where only some processes of a server run, once they are ready."""
    rows = {"here": here, **elsewhere, "started in": f"{seconds:.1f} s"}
    return ["", "Penstock serves a part here", *(f"  {name:<12} {value}" for name, value in rows.items()), ""]


def show(lines: Sequence[str]) -> None:
    """Print to stdout, with colour on a terminal, never wrapped; a closed stdout is not an error."""
    with contextlib.suppress(BrokenPipeError):
        if not sys.stdout.isatty():
            print("\n".join(lines), flush=True)
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text(line, style(line)))


def style(line: str) -> str:
    if line.startswith("Penstock"):
        return "bold green"
    return "cyan" if line.startswith("  curl") else ""


class Progress:
    """One line per process on a terminal while the server starts; nothing where stderr is no terminal.

    Log lines that come meanwhile scroll above it.
    """

    def __init__(self) -> None:
        self._live: Live | None = None

    def open(self) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    @property
    def shown(self) -> bool:
        return self._live is not None

    def update(self, children: Sequence[Child]) -> None:
        """Show the present status of the processes."""
        if self._live is not None:
            self._live.update(table(children), refresh=True)

    def write(self, line: str) -> None:
        """Pass one line of a process's output on to stderr as it is."""
        with contextlib.suppress(BrokenPipeError):
            if self._live is not None:
                self._live.console.out(line, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def table(children: Sequence[Child]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for child in children:
        mark = Text("ready", "green") if child.ready else Text("…", "yellow")
        grid.add_row(Text(child.name), mark, Text(child.status, "dim"))
    return grid
