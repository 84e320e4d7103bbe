"""The `penstock` command: parses the command line and imports only the module of the chosen command."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from penstock.protocol.config import Config, adjusted, fields
from penstock.protocol.errors import AddressError, ConfigError, LinkError, ModelError, PenstockError
from penstock.protocol.links import Role
from penstock.protocol.parts import count
from penstock.protocol.served_models import FOR_MODEL, engine_of, several
from penstock.protocol.version import VERSION
from penstock.services.supervisor import logs, options, process, run_directory
from penstock.services.supervisor.foreign_flags import did_you_mean
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.process import ExitCode
from penstock.services.supervisor.sd_notify import error_line, notify, progress

log = logging.getLogger(__name__)

COMMANDS: Mapping[str, str] = {
    "serve": "start a server: every process on this machine",
    "chat": "chat with a model in the terminal, or ask one question through a pipe",
    "complete": "complete a text",
    "run-batch": "process a file of requests in OpenAI's batch format",
    "plan": "print the GPU memory that a model needs, and how many requests run at once",
    "top": "show the live state of a server",
    "quantize": "write a quantized copy of a model, and print the error of each layer",
    "tune": "measure the fastest kernels for a model on this GPU, and keep the result for later starts",
    "bench serve": "benchmark a running server, or one that is started for it",
    "bench offline": "benchmark the Python API",
    "bench start": "measure how long a server takes to start",
    "config": "print the effective configuration as a file for --config",
    "keys": "create the key file for links between hosts",
    "collect-env": "print the environment for a bug report",
    "api": "one api process: HTTP",
    "tokenizer": "one tokenizer process: text to tokens and back",
    "scheduler": "the scheduler process: queue, KV blocks, steps",
    "executor": "one executor process: weights, forward pass, sampling",
    "engine": "every process but the api, for a program such as the Python API",
}
BENCHES = ("bench serve", "bench offline", "bench start")
TAKES_MODEL = ("serve", "engine", "config", "plan", "quantize", "tune", "chat", "complete", "run-batch", *BENCHES)
ENDING_AT_ONCE = ("serve", "engine", *Role)
SEVERAL = ("serve", "config")  # of those, the ones that take several
STARTED = ("model", "tokenizer", "scheduler", "executor", "trace", "api_processes", "api_key", "max_queued_requests",
           "log_level", "log_format", "run_dir")  # fmt: skip
COMMON = ("served_model_name", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
          "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel", "host", "port",
          "api_key", "chat_template", "tool_call_parser", "reasoning_parser", "enable_prefix_caching",
          "speculative_config", "device", "gpu_memory_utilization")  # fmt: skip
# Not in the short help of commands that take single options.
RARE = ("keep_weights", "kv_disk", "kv_disk_size", "kv_store")
STARTED_COMMON = ("dtype", "max_model_len", "tensor_parallel_size", "device", "api_key", "log_level")
# The sections and single options of protocol/config.py that a command has, beside --model where it takes one; a command
# that is not here has all.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "keys": (),
    "top": ("api_key",),
    "quantize": ("revision", "device", "base_gpu_id"),
    "tune": ("model", "device"),
    "plan": (
        "model",
        "gpu_memory_utilization",
        "kv_cache_memory",
        "kv_host_memory",
        "keep_weights",
        "kv_disk",
        "kv_disk_size",
        "kv_store",
        "state_snapshots",
        "speculative_config",
    ),
    **dict.fromkeys(("chat", "complete", "run-batch", *BENCHES), STARTED),
}
# Commands with arguments of their own, and the module of each, which has `add_arguments` and `command`. For a module's
# second command, named after a colon, these are `add_NAME_arguments` and `NAME_command`.
MODULES: Mapping[str, str] = {
    "keys": "penstock.services.commands.keys",
    "chat": "penstock.services.commands.chat",
    "complete": "penstock.services.commands.chat:complete",
    "run-batch": "penstock.services.commands.run_batch",
    "bench serve": "penstock.services.bench.serve",
    "bench offline": "penstock.services.bench.offline",
    "bench start": "penstock.services.bench.offline:start",
    "plan": "penstock.services.commands.plan",
    "quantize": "penstock.services.commands.quantize",
    "tune": "penstock.services.commands.tune",
    "top": "penstock.services.commands.top",
    "collect-env": "penstock.services.commands.collect_env",
}
ROLE_MODULES: Mapping[Role, str] = {Role.API: "openai.api_server"}  # of roles whose module is not ROLE.main
MAX_UNSIZED = 64  # processes of a role whose number is left to the cores; protocol/messages.py gives an api's 7 bits
MODEL = "folder in Hugging Face layout or hub id, as --model"
LEFT_OUT = "; left out: penstock-demo, the embedded model"
WIDE = 60  # columns of a terminal that has room for two columns of help
HELP = re.compile(r"-h|--help(?:=(.*))?")
EPILOG = "`penstock {command} --help=all` shows every option, `--help=WORD` those about WORD."
EXIT_CODES: Mapping[type[PenstockError], ExitCode] = {
    AddressError: ExitCode.ADDRESS,
    ConfigError: ExitCode.CONFIG,
    ModelError: ExitCode.MODEL,
    LinkError: ExitCode.LINK,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. An operator's mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return run(words)
    except PenstockError as error:
        heard = notify(error_line(error))
        if not (heard and process.PARENT in os.environ):  # the launcher says it, last of all
            print(f"penstock: {error}", file=sys.stderr)
        return EXIT_CODES.get(type(error), ExitCode.FAILED)
    except KeyboardInterrupt:
        return ExitCode.FAILED


def entry() -> NoReturn:
    """The program. A server's processes, which have closed what they opened, end at once: Python's own end takes as
    long as a fifth of the imports, and threads of torch may abort an executor meanwhile, whatever its exit code says.
    """
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in set(Role):
        gc.disable()  # until the role's module is ready for it: a start makes many objects that stay
    code = main()
    if command in ENDING_AT_ONCE:
        logging.shutdown()
        with suppress(OSError):  # whoever read it has ended
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words[:1] == ["bench"]:
        words = [" ".join(words[:2]), *words[2:]]  # a command of two words
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        parser_of("").print_help()
        return ExitCode.ORDERLY
    if "--version" in (command, *words[1:2]):
        print(f"penstock {VERSION}")
        return ExitCode.ORDERLY
    if command in ("bench", "bench -h", "bench --help"):
        print("usage: penstock bench WHAT [options]\n")
        for name in BENCHES:
            print(f"  {name.removeprefix('bench '):10}{COMMANDS[name]}")
        return ExitCode.ORDERLY
    if command not in COMMANDS:
        raise ConfigError("command line", command, unknown_command(command))
    wanted = next((found[1] or "" for word in words[1:] if (found := HELP.fullmatch(word))), None)
    if wanted is not None:
        parser_of(command, wanted).print_help()
        return ExitCode.ORDERLY
    namespace = options.parse(parser_of(command), words[1:])
    effective = options.effective(namespace, os.environ)
    if several(effective.config) and command not in (*SEVERAL, *Role):
        raise ConfigError("--model", None, f"`penstock {command}` takes one model; several are for `penstock serve`")
    if namespace.without_effect:
        logs.setup(command, effective.config.run.log_level, effective.config.run.log_format)
        logs.warning(log, "flags_without_effect", flags=" ".join(namespace.without_effect))
    if command == "config":
        print(options.as_toml(effective), end="")
        return ExitCode.ORDERLY
    if command in ("serve", "engine"):
        from penstock.services.supervisor import launcher

        return (launcher.serve if command == "serve" else launcher.engine)(effective.config)
    if command in MODULES:
        code: int = function_of(command, "{}command")(namespace, effective)
        return code
    role = Role(command)
    config = of_role(role, effective.config)
    return run_role(role, index_of(role, namespace, config), config)


def unknown_command(command: str) -> str:
    hint = did_you_mean(command, list(COMMANDS))
    if command.startswith("-") or "/" in command or os.path.exists(command):
        hint = "; `penstock serve MODEL` starts a server"
    return f"the commands are {', '.join(COMMANDS)}{hint}"


def parser_of(command: str, wanted: str = options.ALL_OPTIONS) -> options.Parser:
    """The parser of one command, or of the overview that `penstock --help` prints; `wanted` says which options its help
    shows, as `add_options` does."""
    columns = shutil.get_terminal_size().columns
    parser = options.Parser(
        prog=f"penstock {command}".rstrip(),
        usage=usage(command),
        description=COMMANDS.get(command, "Penstock serves large language models over an OpenAI-compatible API."),
        epilog=EPILOG.format(command=command) if command and OPTIONS.get(command) != () else None,
        allow_abbrev=False,
        add_help=False,
        foreign=command in TAKES_MODEL or command in set(Role),
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30 if columns >= WIDE else 6),
    )
    if not command:
        commands = parser.add_argument_group("commands")
        for name, text in COMMANDS.items():
            commands.add_argument(name, nargs="?", help=text)
        parser.add_argument("--version", action="store_true", help="print the version and exit")
        return parser
    if command in TAKES_MODEL:
        parser.add_argument(
            "positional_model", metavar="MODEL", nargs="*" if command in SEVERAL else "?",
            help=MODEL if command == "quantize" else MODEL + LEFT_OUT,
        )  # fmt: skip
    elif command not in MODULES:
        parser.add_argument("--index", metavar="N", default="", help="number among its role's in the server; empty: 0")
    if command == Role.EXECUTOR:
        parser.add_argument(
            "--local-index", metavar="N", default="", help="number among this host's executors, in place of --index"
        )
    if command in MODULES:
        function_of(command, "add_{}arguments")(parser)
    names = OPTIONS.get(command)
    named = (*(names or ()), *(["--model"] if command in TAKES_MODEL else []))
    chosen = [one for one in fields() if names is None or {one.section, one.name, one.flag} & {*named}]
    singles = (one for one in names or () if one not in (*options.TITLES, *RARE))
    options.add_options(parser, chosen, wanted, STARTED_COMMON if names is STARTED else (*COMMON, *singles))
    return parser


def function_of(command: str, name: str) -> Callable[..., Any]:
    """A function of the command's module."""
    module, _, second = MODULES[command].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name.format(second and f"{second}_"))
    return function


