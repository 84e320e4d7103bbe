"""What a scheduler is built with."""

from __future__ import annotations

import msgspec

from penstock.engine_core.speculation.options import SpeculationOptions

UNBOUNDED = 1 << 30


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers come from the configuration and from the executor's `ExecutorReady`."""

    blocks: int  # usable KV blocks, numbered 1..blocks
    block_size: int  # tokens per block
    max_model_len: int  # prompt plus output
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # token budget of one step
    vocab_size: int
    prefix_caching: bool = True
    policy: str = "fcfs"  # or "priority": larger first, then arrival
    fairness: bool = True  # clients take turns; without it sequences go as they come
    expected_share: float = 1.0  # of a request's max_tokens that it is expected to use, until ends teach better
    speculation: SpeculationOptions = SpeculationOptions()
    max_queued_tokens: int = 0  # of prompts that wait; 0: any number
    max_queue_time: float = 0.0  # seconds that a request waits for its first slot; 0: as long as it takes
    stages: int = 1  # of the pipeline that runs the steps
    ahead: int = UNBOUNDED  # steps that a sequence has in flight, at most, where the caller plans so many
    piece: int = 512  # positions of prompts that are worth a step of their own where there are several stages
    traced: bool = False  # whether the history of sampled requests is told
    trace_tokens: int = 0  # output tokens between two marks in it; 0: none
    epoch: int = 0

    def __post_init__(self) -> None:
        assert self.blocks >= 1
        assert self.block_size >= 1
        assert self.max_model_len >= 2
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens, "a step must have room for every running row"
        assert 0.0 <= self.expected_share <= 1.0
        assert min(self.stages, self.ahead, self.piece) >= 1
        assert self.max_queued_tokens >= 0
        assert self.max_queue_time >= 0.0
        assert self.policy in ("fcfs", "priority")
