"""Every option of every process, in frozen structs.

A field's `Option` (option.py) gives its help text, bounds or choices; the command line, the config file and `penstock
config` are made from these structs, so an option exists once. Field `max_model_len` is typed `--max-model-len`.
validation.py checks the values.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Annotated

import msgspec

from penstock.protocol import limits
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.option import Field, Option
from penstock.protocol.speculation import read_speculative

NO_KEY = "a server without keys answers everybody"
CLAMP_NONE, CLAMP_MESSAGES, CLAMP_ALL = "none", "messages", "all"  # --clamp-max-tokens


# An option stands on two or three lines, not on six.
# fmt: off


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the api processes."""

    host: Annotated[str, Option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Option("port to listen on; 0 picks a free one", 0, 65535)] = 8000
    uds: Annotated[str, Option("unix socket to listen on instead of an address", metavar="FILE")] = ""
    uds_mode: Annotated[
        str, Option("who may connect to it: its owner, or its group and everybody too",
                    choices=("owner", "group", "everybody"))
    ] = "owner"
    api_processes: Annotated[
        int, Option("api processes sharing the port; 0: 1 to 4, by cores, and 1 with --uds", 0, 64)
    ] = 0
    api_key: Annotated[
        str, Option("key that clients must send as bearer token; may be repeated; left out: none", several=True,
                    secret=True, blank=NO_KEY)
    ] = ""
    api_key_file: Annotated[
        str, Option("file with a key per line, read again when it changes and on SIGHUP", metavar="FILE", blank=NO_KEY)
    ] = ""
    lora_modules: Annotated[
        str, Option('adapters by the name that clients use, as NAME=FOLDER or {"name": …, "path": …}; may be repeated',
                    several=True, greedy=True, metavar="NAME=FOLDER")
    ] = ""
    lora_dir: Annotated[
        str, Option("directory of adapters, each a folder of its name, which is read when a request first names it")
    ] = ""
    admin_address: Annotated[
        str, Option("address of the operator's routes, which are nowhere else; needs --operator-key-file, except for "
                    "a unix socket, to which only its owner may connect; empty: no such routes",
                    metavar="HOST:PORT|unix:FILE")
    ] = ""
    operator_key_file: Annotated[
        str, Option("file with a key per line for --admin-address, like --api-key-file", metavar="FILE")
    ] = ""
    weights_dir: Annotated[
        str, Option("directory with the folders from which the operator may update the model's weights")
    ] = ""
    allowed_media_domains: Annotated[
        str, Option("hosts from which the server fetches images by https, *.NAME for subdomains; may be repeated; "
                    "empty: none, images come as data: URLs",
                    several=True, greedy=True, metavar="HOST", aliases=("--allowed-media-hosts",))
    ] = ""
    allowed_hosts: Annotated[
        str,
        Option("host names that requests may address besides loopback names, *.NAME for subdomains, or *; may be "
               "repeated; empty: any, or only loopback names if --host is a loopback address",
               several=True, metavar="HOST[:PORT]"),
    ] = ""
    allowed_origins: Annotated[
        str, Option("origins whose pages may call this server (CORS), or *; may be repeated; empty: only its own",
                    several=True, metavar="ORIGIN")
    ] = ""
    allowed_methods: Annotated[
        str, Option("methods that those pages may use, or *; may be repeated", several=True, metavar="METHOD")
    ] = "*"
    allowed_headers: Annotated[
        str, Option("headers that those pages may send, or *; may be repeated", several=True, metavar="HEADER")
    ] = "*"
    allow_credentials: Annotated[bool, Option("let those pages send cookies and client certificates")] = False
    ssl_keyfile: Annotated[str, Option("private key, PEM; empty: it is in --ssl-certfile", metavar="FILE")] = ""
    ssl_certfile: Annotated[str, Option("certificate chain, PEM; empty: no TLS", metavar="FILE")] = ""
    ssl_keyfile_password: Annotated[str, Option("password of the private key", secret=True)] = ""
    ssl_ca_certs: Annotated[
        str, Option("certificates, PEM, of the authorities that sign client certificates; empty: none are asked for",
                    metavar="FILE")
    ] = ""
    ssl_cert_reqs: Annotated[
        str, Option("whether a client must have a certificate; needs --ssl-ca-certs",
                    choices=("required", "optional"))
    ] = "required"
    max_queued_requests: Annotated[
        int, Option("max unfinished requests per api process; beyond it 429 with Retry-After", 1, 1 << 20)
    ] = 4096
    max_connections: Annotated[
        int, Option("max open connections per api process, beyond which new ones wait to be accepted; 0: as many as "
                    "the limit of open files (ulimit -n) leaves room for", 0, 1 << 20)
    ] = 0
    max_stored_responses: Annotated[
        int, Option("max responses that an api process stores for previous_response_id; 0: none", 0, 1 << 20)
    ] = 1000
    max_stored_bytes: Annotated[int, Option("max bytes of these responses", 1024, 1 << 34)] = 64 << 20
    response_dir: Annotated[
        str, Option("directory in which these responses survive a restart of the server; empty: none")
    ] = ""
    max_unloaded_requests: Annotated[
        int, Option("with several models, max requests per api process that wait for one that is not loaded; beyond it "
                    "503 with Retry-After", 1, 1 << 20)
    ] = 1024
    model_turn: Annotated[
        float, Option("with several models, seconds that one with requests stays loaded while others wait for memory",
                      0.0, limits.MAX_TIMEOUT)
    ] = 30.0
    max_queued_bytes: Annotated[
        int, Option("max bytes of unfinished requests' bodies per api process; beyond it 429", 1024, 1 << 40)
    ] = 512 << 20
    log_prompts: Annotated[bool, Option("log the bodies of requests, prompts included; off: no prompts")] = False
    metrics_port: Annotated[
        int, Option("further port that serves only /metrics, /health and /version, without a key and without TLS; 0: "
                    "none, they are at --port for clients with a key", 0, 65535)
    ] = 0
    metrics_alias: Annotated[
        str, Option("server whose metric names are exported as well, where the meaning is the same",
                    choices=("none", "vllm"))
    ] = "none"
    max_header_bytes: Annotated[int, Option("max bytes of the request line with headers", 1024, 1 << 24)] = 64 << 10
    max_body_bytes: Annotated[int, Option("max bytes of a request body", 1024, 1 << 30)] = limits.MAX_BODY_BYTES
    header_timeout: Annotated[
        float, Option("seconds from the first byte of a request to the end of its headers", 0.1, 3600.0)
    ] = 10.0
    body_timeout: Annotated[float, Option("seconds in which the body of a request must arrive", 0.1, 3600.0)] = 60.0
    request_timeout: Annotated[
        float, Option("max duration of a request in seconds; beyond it 504; 0: no limit", 0.0,
                      limits.MAX_TIMEOUT)
    ] = 0.0
    keep_alive_timeout: Annotated[
        float, Option("seconds that a connection may be idle", 0.1, 86400.0, aliases=("--timeout-keep-alive",))
    ] = 75.0
    max_json_depth: Annotated[int, Option("max nesting of a JSON body", 8, limits.MAX_JSON_DEPTH)] = (
        limits.MAX_JSON_DEPTH
    )
    max_n: Annotated[int, Option("max choices per prompt", 1, limits.MAX_CHOICES)] = limits.MAX_N
    max_logprobs: Annotated[
        int, Option("max log-probabilities per token", 0, limits.MAX_LOGPROBS)
    ] = limits.MAX_LOGPROBS
    max_stop_strings: Annotated[
        int, Option("max stop strings of a request", 0, limits.MOST_STOP_STRINGS)
    ] = limits.MAX_STOP_STRINGS
    max_logit_bias: Annotated[
        int, Option("max tokens in logit_bias", 0, limits.MAX_LOGIT_BIAS)
    ] = limits.MAX_LOGIT_BIAS
    clamp_max_tokens: Annotated[
        str, Option("requests whose max_tokens is reduced to what the context has left, not refused with a 400: "
                    "those of /v1/messages, all, or none",
                    choices=(CLAMP_NONE, CLAMP_MESSAGES, CLAMP_ALL))
    ] = CLAMP_MESSAGES


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the tokenizer processes."""

    tokenizer_processes: Annotated[
        int, Option("tokenizer processes, over which requests are spread; 0: 1 or 2, by cores", 0, 64)
    ] = 0
    placement: Annotated[
        str,
        Option("which replica a request goes to: the one with most of its prompt in the cache unless its load is far "
               "above the others', the one with the least load, or each in turn",
               choices=("prefix", "least_loaded", "round_robin")),
    ] = "prefix"
    max_local_prefill_length: Annotated[
        int, Option("with --prefill-replicas, max tokens of a prompt, without those that are cached, that a replica "
                    "which decodes computes itself", 0, 1 << 24)
    ] = 512
    chat_template: Annotated[str, Option("file with a jinja chat template; empty: the model's own")] = ""
    default_chat_template_kwargs: Annotated[
        str,
        Option('variables for the chat template, as a JSON object like {"enable_thinking": false}; those of a request '
               'go before', metavar="JSON"),
    ] = ""
    trust_request_chat_template: Annotated[
        bool, Option("accept chat_template in requests; it is rendered in a separate process, within limits")
    ] = False
    split_special_tokens: Annotated[
        bool, Option("treat control tokens in the text of users, tools and documents as plain text")
    ] = True
    template_workers: Annotated[int, Option("processes that render requests' templates, per tokenizer", 1, 64)] = 2
    template_timeout: Annotated[
        float, Option("max CPU seconds for rendering a request's own template; beyond it 400", 0.1, 60.0)
    ] = 2.0
    template_memory: Annotated[
        int, Option("max memory in bytes for rendering a request's own template; beyond it 400", 16 << 20, 1 << 40)
    ] = 512 << 20
    media_workers: Annotated[
        int, Option("processes that decode images, per tokenizer; one client takes all but one; 0: 2 to 4, by cores",
                    0, 64)
    ] = 0
    media_timeout: Annotated[
        float, Option("max seconds for fetching one image, and max CPU seconds for decoding it; beyond it 400",
                      0.1, 60.0)
    ] = 2.0
    media_memory: Annotated[
        int, Option("max memory in bytes for decoding one image; beyond it 400", 64 << 20, 1 << 40)
    ] = 1 << 30
    media_max_pixels: Annotated[
        int, Option("max pixels of an image, read from its header before it is decoded; beyond it 400", 1, 1 << 30)
    ] = 64 << 20
    media_max_bytes: Annotated[
        int, Option("max bytes of unfinished requests' images as pixels, per tokenizer; beyond it 429",
                    1 << 20, 1 << 44)
    ] = 4 << 30
    tool_call_parser: Annotated[
        str,
        Option("tool call format of the model; auto: recognized from its chat template",
               choices=("auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "glm45",
                        "harmony", "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2", "minimax_m2",
                        "gemma4", "functiongemma", "granite", "phi4", "phi4_mini_json", "olmo3", "hunyuan_a13b",
                        "seed_oss", "lfm2")),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option("reasoning markers of the model; auto: those in its chat template; deepseek_r1: they begin inside",
               choices=("auto", "none", "think", "qwen3", "deepseek_r1", "mistral", "reasoning", "harmony", "gemma4",
                        "granite", "seed_oss", "hunyuan_a13b", "ernie45", "minimax_m2_append_think")),
    ] = "auto"
    grammar_workers: Annotated[int, Option("processes that compile grammars, per tokenizer process", 1, 64)] = 2
    grammar_compile_timeout: Annotated[
        float, Option("max CPU seconds for compiling one grammar; beyond it 400", 0.1, 60.0)
    ] = 2.0
    grammar_compile_memory: Annotated[
        int, Option("max memory in bytes for compiling one grammar; beyond it 400", 16 << 20, 1 << 40)
    ] = 512 << 20
    grammar_max_bytes: Annotated[int, Option("max bytes of a schema, regex or grammar", 64, 1 << 26)] = 2 << 20
    grammar_cache_entries: Annotated[int, Option("max compiled grammars in the tokenizer's cache", 1, 1 << 20)] = 1024


class LinksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the links between processes. Hosts may spell an address differently, so no hash is made of them."""

    scheduler_address: Annotated[
        str,
        Option("where schedulers listen for processes of other hosts, each at two ports from this one on; empty: only "
               "on socket files of the run directory",
               metavar="tcp://HOST:PORT"),
    ] = ""
    tokenizer_address: Annotated[
        str,
        Option("where tokenizers listen for processes of other hosts, each at a port from this one on; empty: only on "
               "socket files of the run directory",
               metavar="tcp://HOST:PORT"),
    ] = ""
    link_keys: Annotated[
        str,
        Option("key file made by `penstock keys`, the same on every host; peers without it are refused; needed with "
               "several hosts",
               metavar="FILE"),
    ] = ""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of running itself, the same for every process of a host."""

    parts: Annotated[
        str,
        Option("processes that `penstock serve` starts on this host, such as api,tokenizer,scheduler,executor:0-3 here "
               "and executor:4-7 on another; may be repeated; empty: all",
               several=True, metavar="PARTS"),
    ] = ""
    run_dir: Annotated[str, Option("directory of socket files, created with mode 0700; empty: a temporary one")] = ""
    models: Annotated[
        str, Option('several models behind one endpoint, as a JSON object like {"chat": {"model": "FOLDER", '
                    '"max_model_len": 8192}}; --model NAME=PATH, repeated, and [models.NAME] of a file write it; '
                    'empty: the one of --model', metavar="JSON"),
    ] = ""
    for_model: Annotated[
        str, Option("with several models, the one whose tokenizer, scheduler or executor a process is; "
                    "`penstock serve` starts those of all", metavar="NAME"),
    ] = ""
    drain_timeout: Annotated[
        float, Option("seconds that running requests get to finish after SIGTERM or Ctrl-C", 0.0, 3600.0)
    ] = 30.0
    report_prompts: Annotated[bool, Option("include the token ids of prompts and outputs in crash reports")] = False
    log_level: Annotated[
        str, Option("lowest level of the log lines that are printed", choices=("debug", "info", "warning", "error"))
    ] = "info"
    log_format: Annotated[str, Option("format of log lines", choices=("logfmt", "json"))] = "logfmt"


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of tracing, the same for every process; the standard OTEL_ variables count as well."""

    otlp_endpoint: Annotated[
        str, Option("OpenTelemetry collector to send traces to, such as http://localhost:4318; empty: no traces",
                    metavar="URL")
    ] = ""
    otlp_protocol: Annotated[
        str, Option("protocol of the collector; auto: as $OTEL_EXPORTER_OTLP_PROTOCOL says, else http/protobuf",
                    choices=("auto", "http/protobuf", "grpc"))
    ] = "auto"
    trace_sampling_ratio: Annotated[
        float, Option("share of requests that are traced, of those whose client has not decided", 0.0, 1.0)
    ] = 1.0
    trace_steps: Annotated[
        float, Option("max spans per second of steps that traced requests are in; 0: none", 0.0, 1000.0)
    ] = 1.0
    trace_tokens: Annotated[int, Option("output tokens between two events of a decode span; 0: none", 0, 1 << 20)] = 128


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effective configuration: a section per process."""

    model: ModelConfig = ModelConfig()
    api: ApiConfig = ApiConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    links: LinksConfig = LinksConfig()
    run: RunConfig = RunConfig()
    trace: TraceConfig = TraceConfig()


@functools.lru_cache(maxsize=1)  # a start asks several times
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


def adjusted(config: Config, **options: object) -> Config:
    """The configuration with other values of these options, whichever sections have them."""
    homes = {option: name for name in config.__struct_fields__ for option in getattr(config, name).__struct_fields__}
    for option, value in options.items():
        section = msgspec.structs.replace(getattr(config, homes[option]), **{option: value})
        config = msgspec.structs.replace(config, **{homes[option]: section})
    return config


def wrong_output(config: Config) -> tuple[str, ...]:
    """Why this server's output is wrong, in words for its users; empty where it is not."""
    reasons = []
    if config.model.load_format == "dummy":
        reasons.append("random weights (--load-format dummy)")
    if read_speculative(config.scheduler.speculative_config).synthetic_acceptance is not None:
        reasons.append("drafts that are kept whatever the model says (synthetic_acceptance)")
    return tuple(reasons)
