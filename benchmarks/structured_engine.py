"""The scheduler and the runner in one process, with grammars: requests in, the outputs of their choices out."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import MaskStore
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.engine_core.loading import fill_head, load
from penstock.engine_core.loading.adapters import read_adapter
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec, read_draft
from penstock.engine_core.models.eagle import EagleHead, build_head
from penstock.engine_core.models.kv_cache import with_draft_cache, with_kv_cache
from penstock.engine_core.models.kv_groups import with_kv_groups
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.weight_files import stored_names
from penstock.engine_core.scheduling.options import UNBOUNDED, SchedulingOptions, SpeculationOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.protocol.messages import Adapter, Automaton, Finish, Rejected, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.speculation import HEADS, WITH_MODEL
from penstock.protocol.steps import AdapterLoaded, BlocksCopied, CopyBlocks, LoadAdapter, StepMasks, StepPlan
from penstock.services.scheduler.bitmask_filler import step_masks

MAX_MODEL_LEN = 1024
Key = tuple[int, int]  # request, choice


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One way of running that must not matter to what comes out."""

    depth: int = 2
    drafts: bool = True  # whatever is proposed is sent
    method: str = "none"  # or "ngram", "draft_model", "eagle" or "mtp", beside forced runs and predictions
    draft_tokens: int = 4
    prefix_caching: bool = True
    blocks: int = 2048  # few of them force preemption
    expected_share: float = 1.0  # 0.0 admits too many and has to preempt
    max_num_seqs: int = 32
    block_size: int = 16
    budget: int = 512
    piece: int = 512  # of prompts, where there are several stages
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    state_places: int = 8  # snapshots of recurrent layers' states
    state_host_places: int = 0
    host_blocks: int = 0  # KV blocks in the host's memory
    windows: bool = False  # layers are in KV groups, and blocks behind windows are given back
    adapter_places: int = 0  # for LoRA adapters, up to rank 16; the host's memory holds all


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    automaton: Automaton | None = None
    n: int = 1
    prediction: tuple[int, ...] = ()
    speculate: bool = True
    adapter: Adapter | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one choice said and how it ended."""

    token_ids: list[int]
    finish: Finish
    error: str | None


@dataclasses.dataclass
class Masked:
    """What the masks of a batch cost the host."""

    rows: int = 0
    seconds: float = 0.0


class Engine:
    """A model's runner, which is made once, and a scheduler for each batch of requests.

    Each member of a group may have an engine: what they are asked being the same, so are their plans.
    """

    def __init__(
        self,
        folder: Path,
        tokens: GrammarTokens,
        cell: Cell,
        *,
        load_format: str = "auto",
        draft: Path | None = None,
        draft_format: str = "",
        group: Group = ALONE,
    ) -> None:
        self.cell = cell
        self._group = group
        self._tokens = tokens
        whole, drafting = with_kv_cache(read_spec(folder, cell.quantization), cell.kv_cache_dtype), None
        draft_format = draft_format or load_format
        if cell.method in WITH_MODEL:
            assert draft is not None
            names = stored_names(draft) if cell.method in HEADS and draft_format != "dummy" else None
            drafting = with_draft_cache(read_draft(cell.method, draft, whole, names), cell.kv_cache_dtype)
            assert drafting is not None
        if cell.windows:
            whole = with_kv_groups(whole, MAX_MODEL_LEN, cell.block_size, drafting=drafting is not None)
        self._model = build(
            whole, torch.float32, torch.device("cpu"), MAX_MODEL_LEN,
            group=group, adapters=bool(cell.adapter_places), draft=drafting,
        )  # fmt: skip
        self._spec = self._model.spec
        self._recurrent = bool(whole.recurrences)
        load(self._model, folder, load_format, 0)
        self._places = AdapterPlaces(self._model, whole, cell.adapter_places, 16) if cell.adapter_places else None
        self._draft: Draft | None = None
        if drafting is not None and draft is not None:
            self._draft = Draft(None, drafting.layers, cell.draft_tokens, aux_layers=drafting.aux_layers)
            if group.ends:
                self._draft = dataclasses.replace(self._draft, model=self._drafter(drafting, draft, draft_format))
        if whole.quantization is not None:
            pack(self._model.destinations())  # a CPU holds what weights stand for, as in the server
        self.scheduled: SchedulerStatistics | None = None  # of the last batch
        self.masked: Masked | None = None

    def _drafter(self, spec: DraftSpec, folder: Path, load_format: str) -> Decoder | EagleHead:
        if spec.head is not None:
            head = build_head(spec.head, self._model, MAX_MODEL_LEN)
            fill_head(head, folder, load_format, 1)
            return head
        drafter = build(spec.layers, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
        load(drafter, folder, load_format, 1)
        return drafter

    def answer(self, asks: list[Ask]) -> dict[Key, Answer]:
        """Every choice's output, all requests submitted at once."""
        cell = self.cell
        runner = Runner(
            self._model,
            self._spec,
            RunnerOptions(
                device=torch.device("cpu"), dtype=torch.float32, blocks=cell.blocks, block_size=cell.block_size,
                max_model_len=MAX_MODEL_LEN, max_num_seqs=cell.max_num_seqs, group=self._group,
                step_tokens=cell.budget, row_drafts=cell.draft_tokens,
                state_places=cell.state_places if self._recurrent else 0,
                state_host_places=cell.state_host_places, adapters=self._places,
            ),
            self._draft,
        )  # fmt: skip
        copier = None
        if cell.host_blocks and (memory := runner.block_memory()):
            copier = BlockCopier(memory, cell.host_blocks, torch.device("cpu"))
        if self._group.stages > 1 and not self._group.answers:
            follow(runner, copier, self._group)
            return {}
        store = MaskStore(self._tokens, runner.mask_slots, 1)
        most = min(256, store.most - cell.max_num_seqs)  # as in the server: drafts are verified under masks
        scheduler = Scheduler(
            SchedulingOptions(
                blocks=cell.blocks, block_size=cell.block_size, max_model_len=MAX_MODEL_LEN,
                max_num_seqs=cell.max_num_seqs, max_num_batched_tokens=cell.budget, vocab_size=self._spec.vocab_size,
                expected_share=cell.expected_share, epoch=1,
                prefix_caching=cell.prefix_caching, recurrent=self._recurrent,
                state_places=cell.state_places if self._recurrent else 0, state_host_places=cell.state_host_places,
                speculation=SpeculationOptions(
                    method=cell.method, num_speculative_tokens=cell.draft_tokens,
                    max_step_drafts=most if cell.drafts else 0,
                    max_row_drafts=cell.draft_tokens if self._recurrent else UNBOUNDED,
                ),
                windows=self._spec.kv_windows,
                depth=cell.depth,
                stages=self._group.stages,
                ahead=max(1, cell.depth - self._group.stages + 1),
                piece=cell.piece,
                host_blocks=cell.host_blocks,
                adapter_places=0 if self._places is None else self._places.count,
                adapter_memory=0 if self._places is None else 1 << 16,
            )
        )  # fmt: skip
        guides: dict[Automaton, Guide] = {}
        for number, ask in enumerate(asks):
            guide = None
            if ask.automaton is not None:
                guide = guides.get(ask.automaton) or guides.setdefault(
                    ask.automaton, Guide(self._tokens, ask.automaton)
                )
            scheduler.submit(submission(number, ask), 0, 0.0, None if guide is None else guide.copy())
        self.masked = Masked()
        answers = run(scheduler, runner, store, cell.depth, self.masked, self._group, copier)
        assert set(answers) == {(number, choice) for number, ask in enumerate(asks) for choice in range(ask.n)}
        assert scheduler.unfinished == 0
        assert scheduler.check(thorough=True).ok
        self.scheduled = scheduler.statistics()
        return answers


