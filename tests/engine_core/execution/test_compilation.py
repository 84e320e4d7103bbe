"""What a prewarm collects, and that it is compiled; on a GPU, that a prewarmed runner compiles nothing more."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from penstock.engine_core.execution import model_runner
from penstock.engine_core.execution.compilation import INDEXERS, UncompiledKernel, compile_kernels, prewarm
from penstock.engine_core.execution.model_runner import Runner
from penstock.kernels import gluon
from penstock.kernels.triton_names import KernelLaunch, OfflineDriver, compile_offline

NORM = "penstock.kernels.norm_triton"
HOPPER = "penstock.kernels.attention_hopper"


def ask(module: str, name: str, form: str, preload: object = print) -> bool:
    """Triton's question whether to leave a kernel out."""
    hook = triton.knobs.runtime.jit_cache_hook
    assert hook is not None
    fn = SimpleNamespace(module=module, name=name, jit_function=SimpleNamespace(preload=preload))
    return bool(hook(key="", repr="", fn=fn, compile={"specialization_data": form}, is_manual_warmup=False))


def uncompiled(
    preload: Callable[[str], Any], form: str, worker: Future[None] | None = None, module: str = NORM
) -> UncompiledKernel:
    return UncompiledKernel(KernelLaunch(module, "kernel", form, preload), worker)


def refuse(form: str) -> None:
    raise RuntimeError(f"{form} cannot be lowered\nand more lines")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "set_device", id)
    return torch.device("cuda", 0)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is given up in a test is there again after it."""
    for module in gluon.MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    gluon.load.cache_clear()
    yield
    for module in gluon.MODULES:
        sys.modules.pop(module, None)
    gluon.load.cache_clear()


def test_each_form_of_a_kernel_is_noted_once_and_not_run() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with prewarm() as found:
        assert ask(NORM, "norm", "a")
        assert ask(NORM, "norm", "b")
        assert ask(NORM, "norm", "a")
        assert ask("penstock.kernels.rope_triton", "norm", "a")
    assert [one.launch.specialization for one in found] == ["a", "b", "a"]
    assert triton.knobs.runtime.jit_cache_hook is before


def test_a_kernel_whose_results_are_indexes_runs() -> None:
    for module in INDEXERS:
        with prewarm() as found:
            assert not ask(module, "gather", "a")
        assert found == []


def test_the_hook_is_given_back_after_an_error() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with pytest.raises(ValueError, match="no"), prewarm():
        raise ValueError("no")
    assert triton.knobs.runtime.jit_cache_hook is before


def test_a_triton_that_tells_of_kernels_otherwise_compiles_them_as_they_are_launched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with prewarm() as found:
        hook = triton.knobs.runtime.jit_cache_hook
        assert not hook(fn=SimpleNamespace(module=NORM, name="norm"), compile={})
    assert found == []
    assert caplog.messages == ["prewarm_unavailable"]


def test_a_triton_without_the_hook_compiles_kernels_as_they_are_launched(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "knobs", SimpleNamespace(runtime=SimpleNamespace()))
    with prewarm() as found:
        pass
    assert found == []
    assert caplog.messages == ["prewarm_unavailable"]


def test_all_are_made_in_threads_that_stand_at_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, made = [], []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)

    class Kernel:
        def __init__(self, form: str) -> None:
            self.form = form

        @property
        def run(self) -> None:
            assert threading.current_thread() is not threading.main_thread()
            made.append(self.form)

    device = torch.device("cuda", 1)
    assert compile_kernels([uncompiled(Kernel, str(number)) for number in range(20)], device)
    assert sorted(made, key=int) == [str(number) for number in range(20)]
    assert set(devices) == {1}
    assert compile_kernels([], device)


def test_a_kernel_that_cannot_be_compiled_is_an_error(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        compile_kernels([uncompiled(refuse, "broken")], device)


def test_a_kernel_in_gluon_that_cannot_be_compiled_is_given_up(
    device: torch.device, restored: None, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names it and the cause; the others are made all the same."""
    made: list[str] = []

    def preload(form: str) -> object:
        made.append(form)
        return SimpleNamespace(run=None)

    kernels = [uncompiled(refuse, "a", module=HOPPER), uncompiled(refuse, "b", module=HOPPER), uncompiled(preload, "c")]
    assert not compile_kernels(kernels, device)
    assert made == ["c"]
    (record,) = caplog.records
    assert record.message == "kernel_unavailable"
    assert vars(record)["fields"] == {
        "kernel": "kernel", "cause": "RuntimeError: a cannot be lowered", "instead": "a general Triton kernel",
    }  # fmt: skip
    assert gluon.load("attention_hopper") is None
    assert gluon.load("linear_hopper") is not None


def test_what_takes_over_from_a_kernel_is_compiled_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched again until everything that they launch is there."""
    launched: list[str] = []
    answers = iter([False, True])
    monkeypatch.setattr(model_runner, "compile_kernels", lambda found, device: next(answers))
    runner: Any = SimpleNamespace(
        options=SimpleNamespace(device=torch.device("cuda", 0), encoder=None),
        launch=launched.append,
        _all_graphs=lambda: (),
    )
    Runner.compile(runner, ["a plan", "another"])  # type: ignore[list-item]
    assert launched == ["a plan", "another"] * 2


class Compilers(Executor):
    """Processes that never begin; what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.futures: list[Future[None]] = []

    def submit(self, work: object, /, *words: object, **_: object) -> Future[None]:  # type: ignore[override]
        self.asked.append((work, *words))
        self.futures.append(Future())
        return self.futures[-1]


def test_processes_begin_with_each_kernel_as_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", OfflineDriver("a target"))
    compilers = Compilers()
    with prewarm(compilers) as found:
        for form in ("a", "b", "a"):
            ask(NORM, "norm", form)
            expected = (compile_offline, NORM, "norm", found[-1].launch.specialization, "a target")
            assert compilers.asked[-1] == expected
    assert [one.worker for one in found] == compilers.futures
    assert len(found) == 2


@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_kernel_is_loaded_when_its_process_has_ended_and_made_here_where_that_failed(
    end: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    worker: Future[None] = Future()
    order: list[str] = []

    class Kernel:
        def __init__(self, form: str) -> None:
            order.append(f"preload {form}")

        run = None

    def finish() -> None:
        order.append(end)
        if end == "done":
            worker.set_result(None)
        else:
            worker.set_exception(ImportError("cannot import name 'CudaLauncher'"))

    timer = threading.Timer(0.05, finish)
    timer.start()
    assert compile_kernels([uncompiled(Kernel, "a", worker)], device)
    timer.join()
    assert order == [end, "preload a"]
    assert caplog.messages == ["compile_workers_failed"] * (end == "failed")


def test_a_process_has_a_target_and_no_gpu() -> None:
    driver = OfflineDriver("a target")
    assert driver.get_current_target() == "a target"
    assert driver.get_current_device() == 0


@pytest.mark.gpu
def test_nothing_is_left_to_compile_after_a_prewarm() -> None:
    from penstock.engine_core.execution.dummy_runs import warmup_steps
    from tests.engine_core.execution.test_gpu import gpu_model, gpu_runner

    runner = gpu_runner(gpu_model(), graphs=False)
    plans = warmup_steps(runner.sizes, 100)
    runner.compile(plans)
    with prewarm() as found:
        for plan in plans:
            runner.collect(runner.launch(plan))
    assert found == []
