"""What a prewarm collects, and that it is compiled; on a GPU, that a prewarmed runner compiles nothing more."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
import torch
import triton

from penstock.engine_core.execution.compilation import (
    INDEXERS,
    OfflineDriver,
    UncompiledKernel,
    compile_kernel,
    compile_kernels,
    prewarm,
)


def ask(module: str, name: str, form: str, preload: object = print) -> bool:
    """Triton's question whether to leave a kernel out."""
    hook = triton.knobs.runtime.jit_cache_hook
    assert hook is not None
    fn = SimpleNamespace(module=module, name=name, jit_function=SimpleNamespace(preload=preload))
    return bool(hook(key="", repr="", fn=fn, compile={"specialization_data": form}, is_manual_warmup=False))


def test_each_form_of_a_kernel_is_noted_once_and_not_run() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with prewarm() as uncompiled:
        assert ask("penstock.kernels.norm_triton", "norm", "a")
        assert ask("penstock.kernels.norm_triton", "norm", "b")
        assert ask("penstock.kernels.norm_triton", "norm", "a")
        assert ask("penstock.kernels.rope_triton", "norm", "a")
    assert [one.specialization for one in uncompiled] == ["a", "b", "a"]
    assert triton.knobs.runtime.jit_cache_hook is before


def test_a_kernel_whose_results_are_indexes_runs() -> None:
    for module in INDEXERS:
        with prewarm() as uncompiled:
            assert not ask(module, "gather", "a")
        assert uncompiled == []


def test_the_hook_is_given_back_after_an_error() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with pytest.raises(ValueError, match="no"), prewarm():
        raise ValueError("no")
    assert triton.knobs.runtime.jit_cache_hook is before


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
    compile_kernels([UncompiledKernel(Kernel, str(number), None) for number in range(20)], device)
    assert sorted(made, key=int) == [str(number) for number in range(20)]
    assert set(devices) == {1}
    compile_kernels([], device)


def test_a_kernel_that_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", id)

    def preload(form: str) -> None:
        raise RuntimeError(form)

    with pytest.raises(RuntimeError, match="broken"):
        compile_kernels([UncompiledKernel(preload, "broken", None)], torch.device("cuda", 0))


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
    with prewarm(compilers) as uncompiled:
        for form in ("a", "b", "a"):
            ask("penstock.kernels.norm_triton", "norm", form)
            assert compilers.asked[-1] == (
                compile_kernel,
                "penstock.kernels.norm_triton",
                "norm",
                uncompiled[-1].specialization,
                "a target",
            )
    assert [one.worker for one in uncompiled] == compilers.futures
    assert len(uncompiled) == 2


@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_kernel_is_loaded_when_its_process_has_ended_and_made_here_where_that_failed(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", id)
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
            worker.set_exception(RuntimeError("no compiler"))

    timer = threading.Timer(0.05, finish)
    timer.start()
    compile_kernels([UncompiledKernel(Kernel, "a", worker)], torch.device("cuda", 0))
    timer.join()
    assert order == [end, "preload a"]


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
    with prewarm() as uncompiled:
        for plan in plans:
            runner.collect(runner.launch(plan))
    assert uncompiled == []
