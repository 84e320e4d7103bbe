"""What speculation is built with."""

from __future__ import annotations

import msgspec

DRAFTED = ("draft_model", "eagle")  # methods of the executors


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a grammar forces or makes likely and a request's own prediction are drafts whatever the method is."""

    method: str = "none"  # or "ngram": prompt lookup, or one of DRAFTED
    num_speculative_tokens: int = 4  # most drafts of a row that nothing forces
    prompt_lookup_max: int = 4  # longest run of tokens that is looked up; it shrinks to the shortest
    prompt_lookup_min: int = 2
    adaptive: bool = True  # as many drafts as pay by measured step times, else always as many as there may be
    max_step_drafts: int = 1024  # most drafts of a step, all rows together: each has logits of its own

    def __post_init__(self) -> None:
        assert self.method in ("none", "ngram", *DRAFTED)
        assert self.num_speculative_tokens >= 0
        assert 1 <= self.prompt_lookup_min <= self.prompt_lookup_max
        assert self.max_step_drafts >= 0

    @property
    def rereads(self) -> bool:
        """Whether what drafts from the model's states goes over its accepted drafts again, once they are there."""
        return self.method == "eagle"

    @property
    def own_drafts(self) -> int:
        """Most drafts of a row that the executors make by themselves."""
        return self.num_speculative_tokens if self.method in DRAFTED else 0
