"""Images between the scheduler and executors of the first stage: who encodes them, who receives what, and when."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.images import EncodeImage, Image, ImageEncoded
from penstock.protocol.links import Role
from penstock.protocol.messages import Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import ExecutorReady
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import RESERVED, SchedulerLoop
from tests.services.scheduler.fakes import WINDOW, FakeExecutor, FakePort, Transcript, without_grammars

PLACEHOLDER = 7
ROWS = 4
SPEC = VisionSpec(
    kind="qwen", token_id=PLACEHOLDER, processor=ProcessorSpec(mean=(0, 0, 0), std=(1, 1, 1)), patch=2, layers=1,
    hidden=4, heads=1, width=4, outputs=4,
)  # fmt: skip


class Group:
    """A loop between a tokenizer and two stages of two executors each."""

    def __init__(self, spec: VisionSpec = SPEC, rows: int = 64) -> None:
        self.now, self.rows = 1000.0, rows
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(
            model=ModelConfig(
                max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=2, pipeline_parallel_size=2
            )
        )
        facts = ModelFacts(256, 4096, vision=spec)
        self.loop = SchedulerLoop(config, facts, self.tokens, self.steps, *without_grammars(), self.now)
        self.tokenizer = self.tokens.join()
        self.executors = [FakeExecutor(self.steps, index) for index in range(4)]
        self.transcript = Transcript()

    def iterate(self) -> None:
        self.now += 0.001
        self.loop.iterate(self.now, self.now)

    def ready(self, rows: int | None = None) -> None:
        for index, executor in enumerate(self.executors):
            executor.decoding.clear()
            self.steps.arrives(executor.peer, ExecutorReady(
                epoch=0, blocks=64, block_size=16, step_tokens=64, device="cpu", dtype="float32", weight_bytes=1,
                cache_bytes=1, load_seconds=0.5, encoder_rows=(rows or self.rows) if index < 2 else 0))  # fmt: skip
        self.iterate()

    def submit(self, number: int, picture: int) -> None:
        ids = [3, 4, *[PLACEHOLDER] * ROWS, 5]
        image = Image(
            position=2, length=ROWS, rows=ROWS, width=4, height=4, digest=bytes([picture] * 16), pixels=bytes(48)
        )
        self.tokens.arrives(self.tokenizer, SubmitTokens(
            id=number, token_ids=np.array(ids, np.int32).tobytes(), sampling=Sampling(max_tokens=1), images=(image,)
        ))  # fmt: skip

    def asked(self) -> list[list[int]]:
        """Numbers of the images that each executor was asked for since."""
        return [[message.number for message in self.steps.take(EncodeImage, one.peer)] for one in self.executors]

    def encoded(self, number: int, rank: int, error: str = "") -> None:
        self.steps.arrives(self.executors[rank].peer, ImageEncoded(number, error))
        self.iterate()

    def run(self) -> Transcript:
        while self.loop.unfinished:
            plans = [executor.collect() for executor in self.executors]
            for plan in plans[2]:
                self.executors[2].answer(plan)
            self.iterate()
        self.transcript.read(self.tokens.take(TokenBatch, self.tokenizer))
        self.tokenizer.credit = WINDOW
        return self.transcript


def test_a_rank_of_the_first_stage_encodes_and_the_others_receive_the_rows() -> None:
    group = Group()
    group.ready()
    group.submit(1, picture=1)
    group.iterate()
    assert group.asked() == [[1], [], [], []]
    status = group.loop.status(group.now, group.now)
    assert (status.encoder_rows, status.encoder_rows_held, status.images_encoded) == (64, ROWS, 0)
    group.encoded(1, rank=0)
    plans = [executor.collect() for executor in group.executors]
    assert [[plan.images for plan in each if plan.images] for each in plans] == [[share(0, 0)]] * 4
    for plan in plans[2]:
        group.executors[2].answer(plan)
    assert group.run().tokens.keys() == {1}
    assert group.loop.status(group.now, group.now).images_encoded == 1
    group.submit(2, picture=1)
    group.iterate()
    assert group.asked() == [[], [], [], []]
    assert len(group.run().tokens[2]) == 1
    assert group.loop.status(group.now, group.now).image_hits == 1


def share(rank: int, first: int) -> bytes:
    return np.array((rank, first, ROWS), np.int32).tobytes()


def test_the_next_image_is_sent_as_soon_as_one_is_encoded() -> None:
    group = Group()
    group.ready()
    group.executors[2].peer.credit = WINDOW
    for number in range(1, 5):
        group.submit(number, picture=number)
    group.iterate()
    assert group.asked() == [[1, 3], [2, 4], [], []]
    for number in range(5, 7):
        group.submit(number, picture=number)
    group.iterate()
    assert group.asked() == [[], [], [], []], "no executor has more than two"
    group.encoded(2, rank=1)
    assert group.asked()[1] == [5], "though steps are in flight"


def test_images_leave_room_on_the_link_for_steps() -> None:
    group = Group()
    group.ready()
    group.executors[0].peer.credit = RESERVED + 1
    group.submit(1, picture=1)
    group.iterate()
    assert group.asked() == [[], [], [], []], "the plan took one"
    group.executors[0].peer.credit = RESERVED + 1
    group.iterate()
    assert group.asked() == [[1], [], [], []]


def test_an_image_that_cannot_be_encoded_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    group = Group()
    group.ready()
    group.submit(1, picture=1)
    group.iterate()
    group.encoded(1, 0, "out of memory")
    assert "image_failed" in caplog.text
    assert group.run().errors == ["an image of the request cannot be encoded: out of memory"]


def test_a_new_group_has_the_rows_that_it_says() -> None:
    group = Group()
    group.ready()
    group.submit(1, picture=1)
    group.iterate()
    group.asked()
    for executor in group.executors:
        executor.collect()
    group.ready(rows=32)
    group.iterate()
    assert group.loop.status(group.now, group.now).encoder_rows == 32
    assert group.asked()[0] == [2], "it is encoded anew"
    group.encoded(2, rank=0)
    assert group.run().tokens.keys() == {1}


def test_steps_without_room_for_a_whole_image_end_the_start() -> None:
    whole = msgspec.structs.replace(SPEC, mutual=True, pooled=62)
    with pytest.raises(ConfigError, match=r"62 tokens of an image, beside up to 7 others .* it must be at least 69"):
        Group(whole).ready()
    Group(msgspec.structs.replace(whole, pooled=57)).ready()
    Group(whole, rows=0).ready()  # the encoder is not loaded
