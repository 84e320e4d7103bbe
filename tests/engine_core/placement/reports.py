"""What replicas say of themselves, and the chains of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from penstock.engine_core.kv.prefix_index import extend, root
from penstock.protocol.control import EngineStatus

BLOCK = 16


def report(
    replica: int = 0, *, ready: bool = True, draining: bool = False, running: int = 0, waiting: int = 0,
    blocks: int = 64,
) -> EngineStatus:  # fmt: skip
    """A heartbeat."""
    return EngineStatus(
        time=1.0, epoch=1, ready=ready, step=1, step_age=0.0, running=running, waiting=waiting, blocks=blocks,
        blocks_free=blocks, blocks_idle=0, block_size=BLOCK, max_model_len=4096, max_num_seqs=16, device="cpu",
        dtype="float32", prompt_tokens=0, cached_tokens=0, output_tokens=0, finished=0, aborted=0, failed=0,
        preemptions=0, drain_rate=0.0, draining=draining, replica=replica,
    )  # fmt: skip


def chain(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Identities of the full blocks of a prompt."""
    found: list[bytes] = []
    extend(found, root(salt), array("i", tokens), len(tokens) // BLOCK, BLOCK)
    return found
