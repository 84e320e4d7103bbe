"""A draft model of the model's tokens whose tables are padded to another size.

Models of one family share a tokenizer and yet differ in the rows of their embedding, which are rounded up to suit a
device. Ids beyond the tokenizer stand for nothing, so it does not matter what a draft model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from penstock.engine_core.execution.forward import Network
from penstock.engine_core.execution.pages import Pages
from penstock.kernels.attention import AttentionBatch

LEAST = -30000.0  # logit of an id that the draft model lacks; in range of every type


def fitted(model: Network, own: int, wanted: int) -> Network:
    """The model with logits of `wanted` ids, for ids below that, where its tables have `own`."""
    return model if own == wanted else PaddedModel(model, own, wanted)


class PaddedModel:
    """A network with another vocabulary size than its own."""

    def __init__(self, model: Network, own: int, wanted: int) -> None:
        self._model = model
        self._own, self._wanted = own, wanted

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]. An id that the model lacks is its last one."""
        if self._own < self._wanted:
            input_ids = input_ids.clamp(max=self._own - 1)
        return self._model.forward(input_ids, positions, attention, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, wanted]."""
        logits = self._model.logits(hidden)
        if self._own > self._wanted:
            return logits[:, : self._wanted]
        return pad(logits, (0, self._wanted - self._own), value=LEAST)
