"""`penstock collect-env`: what it finds, and what it never shows."""

from __future__ import annotations

import argparse
import os

import pytest

from penstock.protocol.version import VERSION
from penstock.services.commands import collect_env
from penstock.services.supervisor import options

SECRETS = {
    "PENSTOCK_API_KEY": "k-secret", "HF_TOKEN": "t-secret", "HF_ENDPOINT": "https://me:p-secret@hub.example",
    "OMP_NUM_THREADS": "3", "HOME": "h-secret",
}  # fmt: skip


def printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, torch: str) -> str:
    parser = options.Parser()
    options.add_options(parser)
    words = ("--max-num-seqs=7", "--ssl-keyfile-password=w-secret")
    effective = options.effective(options.parse(parser, words), SECRETS)
    monkeypatch.setattr(collect_env, "TORCH", torch)  # its import takes seconds
    monkeypatch.setattr(os, "environ", SECRETS)
    assert collect_env.command(argparse.Namespace(), effective) == 0
    return capfd.readouterr().out


def test_what_matters_is_there_and_no_secret(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(capfd, monkeypatch, "print('PyTorch version: 2')")
    assert text.startswith(f"penstock {VERSION} in ")
    lines = [line.strip() for line in text.splitlines()]
    assert {"PyTorch version: 2", "--max-num-seqs 7 (command line)", "OMP_NUM_THREADS=3",
            "HF_TOKEN=(set and not shown)", "HF_ENDPOINT=https://***@hub.example"} <= set(lines)  # fmt: skip
    assert [line for line in lines if line.startswith("msgspec==")]
    assert "--api-key (set and not shown)" in text
    assert "secret" not in text
    assert "HOME" not in text


def test_a_torch_that_cannot_be_imported_leaves_the_rest(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "OMP_NUM_THREADS=3" in printed(capfd, monkeypatch, "raise SystemExit(1)")
