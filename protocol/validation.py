"""The validation of options: each value by itself, then those that must go together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol.adapters import read_modules
from penstock.protocol.admin import read_admin_address
from penstock.protocol.config import ApiConfig, Config, fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import check_groups
from penstock.protocol.kv_store import read_store
from penstock.protocol.links import HostAddress, check_apart, ports_of, read_address
from penstock.protocol.media import image_limit, read_domains
from penstock.protocol.option import Field, words
from penstock.protocol.parts import check_parts
from penstock.protocol.served_models import check_models, engines, names
from penstock.protocol.speculation import read_speculative

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})  # in chat templates
TYPE_WORDS: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/,?#]+")  # RFC 6454, section 6.2
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)(:[0-9]{1,5})?")
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2


def check_value(field: Field, value: object) -> None:
    """Raise ConfigError unless `value` has the field's type and is within its bounds or choices."""
    option = field.option
    if field.type is float and type(value) is int:
        value = float(value)
    if type(value) is not field.type:
        raise ConfigError(field.flag, value, f"it must be {TYPE_WORDS[field.type]}")
    if value:
        check_content(field, value)
    if option.choices and value not in option.choices:
        raise ConfigError(field.flag, value, f"it must be {field.allowed}")
    if isinstance(value, int | float) and option.low is not None:
        assert option.high is not None
        if not (math.isfinite(value) and option.low <= value <= option.high):
            raise ConfigError(field.flag, value, f"it must be {field.allowed}")


def check_content(field: Field, value: object) -> None:
    """Raise ConfigError for an empty value where it would mean more than leaving the option out."""
    empty = isinstance(value, str) and not (words(value) if field.option.several else value.strip())
    if field.option.blank and empty:
        raise ConfigError(field.flag, value, f"{field.option.blank}; leave the option out if that is meant")


def check(config: Config) -> Config:
    """Return `config` if every option is allowed, alone and with the others.

    Raises ConfigError with the option as typed, its value and what is allowed.
    """
    for field in fields():
        check_value(field, getattr(getattr(config, field.section), field.name))
    check_models(config)
    for name, engine in zip(names(config), engines(config), strict=True):
        try:
            check_engine(engine)
        except ConfigError as error:
            if not name:
                raise
            raise ConfigError(f"models.{name}: {error.option}", error.value, error.allowed) from None
    check_links(config)
    check_parts(config)
    check_listening(config.api)
    read_domains(config.api)
    return config


def check_engine(config: Config) -> None:
    """Raise ConfigError for options of a model, or of its processes, that are not allowed with one another."""
    if config.run.for_model:
        for field in fields():
            check_value(field, getattr(getattr(config, field.section), field.name))
    model, tokens = config.model, config.model.max_num_batched_tokens
    if 0 < tokens < model.max_num_seqs:
        raise ConfigError(
            "--max-num-batched-tokens", tokens, f"it must be at least --max-num-seqs ({model.max_num_seqs})"
        )
    check_groups(model)
    drafting = read_speculative(config.scheduler.speculative_config)
    if drafting.synthetic_acceptance is not None and not model.allow_wrong_output:
        why = "it makes the output wrong, for benchmarks alone: --allow-wrong-output serves it all the same"
        raise ConfigError("--speculative-config synthetic_acceptance", drafting.synthetic_acceptance, why)
    check_lora(config)
    read_template_kwargs(config.tokenizer.default_chat_template_kwargs)
    check_tiers(config)
    check_prefill_replicas(config)
    image_limit(model)


def read_template_kwargs(text: str) -> dict[str, Any]:
    """Variables that chat templates have unless a request sets them. Raises ConfigError."""
    flag, value = "--default-chat-template-kwargs", {}
    if text:
        try:
            value = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigError(flag, text, f"it must be a JSON object: {error}") from None
    if taken := RESERVED.intersection(value):
        raise ConfigError(flag, text, f"{min(taken)} is a parameter of requests")
    return value


def check_tiers(config: Config) -> None:
    """Raise ConfigError for KV blocks in the host's memory, on disk or in a store without what these need."""
    executor = config.executor
    if executor.kv_host_memory and not config.scheduler.enable_prefix_caching:
        raise ConfigError("--kv-host-memory", executor.kv_host_memory, "it needs --enable-prefix-caching")
    if executor.kv_store:
        read_store(executor.kv_store)
        if not executor.kv_host_memory:
            why = "it needs --kv-host-memory: blocks go to the store from there, and come back through it"
            raise ConfigError("--kv-store", executor.kv_store, why)
        if executor.kv_disk:
            raise ConfigError("--kv-store", executor.kv_store, "blocks go there or to --kv-disk: leave one of them out")
    if not executor.kv_disk:
        if executor.kv_disk_size:
            raise ConfigError("--kv-disk-size", executor.kv_disk_size, "it needs --kv-disk, a folder")
        return
    if not executor.kv_disk_size:
        raise ConfigError("--kv-disk", executor.kv_disk, "it needs --kv-disk-size, such as 200G")
    if not executor.kv_host_memory:
        why = "it needs --kv-host-memory: blocks go to disk from there, and come back through it"
        raise ConfigError("--kv-disk", executor.kv_disk, why)


