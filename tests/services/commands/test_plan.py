"""`penstock plan`: the numbers of an executor, from a folder's config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.engine_core.models.adapter_folder import place_bytes
from penstock.engine_core.models.draft_spec import read_draft
from penstock.engine_core.models.memory_estimate import StepShape, block_bytes, weights
from penstock.engine_core.models.sharding import held_bytes, part_spec, stage_layers
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_cost import tower_weights
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.services import cli
from penstock.services.commands.plan import GPUS, Plan, gpu_bytes, lengths, plan, stage_share, text
from penstock.services.commands.progress import fitted
from penstock.services.supervisor.options import effective, parse
from tests.engine_core.models.eagle_heads import head_config, write_head
from tests.engine_core.models.mtp_heads import configure, headed_config
from tests.engine_core.models.test_memory_estimate import LLAMA_8B, QWEN_06B
from tests.services.executor.folder import write_seeing_folder

GIB = 1 << 30


def folder_of(path: Path, config: dict[str, object]) -> Path:
    """A model's folder with nothing but its shape."""
    (path / "config.json").write_text(json.dumps(config))
    return path


def planned(model: Path, *words: str, gpu: str = "h200") -> Plan:
    parsed = parse(cli.parser_of("plan"), [str(model), *words])
    return plan(effective(parsed, {}).config, gpu)


