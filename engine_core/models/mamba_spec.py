"""Mamba-2 (Dao and Gu, 2024) as data. Imports no torch: planning reads it, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from penstock.engine_core.models.recurrence_spec import RecurrenceSpec, Shape, StateShape


class MambaSpec(RecurrenceSpec, frozen=True, kw_only=True):
    """`state_dim` times `head_dim` numbers for each head, which decay by time steps. What is written to the state and
    what reads it are those of a group of heads. The convolution is over inputs and both."""

    place: ClassVar[str] = "mamba"
    output: ClassVar[str] = "out_proj"

    heads: int  # a multiple of the groups
    head_dim: int
    groups: int
    state_dim: int
    conv_bias: bool = True
    # Of what the gate multiplies: behind it ("gated"), before it ("plain"); empty: none.
    norm: str = "gated"
    scales: tuple[float, ...] = ()  # of a token's gates, inputs, writes, reads and times, before all else; empty: none

    @property
    def inner(self) -> int:
        """Numbers in all inputs of a token."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Numbers that a token writes to the states by, of all groups; as many read them."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.shared

    def products(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"in_proj": (self.inner + self.channels + self.heads, hidden), self.output: (hidden, self.inner)}

    def others(self) -> Mapping[str, Shape]:
        heads = (self.heads,)
        found: dict[str, Shape] = {"conv1d.weight": (self.channels, 1, self.width), "A_log": heads, "D": heads}
        if self.conv_bias:
            found["conv1d.bias"] = (self.channels,)
        if self.norm:
            found["norm.weight"] = (self.inner,)
        return found | {"dt_bias": heads}

    def state(self) -> StateShape:
        return StateShape(
            channels=self.channels, width=self.width, heads=self.heads, key_heads=self.groups, key_dim=self.state_dim,
            value_dim=self.head_dim,
        )  # fmt: skip

    def split(self) -> tuple[str, int]:
        return "groups of Mamba heads", self.groups

    def share(self, size: int) -> RecurrenceSpec:
        return msgspec.structs.replace(self, heads=self.heads // size, groups=self.groups // size)

    def cut(self, name: str) -> int:
        return self.inner if name == self.output else math.gcd(self.inner, self.shared, self.heads)
