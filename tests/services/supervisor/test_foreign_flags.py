"""Command lines of other servers on Penstock's: foreign_flags.py and its table."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
import urllib.request
from pathlib import Path

import pytest

from penstock.protocol.config import Config, fields
from penstock.protocol.errors import ConfigError
from penstock.services import cli
from penstock.services.supervisor import options
from penstock.services.supervisor.foreign_flags import TABLE, ForeignFlag, did_you_mean, read_table, translate
from tests.e2e.server import serving

FLAGS = Path(__file__).with_name("flags")
SERVERS = sorted(path.stem for path in FLAGS.glob("*.txt"))
OWN = cli.parser_of("serve").flags()
BENCH = cli.parser_of("bench serve").flags()
TAKEN_ALIKE = frozenset(("--help", "--version"))  # asked for without a server
# What a command line gives: the options that it sets, and the flags that are left out.
PASTED = {
    "vllm serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 --enable-expert-parallel --max-model-len 32k "
    "--gpu-memory-utilization 0.92 --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 "
    "--trust-remote-code": (
        {"model": "Qwen/Qwen3-30B-A3B", "tensor_parallel_size": 2, "expert_parallel": True, "max_model_len": 32000,
         "gpu_memory_utilization": 0.92, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
        "--enable-auto-tool-choice --trust-remote-code",
    ),
    "vllm serve mistralai/Mistral-7B-Instruct-v0.3 --tokenizer_mode mistral --config_format mistral "
    "--load_format mistral --tool-call-parser mistral --enable-auto-tool-choice "
    """--limit-mm-per-prompt '{"image": 0}' --max_num_seqs=8""": (
        {"model": "mistralai/Mistral-7B-Instruct-v0.3", "load_format": "auto", "tool_call_parser": "mistral",
         "max_num_seqs": 8, "limit_mm_per_prompt": '{"image": 0}'},
        "--tokenizer_mode --config_format --enable-auto-tool-choice",
    ),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --allowed-media-domains example.org cdn.example.org "
    "--limit-mm-per-prompt.image 4 --limit-mm-per-prompt.video 0 --mm-processor-cache-gb 8 --mm-encoder-tp-mode data": (
        {"model": "Qwen/Qwen3-VL-8B-Instruct", "allowed_media_domains": "example.org,cdn.example.org",
         "limit_mm_per_prompt": "4"},
        "--limit-mm-per-prompt.video --mm-processor-cache-gb --mm-encoder-tp-mode",
    ),
    "vllm serve nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 --max-num-seqs 8 --tool-call-parser qwen3_coder "
    "--reasoning-parser nemotron_v3 --mamba_ssm_cache_dtype float32": (
        {"model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "max_num_seqs": 8, "tool_call_parser": "qwen3_coder",
         "reasoning_parser": "think"},
        "--mamba_ssm_cache_dtype",
    ),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --language-model-only --no-skip-mm-profiling": (
        {"model": "Qwen/Qwen3-VL-8B-Instruct", "limit_mm_per_prompt": "0"}, "--no-skip-mm-profiling",
    ),
    """python -m sglang.launch_server --model google/gemma-3-4b-it --limit-mm-data-per-request '{"image": 2}'""": (
        {"model": "google/gemma-3-4b-it", "limit_mm_per_prompt": '{"image": 2}'}, "",
    ),
    "llama-server -m models/gemma --no-mmproj": (
        {"model": "models/gemma", "limit_mm_per_prompt": "0"}, "",
    ),
    "vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 4 -pp=2 -dp 2 --kv-cache-memory-bytes 16G --dtype half "
    "--disable-log-requests --enable-chunked-prefill --max-num-batched-tokens 8192 --swap-space 4 "
    "--generation-config auto --served-model-name a b --uvicorn-log-level warning --num-scheduler-steps 1 "
    "--async-scheduling --no-enable-prefix-caching -O3 --compilation-config.mode 3 --max-model-len -1 "
    """--quantization None --no-enable-lora --allowed-origins '["https://a", "https://b"]'""": (
        {"model": "meta-llama/Llama-3.1-8B-Instruct", "tensor_parallel_size": 4, "pipeline_parallel_size": 2,
         "data_parallel_size": 2, "kv_cache_memory": 16 << 30, "dtype": "float16", "max_num_batched_tokens": 8192,
         "served_model_name": "a,b", "overlap": True, "enable_prefix_caching": False, "max_model_len": 0,
         "quantization": "none", "enable_lora": False, "allowed_origins": "https://a,https://b"},
        "--disable-log-requests --enable-chunked-prefill --swap-space --generation-config --uvicorn-log-level "
        "--num-scheduler-steps -O3 --compilation-config.mode",
    ),
    "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3.1-8B-Instruct --tp 2 "
    "--mem-fraction-static 0.85 --context-length 8192 --max-running-requests 32 --chunked-prefill-size 4096 "
    "--schedule-policy lpm --host 0.0.0.0 --port 30000 --attention-backend flashinfer --enable-metrics "
    "--cuda-graph-bs 1 2 4 --trust-remote-code": (
        {"model": "meta-llama/Meta-Llama-3.1-8B-Instruct", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.85,
         "max_model_len": 8192, "max_num_seqs": 32, "max_num_batched_tokens": 4096, "scheduling_policy": "fcfs",
         "host": "0.0.0.0", "port": 30000},
        "--attention-backend --enable-metrics --cuda-graph-bs --trust-remote-code",
    ),
    "python -m sglang.launch_server --model Qwen/Qwen3-8B --dp-size 2 --tool-call-parser qwen25 "
    "--reasoning-parser deepseek-r1 --disable-radix-cache --disable-overlap-schedule --random-seed 7 "
    "--kv-cache-dtype fp8_e4m3 --chunked-prefill-size -1 --log-level warn --skip-server-warmup --stream-interval 2": (
        {"model": "Qwen/Qwen3-8B", "data_parallel_size": 2, "tool_call_parser": "hermes",
         "reasoning_parser": "deepseek_r1", "enable_prefix_caching": False, "overlap": False, "seed": 7,
         "kv_cache_dtype": "fp8", "max_num_batched_tokens": 0, "log_level": "warning"},
        "--skip-server-warmup --stream-interval",
    ),
    "llama-server -m models/qwen -c 4096 -ngl 99 --parallel 4 -fa on --host 0.0.0.0 --port 8080 --jinja -a demo -cb "
    "--metrics -t -1 --no-mmap --api-key k -ctk f16": (
        {"model": "models/qwen", "max_model_len": 4096, "max_num_seqs": 4, "host": "0.0.0.0", "port": 8080,
         "served_model_name": "demo", "cpu_threads": 0, "api_key": "k"},
        "-ngl -fa --jinja -cb --metrics --no-mmap -ctk",
    ),
}  # fmt: skip


def arguments(line: str) -> list[str]:
    """What follows the program and its command."""
    words = shlex.split(line)
    first = next(place for place, word in enumerate(words) if word in ("serve", "llama-server") or "sglang" in word)
    return words[first + 1 :]


def read(*words: str, command: str = "serve") -> tuple[Config, dict[str, str], list[str]]:
    namespace = options.parse(cli.parser_of(command), words)
    found = options.effective(namespace, {})
    return found.config, found.origins, namespace.without_effect


def refusal(*words: str, command: str = "serve") -> str:
    with pytest.raises(ConfigError) as caught:
        read(*words, command=command)
    return str(caught.value)


@pytest.mark.parametrize("line", PASTED)
def test_a_pasted_command_line_is_taken(line: str) -> None:
    config, origins, without_effect = read(*arguments(line))
    given, left_out = PASTED[line]
    by_name = {field.name: getattr(getattr(config, field.section), field.name) for field in fields()}
    assert {name: by_name[name] for name in origins} == given
    assert without_effect == left_out.split()


def test_a_pasted_command_line_starts_a_server(tmp_path: Path) -> None:
    """What it gives holds, and one line of the log names what has no effect."""
    line = (
        "vllm serve penstock-demo -tp 1 --max_model_len 1k --max-num-seqs 4 --kv-cache-memory-bytes 64M --dtype float "
        "--enable-auto-tool-choice --disable-log-requests --swap-space 4 --trust-remote-code --served-model-name a b"
    )
    with serving(tmp_path, *arguments(line)[1:], model=arguments(line)[0]) as server:
        models = server.get("/v1/models")["data"]
        body = json.dumps({"model": "b", "prompt": "Once", "max_tokens": 2}).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
    assert [(one["id"], one["max_model_len"]) for one in models] == [("a", 1000), ("b", 1000)]
    told = [one for one in server.log.read_text().splitlines() if "flags_without_effect" in one]
    assert len(told) == 1
    assert told[0].endswith('flags="--enable-auto-tool-choice --disable-log-requests --swap-space --trust-remote-code"')


@pytest.mark.parametrize("server", SERVERS)
def test_every_flag_of_the_servers_is_in_one_class(server: str) -> None:
    """An option of Penstock's, or in the table; never unknown, never both."""
    names = {
        word for row in (FLAGS / f"{server}.txt").read_text().splitlines() if row[0] != "#" for word in row.split()
    }
    known, table = set(OWN) | TAKEN_ALIKE, read_table()
    assert len(names) > 400
    assert sorted(names - known - set(table)) == []
    assert sorted(set(table) & known) == []


