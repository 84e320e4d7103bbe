"""The exchange between GPUs: a process each, which sees all of them, or its own alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.engine_core.distributed.custom_all_reduce import MAX_ROWS
from penstock.kernels.exchange import add_parts
from tests.engine_core.distributed.test_custom_all_reduce import check_exact
from tests.engine_core.execution.exchange_ranks import EPS, differences, drawn, exchanged, replayed, waiting
from tests.ranks import Ranks

pytestmark = pytest.mark.gpu

SIZES = tuple(size for size in (2, 4) if size <= torch.cuda.device_count())


@pytest.fixture(scope="module", params=["cuda", "own cuda"])
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if not SIZES:
        pytest.skip("there is one GPU")
    found = Ranks(SIZES, tmp_path_factory.mktemp("exchange"), request.param)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 4096), (torch.bfloat16, 2880), (torch.float16, 100), (torch.float32, 4096)]
)
def test_sums_and_norms_are_exact(gpus: Ranks, dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    for size in SIZES:
        sizes, seed = (1, 3, 64, 600), width
        found = gpus.run(size, exchanged, sizes, width, dtype, tmp_path, seed)
        for at, rows in enumerate(sizes):
            parts, residual, weight = drawn(seed + at, size, rows, width, dtype)
            check_exact([rank[at] for rank in found], parts, residual, weight)
            assert torch.equal(found[0][at][1], add_parts(parts, residual, weight, EPS)[1])


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 256), (torch.float32, 8192)])
def test_every_number_of_rows_gives_what_nccl_gives(gpus: Ranks, dtype: torch.dtype, width: int) -> None:
    for size in SIZES:
        most = MAX_ROWS // size
        sizes = [*range(1, 300), *range(300, most, 97), most, 1, 2, 1]
        assert gpus.run(size, differences, sizes, width, dtype, 3) == [(0, 0)] * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_graphs_replay_among_other_exchanges(gpus: Ranks, dtype: torch.dtype) -> None:
    for size in SIZES:
        found = gpus.run(size, replayed, (1, 7, 64, 600), 4096, dtype, 400, 5)
        assert [wrong for wrong, _ in found] == [0] * size
        assert len({made for _, made in found}) == 1
        assert found[0][1] > 1200


def test_who_waits_for_ever_ends_with_its_process(tmp_path: Path) -> None:
    if not SIZES:
        pytest.skip("there is one GPU")
    ranks = Ranks((2,), tmp_path, "cuda")
    assert ranks.run(2, waiting) == ["waits", "is elsewhere"]
    ranks.close()  # which waits for the ends
    (tmp_path / "next").mkdir()
    other = Ranks((2,), tmp_path / "next", "cuda")
    assert other.run(2, differences, [1, 64], 256, torch.bfloat16, 1) == [(0, 0)] * 2
    other.close()
