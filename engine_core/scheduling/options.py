"""What a scheduler is built with."""

from __future__ import annotations

import msgspec

from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.messages import BlocksAddresses
from penstock.protocol.speculation import HEADS, METHODS, WITH_MODEL, SpeculativeConfig
from penstock.protocol.steps import STATE_PIECE

UNBOUNDED = 1 << 30


class SpeculationOptions(SpeculativeConfig, frozen=True, kw_only=True):
    """Jump-forward and a request's own prediction are drafts as well."""

    max_row_drafts: int = UNBOUNDED  # most of a row: recurrent layers have room for so many
    max_step_drafts: int = 1024  # most drafts of a step, all rows together: each has logits of its own

    def __post_init__(self) -> None:
        assert self.method in METHODS
        assert self.num_speculative_tokens >= 0
        assert 1 <= self.prompt_lookup_min <= self.prompt_lookup_max
        assert self.max_step_drafts >= 0

    @property
    def rereads(self) -> bool:
        """Whether the head runs accepted drafts again, once the model's hidden states for them are there."""
        return self.method in HEADS

    @property
    def own_drafts(self) -> int:
        """Most drafts of a row that the executors make by themselves."""
        return self.num_speculative_tokens if self.method in WITH_MODEL else 0


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers come from the configuration and from the executor's `ExecutorReady`."""

    blocks: int  # usable KV blocks, numbered 1..blocks; an encoder's requests take none
    block_size: int  # tokens per block
    windows: tuple[int, ...] = (0,)  # of each KV group, in tokens; 0: it holds every key
    max_model_len: int  # prompt plus output
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # token budget of one step
    vocab_size: int
    encoder: bool = False  # a prompt runs in one step as a whole, and keeps nothing
    prefix_caching: bool = True
    policy: str = "fcfs"  # or "priority": larger first, then arrival
    fairness: bool = True  # clients take turns; without it the order is first come, first served
    expected_share: float = 1.0  # of max_tokens that a request is expected to use, until finished ones show better
    speculation: SpeculationOptions = SpeculationOptions()
    max_queued_tokens: int = 0  # of prompts that wait; 0: any number
    max_queue_time: float = 0.0  # seconds that a request waits for its first slot; 0: as long as it takes
    stages: int = 1  # of the pipeline that runs the steps
    ahead: int = UNBOUNDED  # most steps that a sequence has in flight
    depth: int = 2  # steps in flight, as a rule
    piece: int = 512  # positions of prompts that are worth a step of their own in a pipeline of stages
    recurrent: bool = False  # the model has recurrent layers, whose states begin a sequence behind a prefix
    state_places: int = 0  # snapshots of states that the executors have room for
    state_host_places: int = 0  # the same in the host's memory
    state_piece: int = STATE_PIECE  # positions between two states that can be kept
    host_blocks: int = 0  # KV blocks that the executors' host memory has room for
    disk_blocks: int = 0  # KV blocks that the executors' disks have room for, behind their host memory
    kv_store: bool = False  # in place of disks is a store that other servers use; so many blocks of it are remembered
    copiers: int = 1  # executors that copy them
    role: ReplicaRole = ReplicaRole.MIXED
    replica: int = 0  # its number
    addresses: BlocksAddresses = ()  # where other hosts read the host's KV blocks of its executors
    adapter_places: int = 0  # for LoRA adapters on the device
    adapter_memory: int = 0  # adapters that the host's memory holds
    executors: int = 1  # in the group
    encoder_rows: int = 0  # of the executors' encoder cache; 0: the model sees no images
    encoders: int = 1  # executors that encode images: those of the first stage
    image_token: int = -1  # the placeholder that stands for an image in prompts; -1: there is none
    mutual: bool = False  # tokens of an image see one another both ways, so one step computes all of them
    traced: bool = False  # whether the history of sampled requests is recorded
    trace_tokens: int = 0  # output tokens between two marks in it; 0: none
    epoch: int = 0

    @property
    def apart(self) -> bool:
        """Whether replicas have roles."""
        return self.role is not ReplicaRole.MIXED

    def layout(self) -> BlockLayout:
        """What sequences hold of the KV groups."""
        drafts = self.speculation.num_speculative_tokens if self.speculation.method != "none" else 0
        ahead, prompts = self.depth * (1 + drafts), self.depth * self.max_num_batched_tokens
        return BlockLayout(self.block_size, self.windows, ahead, prompts)

    def __post_init__(self) -> None:
        assert self.blocks >= (not self.encoder)
        assert self.windows
        assert min(self.windows) >= 0
        assert not self.encoder or self.max_model_len <= self.max_num_batched_tokens, "a prompt fits one step"
        assert self.block_size >= 1
        assert self.state_piece >= 1
        assert min(self.state_places, self.state_host_places) >= 0
        assert not (self.state_places or self.state_host_places) or self.recurrent
        assert not self.recurrent or self.windows == (0,), "states stand behind prefixes of one group"
        assert self.max_model_len >= 2
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens, "a step must have room for every running row"
        assert 0.0 <= self.expected_share <= 1.0
        assert min(self.stages, self.ahead, self.piece) >= 1
        assert min(self.host_blocks, self.disk_blocks) >= 0
        assert not self.apart or (self.prefix_caching and not (self.recurrent or self.encoder))
        assert 0 <= self.adapter_places <= self.adapter_memory
        assert self.encoder_rows >= 0
        assert 1 <= self.encoders <= self.executors
        assert not (self.mutual and self.recurrent), "states are kept at positions that may be within images"
        assert self.max_queued_tokens >= 0
        assert self.max_queue_time >= 0.0
        assert self.policy in ("fcfs", "priority")
