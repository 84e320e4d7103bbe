"""Packing keeps every token, its label and its document; a training step moves every parameter; scores count."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.demo_model import scores, tokenizer, train
from benchmarks.demo_model.batches import IGNORED, Document, Packer, Rows, row
from benchmarks.demo_model.network import Network, Shape, document_mask
from benchmarks.demo_model.optimizer import Optimizer, orthogonal

TINY = Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, head=16, vocabulary=64, context=32)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "VOCABULARY", 512)
        tokenizer.train(documents=200).save(str(path))
    return path


def test_a_row_labels_the_next_token_of_what_is_trained() -> None:
    ids, labels, numbers = row([Document([5, 6, 7], [False, True, True]), Document([8, 9], [False, True])], 7)
    assert ids.tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert labels.tolist() == [6, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED]
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_the_packer_fills_rows_and_loses_nothing() -> None:
    rng = Random(1)
    packer = Packer(100)
    lengths = [rng.randrange(1, 100) for _ in range(300)]
    for length in lengths:
        packer.add(Document([length] * length, [True] * length))
    packer.add(Document([1] * 101, [True] * 101))  # longer than a row: dropped
    packed = []
    while taken := packer.take():
        assert sum(len(document.ids) for document in taken) <= 100
        packed.append([len(document.ids) for document in taken])
    assert sorted(length for taken in packed for length in taken) == sorted(lengths)
    assert sum(map(sum, packed)) / (100 * len(packed)) > 0.9


def test_batches_repeat_with_their_seed(tokens: Path) -> None:
    first, again, other = (next(iter(Rows(tokens, 2, 512, seed))) for seed in (1, 1, 2))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.ids, other.ids)
    assert first.ids.shape == first.documents.shape == (2, 512)


def test_orthogonal_updates_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_training_lowers_the_loss() -> None:
    network = Network(TINY)
    network.initialise(1)
    optimizer = Optimizer(network)
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    labels, documents = ids.roll(-1, 1), torch.zeros_like(ids)
    objective = train.cross_entropy(network)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    losses = []
    for _ in range(30):
        loss = objective(ids, labels, documents)
        loss.backward()
        optimizer.step(0.02)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(parameter, before[name]) for name, parameter in network.named_parameters())


def test_distillation_is_least_when_the_draft_agrees() -> None:
    teacher, same, other = (Network(TINY) for _ in range(3))
    for network, seed in ((teacher, 1), (same, 1), (other, 2)):
        network.initialise(seed)
    ids = torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(3))
    arguments = (ids, ids, torch.zeros_like(ids))
    assert train.distillation(same, teacher)(*arguments) < train.distillation(other, teacher)(*arguments)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    rates = [train.rate_at(step / 1000, 1.0) for step in range(1001)]
    assert rates[0] < 0.05
    assert rates[300] == 1.0
    assert rates[1000] == 0.0
    assert all(later <= earlier for earlier, later in pairwise(rates[500:]))


def test_a_network_that_knows_the_answers_scores_full_marks(tokens: Path) -> None:
    questions = scores.quiz(tokens, 1, context=4096)
    labels = questions.batch.labels.long()

    class Oracle(Network):
        """Says the label at every position."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.row = 0

        def forward(self, ids: torch.Tensor, mask: object) -> torch.Tensor:
            said = labels[self.row : self.row + len(ids)].clamp(min=0)
            self.row += len(ids)
            return torch.nn.functional.one_hot(said, 512).float()

    found = scores.take(Oracle(), questions, torch.device("cpu"))
    assert set(found.values()) == {1.0}
    assert "addition" in found
    assert document_mask(questions.batch.documents[:1, :8]).shape == (1, 1, 8, 8)
