"""Process groups of a life, with real processes over gloo: whom a rank sums with, who samples, what is left behind."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.protocol.config import Config, ExecutorConfig, ModelConfig, RunConfig
from penstock.protocol.groups import group_size, place
from penstock.services.executor.handshake import Generation
from penstock.services.executor.process_groups import begin, remove_others, store_file
from penstock.services.executor.rendezvous import free_port
from tests.services.executor.test_rendezvous import free_address

SECONDS = 120.0


def configured(run_dir: Path, ranks: int, stages: int, where: str = "") -> Config:
    return Config(
        model=ModelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        executor=ExecutorConfig(device="cpu", rendezvous=where),
        run=RunConfig(run_dir=str(run_dir)),
    )


def member(config: Config, index: int, life: Generation, link) -> None:
    torch.set_num_threads(1)
    group = begin(config, place(index, config.model), life, torch.device("cpu"))
    tokens = torch.tensor([index, index + 10], dtype=torch.int32)
    group.share(tokens)
    link.send((
        group.rank, group.stage, group.answers, group.sum(torch.tensor([1.0 + index])).tolist(),
        group.join(torch.tensor([[float(index)]]), group.size).tolist(), tokens.tolist(), group.least(index + 3),
        os.environ["NCCL_NVLS_ENABLE"],
    ))  # fmt: skip


@pytest.mark.parametrize(("ranks", "stages", "tcp"), [(2, 1, True), (2, 2, False)])
def test_members_of_a_life(tmp_path: Path, ranks: int, stages: int, tcp: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    where = free_address() if tcp else ""
    life = Generation("abc", int(free_address().rpartition(":")[2]) if tcp else 0)
    config = configured(tmp_path, ranks, stages, where)
    links, processes = [], []
    for index in range(group_size(config.model)):
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(config, index, life, theirs), daemon=True)
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


def test_lives_that_are_over_leave_nothing(tmp_path: Path) -> None:
    stores = [store_file(tmp_path, replica, Generation(name)) for replica in (0, 1) for name in ("old", "new")]
    for store in stores:
        store.touch()
    remove_others(stores[1])
    assert sorted(tmp_path.iterdir()) == sorted([stores[1], *stores[2:]])


def test_a_free_port_is_at_the_listeners_address() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert free_port(listener) not in (0, listener.getsockname()[1])
    assert msgspec.json.decode(msgspec.json.encode(Generation("a", 7)), type=Generation) == Generation("a", 7)
