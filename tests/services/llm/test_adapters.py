"""`lora_request` in real processes: every call of `LLM` and `AsyncLLM`, against peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from penstock import LLM, AsyncLLM, LoRARequest, SamplingParams
from penstock.engine_core.embedded import demo_folder
from penstock.protocol.errors import InvalidRequest
from tests.e2e.test_encoders import TEXTS, served
from tests.engine_core.models.encoder_parity import SIZES
from tests.engine_core.models.lora_folders import greedy, write_adapter
from tests.engine_core.models.parity import theirs

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"enable_lora": True, "device": "cpu", "dtype": "float32", "max_num_seqs": 8, "tokenizer_processes": 1}
PROMPTS = [[10 + number, 200, 31, 7] for number in range(4)]
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


class Adapters:
    """Two adapters of the embedded model, and the model as peft has it with each and alone."""

    def __init__(self, folder: Path) -> None:
        self.asked = [LoRARequest(name, at, str(folder / name)) for at, name in enumerate("ab", 1)]
        models = [write_adapter(demo_folder(), Path(lora.lora_path), lora.lora_int_id) for lora in self.asked]
        self.each = [*self.asked, None]
        self.models = [*models, theirs(demo_folder())]

    def expected(self, prompt: list[int], at: int) -> list[int]:
        return greedy(self.models[at], prompt, 12)

    @torch.inference_mode()
    def state(self, prompt: list[int], at: int) -> np.ndarray:
        """Behind the last token."""
        found = self.models[at](torch.tensor([prompt]), output_hidden_states=True)
        return found.hidden_states[-1][0, -1].numpy()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS, max_loras=1) as llm:
        yield llm


def test_one_for_each_and_one_for_all(llm: LLM, adapters: Adapters) -> None:
    places = [0, 1, 2, 0]
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=[adapters.each[at] for at in places], use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [adapters.expected(prompt, at) for prompt, at in zip(PROMPTS, places, strict=True)]
    (same,) = llm.generate([PROMPTS[1]], GREEDY, lora_request=adapters.asked[1], use_tqdm=False)
    assert same.outputs[0].token_ids == found[1]
    (plain,) = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    assert plain.outputs[0].token_ids == adapters.expected(PROMPTS[1], 2) != found[1]


def test_a_chat(llm: LLM, adapters: Adapters) -> None:
    (output,) = llm.chat(MESSAGES, GREEDY, lora_request=adapters.asked[0], use_tqdm=False)
    assert output.outputs[0].token_ids == adapters.expected(output.prompt_token_ids, 0)


def test_vectors_and_scores(llm: LLM, adapters: Adapters) -> None:
    """A score is of two vectors of one adapter."""
    prompts, each = PROMPTS[:3], adapters.each
    states = [adapters.state(prompt, at) for at, prompt in enumerate(prompts)]
    encoded = llm.encode(prompts, lora_request=each, use_tqdm=False)
    vectors = llm.embed(prompts, lora_request=each, use_tqdm=False)
    for state, raw, vector in zip(states, encoded, vectors, strict=True):
        assert np.allclose(raw.outputs.data, state, atol=1e-3)
        assert np.allclose(vector.outputs.embedding, state / np.linalg.norm(state), atol=1e-4)
    same = llm.encode([prompts[0]] * 3, lora_request=each, use_tqdm=False)
    for at, raw in enumerate(same):
        assert np.allclose(raw.outputs.data, adapters.state(prompts[0], at), atol=1e-3), "no prefix is shared"
    texts = ["What is 12 + 30?", "Hello"]
    one, other = (np.array(found.outputs.embedding) for found in llm.embed(texts, lora_request=each[0]))
    (score,) = llm.score(*texts, lora_request=each[0])
    assert score.outputs.score == pytest.approx(float(one @ other), abs=1e-4)
    assert llm.score(*texts)[0].outputs.score != pytest.approx(score.outputs.score, abs=1e-3)


@pytest.mark.parametrize("call", ["generate", "chat", "embed", "encode", "score"])
def test_what_cannot_be_served_is_refused(llm: LLM, adapters: Adapters, call: str, tmp_path: Path) -> None:
    prompts = {"chat": ([MESSAGES],), "score": ("a", "b")}.get(call, (["a"],))
    with pytest.raises(InvalidRequest, match="the adapter 'x' cannot be served: no such folder") as caught:
        getattr(llm, call)(*prompts, lora_request=LoRARequest("x", 1, str(tmp_path / "none")))
    assert caught.value.param == "lora_request"


async def test_streams_and_vectors(adapters: Adapters) -> None:
    async with AsyncLLM(**OPTIONS) as llm:
        for at, lora in enumerate(adapters.each):
            outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY, lora_request=lora)]
            assert outputs[-1].outputs[0].token_ids == adapters.expected(PROMPTS[0], at)
        chats = [output async for output in llm.chat(MESSAGES, GREEDY, lora_request=adapters.asked[1])]
        assert chats[-1].outputs[0].token_ids == adapters.expected(chats[-1].prompt_token_ids, 1)
        vector = await llm.embed(PROMPTS[0], normalize=False, lora_request=adapters.asked[1])
        assert np.allclose(vector.outputs.embedding, adapters.state(PROMPTS[0], 1), atol=1e-3)
        with pytest.raises(InvalidRequest, match="cannot be served"):
            await llm.embed("a", lora_request=LoRARequest("x", 1, "/none"))


def test_labels(tmp_path: Path) -> None:
    """Of an encoder with a head."""
    model, tokenizer = served(tmp_path, BertForSequenceClassification, BertConfig(**SIZES, num_labels=3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value", "intermediate.dense"]))
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    adapted.save_pretrained(tmp_path / "a")
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        found = llm.classify(TEXTS[:3], lora_request=[lora, None, lora], use_tqdm=False)
    for text, output, plain in zip(TEXTS, found, (False, True, False), strict=False):
        with torch.inference_mode(), adapted.disable_adapter() if plain else nullcontext():
            expected = adapted(torch.tensor([tokenizer.encode(text).ids])).logits.softmax(-1)[0]
        assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)