def test_the_plan_of_8_billion_parameters(tmp_path: Path) -> None:
    found = planned(folder_of(tmp_path, LLAMA_8B), "--max-model-len", "4096")
    assert found.weight_bytes == 16_060_522_496
    assert found.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert found.blocks == pytest.approx(55_083, rel=0.005)  # as an H200 had
    assert found.cache_tokens == found.blocks * 16
    assert {row.tokens: (row.requests, row.limit) for row in found.concurrency} == {
        512: (256, "slots"), 1024: (256, "slots"), 2048: (256, "slots"), 4096: (found.blocks // 256, "blocks"),
    }  # fmt: skip


def test_bytes_per_token_are_the_cache_formula(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN_06B)
    found = planned(folder)
    assert found.kv_bytes_per_token * 16 == block_bytes(read_spec(folder), 16, 2)
    assert planned(folder, "--dtype", "float32").kv_bytes_per_token == 2 * found.kv_bytes_per_token


def test_the_groups_of_a_model_with_windows(tmp_path: Path) -> None:
    sizes = {"sliding_window": 1024, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    folder = folder_of(tmp_path, LLAMA_8B | sizes)
    found, whole = planned(folder, "--max-model-len", "8192"), planned(folder, "--max-model-len", "1024")
    assert found.kv_groups == "1 of the last 1,024 tokens, of 32 layers each"
    assert "held at 8,192 tokens" in text(found)
    assert whole.kv_groups == ""
    assert "held at" not in text(whole)
    assert found.kv_bytes_per_token == whole.kv_bytes_per_token == whole.held_bytes_per_token
    assert found.held_bytes_per_token == pytest.approx(found.kv_bytes_per_token * 65 / 512, rel=0.001)
    assert found.concurrency[-1].requests == min(256, found.blocks // 65)


@pytest.mark.parametrize(
    ("quantization", "least", "most"), [("fp8", 0.53, 0.58), ("int8", 0.53, 0.58), ("int4", 0.3, 0.36)]
)
def test_quantized_weights_leave_more_for_the_cache(
    tmp_path: Path, quantization: str, least: float, most: float
) -> None:
    """Embeddings stay as they are, and parameters are counted as before."""
    folder = folder_of(tmp_path, LLAMA_8B)
    found, plain = planned(folder, "--quantization", quantization), planned(folder)
    assert least < found.weight_bytes / plain.weight_bytes < most
    assert found.blocks > plain.blocks
    assert found.parameters == plain.parameters
    assert "in place of 14.96 in bfloat16" in text(found)
    assert "  quantized  " not in text(plain)


def test_a_cache_in_fp8_takes_a_byte_a_number(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN_06B)
    found, plain = planned(folder, "--kv-cache-dtype", "fp8"), planned(folder)
    assert (found.kv_cache_dtype, plain.kv_cache_dtype) == ("fp8_e4m3", "bfloat16")
    assert 2 * found.kv_bytes_per_token == plain.kv_bytes_per_token
    assert found.blocks > 1.99 * plain.blocks
    assert "bytes per token, in fp8_e4m3" in text(found)


def test_given_bytes_decide_the_cache(tmp_path: Path) -> None:
    found = planned(folder_of(tmp_path, QWEN_06B), "--kv-cache-memory", str(10 * GIB))
    assert found.blocks == 10 * GIB // (found.kv_bytes_per_token * 16) - 1


def test_weights_that_are_kept_take_as_much_of_the_hosts_memory(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA_8B)
    found = planned(folder, "--keep-weights", "--tensor-parallel-size", "2")
    assert found.kept_bytes == found.weight_bytes
    assert f"  kept while asleep   {found.kept_bytes / GIB:>8.2f} GiB of host memory" in text(found)
    assert "kept while" not in text(planned(folder))


def test_places_for_adapters_are_taken_from_the_cache(tmp_path: Path) -> None:
    """Of rank 9 as of rank 16: seven matrices of 32 layers and the output embedding, of each 16 lines."""
    folder = folder_of(tmp_path, LLAMA_8B)
    options = ModelConfig(model=str(folder), max_model_len=4096)
    plain = plan(Config(model=options), "h200")
    lora = plan(Config(model=replace(options, enable_lora=True, max_loras=4, max_lora_rank=9)), "h200")
    assert (plain.adapter_bytes, lora.adapter_bytes) == (0, 4 * (41_943_040 + 16 * (128_256 + 4096)) * 2)
    block = plain.kv_bytes_per_token * plain.block_size
    assert plain.blocks - lora.blocks == pytest.approx(lora.adapter_bytes / block, abs=1)
    assert "LoRA adapters           0.33 GiB" in text(lora)
    assert "LoRA" not in text(plain)


def test_places_for_experts_are_counted_one_by_one(tmp_path: Path) -> None:
    """And the half of them on each of two ranks, whole or by their width."""
    config = LLAMA_8B | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    options = ModelConfig(model=str(folder_of(tmp_path, config)), max_model_len=4096, enable_lora=True)
    plain, lora = (plan(Config(model=replace(options, lora_experts=given)), "h200") for given in (False, True))
    inputs, outputs = 4096, 14336
    assert lora.adapter_bytes - plain.adapter_bytes == 8 * 32 * 8 * 16 * 3 * (inputs + outputs) * 2
    spec = read_spec(tmp_path)
    whole, split = (place_bytes(part_spec(spec, 2), 16, 2, experts=True, parallel=ranks) for ranks in (2, 1))
    bare = place_bytes(part_spec(spec, 2), 16, 2)
    assert whole - bare == 32 * 4 * 16 * 3 * (inputs + outputs) * 2
    assert split - bare == 32 * 8 * 16 * 3 * (inputs + outputs // 2) * 2


def test_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA_8B)
    with pytest.raises(ConfigError, match=r"weights take 14\.96 GiB"):
        planned(folder, gpu="16GB")
    with pytest.raises(ConfigError, match=r"--max-model-len.*give at most"):
        planned(folder, gpu="l4")
    assert planned(folder, "--max-model-len", "4096", gpu="l4").concurrency[-1].requests >= 1
    with pytest.raises(ConfigError, match="tokens, LoRA adapters and what CUDA needs"):
        planned(folder, "--enable-lora", "--max-lora-rank", "256", "--max-loras", "128", gpu="h200")
    with pytest.raises(ConfigError, match="the cache 140"):
        planned(folder, "--kv-cache-memory", str(140 * GIB))


def beside(method: str, folder: Path) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"method": method, "model": str(folder)})


def test_a_draft_model_takes_its_share(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("model", "draft")]
    for folder, config in zip(folders, (LLAMA_8B, QWEN_06B), strict=True):
        folder.mkdir()
        folder_of(folder, config)
    model, draft = folders
    alone, drafting = planned(model, "--max-model-len", "4096"), beside("draft_model", draft)
    found = planned(model, "--max-model-len", "4096", *drafting)
    assert found.weight_bytes == alone.weight_bytes + 2 * weights(read_spec(draft))
    assert found.kv_bytes_per_token * 16 == alone.kv_bytes_per_token * 16 + block_bytes(read_spec(draft), 16, 2)
    assert found.step_bytes > alone.step_bytes
    assert found.blocks < alone.blocks
    assert found.parameters == alone.parameters
    ranks = planned(model, "--max-model-len", "4096", "--tensor-parallel-size", "2", *drafting)
    assert ranks.weight_bytes > found.weight_bytes / 2 + weights(read_spec(draft)) / 2, "each rank has all of it"


def test_the_models_own_head_takes_its_share(tmp_path: Path) -> None:
    """Each rank has all of it, in the formats of the model."""
    headed_config(num_nextn_predict_layers=1, vocab_size=4096).save_pretrained(tmp_path)
    configure(tmp_path, architectures=["Glm4MoeForCausalLM"], num_nextn_predict_layers=1)
    asked = "--speculative-config", '{"method": "mtp"}'
    alone, found = planned(tmp_path), planned(tmp_path, *asked)
    spec = read_spec(tmp_path)
    draft = read_draft("mtp", tmp_path, spec, None)
    assert draft.layers.layers == 1
    assert found.weight_bytes == alone.weight_bytes + draft.weight_bytes(4)
    states = spec.hidden * 4
    assert found.kv_bytes_per_token == alone.kv_bytes_per_token * (spec.layers + 1) // spec.layers + states
    ranks = planned(tmp_path, "--tensor-parallel-size", "2", *asked)
    assert ranks.weight_bytes > found.weight_bytes / 2 + draft.weight_bytes(4) / 2
    rounded = read_draft("mtp", tmp_path, read_spec(tmp_path, "fp8"), None)
    assert rounded.weight_bytes(4) < draft.weight_bytes(4) / 2


def test_of_stages_the_last_one_drafts(tmp_path: Path) -> None:
    """So it has fewer layers, and the blocks are those of the stage with the least room for them."""
    folder = folder_of(tmp_path, LLAMA_8B)
    head = write_head(tmp_path / "head", head_config(128256, hidden_size=4096, intermediate_size=14336,
                                                     num_attention_heads=32, num_key_value_heads=8), {})  # fmt: skip
    options = "--max-model-len", "4096", "--pipeline-parallel-size", "2"
    config = effective(parse(cli.parser_of("plan"), [str(folder), *options]), {}).config
    spec = read_spec(folder)
    draft = read_draft("eagle", head, spec, None)
    step = StepShape(8192, 256, 4096, 2)
    first, last = (stage_share(config, spec, draft, stage, step, GPUS["h200"]) for stage in range(2))
    without = stage_share(config, spec, None, 1, step, GPUS["h200"])
    layers = [len(layers) for layers in stage_layers(spec, 2, draft)]
    assert layers[0] > layers[1]
    keys = 2 * 16 * 8 * 128 * 2
    assert first.shape.block_bytes == keys * layers[0]
    assert last.shape.block_bytes == keys * (layers[1] + 1) + 16 * 4096 * 2, "its own keys, and the states it reads"
    shorter = len(stage_layers(spec, 2)[1]) - layers[1]
    layer = held_bytes(spec.part((0,)), 1, begins=False, ends=False)
    grown = last.weight_bytes - (without.weight_bytes - 2 * shorter * layer)
    assert grown == 2 * (draft.weight_bytes(1) + 128256 * 4096), "the head, and the embedding that it reads"


@pytest.mark.parametrize(("name", "size"), [("H200", GPUS["h200"]), ("80GB", 80 * 10**9), ("22.5GiB", int(22.5 * GIB))])
def test_a_gpu_by_name_and_by_size(name: str, size: int) -> None:
    assert gpu_bytes(name) == size


@pytest.mark.parametrize("name", ["", "h300", "80", "-1GB", "1e9GB"])
def test_a_gpu_that_nobody_knows(name: str) -> None:
    with pytest.raises(ConfigError, match="--gpu"):
        gpu_bytes(name)


def test_lengths_end_with_the_longest() -> None:
    assert lengths(4096) == [512, 1024, 2048, 4096]
    assert lengths(300) == [300]
    assert lengths(1500) == [512, 1024, 1500]


def test_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, LLAMA_8B)
    assert cli.main(["plan", str(folder), "--gpu", "h200", "--max-model-len", "8192"]) == 0
    out = capsys.readouterr().out
    assert "131,072 bytes per token" in out
    assert "weights                14.96 GiB, 8,030,261,248 parameters" in out
    assert cli.main(["plan", str(folder), "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_030_261_248
    assert cli.main(["plan", str(folder), "--gpu", "16GB"]) == 2


def test_without_a_gpu_all_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those on which the model fits, the smallest first; the embedded model goes by its name."""
    assert cli.main(["plan", "penstock-demo"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("penstock-demo in bfloat16: ")
    assert [name for name in GPUS if f"  {name} " in told] == list(GPUS)
    assert cli.main(["plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = [one["gpu_bytes"] for one in found]
    assert sizes == sorted(GPUS.values())
    assert cli.main(["plan", str(folder_of(tmp_path, LLAMA_8B | {"num_hidden_layers": 70}))]) == 0
    told = capsys.readouterr().out
    assert "too small: a10, a100-40gb, l4, l40s, rtx-4090\n" in told
    assert "\n  h100 " in told
    assert cli.main(["plan", str(folder_of(tmp_path, LLAMA_8B | {"num_hidden_layers": 600}))]) == 2
    assert "--gpu-memory-utilization" in capsys.readouterr().err


def test_a_narrow_terminal_breaks_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    wide = "  tokens of a request   at once\n" + f"  {12_231_936:,} tokens, {764_496:,} blocks of 16, {1 << 60:,} bytes"
    narrow = fitted(wide)
    assert max(map(len, narrow.splitlines())) <= 40
    assert narrow.split() == wide.split()
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert fitted(wide) == wide


def test_the_plan_needs_no_torch(tmp_path: Path) -> None:
    """So that it answers at once, and on a machine that will never serve."""
    code = "import sys; from services import cli; cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = ["plan", str(folder_of(tmp_path, LLAMA_8B)), "--gpu", "h200"]
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("size", [2, 4])
def test_gpus_share_weights_and_cache(tmp_path: Path, size: int) -> None:
    folder = folder_of(tmp_path, LLAMA_8B)
    one = planned(folder, "--max-model-len", "4096")
    found = planned(folder, "--max-model-len", "4096", "--tensor-parallel-size", str(size))
    assert found.gpus == size
    assert found.parameters == one.parameters
    assert found.weight_bytes == pytest.approx(one.weight_bytes / size, rel=0.001)  # norms are everybody's
    assert found.kv_bytes_per_token == one.kv_bytes_per_token // size
    assert found.blocks > size * one.blocks
    assert f"each of {size}" in text(found)


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_share_layers(tmp_path: Path, stages: int) -> None:
    """Those at the ends have embeddings beside their layers; blocks are as many as the smallest cache has."""
    folder = folder_of(tmp_path, LLAMA_8B)
    one = planned(folder, "--max-model-len", "4096")
    found = planned(folder, "--max-model-len", "4096", "--pipeline-parallel-size", str(stages))
    assert found.gpus == stages
    assert found.parameters == one.parameters
    assert 0.85 < stages * found.weight_bytes / one.weight_bytes < 1.15
    assert found.kv_bytes_per_token <= 1.2 * one.kv_bytes_per_token / stages
    assert found.blocks > 0.95 * stages * one.blocks
    both = planned(folder, "--max-model-len", "4096", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
    assert both.gpus == 4
    assert both.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=0.1)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size.*32 layers"):
        planned(folder_of(tmp_path, LLAMA_8B), "--pipeline-parallel-size", "33")


def test_a_size_that_heads_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size.*32 attention heads"):
        planned(folder_of(tmp_path, LLAMA_8B), "--tensor-parallel-size", "3")


def test_seventy_billion_parameters_need_a_second_gpu(tmp_path: Path) -> None:
    more = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    folder = folder_of(tmp_path, {**LLAMA_8B, **more})
    with pytest.raises(ConfigError, match="weights take"):
        planned(folder)
    assert planned(folder, "--tensor-parallel-size", "2").cache_tokens > 100_000


def test_an_encoder_has_no_cache_and_steps_of_whole_texts(tmp_path: Path) -> None:
    bert = {"architectures": ["BertModel"], "model_type": "bert", "dtype": "bfloat16"}
    found = planned(folder_of(tmp_path, bert), "--max-num-batched-tokens", "300", "--max-num-seqs", "4")
    assert (found.blocks, found.kv_bytes_per_token, found.max_model_len) == (0, 0, 512)
    assert [(row.tokens, row.requests, row.limit) for row in found.concurrency] == [(512, 1, "step")]
    assert 108_000_000 < found.parameters < 110_000_000
    assert "keys and values" in text(found)
    with pytest.raises(ConfigError, match="encoder"):
        planned(tmp_path, "--pipeline-parallel-size", "2")


def test_a_model_that_sees_images_has_an_encoder_and_its_cache(tmp_path: Path) -> None:
    """On the first stage; without images it is its text half."""
    folder = str(write_seeing_folder(tmp_path / "tiny"))
    found, alone = planned(Path(folder)), planned(Path(folder), "--limit-mm-per-prompt", "0")
    rows = planned(Path(folder), "--mm-encoder-cache-tokens", "1000")
    assert (found.encoder_rows, rows.encoder_rows, alone.encoder_rows) == (16384, 1000, 0)
    assert found.other_bytes - rows.other_bytes == (16384 - 1000) * 2 * 16 * 2
    spec = read_spec(Path(folder))
    assert spec.vision is not None
    assert found.weight_bytes - alone.weight_bytes == 2 * tower_weights(spec.vision)
    assert found.parameters - alone.parameters == tower_weights(spec.vision)
    assert "16,384 rows of embeddings" in text(found)
    assert "rows of embeddings" not in text(alone)


def test_the_tiers_below_the_device(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA_8B)
    words = ("--kv-host-memory", "1G", "--kv-disk", "/kv", "--kv-disk-size", "10G")
    found = planned(folder, *words)
    assert found.host_tokens == 8192
    assert 0.99 * 81920 < found.disk_tokens <= 81920
    assert "on disk" in text(found)
    assert (found.store_bytes, "shared store" in text(found)) == (0, False)
    shared = planned(folder, *words[:2], "--kv-store", "mooncake://kv:1")
    assert shared.store_bytes == (4 << 30) + (16 << 20)
    assert "shared store            4.02 GiB of host memory" in text(shared)
    with pytest.raises(ConfigError, match=r"--kv-disk-size: 4096 is not allowed; a KV block takes 2097152 bytes"):
        planned(folder, *words[:4], "--kv-disk-size", "4096")
