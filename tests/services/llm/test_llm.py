"""`LLM` (llm.py) with the embedded model: right answers, in order, none lost, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import LLM, ConfigError, RequestError, SamplingParams, StructuredOutputsParams
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import InvalidRequest, ModelError
from penstock.services.client.model_info import read_model_info
from penstock.services.llm.engine import ABSENT, configured, load_tokenizer
from penstock.services.llm.launcher_process import LauncherProcess
from tests.e2e import canary
from tests.services.client.fake_engine import MODEL
from tests.services.llm.processes import LIMIT, engine_processes, gone

GREEDY = SamplingParams(temperature=0.0, max_tokens=canary.LONGEST)
QUESTION = [{"role": "user", "content": "What is 128 + 457?"}]


def launcher(llm: LLM) -> LauncherProcess:
    return llm._engine.launcher


def test_the_canary_sings(llm: LLM) -> None:
    """The same greedy answers as over HTTP."""
    prompts = canary.prompts()
    plain = [prompt for prompt in prompts if "tools" not in prompt]
    answers = llm.chat([prompt["messages"] for prompt in plain], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in answers] == [prompt["answer"] for prompt in plain]
    for prompt in prompts:
        if "tools" in prompt:
            words = {"tools": prompt["tools"], "use_tqdm": False}
            (output,) = llm.chat(prompt["messages"], GREEDY, split=False, **words)
            assert output.outputs[0].text == prompt["answer"]
            (output,) = llm.chat(prompt["messages"], GREEDY, **words)
            if "<tool_call>" in prompt["answer"]:
                assert output.outputs[0].tool_calls
                assert "<tool_call>" not in output.outputs[0].text
            else:
                assert output.outputs[0].text == prompt["answer"]


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}}  # fmt: skip


def test_a_call_and_its_result(llm: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome?"}]
    (output,) = llm.chat(messages, GREEDY, tools=[WEATHER], use_tqdm=False)
    (call,) = output.outputs[0].tool_calls
    assert (call.name, json.loads(call.arguments), call.index) == ("get_weather", {"city": "Rome"}, 0)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "tool_calls")
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny", "temperature": 21}'}
    messages += [output.outputs[0].message(), result]
    (output,) = llm.chat(messages, GREEDY, tools=[WEATHER], use_tqdm=False)
    assert "21" in output.outputs[0].text
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    (output,) = llm.chat(question, GREEDY, tools=[WEATHER], tool_choice="required", use_tqdm=False)
    assert output.outputs[0].tool_calls[0].name == "get_weather"
    with pytest.raises(InvalidRequest) as raised:
        llm.chat(question, GREEDY, tool_choice="required", use_tqdm=False)
    assert raised.value.param == "tool_choice"


def test_reasoning_stands_beside_the_text(llm: LLM) -> None:
    words: dict[str, Any] = {"reasoning_effort": "high", "use_tqdm": False}
    (apart,) = llm.chat(QUESTION, GREEDY, **words)
    (whole,) = llm.chat(QUESTION, GREEDY, split=False, **words)
    choice = apart.outputs[0]
    assert choice.token_ids == whole.outputs[0].token_ids
    assert choice.reasoning
    assert choice.reasoning in whole.outputs[0].text
    assert whole.outputs[0].text.endswith(choice.text)
    assert "585" in choice.text
    assert choice.message()["reasoning_content"] == choice.reasoning
    (budgeted,) = llm.chat(QUESTION, GREEDY, thinking_token_budget=1, **words)
    assert len(budgeted.outputs[0].reasoning) < len(choice.reasoning)


def test_every_form_of_prompt_is_the_same_prompt(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.tokenize(text)
    forms: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(forms, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    assert llm.detokenize(outputs[0].outputs[0].token_ids) == outputs[0].outputs[0].text
    assert llm.detokenize([]) == ""


def test_many_prompts_through_a_small_window(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-five times the window; results stand where their prompts stood, and a seed gives the same tokens again."""
    monkeypatch.setattr(llm._engine, "window", 8)
    count = 200
    prompts = [[10 + number % 300, 11, 12] for number in range(count)]
    params = [SamplingParams(max_tokens=1 + number % 3, ignore_eos=True, seed=number) for number in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert len({output.request_id for output in outputs}) == count
    again = llm.generate(prompts[:20], params[:20], use_tqdm=False)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs[:20]]


