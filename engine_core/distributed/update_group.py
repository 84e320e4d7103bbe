"""A trainer's process group, which executors join to receive weights by broadcast: NCCL for GPUs, gloo for CPUs.

It is made as SGLang makes its own, so that a trainer of SGLang's finds it: a TCPStore of number 0's, below it the
group's name. Source: SGLang, srt/utils/common.py (init_custom_process_group); torch, distributed/distributed_c10d.py.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

SECONDS = 120.0  # that a member waits for the others, when they meet and in a broadcast


class UpdateGroup:
    """One member's part in a trainer's group. Raises RuntimeError when the others do not come, in torch's words."""

    def __init__(self, name: str, address: str, port: int, rank: int, size: int, backend: str) -> None:
        wait = timedelta(seconds=SECONDS)
        store = TCPStore(address, port, size, is_master=False, timeout=wait)
        store.set_timeout(wait)
        self._group, _ = _new_process_group_helper(
            size, rank, [], dist.Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=wait
        )
        _world.pg_group_ranks[self._group] = {member: member for member in range(size)}

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor that number 0 broadcasts. Raises RuntimeError when it ends meanwhile."""
        found = torch.empty(shape, dtype=dtype, device=device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([found], options).wait()
        return found

    def leave(self) -> None:
        dist.destroy_process_group(self._group)
