from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.protocol.errors import ModelError

PATH = Path("somewhere/config.json")


def file(**values: object) -> ConfigFile:
    return ConfigFile(PATH, values, {"familiar": 3})


def test_values_then_defaults_then_nothing() -> None:
    assert file(size=1).get("size") == 1
    assert file().get("familiar") == 3
    assert file(familiar=None).get("familiar") is None
    assert file().get("size") is None


def test_integers() -> None:
    assert file(size=5).integer("size") == 5
    assert file().integer("size", 7) == 7
    assert file(size=None).integer("size", 7) == 7
    for wrong in (0, -1, 2**31, 1.0, "5", True, [5], None):
        with pytest.raises(ModelError, match=r"config\.json: size is .* integer"):
            file(size=wrong).integer("size")


def test_numbers() -> None:
    assert file(size=5).number("size") == 5.0
    assert file(size=0.5).number("size", low=0.5, high=0.5) == 0.5
    assert file().number("size", 1.5) == 1.5
    for wrong in (float("nan"), float("inf"), -1, "1", False, None, {}):
        with pytest.raises(ModelError, match=r"config\.json: size is .* number"):
            file(size=wrong).number("size")


def test_flags() -> None:
    assert file(on=True).flag("on") is True
    assert file(on=None).flag("on") is False
    assert file().flag("on", True) is True
    with pytest.raises(ModelError, match="on is 1; it must be true or false"):
        file(on=1).flag("on")


def test_token_ids() -> None:
    assert file().token_ids("eos") == ()
    assert file(eos=0).token_ids("eos") == (0,)
    assert file(eos=[2, 1]).token_ids("eos") == (2, 1)
    for wrong in (-1, "2", [1, None], [[1]], True, 2**31):
        with pytest.raises(ModelError, match=r"config\.json: eos is"):
            file(eos=wrong).token_ids("eos")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a": "\xff"}', b"[" * 100_000])
def test_files_that_hold_no_object(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelError, match=tmp_path.name):
        read_json(tmp_path)


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"eos": [1, 2]}')
    assert read_json(tmp_path / "x.json").token_ids("eos") == (1, 2)
