"""Documents as token ids, packed into rows of one length: what the training steps eat."""

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.demo_model.conversation import Part, parts
from benchmarks.demo_model.generator import Sample, Split, sample
from benchmarks.demo_model.tokenizer import END_OF_TEXT

CONTEXT = 4096
IGNORED = -1  # label of a position that trains nothing
_POOL = 192  # encoded documents that wait to be packed; more of them pack more tightly


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, whether the model has to say it."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class Batch:
    """Packed rows. Labels are the next tokens, IGNORED where nothing is trained; `documents` numbers those of a row."""

    ids: torch.Tensor  # [rows, context] int16
    labels: torch.Tensor  # [rows, context] int16
    documents: torch.Tensor  # [rows, context] int16

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; the loader calls this."""
        return Batch(self.ids.pin_memory(), self.labels.pin_memory(), self.documents.pin_memory())


def pieces(document: Sample) -> list[Part]:
    """The document's text, cut where training starts and stops."""
    if document.conversation is not None:
        return list(parts(document.conversation))
    return [Part(document.text + END_OF_TEXT, trained=True)]


def encode(tokenizer: Tokenizer, samples: list[Sample]) -> list[Document]:
    """Token ids of the samples. Parts meet at special tokens, so encoding them one by one changes nothing."""
    cut = [pieces(document) for document in samples]
    encodings = iter(
        tokenizer.encode_batch_fast([part.text for parts_ in cut for part in parts_], add_special_tokens=False)
    )
    documents = []
    for parts_ in cut:
        ids: list[int] = []
        trained: list[bool] = []
        for part in parts_:
            piece = next(encodings).ids
            ids += piece
            trained += [part.trained] * len(piece)
        documents.append(Document(ids, trained))
    return documents


def row(documents: list[Document], context: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Documents side by side in one row of `context`: ids, labels and document numbers, int16 each, then padding."""
    ids = numpy.zeros(context, numpy.int16)
    labels = numpy.full(context, IGNORED, numpy.int16)
    numbers = numpy.full(context, len(documents), numpy.int16)
    start = 0
    for number, document in enumerate(documents):
        end = start + len(document.ids)
        ids[start:end] = document.ids
        labels[start : end - 1] = numpy.where(document.trained[1:], document.ids[1:], IGNORED)
        numbers[start:end] = number
        start = end
    return ids, labels, numbers


class Packer:
    """Fills rows with the longest waiting documents that fit. Owns the pool of documents that wait."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._waiting: list[tuple[int, int, Document]] = []  # by length, then arrival
        self._arrivals = 0

    def add(self, document: Document) -> None:
        """Put a document into the pool. One that is longer than a row is dropped."""
        if len(document.ids) <= self._context:
            insort(self._waiting, (len(document.ids), self._arrivals, document))
            self._arrivals += 1

    @property
    def hungry(self) -> bool:
        """Whether the pool is too small to pack tightly."""
        return len(self._waiting) < _POOL

    def take(self) -> list[Document]:
        """The documents of the next row."""
        taken: list[Document] = []
        room = self._context
        while self._waiting and (index := bisect_right(self._waiting, (room, self._arrivals))) > 0:
            # The first pick is a random-like one (the oldest), so that long documents do not all come first.
            pick = min(range(index), key=lambda i: self._waiting[i][1]) if not taken else index - 1
            length, _, document = self._waiting.pop(pick)
            taken.append(document)
            room -= length
        return taken


class Rows(IterableDataset):
    """An endless stream of batches. Worker w of n gives the same batches for the same seed, w and n."""

    def __init__(self, tokenizer: Path, rows: int, context: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rows = rows
        self._context = context
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = Random(f"{self._seed}/{worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(str(self._tokenizer))
        packer = Packer(self._context)
        while True:
            packed = []
            for _ in range(self._rows):
                while packer.hungry:
                    for document in encode(tokenizer, [sample(rng, Split.TRAINING) for _ in range(64)]):
                        packer.add(document)
                packed.append(row(packer.take(), self._context))
            yield stacked(packed)


def stacked(packed: list[tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]]) -> Batch:
    """Rows as one batch."""
    ids, labels, documents = (torch.from_numpy(numpy.stack(column)) for column in zip(*packed, strict=True))
    return Batch(ids, labels, documents)


def loader(tokenizer: Path, rows: int, context: int, seed: int, workers: int) -> Iterator[Batch]:
    """Batches from `workers` processes (0: from this one)."""
    dataset = Rows(tokenizer, rows, context, seed)
    loaded = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loaded)
