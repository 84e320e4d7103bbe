"""Process groups of a generation, with real processes that meet and talk over gloo: whom a rank sums with, who samples,
what is left behind."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from penstock.protocol.config import Config, LinksConfig, RunConfig
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.groups import group_size, place
from penstock.services.executor.process_groups import begin
from penstock.services.executor.rendezvous import rendezvous
from penstock.services.links.curve import new_keys, write_keys
from penstock.services.supervisor.process import Stop
from tests.services.executor.test_rendezvous import free_address

SECONDS = 120.0


def configured(run_dir: Path, ranks: int, stages: int, where: str = "") -> Config:
    return Config(
        model=ModelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        executor=ExecutorConfig(device="cpu", rendezvous=where),
        links=LinksConfig(link_keys=str(run_dir / "link.keys")),
        run=RunConfig(run_dir=str(run_dir)),
    )


def member(config: Config, index: int, link) -> None:
    torch.set_num_threads(1)
    where = place(index, config.model)
    generation = rendezvous(config, where).meet(Stop())
    assert generation is not None
    group = begin(config, where, generation, torch.device("cpu"))
    tokens = torch.tensor([index, index + 10], dtype=torch.int32)
    group.broadcast(tokens)
    link.send((
        group.rank, group.stage, group.answers, group.all_reduce(torch.tensor([1.0 + index])).tolist(),
        group.all_gather(torch.tensor([[float(index)]]), group.size).tolist(), tokens.tolist(),
        group.all_min(index + 3),
        os.environ["NCCL_NVLS_ENABLE"],
    ))  # fmt: skip


@pytest.mark.parametrize(("ranks", "stages", "tcp"), [(2, 1, True), (2, 2, False)])
def test_members_of_a_generation(tmp_path: Path, ranks: int, stages: int, tcp: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    write_keys(tmp_path / "link.keys", new_keys())
    config = configured(tmp_path, ranks, stages, free_address() if tcp else "")
    links, processes = [], []
    for index in range(group_size(config.model)):
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(config, index, theirs), daemon=True)
        process.start()
        links.append(ours)
        processes.append(process)
    try:
        assert all(link.poll(SECONDS) for link in links)
        found = [link.recv() for link in links]
    finally:
        for process in processes:
            process.kill()
            process.join()
    answering = (stages - 1) * ranks
    firsts = [stage * ranks for stage in range(stages)]
    for index, (rank, stage, answers, total, joined, tokens, least, multicast) in enumerate(found):
        assert (rank, stage, answers) == (index % ranks, index // ranks, index == answering)
        mine = [stage * ranks + at for at in range(ranks)]
        assert total == [sum(1.0 + at for at in mine)]
        assert joined == [[float(at) for at in mine]]
        assert tokens == [firsts[stage], firsts[stage] + 10]
        assert least == 3
        assert multicast == "0"
