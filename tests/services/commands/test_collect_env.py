"""`penstock collect-env`: what it finds, and what it never shows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from penstock.protocol.version import VERSION
from penstock.services.commands import collect_env
from penstock.services.supervisor import options

SECRETS = {
    "PENSTOCK_API_KEY": "k-secret", "HF_TOKEN": "t-secret", "HF_ENDPOINT": "https://me:p-secret@hub.example",
    "OMP_NUM_THREADS": "3", "HOME": "h-secret",
}  # fmt: skip


def effective(*words: str) -> options.Effective:
    parser = options.Parser()
    options.add_options(parser)
    return options.effective(options.parse(parser, words), SECRETS)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    monkeypatch.setattr(collect_env, "torch", lambda: {"version": "2"})  # its import takes seconds
    return collect_env.environment(effective("--max-num-seqs=7", "--ssl-keyfile-password=w-secret"), SECRETS)


def test_no_secret_is_shown(found: dict[str, dict[str, str]]) -> None:
    assert "secret" not in json.dumps(found)
    assert found["environment"]["HF_TOKEN"] == "set and not shown"
    assert found["environment"]["HF_ENDPOINT"] == "https://***@hub.example"
    assert found["options given"]["--api-key"].startswith("set and not shown")


def test_what_matters_is_there(found: dict[str, dict[str, str]]) -> None:
    assert found["penstock"]["version"] == VERSION
    assert found["options given"]["--max-num-seqs"] == "7 (command line)"
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert "HOME" not in found["environment"]
    assert found["packages"]["msgspec"][0].isdigit()
    assert {"os", "kernel", "processor", "cores", "MemTotal"} <= set(found["system"])


def test_text_and_json(found: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    collect_env.command(argparse.Namespace(json=True), effective())
    assert set(json.loads(capsys.readouterr().out)) == set(found)
    collect_env.command(argparse.Namespace(json=False), effective())
    text = capsys.readouterr().out
    assert "penstock:\n  version: " in text
    assert "secret" not in text


def test_what_cannot_be_asked_is_missing(tmp_path: Path) -> None:
    assert collect_env.output_of("no-such-program-here") == ""
    assert collect_env.words_of(tmp_path / "none", "x") == {}


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "TORCH", "print('noise'); print('{\"version\": \"2.0\"}')")
    assert collect_env.torch() == {"version": "2.0"}
    monkeypatch.setattr(collect_env, "TORCH", "raise SystemExit(1)")
    assert collect_env.torch() == {"torch": "it cannot be imported"}
