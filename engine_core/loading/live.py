"""Weights of another folder read into a model that serves, in the memory that it has: CUDA graphs go on as they are.

What is not read is left as it is: LoRA adapters, which are added to any weights, and a draft model, whose wrong guesses
cost time alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.engine_core.loading import load, unread
from penstock.engine_core.loading.checkpoint import wanted_tensors
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Destination, pack, reopen
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.tensors import named_as
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import check_tensors, read_names
from penstock.protocol.errors import ModelError


class LiveWeights:
    """The weights of this executor's share of a model and of its vision encoder, if it has one.

    folder: the one that they were read from. read: the spec of the whole model in a folder, as the options make it.
    """

    def __init__(
        self, model: Decoder, tower: Tower | None, folder: Path, read: Callable[[Path], ModelSpec], *, dummy: bool
    ) -> None:
        self.folder = folder
        self._model = model
        self._tower = tower
        self._read = read
        self._spec = read(folder)
        self._dummy = dummy
        self._names = frozenset() if dummy else read_names(folder) & self._places(folder).keys()

    def check(self, folder: Path) -> None:
        """Raise ModelError, naming the file and the key or the tensor, unless `folder` holds the same model: the same
        configuration, and the same tensors by their headers. Nothing is changed."""
        if self._dummy:
            raise ModelError(f"{folder}: the weights are random (--load-format dummy): there is nothing to update")
        if self._model.projection.layers:
            raise ModelError(f"{folder}: the products behind pooling, which lie in folders of their own, are not read")
        if self._read(folder) != self._spec:
            raise ModelError(f"{folder}/config.json: it describes another model than the one that is served")
        places = self._places(folder)
        fixed = next((name for name, place in places.items() if place.matrix is not None), None)
        if fixed is not None and self._model.placement.device.type != "cpu":
            raise ModelError(
                f"{folder}: tensor {fixed} is quantized, and read into new memory: graphs have the old one"
            )
        check_tensors(folder, wanted_tensors(places), unread(self._model, vision=self._tower is None))
        if differing := (read_names(folder) & places.keys()) ^ self._names:
            raise ModelError(f"{folder}: tensor {min(differing)} is in only one of this folder and the one served")

    def write(self, folder: Path) -> None:
        """Read the weights of a folder that `check` has passed. Raises ModelError or OSError where that fails on the
        way: then they are of neither folder."""
        device = self._model.placement.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # pictures are encoded on another stream
        with torch.inference_mode():
            for part in self._parts():
                reopen(part.destinations())
            load(self._model, folder, tower=self._tower)
            for part in self._parts():
                pack(part.destinations())
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _parts(self) -> tuple[Decoder | Tower, ...]:
        return (self._model,) if self._tower is None else (self._model, self._tower)

    def _places(self, folder: Path) -> dict[str, Destination]:
        """By the names that they have in this folder."""
        found = {name: place for part in self._parts() for name, place in part.destinations().items()}
        return dict(named_as(self._model.spec, read_names(folder), found))
