"""Chooses how products of unknown shapes, or on an unknown chip, are cut: by measurement, once.

What was measured is kept in a file for each product, beside Triton's compiled kernels: by chip, Triton, the code that
says what there is to measure, type and shape. So a release with further ways measures anew. Files are replaced whole,
and any number of processes may read and write them. The rules' way stays where no other is faster by more than the
noise.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from penstock.kernels import grouped_tilings, linear_tilings
from penstock.kernels.chip import Chip
from penstock.kernels.grouped_linear import GROUPED
from penstock.kernels.linear_plans import MeasuredPlan, MeasuredTable, Plans, read
from penstock.kernels.linear_tilings import SCALED, Product, Way, candidates, ruled

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)  # the last stands for all larger numbers
ROWS_OF_GROUPS = (*ROWS[:-1], 1024, 2048)  # of weights in groups, which are made dense for more rows
MEANS = (0.25, 4, 8, 16, 32, 128)  # pairs for each expert, likewise
SMALLEST = 1 << 20  # elements of a weight: smaller ones stay in the cache, and launches weigh more than tiles
NOISE = 0.94  # of the rules' time, which another way must be below; smaller gains are lost among other kernels


@dataclass(frozen=True)
class Job:
    """What is measured: ways of a product of so many rows; of experts, with so many pairs for each. The first way's
    result is what the others' are held to."""

    product: Product
    rows: float
    ways: tuple[Way, ...]
    rule: Way


Times = Mapping[Way, float]  # microseconds
Dropped = Callable[[Job, Way, str], None]  # a way, and why it is left out
Measure = Callable[[Sequence[Job]], Sequence[Times]]


class Choice(msgspec.Struct, frozen=True):
    """The fastest way of a job beside the rules'. Microseconds; infinite: it could not be measured."""

    product: Product
    rows: float
    way: Way
    microseconds: float
    rule: Way
    ruled: float


def tunable(products: Iterable[Product]) -> list[Product]:
    """Those for which a measured plan could matter, and which can be measured."""
    return [
        one
        for one in products
        if one.dtype.itemsize == 2
        and one.width * one.inputs >= SMALLEST
        and (not one.experts or one.weight in ("", *SCALED))
    ]


def untuned(plans: Plans) -> list[Product]:
    """Products that asked for a plan and have no measured one."""
    return [product for product in tunable(plans.asked) if product not in plans.measured]


def jobs_of(product: Product, chip: Chip) -> list[Job]:
    """The measurements that make a product's plan."""
    plan, found = ruled(product, chip, invariant=False), []
    for rows in MEANS if product.experts else ROWS_OF_GROUPS if product.weight in GROUPED else ROWS:
        rule = plan.way(rows)
        first = rule if product.experts else None
        found.append(Job(product, rows, tuple(dict.fromkeys((first, rule, *candidates(product, rows, chip)))), rule))
    return found


def choose(job: Job, times: Times) -> Choice:
    """The rules' way, unless another is faster by more than the noise, or it could not be measured."""
    own = times.get(job.rule, float("inf"))
    best = min(times, key=lambda way: times[way], default=job.rule)
    if not times or times[best] > NOISE * own:
        best = job.rule
    return Choice(job.product, job.rows, best, times.get(best, float("inf")), job.rule, own)


def tune(
    plans: Plans, products: Sequence[Product], measure: Measure, triton: str
) -> tuple[MeasuredTable, list[Choice]]:
    """Measure these products; their plans are used from now on. Returns them, and what was found."""
    jobs = [job for product in products for job in jobs_of(product, plans.chip)]
    choices = [choose(job, times) for job, times in zip(jobs, measure(jobs), strict=True)]
    found = MeasuredTable(plans.chip.name, triton, tuple(measured(product, choices) for product in products))
    plans.learn(found)
    return found, choices


def measured(product: Product, choices: Iterable[Choice]) -> MeasuredPlan:
    """A product's plan: of neighbouring rows with one way the last."""
    own = [choice for choice in choices if choice.product == product]
    kept = [
        one for one, following in zip(own, [*own[1:], None], strict=True) if not following or following.way != one.way
    ]
    return MeasuredPlan(
        product.width, product.inputs, "float16" if product.dtype == torch.float16 else "bfloat16",
        tuple((one.rows, one.way) for one in kept), product.gated, product.experts, product.weight,
    )  # fmt: skip


def folder_of(root: Path, chip: Chip, triton: str) -> Path:
    """Where a chip's measured plans are kept. A simulated chip has a folder of its own."""
    flags = "".join(str(int(flag)) for flag in (chip.pdl, chip.tma, chip.wgmma))
    return root / slug(f"{chip.name}-{chip.num_sms}-{chip.shared_memory}-{flags}-triton{triton}-{ways_digest()}")


def ways_digest() -> str:
    """Of the modules that say which ways a product has."""
    sources = [Path(str(module.__file__)).read_bytes() for module in (linear_tilings, grouped_tilings)]
    return hashlib.blake2b(b"".join(sources), digest_size=4).hexdigest()


def file_name(plan: MeasuredPlan) -> str:
    kind = f"experts{plan.experts}" if plan.experts else "gated" if plan.gated else "linear"
    weight = f"-{plan.weight}" if plan.weight else ""
    return slug(f"{kind}-{plan.width}x{plan.inputs}-{plan.dtype}{weight}.json")


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def load(root: Path, plans: Plans, triton: str, damaged: Callable[[Path, Exception], None]) -> None:
    """Take over what earlier starts measured. A damaged file is reported and ignored."""
    for path in sorted(folder_of(root, plans.chip, triton).glob("*.json")):
        try:
            plans.learn(read(path))
        except (OSError, msgspec.MsgspecError) as error:
            damaged(path, error)


def store(root: Path, chip: Chip, table: MeasuredTable) -> None:
    """Keep a table's plans, each in its file. Raises OSError."""
    folder = folder_of(root, chip, table.triton)
    folder.mkdir(parents=True, exist_ok=True)
    for plan in table.plans:
        replace_file(folder / file_name(plan), encoded(msgspec.structs.replace(table, plans=(plan,))))


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole: who reads it meanwhile finds the old one, or none. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def encoded(table: MeasuredTable) -> bytes:
    """A table as its file has it: a line for each plan."""
    plans = b",\n".join(map(msgspec.json.encode, table.plans))
    head = msgspec.json.encode({"chip": table.chip, "triton": table.triton})[:-1]
    return head + b',"plans":[\n' + plans + b"\n]}\n"
