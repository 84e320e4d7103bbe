"""What the api process knows of the model that it serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.engine_core import folder
from penstock.engine_core.folder import Generation
from penstock.engine_core.models.config_file import read_json
from penstock.engine_core.models.memory_estimate import QuantizationFacts, quantization_facts
from penstock.engine_core.models.pooler import ClassifierSpec, Pooler, read_pooler
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config, wrong_output
from penstock.protocol.errors import ConfigError, NotFound
from penstock.protocol.media import image_limit
from penstock.protocol.messages import Adapter
from penstock.services.client.adapters import AdapterNames

DEFAULT_TOKENIZER = "PreTrainedTokenizerFast"  # if the folder names no class


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Names, sizes and defaults of the model; responses carry `names[0]`."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    created: int  # unix seconds
    generation: Generation = Generation()
    hidden: int = 0  # size of an embedding
    tokenizer: bytes = b"{}"  # JSON for /tokenizer_info
    pooler: Pooler = Pooler()
    classifier: ClassifierSpec | None = None
    headless: bool = False  # it makes vectors alone
    images: int = 0  # most of one prompt; 0: it sees none
    quantization: QuantizationFacts | None = None
    adapters: AdapterNames | None = None  # None: it is served alone
    wrong_output: tuple[str, ...] = ()  # why its output is wrong, as protocol.config.wrong_output says

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it can be asked for."""
        tasks = {
            "generate": not self.headless,
            "embed": not self.pooler.unpooled,
            "score": not self.pooler.unscored,
            "classify": self.classifier is not None,
        }
        return tuple(task for task, served in tasks.items() if served)

    @property
    def modalities(self) -> tuple[Literal["text", "image"], ...]:
        """What it reads."""
        return ("text", "image") if self.images else ("text",)

    def adapter(self, asked: str | None) -> Adapter | None:
        """The adapter that is asked for; None: the model itself is, by name or not. Raises NotFound for another name,
        and InvalidRequest for an adapter that cannot be served."""
        if asked is None or asked in self.names:
            return None
        found = None if self.adapters is None else self.adapters.find(asked)
        if found is None:
            raise NotFound(f"The model `{asked[:200]}` does not exist.", param="model", code="model_not_found")
        return found


def read_model_info(config: Config) -> ModelInfo:
    """Read the model's folder. Raises ModelError or ConfigError."""
    path = folder.resolve(config.model.model, config.model.revision)
    spec = read_spec(path, config.model.quantization)
    names = folder.served_names(path, config.model)
    return ModelInfo(
        names=names,
        max_model_len=folder.model_length(spec, config.model),
        vocab_size=spec.vocab_size,
        created=int(time.time()),
        generation=folder.read_generation(path),
        hidden=spec.vector,
        tokenizer=tokenizer_info(path, config.tokenizer.chat_template),
        pooler=read_pooler(
            path, config.model.pooler, config.model.scorer, encoder=spec.encoder, classifier=spec.classifier
        ),
        classifier=spec.classifier,
        headless=spec.headless,
        images=image_limit(config.model) if spec.vision is not None else 0,
        quantization=quantization_facts(spec),
        adapters=AdapterNames(config, spec, names) if config.model.enable_lora else None,
        wrong_output=wrong_output(config),
    )


def tokenizer_info(folder: Path, override: str) -> bytes:
    """JSON of the folder's tokenizer_config.json with its class and the effective chat template, if there is one.
    `override` is the file of --chat-template. Raises ModelError and ConfigError."""
    path = folder / "tokenizer_config.json"
    info: dict[str, Any] = {"tokenizer_class": DEFAULT_TOKENIZER}
    if path.is_file():
        info |= read_json(path).values
    template = Path(override).expanduser() if override else folder / "chat_template.jinja"
    if override or template.is_file():
        try:
            info["chat_template"] = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "--chat-template", override, f"it must be a file with a jinja template: {error}"
            ) from None
    return msgspec.json.encode(info)
