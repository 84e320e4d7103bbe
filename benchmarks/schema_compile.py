"""What a worker's time goes into for one schema over a large vocabulary: `python -m benchmarks.schema_compile`.

Every schema of `benchmarks/schemas/` is compiled and tried as a compile worker does it, lenient where it has no exact
form, `--rounds` times; of the rounds the least CPU time counts, since others share the machine. The vocabulary is that
of `--tekken FILE`, Mistral's format as the wheel of mistral_common has it (131,072 byte-level tokens), or else the
embedded model's widened to 131,072. `--out` records a result; `--before RESULT` puts another beside it."""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.schemas import OWN, own_groups, percentile
from benchmarks.shapes import SHAPES, make_folder
from penstock.engine_core.grammar.compilation import compile_grammar
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar

LONGEST = 16  # bytes of a token that the split below looks for


class Tekken:
    """Mistral's vocabulary in the form that `GrammarTokens` reads. Its split is the longest token at each place."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text())
        config = found["config"]
        self.controls = config["default_num_special_tokens"]
        self.size = config["default_vocab_size"]
        words = [base64.b64decode(word["token_bytes"]) for word in found["vocab"][: self.size - self.controls]]
        names = {each["rank"]: each["token_str"] for each in found.get("special_tokens") or ()}
        self.names = [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(self.controls)]
        self.words = [*(name.encode() for name in self.names), *words]
        self.ids = {word: token_id for token_id, word in enumerate(self.words) if token_id >= self.controls}
        self.special = frozenset(range(self.controls))
        self.added: Mapping[int, str] = dict(enumerate(self.names))

    def token(self, token_id: int) -> str:
        return self.names[token_id] if token_id < self.controls else self.words[token_id].decode(errors="replace")

    def raw(self, token_id: int) -> bytes:
        return self.words[token_id]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        rest, out = text.encode(), []
        while rest:
            end = next(n for n in range(min(LONGEST, len(rest)), 0, -1) if rest[:n] in self.ids)
            out.append(self.ids[rest[:end]])
            rest = rest[end:]
        return out


def tokens_of(tekken: Path | None) -> GrammarTokens:
    """The tokens of a vocabulary of 131,072."""
    if tekken is not None:
        vocabulary: Any = Tekken(tekken)
        return GrammarTokens(vocabulary, vocabulary.size, [2])
    with tempfile.TemporaryDirectory() as place:
        shape = next(shape for shape in SHAPES.values() if shape.vocab >= 128_000)
        folder = make_folder(shape, Path(place))
        found = read_tokens(folder, read_vocabulary(folder))
    assert found is not None, "the embedded model names the token that ends an output"
    return found


def measured(tokens: GrammarTokens, source: str) -> tuple[float, float] | None:
    """CPU seconds until a schema is compiled, and until it is tried too; None where it is refused."""
    for lenient in (False, True):
        grammar = Grammar(kind="json_schema", source=source, lenient=lenient)
        began = time.process_time()
        try:
            made = compile_grammar(grammar, tokens)
        except InvalidRequest:
            continue
        return made.seconds, time.process_time() - began
    return None


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    return {
        "p50": round(statistics.median(seconds) * 1e3, 2),
        "p95": round(percentile(list(seconds), 0.95) * 1e3, 2),
        "max": round(max(seconds) * 1e3, 2),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tekken", type=Path, help="Mistral's vocabulary, a JSON file")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path)
    options.add_argument("--before", type=Path, help="a result of this benchmark to put beside")
    chosen = options.parse_args()
    tokens = tokens_of(chosen.tekken)
    sources = [json.dumps(group.schema) for group in own_groups(OWN)]
    measured(tokens, json.dumps({"type": "object"}))  # tables that all share
    rounds = [[measured(tokens, source) for source in sources] for _ in range(chosen.rounds)]
    least = [
        (min(each[0] for each in found), min(each[1] for each in found))
        for found in ([each for each in of_one if each] for of_one in zip(*rounds, strict=True))
        if found
    ]
    result: dict[str, Any] = {
        "vocabulary": tokens.width,
        "schemas": len(sources),
        "compiled": len(least),
        "compile_ms": summary([compiled for compiled, _ in least]),
        "compile_and_try_ms": summary([tried for _, tried in least]),
    }
    if chosen.before:
        result["before"] = json.loads(chosen.before.read_text())
    print(json.dumps(result, indent=1))
    if chosen.out:
        report.write(chosen.out, "schema_compile", result)


if __name__ == "__main__":
    main()
