"""Quick scores during training: teacher-forced exact match, which for one right answer equals greedy decoding's."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from benchmarks.demo_model.batches import CONTEXT, IGNORED, Batch, Document, encode, row, stacked
from benchmarks.demo_model.generator import Sample
from benchmarks.demo_model.network import Network, document_mask
from benchmarks.demo_model.suites import SUITES, conversations


@dataclass(frozen=True)
class Quiz:
    """Held-out documents, packed, with the suite that each belongs to; only the last answer of each counts."""

    batch: Batch
    suites: tuple[tuple[str, ...], ...]  # per row, per document


def quiz(tokenizer: Path, per_suite: int, context: int = CONTEXT, seed: int = 7) -> Quiz:
    """`per_suite` held-out conversations of every suite."""
    reader = Tokenizer.from_file(str(tokenizer))
    rng = Random(f"quiz/{seed}")
    rows: list[list[tuple[str, Document]]] = [[]]
    room = context
    for suite in SUITES:
        samples = [Sample(conversation) for conversation in conversations(suite, rng, per_suite)]
        for document in encode(reader, samples):
            if len(document.ids) > context:
                continue
            if len(document.ids) > room:
                rows.append([])
                room = context
            rows[-1].append((suite, _last_answer_only(document)))
            room -= len(document.ids)
    packed = [row([document for _, document in documents], context) for documents in rows]
    return Quiz(stacked(packed), tuple(tuple(suite for suite, _ in documents) for documents in rows))


def _last_answer_only(document: Document) -> Document:
    start = len(document.ids)
    while start > 0 and document.trained[start - 1]:
        start -= 1
    return Document(document.ids, [index >= start for index in range(len(document.ids))])


@torch.no_grad()
def take(network: Network, questions: Quiz, device: torch.device, rows: int = 4) -> dict[str, float]:
    """Share of documents per suite whose every trained token is the network's first choice."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for start in range(0, len(questions.suites), rows):
        ids = questions.batch.ids[start : start + rows].to(device).long()
        labels = questions.batch.labels[start : start + rows].to(device).long()
        numbers = questions.batch.documents[start : start + rows].to(device).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            choices = network(ids, document_mask(numbers)).argmax(dim=-1)  # [rows, context]
        wrong = (choices != labels) & (labels != IGNORED)
        mistakes = torch.zeros(len(ids), int(numbers.max()) + 1, device=device)
        mistakes.scatter_add_(1, numbers, wrong.float())
        for suites, counts in zip(questions.suites[start : start + rows], mistakes.tolist(), strict=True):
            for suite, count in zip(suites, counts, strict=False):
                total[suite] += 1
                right[suite] += count == 0
    return {suite: right[suite] / total[suite] for suite in total}
