"""Runs steps: takes a plan, enqueues its work on the device, and returns the result.

Nothing waits for the device, so step k+1 can be launched before the result of step k is read: input ids and positions
are gathered from the slots, where the previous step wrote its samples, and everything runs in stream order. A step has
two halves, the forward pass and the sampling; masks may arrive between them. Each half is a CUDA graph where one fits,
and eager otherwise. On a CPU the same code runs synchronously.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.adapter_slots import AdapterSlots
from penstock.engine_core.execution.compilation import compile_kernels, prewarm
from penstock.engine_core.execution.cuda_graphs import Graphs, GraphSizes
from penstock.engine_core.execution.draft_graphs import DraftGraphs
from penstock.engine_core.execution.draft_model import Draft, Drafting, DraftRows, attach, draft_rows
from penstock.engine_core.execution.dummy_runs import with_adapter, with_drafting
from penstock.engine_core.execution.encoder import Encoder
from penstock.engine_core.execution.forward import Forward, Network, Sampled, Sampler, kv_pages, stage_model
from penstock.engine_core.execution.image_slots import ImageSlots
from penstock.engine_core.execution.input_batch import (
    Column,
    HostRows,
    SlotSizes,
    SlotTable,
    StepInputs,
    entry_columns,
    entry_masks,
    input_columns,
    step_inputs,
    store_masks,
)
from penstock.engine_core.execution.long_rows import find_long_rows
from penstock.engine_core.execution.pipeline import Pipeline
from penstock.engine_core.execution.recurrent_state import StateSizes, recurrent_states
from penstock.engine_core.execution.step_output import (
    NO_TIMES,
    Launched,
    Output,
    Pools,
    PromptScores,
    Vectors,
    entry_logprobs,
    prompt_logprobs,
    prompt_scores,
    prompt_spans,
    step_times,
    told_drafts,
    vector_rows,
)
from penstock.engine_core.execution.transfer import Download, Upload
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.memory_estimate import image_sizes
from penstock.engine_core.models.sharding import rank_spec
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.records import Entries
from penstock.protocol.step_columns import shared_images
from penstock.protocol.steps import REJECTED, StepMasks, StepPlan, StepResult

FAILED = -1  # the token of non-finite logits
NOTHING = Output(None, None, ())


@dataclass(frozen=True)
class RunnerOptions:
    """The runner's device, sizes and group."""

    device: torch.device
    dtype: torch.dtype
    blocks: int  # usable KV blocks, numbered 1..blocks
    block_size: int
    max_model_len: int
    max_num_seqs: int
    graphs: GraphSizes | None = None  # None: every step is eager, as on a CPU
    synthetic_acceptance: float | None = None  # acceptance rate of drafts, for benchmarks: see kernels/sampling.py
    group: Group = ALONE
    step_tokens: int = 0  # most tokens of a step; required in a pipeline
    row_drafts: int = 0  # most drafts of a row; required where layers are recurrent
    state_places: int = 0  # snapshots of their states
    state_host_places: int = 0  # the same in the host's memory
    adapters: AdapterPlaces | None = None  # of the model's
    encoder: Encoder | None = None  # of images; required on the first stage of a model that sees them


@dataclass(frozen=True)
class Begun:
    """A step whose forward pass is enqueued."""

    plan: StepPlan
    rows: HostRows
    hidden: Tensor | None  # [tokens, hidden], perhaps padded; None: a step without rows
    last: Tensor | None  # int32 [entries], the tokens to sample from; None: a graph has gathered them
    prompts: tuple[PromptScores, ...]
    began: torch.cuda.Event | None
    vectors: Vectors | None = None  # of pooling prompts that end in this step
    computed: torch.cuda.Event | None = None  # end of the forward pass, in a step that waits for masks
    adapted: bool = False  # a row has an adapter


class RunnerStatistics(msgspec.Struct, frozen=True):
    """Totals since the start."""

    steps: int
    tokens: int  # positions computed
    sampled: int  # entries
    rejected: int  # of these, after a wrong draft
    failed: int  # of these, without a token


