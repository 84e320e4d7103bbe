"""Every option of every process, in frozen structs, and the one validation of them.

A field's `Option` gives its help text, bounds or choices; the command line, the config file and `penstock config` are
made from these structs, so an option exists once. Field `max_model_len` is typed `--max-model-len`.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated

import msgspec

from protocol.errors import ConfigError
from protocol.speculation import read_speculative


class Option(msgspec.Struct, frozen=True):
    """What the command line says about a field, and what values it may take."""

    help: str
    low: int | float | None = None
    high: int | float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    secret: bool = False  # may come from the environment, is never printed and never stands in a child's argv


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that all processes share; their hash is checked in every handshake."""

    model: Annotated[str, Option("folder in Hugging Face layout or hub id; empty: the embedded model")] = ""
    revision: Annotated[str, Option("hub revision: branch, tag or commit")] = ""
    served_model_name: Annotated[str, Option("name clients use; empty: the model's own; several with commas")] = ""
    dtype: Annotated[
        str,
        Option("arithmetic type; auto: the checkpoint's on a GPU, float32 on a CPU",
               choices=("auto", "float32", "bfloat16", "float16")),
    ] = "auto"
    load_format: Annotated[
        str, Option("dummy makes random weights for speed work", choices=("auto", "safetensors", "dummy"))
    ] = "auto"
    max_model_len: Annotated[int, Option("longest prompt plus output in tokens; 0: the model's own", 0, 1 << 24)] = 0
    block_size: Annotated[int, Option("tokens per KV block", 1, 256)] = 16
    max_num_seqs: Annotated[int, Option("most sequences running at once (executor slots)", 1, 4096)] = 256
    max_num_batched_tokens: Annotated[
        int, Option("token budget of one step; 0: 8192 on a GPU, 512 on a CPU", 0, 1 << 20)
    ] = 0
    tensor_parallel_size: Annotated[int, Option("GPUs per replica; only 1 is built", 1, 1)] = 1
    seed: Annotated[int, Option("seed of the server's own randomness: dummy weights", 0, 2**63 - 1)] = 0
    batch_invariant: Annotated[
        bool, Option("a request's tokens never depend on what shares its steps, to the last bit; needs a GPU")
    ] = False


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the api processes."""

    host: Annotated[str, Option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Option("port to listen on; 0 picks a free one", 0, 65535)] = 8000
    api_processes: Annotated[int, Option("api processes sharing the port; 0: 1 to 4, by cores", 0, 64)] = 0
    api_key: Annotated[str, Option("key that clients must send as bearer token; empty: none", secret=True)] = ""
    max_queued_requests: Annotated[
        int, Option("unfinished requests per api process; beyond it 429 with Retry-After", 1, 1 << 20)
    ] = 4096
    max_body_bytes: Annotated[int, Option("largest request body", 1024, 1 << 30)] = 32 << 20


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the tokenizer processes."""

    tokenizer_processes: Annotated[
        int, Option("tokenizer processes, over which requests are spread; 0: 1 or 2, by cores", 0, 64)
    ] = 0
    chat_template: Annotated[str, Option("file with a jinja chat template; empty: the model's own")] = ""
    grammar_workers: Annotated[int, Option("processes that compile grammars, per tokenizer process", 1, 64)] = 2
    grammar_compile_timeout: Annotated[
        float, Option("CPU seconds that compiling one grammar may take; beyond it 400", 0.1, 60.0)
    ] = 2.0
    grammar_compile_memory: Annotated[
        int, Option("bytes that compiling one grammar may take; beyond it 400", 16 << 20, 1 << 40)
    ] = 512 << 20
    grammar_max_bytes: Annotated[int, Option("longest schema, regex or grammar of a request", 64, 1 << 26)] = 2 << 20
    grammar_cache_entries: Annotated[int, Option("compiled grammars that are remembered", 1, 1 << 20)] = 1024


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the scheduler process."""

    enable_prefix_caching: Annotated[bool, Option("reuse KV blocks of equal prefixes")] = True
    scheduling_policy: Annotated[
        str, Option("order of waiting requests: fcfs, or the request's priority first", choices=("fcfs", "priority"))
    ] = "fcfs"
    overlap: Annotated[bool, Option("plan step k+1 while step k runs")] = True
    speculative_config: Annotated[
        str,
        Option('drafts, as a JSON object: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, '
               '"prompt_lookup_min": 2}; empty: only predictions of requests and what a grammar forces',
               metavar="JSON"),
    ] = ""
    mask_threads: Annotated[
        int, Option("threads that fill the masks of structured output; 0: half the cores, at most 8", 0, 256)
    ] = 0
    status_interval: Annotated[float, Option("seconds between heartbeats", 0.05, 10.0)] = 0.5


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the executor processes."""

    device: Annotated[str, Option("auto takes a GPU when there is one", choices=("auto", "cpu", "cuda"))] = "auto"
    gpu_memory_utilization: Annotated[float, Option("share of the GPU's memory Penstock may use", 0.05, 0.99)] = 0.9
    kv_cache_memory: Annotated[int, Option("bytes of KV cache; 0: from free memory", 0, 1 << 50)] = 0
    enforce_eager: Annotated[bool, Option("never capture CUDA graphs")] = False
    cpu_threads: Annotated[int, Option("torch threads on a CPU; 0: one per two cores", 0, 1024)] = 0


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of running itself, the same for every process."""

    run_dir: Annotated[str, Option("directory of socket files, made with mode 0700; empty: a temporary one")] = ""
    drain_timeout: Annotated[
        float, Option("seconds that running requests get to finish after SIGTERM or Ctrl-C", 0.0, 3600.0)
    ] = 30.0
    log_level: Annotated[
        str, Option("least severe log line that is printed", choices=("debug", "info", "warning", "error"))
    ] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effective configuration: a section per process."""

    model: ModelConfig = ModelConfig()
    api: ApiConfig = ApiConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    run: RunConfig = RunConfig()


