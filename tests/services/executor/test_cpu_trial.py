"""What a CPU's trial chooses, and that nothing it meets ends the start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config, RunConfig
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.services.executor import cpu_trial
from penstock.services.executor.cpu_trial import Times, best, choose, own_cores, physical_cores, thread_counts

SPEC = read_spec(demo_folder())
FASTER = Times({("float32", 1): 10e-6, ("bfloat16", 1): 5e-6})


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that were set, in this process."""
    found: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(cpu_trial, "has_bfloat16", lambda: True)
    monkeypatch.setattr(cpu_trial, "own_cores", lambda config: 8)
    monkeypatch.setattr(cpu_trial, "LARGE", 1)
    return found


def config(dtype: str = "auto", threads: int = 0) -> Config:
    return Config(model=ModelConfig(dtype=dtype), executor=ExecutorConfig(device="cpu", cpu_threads=threads))


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({("float32", 1): 10, ("bfloat16", 1): 5}, ("bfloat16", 1)),
        ({("float32", 1): 10, ("bfloat16", 1): 9}, ("float32", 1)),  # not worth its rounding
        ({("float32", 1): 10, ("bfloat16", 1): 40}, ("float32", 1)),  # emulated
        ({("float32", 1): 10}, ("float32", 1)),  # bfloat16 was wrong
        ({("bfloat16", 1): 10, ("bfloat16", 4): 3}, ("bfloat16", 4)),  # as the option says
        ({("float32", 1): 10, ("float32", 4): 6, ("float32", 7): 5.9}, ("float32", 4)),  # no gain beyond four
        ({("float32", 1): 10, ("float32", 4): 6, ("float32", 7): 4}, ("float32", 7)),
        ({("float32", 1): 10, ("float32", 4): 90, ("float32", 7): 99}, ("float32", 1)),  # others have the cores
        ({("float32", 1): 10, ("float32", 4): 1, ("bfloat16", 1): 5, ("bfloat16", 4): 4.5}, ("bfloat16", 1)),
    ],
)
def test_another_type_and_more_threads_must_show_a_gain(
    times: dict[tuple[str, int], float], chosen: tuple[str, int]
) -> None:
    assert best(times) == chosen


def test_products_are_tried_in_each_type_with_each_number_of_threads(threads: list[int]) -> None:
    times = cpu_trial.measure(100, 64, ("float32", "bfloat16"), (1, 2))
    assert list(times) == [("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)]
    assert min(times.values()) > 0
    assert threads == [1, 2, 1, 2]


def test_a_type_whose_products_are_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_trial.linear
    for factor in (1.1, float("nan")):
        monkeypatch.setattr(
            cpu_trial, "linear",
            lambda x, weight, by=factor: right(x, weight) * (1 if x.dtype is torch.float32 else by),
        )  # fmt: skip
        assert list(cpu_trial.measure(100, 64, ("float32", "bfloat16"), (1,))) == [("float32", 1)]
        assert list(cpu_trial.measure(100, 64, ("bfloat16",), (1,))) == [("bfloat16", 1)], "as the option says"


def test_what_is_chosen_is_set_and_told(
    threads: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[object, ...]] = []

    def measured(*given: object) -> Times:
        asked.append(given)
        return FASTER

    monkeypatch.setattr(cpu_trial, "measure", measured)
    monkeypatch.setattr(cpu_trial, "forks", Here)
    with caplog.at_level("INFO"):
        assert choose(config(), SPEC) is torch.bfloat16
    assert threads == [1]
    assert asked == [(4096, 320, ("float32", "bfloat16"), (1, 4, 7))]
    assert [record.message for record in caplog.records] == ["cpu"]


@pytest.mark.parametrize(
    ("given", "environment", "types", "counts"),
    [
        (config("bfloat16"), "", ("bfloat16",), (1, 4, 7)),
        (config(threads=3), "", ("float32", "bfloat16"), (3,)),
        (config(), "5", ("float32", "bfloat16"), (5,)),
        (config(), "6,2", ("float32", "bfloat16"), (6,)),
        (config(threads=3), "5", ("float32", "bfloat16"), (3,)),
        (config("float32", 3), "", None, None),
        (config("float16"), "2", None, None),
    ],
)
def test_what_is_given_is_not_tried(
    given: Config, environment: str, types: object, counts: object, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def measured(outputs: int, inputs: int, types: tuple[str, ...], counts: tuple[int, ...]) -> Times:
        asked.append((types, counts))
        return {(types[0], counts[0]): 1.0}

    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr(cpu_trial, "measure", measured)
    monkeypatch.setattr(cpu_trial, "forks", Here)
    found = choose(given, SPEC)
    assert asked == ([] if types is None else [(types, counts)])
    assert given.model.dtype in ("auto", str(found).removeprefix("torch."))
    assert threads == [given.executor.cpu_threads or int(environment.partition(",")[0] or 1)]


def test_a_float32_checkpoint_and_a_processor_without_bfloat16_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_trial.types_of(SPEC) == ("float32", "bfloat16")
    for dtype in ("float32", "float16"):
        assert cpu_trial.types_of(msgspec.structs.replace(SPEC, dtype=dtype)) == ("float32",)
    monkeypatch.setattr(cpu_trial, "has_bfloat16", lambda: False)
    assert cpu_trial.types_of(SPEC) == ("float32",)


def test_a_small_model_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model's, and so the same on every processor."""
    monkeypatch.undo()
    monkeypatch.setattr(cpu_trial, "has_bfloat16", lambda: True)
    assert cpu_trial.types_of(SPEC) == ("float32",)


def dies(*given: object) -> Times:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def fails(*given: object) -> Times:
    raise RuntimeError("could not create a primitive")


@pytest.mark.parametrize("trial", [dies, fails])
def test_a_processor_that_cannot_run_what_it_announces_serves_in_float32(
    trial: object, threads: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_trial, "measure", trial)
    assert choose(config(), SPEC) is torch.float32
    assert threads == [4]
    assert "cpu_trial_failed" in [record.message for record in caplog.records]


def test_cores_are_shared_by_the_executors_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cpu_trial, "usable_cores", lambda: 16)
    monkeypatch.setattr(cpu_trial, "physical_cores", lambda usable: 12)
    four = ModelConfig(tensor_parallel_size=4)
    assert own_cores(Config(model=four)) == 3
    assert own_cores(Config(model=four, run=RunConfig(parts="executor:2-3"))) == 6
    assert own_cores(Config(model=ModelConfig(tensor_parallel_size=16))) == 1


def test_a_core_is_left_to_the_other_processes() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 3, 4, 64)] == [(1,), (1,), (1, 2), (1, 2, 3), (1, 32, 63)]


def test_hyperthreads_are_one_core(tmp_path: Path) -> None:
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        place = tmp_path / f"cpu{number}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(range(4), tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 9}, tmp_path) == 2, "one that the kernel tells nothing of is a core"


class Here:
    """A pool whose one worker is this process."""

    def __init__(self, count: int) -> None:
        assert count == 1

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: object, *given: object) -> Result:
        return Result(function(*given))  # type: ignore[operator]


class Result(msgspec.Struct):
    value: Times

    def result(self, limit: float) -> Times:
        return self.value
