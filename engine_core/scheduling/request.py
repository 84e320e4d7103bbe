"""A request and its sequences, as the scheduler keeps them. The scheduler alone owns their tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.speculation.drafter import Drafter
from penstock.protocol.messages import Adapter, Finish, KVTransfer, Sampling, SubmitTokens
from penstock.protocol.outputs import Logprobs

Rank = tuple[int, int, int]  # -priority (0 under fcfs), order of arrival, sequence: smaller goes first


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a sequence's prompt, collected chunk by chunk."""

    positions: int = 0  # whose logprobs have come
    delivered: bool = False
    parts: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request. It has a slot while it runs; `life` numbers its stay there."""

    request: Request
    index: int
    rank: Rank
    tokens: array[int]  # prompt, then output
    block_hashes: list[bytes]  # of its full blocks, as far as they were needed
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    life: int = 0
    borrowed: int = 0  # leading blocks that came from the prefix cache when it entered its slot
    cached: int = 0  # leading blocks that are in the prefix index
    last_step: int = 0  # last planned step of its former stays in slots
    weights: str | None = None  # version that its last token came from; None: it has none; empty: from an earlier life
    ended: bool = False
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    waits_for: tuple[Sequence, int, int] | None = None  # (sequence, its life, blocks): a prefix that is being computed
    guide: Guide | None = None  # has taken every token of the output
    drafter: Drafter | None = None
    device_drafts: list[int] | None = None  # the drafts behind its tokens, where their ids come with a result
    drafted: tuple[int, int] | None = None  # drafts accepted and rejected; None: it has had none
    deaths: tuple[int, int] = 0, 0  # of executors while it made no progress, and its tokens at the last one

    @property
    def limit(self) -> int:
        """Most tokens that it can have here, prompt included."""
        message, limit = self.request.message, self.request.limit
        if not message.prefill:
            return limit
        before = len(message.written[self.index].token_ids) // 4 if message.written else 0
        return min(limit, self.request.prompt_tokens + before + 1)

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def began(self) -> bool:
        """Whether its first token was delivered."""
        return self.weights is not None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are missing: then no position may come from the prefix cache."""
        request = self.request
        missing = self.prompt_logprobs.positions < request.prompt_tokens - 1
        return self.index == 0 and request.needs_prompt_logprobs and missing

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether every position must be computed, so that none may come from the prefix cache."""
        pooling = self.request.message.pooling
        return self.needs_prompt_logprobs or (pooling is not None and pooling.whole)


@dataclass(slots=True, eq=False)
class Request:
    """What all sequences have in common."""

    message: SubmitTokens
    source: int
    order: int  # of arrival
    prompt_tokens: int
    limit: int  # most tokens of a sequence, prompt included; one more than the prompt's where it pools
    root: bytes | None  # what its block hashes begin from; None: its blocks are not cached
    stop_token_ids: frozenset[int]  # token ids that end a sequence
    guide: Guide | None = None  # before any output, of which each of several sequences has a copy; a single one has it
    since: float = 0.0  # when it came, on the caller's clock
    sequences: dict[int, Sequence] = field(default_factory=dict)  # those alive and begun
    spawned: int = 0  # sequences 0..spawned-1 exist or have ended; the others wait for sequence 0's prompt
    cached: int = 0  # prompt tokens that came from the prefix cache
    transfer: KVTransfer | None = None  # blocks of it at a prefill replica, until they have been fetched
    prefilled: Sequence | None = None  # the last of its sequences that goes on at another replica
    traced: bool = False  # its history is recorded

    @property
    def pools(self) -> bool:
        """Whether it asks for a vector: its one sequence ends with its prompt."""
        return self.message.pooling is not None

    @property
    def adapter(self) -> Adapter | None:
        return self.message.adapter

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.message.sampling.prompt_logprobs >= 0


def stop_token_ids(sampling: Sampling, vocab_size: int) -> frozenset[int]:
    """Ids that end a sequence; those outside the vocabulary can never be sampled and are left out."""
    ids = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids + sampling.eos_token_ids
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def finish_reason(sequence: Sequence, token: int, length: int) -> Finish:
    """Whether `token` ends a sequence that has `length` tokens with it. A stop token goes before the length."""
    request = sequence.request
    if token in request.stop_token_ids and length - request.prompt_tokens >= request.message.sampling.min_tokens:
        return Finish.STOP
    if length >= request.limit:
        return Finish.LENGTH
    return Finish.PREFILLED if length >= sequence.limit else Finish.NONE
