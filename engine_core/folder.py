"""The model folder: where it is, what generation_config.json says, how long and by which names it is served.

Imports no torch and no transformers: every process reads its model's folder through here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.engine_core.models.spec import TEXT, ModelSpec, read_spec
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.media import image_limit
from penstock.protocol.speculation import FLAG, IN_FOLDERS, SpeculativeConfig

EMBEDDED = "penstock-demo"  # the name of the model that Penstock brings along
EMBEDDED_DRAFT = "penstock-demo-draft"  # the same of its draft
EMBEDDED_EAGLE = "penstock-demo-eagle"  # and of its EAGLE head
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FETCHED = ("*.json", "*.txt", "*.jinja", "*.model", "*.safetensors")  # never code, never pickles
MODULES = ("*_Pooling/config.json", "*_LogitScore/config.json")  # of sentence-transformers, where modules.json is
CONFIG = ("config.json", "preprocessor_config.json", "processor_config.json")  # what tells a model's shape
OFFLINE = "it is not in the cache, and the hub is not asked (HF_HUB_OFFLINE) or not reached; check id and network"
HUB_ERRORS: Mapping[str, str] = {  # of huggingface_hub, the narrower before the wider; the others' own words are clear
    "GatedRepoError": "its page on the hub grants access to it; ask there, then set HF_TOKEN",
    "RepositoryNotFoundError": "the hub has no such model, or it is private; check the id, or set HF_TOKEN",
    "RevisionNotFoundError": "the hub's model has no such revision",
    "OfflineModeIsEnabled": OFFLINE,
    "LocalEntryNotFoundError": OFFLINE,
}
NOT_FETCHED = ("*/*", "consolidated*")  # other layouts of the same weights


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's makers set for requests that say nothing; None where they are silent."""

    eos_token_ids: tuple[int, ...] = ()  # of generation_config.json and config.json together
    temperature: float | None = None
    top_k: int | None = None  # 0 keeps all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def resolve(model: str, revision: str = "", wanted: tuple[str, ...] = FETCHED) -> Path:
    """The folder of `model`: "" is the embedded model, and so is its name where no folder has it; an existing folder is
    itself; else a hub id is fetched, as far as its files are `wanted`.

    Hub ids go through huggingface_hub, whose environment variables for endpoint, cache, token and offline mode hold;
    it shows its progress bars. Raises ModelError: no such folder or repository, not reachable and not in the cache;
    ConfigError: a revision of something that has none.
    """
    path = expanded(model)
    embedded = not model or (model == EMBEDDED and not path.exists())
    if revision and (embedded or path.is_dir()):
        raise ConfigError("--revision", revision, "only models of the hub have revisions, a folder on disk has none")
    if embedded:
        from penstock.engine_core.embedded import demo_folder

        return demo_folder()
    if path.is_dir():
        return path
    if path.exists():
        why = f"; {path.name} is of llama.cpp, and Penstock reads safetensors" if path.suffix == ".gguf" else ""
        raise ModelError(f"{path}: a model is a folder with config.json, not a file{why}")
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        raise ModelError(f"{model}: no such folder, and not a hub id of the form owner/name{near(path)}")
    return fetch(model, revision, wanted)


def check_prefill_replicas(spec: ModelSpec, config: ModelConfig) -> None:
    """Raise ConfigError for a model whose prompts no replica can compute for another one."""
    flag, count = "--prefill-replicas", config.prefill_replicas
    if count and spec.recurrences:
        why = "the model has recurrent layers, whose states are not handed from one replica to another"
        raise ConfigError(flag, count, why)
    if count and (spec.encoder or spec.headless):
        raise ConfigError(flag, count, "the model makes vectors and no text, so nothing is decoded")


def expanded(model: str) -> Path:
    """The path that `model` may be, with ~ as the home directory where there is one."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~name of nobody
        return Path(model)


def near(path: Path) -> str:
    """Folders beside a missing one that may be meant, as the end of a complaint."""
    try:
        there = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, there, n=1)
    return f"; do you mean {path.parent / close[0]}?" if close else ""


def draft_folder(asked: SpeculativeConfig, target: Path, wanted: tuple[str, ...] = FETCHED) -> Path:
    """Where the weights of a method of protocol.speculation.WITH_MODEL are: as `resolve_draft` finds them, or in the
    model's own folder, the `target`."""
    return resolve_draft(asked.model, wanted) if asked.method in IN_FOLDERS else target


