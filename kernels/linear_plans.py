"""The plans of a device's products: measured ones where there are some, else those of the rules.

Measured rows ship in `measured/`, a file for each chip, and are made by `penstock tune MODEL --output FILE`. A file
serves the chip that it names. What a start measures is added by `learn`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import torch

from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.linear_tilings import Plan, Product, Way, fits, ruled

log = logging.getLogger(__name__)

SHIPPED = "measured"  # the folder beside this file
Key = tuple[int, int, torch.dtype, bool, int, str, bool]  # fields of a product, and whether it is invariant


class MeasuredPlan(msgspec.Struct, frozen=True):
    """The fastest ways of one product on one chip."""

    width: int
    inputs: int
    dtype: Literal["bfloat16", "float16"]
    ways: tuple[tuple[float, Way], ...]  # each for up to so many rows, ascending
    gated: bool = False
    experts: int = 0
    weight: str = ""

    @property
    def product(self) -> Product:
        return Product(self.width, self.inputs, getattr(torch, self.dtype), self.gated, self.experts, self.weight)


class MeasuredTable(msgspec.Struct, frozen=True):
    """What was measured on one chip with one Triton."""

    chip: str
    triton: str
    plans: tuple[MeasuredPlan, ...]


class Plans:
    """The plans of one device, and which products have asked for one."""

    def __init__(self, chip: Chip, tables: Iterable[MeasuredTable] = ()) -> None:
        self.chip = chip
        self.measured: dict[Product, Plan] = {}
        self.asked: dict[Product, Plan] = {}  # in the order in which they came
        self._found: dict[Key, Plan] = {}
        for table in tables:
            self.learn(table)

    def find(self, key: Key) -> Plan:
        """The plan of a product, the same object until something is learned."""
        found = self._found.get(key)
        if found is None:
            width, inputs, dtype, gated, experts, weight, invariant = key
            product = Product(width, inputs, dtype, gated, experts, weight)
            found = None if invariant else self.measured.get(product)
            if found is None:
                found = ruled(product, self.chip, invariant=invariant)
            if not invariant:
                self.asked[product] = found
            self._found[key] = found
        return found

    def learn(self, table: MeasuredTable) -> None:
        """Take over measured plans, but none of another chip, or with a way that this one cannot run."""
        if table.chip != self.chip.name:
            return
        for plan in table.plans:
            if plan.ways and all(fits(way, plan.product, self.chip) for _, way in plan.ways):
                self.measured[plan.product] = Plan(*zip(*plan.ways, strict=True))
        self._found.clear()


@lru_cache(maxsize=64)
def plans_of(device: torch.device) -> Plans:
    """The plans of a device, made from the tables that ship."""
    chip = chip_of(device)
    return Plans(chip, shipped() if chip.runs_triton else ())


def shipped() -> Iterator[MeasuredTable]:
    """The tables that come with Penstock."""
    return (read(path) for path in sorted(Path(__file__).with_name(SHIPPED).glob("*.json")))


def read(path: Path) -> MeasuredTable:
    """A table from its file. Raises msgspec's ValidationError or DecodeError, and OSError."""
    return msgspec.json.decode(path.read_bytes(), type=MeasuredTable)
