"""The options of `penstock serve` as keywords of `LLM(...)`: the same names, bounds and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.config import Config, fields
from penstock.protocol.errors import ConfigError
from penstock.services.supervisor.options import Given, did_you_mean, merge, read_file

ORIGIN = "keyword"
QUIET = "warning"  # log level of an engine unless told otherwise: its log goes to the program's own stderr


def configured(model: str, keywords: Mapping[str, object]) -> Config:
    """The configuration of an engine. `config` names a file of options, which keywords override; an option that takes
    JSON takes a dict as well.

    Raises ConfigError for an unknown option, a wrong value, and options of HTTP, which an engine does not serve.
    """
    known = {field.name: field for field in fields()}
    given = [Given(known["log_level"], QUIET, ORIGIN)]
    rest = dict(keywords)
    file = rest.pop("config", None)
    if file is not None:
        given += read_file(Path(str(file)))
    if model:
        given.append(Given(known["model"], model, ORIGIN))
    for name, value in rest.items():
        field = known.get(name)
        if field is None:
            raise ConfigError(name, value, "there is no such option" + did_you_mean(name, [*known, "config"]))
        if field.section == "api":
            raise ConfigError(name, value, "it is an option of the HTTP server, which the Python API does not start")
        given.append(Given(field, json.dumps(value) if isinstance(value, Mapping) else value, ORIGIN))
    return merge(given).config
