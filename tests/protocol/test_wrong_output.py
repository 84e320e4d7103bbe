"""What makes output wrong is asked for by name, and told."""

from __future__ import annotations

import json

import pytest

from penstock.protocol.config import Config, wrong_output
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.validation import check


def config(rate: float | None = None, **model: object) -> Config:
    drafting = json.dumps({"method": "ngram"} | ({} if rate is None else {"synthetic_acceptance": rate}))
    return Config(model=ModelConfig(**model), scheduler=SchedulerConfig(speculative_config=drafting))  # type: ignore[arg-type]


def test_a_set_acceptance_needs_the_word() -> None:
    with pytest.raises(ConfigError, match=r"synthetic_acceptance.*--allow-wrong-output") as raised:
        check(config(0.0))
    assert raised.value.option == "--speculative-config synthetic_acceptance"
    found = check(config(0.0, allow_wrong_output=True))
    (reason,) = wrong_output(found)
    assert "synthetic_acceptance" in reason


def test_random_weights_are_told() -> None:
    both = wrong_output(check(config(0.5, allow_wrong_output=True, load_format="dummy")))
    assert len(both) == 2
    assert "--load-format dummy" in both[0]
    assert len(wrong_output(check(config(load_format="dummy")))) == 1


def test_others_are_right() -> None:
    assert wrong_output(check(Config())) == wrong_output(check(config(allow_wrong_output=True))) == ()
