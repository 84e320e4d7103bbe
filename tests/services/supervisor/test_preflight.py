"""Mistakes are found before the first process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import AddressError, ConfigError
from penstock.services.supervisor.preflight import check_api, check_folder, has_template, resolved
from tests.model_folder import linked


def test_the_models_folder_and_name_are_filled_in(tmp_path: Path) -> None:
    linked(tmp_path / "model")
    found = resolved(Config(model=ModelConfig(model=str(tmp_path / "model"))))
    assert (found.model.model, found.model.served_model_name) == (str(tmp_path / "model"), "model")


def test_a_template_is_given_or_the_models(tmp_path: Path) -> None:
    assert has_template(tmp_path, "given.jinja")
    assert not has_template(tmp_path, "")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_template(tmp_path, "")


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(AddressError, match="must be an address of this machine"):
        check_api(ApiConfig(host="192.0.2.1"))


def test_a_folder_of_blocks_is_made(tmp_path: Path) -> None:
    check_folder("")
    check_folder(str(tmp_path / "kv"))
    check_folder(str(tmp_path / "kv"))
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in (("file", "File exists"), ("file/kv", "Not a directory"), ("a/b", "No such file or directory")):
        with pytest.raises(ConfigError, match=f"--kv-disk.*{path}.*none can be made: {why}"):
            check_folder(str(tmp_path / path))
