"""The ranks' small all-reduce, fused with the addition and the norm behind it: as many rows as it is quicker for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine_core.distributed.peer_memory import DeviceMemory, SharedMemory
from penstock.kernels.exchange import Inboxes, empty_word, inbox_bytes

MOST_LINES = 4096  # of all ranks' rows in half of an inbox: a rank reads as many in an exchange
FEWEST_PROOFS = 4096  # bytes, in which the ranks prove that they reach the memory


class ExchangeStatistics(msgspec.Struct, frozen=True):
    """Rows that an exchange takes, those it has memory for, and the bytes of that on each rank."""

    rows: int
    room: int
    size: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """What every rank enqueues on one stream, all of them in the same order: the rest is `kernels/exchange_triton.py`.

    The memory stays as long as a launch or a graph may use it; a process that ends gives it back by ending.
    """

    inboxes: Inboxes
    memory: SharedMemory
    rows: int  # of the inboxes', that are taken

    def takes(self, partial: Tensor) -> bool:
        """Whether a partial sum `[tokens, width]` goes this way: every rank says the same."""
        tokens, width = partial.shape
        return 0 < tokens <= self.rows and width == self.inboxes.width and partial.dtype == self.inboxes.dtype

    def add(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of residual + all ranks' partial sums, and that sum, which is the next residual: `[tokens, width]`
        each, the same bits on every rank."""
        from penstock.kernels.exchange_triton import exchange_rows

        return exchange_rows(partial, residual, weight, eps, self.inboxes)

    def up_to(self, rows: int) -> Exchange:
        """The same for as many rows."""
        assert rows <= self.inboxes.rows
        return replace(self, rows=rows)

    def close(self) -> None:
        """Give the memory back, every rank at once, when none has anything enqueued."""
        self.memory.close()

    def statistics(self) -> ExchangeStatistics:
        return ExchangeStatistics(self.rows, self.inboxes.rows, self.memory.statistics().size)


def open_exchange(
    ranks: dist.ProcessGroup,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory,
    host: str = "",
) -> Exchange:
    """An exchange of rows of this width and type, every rank at once. Raises OSError on all of them with the reason
    when they cannot share memory."""
    count = dist.get_world_size(ranks)
    rows = MOST_LINES // count
    shared = SharedMemory(ranks, memory, max(FEWEST_PROOFS, inbox_bytes(count, rows, width, dtype)))
    try:
        shared.open(host)
        shared.fill(empty_pair(dtype))
    except OSError:
        shared.close()
        raise
    addresses = torch.tensor(shared.addresses, dtype=torch.int64, device=device)
    turns = torch.zeros(rows, dtype=torch.int32, device=device)
    return Exchange(Inboxes(addresses, turns, dist.get_rank(ranks), width, dtype), shared, rows)


def empty_pair(dtype: torch.dtype) -> int:
    """32 bits of empty words."""
    word = empty_word(dtype).to_bytes(dtype.itemsize, "little", signed=True)
    return int.from_bytes(word * (4 // dtype.itemsize), "little")
