"""What a rehearsal notes, and that it is made; on a GPU, that a rehearsed runner compiles nothing more."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import triton

from engine_core.execution.compilation import INDEXERS, Missing, compile_all, rehearsal


def ask(module: str, name: str, form: str, preload: object = print) -> bool:
    """Triton's question whether to leave a kernel out."""
    hook = triton.knobs.runtime.jit_cache_hook
    assert hook is not None
    fn = SimpleNamespace(module=module, name=name, jit_function=SimpleNamespace(preload=preload))
    return bool(hook(key="", repr="", fn=fn, compile={"specialization_data": form}, is_manual_warmup=False))


def test_each_form_of_a_kernel_is_noted_once_and_not_run() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with rehearsal() as missing:
        assert ask("kernels.norm_triton", "norm", "a")
        assert ask("kernels.norm_triton", "norm", "b")
        assert ask("kernels.norm_triton", "norm", "a")
        assert ask("kernels.qkv_triton", "norm", "a")
    assert [one.form for one in missing] == ["a", "b", "a"]
    assert triton.knobs.runtime.jit_cache_hook is before


def test_a_kernel_whose_results_are_indexes_runs() -> None:
    (module,) = INDEXERS
    with rehearsal() as missing:
        assert not ask(module, "gather", "a")
    assert missing == []


def test_the_hook_is_given_back_after_an_error() -> None:
    before = triton.knobs.runtime.jit_cache_hook
    with pytest.raises(ValueError, match="no"), rehearsal():
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
    compile_all([Missing(Kernel, str(number)) for number in range(20)], device)
    assert sorted(made, key=int) == [str(number) for number in range(20)]
    assert set(devices) == {1}
    compile_all([], device)


def test_a_kernel_that_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", id)

    def preload(form: str) -> None:
        raise RuntimeError(form)

    with pytest.raises(RuntimeError, match="broken"):
        compile_all([Missing(preload, "broken")], torch.device("cuda", 0))


@pytest.mark.gpu
def test_nothing_is_left_to_compile_after_a_rehearsal() -> None:
    from engine_core.execution.trial import warm_steps
    from tests.engine_core.execution.test_gpu import gpu_model, gpu_runner

    runner = gpu_runner(gpu_model(), graphs=False)
    plans = warm_steps(runner.sizes, 100)
    runner.compile(plans)
    with rehearsal() as missing:
        for plan in plans:
            runner.collect(runner.launch(plan))
    assert missing == []
