"""Pictures are encoded beside the steps; what the scheduler is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.engine_core.execution.encoder import Encoder
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.images import EncodeImage, ImageEncoded
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import StepPlan
from penstock.services.executor import image_encoding
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.image_encoding import ImageEncoding
from penstock.services.executor.startup import Engine, start
from penstock.services.executor.steps import Steps
from penstock.services.executor.watchdog import Watchdog
from penstock.services.links.link import Arrival, Joined
from tests.services.executor.folder import write_seeing_folder
from tests.services.executor.test_steps import FakePort, first, peer, results, run, then

ROWS = 40


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    options = ModelConfig(
        model=str(write_seeing_folder(tmp_path_factory.mktemp("models") / "tiny")), load_format="dummy",
        dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, mm_encoder_cache_tokens=ROWS,
    )  # fmt: skip
    return start(Config(model=options, executor=ExecutorConfig(device="cpu", cpu_threads=1)), 0)


@pytest.fixture
def encoder(engine: Engine) -> Encoder:
    found = engine.runner.options.encoder
    assert found is not None
    found.cache.zero_()
    return found


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def steps(port: FakePort, engine: Engine, encoder: Encoder, tmp_path: Path) -> Steps:
    made = steps_of(port, engine, encoder, tmp_path)
    run(made, peer(), Joined())
    port.sent.clear()
    return made


def steps_of(port: FakePort, engine: Engine, encoder: Encoder, folder: Path, budget: float = 1.0) -> Steps:
    sink: Any = port
    reports = Reports(folder, "e", engine.ready, prompts=False)
    return Steps(sink, engine.runner, engine.ready, Watchdog(), reports, images=ImageEncoding(encoder, budget))


def picture(number: int, first_row: int = 0, seed: int = 0, width: int = 24) -> EncodeImage:
    """Of two lines of cells."""
    pixels = np.random.default_rng(seed).integers(0, 256, (16, width, 3), np.uint8).tobytes()
    return EncodeImage(number=number, first_row=first_row, rows=2 * width // 8, width=width, height=16, pixels=pixels)


def answers(port: FakePort) -> list[ImageEncoded]:
    return [message for _, message in port.sent if isinstance(message, ImageEncoded)]


def finish(steps: Steps) -> None:
    while steps.busy:
        steps.iterate()


def ask(steps: Steps, *pictures: EncodeImage) -> None:
    run(steps, peer(), *pictures)
    finish(steps)


def seeing(step: int, first_row: int) -> StepPlan:
    """A prompt of an image of six rows and a word."""
    (begin,) = first(step).starts
    tokens = np.array([*[5] * 6, 9], "<i4")
    images = np.array([0, 6, first_row, 24, 16], "<i4").tobytes()
    scored = Sampling(temperature=0.0, logprobs=0)
    begin = replace(begin, token_ids=tokens.tobytes(), prompt_tokens=7, images=images, sampling=scored)
    return StepPlan(step=step, epoch=5, starts=(begin,), chunks=np.array([0, 0, 7, 1], "<i4").tobytes())


def test_a_picture_is_encoded_and_read(steps: Steps, port: FakePort, engine: Engine, encoder: Encoder) -> None:
    """Into its rows alone; steps read what stands there."""
    assert engine.ready.encoder_rows == ROWS == len(encoder.cache)
    ask(steps, picture(7, first_row=4))
    assert answers(port) == [ImageEncoded(7)]
    assert encoder.cache.any(1).nonzero()[:, 0].tolist() == [*range(4, 10)]
    ask(steps, picture(8, first_row=20, seed=1), picture(9, first_row=30))
    assert [answer.number for answer in answers(port)] == [7, 8, 9]
    assert torch.equal(encoder.cache[30:36], encoder.cache[4:10])
    run(steps, peer(), seeing(1, 4), seeing(2, 30), seeing(3, 20))
    same, again, other = (result.logprobs for result in results(port))
    assert same == again != other


def test_nothing_else_breaks_where_a_picture_cannot_be_encoded(
    steps: Steps, port: FakePort, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on, and so does the next picture. Whatever lost the device's context is another matter."""
    errors: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes")]

    def slices(pixels: Tensor) -> Iterator[Tensor | None]:
        yield None
        if errors:
            raise errors.pop(0)
        yield from plain(pixels)

    plain = encoder.tower.slices
    monkeypatch.setattr(encoder.tower, "slices", slices)
    run(steps, peer(), first(1), picture(1), picture(2), then(2), picture(3))
    finish(steps)
    assert answers(port) == [
        ImageEncoded(1, "there is no memory for it"), ImageEncoded(2, "the encoder failed: RuntimeError"),
        ImageEncoded(3),
    ]  # fmt: skip
    assert [result.step for result in results(port)] == [1, 2]
    assert "image_failed" in caplog.text
    errors.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        ask(steps, picture(4))


