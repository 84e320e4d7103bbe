from __future__ import annotations

import tomllib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.adapters import read_modules
from penstock.protocol.config import Config, fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import words
from penstock.protocol.validation import check
from penstock.services.cli import parser_of
from penstock.services.supervisor import options


def effective(*words: str, environ: dict[str, str] | None = None, command: str = "config") -> options.Effective:
    return options.effective(options.parse(parser_of(command), words), environ or {})


def refusal(*words: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        effective(*words, environ=environ)
    return str(caught.value)


def test_nothing_given_is_the_default():
    assert effective() == options.Effective(Config(), {})


def test_the_names_that_people_type():
    words = (
        "--model m --served-model-name s --host ::1 --port 9 --dtype bfloat16 --max-model-len 128 --max-num-seqs 8 "
        "--max-num-batched-tokens 64 --gpu-memory-utilization 0.5 --tensor-parallel-size 1 --no-enable-prefix-caching "
        "--block-size 32 --seed 3 --enforce-eager --api-key k"
    )
    config = effective(*words.split()).config
    model, api, executor = config.model, config.api, config.executor
    assert (model.model, model.served_model_name, api.host, api.port) == ("m", "s", "::1", 9)
    assert (model.dtype, model.max_model_len, model.max_num_seqs, model.block_size) == ("bfloat16", 128, 8, 32)
    assert (model.max_num_batched_tokens, model.tensor_parallel_size, model.seed) == (64, 1, 3)
    assert (executor.gpu_memory_utilization, executor.enforce_eager, api.api_key) == (0.5, True, "k")
    assert not config.scheduler.enable_prefix_caching
    assert effective("--enable-prefix-caching").config.scheduler.enable_prefix_caching


def test_values_may_stand_behind_an_equals_sign():
    assert effective("--port=0", "--no-overlap", "--drain-timeout=2").config.run.drain_timeout == 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port 70000", "--port: 70000 is not allowed; it must be between 0 and 65535"),
        ("--port x", "--port: 'x' is not allowed; it must be a whole number"),
        ("--port", "--port: a value must follow it"),
        ("--gpu-memory-utilization nan", "nan is not allowed; it must be between 0.05 and 0.99"),
        ("--dtype int8", "--dtype: 'int8' is not allowed; it must be one of auto, float32, bfloat16, float16"),
        ("--max-num-seqs 64 --max-num-batched-tokens 16",
         "--max-num-batched-tokens: 16 is not allowed; it must be at least --max-num-seqs (64)"),
        ("--max-model-length 3", "command line: '--max-model-length' is not allowed; there is no such option; "
         "did you mean --max-model-len?"),
        ("--no-overlapp", "did you mean --no-overlap"),
        ("a a", "--model: 'a' is not allowed; two models are called 'a': give names, as --model NAME=PATH"),
        ("a --model b", "--model: 'b' is not allowed; the command line also names the model 'a'"),
        ("--overlap=3", "--overlap"),
        ("--seed 9223372036854775808", "between 0 and 9223372036854775807"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_option_its_value_and_what_is_allowed(words, message):
    assert message in refusal(*words.split())


def test_abbreviations_are_no_options():
    assert "no such option" in refusal("--max-model", "3")


def test_later_sources_win_and_each_is_told(tmp_path):
    file = tmp_path / "penstock.toml"
    file.write_text('port = 1\nhost = "h"\n[api]\napi_key = "file"\n[model]\nmax-model-len = 77\n')
    found = effective("--port=2", f"--config={file}", environ={"PENSTOCK_API_KEY": "environment"})
    assert (found.config.api.port, found.config.api.host, found.config.api.api_key) == (2, "h", "environment")
    assert found.config.model.max_model_len == 77
    origin = f"file {file}"
    assert found.origins == {
        "port": "command line",
        "host": origin,
        "api_key": "environment PENSTOCK_API_KEY",
        "max_model_len": origin,
    }
    typed = effective("--api-key=typed", environ={"PENSTOCK_API_KEY": "environment"})
    assert typed.config.api.api_key == "typed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "'prot' is not allowed; FILE names an option that does not exist; did you mean port"),
        ("[api]\nmax_model_len = 1", "belongs into section 'model', not 'api'"),
        ("[ap]\nport = 1", "'ap' is not allowed; FILE names an option that does not exist; did you mean api?"),
        ("port = true", "--port: True is not allowed; it must be a whole number (file FILE)"),
        ("port = '1'", "--port: '1' is not allowed; it must be a whole number (file FILE)"),
        ("port = 1.5", "--port: 1.5 is not allowed"),
        ("port = 70000", "between 0 and 65535 (file FILE)"),
        ("overlap = 1", "--overlap: 1 is not allowed; it must be true or false"),
        ("api_key = 12345", "--api-key: '***' is not allowed; it must be text"),
        ("port =", "it must be TOML"),
        ("api = 3", "'api' is not allowed"),
        ("[api.more]\nport = 1", "'api.more' is not allowed"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path, text, message):
    file = tmp_path / "p.toml"
    file.write_text(text)
    assert message.replace("FILE", str(file)) in refusal(f"--config={file}")


def test_a_file_that_is_not_there(tmp_path):
    assert "No such file" in refusal(f"--config={tmp_path}/none.toml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "it must be TOML, as `penstock config` prints it" in refusal(f"--config={tmp_path}/bytes")


def test_whole_numbers_serve_as_numbers(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text("status_interval = 1")
    assert type(effective(f"--config={file}").config.scheduler.status_interval) is float


def values():
    """Any allowed configuration, as keyword arguments of each section."""
    by_section: dict[str, dict[str, st.SearchStrategy[object]]] = {}
    for field in fields():
        option = field.option
        if option.choices:
            strategy: st.SearchStrategy[object] = st.sampled_from(option.choices)
        elif option.metavar == "tcp://HOST:PORT":
            strategy = st.sampled_from(("", "tcp://10.0.0.1:2000", "tcp://[::1]:2000", "tcp://node:3000"))
        elif field.type is bool:
            strategy = st.booleans()
        elif field.type is int:
            strategy = st.integers(int(option.low or 0), int(option.high or 0))
        elif field.type is float:
            strategy = st.floats(option.low, option.high)
        else:
            strategy = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
        by_section.setdefault(field.section, {})[field.name] = strategy
    return st.fixed_dictionaries({name: st.fixed_dictionaries({}, optional=one) for name, one in by_section.items()})


def allowed(sections) -> Config | None:
    default = Config()
    config = msgspec.structs.replace(
        default, **{name: msgspec.structs.replace(getattr(default, name), **entry) for name, entry in sections.items()}
    )
    try:
        return check(config)
    except ConfigError:
        return None


@settings(deadline=None)
@given(sections=values())
def test_a_child_gets_the_very_same_configuration(sections):
    config = allowed(sections)
    if config is not None:
        words, environ = options.arguments(config), options.environment(config, {})
        assert effective(*words, environ=environ, command="api").config == config
        assert not any(word.partition("=")[0] == "--api-key" for word in words)  # but --api-key-file may


@settings(deadline=None)
@given(sections=values())
def test_what_config_prints_is_a_file_for_config(tmp_path_factory, sections):
    config = allowed(sections)
    if config is not None:
        text = options.as_toml(options.Effective(config, {}))
        tomllib.loads(text)
        file = tmp_path_factory.mktemp("toml") / "p.toml"
        file.write_text(text, encoding="utf-8")
        found = effective(f"--config={file}", environ=options.environment(config, {})).config
        assert found == config


@pytest.mark.parametrize("form", ["adapter-{0}={1}", '{{"name": "adapter-{0}", "path": "{1}"}}'])
def test_a_thousand_adapters_reach_a_child(form):
    """Linux takes 131,072 bytes in one word of a command line."""
    modules = [form.format(number, "/long" * 30) for number in range(1000)]
    config = effective("model", "--enable-lora", "--lora-modules", *modules).config
    found = options.arguments(config)
    assert max(map(len, found)) < 1 << 17 < sum(map(len, found))
    assert effective(*found, command="api").config == config
    assert len(read_modules(config.api.lora_modules)) == 1000


def test_a_secret_is_never_printed():
    text = options.as_toml(effective("--api-key=hush", "--port=7"))
    assert "hush" not in text
    assert "# api_key is set and not shown  # command line" in text
    assert "port = 7  # command line" in text
    assert "# api_key is not set" in options.as_toml(effective())


def test_help_tells_every_option_its_default_and_bounds():
    text = " ".join(parser_of("serve").format_help().split())
    for field in fields():
        assert field.flag in text
        assert field.option.help.replace("%", "%%").split(";")[0] in text
        if field.allowed:
            assert field.allowed in text
    assert "--no-overlap" in text
    assert "[default 8000; between 0 and 65535]" in text
    assert "or $PENSTOCK_API_KEY" in text
    for title in options.TITLES.values():
        assert title in text


def test_options_that_take_several(tmp_path):
    """Repeated, with commas, or as a list in a file; the environment holds commas."""
    assert effective("--api-key", "a", "--api-key=b,c").config.api.api_key == "a,b,c"
    assert effective(environ={"PENSTOCK_API_KEY": "a, b"}).config.api.api_key == "a, b"
    file = tmp_path / "p.toml"
    file.write_text('allowed_origins = ["https://a", "https://b"]\nserved_model_name = "one"\n')
    config = effective(f"--config={file}").config
    assert words(config.api.allowed_origins) == ("https://a", "https://b")
    assert config.model.served_model_name == "one"
    assert options.arguments(config) == ["--served-model-name=one", "--allowed-origins=https://a,https://b"]
    file.write_text("allowed_origins = [1]")
    assert "it must be text" in refusal(f"--config={file}")
    file.write_text('host = ["a"]')
    assert "it must be text" in refusal(f"--config={file}")
    assert words(" a ,, b,") == ("a", "b")
    assert words("") == ()


@pytest.mark.parametrize(
    ("typed", "model", "names"),
    [
        ("M --served-model-name a b", "M", "a,b"),
        ("M --served-model-name a b --port 9 --served-model-name c", "M", "a,b,c"),
        ("--served-model-name a b --port 9 M", "M", "a,b"),
        ("--served-model-name a b -- M", "M", "a,b"),
        ("--served-model-name=a M", "M", "a"),
        ("--served-model-name a b --model M", "M", "a,b"),
        ("--model M --served-model-name a b", "M", "a,b"),
        ("--model= --served-model-name a b", "", "a,b"),
        ("--served-model-name a", "", "a"),
        ("--served-model-name a --served-model-name b", "", "a,b"),
    ],
)
def test_a_flag_takes_several_names_as_in_vllm(typed: str, model: str, names: str) -> None:
    found = effective(*typed.split()).config.model
    assert (found.model, found.served_model_name) == (model, names)


@pytest.mark.parametrize(
    "typed", ["--served-model-name a M", "--max-model-len 9 --served-model-name a b M", "--served-model-name a b"]
)
@pytest.mark.parametrize("command", ["config", "serve", "plan", "chat", "bench offline"])
def test_a_word_that_may_be_the_model_is_taken_for_nothing_in_silence(typed: str, command: str) -> None:
    given = typed.split("name ")[1]
    told = f"is {given.split()[-1]!r} the model? Name the model in front: MODEL --served-model-name {given}"
    with pytest.raises(ConfigError) as caught:
        effective(*typed.split(), command=command)
    assert str(caught.value) == f"--served-model-name: {given!r} is not allowed; {told}"


def test_a_file_may_name_the_model_that_the_names_are_for(tmp_path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('model = "M"\n')
    found = effective(f"--config={file}", "--served-model-name", "a", "b").config.model
    assert (found.model, found.served_model_name) == ("M", "a,b")


@pytest.mark.parametrize("empty", ["", " ", ",", "\t, ,"])
def test_an_empty_key_is_not_the_same_as_none(tmp_path, empty: str) -> None:
    """It is what a variable that was not set leaves behind."""
    why = "is not allowed; a server without keys answers everybody; leave the option out if that is meant"
    assert refusal(f"--api-key={empty}") == f"--api-key: '***' {why}"
    assert refusal("--api-key", "right", "--api-key", empty) == f"--api-key: '***' {why}"
    told = refusal(environ={"PENSTOCK_API_KEY": empty})
    assert told == f"--api-key: '***' {why} (environment PENSTOCK_API_KEY)"
    file = tmp_path / "p.toml"
    for text in (f"api_key = {options.toml_value(empty)}", f"[api]\napi_key = [{options.toml_value(empty)}]"):
        file.write_text(text)
        assert refusal(f"--config={file}") == f"--api-key: '***' {why} (file {file})"
    if not empty.strip():
        assert refusal(f"--api-key-file={empty}") == f"--api-key-file: {empty!r} {why}"


def test_a_child_has_no_secret_that_its_parent_does_not_have() -> None:
    inherited = {"PENSTOCK_API_KEY": "another", "PENSTOCK_SSL_KEYFILE_PASSWORD": "another", "HOME": "/"}
    assert options.environment(Config(), inherited) == {"HOME": "/"}
    given = effective("--api-key=own").config
    assert options.environment(given, inherited) == {"HOME": "/", "PENSTOCK_API_KEY": "own"}