def test_several_choices_differ_and_equal_prompts_too(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=2.0, max_tokens=16, ignore_eos=True)
    first, second = llm.generate(["Tell", "Tell"], params, use_tqdm=False)
    found = [tuple(choice.token_ids) for output in (first, second) for choice in output.outputs]
    assert len(set(found)) == 6
    assert [choice.index for choice in first.outputs] == [0, 1, 2]


def test_logprobs_and_stops(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, prompt_logprobs=1, stop="=")
    (output,) = llm.chat(QUESTION, params, use_tqdm=False)
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("128 + 457 ", "stop", "=")
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    assert all(token in at for token, at in zip(choice.token_ids, choice.logprobs, strict=True))
    total = sum(at[token].logprob for token, at in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None


def test_structured_output(llm: LLM) -> None:
    properties = {"sum": {"type": "integer", "maximum": 999}}
    schema = {"type": "object", "properties": properties, "required": ["sum"], "additionalProperties": False}
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    (output,) = llm.chat(QUESTION, SamplingParams(max_tokens=64, structured_outputs=asked), use_tqdm=False)
    assert isinstance(json.loads(output.outputs[0].text)["sum"], int)
    (output,) = llm.generate("x", SamplingParams(structured_outputs={"choice": ["yes", "no"]}), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


def test_a_prompt_may_be_cut_to_its_end(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, truncate_prompt_tokens=3)
    outputs = llm.generate([[5] * 5000 + [7, 8, 9], "one two three four five six"], params, use_tqdm=False)
    assert outputs[0].prompt_token_ids == [7, 8, 9]
    assert len(outputs[1].prompt_token_ids) == 3


def test_ids_without_text(llm: LLM) -> None:
    (output,) = llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)


def test_one_that_is_refused_ends_the_call_or_stands_in_its_place(llm: LLM) -> None:
    long = "word " * 6000  # the tokenizer alone knows that it is too long
    with pytest.raises(InvalidRequest) as raised:
        llm.generate(["x", long], GREEDY, use_tqdm=False)
    assert str(raised.value).startswith("prompts[1]: ")
    good, bad = llm.generate(["x", long], SamplingParams(max_tokens=2), use_tqdm=False, return_errors=True)
    assert good.error is None
    assert bad.outputs == []
    assert isinstance(bad.error, RequestError)
    assert bad.error.code == "context_length_exceeded"


def test_a_wrong_grammar_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate("x", SamplingParams(structured_outputs={"regex": "("}), use_tqdm=False)


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("Once upon a time") == llm.tokenize("Once upon a time")
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    (said,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    (same,) = llm.generate([tokenizer.encode(prompt, add_special_tokens=False)], GREEDY, use_tqdm=False)
    assert said.prompt_token_ids == same.prompt_token_ids
    assert llm.get_tokenizer() is tokenizer


def test_the_tokenizers_template_is_the_one_in_effect(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    config = configured("", {"chat_template": str(file)})
    tokenizer = load_tokenizer(config, read_model_info(config))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="transformers cannot load its tokenizer"):
        load_tokenizer(Config(model=ModelConfig(model=str(tmp_path))), MODEL)


def test_a_chat_may_bring_its_template(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert output.prompt_token_ids == llm.tokenize(QUESTION[0]["content"], add_special_tokens=False)


def test_default_parameters_are_the_models_to_be_changed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = msgspec.structs.replace(llm.model.generation, temperature=0.25, top_k=None)
    monkeypatch.setattr(llm._engine, "model", msgspec.structs.replace(llm.model, generation=generation))
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 0, 16)
    params.max_tokens = 3
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 3


@pytest.mark.parametrize("name", ["beam_search", "reward", "nothing_at_all"])
def test_what_there_is_not_is_said_with_what_to_do_instead(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(llm, name)
    assert f"'LLM' object has no attribute '{name}'" in str(raised.value)
    assert ABSENT.get(name, "") in str(raised.value)
    assert not hasattr(llm, name)


def test_a_running_loop_and_other_threads_are_no_obstacle(llm: LLM) -> None:
    async def inside() -> int:
        return len(llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].outputs)

    assert asyncio.run(inside()) == 1
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(inside()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1, 1]


def test_a_bar_ends_with_the_rates(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=2, ignore_eos=True))
    said = capsys.readouterr().err.splitlines()[-1]  # before it, how far a slow run is
    assert said.startswith("generate: 2/2 requests, in ")
    assert said.endswith(" tok/s")
    assert llm.generate([]) == []


def test_nothing_runs_on_after_an_interrupt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while `generate` waits: its requests are aborted, and the next call is served."""
    real = asyncio.run_coroutine_threadsafe

    def interrupted(work: Any, loop: Any) -> Any:
        future = real(work, loop)
        monkeypatch.setattr(future, "result", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 20, SamplingParams(max_tokens=3000, ignore_eos=True), use_tqdm=False)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", real)
    assert llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished
    assert llm._engine.engine_client.statistics().unfinished == 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "options", "kind", "said"),
    [
        ("", {"max_num_seqs": 0}, ConfigError, "--max-num-seqs"),
        ("", {"max_model_len": 1 << 20}, ConfigError, "--max-model-len"),
        ("/nowhere/at/all", {}, ModelError, "/nowhere/at/all"),
        ("", {"chat_template": "/nowhere.jinja"}, ConfigError, "--chat-template"),
    ],
)
def test_a_wrong_option_starts_nothing(
    model: str, options: dict[str, Any], kind: type[Exception], said: str, place: Path
) -> None:
    with pytest.raises(kind, match=said):
        LLM(model, **options)
    assert list(place.iterdir()) == []


def test_what_a_process_fails_with_is_raised_and_not_printed_too(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A KV cache too small for the model is known by the executor alone."""
    with pytest.raises(ConfigError) as raised:
        LLM(kv_cache_memory=1)
    assert capfd.readouterr() == ("", "")
    assert raised.value.option == "--kv-cache-memory"
    assert list(place.iterdir()) == []


def test_it_ends_with_its_object() -> None:
    llm = LLM(max_num_seqs=2, tokenizer_processes=1)
    run_dir = str(launcher(llm).directory)
    assert len(engine_processes(run_dir)) == 4
    del llm
    gc.collect()
    gone(run_dir)


def test_it_ends_when_the_collector_runs_on_its_own_loop() -> None:
    """A cycle is found by whichever thread allocates, the loop's own among them, which cannot wait for itself."""
    llm = LLM(max_num_seqs=2, tokenizer_processes=1)
    run_dir = str(launcher(llm).directory)
    loop, thread = llm._loop, llm._thread
    llm.cycle = llm  # type: ignore[attr-defined]
    del llm
    loop.call_soon_threadsafe(gc.collect)
    gone(run_dir)
    thread.join(LIMIT)
    assert not thread.is_alive()


def refusals(llm: LLM) -> list[str]:
    """What a forked child is told; its `close` ends nothing."""
    said = []
    for call in (lambda: llm.generate("x", use_tqdm=False), lambda: llm.tokenize("x"), lambda: llm.embed("x")):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    llm.close()
    return said


def test_a_forked_child_is_told_that_the_engine_is_its_parents(llm: LLM) -> None:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, "\n".join(refusals(llm)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    assert len(said) == 3
    assert all("forked child" in line and str(os.getpid()) in line for line in said)
    assert llm.tokenize("x")


def test_it_is_closed_once_and_says_so() -> None:
    with LLM(max_num_seqs=2, tokenizer_processes=1) as llm:
        run_dir = str(launcher(llm).directory)
        llm.close()
        gone(run_dir)
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate("x")
    llm.close()