def check_prefill_replicas(config: Config) -> None:
    """Raise ConfigError where prompts cannot be computed by some replicas for the others."""
    flag, model = "--prefill-replicas", config.model
    if not model.prefill_replicas:
        return
    if model.prefill_replicas >= model.data_parallel_size:
        why = f"at least one of the {model.data_parallel_size} replicas (--data-parallel-size) must decode"
        raise ConfigError(flag, model.prefill_replicas, why)
    if not config.executor.kv_host_memory:
        why = "it needs --kv-host-memory, through which KV blocks go from one replica to another"
        raise ConfigError(flag, model.prefill_replicas, why)
    if config.executor.kv_disk or config.executor.kv_store:
        option = "--kv-disk" if config.executor.kv_disk else "--kv-store"
        why = f"its executors' host memory is read by others, so nothing else is written there: leave out {option}"
        raise ConfigError(flag, model.prefill_replicas, why)


def check_lora(config: Config) -> None:
    """Raise ConfigError for adapters that nobody serves, and for a bound that lets places stand empty."""
    model, api = config.model, config.api
    for flag, value in (("--lora-modules", api.lora_modules), ("--lora-dir", api.lora_dir)):
        if value and not model.enable_lora:
            raise ConfigError(flag, value, "it needs --enable-lora")
    if model.lora_experts and not model.enable_lora:
        raise ConfigError("--lora-experts", True, "it needs --enable-lora")
    read_modules(api.lora_modules)
    if 0 < model.max_cpu_loras < model.max_loras:
        raise ConfigError(
            "--max-cpu-loras", model.max_cpu_loras, f"it must be at least --max-loras ({model.max_loras})"
        )


def check_links(config: Config) -> None:
    """Raise ConfigError for malformed addresses, for ports that two options use, and for addresses without link keys:
    everything that crosses a network is encrypted and authenticated."""
    replicas, links = config.model.data_parallel_size, config.links
    tokenizers = max(1, config.tokenizer.tokenizer_processes)
    given = (
        ("--scheduler-address", links.scheduler_address, replicas * ports_of("scheduler")),
        ("--tokenizer-address", links.tokenizer_address, tokenizers * ports_of("tokenizer")),
        ("--rendezvous", config.executor.rendezvous, replicas),
    )
    wanted: dict[str, tuple[HostAddress, int]] = {}
    for option, text, ports in given:
        if text:
            wanted[option] = read_address(option, text, ports), ports
            if not links.link_keys:
                raise ConfigError(option, text, "it needs --link-keys, a file that `penstock keys FILE` makes")
    check_apart(wanted)


def check_admin(api: ApiConfig) -> None:
    """Raise ConfigError for an operator's address that is none, that is the clients', or that anybody could use."""
    found = read_admin_address(api.admin_address)
    if api.operator_key_file and found is None:
        why = "the operator's routes need an address of their own: --admin-address, like 127.0.0.1:8001"
        raise ConfigError("--operator-key-file", api.operator_key_file, why)
    if found is None:
        if api.weights_dir:
            raise ConfigError("--weights-dir", api.weights_dir, "it needs --admin-address")
        return
    if found.file:
        if found.file == api.uds:
            raise ConfigError("--admin-address", api.admin_address, "it must be another socket than --uds")
        return
    if not api.operator_key_file:
        raise ConfigError("--admin-address", api.admin_address, "it needs --operator-key-file")
    if found.port and found.port in (0 if api.uds else api.port, api.metrics_port):
        why = "it must be another port than --port and --metrics-port"
        raise ConfigError("--admin-address", api.admin_address, why)


def check_listening(api: ApiConfig) -> None:
    """Raise ConfigError for combinations of the socket's options that are not allowed."""
    if api.uds and api.api_processes > 1:
        raise ConfigError("--uds", api.uds, f"one process listens at a file; --api-processes is {api.api_processes}")
    if api.metrics_port and api.metrics_port == api.port and not api.uds:
        raise ConfigError("--metrics-port", api.metrics_port, "it must be another port than --port")
    check_admin(api)
    if api.uds and api.ssl_certfile:
        raise ConfigError("--uds", api.uds, "TLS is for addresses; leave out --ssl-certfile")
    if not api.ssl_certfile:
        for flag, value in (("--ssl-keyfile", api.ssl_keyfile), ("--ssl-ca-certs", api.ssl_ca_certs)):
            if value:
                raise ConfigError(flag, value, "it needs --ssl-certfile")
    for name in words(api.allowed_hosts):
        if name != "*" and not HOST.fullmatch(name):
            raise ConfigError("--allowed-hosts", name, "it must be *, or like example.org, *.example.org or [::1]:8000")
    origins = words(api.allowed_origins)
    if api.allow_credentials and ("*" in origins or not origins):
        raise ConfigError("--allow-credentials", True, "it needs the origins by name in --allowed-origins")
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError("--allowed-origins", origin, "it must be *, null or like https://example.org:8443")
    for flag, text in (("--allowed-methods", api.allowed_methods), ("--allowed-headers", api.allowed_headers)):
        for word in words(text):
            if not TOKEN.fullmatch(word):
                raise ConfigError(flag, word, "it must be * or names")
