"""Several models behind one endpoint: which there are, and the options of each.

`--models` is a JSON object of names and options; `--model NAME=PATH` and the tables [models.NAME] of a config file are
written into it. What a model does not say is as the rest of the configuration has it. Each is an engine of its own:
tokenizers, a scheduler for each replica and executors, which agree on its ModelConfig and meet in a folder of its own
in the run directory. With `--for-model NAME` a process other than the api's is one of that engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.protocol import groups
from penstock.protocol.adapters import NAME
from penstock.protocol.config import Config, adjusted, fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import Field, words

MODELS, FOR_MODEL = "--models", "--for-model"
PAIR = re.compile(rf"({NAME.pattern})=(.+)", re.DOTALL)  # --model NAME=PATH
MOST = 64
FOLDER = "model-{}"  # of the run directory
LONGEST_FOLDER = len(FOLDER.format(MOST - 1))
SECTIONS = ("model", "tokenizer", "scheduler", "executor")  # whose options a model may have
BESIDE = ("lora_modules", "lora_dir", "weights_dir")  # and these of the api's
PATH = "path"  # another name of the option `model`
OPTIONS = msgspec.json.Decoder(dict[str, dict[str, str | int | float | bool | list[str]]])
Overrides = Mapping[str, object]


def read_models(text: str) -> Mapping[str, Overrides]:
    """The options of each model by its name, in order; none where one model is served. Raises ConfigError."""
    if not text:
        return {}
    try:
        found = OPTIONS.decode(text)
    except msgspec.DecodeError as error:
        why = 'it must be like {"chat": {"model": "FOLDER"}, "embed": {"model": "FOLDER", "max_model_len": 8192}}'
        raise ConfigError(MODELS, text, f"{why}: {error}") from None
    if len(found) > MOST:
        raise ConfigError(MODELS, len(found), f"a server has at most {MOST} models")
    for name in found:
        if not NAME.fullmatch(name):
            raise ConfigError(MODELS, name, "a model's name has letters, digits and . _ : @ / + -")
    return {name: named(name, overrides) for name, overrides in found.items()}


def named(name: str, overrides: Mapping[str, object]) -> dict[str, object]:
    """The same with the options' own names. Raises ConfigError for one that a model cannot have by itself."""
    allowed = {field.name: field for field in fields() if allows(field)}
    found: dict[str, object] = {}
    for given, value in overrides.items():
        option = "model" if given == PATH else given.replace("-", "_")
        field = allowed.get(option)
        if field is None:
            known = "any option of the sections model, tokenizer, scheduler and executor may stand there"
            raise ConfigError(f"models.{name}", given, f"{known}, and {', '.join(BESIDE)}")
        if field.option.several and isinstance(value, list):
            value = ",".join(value)
        found[option] = float(value) if field.type is float and type(value) is int else value
    return found


def allows(field: Field) -> bool:
    """Whether a model may have this option by itself."""
    return field.name in BESIDE or (field.section in SECTIONS and not field.option.secret)


def several(config: Config) -> bool:
    """Whether models are loaded and put to sleep as requests come for them."""
    return bool(config.run.models)


def names(config: Config) -> tuple[str, ...]:
    """The names of the models, or the empty one of a server's only model."""
    return tuple(read_models(config.run.models)) or ("",)


def engines(config: Config) -> tuple[Config, ...]:
    """The configuration of each model's engine."""
    found = read_models(config.run.models)
    return tuple(engine(config, name, found) for name in found) if found else (config,)


def engine_of(config: Config) -> Config:
    """The configuration of a process that --for-model says the engine of. Raises ConfigError."""
    name, found = config.run.for_model, read_models(config.run.models)
    if bool(name) != bool(found):
        why = "there are no models to choose from" if name else f"it must say which one: {', '.join(found)}"
        raise ConfigError(FOR_MODEL, name, why)
    if not found:
        return config
    if name not in found:
        raise ConfigError(FOR_MODEL, name, f"the models are {', '.join(found)}")
    return engine(config, name, found)


def engine(config: Config, name: str, models: Mapping[str, Overrides]) -> Config:
    """The configuration of the processes of one model, which is called by its name before any others."""
    given = {field.name: models[name][field.name] for field in fields() if field.name in models[name] and allows(field)}
    aliases = words(str(models[name].get("served_model_name", "")))
    called = ",".join(dict.fromkeys((name, *aliases)))
    folder = FOLDER.format(tuple(models).index(name))
    run_dir = str(Path(config.run.run_dir) / folder) if config.run.run_dir else ""
    return adjusted(config, **{**given, "served_model_name": called, "for_model": name, "run_dir": run_dir})


def with_options(config: Config, changed: Mapping[str, Overrides]) -> Config:
    """`config` with options of models replaced, by the models' names."""
    models = {name: {**given, **changed.get(name, {})} for name, given in read_models(config.run.models).items()}
    return adjusted(config, models=msgspec.json.encode(models).decode())


def shares(config: Config) -> tuple[dict[int, float], ...]:
    """For each model the share that it takes of each GPU, by the GPU's number on this host."""
    return tuple(
        {
            engine.executor.base_gpu_id + place: engine.executor.gpu_memory_utilization
            for place in range(groups.executors(engine.model))
        }
        for engine in engines(config)
    )


def check_models(config: Config) -> None:
    """Raise ConfigError for what several models cannot have yet, and for names that two of them have."""
    found = read_models(config.run.models)
    if config.run.for_model and config.run.for_model not in found:
        engine_of(config)
    if not found:
        return
    refused = (
        ("--parts", config.run.parts),
        ("--scheduler-address", config.links.scheduler_address),
        ("--tokenizer-address", config.links.tokenizer_address),
        ("--rendezvous", config.executor.rendezvous),
        ("--first-executor", config.executor.first_executor),
        ("--served-model-name", config.model.served_model_name if not config.run.for_model else ""),
    )
    for option, value in refused:
        if value:
            why = "with several models all runs on one host, and each has names of its own (served_model_name)"
            raise ConfigError(option, value, why)
    seen: dict[str, str] = {}
    for name in found:
        for called in words(engine(config, name, found).model.served_model_name):
            if seen.setdefault(called, name) != name:
                raise ConfigError(f"models.{name}", called, f"the model {seen[called]} has that name too")
