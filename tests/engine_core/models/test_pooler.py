"""What folders and options say about vectors and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.pooler import ClassifierSpec, DenseSpec, Pooler, read_pooler, read_projection
from penstock.protocol.errors import ModelError

PREFIX = "sentence_transformers.models."


def folder(path: Path, *modules: str, **files: Any) -> Path:
    """A folder whose modules.json names these; `files` are their configurations, by module."""
    listed = [
        {"idx": place, "name": str(place), "path": f"{place}_{name}" if place else "", "type": PREFIX + name}
        for place, name in enumerate(modules)
    ]
    if modules:
        (path / "modules.json").write_text(json.dumps(listed))
    for place, name in enumerate(modules):
        if name in files:
            (path / f"{place}_{name}").mkdir()
            (path / f"{place}_{name}" / "config.json").write_text(json.dumps(files[name]))
    return path


def mode(**true: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 8, **{f"pooling_mode_{name}": name in true for name in names}}


def test_a_folder_without_a_word_gives_the_last_state_of_length_one(tmp_path: Path) -> None:
    assert read_pooler(tmp_path) == Pooler(kind="last", normalize=True, scorer="cosine")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (mode(lasttoken=True), "last"),
        (mode(mean_tokens=True), "mean"),
        (mode(cls_token=True), "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_folders_pooling(tmp_path: Path, values: dict[str, Any], kind: str) -> None:
    found = read_pooler(folder(tmp_path, "Transformer", "Pooling", "Normalize", Pooling=values))
    assert (found.kind, found.normalize, found.unpooled) == (kind, True, "")


def test_a_folder_that_does_not_normalize_is_followed(tmp_path: Path) -> None:
    assert not read_pooler(folder(tmp_path, "Transformer", "Pooling", Pooling=mode(mean_tokens=True))).normalize


@pytest.mark.parametrize(
    "values", [mode(max_tokens=True), mode(mean_tokens=True, cls_token=True), {"pooling_mode": "max"}]
)
def test_other_poolings_are_refused_unless_an_option_says_otherwise(tmp_path: Path, values: dict[str, Any]) -> None:
    path = folder(tmp_path, "Transformer", "Pooling", Pooling=values)
    found = read_pooler(path)
    assert "is not supported" in found.unpooled
    assert found.unscored == found.unpooled
    told = read_pooler(path, pooler="mean")
    assert (told.kind, told.unpooled, told.unscored) == ("mean", "", "")


def test_further_modules_are_refused_by_name(tmp_path: Path) -> None:
    values = mode(mean_tokens=True)
    assert "LSTM" in read_pooler(folder(tmp_path, "Transformer", "Pooling", "LSTM", Pooling=values)).unpooled


def test_dense_modules_are_products_with_an_activation(tmp_path: Path) -> None:
    sizes = {"in_features": 8, "out_features": 4}
    values = {**sizes, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    path = folder(tmp_path, "Transformer", "Pooling", "Dense", Pooling=mode(mean_tokens=True), Dense=values)
    assert read_pooler(path).unpooled == ""
    assert read_projection(path) == (DenseSpec(name="linear", inputs=8, outputs=4, bias=False, folder="2_Dense"),)
    config = path / "2_Dense" / "config.json"
    config.write_text(json.dumps(sizes))
    assert read_projection(path) == (
        DenseSpec(name="linear", inputs=8, outputs=4, activation="tanh", folder="2_Dense"),
    )
    config.write_text(json.dumps(sizes | {"activation_function": "torch.nn.Softmax"}))
    with pytest.raises(ModelError, match="activation_function"):
        read_projection(path)
    config.write_text(json.dumps(sizes | {"in_features": 0}))
    with pytest.raises(ModelError, match="in_features"):
        read_projection(path)


def test_an_encoder_without_a_word_has_the_mean(tmp_path: Path) -> None:
    assert read_pooler(tmp_path, encoder=True) == Pooler(kind="mean")


def test_a_classifier_of_one_label_scores_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    head = ClassifierSpec(kind="cls", layers=(), labels=("one",))
    assert read_pooler(tmp_path, classifier=head).scorer == "classifier"
    assert read_pooler(tmp_path, scorer="cosine", classifier=head) == Pooler()
    several = read_pooler(tmp_path, classifier=ClassifierSpec(kind="cls", layers=(), labels=("a", "b")))
    assert "2 labels" in several.unscored


def test_a_reranker_of_two_tokens_is_asked_for_yes_or_no(tmp_path: Path) -> None:
    values = {"true_token_id": 9693, "false_token_id": 2152}
    found = read_pooler(folder(tmp_path, "Transformer", "LogitScore", LogitScore=values))
    assert (found.scorer, found.unscored) == ("yes_no", "")


def test_a_reranker_of_one_token_is_refused(tmp_path: Path) -> None:
    values = {"true_token_id": 9454, "false_token_id": None}
    path = folder(tmp_path, "Transformer", "LogitScore", LogitScore=values)
    assert "9454" in read_pooler(path).unscored
    assert read_pooler(path, scorer="cosine").unscored == ""


def test_options_go_before_the_folder(tmp_path: Path) -> None:
    path = folder(tmp_path, "Transformer", "Pooling", "Normalize", Pooling=mode(lasttoken=True))
    found = read_pooler(path, pooler="mean", scorer="yes_no")
    assert (found.kind, found.scorer) == ("mean", "yes_no")


def test_the_makers_prompts(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: find\nQuery:", "document": "", "other": 5}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    found = read_pooler(tmp_path)
    assert (found.query, found.document) == ("Instruct: find\nQuery:", "")


@pytest.mark.parametrize("text", ["{", "{}", '[{"path": ""}]', "[5]"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooler(tmp_path)


def test_a_pooling_without_its_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="1_Pooling"):
        read_pooler(folder(tmp_path, "Transformer", "Pooling"))
