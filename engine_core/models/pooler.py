"""How a model's vectors and scores are made: sentence-transformers' files in its folder, or the operator's options.

Sources: sentence-transformers, "Modules" (Pooling, Normalize, LogitScore) and config_sentence_transformers.json; the
model cards of Qwen3-Embedding and Qwen3-Reranker. Imports no torch: the api reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine_core.models.config_file import read_json
from penstock.protocol.errors import ModelError

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
# The modes of sentence-transformers that are served, as it names them in older folders and in newer ones.
MODES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
}  # fmt: skip
# torch's modules, and our names of what they compute.
MODULE_ACTIVATIONS: Mapping[str, str] = {
    "Identity": "", "Linear": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid",
}  # fmt: skip
NEWER: Mapping[str, str] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


class Pooler(msgspec.Struct, frozen=True, kw_only=True):
    """What one model's vectors are."""

    kind: str = "last"  # of `protocol.messages.Pooling`
    normalize: bool = True  # to length 1
    scorer: str = "cosine"  # or yes_no, or classifier: the model's head scores pairs
    query: str = ""  # text before a query that documents are ranked by
    document: str = ""  # text before each of them
    unpooled: str = ""  # why there are no vectors; empty: there are
    unscored: str = ""  # why there are no scores; empty: there are


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A product that a pooled state goes through, with its activation and norm."""

    name: str  # of its tensors
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = ""  # of `models.encoder.ACTIVATIONS`, empty: none
    norm: str = ""  # the name of a LayerNorm behind it, empty: none (ModernBERT)
    norm_bias: bool = False
    norm_eps: float = 1e-5
    folder: str = ""  # within the model's, which has its tensors in a file of its own


class ClassifierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head that classifies texts, or scores pairs of them where it has one label (a cross-encoder)."""

    kind: str  # of the state that it reads, as of `protocol.messages.Pooling`
    layers: tuple[DenseSpec, ...]
    labels: tuple[str, ...]
    activation: str = "softmax"  # of its logits: softmax, sigmoid, or empty: none


class Module(msgspec.Struct, frozen=True):
    """One line of modules.json."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]


def read_pooler(
    folder: Path,
    pooler: str = "auto",
    scorer: str = "auto",
    *,
    encoder: bool = False,
    classifier: ClassifierSpec | None = None,
) -> Pooler:
    """What the options say, and where they are auto what `folder` says; without a word from either a vector is the last
    hidden state, of an `encoder` their mean, of length 1. Raises ModelError naming the file and the key.

    A `classifier` of one label scores pairs where nothing else is asked for.
    """
    modules = read_modules(folder)
    names = [module.name for module in modules]
    found = Pooler(
        kind="mean" if encoder else "last",
        normalize=not modules or "Normalize" in names or "LogitScore" in names,
        **read_prompts(folder),
    )
    for module in modules:
        match module.name:
            case "Transformer" | "Normalize" | "Dense":
                pass
            case "Pooling":
                found = with_mode(found, read_json(folder / module.path / "config.json").values)
            case "LogitScore":
                found = with_answer(found, read_json(folder / module.path / "config.json").values)
            case other:
                found = msgspec.structs.replace(found, unpooled=f"{MODULES} asks for {other}, which is not supported")
    if classifier is not None:
        several = f"its classifier has {len(classifier.labels)} labels, and pairs are scored by one; ask /classify"
        found = msgspec.structs.replace(
            found, scorer="classifier", unscored=several if len(classifier.labels) > 1 else ""
        )
    if pooler != "auto":
        found = msgspec.structs.replace(found, kind=pooler, unpooled="")
    if scorer != "auto":
        found = msgspec.structs.replace(found, scorer=scorer, unscored="")
    if found.scorer == "cosine" and not found.unscored:
        found = msgspec.structs.replace(found, unscored=found.unpooled)
    return found


def read_projection(folder: Path) -> tuple[DenseSpec, ...]:
    """The Dense modules that vectors of the model go through. Raises ModelError naming the file and the key."""
    found = []
    for module in read_modules(folder):
        if module.name == "Dense":
            file = read_json(folder / module.path / "config.json")
            named = str(file.get("activation_function") or "Tanh").rsplit(".", 1)[-1]
            if named not in MODULE_ACTIVATIONS:
                known = ", ".join(MODULE_ACTIVATIONS)
                raise file.error("activation_function", f"Penstock serves {known}")
            found.append(
                DenseSpec(
                    name="linear",
                    inputs=file.integer("in_features"),
                    outputs=file.integer("out_features"),
                    bias=file.flag("bias", True),
                    activation=MODULE_ACTIVATIONS[named],
                    folder=module.path,
                )
            )
    return tuple(found)


def read_modules(folder: Path) -> list[Module]:
    """The modules that the folder names, none without the file."""
    path = folder / MODULES
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Module])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None


def with_mode(pooler: Pooler, values: Mapping[str, Any]) -> Pooler:
    """By the configuration of a Pooling module."""
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    kinds = [MODES.get(name, "") for name in modes]
    if "pooling_mode" in values:
        modes = [str(values["pooling_mode"])]
        kinds = [NEWER.get(modes[0], "")]
    if len(kinds) == 1 and kinds[0]:
        return msgspec.structs.replace(pooler, kind=kinds[0])
    reason = f"its pooling ({', '.join(modes) or 'none'}) is not supported; mean, last and cls are (--pooler)"
    return msgspec.structs.replace(pooler, unpooled=reason)


def with_answer(pooler: Pooler, values: Mapping[str, Any]) -> Pooler:
    """By the configuration of a LogitScore module."""
    if values.get("true_token_id") is not None and values.get("false_token_id") is not None:
        return msgspec.structs.replace(pooler, scorer="yes_no")
    reason = f"its LogitScore ({dict(values)}) is not supported; the logits of yes and no are (--scorer yes_no)"
    return msgspec.structs.replace(pooler, unscored=reason)


def read_prompts(folder: Path) -> dict[str, str]:
    """The texts that the model's makers put before queries and documents."""
    if not (folder / PROMPTS).exists():
        return {}
    prompts = read_json(folder / PROMPTS).get("prompts")
    found = prompts if isinstance(prompts, dict) else {}
    return {name: text for name in ("query", "document") if isinstance(text := found.get(name), str)}