def test_the_table_has_each_flag_once_and_says_why() -> None:
    file = tomllib.loads(TABLE.read_text())
    texts = [*file["taken"].values(), *(group["flags"] for kind in ("ignored", "refused") for group in file[kind])]
    flags = [word.partition("=")[0] for text in texts for word in text.split()]
    assert sorted(flags) == sorted(set(flags))
    assert set(read_table()) == set(flags)
    assert {option.partition("=")[0] for option in file["taken"]} <= set(OWN)
    allowed = {field.flag: field for field in fields()}
    assert set(file["spellings"]) <= set(allowed)
    assert set(file["meanings"]) <= set(OWN) | set(cli.COMMANDS) | set(BENCH)
    for kind in ("ignored", "refused"):
        reasons = [(group["why"], group.get("unless")) for group in file[kind]]
        assert len(reasons) == len(set(reasons))
        for why, unless in reasons:
            assert 4 <= len(why.split()) <= 30, why
            assert not why.endswith(".")
            re.compile(unless or "")
            for word in re.findall(r"(?<![\w-])--[a-z][\w-]+", why):
                assert word in OWN or word == "--pooler", why


def test_spellings_of_values() -> None:
    for flag, values in tomllib.loads(TABLE.read_text())["spellings"].items():
        field = OWN[flag]
        assert field is not None
        for value, others in values.items():
            for other in others.split():
                found = read(f"{flag}={other}")[0]
                assert str(getattr(getattr(found, field.section), field.name)) == value