class Runner:
    """One executor's steps over one model, its slots and its KV pages, and a draft model over the same slots."""

    def __init__(self, model: Network, spec: ModelSpec, options: RunnerOptions, draft: Draft | None = None) -> None:
        self.options = options
        groups, length = len(spec.kv_windows), options.max_model_len
        sizes = SlotSizes(options.max_num_seqs, length, options.block_size, spec.vocab_size, groups)
        self._upload = Upload(options.device)
        self._download = None if options.device.type == "cpu" else Download(options.device)
        group = options.group
        self._slots = SlotTable(sizes, self._upload, group.stages)
        share = rank_spec(spec, group.size)
        slots, steps = options.max_num_seqs + 1, 1 + options.row_drafts
        states = StateSizes(slots, options.state_places, steps, options.state_host_places)
        self._states = recurrent_states(share, states, options.dtype, options.device)
        cache = kv_pages(share, options.blocks, options.block_size, options.dtype, options.device)
        history, sampling = self._slots.history, self._slots.parameters.sampling
        self._pipeline: Pipeline | None = None  # one stage exchanges nothing
        whole = model
        stage = stage_model(model, group, options.step_tokens, () if draft is None else draft.aux_layers)
        if stage is not None:
            self._pipeline = Pipeline(stage, group, self.sizes.scratch + 1, sampling, history, self._upload)
            model = stage
        if draft is not None and isinstance(draft.model, EagleHead):
            assert draft.model.target is whole, "a head drafts for its own model"
            model, head = attach(
                draft.model, stage or draft.model.target, options.blocks, options.block_size, history.known
            )
            draft = replace(draft, model=head)
        self._model = model
        adapters = options.adapters
        self.adapters = None if adapters is None else AdapterSlots(adapters, self.sizes.scratch + 1, self._upload)
        self._images: ImageSlots | None = None
        if spec.vision is not None:
            rows = None if options.encoder is None else options.encoder.cache
            self._images = ImageSlots(spec.vision, slots, self._upload, rows)
        self._forward = Forward(
            model, history, self._slots.group_tables, cache, self._states, self.adapters,
            None if self._images is None else self._images.rope_offsets,
        )  # fmt: skip
        rate = options.synthetic_acceptance
        self._sampler = Sampler(
            model, sampling, history, own_drafts=draft is not None, rate=rate, group=group, adapters=self.adapters
        )
        self._draft_tokens = 0 if draft is None else draft.tokens
        self._drafting: Drafting | None = None
        if draft is not None and draft.model is not None:
            self._drafting = Drafting(
                draft, self._slots, options.blocks, options.dtype, self._upload, options.graphs, group
            )
        self.graphs: Graphs | None = None
        if options.graphs is not None:
            entries = torch.zeros(max(options.graphs.entries), spec.hidden, dtype=options.dtype, device=options.device)
            self.graphs = Graphs(
                self._forward, self._sampler, options.graphs, entries, self.sizes.scratch, self._upload,
                samples=group.ends, images=self._images,
            )  # fmt: skip
        self._inputs: tuple[HostRows, StepInputs] | None = None  # of the last eager forward pass
        self._entries: tuple[HostRows, Entries] | None = None  # of the last eager sampling without masks
        self._pools = Pools(whole if isinstance(whole, Decoder) else None)
        self._draft_rows: tuple[bytes, DraftRows] | None = None  # of the last drafting
        self._last: Launched | None = None  # that was collected
        self._totals: Counter[str] = Counter(dict.fromkeys(RunnerStatistics.__struct_fields__, 0))

    @property
    def sizes(self) -> SlotSizes:
        return self._slots.sizes

    @property
    def mask_slots(self) -> int:
        return self._slots.parameters.sampling.own_masks

    @property
    def draft_graphs(self) -> DraftGraphs | None:
        return None if self._drafting is None else self._drafting.graphs

    @property
    def drafting_ended(self) -> torch.cuda.Event | None:
        """The end of the drafting behind the step that was collected last. None: there was none."""
        return None if self._last is None or self._last.drafted is None else self._last.drafted[1]

    def block_memory(self) -> list[Tensor]:
        """What blocks 0 .. blocks have in memory: [blocks + 1, ...] each, contiguous."""
        blocks = self.options.blocks
        own = [] if self._drafting is None else self._drafting.block_memory(blocks)
        return self._forward.block_memory(blocks) + own

    def graph_states(self) -> list[tuple[GraphSizes, int]]:
        """Sizes of the graphs of the model and of the draft model, each with its hidden size."""
        return [(graphs.sizes, graphs.states.shape[1]) for graphs in self._all_graphs()]

    def drafted(self, plans: Sequence[StepPlan]) -> list[StepPlan]:
        """Dummy steps, followed by drafting where there is a draft model; with an adapter first where there are
        places."""
        found = [with_drafting(plan, self._draft_tokens) if self._draft_tokens else plan for plan in plans]
        return found if self.adapters is None else [*map(with_adapter, found), *found]

    def reset(self) -> None:
        """Forget all requests. Steps still in flight end harmlessly."""
        if self._pipeline is not None:
            self._pipeline.settle()
        self._slots.reset()
        self._pools.reset()
        if self.adapters is not None:
            self.adapters.reset()
        if self._images is not None:
            self._images.reset()

    @torch.inference_mode()
    def compile(self, plans: Sequence[StepPlan], compilers: Executor | None = None, *, again: bool = False) -> None:
        """Prewarm: compile all that `plans` and the graphs launch, in parallel, with the help of worker processes if
        there are any; then run the graphs' work once, since libraries load kernels too. Plans touch scratch alone.
        again: graphs will be captured as steps need them, and run their work once then."""
        if self.options.device.type == "cpu":
            return
        while True:  # a kernel that gives way brings others
            with prewarm(compilers) as uncompiled:
                for plan in plans:
                    self.launch(plan)
                if (encoder := self.options.encoder) is not None:
                    for size in image_sizes(encoder.tower.spec):
                        encoder.dummy_run(size)
                for graphs in self._all_graphs():
                    graphs.dummy_run(graphs.order.prewarmed)
            if compile_kernels(uncompiled, self.options.device):
                break
        for graphs in self._all_graphs():
            graphs.dummy_run(graphs.order.largest if again else graphs.order.all)

    @torch.inference_mode()
    def prepare(self, *, largest: bool = False) -> None:
        """Capture all graphs, or only the largest, which decide the memory: others are captured when a step first needs
        them. All that they launch has been compiled, by this runner or by one over a layer of each kind: nothing may be
        loaded during a capture."""
        for graphs in self._all_graphs():
            for what in graphs.order.largest:
                graphs.capture(what, run=True)
            for what in () if largest else graphs.order.others:
                graphs.capture(what, run=False)

    def launch(self, plan: StepPlan) -> Launched:
        """Enqueue one step without masks. Plans are launched in order; a plan is trusted."""
        launched = self.finish(self.begin(plan), None)
        return launched if launched.drafts is None else self.draft(launched)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Begun:
        """Take over the plan's changes and enqueue its forward pass. `finish` must follow before the next `begin`."""
        began = self._mark()
        if self._pipeline is not None:
            self._pipeline.begin([start.slot for start in plan.starts])
        self._slots.apply(plan)
        if plan.adapters and self.adapters is not None:
            self.adapters.change(plan.adapters)
        if plan.starts:
            self._pools.start(plan.starts)
            if self.adapters is not None:
                self.adapters.start(plan.starts)
            if self._images is not None:
                self._images.start(plan.starts)
            if self._states is not None:
                self._states.start(plan.starts)
        if plan.images and self.options.encoder is not None:
            self.options.encoder.share(self.options.group, shared_images(plan.images))
        if self._states is not None and plan.keep:
            self._states.spill(plan.keep)
        rows = self._slots.rows(plan)
        self._totals["steps"] += 1
        self._totals["tokens"] += rows.tokens
        if not rows.rows:
            return Begun(plan, rows, None, None, (), began)
        if self._pipeline is not None:
            self._pipeline.receive(rows)
            began = self._mark()  # the step's own time, without the wait for other stages
        adapted = self.adapters is not None and self.adapters.serve(rows)
        images = None if self._images is None else self._images.step(rows)
        graphs, seeing = self.graphs, images is not None
        shape = None if graphs is None else graphs.forward.fitting(rows, adapted=adapted, seeing=seeing)
        last: Tensor | None = None
        if graphs is not None and shape is not None:
            hidden = graphs.forward.replay(rows, shape, images or ())
            if rows.entries > shape.entries:
                (last,) = self._upload.send((rows.last,))
        else:
            inputs = self._send_inputs(rows)
            types = self._pools.token_types(plan, rows) if plan.chunks else None
            sent = None if types is None else self._upload.send((types,))[0]
            latents = self._forward.latents
            hidden = self._forward.run(
                inputs.rows, rows.longest, self._slots.longest(rows), rows.rows - rows.decoding, sent,
                find_long_rows(rows.query_start, rows.starts, self._upload) if latents else None, adapted=adapted,
                images=None if images is None or self._images is None else self._images.send(images),
            )  # fmt: skip
            last = inputs.last
        if self._states is not None and plan.keep:
            self._states.keep(plan.keep, rows.slots[: rows.decoding])
        if self._pipeline is not None:
            self._pipeline.pass_on(rows)
        if not self.options.group.ends:
            return Begun(plan, rows, hidden, last, (), began)
        own = self.adapters if adapted else None
        spans = prompt_spans(plan, rows, self._slots) if plan.chunks else ()
        prompts = tuple(prompt_scores(self._model, hidden, span, self._slots, self._upload, own) for span in spans)
        vectors = self._pools.take(plan, rows, hidden, self._model, self._upload, own) if plan.chunks else None
        computed = self._mark() if plan.masked else None
        return Begun(plan, rows, hidden, last, prompts, began, vectors, computed, adapted)

    @torch.inference_mode()
    def finish(self, begun: Begun, masks: StepMasks | None) -> Launched:
        """Enqueue the sampling of a step, under its masks if it has any, and the download of its result. `draft` must
        follow before the next `begin`. Only the answering member of a group gets masks."""
        rows, plan = begun.rows, begun.plan
        halves = None
        if begun.computed is not None and (went_on := self._mark()) is not None:
            halves = begun.computed, went_on
        self._totals["sampled"] += rows.entries
        widths = None
        output = Output(None, None, begun.prompts, vectors=begun.vectors)
        if rows.entries and not self.options.group.ends:
            assert self._pipeline is not None
            self._pipeline.await_tokens(rows)
        elif rows.entries:
            wanted = self._slots.parameters.logprobs[rows.entry_slots]
            widths = wanted if self.options.group.answers and wanted.max() >= 0 else None
            placed = None if masks is None else self._place_masks(masks, rows.entries)
            sampled = self._sample(begun, placed, scored=widths is not None)
            tokens = sampled.tokens[: rows.entries]
            output = replace(output, tokens=tokens, scores=sampled.scores if widths is not None else None)
            if self._pipeline is not None:
                self._pipeline.tell(rows, tokens)
        fetched, done = output, None
        if self._download is not None:
            tensors, done = self._download.fetch(output.tensors())
            fetched = output.replaced(tensors)
        return Launched(
            plan.step, plan.epoch, widths, fetched, output, begun.began, done, done,
            self._rows_to_draft(plan.drafting) if plan.drafting else None, halves=halves,
        )  # fmt: skip

    @torch.inference_mode()
    def draft(self, launched: Launched) -> Launched:
        """Enqueue the drafting that the step's plan asks for. The result waits for drafts only if it carries any."""
        rows = launched.drafts
        if rows is None:
            return launched
        if self._drafting is None:
            assert self._pipeline is not None, "a plan is trusted"
            self._pipeline.await_drafts(rows)
            return launched
        began = self._mark()
        self._drafting.run(rows)
        ended = self._mark()
        if self._pipeline is not None and rows.turns:
            self._pipeline.tell_drafts(self._drafting.made(rows.turn.slots, rows.turns))
        launched = replace(launched, drafted=None if began is None or ended is None else (began, ended))
        if not len(rows.told):
            return launched
        told = self._drafting.made(rows.told, rows.turns)
        fetched, done = told, None
        if self._download is not None:
            (fetched,), done = self._download.fetch([told])
        return replace(
            launched,
            fetched=replace(launched.fetched, drafts=fetched),
            held=replace(launched.held, drafts=told),
            done=done,
        )

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and return its result. Times are the device's own, 0 on a CPU."""
        if launched.done is not None:
            launched.done.synchronize()
        times = NO_TIMES
        if launched.began is not None:
            times = step_times(launched, self._last)
            self._last = replace(launched, fetched=NOTHING, held=NOTHING)
        fetched = launched.fetched
        tokens = np.zeros(0, np.int32) if fetched.tokens is None else fetched.tokens.numpy()
        if len(tokens) and tokens.min() < 0:
            self._totals["failed"] += int((tokens == FAILED).sum())
            self._totals["rejected"] += int((tokens == REJECTED).sum())
        return StepResult(
            step=launched.step,
            epoch=launched.epoch,
            token_ids=tokens.tobytes(),
            logprobs=tuple(entry_logprobs(launched, tokens)) if launched.widths is not None else (),
            prompt_logprobs=tuple(prompt_logprobs(fetched.prompts)) if fetched.prompts else (),
            vectors=() if fetched.vectors is None else vector_rows(fetched.vectors),
            drafts=b"" if fetched.drafts is None else told_drafts(launched),
            busy=times.busy,
            waited=times.waited,
            drafting=times.drafting,
        )

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics(**self._totals)

    def _all_graphs(self) -> tuple[Graphs | DraftGraphs, ...]:
        return tuple([graphs for graphs in (self.graphs, self.draft_graphs) if graphs is not None])

    def _rows_to_draft(self, drafting: bytes) -> DraftRows:
        """From a plan's column; the same object as long as the column is the same."""
        if self._draft_rows is None or self._draft_rows[0] != drafting:
            self._draft_rows = drafting, draft_rows(drafting)
        return self._draft_rows[1]

    def _send_inputs(self, rows: HostRows) -> StepInputs:
        if self._inputs is None or self._inputs[0] is not rows:
            self._inputs = rows, step_inputs(self._upload.send(input_columns(rows)))
        return self._inputs[1]

    def _send_entries(self, rows: HostRows, masks: Column | None) -> Entries:
        if masks is not None:
            return Entries(*self._upload.send(entry_columns(rows, masks)))
        if self._entries is None or self._entries[0] is not rows:
            self._entries = rows, Entries(*self._upload.send(entry_columns(rows, None)))
        return self._entries[1]

    def _place_masks(self, masks: StepMasks, entries: int) -> Column:
        store_masks(masks, self._slots.parameters.sampling.masks, self._upload)
        return entry_masks(masks, entries)

    def _sample(self, begun: Begun, masks: Column | None, *, scored: bool) -> Sampled:
        rows, hidden = begun.rows, begun.hidden
        assert hidden is not None
        shape = None if self.graphs is None else self.graphs.sampling.fitting(rows, adapted=begun.adapted)
        if self.graphs is not None and shape is not None:
            if begun.last is not None:
                torch.index_select(hidden, 0, begun.last, out=self.graphs.states[: rows.entries])
            if self._download is not None:
                self._download.guard()
            return self.graphs.sampling.replay(rows, shape, masks)
        if begun.last is not None:
            states = hidden if rows.plain else hidden.index_select(0, begun.last)
        else:
            assert self.graphs is not None
            states = self.graphs.states[: rows.entries]
        return self._sampler.run(states, self._send_entries(rows, masks), scored=scored, adapted=begun.adapted)

    def _mark(self) -> torch.cuda.Event | None:
        if self.options.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
