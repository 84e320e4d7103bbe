"""What the sampler reads: tables with a line per slot, and the entries of one step.

They stay at one place on the device while the executor lives, so that a step, and a graph that was captured of it,
needs nothing but slot numbers. The last slot is scratch: entries that pad a step stand there, and it uses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# What a slot's request uses, as bits of `SlotSampling.uses`.
DRAWS = 1  # it is not greedy
TOP_K = 2
TOP_P = 4
PENALTIES = 8
EDITS = 16
WORDS = 32
ALLOWED = 64
PROCESSED = 128  # its log-probabilities are those of the distribution that is left when all of this was done
ADJUSTED = PENALTIES | EDITS | WORDS | ALLOWED  # its logits are changed before the choice

WORD_END = -1  # in `SlotSampling.words`, behind a word's first token
NO_MASK = -1
NO_DRAFT = -1
REJECTED = -2  # the token of an entry behind a draft that was not drawn; as in protocol/steps.py
OWN_DRAFT = -3  # a draft that stands behind its slot's known tokens; as in protocol/steps.py


@dataclass(frozen=True)
class SlotSampling:
    """How each slot's request is sampled."""

    uses: Tensor  # int32 [slots], bits
    temperature: Tensor  # float32 [slots]
    min_p: Tensor  # float32 [slots], 0 keeps all
    top_p: Tensor  # float32 [slots]
    repetition: Tensor  # float32 [slots]
    presence: Tensor  # float32 [slots]
    frequency: Tensor  # float32 [slots]
    seed: Tensor  # int64 [slots], 64 bits
    top_k: Tensor  # int32 [slots], 0 keeps all
    prompt_tokens: Tensor  # int32 [slots]
    logprobs: Tensor  # int32 [slots], how many of the best are wanted, -1 none and not the chosen one's either
    edit_counts: Tensor  # int32 [slots]
    edit_tokens: Tensor  # int32 [slots, most edits], each token at most once
    edit_until: Tensor  # int32 [slots, most edits]
    edit_early: Tensor  # float32 [slots, most edits], added to the logit at positions below `edit_until`
    edit_late: Tensor  # float32 [slots, most edits], added from there on
    word_counts: Tensor  # int32 [slots]
    words: Tensor  # int32 [slots, most words, longest], each word backwards, its last token first, then WORD_END
    masks: Tensor  # int32 [places + slots, ceil(vocabulary / 32)], bit i of word w allows token 32 * w + i
    own_masks: int  # the line of `masks` that holds the allowed tokens of slot 0; those before it are grammars'


@dataclass(frozen=True)
class SlotHistory:
    """What the slots have seen; `accept` keeps it current."""

    tokens: Tensor  # int32 [slots, row length]
    known: Tensor  # int32 [slots], how many tokens each has
    counts: Tensor  # int32 [slots, vocabulary]: twice the times in the output, plus one if in the prompt


@dataclass(frozen=True)
class Entries:
    """What one step samples: for each of its rows the token behind the last known one, then one behind each draft.

    An entry's token is drawn as if the drafts before it stood in the sequence; its position is known + depth. Rows that
    pad a step have no entries, or entries of the scratch slot.
    """

    start: Tensor  # int32 [sampling rows + 1], first entry of each row
    slots: Tensor  # int32 [entries]
    depth: Tensor  # int32 [entries], drafts of the row before it
    drafts: Tensor  # int32 [entries], the draft that follows it, NO_DRAFT where none does, OWN_DRAFT see kernels/drafts
    masks: Tensor  # int32 [entries], line of `SlotSampling.masks`, NO_MASK without one


@dataclass(frozen=True)
class Chosen:
    """What sampling gives."""

    tokens: Tensor  # int32 [entries], -1 where there is none
    adjusted: Tensor | None  # float32 [entries, vocabulary], logits of the entries that change theirs; None: nobody


def threshold(rate: float) -> int:
    """How many of the 2**32 words stand for a chance."""
    return round(rate * 2**32)
