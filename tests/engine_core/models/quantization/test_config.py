"""`quantization_config` as published checkpoints have it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.engine_core.models.quantization.config import read_quantization
from penstock.engine_core.models.quantization.rules import Quantization, markers
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.protocol.errors import ModelError

Q_PROJ, EXPERT = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts.7.down_proj"
GATE, ROUTER, HEAD = "model.layers.3.mlp.gate_proj", "model.layers.3.mlp.gate", "lm_head"
PATH = Path("/models/m/config.json")

BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
       "zero_point": True}  # fmt: skip
GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq", "desc_act": False, "sym": True}
OPTIMUM = {"batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
           "dataset": None, "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None,
           "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
           "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True}  # fmt: skip
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                              "model.embed_tokens", "lm_head"]}  # fmt: skip
KIMI = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]


def args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """As compressed-tensors serializes them, with all that is None."""
    silent = {"actorder": None, "block_structure": None, "group_size": None, "observer": "minmax",
              "observer_kwargs": {}, "dynamic": False, "symmetric": True}  # fmt: skip
    return {**silent, "num_bits": bits, "type": kind, "strategy": strategy, **more}


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {"config_groups": {"group_0": group}, "format": layout, "global_compression_ratio": 1.24,
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed", **more}  # fmt: skip


TOKEN8 = args(8, "float", "token", dynamic=True, observer="memoryless")
DYNAMIC = compressed("float-quantized", args(8, "float", "channel"), TOKEN8)
W4A16 = compressed("pack-quantized", args(4, "int", "group", group_size=128, actorder="weight"))
W8A8 = compressed("int-quantized", args(8, "int", "channel"), args(8, "int", "token", dynamic=True))


def read(values: dict[str, Any], names: tuple[str, ...] = (), **more: Any) -> Quantization:
    found = read_quantization(ConfigFile(PATH, {"quantization_config": {**values, **more}}), names)
    assert found is not None
    return found


def form(values: dict[str, Any], module: str = Q_PROJ, **more: Any) -> WeightFormat:
    found = read(values, **more).format_of(module)
    assert found is not None
    return found


FLOAT8_BLOCKS = WeightFormat(
    kind="float8",
    block=(128, 128),
    activations="block",
    scale="weight_scale_inv",
    input_scale="activation_scale",
)
GROUPS = WeightFormat(kind="grouped", bits=4, group=128)
FLOAT4 = WeightFormat(kind="float4", bits=4, group=16)
PUBLISHED: tuple[tuple[str, dict[str, Any], WeightFormat], ...] = (
    ("Qwen3-8B-FP8", BLOCKS, FLOAT8_BLOCKS),
    ("DeepSeek-V3.1", {**BLOCKS, "scale_fmt": "ue8m0"}, FLOAT8_BLOCKS),
    ("Meta-Llama-3-8B-Instruct-FP8",
     {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
     WeightFormat(kind="float8", per_tensor=True, activations="static")),
    ("Meta-Llama-3.1-8B-Instruct-FP8-dynamic", DYNAMIC, WeightFormat(kind="float8", activations="row")),
    ("Meta-Llama-3.1-8B-Instruct-FP8",
     compressed("float-quantized", args(8, "float", "tensor"), args(8, "float", "tensor")),
     WeightFormat(kind="float8", per_tensor=True, activations="static")),
    ("Qwen3-8B-FP8-BLOCK",
     compressed("float-quantized", args(8, "float", "block", block_structure=[128, 128]),
                args(8, "float", "group", group_size=128, dynamic=True)),
     WeightFormat(kind="float8", block=(128, 128), activations="block")),
    ("Qwen3-8B-quantized.w4a16", W4A16, msgspec.structs.replace(GROUPS, packing="packed")),
    ("Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
     compressed("pack-quantized", args(4, "int", "group", group_size=128, actorder="group")),
     msgspec.structs.replace(GROUPS, packing="packed", ordered=True)),
    ("Qwen3-8B-quantized.w8a16", compressed("pack-quantized", args(8, "int", "channel")),
     WeightFormat(kind="grouped", packing="packed")),
    ("Qwen3-8B-AWQ-asym",
     compressed("pack-quantized", args(4, "int", "group", group_size=32, symmetric=False)),
     WeightFormat(kind="grouped", packing="packed", bits=4, group=32, symmetric=False)),
    ("Meta-Llama-3.1-8B-Instruct-quantized.w8a8", W8A8, WeightFormat(kind="int8", activations="row")),
    ("Qwen2.5-7B-Instruct-AWQ", AWQ, msgspec.structs.replace(GROUPS, packing="awq", symmetric=False)),
    ("Qwen2.5-7B-Instruct-GPTQ-Int4", {**GPTQ, **OPTIMUM}, msgspec.structs.replace(GROUPS, packing="gptq")),
    ("Qwen2.5-7B-Instruct-GPTQ-Int8", {**GPTQ, **OPTIMUM, "bits": 8},
     WeightFormat(kind="grouped", packing="gptq", bits=8, group=128)),
    ("Llama-2-7B-Chat-GPTQ", {**GPTQ, "desc_act": True, "model_name_or_path": None, "model_file_base_name": "model"},
     msgspec.structs.replace(GROUPS, packing="gptq", ordered=True)),
    ("gptqmodel 2",
     {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False, "group_size": 64, "lm_head": False, "pack_dtype": "int32",
      "meta": {"damp_percent": 0.1, "mse": 0.0, "quantizer": ["gptqmodel:2.0.0"], "uri": "", "static_groups": False}},
     WeightFormat(kind="grouped", packing="gptq_v2", bits=4, group=64, symmetric=False)),
    ("Llama-3.1-8B-Instruct-FP8 of ModelOpt", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
     WeightFormat(kind="float8", per_tensor=True, activations="static")),
    ("Qwen3-8B-NVFP4 of ModelOpt",
     {"config_groups": {"group_0": {"input_activations": {"dynamic": False, "num_bits": 4, "type": "float",
                                                           "group_size": 16},
                                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                                    "targets": ["Linear"]}},
      "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.35.0"},
      "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "quant_method": "modelopt"},
     msgspec.structs.replace(FLOAT4, packing="nvfp4")),
    ("Qwen3-32B-NVFP4",
     compressed("nvfp4-pack-quantized", args(4, "float", "tensor_group", group_size=16),
                args(4, "float", "tensor_group", group_size=16, dynamic="local")),
     msgspec.structs.replace(FLOAT4, packing="packed")),
)  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), [case[1:] for case in PUBLISHED], ids=[case[0] for case in PUBLISHED])
def test_published_configurations(values: dict[str, Any], expected: WeightFormat) -> None:
    """Every projection has the format, the output embedding and the routers have none."""
    found = read(values)
    assert found.format_of(Q_PROJ) == found.format_of(GATE) == found.format_of(EXPERT) == expected
    assert found.format_of(HEAD) is None
    assert found.format_of("model.embed_tokens") is None
    assert found.format_of(ROUTER) is None


def test_a_config_without_the_key_is_not_quantized() -> None:
    assert read_quantization(ConfigFile(PATH, {})) is None
    assert read_quantization(ConfigFile(PATH, {"quantization_config": {}})) is None


def test_one_group_of_all_inputs_has_no_order() -> None:
    assert not form(GPTQ, group_size=-1, desc_act=True).ordered
    channel = compressed("pack-quantized", args(8, "int", "channel", actorder="group"))
    assert not form(channel).ordered


def test_gpt_oss_has_quantized_experts_alone() -> None:
    found = read(GPT_OSS)
    expected = WeightFormat(kind="float4", packing="blocks", bits=4, group=32)
    assert found.format_of("model.layers.0.mlp.experts.gate_up_proj") == expected
    assert [part.suffix for part in expected.stored(stacked=True)] == ["_blocks", "_scales"]
    assert [part.shape(5760, 2880, 32) for part in expected.stored(stacked=True)] == [
        (32, 5760, 90, 16),
        (32, 5760, 90),
    ]
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router", "lm_head"):
        assert found.format_of(name) is None


def test_kimi_quantizes_routed_experts_alone() -> None:
    for layout, weights in (
        ("pack-quantized", args(4, "int", "group", group_size=32)),
        ("mxfp4-pack-quantized", args(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype=None)),
    ):
        found = read(compressed(layout, weights), ignore=KIMI)
        assert found.format_of("language_model.model.layers.3.mlp.experts.7.up_proj") is not None
        for name in (Q_PROJ, "model.layers.0.mlp.up_proj", "model.layers.3.mlp.shared_experts.up_proj", HEAD, ROUTER):
            assert found.format_of(name) is None


def test_lists_name_modules_by_any_wrapper_of_the_model() -> None:
    listed = ["model.language_model.layers.3.self_attn", "model.visual", "language_model.model.layers.4.mlp", "lm_head"]
    found = read(BLOCKS, modules_to_not_convert=listed)
    for wrapper in ("model.", "model.language_model.", "language_model.model.", ""):
        assert found.format_of(f"{wrapper}layers.3.self_attn.q_proj") is None
        assert found.format_of(f"{wrapper}layers.4.mlp.up_proj") is None
        assert found.format_of(f"{wrapper}layers.33.self_attn.q_proj") is not None


def test_a_vision_towers_layers_are_not_the_models() -> None:
    found = read(DYNAMIC, ignore=["vision_tower.vision_model.encoder.layers.3.self_attn.q_proj", "lm_head"])
    assert found.format_of(Q_PROJ) is not None


def test_gptq_overrides_modules_by_patterns() -> None:
    patterns: dict[str, dict[str, Any]] = {
        r"-:.*\.2\..*": {},
        r"+:.*\.3\..*down.*": {"bits": 8, "group_size": 32},
        r".*\.4\..*": {"desc_act": True},
    }
    found = read(GPTQ, dynamic=patterns)
    base = msgspec.structs.replace(GROUPS, packing="gptq")
    assert found.format_of("model.layers.2.mlp.down_proj") is None
    assert found.format_of("model.layers.3.mlp.down_proj") == msgspec.structs.replace(base, bits=8, group=32)
    assert found.format_of("model.layers.3.mlp.up_proj") == base
    assert found.format_of("model.layers.4.mlp.up_proj") == msgspec.structs.replace(base, ordered=True)
    assert found.format_of("model.layers.5.mlp.up_proj") == base


def test_a_group_of_named_modules_goes_before_one_of_a_class() -> None:
    values = compressed("mixed-precision", args(8, "float", "channel"), TOKEN8)
    values["config_groups"]["group_0"]["format"] = "float-quantized"
    experts = {"targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"], "format": "nvfp4-pack-quantized",
               "weights": args(4, "float", "tensor_group", group_size=16)}  # fmt: skip
    found = read(values, config_groups={**values["config_groups"], "group_1": experts})
    assert found.format_of(EXPERT) == msgspec.structs.replace(FLOAT4, packing="packed")
    assert found.format_of(Q_PROJ) == WeightFormat(kind="float8", activations="row")
    assert found.label == "compressed-tensors (FP4 in groups of 16, FP8)"


def test_modelopt_mixes_algorithms_by_module() -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts*": {"quant_algo": "NVFP4", "group_size": 16},
    }
    found = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert found.format_of("model.layers.0.self_attn.q_proj") == WeightFormat(
        kind="float8", per_tensor=True, activations="static"
    )
    assert found.format_of("model.layers.0.mlp.experts.3.up_proj") == msgspec.structs.replace(FLOAT4, packing="nvfp4")
    assert found.format_of("model.layers.0.self_attn.k_proj") is None
    assert found.notes == ("NVFP4 weights are multiplied with activations of 16 bits, which loses less than with 4",)


def test_modelopts_own_file_is_read_where_config_json_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
           "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate"]}  # fmt: skip
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    found = read_quantization(read_json(tmp_path / "config.json"))
    assert found is not None
    assert found.format_of(Q_PROJ) == msgspec.structs.replace(FLOAT4, packing="nvfp4")
    assert found.format_of("model.layers.0.self_attn.q_proj") is None
    assert found.format_of(GATE) == found.format_of(Q_PROJ)
    assert found.kv_scheme is not None
    assert found.kv_scheme.keys == "self_attn.k_proj.k_scale"


@pytest.mark.parametrize(
    ("strategy", "per_head"), [("tensor", False), ("attn_head", True)], ids=["of a layer", "of a head"]
)
def test_scales_of_a_kv_cache(strategy: str, per_head: bool) -> None:
    found = read(DYNAMIC, kv_cache_scheme=args(8, "float", strategy))
    assert found.kv_scheme is not None
    assert (found.kv_scheme.per_head, found.kv_scheme.keys) == (per_head, "self_attn.k_scale")
    assert read(DYNAMIC).kv_scheme is None


def test_weights_may_be_dense_beside_a_quantized_cache() -> None:
    found = read({"quant_method": "compressed-tensors", "config_groups": {}, "format": "naive-quantized",
                  "kv_cache_scheme": args(8, "float", "tensor")})  # fmt: skip
    for one in (found, found.settled(markers([f"{Q_PROJ}.weight_scale"]))):  # which loading will refuse
        assert one.format_of(Q_PROJ) is None
        assert one.formats == ()


# --------------------------------------------------------------------------- what the files say


def test_the_files_say_whether_the_output_embedding_is_quantized() -> None:
    dense = ("lm_head.weight", "model.layers.3.mlp.gate.weight")
    values = {**DYNAMIC, "ignore": []}
    assert read(values, dense).format_of(HEAD) is None
    quantized = read(values, (*dense, "lm_head.weight_scale", "model.layers.3.mlp.gate.weight_scale"))
    assert quantized.format_of(HEAD) == quantized.format_of(ROUTER) == quantized.format_of(Q_PROJ)
    assert read(AWQ, ("lm_head.qweight",)).format_of(HEAD) == form(AWQ)
    assert read({**W4A16, "ignore": []}, ("lm_head.weight_packed",)).format_of(HEAD) == form(W4A16)


@pytest.mark.parametrize(("values", "tensor"), [
    (W4A16, "lm_head.weight_packed"), (DYNAMIC, "language_model.lm_head.weight_scale"),
    ({**AWQ, "modules_to_not_convert": ["lm_head"]}, "lm_head.qweight"),
    ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "lm_head.qweight"),
    ({**BLOCKS, "modules_to_not_convert": ["lm_head"]}, "lm_head.weight_scale_inv"),
])  # fmt: skip
def test_an_output_embedding_that_a_list_denies_is_refused(values: dict[str, Any], tensor: str) -> None:
    told = f"{PATH}: quantization_config says that lm_head is not quantized, and the files have {tensor}; are both of"
    with pytest.raises(ModelError, match=f"^{re.escape(told)} the same model\\?$"):
        read(values, (tensor,))


def test_an_output_embedding_that_is_named_is_quantized() -> None:
    values = in_group("weights")
    values["config_groups"]["group_0"]["targets"] = ["Linear", "re:.*lm_head$"]
    found = read(values, ignore=[])
    assert found.format_of("language_model.lm_head") == found.format_of(Q_PROJ)
    assert read(GPTQ, lm_head=True).format_of(HEAD) == form(GPTQ)


def test_the_files_say_which_matrices_are_packed() -> None:
    """AutoAWQ's list has parts of names; `gate` is in `gate_proj`, too."""
    names = ("model.layers.3.mlp.gate_proj.weight", "model.layers.3.self_attn.q_proj.qweight")
    found = read(AWQ, names)
    assert found.format_of(GATE) is None
    assert found.format_of(Q_PROJ) is not None
    missing = read(DYNAMIC, ("model.layers.3.mlp.gate_proj.weight",))
    assert missing.format_of(GATE) is not None  # its scale is missing, which loading will say