def usage(command: str) -> str:
    if not command:
        return "penstock COMMAND [options]"
    model = "[MODEL …] " if command in SEVERAL else "MODEL OUT " if command == "quantize" else "[MODEL] "
    argument = model if command in TAKES_MODEL else "FILE " if command == "keys" else ""
    return f"penstock {command} {argument}[options]"


def index_of(role: Role, namespace: argparse.Namespace, config: Config) -> int:
    """The process's number in the server. Raises ConfigError for one that there is not."""
    local = getattr(namespace, "local_index", "")
    if local and namespace.index:
        raise ConfigError("--local-index", local, f"--index is given too: {namespace.index}")
    option, text = ("--local-index", local) if local else ("--index", namespace.index or "0")
    first = config.executor.first_executor if local else 0
    last = (count(role, config) or MAX_UNSIZED) - 1
    if not (text.isdecimal() and first + int(text) <= last):
        raise ConfigError(option, text, f"it must be a whole number between 0 and {last - first}")
    if role is Role.EXECUTOR and first + int(text) < config.executor.first_executor:
        why = f"executors of this host begin at {config.executor.first_executor}, as --first-executor says"
        raise ConfigError(option, text, why)
    return first + int(text)


def of_role(role: Role, config: Config) -> Config:
    """The configuration of one process of a server, in its directory. Raises ConfigError."""
    directory = run_directory.of_one_process(config.run.run_dir)
    config = adjusted(config, run_dir=str(directory))
    if role is Role.API:
        if config.run.for_model:
            raise ConfigError(FOR_MODEL, config.run.for_model, "api processes are for all models")
        return config
    config = engine_of(config)
    run_directory.prepared(Path(config.run.run_dir))
    return config


def run_role(role: Role, index: int, config: Config) -> int:
    """One process of a server, in this process."""
    progress("starting")
    config = sized(config, usable_cores())
    process.enter(role, index, config.run)
    try:
        module = importlib.import_module(f"penstock.services.{ROLE_MODULES.get(role, f'{role}.main')}")
        code: int = module.run(config, index)
        if code == ExitCode.ORDERLY:
            process.leave(role, index, config.run)
        return code
    except PenstockError:
        raise
    except Exception:  # guard: design 7, the process says why it ends
        logs.exception(log, f"{role}_failed")
        return ExitCode.FAILED
    finally:
        if role is Role.API and process.orphaned():
            run_directory.clear_orphan(Path(config.run.run_dir))


if __name__ == "__main__":
    entry()
