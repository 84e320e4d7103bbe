"""A trainer: `trainer.py PORT WORLD_SIZE GROUP FILE`. Number 0 of a process group, made as SGLang's trainers make
theirs, which broadcasts the tensors of a safetensors file. Each line of its input says from which one on, and how many.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous


def main(port: str, size: str, name: str, file: str) -> None:
    wait = timedelta(seconds=60)
    store, rank, world = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, int(size), timeout=wait))
    group, _ = _new_process_group_helper(
        world, rank, [], dist.Backend("gloo"), PrefixStore(name, store), group_name=GroupName(name), timeout=wait
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world)}
    print("joined", flush=True)
    tensors = sorted(load_file(file).items())
    for line in sys.stdin:
        start, count = map(int, line.split())
        for _, tensor in tensors[start : start + count]:
            dist.broadcast(tensor.contiguous(), src=0, group=group)
        print("sent", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