def test_names_of_scales_are_the_files() -> None:
    static = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}
    named = form(static, names=(f"{Q_PROJ}.weight_scale_inv", f"{Q_PROJ}.activation_scale"))
    assert [part.suffix for part in named.stored()] == [".weight", ".weight_scale_inv", ".activation_scale"]
    assert [part.suffix for part in form(static).stored()] == [".weight", ".weight_scale", ".input_scale"]
    assert form(BLOCKS, names=(f"{Q_PROJ}.weight_scale",)).scale == "weight_scale"


# --------------------------------------------------------------------------- refusals


def method(name: str) -> str:
    return (
        f"quantization_config says that the weights are quantized by {name}; Penstock reads fp8, compressed-tensors, "
        "awq, gptq, mxfp4, modelopt, so take the model in one of these, or unquantized"
    )


def in_group(section: str, **more: Any) -> dict[str, Any]:
    """FP8 with other settings of a section, W4A16 with other settings of its weights."""
    found = json.loads(json.dumps(W4A16 if section == "packed" else DYNAMIC))
    group = found["config_groups"]["group_0"]
    group["weights" if section == "packed" else section].update(more)
    return dict(found)


Q = "quantization_config."
G = f"{Q}config_groups.group_0."
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"quant_method": name}, method(name)) for name in (
        "bitsandbytes", "gguf", "hqq", "aqlm", "torchao", "quanto", "eetq", "fbgemm_fp8", "bitnet", "auto-round")),
    ({"load_in_4bit": True}, method("?")),
    ({**BLOCKS, "fmt": "e5m2"}, f"{Q}fmt is 'e5m2'; Penstock serves e4m3"),
    ({**BLOCKS, "activation_scheme": "static"},
     f"{Q}activation_scheme is 'static'; Penstock serves dynamic with weight_block_size"),
    ({**BLOCKS, "weight_block_size": [128]},
     f"{Q}weight_block_size is [128]; two numbers, of outputs and inputs, are expected"),
    ({**BLOCKS, "expert_dtype": "fp4"},
     f"{Q}expert_dtype is 'fp4'; Penstock does not know what it changes, and does not pass it over"),
    ({**BLOCKS, "ignored_layers": "lm_head"}, f"{Q}ignored_layers is 'lm_head'; a list of module names is expected"),
    ({**AWQ, "bits": 8}, f"{Q}bits is 8; Penstock serves AWQ of 4 bits"),
    ({**AWQ, "version": "gemv"}, f"{Q}version is 'gemv'; Penstock reads the layout of version gemm"),
    ({**AWQ, "zero_point": False}, f"{Q}zero_point is False; Penstock serves AWQ with zero points"),
    ({**AWQ, "group_size": 100}, f"{Q}group_size is 100; it must be -1 or a multiple of 8"),
    ({**GPTQ, "bits": 3}, f"{Q}bits is 3; Penstock serves GPTQ of 4 and 8 bits"),
    ({**GPTQ, "checkpoint_format": "marlin"},
     f"{Q}checkpoint_format is 'marlin'; Penstock reads gptq and gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, f"{Q}is_marlin_format is True; Penstock reads gptq and gptq_v2"),
    ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 2}}},
     f"{Q}dynamic.+:.*down.*.bits is 2; Penstock serves GPTQ of 4 and 8 bits"),
    ({**GPTQ, "dynamic": {"+:.*down.*": {"rank": 2}}},
     f"{Q}dynamic.+:.*down.*.rank is 2; Penstock does not know what it changes, and does not pass it over"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
     f"{Q}quant_algo is 'W4A8_AWQ'; Penstock serves FP8, FP8_PER_CHANNEL_PER_TOKEN and NVFP4 in groups of 16"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
     f"{Q}kv_cache_quant_algo is 'NVFP4'; Penstock serves FP8"),
    ({**DYNAMIC, "format": "marlin-24"},
     f"{Q}format is 'marlin-24'; Penstock reads float-quantized, int-quantized, naive-quantized, pack-quantized, "
     "nvfp4-pack-quantized, mxfp4-pack-quantized"),
    ({**DYNAMIC, "sparsity_config": {"format": "sparse-24-bitmask", "targets": []}},
     f"{Q}sparsity_config.format is 'sparse-24-bitmask'; Penstock serves dense weights, no sparse ones"),
    ({**DYNAMIC, "transform_config": {"config_groups": {"R1": 1}}},
     f"{Q}transform_config is {{'config_groups': {{'R1': 1}}}}; Penstock serves weights without it"),
    ({**DYNAMIC, "config_groups": {}}, f"{Q}config_groups is {{}}; an object of groups is expected"),
    ({**DYNAMIC, "kv_cache_scheme": args(8, "int", "tensor")},
     f"{Q}kv_cache_scheme.type is 'int'; Penstock serves float"),
    ({**W4A16, "config_groups": {"group_0": {"weights": args(4, "int", "group", group_size=128)}}},
     f"{G}targets is None; names or classes of modules are expected"),
    ({**W4A16, "config_groups": {"group_0": {"targets": ["Linear"], "weights": []}}},
     f"{G}weights is []; an object is expected"),
    (in_group("weights", num_bits=6), f"{G}weights.num_bits is 6; Penstock serves 8 in this format"),
    (in_group("weights", strategy="group", group_size=128),
     f"{G}weights.strategy is 'group'; Penstock serves tensor, channel, block"),
    (in_group("weights", symmetric=False),
     f"{G}weights.symmetric is False; Penstock serves weights of 8 bits without zero points"),
    (in_group("input_activations", symmetric=False),
     f"{G}input_activations.symmetric is False; Penstock serves activations without zero points"),
    (in_group("input_activations", num_bits=4),
     f"{G}input_activations.num_bits is 4; Penstock serves activations of 8 bits, float as the weights"),
    (in_group("input_activations", strategy="group", group_size=64),
     f"{G}input_activations.strategy is 'group'; Penstock serves token (dynamic), tensor (static), and groups with "
     "blocks"),
    (in_group("packed", num_bits=3), f"{G}weights.num_bits is 3; Penstock serves packed integers of 4 and 8 bits"),
    (in_group("packed", actorder="column"), f"{G}weights.actorder is 'column'; an order is unknown"),
    (in_group("packed", group_size=-1), f"{G}weights.group_size is -1; strategy is 'group'"),
    (in_group("packed", type="float", group_size=64),
     f"{G}weights.group_size is 64; Penstock serves NVFP4 in groups of 16 and MXFP4 of 32"),
)  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[sentence[:60] for _, sentence in REFUSED])
def test_what_is_not_served_is_refused_by_key(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^{re.escape(f'{PATH}: {sentence}')}$"):
        read(values)


def test_mlx_is_refused() -> None:
    with pytest.raises(ModelError, match="quantization says that the weights are MLX's; Penstock reads fp8"):
        read_quantization(ConfigFile(PATH, {"quantization": {"bits": 4, "group_size": 64}}))


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ModelError, match=r"quantization_config names modules by a wrong pattern, '\(\?:\*gate\)': "):
        read({**DYNAMIC, "ignore": ["re:*gate"]})


