"""Options that are set and change nothing are named at the start, with the reason."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config, adjusted, fields
from penstock.protocol.parts import parts_of
from penstock.protocol.served_models import engines
from penstock.services.supervisor.preflight import checked
from penstock.services.supervisor.unused_options import CASES, Facts, unused_options
from tests.engine_core.execution.test_recurrent_state import hybrid
from tests.engine_core.text.sighted import FAMILIES
from tests.model_folder import linked

DEMO = read_spec(demo_folder())
ENCODER = msgspec.structs.replace(
    DEMO.with_layers(tuple(
        msgspec.structs.replace(each, attention=msgspec.structs.replace(each.attention, bidirectional=True))
        for each in DEMO.blocks
    )),
    headless=True,
)  # fmt: skip
SPEC = msgspec.structs.replace(hybrid(), vision=FAMILIES["qwen"].vision())  # it has what the embedded model lacks
NEEDED = {
    "load_format": "dummy", "enable_lora": True, "tensor_parallel_size": 2, "data_parallel_size": 2,
    "prefill_replicas": 1, "idle_timeout": 9.0, "trust_request_chat_template": True, "uds": "/run/socket",
    "ssl_certfile": "a.pem", "ssl_ca_certs": "b.pem", "allowed_origins": "*", "otlp_endpoint": "http://localhost:4318",
    "models": '{"a": {}, "b": {}}',
}  # fmt: skip
NAMES = {name: case for case in CASES for name in case.options.split()}
OF_OTHERS = ("the model runs on a GPU", "the model is an encoder, which caches nothing", "the model writes no text")


def other(name: str) -> object:
    """A value of the option that is not the default."""
    field = next(each for each in fields() if each.name == name)
    if field.type is bool:
        return not field.default
    if field.option.choices:
        return next(each for each in field.option.choices if each != field.default)
    return {str: '{"method": "ngram"}' if name == "speculative_config" else "7", int: 77, float: 0.7}[field.type]


def unused(config: Config, **facts: object) -> dict[str, str]:
    return unused_options([Facts(config, DEMO, on_gpu=False)._replace(**facts)])


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_option_is_named_where_it_changes_nothing_and_there_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    flag, kept = "--" + name.replace("_", "-"), 0 if name in ("max_stored_bytes", "response_dir") else 1000
    alone = adjusted(Config(), **{"max_stored_responses": kept, name: other(name)})
    both = adjusted(Config(), **NEEDED | {name: other(name)})
    assert flag not in unused(Config(), spec=msgspec.structs.replace(DEMO, headless=True), on_gpu=True)
    assert flag not in unused(both, spec=SPEC, on_gpu=name != "cpu_threads")
    assert (flag in unused(alone)) is (NAMES[name].why not in OF_OTHERS)
    assert flag in unused(alone, spec=ENCODER, on_gpu=name == "cpu_threads")


def test_settings_of_a_lookup_are_named_for_other_methods() -> None:
    def found(*methods: str) -> dict[str, str]:
        texts = [f'{{"method": "{method}", "prompt_lookup_max": 9}}' for method in methods]
        return unused_options([Facts(adjusted(Config(), speculative_config=text), DEMO, on_gpu=True) for text in texts])

    assert found("ngram") == found("mtp", "ngram") == {}
    assert found("mtp") == {"--speculative-config prompt_lookup_max": "method ngram alone looks up"}


def test_nothing_is_said_of_executors_on_other_hosts() -> None:
    assert not unused(adjusted(Config(), enforce_eager=True, cpu_threads=2), on_gpu=None)


def test_what_one_of_several_models_has_a_use_for_is_named_for_none() -> None:
    config = adjusted(Config(), models='{"a": {"max_loras": 2, "enable_lora": true}, "b": {"state_snapshots": 5}}')
    first, second = engines(adjusted(config, max_loras=3))
    found = unused_options([Facts(first, DEMO, on_gpu=False), Facts(second, DEMO, on_gpu=False)])
    assert found == {"--state-snapshots": "the model has no recurrent layers"}


def test_the_log_says_it_once_for_each_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = adjusted(Config(), model=str(linked(tmp_path / "model")), device="cpu", port=0, enforce_eager=True,
                      tune=False, state_snapshots=5)  # fmt: skip
    with caplog.at_level(logging.WARNING):
        checked(config, parts_of(config))
    assert [getattr(each, "fields", {}) for each in caplog.records] == [
        {"options": "--state-snapshots", "reason": "the model has no recurrent layers"},
        {"options": "--enforce-eager --tune", "reason": "the model runs on a CPU"},
    ]
