"""Options as keywords: what the command line takes, and the errors that it gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.protocol.config import Config, fields
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.services.llm.engine import configured


def test_without_keywords_all_is_as_it_is_for_a_server_but_the_log() -> None:
    found = configured("", {})
    assert found.run.log_level == "warning"
    assert (found.model, found.scheduler, found.executor) == (ModelConfig(), Config().scheduler, Config().executor)


def test_every_option_of_the_engine_is_a_keyword() -> None:
    given = {field.name: field.default for field in fields() if field.section not in ("api",)}
    assert configured("", given) == Config()


@pytest.mark.parametrize(
    ("keywords", "limit"),
    [
        ({"language_model_only": True}, "0"),
        ({"language_model_only": False}, "16"),
        ({"limit_mm_per_prompt": {"image": 2}}, '{"image": 2}'),
        ({"limit_mm_data_per_request": "3"}, "3"),
    ],
)
def test_keywords_about_images_are_taken_as_their_flags_are(keywords: dict[str, object], limit: str) -> None:
    assert configured("", keywords).model.limit_mm_per_prompt == limit


def test_values_are_those_of_the_command_line() -> None:
    found = configured("folder", {"max_num_seqs": 8, "dtype": "float32", "overlap": False, "drain_timeout": 1})
    assert (found.model.model, found.model.max_num_seqs, found.model.dtype) == ("folder", 8, "float32")
    assert (found.scheduler.overlap, found.run.drain_timeout) == (False, 1.0)


def test_json_may_be_a_dict() -> None:
    found = configured("", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    assert json.loads(found.scheduler.speculative_config)["num_speculative_tokens"] == 2


def test_a_file_holds_options_that_keywords_override(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("max_num_seqs = 4\nmax_model_len = 100\n")
    found = configured("", {"config": file, "max_num_seqs": 5})
    assert (found.model.max_num_seqs, found.model.max_model_len) == (5, 100)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs: 0 is not allowed; it must be between 1 and 4096"),
        ({"dtype": "int4"}, "one of auto, float32, bfloat16, float16"),
        ({"overlap": "yes"}, "true or false"),
        ({"max_num_sequences": 8}, "did you mean max_num_seqs"),
        ({"port": 8000}, "the Python API does not start"),
        ({"quantization": "int3"}, "one of none, fp8, int8, int4"),
        ({"enable_lora_bias": True}, "enable_lora_bias: True is not allowed; "),
        ({"speculative_config": {"method": "magic"}}, "--speculative-config"),
        ({"max_num_batched_tokens": 8}, "at least --max-num-seqs"),
    ],
)
def test_a_wrong_one_is_named(keywords: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured("", keywords)
    assert said in str(raised.value)


def test_keywords_of_vllm_are_taken_under_their_own_names(caplog: pytest.LogCaptureFixture) -> None:
    """Those that ask for what is done anyway are named in one line, and None is as good as nothing."""
    keywords = {"max_running_requests": 8, "async_scheduling": False, "disable_radix_cache": True, "dtype": "half"}
    found = configured("", {**keywords, "max_model_len": None, "trust_remote_code": True, "tokenizer": None})
    assert (found.model.max_num_seqs, found.scheduler.overlap, found.model.dtype) == (8, False, "float16")
    assert not found.scheduler.enable_prefix_caching
    assert caplog.messages == ["keywords without effect: trust_remote_code, tokenizer"]