def test_it_travels_as_json() -> None:
    """A specification is a record of plain values."""
    found = read(W4A16)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Quantization) == found


VISION, TEXT_HALF = "model.visual.blocks.0.attn.qkv", "model.language_model.layers.3.self_attn.q_proj"
EVERY_BLOCK = [f"model.visual.blocks.{layer}.{part}" for layer in range(27) for part in ("attn.qkv", "attn.proj")]


@pytest.mark.parametrize(
    "values",
    [
        {**BLOCKS, "modules_to_not_convert": ["lm_head", "model.visual.merger.linear_fc1", *EVERY_BLOCK]},
        {**AWQ, "modules_to_not_convert": ["visual"]},
        {**W4A16, "ignore": ["lm_head", "re:visual.*", "re:model.visual.*"]},
        {**DYNAMIC, "ignore": ["visual.blocks.0.attn.qkv", "visual.merger.mlp.0", "lm_head"]},
        GPTQ,
    ],
)
def test_vision_encoders_are_not_meant_where_no_file_says_so(values: dict[str, Any]) -> None:
    """As checkpoints of text and images are published: by lists, or by the tensors alone."""
    stored = (f"{VISION}.weight", f"{TEXT_HALF}.qweight", f"{TEXT_HALF}.weight_packed", f"{TEXT_HALF}.weight_scale")
    for names in ((), stored):
        found = read(values, names)
        assert [found.format_of(f"{before}visual.blocks.0.attn.qkv") for before in ("", "model.")] == [None, None]
        assert found.format_of(TEXT_HALF) is not None


def test_vision_encoders_are_quantized_where_the_files_say_so() -> None:
    assert read(BLOCKS, (f"{VISION}.weight", f"{VISION}.weight_scale_inv")).format_of(VISION) is not None
    assert read(GPTQ, (f"{VISION}.qweight", f"{VISION}.qzeros")).format_of(VISION) is not None
