"""Which tokens end an output."""

from __future__ import annotations

from pathlib import Path

from penstock.engine_core.folder import read_generation
from penstock.engine_core.text.vocabulary import Vocabulary


def end_tokens(folder: Path, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids that end an output, by the model's files and by its tokenizer's. Raises ModelError on a wrong value."""
    ends = read_generation(folder).eos_token_ids
    return ends if vocabulary.eos is None else tuple(dict.fromkeys((*ends, vocabulary.eos)))