def test_rows_that_are_no_numbers_are_an_error(
    steps: Steps, port: FakePort, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slices(pixels: Tensor) -> Iterator[Tensor | None]:
        yield torch.full((6, encoder.cache.shape[1]), torch.nan)

    monkeypatch.setattr(encoder.tower, "slices", slices)
    ask(steps, picture(1))
    monkeypatch.undo()
    ask(steps, picture(2))
    assert answers(port) == [ImageEncoded(1, "its embeddings are not finite numbers"), ImageEncoded(2)]


def test_answers_wait_for_credit(steps: Steps, port: FakePort) -> None:
    port.full = True
    run(steps, peer(), picture(1))
    while not steps._images.answers:  # type: ignore[union-attr]
        steps.iterate()
    assert (answers(port), steps.busy, steps.idle) == ([], True, False)
    port.full = False
    steps.iterate()
    assert (answers(port), steps.busy) == ([ImageEncoded(1)], False)


def test_a_new_scheduler_hears_of_its_own_pictures_alone(steps: Steps, port: FakePort, encoder: Encoder) -> None:
    """One is half encoded, one waits, and an answer has not been sent when it joins."""
    port.full = True
    steps.take([Arrival(peer(), picture(number)) for number in (1, 2, 3)])
    while not steps._images.answers:  # type: ignore[union-attr]
        steps.iterate()
    steps.iterate()
    port.full = False
    run(steps, peer(2), Joined(), picture(1, first_row=10))
    finish(steps)
    assert answers(port) == [ImageEncoded(1)]
    assert encoder.cache.any(1).nonzero()[:, 0].tolist() == [*range(6), *range(10, 16)]


class FakeClock:
    """Seconds, which pass where the test says so: for each piece, and between steps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.mark.parametrize(("budget", "share"), [(0.25, 0.25), (0.5, 0.5), (1.0, 1.0)])
def test_the_budget_is_a_share_of_time_while_requests_are_decoded(
    budget: float, share: float, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone the encoder does not rest."""
    clock = FakeClock()
    monkeypatch.setattr(image_encoding, "time", clock)
    launch, worked = encoder.launch, [0.0]

    def timed() -> Any:
        clock.now += 0.002
        worked[0] += 0.002
        return launch()

    monkeypatch.setattr(encoder, "launch", timed)
    encoding = ImageEncoding(encoder, budget)
    for number in range(20):
        encoding.ask(picture(number))
    began = clock.now
    for _ in range(1000):
        encoding.iterate(shared=True)
        clock.now += 0.0001 if budget < 1 else 0.0
        if clock.now - began > 0.1:
            break
    assert worked[0] / (clock.now - began) == pytest.approx(share, rel=0.1)
    began, before = clock.now, worked[0]
    while encoding.busy and len(encoding.answers) < 20:
        encoding.iterate(shared=False)
    assert worked[0] - before == pytest.approx(clock.now - began)
    assert [answer.number for answer in encoding.answers] == [*range(20)]


def test_steps_come_between_the_pieces_of_a_picture(
    port: FakePort, engine: Engine, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one piece at most."""
    order: list[str] = []
    steps = steps_of(port, engine, encoder, tmp_path)
    run(steps, peer(), Joined(), first(1), then(2))
    launch, begin = encoder.launch, engine.runner.begin
    monkeypatch.setattr(encoder, "launch", lambda: (order.append("piece"), launch())[1])
    monkeypatch.setattr(engine.runner, "begin", lambda plan: (order.append("step"), begin(plan))[1])
    steps.take([Arrival(peer(), picture(1)), *(Arrival(peer(), then(step, on=None)) for step in range(3, 8))])
    finish(steps)
    assert order == ["step", "piece"] * 5


def test_a_text_half_alone_has_no_encoder(tmp_path: Path) -> None:
    options = ModelConfig(
        model=str(write_seeing_folder(tmp_path / "tiny")), load_format="dummy", dtype="float32", max_num_seqs=4,
        max_num_batched_tokens=64, limit_mm_per_prompt="image=0",
    )  # fmt: skip
    engine = start(Config(model=options, executor=ExecutorConfig(device="cpu", cpu_threads=1)), 0)
    assert engine.ready.encoder_rows == 0
    assert engine.runner.options.encoder is None