def follow(runner: Runner, copier: BlockCopier | None, group: Group) -> None:
    """A stage before the last, or a rank beside the first of the last: run what the answering member runs."""
    while (message := told(group, None)) is not None:
        if isinstance(message, StepPlan):
            runner.collect(runner.launch(message))
        else:
            copy(copier, message)
    runner.reset()


def told(group: Group, message: StepPlan | CopyBlocks | None) -> StepPlan | CopyBlocks | None:
    """The answering member's next plan or copies; None: its last is over."""
    encoded = b"" if message is None else msgspec.msgpack.encode(message)
    source, size = group.stages * group.size - group.size, torch.tensor([len(encoded)])
    dist.broadcast(size, source, group=group.members)
    if not int(size):
        return None
    data = torch.from_numpy(np.frombuffer(encoded.ljust(int(size)), np.uint8).copy())
    dist.broadcast(data, source, group=group.members)
    return msgspec.msgpack.decode(data.numpy().tobytes(), type=StepPlan | CopyBlocks)  # type: ignore[no-any-return]


def run(
    scheduler: Scheduler, runner: Runner, store: MaskStore, depth: int, masked: Masked, group: Group = ALONE,
    copier: BlockCopier | None = None,
) -> dict[Key, Answer]:  # fmt: skip
    """Step until everything has ended. Masks are made when the scheduler gives their work out, as in the server."""
    tokens: dict[Key, list[int]] = {}
    answers: dict[Key, Answer] = {}
    plans: deque[StepPlan] = deque()
    masks: dict[int, StepMasks] = {}
    applied, now = 0, 0.0

    def fill() -> None:
        for guide in scheduler.late_masks():
            spot = guide.spot
            store.keep(spot, store.make(guide), applied)
        while (work := scheduler.mask_work()) is not None:
            began = time.perf_counter()
            filled = store.fill(work.step, applied, work.rows)
            masked.rows += len(work.rows)
            masked.seconds += time.perf_counter() - began
            masks[work.step] = step_masks(work, filled)

    while True:
        while scheduler.in_flight < depth and (plan := scheduler.plan(now)) is not None:
            plans.append(plan)
            fill()
        if read_adapters(scheduler, runner, now) or copy_blocks(scheduler, copier, now, group):
            continue
        if not plans:
            if group.stages > 1:
                told(group, None)
                runner.reset()
            return answers
        plan = plans.popleft()
        if group.stages > 1:
            told(group, plan)
        begun = runner.begin(plan)
        result = runner.collect(runner.draft(runner.finish(begun, masks.pop(plan.step) if plan.masked else None)))
        scheduler.apply(result, now)
        applied = result.step
        fill()
        now += 0.01
        for message in scheduler.outputs(0):
            assert not isinstance(message, Rejected), message
            take(message, tokens, answers)


