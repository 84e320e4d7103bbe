"""--speculative-config: every wrong key is named, and what is right means what it says."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.speculation import BOUNDS, FLAG, IN_FOLDERS, METHODS, SpeculativeConfig, read_speculative
from penstock.protocol.validation import check

NGRAM = {"method": "ngram"}


def refused(text: str) -> ConfigError:
    """What is said at start."""
    config = Config()
    scheduler = msgspec.structs.replace(config.scheduler, speculative_config=text)
    with pytest.raises(ConfigError) as caught:
        check(msgspec.structs.replace(config, scheduler=scheduler))
    return caught.value


def test_nothing_given_means_no_method() -> None:
    assert read_speculative("") == SpeculativeConfig(method="none")


def test_every_key() -> None:
    found = read_speculative(
        '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5, "prompt_lookup_min": 3}'
    )
    assert found == SpeculativeConfig(
        method="ngram", num_speculative_tokens=7, prompt_lookup_max=5, prompt_lookup_min=3
    )
    assert read_speculative(json.dumps(NGRAM)) == SpeculativeConfig(method="ngram")
    assert read_speculative('{"method": "none"}') == SpeculativeConfig()


def test_acceptance_is_the_models_unless_a_rate_is_given() -> None:
    assert read_speculative(json.dumps(NGRAM)).synthetic_acceptance is None
    for rate in (0, 0.0, 0.8, 1):
        assert read_speculative(json.dumps(NGRAM | {"synthetic_acceptance": rate})).synthetic_acceptance == rate


def test_lengths_follow_what_pays_unless_they_are_fixed() -> None:
    assert read_speculative(json.dumps(NGRAM)).adaptive
    assert not read_speculative(json.dumps(NGRAM | {"adaptive": False})).adaptive
    for wrong in (0, "false", None):
        assert refused(json.dumps(NGRAM | {"adaptive": wrong})).option == f"{FLAG} adaptive"


def test_one_end_of_the_lookup_draws_the_other_along() -> None:
    short = read_speculative(json.dumps(NGRAM | {"prompt_lookup_max": 1}))
    assert (short.prompt_lookup_min, short.prompt_lookup_max) == (1, 1)
    long = read_speculative(json.dumps(NGRAM | {"prompt_lookup_min": 6}))
    assert (long.prompt_lookup_min, long.prompt_lookup_max) == (6, 6)
    error = refused(json.dumps(NGRAM | {"prompt_lookup_min": 3, "prompt_lookup_max": 2}))
    assert error.option == f"{FLAG} prompt_lookup_min"


@pytest.mark.parametrize("method", IN_FOLDERS)
def test_methods_of_the_executors_need_a_model(method: str) -> None:
    assert read_speculative(json.dumps({"method": method, "model": "folder"})).model == "folder"
    error = refused(json.dumps({"method": method}))
    assert error.option == f"{FLAG} model"
    assert "needs one" in error.allowed


def test_other_methods_have_none() -> None:
    assert refused(json.dumps(NGRAM | {"model": "folder"})).option == f"{FLAG} model"
    assert refused(json.dumps({"method": "eagle", "model": 7})).option == f"{FLAG} model"
    assert refused(json.dumps({"method": "mtp", "model": "folder"})).option == f"{FLAG} model"
    assert read_speculative('{"method": "mtp"}').model == ""


def test_settings_of_a_lookup_are_left_alone_where_nothing_is_looked_up() -> None:
    found = read_speculative('{"method": "mtp", "prompt_lookup_max": 3, "prompt_lookup_min": 6}')
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == (3, 6)
    assert refused('{"method": "mtp", "prompt_lookup_max": 0}').option == f"{FLAG} prompt_lookup_max"


def test_a_method_that_nobody_knows_is_told_the_others() -> None:
    assert all(method in refused('{"method": "medusa"}').allowed for method in METHODS)


@pytest.mark.parametrize(
    ("text", "option", "said"),
    [
        ("ngram", FLAG, "JSON object"),
        ('["ngram"]', FLAG, "JSON object"),
        ("null", FLAG, "JSON object"),
        ("{", FLAG, "JSON object"),
        ("\ud800", FLAG, "JSON object"),
        ("[" * 100_000, FLAG, "JSON object"),
        ("{}", f"{FLAG} method", "one of none, ngram"),
        ('{"num_speculative_tokens": 3}', f"{FLAG} method", "one of"),
        ('{"method": "medusa"}', f"{FLAG} method", "one of"),
        ('{"method": ["ngram"]}', f"{FLAG} method", "one of"),
        ('{"method": null}', f"{FLAG} method", "one of"),
        ('{"method": "ngram", "num_tokens": 3}', f"{FLAG} num_tokens", "no such key"),
        ('{"method": "ngram", "num_speculative_token": 3}', f"{FLAG} num_speculative_token", "num_speculative_tokens?"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', f"{FLAG} num_speculative_tokens", "between 1 and 64"),
        ('{"method": "ngram", "num_speculative_tokens": true}', f"{FLAG} num_speculative_tokens", "whole number"),
        ('{"method": "ngram", "prompt_lookup_max": "4"}', f"{FLAG} prompt_lookup_max", "whole number"),
        ('{"method": "ngram", "prompt_lookup_min": 2.5}', f"{FLAG} prompt_lookup_min", "whole number"),
        ('{"method": "ngram", "synthetic_acceptance": 1.5}', f"{FLAG} synthetic_acceptance", "between 0 and 1"),
        ('{"method": "ngram", "synthetic_acceptance": -0.1}', f"{FLAG} synthetic_acceptance", "between 0 and 1"),
        ('{"method": "ngram", "synthetic_acceptance": true}', f"{FLAG} synthetic_acceptance", "between 0 and 1"),
        ('{"method": "ngram", "synthetic_acceptance": "0.5"}', f"{FLAG} synthetic_acceptance", "between 0 and 1"),
        ('{"method": "ngram", "synthetic_acceptance": NaN}', FLAG, "JSON object"),
    ],
)
def test_what_is_wrong_is_named(text: str, option: str, said: str) -> None:
    error = refused(text)
    assert error.option == option
    assert said in error.allowed


@given(st.dictionaries(st.sampled_from([*BOUNDS, "method", "other"]), st.none() | st.integers() | st.text()))
def test_any_object_is_read_or_refused(value: dict[str, object]) -> None:
    try:
        found = read_speculative(json.dumps(NGRAM | value))
    except ConfigError:
        return
    assert 1 <= found.prompt_lookup_min <= found.prompt_lookup_max
    assert all(low <= getattr(found, key) <= high for key, (low, high) in BOUNDS.items())
    assert all(getattr(found, key) == entry for key, entry in value.items())
