"""The measurement of compile workers: what it reads and what it reports."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from benchmarks import schema_compile
from benchmarks.schema_compile import measured, summary, tokens_of
from benchmarks.schemas import Group


@pytest.fixture
def tekken(tmp_path: Path) -> Path:
    words = [bytes([value]) for value in range(256)] + [b"true", b'{"', b'":']
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    specials = [{"rank": rank, "token_str": name} for rank, name in enumerate(("<unk>", "<s>", "</s>"))]
    config = {"default_num_special_tokens": 4, "default_vocab_size": 4 + len(words)}
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": specials}))
    return path


def test_a_vocabulary_of_mistral_is_read(tekken: Path) -> None:
    tokens = tokens_of(tekken)
    assert tokens.width == 4 + 256 + 3
    assert tokens.text(tokens.split(b'{"true":1}')) == b'{"true":1}'
    assert len(tokens.split(b'{"true":1}')) == 5
    assert tokens.eos == {2}


def test_a_schema_is_compiled_and_tried_leniently_if_it_must(tekken: Path) -> None:
    tokens = tokens_of(tekken)
    found = measured(tokens, '{"type": "string"}')
    assert found is not None
    assert 0 < found[0] < found[1]
    assert measured(tokens, '{"type": "string", "pattern": "(?<=a)b"}') is not None
    assert measured(tokens, "false") is None


def test_the_least_of_the_rounds_is_reported(
    tekken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter([(9.0, 9.0), (0.003, 0.004), (0.002, 0.005)])  # the first fills the tables that all share
    monkeypatch.setattr(schema_compile, "measured", lambda *_: next(turns))
    monkeypatch.setattr(schema_compile, "own_groups", lambda _: list(schema_compile_groups()))
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["x", "--tekken", str(tekken), "--rounds", "2", "--out", str(out)])
    schema_compile.main()
    written = json.loads(out.read_text())
    assert written.items() > json.loads(capsys.readouterr().out).items()
    assert written["compile_ms"]["p50"] == 2.0
    assert written["compile_and_try_ms"]["p50"] == 4.0
    assert written["commit"]
    assert written["machine"]["cpu"]


def schema_compile_groups() -> list[Group]:
    return [Group("one", {}, ())]


def test_percentiles() -> None:
    assert summary([0.001 * n for n in range(1, 101)]) == {"p50": 50.5, "p95": 96.0, "max": 100.0}
