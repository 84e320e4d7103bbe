"""What `deploy/` calls by name exists: options, settings, metrics, files; and what it shows is what is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from penstock.protocol.config import fields
from penstock.services import cli
from tests.deploy.test_metrics import exported

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (DEPLOY / "README.md").read_text()
GUIDE = (ROOT / "docs" / "deployment.md").read_text()
FILES = tuple(sorted(path for path in DEPLOY.rglob("*") if path.is_file()))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# Options of others' programs, by the program that stands before them in the line.
OTHERS = {
    "docker": {"--target", "--build-arg"},
    "up": {"--build"},
    "systemctl": {"--now"},
    "kubectl": {"--from-file", "--namespace"},
    "curl": {"--header"},
    "useradd": {"--uid", "--gid", "--home-dir", "--create-home", "--shell"},
    "groupadd": {"--gid"},
    "apt-get": {"--yes", "--no-install-recommends"},
    "HEALTHCHECK": {"--start-period", "--interval", "--timeout"},
    "COPY": {"--from"},
    "--config.file": {"--config"},  # Prometheus's own
}


@cache
def known() -> frozenset[str]:
    """Every option of every command."""
    return frozenset(flag for command in cli.COMMANDS for flag in cli.parser_of(command)._option_string_actions)


def named(path: Path) -> Iterator[tuple[str, str]]:
    """Each option in a file, with its line."""
    for line in path.read_text().replace("\\\n", " ").splitlines():
        yield from ((flag, line) for flag in FLAG.findall(line))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_option_exists(path: Path) -> None:
    wrong = {
        flag
        for flag, line in named(path)
        if flag not in known() and not any(program in line and flag in flags for program, flags in OTHERS.items())
    }
    assert wrong == set()


def test_the_list_of_others_options_is_short() -> None:
    """Whatever stands in it is used."""
    used = {flag for path in FILES for flag, _ in named(path)}
    assert set().union(*OTHERS.values()) <= used


def test_every_setting_on_the_page_is_one() -> None:
    names = {field.name for field in fields()}
    settings = re.findall(r"`([a-z]+(?:_[a-z]+)+) = ", PAGE)
    assert settings
    assert set(settings) <= names


def test_every_link_on_the_page_leads_somewhere() -> None:
    for place in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (DEPLOY / place).exists(), place


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_file_of_ours_that_is_named_is_there(path: Path) -> None:
    for place in re.findall(r"(?<![\w/.])deploy/[\w./@-]*\w", path.read_text()):
        assert list(ROOT.glob(place + "*")), f"{path.name}: {place}"


def test_every_file_is_on_the_page() -> None:
    """By its own name or its folder's."""
    places = set(re.findall(r"\]\(([^)#]+)\)", PAGE))
    for path in FILES:
        within = path.relative_to(DEPLOY)
        assert path.name == "README.md" or {str(place) for place in (within, *within.parents)} & places, path


async def test_every_metric_on_the_page_is_exported() -> None:
    """What begins with an underscore goes on from the name before it."""
    families = await exported()
    known = {sample.name for family in families for sample in family.samples} | {family.name for family in families}
    known |= {family.name + "_total" for family in families if family.type == "counter"}
    part = GUIDE[GUIDE.index("| Question | Metrics") : GUIDE.index("[alerts.yaml]")]
    words = re.findall(r"`([a-z]*_[a-z_]+)`", part)
    assert len(words) > 40
    for word in words:
        assert any(name.endswith(word) for name in known) if word[0] == "_" else f"penstock_{word}" in known, word


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 128001, "bos_token_id": 128000,
}  # fmt: skip


def test_the_plan_on_the_page_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = re.search(r"```console\n\$ penstock (plan) \S+ (.*)\n((?:.*\n)+?)```", GUIDE)
    assert found is not None
    assert cli.main([found[1], str(folder), *found[2].split()]) == 0
    assert capsys.readouterr().out == found[3]
