"""Names of adapters: given, found in a directory, loaded and unloaded; and what no request reaches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.protocol.errors import ConfigError, InvalidRequest, ModelError
from tests.services.client.adapter_folders import names_of, write_folder


def test_names_of_the_options(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "x")
    found = names_of(modules=f"a={folder},org/b={folder}")
    assert found.names() == ("a", "org/b")
    one, other = found.find("a"), found.find("org/b")
    assert one is not None
    assert other is not None
    assert (one.name, one.path, one.version) == ("a", str(folder), other.version)
    assert one.identity != other.identity
    assert found.find("c") is None


def test_options_that_are_wrong_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-modules: 'demo'"):
        names_of(modules=f"demo={write_folder(tmp_path / 'x')}")
    with pytest.raises(ConfigError, match="--lora-dir"):
        names_of(directory=tmp_path / "none")
    with pytest.raises(ModelError, match="the adapter 'a' cannot be served"):
        names_of(modules=f"a={tmp_path}/none").check()


def test_an_api_process_that_starts_again_does_without_a_folder_that_is_gone(tmp_path: Path) -> None:
    found = names_of(modules=f"a={write_folder(tmp_path / 'x')},b={tmp_path}/none")
    assert found.names() == ("a",)
    assert found.find("b") is None


def test_a_folder_is_found_when_it_is_first_asked_for_and_stays_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    found = names_of(tmp_path, directory=tmp_path / "loras")
    assert found.find("a") is None
    write_folder(tmp_path / "loras" / "a")
    first = found.find("a")
    assert first is not None
    assert found.names() == ("a",)
    write_folder(tmp_path / "loras" / "a", rank=8)
    assert found.find("a") == first, "until it is loaded anew"
    assert found.load("a", "a").version != first.version


def test_api_processes_agree(tmp_path: Path) -> None:
    write_folder(tmp_path / "loras" / "a")
    one, other = (names_of(tmp_path, directory=tmp_path / "loras") for _ in range(2))
    first = one.find("a")
    write_folder(tmp_path / "loras" / "a", rank=8)
    assert other.find("a") == first, "what the first one found, not what is there now"
    again = other.load("b", "a")
    assert one.find("b") == again
    one.unload("a")
    assert other.find("a") is None, "unloaded, although its folder is there"
    assert other.names() == ("b",)
    assert names_of(tmp_path, directory=tmp_path / "loras").names() == ("b",), "a process that starts again knows"
    assert (tmp_path / "adapters.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../x", "a/b", "/etc", "a\0b", ".hidden", "a/../../x", "x" * 300, "..%2fx", "a\n"]
)
def test_no_request_names_a_path(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "x")
    write_folder(tmp_path / "loras" / "a" / "b")
    write_folder(tmp_path / "loras" / ".hidden")
    assert names_of(tmp_path, directory=tmp_path / "loras").find(name) is None


@pytest.mark.parametrize("part", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_no_link_leads_out_of_the_directory(tmp_path: Path, part: str) -> None:
    outside, inside = write_folder(tmp_path / "x"), tmp_path / "loras" / "a"
    if part:
        write_folder(inside)
        (inside / part).unlink()
    else:
        inside.parent.mkdir()
    os.symlink(outside / part, inside / part if part else inside)
    found = names_of(tmp_path, directory=tmp_path / "loras")
    with pytest.raises(InvalidRequest, match="must be below --lora-dir"):
        found.find("a")
    with pytest.raises(InvalidRequest, match="must be below --lora-dir"):
        found.load("b", "a")


@pytest.mark.parametrize("path", ["../x", "/etc", "a/../../x", ".", ""])
def test_the_operator_loads_nothing_from_elsewhere_either(tmp_path: Path, path: str) -> None:
    write_folder(tmp_path / "x")
    write_folder(tmp_path / "loras" / "a")
    with pytest.raises(InvalidRequest, match="must be below --lora-dir"):
        names_of(tmp_path, directory=tmp_path / "loras").load("n", path)


@pytest.mark.parametrize("name", ["demo", "", "../a", "a b"])
def test_names_that_no_adapter_may_have(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "loras" / "a")
    with pytest.raises(InvalidRequest, match="lora_name"):
        names_of(tmp_path, directory=tmp_path / "loras").load(name, "a")


def test_a_folder_that_cannot_be_served_is_a_clear_error_without_a_path(tmp_path: Path) -> None:
    write_folder(tmp_path / "loras" / "a", rank=64)
    with pytest.raises(InvalidRequest) as caught:
        names_of(tmp_path, directory=tmp_path / "loras").find("a")
    assert caught.value.message.startswith("the adapter 'a' cannot be served: adapter_config.json: r is 64")
    assert str(tmp_path) not in caught.value.message
