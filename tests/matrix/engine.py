"""The real brain and the real runner in one process, without sockets: what the feature matrix drives."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.cuda_graphs import GraphSizes, graph_sizes
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.dummy_runs import warmup_steps
from penstock.engine_core.execution.encoder import Encoder
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.step_output import Launched
from penstock.engine_core.loading import load
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec, read_draft
from penstock.engine_core.models.kv_cache import with_kv_cache
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build, build_tower
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import stored_names
from penstock.engine_core.scheduling.options import UNBOUNDED, SchedulingOptions, SpeculationOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.images import Image, ImageEncoded
from penstock.protocol.messages import Finish, Prefilled, Rejected, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.speculation import HEADS
from penstock.protocol.steps import BlocksCopied, StepPlan, StepResult
from tests.engine_core.models.eagle_heads import load_head

Answers = dict[tuple[int, int], list[int]]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of what must not change the tokens."""

    depth: int = 2
    budget: int = 8192
    prefix_caching: bool = True
    block_size: int = 16
    blocks: int = 4096  # few of them force preemption
    max_num_seqs: int = 64
    max_model_len: int = 512
    graphs: bool = False  # on a GPU alone
    own_drafts: int = 0  # that a draft model or head makes for a row
    method: str = "draft_model"  # or "mtp"
    expected_share: float = 1.0  # of what each request may still write; 0.0 admits too many and has to preempt
    kv_cache_dtype: str = "auto"
    ngram: int = 0  # drafts of a row by prompt lookup
    state_places: int = 8  # snapshots, where layers are recurrent
    state_host_places: int = 0
    host_blocks: int = 0  # KV blocks in the host's memory
    role: ReplicaRole = ReplicaRole.MIXED
    encoder_rows: int = 64  # where images are seen


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a matrix workload."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    n: int = 1
    prediction: tuple[int, ...] = ()  # of its output, which becomes drafts
    images: tuple[Image, ...] = ()


@cache
def network(
    folder: Path, dtype: torch.dtype, device: str, group: Group = ALONE, draft: Path | None = None,
    kv_cache_dtype: str = "auto", method: str = "draft_model",
) -> tuple[Decoder, ModelSpec, Tower | None]:  # fmt: skip
    spec = with_kv_cache(read_spec(folder), kv_cache_dtype)
    drafting = None if draft is None else read_method(method, draft, spec)
    model = build(spec, dtype, torch.device(device), 1024, group=group, draft=drafting)
    tower = build_tower(model)
    load(model, folder, "auto", 0, tower)
    pack(model.destinations())
    if tower is not None:
        pack(tower.destinations())
    return model, model.spec, tower


def read_method(method: str, draft: Path, spec: ModelSpec) -> DraftSpec:
    found = read_draft(method, draft, spec, stored_names(draft) if method in HEADS else None)
    assert found is not None
    return found


