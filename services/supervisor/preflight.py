"""Checks of a configuration before the first process starts, so that a mistake is one line and not a crash loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.engine_core import folder
from penstock.engine_core.models.sharding import check_ranks
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import ConfigError
from penstock.services.http.security import Keys
from penstock.services.http.server import tls
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
