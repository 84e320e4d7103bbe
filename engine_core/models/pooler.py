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
NEWER: Mapping[str, str] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


class Pooler(msgspec.Struct, frozen=True, kw_only=True):
    """What one model's vectors are."""

    kind: str = "last"  # of `protocol.messages.Pooling`
    normalize: bool = True  # to length 1
    scorer: str = "cosine"  # or yes_no
    query: str = ""  # text before a query that documents are ranked by
    document: str = ""  # text before each of them
    unpooled: str = ""  # why there are no vectors; empty: there are
    unscored: str = ""  # why there are no scores; empty: there are


class Module(msgspec.Struct, frozen=True):
    """One line of modules.json."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]


def read_pooler(folder: Path, pooler: str = "auto", scorer: str = "auto") -> Pooler:
    """What the options say, and where they are auto what `folder` says; without a word from either a vector is the last
    hidden state, of length 1. Raises ModelError naming the file and the key."""
    modules = read_modules(folder)
    names = [module.name for module in modules]
    found = Pooler(normalize=not modules or "Normalize" in names or "LogitScore" in names, **read_prompts(folder))
    for module in modules:
        match module.name:
            case "Transformer" | "Normalize":
                pass
            case "Pooling":
                found = with_mode(found, read_json(folder / module.path / "config.json").values)
            case "LogitScore":
                found = with_answer(found, read_json(folder / module.path / "config.json").values)
            case other:
                found = msgspec.structs.replace(found, unpooled=f"{MODULES} asks for {other}, which is not built")
    if pooler != "auto":
        found = msgspec.structs.replace(found, kind=pooler, unpooled="")
    if scorer != "auto":
        found = msgspec.structs.replace(found, scorer=scorer, unscored="")
    if found.scorer == "cosine" and not found.unscored:
        found = msgspec.structs.replace(found, unscored=found.unpooled)
    return found


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
    reason = f"its pooling ({', '.join(modes) or 'none'}) is not built; mean, last and cls are (--pooler)"
    return msgspec.structs.replace(pooler, unpooled=reason)


def with_answer(pooler: Pooler, values: Mapping[str, Any]) -> Pooler:
    """By the configuration of a LogitScore module."""
    if values.get("true_token_id") is not None and values.get("false_token_id") is not None:
        return msgspec.structs.replace(pooler, scorer="yes_no")
    reason = f"its LogitScore ({dict(values)}) is not built; the logits of yes and no are (--scorer yes_no)"
    return msgspec.structs.replace(pooler, unscored=reason)


def read_prompts(folder: Path) -> dict[str, str]:
    """The texts that the model's makers put before queries and documents."""
    if not (folder / PROMPTS).exists():
        return {}
    prompts = read_json(folder / PROMPTS).get("prompts")
    found = prompts if isinstance(prompts, dict) else {}
    return {name: text for name in ("query", "document") if isinstance(text := found.get(name), str)}
