"""What drafts beside a model, as numbers: a draft model, or an EAGLE head. Imports no torch: planning asks, too.

It stands on the last stage of a pipeline, where tokens are sampled, as a whole on each rank.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from penstock.engine_core.execution.estimate import weights
from penstock.engine_core.models.head_spec import HeadSpec, head_weights, read_head
from penstock.engine_core.models.spec import ModelSpec, read_spec


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model by its layers, or a head by its own. A head needs the model's embedding where it stands."""

    layers: ModelSpec
    head: HeadSpec | None = None

    @property
    def weights(self) -> int:
        """Numbers in all its tensors."""
        return weights(self.layers) if self.head is None else head_weights(self.head)

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers at whose beginning a head hears the residual stream."""
        return () if self.head is None else self.head.taps


def read_draft(method: str, folder: Path, target: ModelSpec, names: Collection[str] | None) -> DraftSpec:
    """What `folder` has for a method of protocol.speculation.WITH_MODEL, beside a target as a whole. names: as of
    `read_head`. Raises ModelError naming the file and the key."""
    if method == "eagle":
        head = read_head(folder, target, names)
        return DraftSpec(layers=head.layers, head=head)
    return DraftSpec(layers=read_spec(folder))
