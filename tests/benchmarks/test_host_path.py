"""The serial path of the host: every hop is there, and a run with all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.host_path import HOPS, STEP_HOPS, ends, figure, main, text
from penstock.protocol.links import TOKENS
from penstock.protocol.messages import Abort
from penstock.services.links.link import Joined


def test_of_each_hop_the_least_median_counts() -> None:
    found = figure("a step of 8", [[1e-6, 5e-6, 3e-6, 4e-6], [2e-6, 2e-6, 2.96e-6, 9e-6]])
    assert found.hops == dict(zip(STEP_HOPS, (1.0, 2.0, 3.0, 4.0), strict=True))
    assert found.total == 10.0
    assert text(found).splitlines()[0] == "a step of 8: 10.0 µs"


def test_what_one_end_sends_arrives_at_the_other_as_a_message_of_its_own() -> None:
    binder, connector = ends(TOKENS)
    sent = Abort(7)
    assert connector.send(connector.peers[0], sent)
    joined, arrived = binder.receive()
    assert isinstance(joined.message, Joined)
    assert arrived.message == sent
    assert arrived.message is not sent
    assert binder.receive() == []
    assert len(connector.out.put_at) == 1


def test_a_run_with_every_hop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "path.json"
    words = ["--shape", "smoke", "--vocab", "4000", "--prompts", "8", "--requests", "2", "--streams", "2"]
    assert main([*words, "--steps", "2", "--rounds", "1", "--output", str(output)]) == 0
    alone, chat, step = json.loads(output.read_bytes())["loads"]
    assert [load["load"] for load in (alone, step)] == ["first token, 8 ids", "a step of 2"]
    assert tuple(alone["hops"]) == tuple(chat["hops"]) == HOPS
    assert tuple(step["hops"]) == STEP_HOPS
    assert all(value > 0 for load in (alone, chat, step) for value in load["hops"].values())
    assert "first token, chat of 128 words" in capsys.readouterr().out
