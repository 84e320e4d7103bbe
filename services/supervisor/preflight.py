"""Checks before the first process starts, so that a mistake is one line and not a crash loop; and which processes run
on this host, where they listen, and where they connect to those of other hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.engine_core import folder
from penstock.engine_core.models.sharding import check_ranks
from penstock.engine_core.models.spec import read_spec
from penstock.protocol import groups
from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.links import HostAddress, Role, ports_of, read_address
from penstock.protocol.parts import ORDER, Parts, count
from penstock.services.http.security import Keys
from penstock.services.http.server import tls
from penstock.services.links.curve import read_keys
from penstock.services.supervisor import address


def resolved(config: Config) -> Config:
    """`config` with the model's local folder and its served names filled in.

    Raises ConfigError and ModelError for a model that no process could serve.
    """
    model = folder.resolve(config.model.model, config.model.revision)
    names = folder.served_names(model, config.model)
    spec = read_spec(model)
    folder.model_length(spec, config.model)
    check_ranks(spec, config.model.tensor_parallel_size, expert_parallel=config.model.expert_parallel)
    template = config.tokenizer.chat_template
    if template and not Path(template).is_file():
        raise ConfigError("--chat-template", template, "it must be a file with a jinja template")
    found = msgspec.structs.replace(config.model, model=str(model), served_model_name=",".join(names))
    return msgspec.structs.replace(config, model=found)


def check_api(options: ApiConfig) -> None:
    """Raise ConfigError or AddressError for an address, a certificate or a key file that no api process could use."""
    if options.uds:
        address.check_file(Path(options.uds))
    else:
        address.check(options.host, options.port)
    tls(options)
    Keys(options)


def has_template(model: Path, given: str) -> bool:
    """Whether the model has a chat template, so that the server can answer chats."""
    if given or (model / "chat_template.jinja").is_file():
        return True
    try:
        tokenizer: Mapping[str, object] = json.loads((model / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(tokenizer.get("chat_template"))


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
        try:
            address.check(where.bare, where.port)
        except AddressError as error:
            raise AddressError(option, str(where), error.allowed) from None


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
    executor = msgspec.structs.replace(config.executor, first_executor=index - place)
    return msgspec.structs.replace(config, executor=executor)