@pytest.mark.parametrize(
    ("text", "value"), [("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1m", 1_000_000), ("2M", 2 << 20), ("77", 77)]
)
def test_whole_numbers_may_have_a_magnitude(text: str, value: int) -> None:
    assert read("--max-model-len", text)[0].model.max_model_len == value


def test_every_refused_flag_of_a_line_is_named_in_one_message() -> None:
    line = "M --enable-lora-bias --lora-scaled a:1 --quantize-and-serve --max_modle_len 8 --calculate-kv-scales -tp 2"
    assert refusal(*line.split()).splitlines() == [
        "command line: 5 flags are not allowed",
        "  --enable-lora-bias: adapters are LoRA folders as PEFT writes them: --enable-lora --lora-modules NAME=FOLDER",
        "  --lora-scaled: adapters are LoRA folders as PEFT writes them: --enable-lora --lora-modules NAME=FOLDER",
        "  --quantize-and-serve: a quantized folder is served as its config.json says, and --quantization rounds "
        "another while it loads",
        "  --max_modle_len: there is no such option; did you mean --max-model-len?",
        "  --calculate-kv-scales: --kv-cache-dtype fp8 takes the checkpoint's scales of keys and values, in all layers",
    ]


def test_values_that_ask_for_what_is_done_anyway_are_not_refused() -> None:
    assert read("--nnodes", "1", "--node-rank=0", "-ngl", "all")[2] == ["--nnodes", "--node-rank", "-ngl"]
    assert "several hosts are set up with --parts" in refusal("--nnodes", "2")
    assert "--device cpu computes on the CPU" in refusal("-ngl", "0")


