"""Random weights for speed work: made on the device, the same for the same seed, of a scale that keeps logits alive."""

from __future__ import annotations

import zlib

import torch

from engine_core.models.layers import Destination


def fill_random(destinations: dict[str, Destination], seed: int) -> None:
    """Matrices are normal with variance 1 / fan-in, norms are one and biases zero: every sum keeps unit scale.

    Each tensor has a stream of its own, seeded by its name and its place in the whole, so that ranks agree on what they
    repeat.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, destination in destinations.items():
        tensor = destination.tensor
        if tensor is None:
            continue
        if not destination.fan_in:
            tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device))
        generator.manual_seed(seed ^ zlib.crc32(f"{name}:{destination.start}".encode()))
        tensor.normal_(std=destination.fan_in**-0.5, generator=generator)
