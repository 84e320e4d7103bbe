"""Other weights for a model that serves, in the memory that it has: CUDA graphs go on as they are. They come from a
folder, from a trainer's broadcasts, or from its memory.

What is not read is left as it is: LoRA adapters, which are added to any weights, and a draft model, whose wrong guesses
cost time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine_core.loading import load, unread
from penstock.engine_core.loading.checkpoint import fill, wanted_tensors
from penstock.engine_core.loading.digests import slice_sum
from penstock.engine_core.loading.shared_memory import DTYPES, handle_of, opened, place_of
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Destination, pack, reopen
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.tensors import named_as
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import check_tensors, read_names
from penstock.protocol.control import Digest, WeightTensor
from penstock.protocol.errors import ModelError

Receive = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


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
        if fixed is not None and self._device.type != "cpu":
            raise ModelError(
                f"{folder}: tensor {fixed} is quantized, and read into new memory: graphs have the old one"
            )
        check_tensors(folder, wanted_tensors(places), unread(self._model, vision=self._tower is None))
        if differing := (read_names(folder) & places.keys()) ^ self._names:
            raise ModelError(f"{folder}: tensor {min(differing)} is in only one of this folder and the one served")

    def write(self, folder: Path) -> None:
        """Read the weights of a folder that `check` has passed. Raises ModelError or OSError where that fails on the
        way: then they are of neither folder."""
        with self._open(), torch.inference_mode():
            load(self._model, folder, tower=self._tower)

    def check_tensors(self, tensors: Sequence[WeightTensor], *, shared: bool) -> None:
        """Raise ModelError, naming the tensor, unless each is one of the model's checkpoint, in its shape and in a type
        that it may have. shared: and in memory that can be opened. Nothing is changed."""
        places, left = self._places(self.folder), unread(self._model, vision=self._tower is None)
        seen: set[str] = set()
        for tensor in tensors:
            name, place = tensor.name, places.get(tensor.name)
            if name in seen:
                raise ModelError(f"tensor {name} is there twice")
            seen.add(name)
            if tensor.dtype not in DTYPES or min(tensor.shape, default=1) < 0:
                raise ModelError(f"tensor {name}: {tensor.dtype} {list(tensor.shape)} is none of {', '.join(DTYPES)}")
            if place is None and not left.search(name):
                raise ModelError(f"tensor {name} is not part of the model that is served; names are the checkpoint's")
            if place is None:
                continue
            if place.shape != tensor.shape:
                raise ModelError(f"tensor {name} has shape {list(tensor.shape)}; the model's has {list(place.shape)}")
            if place.matrix is not None:
                raise ModelError(
                    f"tensor {name} is quantized in the model that is served: it is read from folders alone"
                )
            stored = tensor.dtype.upper().replace("FLOAT", "F").replace("INT", "I")  # as safetensors calls it
            if stored not in place.stored_types:
                raise ModelError(f"tensor {name} is of {tensor.dtype}; it may be of {', '.join(place.stored_types)}")
            if shared:
                handle_of(tensor, place_of(self._device))
        if shared:
            with opened(tensors, self._device):
                pass

    def receive(self, tensors: Sequence[WeightTensor], receive: Receive) -> None:
        """Take tensors that `check_tensors` has passed as they are broadcast, also those that nothing is read from.
        Raises RuntimeError when the trainer ends on the way: then weights are neither the old ones nor the new ones."""
        self._take((tensor.name, receive(tensor.shape, DTYPES[tensor.dtype], self._device)) for tensor in tensors)

    def copy(self, tensors: Sequence[WeightTensor]) -> None:
        """Copy tensors from a trainer's memory. Raises ModelError where it is there no more, before it copies any."""
        with opened(tensors, self._device) as found:
            self._take(found.items())

    def digests(self) -> tuple[Digest, ...]:
        """Of what this executor holds of every tensor that is not quantized, in the checkpoint's order of numbers."""
        found = []
        with self._open(), torch.inference_mode():
            for name, place in self._places(self.folder).items():
                if place.tensor is not None:
                    where = f"{place.first} {place.start} {place.runs} {tuple(place.tensor.shape)}"
                    dtype = str(place.tensor.dtype).removeprefix("torch.")
                    found.append(Digest(name, dtype, place.offset, slice_sum(place, place.tensor), where))
        return tuple(found)

    def _take(self, found: Iterable[tuple[str, Tensor]]) -> None:
        with self._open(), torch.inference_mode():
            places = self._places(self.folder)
            for name, tensor in found:
                place = places.get(name)
                if place is not None and place.take is not None:
                    place.take(tensor.cpu(), name)
                if place is not None and place.tensor is not None:
                    fill(place, place.tensor, tensor)

    @property
    def _device(self) -> torch.device:
        return self._model.placement.device

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Nothing is computed meanwhile, and weights are laid out as checkpoints have them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # pictures are encoded on another stream
        with torch.inference_mode():
            for part in self._parts():
                reopen(part.destinations())
        try:
            yield
        finally:
            with torch.inference_mode():
                for part in self._parts():
                    pack(part.destinations())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _parts(self) -> tuple[Decoder | Tower, ...]:
        return (self._model,) if self._tower is None else (self._model, self._tower)

    def _places(self, folder: Path) -> dict[str, Destination]:
        """By the names that they have in this folder."""
        found = {name: place for part in self._parts() for name, place in part.destinations().items()}
        return dict(named_as(self._model.spec, read_names(folder), found))
