"""A draft model is held against its model at the start: what does not go together is said with both names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from penstock.engine_core import folder
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.services.executor.kept_weights import KeptWeights
from penstock.services.executor.loading import Loading, build_draft, check_agreed, check_draft, find_draft
from penstock.services.executor.startup import start

LENGTH = 256
SPEC = read_spec(demo_folder())


def config(model: str, tokens: int = 3, method: str = "draft_model") -> Config:
    asked = {"method": method, "model": model, "num_speculative_tokens": tokens}
    return Config(
        model=ModelConfig(dtype="float32", max_num_seqs=4, max_model_len=LENGTH, max_num_batched_tokens=64),
        scheduler=SchedulerConfig(speculative_config=json.dumps(asked)),
        executor=ExecutorConfig(device="cpu", cpu_threads=1),
    )


def copied(place: Path, **changes: Any) -> Path:
    """The embedded draft with other keys in its config.json."""
    shutil.copytree(draft_folder(), place)
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return place


def refused(path: Path, length: int = LENGTH) -> str:
    with pytest.raises(ConfigError) as caught:
        check_draft(path, read_spec(path), demo_folder(), read_spec(demo_folder()), length)
    assert caught.value.option == "--speculative-config model"
    return caught.value.allowed


def test_a_server_starts_with_the_embedded_draft_and_says_what_it_makes() -> None:
    plain, engine = (
        start(Config(model=config("x").model, executor=config("x").executor), 0),
        start(config(folder.EMBEDDED_DRAFT), 0),
    )
    assert (plain.ready.draft_tokens, engine.ready.draft_tokens) == (0, 3)
    assert engine.ready.weight_bytes > plain.ready.weight_bytes
    layers = [read_spec(path) for path in (demo_folder(), draft_folder())]
    model, both = (2 * one.layers * 16 * one.attention.kv_heads * one.attention.head_dim * 4 for one in layers)
    assert plain.ready.cache_bytes == (plain.ready.blocks + 1) * model
    assert engine.ready.cache_bytes == (engine.ready.blocks + 1) * (model + both)


def test_without_such_a_method_there_is_no_draft_model() -> None:
    target = Decoder.__new__(Decoder)  # nothing of it is looked at
    assert find_draft(Config(), demo_folder(), SPEC, LENGTH) is None
    assert build_draft(Config(), None, target, LENGTH) is None


@pytest.mark.parametrize(
    ("method", "model"), [("draft_model", "penstock-demo-draft"), ("eagle", "penstock-demo-eagle")]
)
def test_the_last_stage_drafts(method: str, model: str) -> None:
    asked = config(model, method=method)
    found = find_draft(asked, demo_folder(), SPEC, LENGTH)
    assert found is not None
    drafts = []
    for stage in range(2):
        group = Group(stage=stage, stages=2)
        model = registry.build(SPEC, torch.float32, torch.device("cpu"), LENGTH, group=group, draft=found)
        draft = build_draft(asked, found, model, LENGTH)
        drafts.append(Loading(asked, model, None, draft, demo_folder(), KeptWeights(), "").load())
    first, last = drafts
    assert first is not None
    assert last is not None
    assert (first.model, first.weight_bytes) == (None, 0)
    assert last.model is not None
    copied = last.model.embedding.copied_bytes if isinstance(last.model, Decoder) and last.model.embedding else 0
    assert last.weight_bytes == found.weight_bytes(4) + copied
    assert (first.tokens, first.spec, first.aux_layers) == (last.tokens, last.spec, last.aux_layers)


class Members(Group):
    """A group in which another member says a number of its own."""

    others: ClassVar[list[int]] = []

    def all_min(self, number: int) -> int:
        sign = 1 if number >= 0 else -1
        return min([number, *(sign * other for other in self.others)])


def test_members_must_agree_on_what_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder.EMBEDDED_DRAFT)
    found = find_draft(asked, demo_folder(), SPEC, LENGTH)
    check_agreed(asked, found, ALONE)
    check_agreed(asked, None, Members())
    for other in (0, 1 << 33):
        monkeypatch.setattr(Members, "others", [other])
        with pytest.raises(ConfigError, match="started with different ones") as caught:
            check_agreed(asked, found, Members())
        assert caught.value.option == "--speculative-config"


def test_the_embedded_draft_goes_with_the_embedded_model() -> None:
    check_draft(draft_folder(), read_spec(draft_folder()), demo_folder(), read_spec(demo_folder()), LENGTH)


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    said = refused(copied(tmp_path / "small", vocab_size=4000))
    assert "vocab_size is 4000" in said
    assert "4096" in said
    assert str(demo_folder()) in said


def test_tables_may_be_padded(tmp_path: Path) -> None:
    path = copied(tmp_path / "padded", vocab_size=4160)
    check_draft(path, read_spec(path), demo_folder(), read_spec(demo_folder()), LENGTH)


def test_positions_that_end_too_early(tmp_path: Path) -> None:
    said = refused(copied(tmp_path / "short", max_position_embeddings=128))
    assert "give at most 128" in said


def test_another_tokenizer(tmp_path: Path) -> None:
    other = copied(tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = (token for token, number in vocab.items() if number in (300, 301))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tokenizer))
    said = refused(other)
    assert "token 300" in said
    assert str(other) in said
    assert str(demo_folder()) in said


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^--speculative-config model: {tmp_path}/missing: no such folder"):
        start(config(str(tmp_path / "missing")), 0)


def test_the_name_of_the_embedded_draft_and_folders() -> None:
    assert folder.resolve_draft(folder.EMBEDDED_DRAFT) == draft_folder()
    assert folder.resolve_draft(str(draft_folder())) == draft_folder()


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
