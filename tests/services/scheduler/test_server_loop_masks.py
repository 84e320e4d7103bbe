"""The loop with structured output: masks leave for every masked plan, in order, and outputs follow their grammar."""

from __future__ import annotations

import re

import numpy as np
import pytest

from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import Abort, Automaton, Finish, Rejected, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import REJECTED, StepMasks, StepPlan, StepResult
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from penstock.services.scheduler.grammar_queue import GrammarQueue
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from tests.engine_core.grammar.vocabulary import END, allowed, automaton, tokens, vocabulary
from tests.services.scheduler.fakes import WINDOW, FakeExecutor, FakePort, Inline, Transcript

PLACES = 256


class Sampler(FakeExecutor):
    """Answers each entry with an allowed token, the draft if it is allowed, once the step's masks have come."""

    def __init__(self, port: FakePort) -> None:
        super().__init__(port)
        self.store = np.zeros((PLACES, tokens().words), np.int32)
        self.waiting: list[StepPlan] = []
        self.masks: dict[int, StepMasks] = {}

    def work(self) -> None:
        """Answer the plans whose masks are there."""
        self.waiting += self.collect()
        fresh = self.port.take(StepMasks, self.peer)
        self.peer.credit += len(fresh)
        for masks in fresh:
            places = np.frombuffer(masks.new_slots, np.int32)
            self.store[places] = np.frombuffer(masks.bits, np.int32).reshape(-1, tokens().words)
            self.masks[masks.step] = masks
        while self.waiting and (not self.waiting[0].masked or self.waiting[0].step in self.masks):
            self.sample(self.waiting.pop(0))

    def sample(self, plan: StepPlan) -> None:
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            self.decoding.clear()
        self.decoding |= set(np.frombuffer(plan.decode_on, np.int32).tolist())
        self.decoding -= set(np.frombuffer(plan.decode_off, np.int32).tolist())
        drafts = dict(np.frombuffer(plan.drafts, np.int32).reshape(-1, 2).tolist())
        ids = np.frombuffer(plan.draft_ids, np.int32).tolist()
        chunks = np.frombuffer(plan.chunks, np.int32).reshape(-1, 4)
        rows: list[list[int]] = []
        for slot in sorted(self.decoding):
            count = drafts.get(slot, 0)
            rows.append(ids[:count])
            ids = ids[count:]
        rows += [[] for _ in range(int(chunks[:, 3].sum()))]
        masks = self.masks.pop(plan.step, None)
        places = {}
        if masks is not None:
            entries = np.frombuffer(masks.entries, np.int32).tolist()
            places = dict(zip(entries, np.frombuffer(masks.slots, np.int32).tolist(), strict=True))
        out: list[int] = []
        for row in rows:
            going = True
            for place in range(len(row) + 1):
                entry = len(out)
                mask = allowed(self.store[places[entry]].tobytes()) if entry in places else {7}
                draft = row[place] if place < len(row) else -1
                token = draft if draft in mask else sorted(mask)[plan.step * 13 % len(mask)]
                out.append(token if going else REJECTED)
                going = going and token == draft
        self.port.arrives(
            self.peer, StepResult(step=plan.step, epoch=plan.epoch, token_ids=np.array(out, np.int32).tobytes())
        )


