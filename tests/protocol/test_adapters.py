"""--lora-modules and what goes with it: every spelling is read, and what is wrong is named."""

from __future__ import annotations

import msgspec
import pytest

from penstock.protocol.adapters import LoraModule, read_modules
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.validation import check

A, B = LoraModule("a", "/x"), LoraModule("org/b-1", "/y, z", "base")
SPELT_B = '{"name": "org/b-1", "path": "/y, z", "base_model_name": "base"}'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("a=/x", (A,)),
        (f"a=/x,{SPELT_B}", (A, B)),
        (f"{SPELT_B},a = /x", (B, A)),
        (f'[{SPELT_B}, {{"name": "a", "path": "/x"}}]', (B, A)),
    ],
)
def test_every_spelling(text, found):
    assert read_modules(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "NAME=FOLDER"),
        ("=x", "a name has letters"),
        ("../a=x", "a name has letters"),
        ("a=", "NAME=FOLDER"),
        ("a=x,a=y", "the name 'a' is given twice"),
        ('{"name": "a"}', "missing required field `path`"),
        ('{"name": "a", "path": "x", "rank": 8}', "unknown field `rank`"),
        ('{"name": "a", "path": "x"', "NAME=FOLDER"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ConfigError, match="--lora-modules") as caught:
        read_modules(text)
    assert said in str(caught.value)


def lora(model: dict[str, object] | None = None, **api: object) -> Config:
    config = Config()
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, **(model or {})),
        api=msgspec.structs.replace(config.api, **api),
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lora(lora_modules="a=x"), "--lora-modules: 'a=x' is not allowed; it needs --enable-lora"),
        (lora(lora_dir="x"), "--lora-dir: 'x' is not allowed; it needs --enable-lora"),
        (lora({"lora_experts": True}), "--lora-experts: True is not allowed; it needs --enable-lora"),
        (lora({"enable_lora": True}, lora_modules="a"), "--lora-modules: 'a' is not allowed; it must be like"),
        (
            lora({"enable_lora": True, "max_loras": 9, "max_cpu_loras": 8}),
            "--max-cpu-loras: 8 is not allowed; it must be at least --max-loras (9)",
        ),
    ],
)
def test_options_that_do_not_go_together(config, said):
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert str(caught.value).startswith(said)