def test_flags_take_as_many_values_as_they_have() -> None:
    config, _, without_effect = read("--cuda-graph-bs", "1", "2", "--enforce-eager", "-fa", "--jinja", "M")
    assert (config.model.model, config.executor.enforce_eager) == ("M", True)
    assert without_effect == ["--cuda-graph-bs", "-fa", "--jinja"]
    assert read("--cudagraph-capture-sizes", "1", "-1", "--", "M")[0].model.model == "M"
    assert read("--no-enable-expert-parallel", "--no-async-scheduling")[0].scheduler.overlap is False
    assert read("--swap-space", "4", "M")[0].model.model == "M"
    assert "there is no such option" in refusal("--no-swap-space")
    assert refusal("-tp") == "--tensor-parallel-size: a value must follow it"


def test_other_commands_take_the_same_lines_and_their_own_short_flags() -> None:
    assert read("M", "-tp", "2", "--trust-remote-code", command="plan")[0].model.tensor_parallel_size == 2
    assert options.parse(cli.parser_of("chat"), ["-pHello"]).prompt == "Hello"
    assert options.parse(cli.parser_of("chat"), ["-p", "--x=y and z"]).prompt == "--x=y and z"
    assert "it is an option of `penstock serve`" in refusal("M", "--max-num-queued-reqs", "3", command="plan")
    assert "there is no such option" in refusal("-n", "1", command="top")


def test_nothing_is_taken_behind_two_dashes() -> None:
    found = translate(["--", "--enable-lora"], {}, {}, foreign=True)
    assert (found.words, found.without_effect) == (["--", "--enable-lora"], [])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--ctx-window", "--max-model-len"),
        ("--num-gpus", "--tensor-parallel-size"),
        ("--workers", "--api-processes"),
        ("--auth", "--api-key"),
        ("--vram", "--gpu-memory-utilization"),
        ("--max-concurrency", "--max-num-seqs"),
        ("--tls-cert", "--ssl-certfile"),
        ("--cors", "--allowed-origins"),
        ("--quiet", "--log-level"),
        ("--max-modle-len", "--max-model-len"),
        ("--seeed", "--seed"),
    ],
)
def test_an_option_is_guessed_by_its_meaning_then_by_its_letters(typed: str, meant: str) -> None:
    assert refusal(typed).endswith(f"; did you mean {meant}?")
    bare = typed[2:].replace("-", "_")
    assert meant[2:].replace("-", "_") in did_you_mean(bare, [field.name for field in fields()])


def test_a_word_without_meaning_is_no_guess() -> None:
    assert did_you_mean("--xyzzy", list(OWN)) == ""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("--num-prompts", "--requests"), ("--request-rate", "--rate"), ("--random-input-len", "--input"),
     ("--random-output-len", "--output-tokens"), ("--base-url", "--url"), ("--max-concurrency", "--concurrency")],
)  # fmt: skip
def test_flags_of_their_benchmarks_lead_to_ours(theirs: str, ours: str) -> None:
    assert did_you_mean(theirs, list(BENCH)).startswith(f"; did you mean {ours}")


def test_a_reason_holds_unless_every_value_is_harmless() -> None:
    flag = ForeignFlag("=+", why="no", refused=True, unless="a|b")
    assert [flag.why_not(values) for values in (["a"], ["a", "b"], ["a", "c"], [])] == ["", "", "no", "no"]