class Engine:
    """One cell's scheduler and runner, stepped until everything has ended.

    Each member of a group may have an engine: what they are asked being the same, so are their plans.
    """

    def __init__(
        self,
        cell: Cell,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        draft: Path | None = None,
        group: Group = ALONE,
    ) -> None:
        kv = cell.kv_cache_dtype
        model, spec, tower = network(folder, dtype, device, group, draft if cell.own_drafts else None, kv, cell.method)
        self.encoder = None if tower is None else Encoder(tower, cell.encoder_rows)
        drafter = None
        if cell.own_drafts:
            assert draft is not None
            if cell.method in HEADS:
                drafting = read_method(cell.method, draft, read_spec(folder))
                assert drafting.head is not None
                head = load_head(draft, model, 1024, "auto", 1, drafting.head)
                drafter = Draft(head, drafting.layers, cell.own_drafts, aux_layers=drafting.aux_layers)
            else:
                own = with_kv_cache(read_spec(draft), kv)
                drafts = network(draft, dtype, device, kv_cache_dtype=kv)[:2] if group.ends else (None, own)
                drafter = Draft(*drafts, cell.own_drafts)
        self.cell = cell
        self.begun: list[tuple[int, int]] = []  # of each sequence that got a slot: positions computed, and its place
        recurrent = bool(spec.recurrences)
        places, host = (cell.state_places, cell.state_host_places) if recurrent else (0, 0)
        drafts = max(cell.own_drafts, cell.ngram)
        self.runner = Runner(
            model,
            spec,
            RunnerOptions(
                device=torch.device(device),
                dtype=dtype,
                blocks=cell.blocks,
                block_size=cell.block_size,
                max_model_len=cell.max_model_len,
                max_num_seqs=cell.max_num_seqs,
                graphs=every_graph(cell, spec) if cell.graphs else None,
                step_tokens=cell.budget,
                group=group,
                row_drafts=drafts,
                state_places=places,
                state_host_places=host,
                encoder=self.encoder,
            ),
            drafter,
        )
        self.runner.compile(self.runner.drafted(warmup_steps(self.runner.sizes, cell.budget)))
        self.runner.prepare()
        self.copier = None
        if cell.host_blocks and (memory := self.runner.block_memory()):
            shared = cell.role is ReplicaRole.PREFILL
            self.copier = BlockCopier(memory, cell.host_blocks, torch.device(device), label=device, shared=shared)
        self.scheduler = Scheduler(
            SchedulingOptions(
                blocks=cell.blocks,
                block_size=cell.block_size,
                max_model_len=cell.max_model_len,
                max_num_seqs=cell.max_num_seqs,
                max_num_batched_tokens=cell.budget,
                vocab_size=spec.vocab_size,
                prefix_caching=cell.prefix_caching,
                policy="fcfs",
                expected_share=cell.expected_share,
                speculation=SpeculationOptions(
                    method=cell.method if cell.own_drafts else "ngram" if cell.ngram else "none",
                    num_speculative_tokens=max(1, drafts),
                    adaptive=not cell.ngram,  # by nothing that is measured
                    max_row_drafts=drafts if recurrent else UNBOUNDED,
                ),
                stages=group.stages,
                encoders=group.size,
                executors=group.size * group.stages,
                ahead=max(1, cell.depth - group.stages + 1),
                piece=32,
                recurrent=recurrent,
                state_places=places,
                state_host_places=host,
                host_blocks=cell.host_blocks,
                role=cell.role,
                windows=spec.kv_windows,
                encoder_rows=0 if spec.vision is None else cell.encoder_rows,
                image_token=-1 if spec.vision is None else spec.vision.token_id,
                mutual=spec.vision is not None and spec.vision.mutual,
                epoch=1,
            )
        )
        self.now = 0.0
        self.encoded = 0  # images
        self.told: list[Prefilled] = []

    def answer(self, prompts: list[Prompt], *, together: bool = True) -> Answers:
        """Output tokens by (request, choice). `together` submits all at once, else one after another's end."""
        answers: Answers = {}
        ends: dict[tuple[int, int], Finish] = {}
        groups = [list(enumerate(prompts))] if together else [[pair] for pair in enumerate(prompts)]
        for group in groups:
            for number, prompt in group:
                self.scheduler.submit(submission(number, prompt), 0, self.now)
            self.run(answers, ends)
        expected = {(number, choice) for number, prompt in enumerate(prompts) for choice in range(prompt.n)}
        assert set(ends) == expected
        assert self.scheduler.unfinished == 0
        report = self.scheduler.check()
        assert report.ok, report
        assert self.scheduler.statistics().pool.held == 0
        return answers

    def run(self, answers: Answers, ends: dict[tuple[int, int], Finish]) -> None:
        """Until nothing is left to do."""
        launched: deque[Launched] = deque()
        while True:
            while self.scheduler.in_flight < self.cell.depth:
                plan = self.scheduler.plan(self.now)
                if plan is None:
                    break
                self.begun += [(start.computed, start.state) for start in plan.starts]
                launched.append(self.runner.launch(over_the_wire(plan)))
            if self._encode():
                continue
            if self._copy():
                continue
            if launched:
                self.scheduler.apply(self.runner.collect(launched.popleft()), self.now)
                self.now += 0.01
            elif not self.scheduler.undelivered():
                break
            for message in self.scheduler.outputs(0):
                assert not isinstance(message, Rejected), message
                if isinstance(message, Prefilled):
                    self.told.append(message)
                else:
                    take(message, answers, ends)

    def _encode(self) -> bool:
        """Encode all that this member is asked for, and say so; whether anybody was asked. Every member says it: their
        plans are the same."""
        waiting = self.scheduler.image_messages()
        asked = [*waiting]
        waiting.clear()
        for message in asked:
            if self.encoder is not None and message.rank == self.runner.options.group.rank:
                self.encoder.begin(message)
                while not self.encoder.launch().last:
                    pass
                assert not self.encoder.trouble()
            self.scheduler.image_encoded(ImageEncoded(message.number), self.now)
            self.encoded += 1
        return bool(asked)

    def _copy(self) -> bool:
        """Copy blocks as far as that is asked for, and say so; whether any were."""
        waiting = self.scheduler.copy_messages()
        asked = [*waiting]
        waiting.clear()
        for message in asked:
            answer = BlocksCopied(message.number)
            if self.copier is not None:
                self.copier.ask(message)
                while not self.copier.answers:
                    self.copier.iterate(self.runner.drafting_ended)
                answer = self.copier.answers.popleft()
            self.scheduler.blocks_copied(answer, 0, self.now)
        return bool(asked)


def every_graph(cell: Cell, spec: ModelSpec) -> GraphSizes:
    """Graphs for all steps of the cell that may have one, however small the model."""
    return graph_sizes(spec.layers, 1, cell.max_num_seqs, cell.budget, cell.max_model_len)


def over_the_wire(plan: StepPlan) -> StepPlan:
    """The plan as it arrives at an executor."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan | StepResult)  # type: ignore[return-value]


def submission(number: int, prompt: Prompt) -> SubmitTokens:
    ids = np.asarray(prompt.token_ids, np.int32)
    prediction = np.asarray(prompt.prediction, np.int32).tobytes()
    return SubmitTokens(
        id=number, token_ids=ids.tobytes(), sampling=prompt.sampling, n=prompt.n, prediction=prediction,
        images=prompt.images,
    )  # fmt: skip


def take(batch: TokenBatch, answers: Answers, ends: dict[tuple[int, int], Finish]) -> None:
    """Append a batch's rows; a choice that has ended gets no more."""
    tokens = np.frombuffer(batch.token_ids, np.int32).tolist()
    start = 0
    for row, (request, choice, count, finish) in enumerate(
        zip(
            np.frombuffer(batch.ids, np.int64).tolist(),
            np.frombuffer(batch.choices, np.uint16).tolist(),
            np.frombuffer(batch.counts, np.int32).tolist(),
            batch.finish,
            strict=True,
        )
    ):
        key = (request, choice)
        assert key not in ends, f"{key} goes on after its end in row {row}"
        answers.setdefault(key, []).extend(tokens[start : start + count])
        start += count
        if finish != Finish.NONE:
            assert finish in (Finish.STOP, Finish.LENGTH), (key, finish, batch.extras)
            ends[key] = Finish(finish)