TYPE_WORDS: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class Field(msgspec.Struct, frozen=True):
    """One option as the command line sees it."""

    section: str
    name: str
    type: type
    default: object
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name of the environment variable that may hold a secret option."""
        return "PENSTOCK_" + self.name.upper()

    @property
    def allowed(self) -> str:
        """Bounds or choices in words; empty where any value will do."""
        if self.option.choices:
            return "one of " + ", ".join(self.option.choices)
        if self.option.low is None or self.option.high is None:
            return ""
        return f"between {number(self.option.low)} and {number(self.option.high)}"


def fields() -> tuple[Field, ...]:
    """Every option of every section, in the order of the structs."""
    found = []
    for section in msgspec.structs.fields(Config):
        assert isinstance(section.type, type)
        hints = typing.get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            kind, option = typing.get_args(hints[field.name])
            assert not isinstance(kind, types.UnionType)
            found.append(Field(section.name, field.name, kind, field.default, option))
    return tuple(found)


def check(config: Config) -> Config:
    """Return `config` if every option is allowed, alone and with the others.

    Raises ConfigError with the option as typed, its value and what is allowed.
    """
    for field in fields():
        check_value(field, getattr(getattr(config, field.section), field.name))
    model, tokens = config.model, config.model.max_num_batched_tokens
    if 0 < tokens < model.max_num_seqs:
        raise ConfigError(
            "--max-num-batched-tokens", tokens, f"it must be at least --max-num-seqs ({model.max_num_seqs})"
        )
    read_speculative(config.scheduler.speculative_config)
    return config


def check_value(field: Field, value: object) -> None:
    """Raise ConfigError unless `value` has the field's type and stands within its bounds or choices."""
    option = field.option
    if field.type is float and type(value) is int:
        value = float(value)
    if type(value) is not field.type:
        raise ConfigError(field.flag, value, f"it must be {TYPE_WORDS[field.type]}")
    if option.choices and value not in option.choices:
        raise ConfigError(field.flag, value, f"it must be {field.allowed}")
    if isinstance(value, int | float) and option.low is not None:
        assert option.high is not None
        if not (math.isfinite(value) and option.low <= value <= option.high):
            raise ConfigError(field.flag, value, f"it must be {field.allowed}")


def number(value: int | float) -> str:
    """A bound in full digits: 9223372036854775807 and 0.05, never 9.2e+18."""
    return str(int(value)) if value == int(value) else f"{value:g}"
