"""Muon for the matrices of the layers, AdamW for embeddings and norms.

Muon: https://kellerjordan.github.io/posts/muon; the update's scale and decay follow https://arxiv.org/abs/2502.16982,
so that both share one learning rate.
"""

from collections import defaultdict

import torch
from torch import nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, by Newton-Schulz, in bf16 on a GPU. [count, rows, columns] to the same."""
    a, b, c = _COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon:
    """Momentum orthogonalised per matrix; matrices of one shape are stacked and done at once. Owns the momenta."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float, decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self._groups = list(groups.values())
        self._momenta = [torch.zeros((len(group), *group[0].shape), device=group[0].device) for group in self._groups]
        self._momentum = momentum
        self._decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate `rate`; gradients are dropped."""
        for group, momenta in zip(self._groups, self._momenta, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group])  # [count, rows, columns]
            momenta.lerp_(gradients, 1 - self._momentum)
            update = orthogonal(gradients.lerp(momenta, self._momentum)).float()
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self._decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * scale)
            for matrix in group:
                matrix.grad = None


class Optimizer:
    """Both rules behind one step."""

    def __init__(self, network: nn.Module, decay: float = 0.1, momentum: float = 0.95) -> None:
        named = list(network.named_parameters())
        self._muon = Muon([p for name, p in named if p.ndim == 2 and name != "embed_tokens.weight"], momentum, decay)
        rest = [p for name, p in named if p.ndim != 2 or name == "embed_tokens.weight"]
        self._adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)

    def step(self, rate: float) -> None:
        """One update of every parameter with learning rate `rate`; gradients are dropped."""
        self._muon.step(rate)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
