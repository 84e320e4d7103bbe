"""A cross-encoder and an embedding model of their makers' layout, served as processes, against transformers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.e2e.server import LIMIT, Server, serving
from tests.engine_core.models.encoder_parity import SIZES, write

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXTS = ["what is a panda", "the giant panda is a bear", "a", "the quick brown fox jumps over the lazy dog " * 6]
DOCUMENTS = [*TEXTS[1:], "panda " * 200]


def write_tokenizer(folder: Path) -> Tokenizer:
    """A WordPiece tokenizer, with what BERT's puts around texts and pairs."""
    made = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=list(SPECIAL)))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.decoder = decoders.WordPiece()
    made.save(str(folder / "tokenizer.json"))
    return made


def served(folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[PreTrainedModel, Tokenizer]:
    (folder / "model").mkdir()
    return write(folder / "model", kind, config), write_tokenizer(folder / "model")


class Ranker:
    """A server with a cross-encoder, and the model of transformers that it must agree with."""

    def __init__(self, server: Server, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        self.server = server
        self.model = model
        self.tokenizer = tokenizer

    def post(self, path: str, **body: Any) -> Any:
        return httpx.post(self.server.url + path, json=body, timeout=LIMIT).json()

    @torch.inference_mode()
    def expected(self, *texts: str) -> float:
        self.tokenizer.enable_truncation(SIZES["max_position_embeddings"], strategy="longest_first")
        found = self.tokenizer.encode(*texts)
        ids, types = torch.tensor([found.ids]), torch.tensor([found.type_ids])
        return float(self.model(ids, token_type_ids=types).logits.sigmoid())


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranker]:
    folder = tmp_path_factory.mktemp("ranker")
    model, tokenizer = served(folder, BertForSequenceClassification, BertConfig(**SIZES, num_labels=1))
    with serving(folder, "--device", "cpu", model=str(folder / "model")) as server:
        yield Ranker(server, model, tokenizer)


def test_pairs_are_scored_and_ranked_as_transformers_does(ranker: Ranker) -> None:
    expected = [ranker.expected(TEXTS[0], document) for document in DOCUMENTS]
    found = ranker.post("/score", text_1=TEXTS[0], text_2=DOCUMENTS, truncate_prompt_tokens=-1)
    assert [item["score"] for item in found["data"]] == pytest.approx(expected, abs=1e-5)
    ranked = ranker.post("/rerank", query=TEXTS[0], documents=DOCUMENTS, truncate_prompt_tokens=-1)
    order = sorted(range(len(DOCUMENTS)), key=lambda place: -expected[place])
    assert [result["index"] for result in ranked["results"]] == order
    labels = ranker.post("/classify", input=TEXTS)["data"]
    assert [item["probs"][0] for item in labels] == pytest.approx([ranker.expected(text) for text in TEXTS], abs=1e-5)


def test_the_executor_may_die(ranker: Ranker) -> None:
    before = ranker.server.children()["executor"]
    os.kill(before, signal.SIGKILL)
    found = ranker.post("/score", text_1=TEXTS[0], text_2=TEXTS[1:3])
    assert [item["score"] for item in found["data"]] == pytest.approx(
        [ranker.expected(TEXTS[0], text) for text in TEXTS[1:3]], abs=1e-5
    )
    ranker.server.healthy()
    assert ranker.server.children()["executor"] != before


def test_what_it_does_not_do_is_refused(ranker: Ranker) -> None:
    (listed,) = ranker.server.get("/v1/models")["data"]
    assert listed["tasks"] == ["embed", "score", "classify"]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = ranker.post(path, **body)["error"]
        assert (error["param"], "vectors and no text" in error["message"]) == ("model", True)
    error = ranker.post("/rerank", query="a", documents=["a", "panda " * 200])["error"]
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
    assert "130 tokens" in error["message"]


def test_vectors_of_an_encoder(tmp_path: Path) -> None:
    """ModernBERT with the folder's pooling, in batches of mixed lengths larger than a step."""
    tokens = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1)
    model, tokenizer = served(tmp_path, ModernBertModel, ModernBertConfig(**SIZES, **tokens, local_attention=16))
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "", "type": f"sentence_transformers.{name}"}
        for at, name in enumerate(("Transformer", "Pooling", "Normalize"))
    ]
    folder = tmp_path / "model"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    arguments = ("--device", "cpu", "--max-num-batched-tokens", "64", "--max-num-seqs", "8")
    with serving(tmp_path, *arguments, model=str(folder)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT)
        found = client.embeddings.create(model="model", input=TEXTS * 10).data
        (cut,) = client.embeddings.create(model="model", input=TEXTS[0], dimensions=8).data
        client.close()
    for number, item in enumerate(found):
        with torch.inference_mode():
            state = model(torch.tensor([tokenizer.encode(TEXTS[number % 4]).ids])).last_hidden_state[0, 0]
        np.testing.assert_allclose(item.embedding, state / state.norm(), atol=1e-4)
        if number == 0:
            np.testing.assert_allclose(cut.embedding, state[:8] / state[:8].norm(), atol=1e-4)
