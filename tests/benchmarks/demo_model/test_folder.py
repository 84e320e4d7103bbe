"""A written folder is what transformers reads: the same logits, the same template, the same ids."""

import hashlib
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model import folder, tokenizer
from benchmarks.demo_model.batches import encode
from benchmarks.demo_model.conversation import prompt
from benchmarks.demo_model.generator import Sample, Split, plain_chat, sample, text_of
from benchmarks.demo_model.network import DRAFT, TARGET, Network, Shape, document_mask

TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, head=16, context=512)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    monkeypatch_module.setattr(tokenizer, "VOCABULARY", 512)
    tokenizer.train(documents=300).save(str(path / "tokenizer.json"))
    network = Network(Shape(**{**TINY.__dict__, "vocabulary": 512}))
    network.initialise(3)
    folder.write(network, path / "tokenizer.json", path)
    return path


@pytest.fixture(scope="module")
def monkeypatch_module() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_transformers_gives_the_same_logits(written: Path) -> None:
    ours = folder.read(written)
    theirs = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    ids = torch.randint(0, 512, (2, 97), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(ids).logits
        found = ours(ids, document_mask(torch.zeros_like(ids)))
    assert (expected - found).abs().max() < 1e-4


def test_documents_of_a_row_do_not_see_each_other(written: Path) -> None:
    network = folder.read(written)
    ids = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(6))
    documents = torch.tensor([[0] * 15 + [1] * 25])
    with torch.no_grad():
        packed = network(ids, document_mask(documents))[:, 15:]
        alone = network(ids[:, 15:], document_mask(documents[:, 15:]))
    assert (packed - alone).abs().max() < 1e-4  # rotary positions are relative, so the offset does not matter


def test_transformers_renders_and_encodes_the_same_prompt(written: Path) -> None:
    reader = AutoTokenizer.from_pretrained(written)
    rng = Random(4)
    for _ in range(20):
        conversation = plain_chat(rng, Split.HELD_OUT)
        if conversation.thinking.value != "unsaid":
            continue
        messages = [message.as_openai() for message in conversation.messages[:-1]]
        text = reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text == prompt(conversation)
        ids = reader(text, add_special_tokens=False)["input_ids"]
        assert ids == reader.backend_tokenizer.encode(prompt(conversation), add_special_tokens=False).ids
        assert reader.decode(ids) == text


def test_parts_encode_like_the_whole_text(written: Path) -> None:
    reader = AutoTokenizer.from_pretrained(written).backend_tokenizer
    rng = Random(8)
    samples = [sample(rng, Split.TRAINING) for _ in range(60)]
    for document, found in zip(samples, encode(reader, samples), strict=True):
        assert found.ids == reader.encode(text_of(document), add_special_tokens=False).ids
        assert any(found.trained)


def test_any_text_survives_the_tokenizer(written: Path) -> None:
    reader = AutoTokenizer.from_pretrained(written).backend_tokenizer
    texts = ("", " ", "a\n\n b\t", "Zürich 日本語 🙂", "1234567890", '{"a": [1, 2.5, null]}', "x" * 300, "\x00\x7f")
    for text in texts:
        assert reader.decode(reader.encode(text).ids, skip_special_tokens=False) == text
    digits = reader.encode("98765").tokens
    assert digits == list("98765")


def test_tags_are_added_and_turn_marks_are_special(written: Path) -> None:
    added = AutoTokenizer.from_pretrained(written).added_tokens_decoder
    special = {token.content: token.special for token in added.values()}
    assert special == {**dict.fromkeys(tokenizer.SPECIAL, True), **dict.fromkeys(tokenizer.TAGS, False)}


def test_the_draft_costs_a_tenth_of_the_target() -> None:
    sizes = [sum(parameter.numel() for parameter in Network(shape).parameters()) for shape in (TARGET, DRAFT)]
    assert 8e6 <= sizes[0] <= 12e6
    assert sizes[1] <= sizes[0] / 10
    assert sizes[1] * 2 < 3e6


def test_samples_are_conversations_or_tales() -> None:
    rng = Random(2)
    kinds = {sample(rng, Split.TRAINING).conversation is None for _ in range(300)}
    assert kinds == {True, False}
    assert Sample(None, "x").text == "x"


def test_written_weights_are_named_by_their_hash(written: Path) -> None:
    digest = hashlib.sha256((written / "model.safetensors").read_bytes()).hexdigest()
    assert (written / "SHA256SUMS").read_text() == f"{digest}  model.safetensors\n"
