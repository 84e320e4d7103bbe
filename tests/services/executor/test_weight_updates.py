"""Weights are read between steps, and an executor that could not read them to their end is none any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.control import (
    IN_MEMORY,
    PARTIAL,
    CheckWeights,
    Digest,
    JoinGroup,
    MeetTrainer,
    SumWeights,
    WeightsAnswer,
    WeightTensor,
    WriteWeights,
)
from penstock.protocol.errors import ModelError
from penstock.services.executor.weight_updates import BrokenWeights, WeightUpdates


class FakeWeights:
    """Notes what it is told; fails where it should."""

    def __init__(self, failing: Exception | None = None) -> None:
        self.folder = Path("/began")
        self.seen: list[tuple[str, Path]] = []
        self.failing = failing

    def check(self, folder: Path) -> None:
        self._note("check", folder)

    def write(self, folder: Path) -> None:
        self._note("write", folder)

    def check_tensors(self, tensors: tuple[WeightTensor, ...], *, shared: bool) -> None:
        self._note(f"look at {len(tensors)}, {shared}", self.folder)

    def copy(self, tensors: tuple[WeightTensor, ...]) -> None:
        self._note(f"copy {len(tensors)}", self.folder)

    def digests(self) -> tuple[Digest, ...]:
        return (Digest("a", "float32", 0.0, 1),)

    def _note(self, what: str, folder: Path) -> None:
        self.seen.append((what, folder))
        if self.failing is not None:
            raise self.failing


@pytest.fixture
def made() -> Callable[..., tuple[WeightUpdates, FakeWeights]]:
    def make(failing: Exception | None = None) -> tuple[WeightUpdates, FakeWeights]:
        weights: Any = FakeWeights(failing)
        return WeightUpdates(weights), weights

    return make


def test_one_thing_is_done_at_a_time(made: Callable[..., tuple[WeightUpdates, FakeWeights]]) -> None:
    updates, weights = made()
    updates.ask(CheckWeights(1, "/new"))
    updates.ask(WriteWeights(2, "/new", "v2"))
    assert updates.busy
    assert not updates.run(resting=True)
    assert (weights.seen, updates.version) == ([("check", Path("/new"))], "0")
    assert updates.run(resting=True)
    assert not updates.run(resting=True)
    assert weights.seen[1:] == [("write", Path("/new"))]
    assert (updates.path, updates.version) == ("/new", "v2")
    assert list(updates.answers) == [WeightsAnswer(1), WeightsAnswer(2)]


def test_no_path_is_the_folder_of_the_start(made: Callable[..., tuple[WeightUpdates, FakeWeights]]) -> None:
    updates, weights = made()
    updates.ask(WriteWeights(1, "", "0"))
    updates.run(resting=True)
    assert weights.seen == [("write", Path("/began"))]
    assert updates.path == ""


def test_what_is_refused_is_said(made: Callable[..., tuple[WeightUpdates, FakeWeights]]) -> None:
    updates, _ = made(ModelError("it is another model"))
    updates.ask(CheckWeights(1, "/new"))
    updates.run(resting=True)
    assert list(updates.answers) == [WeightsAnswer(1, "it is another model")]


@pytest.mark.parametrize("failure", [ModelError("truncated"), OSError(5, "Input/output error")])
def test_what_breaks_off_ends_the_process(
    failure: Exception, made: Callable[..., tuple[WeightUpdates, FakeWeights]]
) -> None:
    """Not as a mistake of the operator's, which would keep it from beginning anew."""
    updates, _ = made(failure)
    updates.ask(WriteWeights(1, "/new", "1"))
    with pytest.raises(BrokenWeights, match="the weights are of no version"):
        updates.run(resting=True)
    assert updates.version == "0"
    assert not updates.answers


def test_a_new_scheduler_is_told_of_what_it_asks_alone(made: Callable[..., tuple[WeightUpdates, FakeWeights]]) -> None:
    updates, _ = made()
    updates.ask(WriteWeights(1, "/new", "1"))
    updates.run(resting=True)
    updates.ask(CheckWeights(2, "/other"))
    updates.forget()
    assert not updates.busy
    assert (updates.path, updates.version) == ("/new", "1")


def test_steps_go_on_while_it_looks_and_not_while_it_writes(
    made: Callable[..., tuple[WeightUpdates, FakeWeights]],
) -> None:
    updates, weights = made()
    updates.ask(CheckWeights(1, "/new"))
    updates.ask(WriteWeights(2, "/new", "v2"))
    updates.ask(SumWeights(3))
    assert not updates.run(resting=False)
    assert [answer.number for answer in updates.answers] == [1]
    assert not updates.run(resting=False)
    assert weights.seen == [("check", Path("/new"))]
    assert updates.run(resting=True)
    updates.run(resting=False)
    assert len(updates.answers) == 2
    updates.run(resting=True)
    assert updates.answers[-1] == WeightsAnswer(3, digests=weights.digests())


def test_tensors_and_the_version_that_ends_their_update(
    made: Callable[..., tuple[WeightUpdates, FakeWeights]],
) -> None:
    updates, weights = made()
    tensors = (WeightTensor("a", "float32", (1,), (("cpu", b"x"),)),)
    updates.ask(CheckWeights(1, IN_MEMORY, tensors))
    updates.ask(CheckWeights(2, IN_MEMORY, tensors, "group"))
    updates.ask(WriteWeights(3, PARTIAL, "", tensors))
    for _ in range(3):
        updates.run(resting=True)
    assert [answer.error for answer in updates.answers][::2] == ["", ""]
    assert "there is no group 'group'" in updates.answers[1].error
    assert [what for what, _ in weights.seen] == ["look at 1, True", "copy 1"]
    assert updates.path == PARTIAL
    updates.ask(WriteWeights(4, IN_MEMORY, "v3"))
    assert updates.run(resting=True)
    assert (updates.path, updates.version, len(weights.seen)) == (IN_MEMORY, "v3", 2)


def test_a_trainer_that_is_not_there_is_said(made: Callable[..., tuple[WeightUpdates, FakeWeights]]) -> None:
    updates, _ = made()
    updates.ask(MeetTrainer(1, JoinGroup(0, "group")))
    updates.run(resting=False)
    assert "there is no group 'group'" in updates.answers[0].error
