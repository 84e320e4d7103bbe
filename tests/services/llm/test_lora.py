"""`LoRARequest` (lora.py): one for all prompts or one for each, and clear errors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock import LoRARequest
from penstock.protocol.errors import InvalidRequest
from penstock.services.llm.prompts import completion_requests, parse_prompts, with_adapters
from tests.services.client.adapter_folders import names_of, write_folder
from tests.services.client.fake_engine import MODEL


def requests(count: int):  # type: ignore[no-untyped-def]
    return completion_requests(parse_prompts(["x"] * count), None, MODEL)


def test_one_for_all_or_one_for_each(tmp_path: Path) -> None:
    model = msgspec.structs.replace(MODEL, adapters=names_of())
    one = LoRARequest("a", 1, str(write_folder(tmp_path / "a")))
    other = LoRARequest("b", lora_path=str(write_folder(tmp_path / "b", rank=8)))
    same = [each.submit.adapter for each in with_adapters(requests(2), one, 2, model)]
    assert same[0] is not None
    assert same == [same[0]] * 2
    each = [found.submit.adapter for found in with_adapters(requests(3), [one, None, other], 3, model)]
    assert [adapter and adapter.name for adapter in each] == ["a", None, "b"]
    write_folder(tmp_path / "a", rank=2)
    (again,) = with_adapters(requests(1), one, 1, model)
    assert again.submit.adapter != same[0], "the folder has changed"
    assert next(iter(with_adapters(requests(1), None, 1, MODEL))).submit.adapter is None


@pytest.mark.parametrize(
    ("loras", "said"),
    [
        ([LoRARequest("a")], "there are 1 lora_request for 2 prompts"),
        (LoRARequest("a", 1, "/none"), "cannot be served"),
    ],
)
def test_what_is_wrong_is_said_at_once(loras, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest, match=said):
        with_adapters(requests(2), loras, 2, msgspec.structs.replace(MODEL, adapters=names_of()))


def test_an_engine_without_adapters_says_so() -> None:
    with pytest.raises(InvalidRequest, match="enable_lora=True"):
        with_adapters(requests(1), LoRARequest("a"), 1, MODEL)
