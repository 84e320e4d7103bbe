"""Dummy steps over the scratch slot and the scratch block, for warm-up and measurement. They touch no request."""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.engine_core.execution.input_batch import SlotSizes
from penstock.engine_core.models.memory_estimate import image_sizes
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.step_columns import chunk_table
from penstock.protocol.steps import SlotStart, StepPlan

WARMUP_TOKENS = 8
FAR = 1024  # a context whose keys are split over several programs
SHORT = (2, 4, 8, 16, 32)  # tokens of short rows: the heads that share keys decide the height of their tiles
LATE = (1, 8, 32)  # rows whose keys are cut into the most splits, by the number of key-value heads
LITTLE = 128  # tokens of a chunk whose tiles are too few for a GPU, and so are smaller ones
FEW = 4  # single tokens beside a chunk of an image
BESIDE = (1, 11)  # rows of one token beside a chunk: few, and more; a third number is all slots


def dummy_step(sizes: SlotSizes, counts: list[int], sampling: Sampling, first: int = 0) -> StepPlan:
    """A step of one sampled chunk per count, all of the scratch slot, from position `first` on."""
    longest = first + max(counts)
    start = SlotStart(
        slot=sizes.max_num_seqs,
        token_ids=bytes(4 * longest),
        prompt_tokens=longest,
        computed=0,
        blocks=bytes(4 * sizes.groups * -(-longest // sizes.block_size)),  # block 0, as often as needed
        sampling=sampling,
        seed=0,
    )
    chunks = np.array([(sizes.max_num_seqs, first, count, 1) for count in counts], "<i4")
    return StepPlan(step=0, epoch=0, starts=(start,), chunks=chunks.tobytes())


def with_drafting(plan: StepPlan, drafts: int) -> StepPlan:
    """The same dummy step, followed by so many drafts for each of its chunks."""
    slots, starts, counts, _ = chunk_table(plan.chunks).T
    rows = np.stack((slots, starts, counts, np.full_like(slots, drafts), np.zeros_like(slots)), axis=1)
    return msgspec.structs.replace(plan, drafting=rows.tobytes())


def with_adapter(plan: StepPlan) -> StepPlan:
    """The same dummy step, whose slot reads the first place."""
    starts = tuple(msgspec.structs.replace(start, adapter=1) for start in plan.starts)
    return msgspec.structs.replace(plan, starts=starts)


def with_image(plan: StepPlan, vision: VisionSpec) -> StepPlan:
    """The same dummy step, whose prompt begins with the smallest image as far as the first chunk reaches; its rows are
    the first of the encoder cache."""
    size = image_sizes(vision)[0]
    (start,), count = plan.starts, int(chunk_table(plan.chunks)[0, 2])
    rows = min(vision.rows(size), count)
    tokens = np.full(rows, vision.token_id, "<i4").tobytes() + start.token_ids[4 * rows :]
    images = np.array((0, rows, 0, size.width, size.height), "<i4").tobytes()
    return msgspec.structs.replace(plan, starts=(msgspec.structs.replace(start, token_ids=tokens, images=images),))


def image_steps(sizes: SlotSizes, vision: VisionSpec, longest: int) -> list[StepPlan]:
    """Chunks of images, up to one of `longest` tokens, and one beside single tokens."""
    greedy, length = Sampling(temperature=0.0), sizes.max_model_len
    counts = sorted({min(count, longest, length) for count in (WARMUP_TOKENS, LITTLE, longest)})
    plans = [dummy_step(sizes, [count], greedy) for count in counts]
    plans.append(dummy_step(sizes, [min(longest // 2, length), *[1] * min(FEW, sizes.max_num_seqs - 1)], greedy))
    return [with_image(plan, vision) for plan in plans]


def warmup_steps(sizes: SlotSizes, longest: int) -> list[StepPlan]:
    """A small prompt and a token, sampled with every filter; a chunk of `longest` tokens; single tokens at the end and
    at the beginning of a sequence, the last of which leaves the scratch slot with plain sampling parameters.

    On a GPU each takes another form of attention, which is compiled here rather than during a request.
    """
    drawn = Sampling(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01)
    mixed = dummy_step(sizes, [min(WARMUP_TOKENS, sizes.max_model_len), 1], drawn)
    long = dummy_step(sizes, [min(longest, sizes.max_model_len)], drawn)
    late = min(FAR, sizes.max_model_len) - 1
    return [mixed, long, dummy_step(sizes, [1], drawn, late), dummy_step(sizes, [1], Sampling(temperature=0.0))]


def mixed_steps(sizes: SlotSizes, longest: int) -> list[StepPlan]:
    """Mixed steps of at most `longest` tokens, as under load: many short chunks, a chunk beside single tokens.

    They serve compilation alone: attention takes forms for them that no CUDA graph holds.
    """
    greedy = Sampling(temperature=0.0)
    slots, length = sizes.max_num_seqs, sizes.max_model_len
    short = [[count] * min(slots, longest // count) for count in SHORT if count <= min(longest, length)]
    chunk = min(longest // 2, length)
    beside = sorted({min(tokens, slots - 1, longest - chunk) for tokens in (*BESIDE, slots)})
    mixed = [dummy_step(sizes, counts, greedy) for counts in (*short, *([chunk] + [1] * tokens for tokens in beside))]
    return [little_chunk(sizes, longest), *mixed]


def little_chunk(sizes: SlotSizes, longest: int) -> StepPlan:
    """A step of at most `longest` tokens in one chunk, too short for tiles of all processors. Latents are expanded for
    it in as much memory as for any."""
    return dummy_step(sizes, [min(LITTLE, longest, sizes.max_model_len)], Sampling(temperature=0.0))


def long_context_steps(sizes: SlotSizes) -> list[StepPlan]:
    """Few single tokens at the end of the longest sequence: attention splits their keys, and the partial results take
    memory that no step of chunks takes."""
    rows = sorted({min(count, sizes.max_num_seqs) for count in LATE})
    return [dummy_step(sizes, [1] * count, Sampling(temperature=0.0), sizes.max_model_len - 1) for count in rows]


def encoder_steps(sizes: SlotSizes, tokens: int, *, classifies: bool) -> list[StepPlan]:
    """Steps of a model that samples nothing: the largest, of at most `tokens`, and one whose prompt is pooled, in each
    way that the model has."""
    greedy, length = Sampling(temperature=0.0), sizes.max_model_len
    counts = [length] * min(tokens // length, sizes.max_num_seqs)
    if len(counts) < sizes.max_num_seqs and tokens % length:
        counts.append(tokens % length)
    plans = [silent(dummy_step(sizes, counts, greedy))]
    for classify in (False, True)[: 1 + classifies]:
        plan = silent(dummy_step(sizes, [min(WARMUP_TOKENS, length)], greedy))
        pooling = Pooling(kind="mean", classify=classify, second=1)
        starts = tuple(msgspec.structs.replace(start, pooling=pooling) for start in plan.starts)
        plans.append(msgspec.structs.replace(plan, starts=starts))
    return plans


def silent(plan: StepPlan) -> StepPlan:
    """The same without samples."""
    chunks = chunk_table(plan.chunks).copy()
    chunks[:, 3] = 0
    return msgspec.structs.replace(plan, chunks=chunks.tobytes())


def largest_step(sizes: SlotSizes, tokens: int) -> StepPlan:
    """The step that needs the most memory: `tokens` positions in chunks as long as can be, every slot sampling."""
    counts = []
    for left in range(sizes.max_num_seqs - 1, -1, -1):
        count = min(sizes.max_model_len, tokens - left)
        if count < 1:
            break
        counts.append(count)
        tokens -= count
    return dummy_step(sizes, counts, Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=0))