def resolve_draft(model: str, wanted: tuple[str, ...] = FETCHED) -> Path:
    """The folder of a draft model or a head, as `resolve` finds it, or one of the embedded model's by its name."""
    if model in (EMBEDDED_DRAFT, EMBEDDED_EAGLE) and not Path(model).is_dir():
        from penstock.engine_core.embedded import draft_folder, eagle_folder

        return draft_folder() if model == EMBEDDED_DRAFT else eagle_folder()
    try:
        return resolve(model, wanted=wanted)
    except ModelError as error:
        raise ModelError(f"{FLAG} model: {error}") from error


def fetch(model: str, revision: str, wanted: tuple[str, ...] = FETCHED) -> Path:
    """The cached snapshot of a hub repository, downloaded as far as it is not there yet."""
    from huggingface_hub import errors, snapshot_download

    transport_error = errors.HfHubHTTPError.__mro__[1]  # the HTTP client's own, which client it may be
    assert issubclass(transport_error, Exception)
    try:
        found = snapshot_download(
            model, revision=revision or None, allow_patterns=list(wanted), ignore_patterns=list(NOT_FETCHED)
        )
        if wanted is FETCHED and (Path(found) / "modules.json").exists():
            snapshot_download(model, revision=revision or None, allow_patterns=list(MODULES))
    except (OSError, ValueError, errors.XetDownloadError, transport_error) as error:
        at = f" at revision {revision}" if revision else ""
        reason = next((text for kind, text in HUB_ERRORS.items() if isinstance(error, getattr(errors, kind))), "")
        reason = reason or " ".join(str(error).split()) or type(error).__name__
        why = f"no such folder{near(expanded(model))}, and not fetched from the hub: {reason}"
        raise ModelError(f"{model}{at}: {why}") from error
    return Path(str(found))


def read_generation(folder: Path) -> Generation:
    """Defaults of `folder`/generation_config.json, which may be missing. Raises ModelError on a wrong value.

    A model of text and images may name its end tokens in its text half alone."""
    config = read_json(folder / "config.json")
    eos = config.token_ids("eos_token_id")
    if not eos and isinstance(inner := config.values.get(TEXT), dict):
        eos = ConfigFile(config.path, inner).token_ids("eos_token_id")
    path = folder / "generation_config.json"
    if not path.exists():
        return Generation(eos_token_ids=eos)
    file = read_json(path)
    eos = tuple(dict.fromkeys(file.token_ids("eos_token_id") + eos))
    sampled = file.get("do_sample") is not False

    def number(key: str, low: float, high: float) -> float | None:
        return None if file.get(key) is None else file.number(key, low=low, high=high)

    top_k = None if file.get("top_k") is None else max(0, file.integer("top_k", low=-1))
    return Generation(
        eos_token_ids=eos,
        temperature=number("temperature", 0.0, 100.0) if sampled else None,
        top_k=top_k if sampled else None,
        top_p=number("top_p", 0.0, 1.0) if sampled else None,
        min_p=number("min_p", 0.0, 1.0) if sampled else None,
        repetition_penalty=number("repetition_penalty", 1e-3, 1e3),
        max_new_tokens=None if file.get("max_new_tokens") is None else file.integer("max_new_tokens"),
    )


def served_spec(folder: Path, config: ModelConfig) -> ModelSpec:
    """What config.json says of the model, without a vision encoder where no images are served. Raises ModelError, and
    ConfigError for the number of images."""
    spec = read_spec(folder, config.quantization)
    return spec if image_limit(config) else spec.without_vision()


def model_length(spec: ModelSpec, config: ModelConfig) -> int:
    """Tokens of prompt plus output that are served: the option, or the model's own length.

    Raises ConfigError when the option exceeds what the model's positions allow. Under dynamic rope scaling the model's
    own length is the unscaled one and up to `factor` times as much may be asked for, see `models.rope`.
    """
    if config.max_model_len > spec.longest:
        allowed = f"the model's positions (config.json: max_position_embeddings, rope scaling) allow {spec.longest}"
        raise ConfigError("--max-model-len", config.max_model_len, allowed)
    return config.max_model_len or spec.max_position


def served_names(folder: Path, config: ModelConfig) -> tuple[str, ...]:
    """Names that clients may use; the first stands in responses. A folder on disk is named without its path."""
    names = tuple(dict.fromkeys(name for part in config.served_model_name.split(",") if (name := part.strip())))
    if names:
        return names
    if not config.model:
        return (EMBEDDED,)
    if config.model and not expanded(config.model).is_dir():
        return (config.model,)
    return (folder.resolve().name,)
