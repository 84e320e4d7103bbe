"""The executors of one replica, as one of them sees the others: ranks that share every layer, stages that share layers.

What ranks exchange goes over torch.distributed: NCCL between GPUs, where every operation is enqueued on the current
stream and may stand in a graph, gloo between CPUs. A group of one is the same object and exchanges nothing, so neither
the model nor the sampler knows how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine_core.distributed.custom_all_reduce import Exchange


@dataclass(frozen=True)
class Group:
    """One executor's view of its group. Members are numbered stage by stage, rank by rank.

    Every member calls the same methods in the same order. Without process groups nothing is exchanged, which suits a
    group of one and tests of a single member.
    """

    rank: int = 0  # in this stage
    size: int = 1  # ranks of this stage
    stage: int = 0
    stages: int = 1
    ranks: dist.ProcessGroup | None = None  # of this stage; None: one rank
    members: dist.ProcessGroup | None = None  # of all stages; None: a group of one
    forwards: dist.ProcessGroup | None = None  # of this rank in every stage, for hidden states; None: one stage
    backwards: dist.ProcessGroup | None = None  # of the same members, for tokens: neither waits for the other
    invariant: bool = False  # sums are made in the order of ranks, whatever the batch
    exchange: Exchange | None = None  # for small sums and the norm behind them, where there is one

    @cached_property
    def answers(self) -> bool:
        """Whether this is the member that samples for all and answers the scheduler: the last stage's first rank."""
        return self.rank == 0 and self.ends

    @property
    def several(self) -> bool:
        """Whether there are other members."""
        return self.size * self.stages > 1

    @cached_property
    def begins(self) -> bool:
        """Whether this stage has the embedding."""
        return self.stage == 0

    @cached_property
    def ends(self) -> bool:
        """Whether this stage has the output embedding."""
        return self.stage == self.stages - 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The ranks' partial sums added up, the same bits on each of them. `partial` may be overwritten."""
        if self.ranks is None:
            return partial
        partial = partial.contiguous()
        if not self.invariant:
            dist.all_reduce(partial, group=self.ranks)
            return partial
        parts = self._gather(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def all_gather(self, columns: Tensor, width: int) -> Tensor:
        """Every rank's `[rows, share]` side by side: `[rows, width]`, without the padding of the last shares."""
        if self.ranks is None:
            return columns
        parts = self._gather(columns.contiguous())  # [ranks, rows, share]
        share = columns.shape[1]
        return torch.cat([part[:, : width - at * share] for at, part in enumerate(parts) if at * share < width], dim=1)

    def shard(self, rows: Tensor) -> Tensor:
        """This rank's columns of a tensor that every rank has, `[.., width]`, as a copy; `all_gather` is the
        inverse."""
        share = -(-rows.shape[-1] // self.size)
        own = rows[..., self.rank * share : (self.rank + 1) * share]
        lacking = share - own.shape[-1]
        return pad(own, (0, lacking)) if lacking else own.clone(memory_format=torch.contiguous_format)

    def broadcast(self, values: Tensor, rank: int = 0) -> None:
        """Give every rank of this stage what one of them has, in place: tokens that the first one sampled, rows of an
        image. Contiguous, of any shape."""
        if self.ranks is not None:
            dist.broadcast(values, src=self.stage * self.size + rank, group=self.ranks)

    def send(self, stream: Tensor) -> dist.Work:
        """Enqueue a send to this rank of the next stage. The tensor must live until it has arrived."""
        return self._sent(dist.isend(stream, self._member(self.stage + 1), group=self.forwards))

    def recv(self, stream: Tensor) -> dist.Work:
        """Enqueue a receive from this rank of the stage before, into `stream`."""
        return self._sent(dist.irecv(stream, self._member(self.stage - 1), group=self.forwards))

    def broadcast_tokens(self, tokens: Tensor) -> dist.Work:
        """Enqueue a broadcast of the last stage's tokens to every stage, rank by rank: int32 [entries]."""
        return self._sent(
            dist.broadcast(tokens, src=self._member(self.stages - 1), group=self.backwards, async_op=True)
        )

    def all_min(self, number: int) -> int:
        """The least number of all members, on the host: for choices that must be the same everywhere."""
        if self.members is None:
            return number
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.members)
        return int(found)

    def _member(self, stage: int) -> int:
        """Number of this rank's member of a stage."""
        return stage * self.size + self.rank

    def _sent(self, work: dist.Work | None) -> dist.Work:
        assert work is not None, "a member of the process group"
        return work

    def _gather(self, own: Tensor) -> Tensor:
        """Every rank's tensor, stacked in the order of ranks: `[ranks, *own.shape]`."""
        parts = own.new_empty(self.size * len(own), *own.shape[1:])
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from 2.13 on, and before
        gather(parts, own, group=self.ranks)
        return parts.view(self.size, *own.shape)


ALONE = Group()
