"""What a processor does best, found out in some tens of milliseconds at the start: products in the model's own type or
in float32, and with how many threads.

The products run in a fork: a processor that announces an instruction and cannot run it ends the fork alone. OpenMP's
threads wait for each other at every operation, so more of them must show a gain.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from penstock.engine_core.models.memory_estimate import weights
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.linear import has_bfloat16, linear, packed
from penstock.protocol.config import Config
from penstock.protocol.links import Role
from penstock.protocol.parts import parts_of
from penstock.services.executor.kernel_compilers import forks
from penstock.services.supervisor import logs
from penstock.services.supervisor.options import usable_cores

log = logging.getLogger(__name__)

FULL = "float32"
LARGE = 100_000_000  # numbers in a model's weights from which another type is tried
MOST_NUMBERS = 1 << 22  # of the weight: the model's largest, or some of its rows
ROWS = (1, 16)  # that are multiplied at once
TRIES = 4
WRONG = 0.01  # of the largest result: rounding in bfloat16 is a tenth of it
GAIN = 0.8  # share of the time that another type or more threads must stay below
LIMIT = 20.0  # seconds; a machine may be busy
SIBLINGS = "cpu*/topology/thread_siblings_list"
Times = dict[tuple[str, int], float]  # seconds by type and threads


def choose(config: Config, spec: ModelSpec) -> torch.dtype:
    """The type that `--dtype auto` stands for on this CPU; the number of threads is set. What the options or
    OMP_NUM_THREADS say is not tried."""
    asked, cores = config.model.dtype, own_cores(config)
    given = config.executor.cpu_threads or positive(os.environ.get("OMP_NUM_THREADS", ""))
    threads = (given,) if given else thread_counts(cores)
    types = (asked,) if asked != "auto" else types_of(spec)
    chosen, times = (types[0], given or max(1, cores // 2)), Times()  # before a trial
    if len(types) * len(threads) > 1:
        try:
            with forks(1) as pool:
                times = pool.submit(measure, spec.vocab_size, spec.hidden, types, threads).result(LIMIT)
            chosen = best(times)
        except (BrokenProcessPool, Late, RuntimeError) as error:
            logs.warning(log, "cpu_trial_failed", dtype=chosen[0], threads=chosen[1], reason=repr(error))
    tried = {f"{name} with {count}": round(1e6 * seconds) for (name, count), seconds in times.items()}
    logs.info(log, "cpu", dtype=chosen[0], threads=chosen[1], **({"microseconds": tried} if tried else {}))
    torch.set_num_threads(chosen[1])
    found = getattr(torch, chosen[0])
    assert isinstance(found, torch.dtype)
    return found


def types_of(spec: ModelSpec) -> tuple[str, ...]:
    """Those to try. Of a small model's step products are the lesser part, and a trial of products says little: on one
    processor the embedded model was slower in bfloat16 (20 instead of 14 ms with 16 rows), on another faster (7 instead
    of 8)."""
    if spec.dtype != "bfloat16" or weights(spec) < LARGE or not has_bfloat16():
        return (FULL,)
    return FULL, spec.dtype


def measure(outputs: int, inputs: int, types: Sequence[str], threads: Sequence[int]) -> Times:
    """Seconds that products with a weight `[outputs, inputs]` take. A type whose results are wrong is left out."""
    outputs = min(outputs, max(1, MOST_NUMBERS // inputs))
    whole = (torch.arange(outputs * inputs) % 251 - 125).div(500.0).view(outputs, inputs)
    inputs_ = (torch.arange(max(ROWS) * inputs) % 241 - 120).div(500.0).view(-1, inputs)
    found = Times()
    with torch.inference_mode():
        for name in types:
            kind: Any = getattr(torch, name)
            x, weight = inputs_.to(kind), whole.to(kind)
            expected, operand = linear(x.float(), weight.float()), packed(weight)
            error = (linear(x, operand).float() - expected).abs().max() / expected.abs().max()
            if len(types) > 1 and not error <= WRONG:
                continue
            for count in threads:
                torch.set_num_threads(count)
                found[name, count] = sum(min(timed(x[:rows], operand) for _ in range(TRIES)) for rows in ROWS)
    return found


def timed(x: torch.Tensor, weight: torch.Tensor) -> float:
    began = time.perf_counter()
    linear(x, weight)
    return time.perf_counter() - began


def best(times: Times) -> tuple[str, int]:
    """The type and the number of threads that the times speak for."""
    fewest = min(count for _, count in times)
    kind, threads = next(iter(times))[0], fewest
    for name, count in times:
        if count == fewest and times[name, count] < GAIN * times[kind, fewest]:
            kind = name
    for count in sorted(count for name, count in times if name == kind):
        if times[kind, count] < GAIN * times[kind, threads]:
            threads = count
    return kind, threads


def own_cores(config: Config) -> int:
    """Of this host's executors each has the same share of the processor's cores."""
    cores = min(usable_cores(), physical_cores(os.sched_getaffinity(0)))
    return max(1, cores // max(1, len(parts_of(config).get(Role.EXECUTOR, ()))))


def thread_counts(cores: int) -> tuple[int, ...]:
    """One, half of the cores, and all but the one that the other processes need."""
    return tuple(sorted({1, max(1, cores // 2), max(1, cores - 1)}))


def physical_cores(usable: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores behind these processors, of which several may share one. Source: Linux, admin-guide/cputopology."""
    siblings = {path.parent.parent.name: path.read_text().strip() for path in system.glob(SIBLINGS)}
    return len({siblings.get(f"cpu{number}", str(number)) for number in usable})


def positive(text: str) -> int:
    """The number in OMP_NUM_THREADS, whose first place counts; 0 where there is none."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0
