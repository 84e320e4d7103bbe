from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import apart
from benchmarks.apart import Figures, Sizes, figures_table, load, servers
from benchmarks.shapes import SHAPES
from penstock.services.bench.serve import Distribution
from penstock.services.bench.workload import requests

SPREAD = Distribution(2.0, 1.0, 3.0, 4.0, 5.0)


def test_all_servers_get_the_same_requests() -> None:
    sizes = Sizes(rates=(3.0,), seconds=2.0, prompt=20)
    first, again = (list(requests(load(sizes, SHAPES["8b"], 3.0))) for _ in range(2))
    assert first == again
    assert [len(first), first[0].prompt_tokens, first[0].output_tokens] == [6, 20, 256]
    assert first[-1].due > first[0].due > 0


def test_servers_differ_in_roles_and_steps_alone() -> None:
    found = servers(Sizes())
    assert [*found] == ["mixed", "mixed, steps of 2,048", "1 + 1"]
    assert [words[::2] for words in found.values()] == [
        (), ("--max-num-batched-tokens",),
        ("--prefill-replicas", "--kv-host-memory", "--max-local-prefill-length"),
    ]  # fmt: skip


def test_the_table_goes_by_rate() -> None:
    figures = Figures(server="mixed", rate=2.0, requests=40, failed=0, ttft_ms=SPREAD, gap_ms=SPREAD, tpot_ms=SPREAD,
                      e2e_ms=SPREAD, output_tokens_per_second=512.0)  # fmt: skip
    apart_ = msgspec.structs.replace(figures, server="1 + 1", handovers=40, handover_ms=20.4, transfer_ms=21.6)
    slower = msgspec.structs.replace(figures, rate=1.0)
    lines = figures_table([figures, apart_, slower]).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| 1", "mixed"], ["| 2", "mixed"], ["| 2", "1 + 1"]]
    assert lines[0].endswith("| 512 |  |")
    assert lines[2].endswith("| 512 | 20 + 22 |")


@pytest.mark.long
def test_a_try_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert apart.main(["--smoke", "--output", str(output)]) == 0
    found = json.loads(output.read_bytes())["figures"]
    assert [one["server"] for one in found] == ["mixed", "mixed, steps of 64", "1 + 1"]
    assert found[-1]["handovers"] == found[-1]["transfers"] == found[-1]["requests"]