def read_adapters(scheduler: Scheduler, runner: Runner, now: float) -> bool:
    """What executors do beside their steps; whether there was anything to read."""
    asked = [message for message in scheduler.adapter_messages() if isinstance(message, LoadAdapter)]
    scheduler.adapter_messages().clear()
    for message in asked:
        assert runner.adapters is not None
        runner.adapters.loaded[message.number] = read_adapter(Path(message.path), runner.adapters.places)
        scheduler.adapter_loaded(AdapterLoaded(message.number), 0, now)
    return bool(asked)


def copy_blocks(scheduler: Scheduler, copier: BlockCopier | None, now: float, group: Group) -> bool:
    """The same of copies between the device and the host's memory."""
    asked = [*scheduler.copy_messages()]
    scheduler.copy_messages().clear()
    for message in asked:
        if group.stages > 1:
            told(group, message)
        copy(copier, message)
        scheduler.blocks_copied(BlocksCopied(message.number), 0, now)
    return bool(asked)


def copy(copier: BlockCopier | None, message: CopyBlocks) -> None:
    """Make copies; a stage without KV blocks has none to make."""
    if copier is not None:
        copier.ask(message)
        copier.iterate()
        copier.answers.clear()


def submission(number: int, ask: Ask) -> SubmitTokens:
    ids = np.asarray(ask.token_ids, np.int32).tobytes()
    return SubmitTokens(
        id=number, token_ids=ids, sampling=ask.sampling, n=ask.n, automaton=ask.automaton, speculate=ask.speculate,
        prediction=np.asarray(ask.prediction, np.int32).tobytes(), adapter=ask.adapter,
    )  # fmt: skip


def take(batch: TokenBatch, tokens: dict[Key, list[int]], answers: dict[Key, Answer]) -> None:
    """Book a batch's rows."""
    ids = np.frombuffer(batch.token_ids, np.int32).tolist()
    errors = {extra.row: extra.error for extra in batch.extras}
    rows = zip(
        np.frombuffer(batch.ids, np.int64).tolist(),
        np.frombuffer(batch.choices, np.uint16).tolist(),
        np.frombuffer(batch.counts, np.int32).tolist(),
        batch.finish,
        strict=True,
    )
    for row, (request, choice, count, finish) in enumerate(rows):
        key = (request, choice)
        assert key not in answers, f"{key} goes on after its end"
        tokens.setdefault(key, []).extend(ids[:count])
        ids = ids[count:]
        if finish:
            answers[key] = Answer(tokens[key], Finish(finish), errors.get(row))
