"""Formats into which the weights of an unquantized checkpoint are rounded while they load. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from penstock.engine_core.models.quantization.rules import Quantization, Rule, Selector
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.protocol.engine_config import QUANTIZATIONS

GROUP = 128
LEAST_GROUP = 16
ONLINE: Mapping[str, WeightFormat] = {
    "fp8": WeightFormat(kind="float8", packing="dense", activations="row"),
    "int8": WeightFormat(kind="int8", packing="dense", activations="row"),
    "int4": WeightFormat(kind="grouped", packing="dense", bits=4, group=GROUP),
}
NONE = QUANTIZATIONS[0]


def online(name: str) -> Quantization:
    """Every matrix of the layers in a format: output embedding, embeddings and routers stay."""
    return Quantization(method=name, rules=(Rule(Selector(every=True), ONLINE[name]),))


def fitted(form: WeightFormat, inputs: int) -> WeightFormat | None:
    """The format for a matrix of so many inputs: groups are the largest that divide them. None: it stays as it is."""
    if form.packing != "dense" or not form.group or inputs % form.group == 0:
        return form
    group = math.gcd(form.group, inputs)
    return msgspec.structs.replace(form, group=group) if group >= LEAST_GROUP else None
