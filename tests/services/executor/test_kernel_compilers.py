"""Forks that compile: as many as asked for, deaf to the executor's signals, gone with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from penstock.services.executor import kernel_compilers as compiling
from penstock.services.executor.kernel_compilers import begin, compilers, forks, log_compilations
from penstock.services.supervisor.process import Stop

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 30.0


def ended(process: int) -> bool:
    """Whether the process of a descriptor ends in time."""
    try:
        return bool(select.select([process], [], [], DEADLINE)[0])
    finally:
        os.close(process)


def wakeup_descriptor() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def test_a_cpu_has_nothing_to_compile() -> None:
    with compilers(torch.device("cpu")) as pool:
        assert pool is None


def test_a_gpu_has_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(compiling, "MAX_COMPILERS", 1)
    with compilers(torch.device("cuda", 0)) as pool:
        assert pool is not None
        assert pool.submit(os.getppid).result() == os.getpid()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_work_and_are_gone_behind_the_context() -> None:
    before = set(children())
    with forks(2) as pool:
        assert pool.submit(pow, 3, 4).result() == 81
        made = [os.pidfd_open(pid) for pid in children() if pid not in before]
        assert len(made) == 2
    assert all(ended(process) for process in made)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_signal_to_a_fork_is_not_heard_by_the_executor() -> None:
    stop = Stop()
    try:
        with forks(1) as pool:
            assert pool.submit(signal.getsignal, signal.SIGTERM).result() == signal.SIG_DFL
            assert pool.submit(wakeup_descriptor).result() == -1
        assert not stop.asked
    finally:
        stop.close()


def test_a_kernel_that_is_compiled_late_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = triton.knobs.runtime
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, name, None)
    log_compilations(torch.device("cpu"))
    assert runtime.jit_cache_hook is None
    log_compilations(torch.device("cuda", 0))
    told: dict[str, Any] = {"key": "", "repr": "scatter[num_warps=4](x: *fp32)", "fn": None, "compile": {},
                            "is_manual_warmup": False, "already_compiled": False}  # fmt: skip
    assert runtime.jit_cache_hook is not None
    assert not runtime.jit_cache_hook(**told)  # else nothing would be compiled
    assert not caplog.records
    assert runtime.jit_post_compile_hook is not None
    runtime.jit_post_compile_hook(**told)
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == ("WARNING", "kernel_compiled")
    assert vars(line)["fields"]["kernel"] == told["repr"]
    assert vars(line)["fields"]["seconds"] >= 0


def test_forks_end_with_a_killed_executor() -> None:
    script = (
        "import os, sys, time\n"
        "from penstock.services.executor.kernel_compilers import forks\n"
        "with forks(2) as pool:\n"
        "    pool.submit(os.getpid).result()\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    executor = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert executor.stdout is not None
    try:
        made = [os.pidfd_open(int(word)) for word in executor.stdout.readline().split()]
        assert len(made) == 2
    finally:
        executor.kill()
        executor.communicate()
    assert all(ended(process) for process in made)


def test_a_fork_that_is_late_ends_at_once() -> None:
    """Its parent is not the one that it was made by: that one has ended."""
    child = os.fork()
    if child == 0:
        try:
            begin(os.getpid())
        except SystemExit:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def children() -> list[int]:
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