class Bench:
    """A loop with grammars between one tokenizer and one sampling executor."""

    def __init__(self, *, overlap: bool = True, places: int = PLACES) -> None:
        self.now = 1000.0
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(
            model=ModelConfig(max_num_seqs=8, max_num_batched_tokens=64), scheduler=SchedulerConfig(overlap=overlap)
        )
        guides, bitmasks = GrammarQueue(tokens(), Inline()), BitmaskFiller(tokens(), Inline(), Inline(), 1)
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, self.steps, guides, bitmasks, self.now)
        self.tokenizer = self.tokens.join()
        self.executor = Sampler(self.steps)
        self.executor.ready(mask_slots=places)
        self.transcript = Transcript()
        self.iterate()

    def iterate(self) -> None:
        self.now += 0.001
        self.loop.iterate(self.now, 5000.0 + self.now)

    def submit(self, number: int, structure: Automaton | None, n: int = 1, most: int = 60) -> None:
        request = SubmitTokens(
            id=number, token_ids=np.arange(9, dtype=np.int32).tobytes(), automaton=structure, n=n,
            sampling=Sampling(max_tokens=most, eos_token_ids=(END,)),
        )  # fmt: skip
        self.tokens.arrives(self.tokenizer, request)

    def run(self, done) -> None:
        for _ in range(400):
            self.iterate()
            self.executor.work()
            self.transcript.read(self.tokens.take(TokenBatch, self.tokenizer))
            self.tokenizer.credit = WINDOW
            if done():
                return
        raise AssertionError("it did not end")

    def text(self, number: int) -> str:
        return vocabulary().decode(self.transcript.tokens[number], skip_special_tokens=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_follow_their_grammars_beside_free_ones(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    bench.submit(1, automaton("regex", "(alpha|beta)-[0-9]{3}"))
    bench.submit(2, None, most=12)
    bench.submit(3, automaton("choice", '["one and only"]'), n=3)
    bench.run(lambda: len(bench.transcript.ends) == 3 and len(bench.transcript.ends[3]) == 3)
    assert re.fullmatch("(alpha|beta)-[0-9]{3}", bench.text(1))
    assert bench.transcript.tokens[2] == [7] * 12
    assert sorted(bench.text(3)) == sorted("one and only" * 3)  # three choices, in turns
    assert bench.transcript.ends == {1: [Finish.STOP], 2: [Finish.LENGTH], 3: [Finish.STOP] * 3}
    assert bench.loop.statistics().masks.rows > 0
    assert bench.loop.drained


def test_a_row_whose_masks_are_made_beside_the_steps_goes_on_beside_a_free_one() -> None:
    """Results tell no times here, so any new mask takes long."""
    bench = Bench()
    bench.submit(1, automaton("regex", "[a-z]{12}"), most=40)
    bench.submit(2, None, most=60)
    bench.run(lambda: 1 in bench.transcript.ends)
    assert 2 not in bench.transcript.ends
    assert re.fullmatch("[a-z]{12}", bench.text(1))
    bench.run(lambda: 2 in bench.transcript.ends)
    assert bench.transcript.tokens[2] == [7] * 60


def test_masks_leave_in_the_turn_of_the_result_and_before_the_next_plan() -> None:
    bench = Bench()
    bench.submit(1, automaton("regex", "[a-z]{30}"))
    for _ in range(4):
        bench.iterate()
        bench.executor.work()
    bench.steps.sent.clear()
    bench.iterate()
    sent = [message for _, message in bench.steps.sent]
    assert [type(message) for message in sent] == [StepMasks, StepPlan]
    assert [message.step for message in sent] == [sent[0].step, sent[0].step + 1]


def test_an_abort_while_the_automaton_is_made_ends_it_in_order() -> None:
    bench = Bench()
    bench.submit(1, automaton("regex", "a+"), n=2)
    bench.tokens.arrives(bench.tokenizer, Abort(1))
    bench.run(lambda: len(bench.transcript.ends.get(1, ())) == 2)
    assert set(bench.transcript.ends[1]) == {Finish.ABORT}
    assert bench.loop.unfinished == 0


def test_an_abort_in_the_turn_of_its_submit_ends_it_before_a_token_is_made() -> None:
    """With the automaton remembered, with it unknown, and without one."""
    bench = Bench()
    bench.submit(1, automaton("regex", "a{3}"))
    bench.run(lambda: 1 in bench.transcript.ends)
    made = bench.loop.statistics().scheduler.scheduled_tokens
    for number, structure in ((2, automaton("regex", "a{3}")), (3, automaton("regex", "b+")), (4, None)):
        bench.submit(number, structure)
        bench.tokens.arrives(bench.tokenizer, Abort(number))
    bench.run(lambda: {2, 3, 4} <= set(bench.transcript.ends))
    assert [bench.transcript.ends[number] for number in (2, 3, 4)] == [[Finish.ABORT]] * 3
    assert bench.loop.statistics().scheduler.scheduled_tokens == made
    assert bench.loop.drained


def test_a_wrong_automaton_is_rejected_alone() -> None:
    bench = Bench()
    bench.submit(1, Automaton(source="start: ("))
    bench.submit(2, automaton("regex", "ab"))
    bench.run(lambda: 2 in bench.transcript.ends)
    assert [rejected.id for rejected in bench.tokens.take(Rejected)] == [1]
    assert bench.text(2) == "ab"


def test_new_executors_get_every_mask_again_and_outputs_go_on() -> None:
    bench = Bench()
    bench.submit(1, automaton("regex", "[a-z]{40}"))
    for _ in range(6):
        bench.iterate()
        bench.executor.work()
    bench.steps.leave(bench.executor.peer)
    bench.iterate()
    bench.executor = Sampler(bench.steps)
    bench.executor.ready(epoch=bench.loop.executors.epoch, mask_slots=PLACES)
    bench.run(lambda: 1 in bench.transcript.ends)
    assert len(bench.text(1)) == 40
    assert bench.text(1).islower()


def test_executors_without_room_for_masks_refuse_structures_alone() -> None:
    bench = Bench(places=8)
    bench.submit(1, automaton("regex", "a"))
    bench.submit(2, None, most=3)
    bench.run(lambda: 2 in bench.transcript.ends)
    (rejected,) = bench.tokens.take(Rejected)
    assert (rejected.id, rejected.status) == (1, 400)
    assert "--max-num-seqs" in rejected.message


def test_drafts_leave_room_for_masks() -> None:
    bench = Bench(places=32)  # 16 masks a step, 8 of them for the rows themselves
    for number in range(1, 9):
        bench.submit(number, automaton("choice", '["a long and certain sentence, all of it forced"]'))
    bench.run(lambda: len(bench.transcript.ends) == 8)
    assert {bench.text(number) for number in range(1, 9)} == {"a long and certain sentence, all of it forced"}
