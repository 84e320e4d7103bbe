"""What a newcomer gives for a model, and the one line that the start ends with. No process is started for it."""

from __future__ import annotations

import errno
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from penstock import LLM
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.families import families
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.weight_files import INDEX, SINGLE
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.parts import parts_of
from penstock.services.executor.device import Gpu
from penstock.services.supervisor import preflight
from penstock.services.supervisor.options import sized
from tests.engine_core.models.specs import tensor_shapes
from tests.model_folder import linked, replaced

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SHAPES = tensor_shapes(read_spec(demo_folder()))
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "I8": 1}
SERVED = ", ".join(family.architecture for family in families().values())
READS = "Penstock reads safetensors, so take the model that"
LAYOUT = "a model is a folder with config.json, *.safetensors and tokenizer.json, as the Hugging Face hub has them"
PICKLED = "is pickled, which runs code when it is read: Penstock reads safetensors only, so convert it"
READ = (
    "Penstock reads fp8, compressed-tensors, awq, gptq, mxfp4, modelopt, so take the model in one of these, or "
    "unquantized"
)


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file with these tensors, whose bytes take no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    replaced(path, struct.pack("<Q", len(text)) + text)
    with path.open("ab") as file:
        file.truncate(8 + len(text) + end)


def weights(folder: Path, dtype: str = "BF16", **changes: tuple[int, ...] | None) -> None:
    """The embedded model's tensors, with some of other shapes, more of them, or without some."""
    found = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    write_weights(linked(folder) / SINGLE, found, dtype)


def shards(folder: Path, count: int = 2, *, index: bool = True) -> None:
    linked(folder, without=(SINGLE,))
    places = {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        own = dict(list(SHAPES.items())[shard::count])
        write_weights(folder / name, own)
        places |= dict.fromkeys(own, name)
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: linked(folder, **changes)


def quantized(method: str) -> Callable[[Path], object]:
    return config(quantization_config={"quant_method": method})


def file(name: str, content: str | bytes = "", without: tuple[str, ...] = ()) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        linked(folder, without=without)
        (folder / name).parent.mkdir(exist_ok=True)
        replaced(folder / name, content)

    return build


def alone(*names: str) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    return build


def cut_off(folder: Path) -> None:
    shards(folder)
    path = folder / "model-00002-of-00002.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def changed(folder: Path, change: Callable[[Path], object]) -> None:
    shards(folder)
    change(folder)


def twice(folder: Path) -> None:
    shards(folder)
    first = dict(list(SHAPES.items())[0::2])
    write_weights(folder / "model-00001-of-00002.safetensors", {**first, NORM: SHAPES[NORM]})


def level(name: str) -> Callable[[Path], object]:
    return lambda folder: linked(folder / name)


def template(folder: Path) -> None:
    linked(folder)
    replaced(folder / "chat_template.jinja", "line one\n{% for %}")


# Name, what is made of the folder {}, and the error that the start ends with.
FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", lambda folder: folder.mkdir(), f"{{}}/config.json: no such file; {LAYOUT}"),
    ("a safetensors file", lambda folder: folder.write_bytes(b""),
     "{}: a model is a folder with config.json, not a file"),
    ("weights without config", file("x", without=("config.json",)), f"{{}}/config.json: no such file; {LAYOUT}"),
    ("config empty", file("config.json"), "{}/config.json: it is empty; download it again, or mend it"),
    ("config not JSON", file("config.json", "{'a': 1}"),
     "{}/config.json: a JSON object is expected: JSON is malformed: object keys must be strings (byte 1); download it "
     "again, or mend it"),
    ("config a list", file("config.json", "[]"),
     "{}/config.json: a JSON object is expected: Expected `object`, got `array`; download it again, or mend it"),
    ("config of wrong types", config(hidden_size="large"),
     "{}/config.json: hidden_size is 'large'; it must be an integer of 1 to 2147483647"),
    ("config without layers", config(num_hidden_layers=None),
     "{}/config.json: num_hidden_layers is None; it must be an integer of 1 to 4096"),
    ("config a Git LFS pointer", file("config.json", POINTER),
     "{}/config.json: a Git LFS pointer stands in place of the file; run `git lfs pull` in {}"),
    ("no architecture", config(architectures=None, model_type=None),
     f"{{}}/config.json: architectures is None; Penstock serves {SERVED}"),
    ("unknown architecture", config(architectures=["GPTNeoXForCausalLM"]),
     f"{{}}/config.json: architectures is ['GPTNeoXForCausalLM']; Penstock serves {SERVED}"),
    ("vision model", config(architectures=["Qwen2VLForConditionalGeneration"], vision_config={"depth": 1}),
     "{}/config.json: architectures is ['Qwen2VLForConditionalGeneration']; this is a vision model, and "
     f"Penstock serves {SERVED}"),
    ("audio model", config(architectures=["WhisperForConditionalGeneration"], is_encoder_decoder=True),
     "{}/config.json: architectures is ['WhisperForConditionalGeneration']; this is an audio model, and "
     f"Penstock serves {SERVED}"),
    ("encoder", config(architectures=["MPNetModel"]),
     f"{{}}/config.json: architectures is ['MPNetModel']; this is an encoder of another kind, and Penstock serves "
     f"{SERVED}"),
    ("encoder and decoder", config(architectures=["T5ForConditionalGeneration"]),
     "{}/config.json: architectures is ['T5ForConditionalGeneration']; this is an encoder-decoder model, and "
     f"Penstock serves {SERVED}"),
    ("classifier", config(architectures=["GPT2ForSequenceClassification"]),
     "{}/config.json: architectures is ['GPT2ForSequenceClassification']; this is a classifier of another kind, and "
     f"Penstock serves {SERVED}"),
    ("classifier of tokens", config(architectures=["Qwen3ForTokenClassification"]),
     "{}/config.json: architectures is ['Qwen3ForTokenClassification']; this is a model with another head, and "
     f"Penstock serves {SERVED}"),
    ("code of its own", config(auto_map={"AutoModel": "modeling.Model"}),
     "{}/config.json: auto_map is {'AutoModel': 'modeling.Model'}; the model needs code of its own, which Penstock "
     "never runs"),
    *((f"quantized, {method}", quantized(method),
       f"{{}}/config.json: quantization_config says that the weights are quantized by {method}; {READ}")
      for method in ("bitsandbytes", "hqq")),
    ("quantized, MLX", config(quantization={"bits": 4, "group_size": 64}),
     f"{{}}/config.json: quantization says that the weights are MLX's; {READ}"),
    ("quantized, ModelOpt", file("hf_quant_config.json", "{}"),
     "{}/hf_quant_config.json: quantization is None; it must be an object"),
    ("heads that do not divide",
     config(architectures=["LlamaForCausalLM"], num_attention_heads=7, num_key_value_heads=7, head_dim=None),
     f"{{}}/config.json: num_attention_heads is 7; without head_dim it must divide hidden_size ({SHAPES[NORM][0]})"),
    ("no weights", file("x", without=(SINGLE,)), f"{{}}/{SINGLE}: no such file; {LAYOUT}"),
    ("pickled weights", file("pytorch_model.bin", without=(SINGLE,)),
     f"{{}}/{SINGLE}: no such file; pytorch_model.bin {PICKLED}"),
    ("Meta's own layout", alone("params.json", "consolidated.00.pth"),
     f"{{}}/config.json: no such file; consolidated.00.pth {PICKLED}"),
    ("GGUF folder", alone("model-q4_k_m.gguf"),
     f"{{}}/config.json: no such file; model-q4_k_m.gguf is of llama.cpp: {READS} the GGUF was made from"),
    ("LoRA folder", alone("adapter_config.json", "adapter_model.safetensors"),
     "{}/config.json: no such file; adapter_config.json is a LoRA adapter: serve its base model with "
     "--enable-lora --lora-modules NAME=FOLDER"),
    ("LoRA beside the model", file("adapter_config.json", "{}"),
     "{}/adapter_config.json: a LoRA adapter lies beside the model, which nothing applies; serve it from a folder of "
     "its own with --lora-modules, or remove this file to serve the model without it"),
    ("ONNX folder", file("onnx/model.onnx", without=(SINGLE,)),
     f"{{}}/{SINGLE}: no such file; model.onnx is of ONNX: {READS} it was exported from"),
    ("diffusers folder", alone("model_index.json", "unet/config.json"),
     "{}/config.json: no such file; model_index.json is a diffusers pipeline, which makes images: Penstock serves "
     "language models"),
    ("older MLX folder", file("weights.npz", without=(SINGLE,)),
     f"{{}}/{SINGLE}: no such file; weights.npz is of MLX: {READS} it was converted from"),
    ("download that was interrupted", file(".cache/model.safetensors.1f.incomplete", without=(SINGLE,)),
     f"{{}}/{SINGLE}: no such file; model.safetensors.1f.incomplete is what an interrupted download left: download "
     "the model again"),
    ("weights a Git LFS pointer", file(SINGLE, POINTER),
     f"{{}}/{SINGLE}: a Git LFS pointer stands in place of the file; run `git lfs pull` in {{}}"),
    ("weights of no length", file(SINGLE),
     f"{{}}/{SINGLE}: truncated or not a safetensors file (it is empty); download it again"),
    ("weights of another kind", file(SINGLE, b"PK\x03\x04" * 9),
     f"{{}}/{SINGLE}: truncated or not a safetensors file (its header would be of 289157608118635344 bytes); download "
     "it again"),
    ("a header that is no JSON", file(SINGLE, struct.pack("<Q", 4) + b"{]  "),
     f"{{}}/{SINGLE}: truncated or not a safetensors file (JSON is malformed: object keys must be strings (byte 1)); "
     "download it again"),
    ("a shard that is cut off", cut_off,
     "{}/model-00002-of-00002.safetensors: truncated or damaged: its header tells of {size} bytes, and it has {less}; "
     "download it again"),
    ("a shard that is missing",
     lambda folder: changed(folder, lambda at: (at / "model-00002-of-00002.safetensors").unlink()),
     f"{{}}/model-00002-of-00002.safetensors: no such file, though {INDEX} names it; download it again"),
    ("shards without their index", lambda folder: shards(folder, index=False),
     f"{{}}/{INDEX}: no such file, and no {SINGLE}: without it shards are not a model; download it again"),
    ("an index that names nothing", lambda folder: changed(folder, lambda at: (at / INDEX).write_text("{}")),
     f"{{}}/{INDEX}: weight_map is None; an object of tensor names and files is expected; download it again"),
    ("a tensor in two shards", twice,
     f"{{}}/model-00002-of-00002.safetensors: tensor {NORM} stands in model-00001-of-00002.safetensors too; download "
     "it again"),
    ("a tensor that is missing", lambda folder: weights(folder, **{NORM: None}),
     f"{{}}/{SINGLE}: tensor {NORM} is missing; is config.json of the same model?"),
    ("a tensor too many", lambda folder: weights(folder, **{"model.layers.0.mlp.gate_proj.scales": (1,)}),
     f"{{}}/{SINGLE}: tensor model.layers.0.mlp.gate_proj.scales is not part of the model that config.json describes; "
     "are both of the same model?"),
    ("more layers than there are", config(num_hidden_layers=7, max_window_layers=7, layer_types=None),
     f"{{}}/{SINGLE}: tensor model.layers.6.input_layernorm.weight and 10 more are missing; is config.json of the same "
     "model?"),
    ("a vocabulary larger than the embedding", config(vocab_size=SHAPES[EMBEDDING][0] + 1),
     f"{{}}/{SINGLE}: tensor {EMBEDDING} has shape {list(SHAPES[EMBEDDING])}; config.json asks for "
     f"{[SHAPES[EMBEDDING][0] + 1, SHAPES[EMBEDDING][1]]}; are both of the same model?"),
    ("weights of 8 bits", lambda folder: weights(folder, "I8"),
     f"{{}}/{SINGLE}: tensor {EMBEDDING} is of type I8; Penstock reads F64, F32, F16, BF16, so take a version of the "
     "model in one of these"),
    ("no tokenizer", file("x", without=("tokenizer.json", "tokenizer_config.json")),
     "{}/tokenizer.json: no such file, and no other tokenizer; copy the tokenizer's files of the base model"),
    ("a tokenizer of SentencePiece alone",
     file("tokenizer.model", b"\x0a\x0e", without=("tokenizer.json", "tokenizer_config.json")),
     "{}/tokenizer.json: no such file, and the tokenizer is SentencePiece's; install the package sentencepiece, or "
     "take a folder that has it"),
    ("tokenizer a Git LFS pointer", file("tokenizer.json", POINTER),
     "{}/tokenizer.json: a Git LFS pointer stands in place of the file; run `git lfs pull` in {}"),
    ("tokenizer cut off", file("tokenizer.json", '{"model": {'),
     "{}/tokenizer.json: a JSON object is expected: Input data was truncated; download it again, or mend it"),
    ("tokenizer without a model", file("tokenizer.json", "{}"),
     "{}/tokenizer.json: not a tokenizer file (KeyError 'model'); download it again"),
    ("tokenizer of another model",
     file("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 99999}, "unk_token": "a"}}'),
     f"{{}}/tokenizer.json: it has tokens up to 99999, and config.json's vocab_size is {SHAPES[EMBEDDING][0]}; are "
     "both of the same model?"),
    ("tokenizer_config of wrong types", file("tokenizer_config.json", '{"eos_token": 7}'),
     "{}/tokenizer_config.json: eos_token must hold tokens as strings"),
    ("a template with a syntax error", template,
     "{}/chat_template.jinja: the chat template is wrong in its line 2: Expected an expression, got 'end of statement "
     "block'; mend it, or give another with --chat-template"),
    ("generation_config of wrong values", file("generation_config.json", '{"temperature": "hot"}'),
     "{}/generation_config.json: temperature is 'hot'; it must be a number of 0 to 100"),
    ("a level too high", level("qwen"),
     "{}/config.json: no such file; the model may be one level below: serve {}/qwen"),
    ("the hub's cache", level("snapshots/0123"),
     "{}/config.json: no such file; this is a repository in the hub's cache: serve {}/snapshots/0123 or its hub id"),
]  # fmt: skip


def started(model: str, **options: Any) -> Config:
    """All checks of `penstock serve MODEL`, on a CPU and a free port."""
    executor = ExecutorConfig(device="cpu")
    found = sized(Config(model=ModelConfig(model=model), executor=executor), 2)
    found = Config(**({name: getattr(found, name) for name in Config.__struct_fields__} | options))
    return preflight.checked(found, parts_of(found))


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_api", lambda options: None)


def test_the_whole_model_passes(tmp_path: Path) -> None:
    assert started(str(linked(tmp_path / "model"))).model.served_model_name == "model"
    shards(tmp_path / "shards")
    started(str(tmp_path / "shards"))


@pytest.mark.parametrize(("name", "build", "expected"), FOLDERS, ids=[name for name, _, _ in FOLDERS])
def test_a_folder_that_cannot_be_served(
    name: str, build: Callable[[Path], object], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    build(model)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # as where it is not installed
    if "{size}" in expected:
        size = (model / "model-00002-of-00002.safetensors").stat().st_size
        expected = expected.replace("{size}", str(size + 1)).replace("{less}", str(size))
    with pytest.raises(ModelError) as caught:
        started(str(model))
    assert str(caught.value) == expected.replace("{}", str(model)), name
    assert "\n" not in str(caught.value)


def test_there_are_as_many_as_a_newcomer_has() -> None:
    assert len(FOLDERS) >= 46


def test_a_hundred_shards_are_read_by_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 TiB in all, which no test could read."""
    monkeypatch.setattr(preflight, "available_memory", lambda: 1 << 60)
    rows, count = 1 << 30, 100
    model = linked(tmp_path / "model", without=(SINGLE,), vocab_size=rows, num_hidden_layers=10, layer_types=None)
    shapes = tensor_shapes(read_spec(model))
    places = {name: f"model-{place % count:05}.safetensors" for place, name in enumerate(shapes)}
    for number, shard in enumerate(sorted(set(places.values()))):
        own = {name: shape for name, shape in shapes.items() if places[name] == shard}
        write_weights(model / shard, own | {f"{number}.rotary_emb.inv_freq": (rows, SHAPES[NORM][0])})  # passed over
    (model / INDEX).write_text(json.dumps({"weight_map": places}))
    files = list(model.glob("*.safetensors"))
    assert (len(files), sum(file.stat().st_size for file in files) > 60 << 40) == (count, True)
    started(str(model))
    with files[7].open("r+b") as file:
        file.truncate(files[7].stat().st_size - 1)
    with pytest.raises(ModelError, match=f"{files[7].name}: truncated or damaged"):
        started(str(model))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linked(tmp_path / "model")
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == SINGLE:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError) as caught:
        started(str(model))
    why = "it cannot be read: Permission denied; the server's user needs the right to"
    assert str(caught.value) == f"{model / SINGLE}: {why}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("qwen/Qwen3-o.6B",
         "qwen/Qwen3-o.6B: no such folder, and not fetched from the hub: it is not in the cache, and the hub is not "
         "asked (HF_HUB_OFFLINE) or not reached; check id and network"),
        ("~nobody-here/model", "~nobody-here/model: no such folder, and not a hub id of the form owner/name"),
        ("{}/modle", "{}/modle: no such folder, and not a hub id of the form owner/name; do you mean {}/model?"),
        ("{}/model.gguf",
         "{}/model.gguf: a model is a folder with config.json, not a file; model.gguf is of llama.cpp, and Penstock "
         "reads safetensors"),
    ],
)  # fmt: skip
def test_a_name_of_nothing(given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError) as caught:
        started(given.replace("{}", str(tmp_path)))
    assert str(caught.value) == expected.replace("{}", str(tmp_path))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "gpus", "memory", "expected"),
    [
        (ExecutorConfig(device="cuda"), (), GIB,
         "--device: 'cuda' is not allowed; the driver shows no GPU; give --device cpu, or see whether nvidia-smi finds "
         "one"),
        (ExecutorConfig(), (), 1 << 20,
         "--dtype: 'auto' is not allowed; the weights take 0.0 GiB in float32, and this machine has 0.0 GiB of memory "
         "free; take a smaller type or a smaller model"),
        (ExecutorConfig(), (Gpu(1 << 20, 90, "H200"),), GIB,
         "--tensor-parallel-size: 1 is not allowed; the weights take 0.0 GiB on each GPU in bfloat16, and 0.9 of a "
         "GPU's memory is 0.0 GiB; spread them over more GPUs"),
        (ExecutorConfig(), (Gpu(GIB, 75, "Tesla T4"),), GIB,
         "--device: 'auto' is not allowed; GPU 0, Tesla T4, has compute capability 7.5, and the kernels need 8.0 "
         "(Ampere) or newer; give --device cpu, or hide it with CUDA_VISIBLE_DEVICES"),
        (ExecutorConfig(), (Gpu(GIB, 80, "A100"), Gpu(GIB, 75, "Tesla T4")), GIB, ""),  # the second serves nobody
        (ExecutorConfig(), (), GIB, ""),
    ],
)  # fmt: skip
def test_a_device_that_is_not_there_or_too_small(
    options: ExecutorConfig, gpus: tuple[Gpu, ...], memory: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "available_memory", lambda: memory)
    if not expected:
        started("", executor=options)
        return
    with pytest.raises(ConfigError) as caught:
        started("", executor=options)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("torch", "device", "platform", "expected"),
    [
        ("ROCm", "auto", "linux",
         "--device: 'auto' is not allowed; the installed torch is built for ROCm, which is not supported: Penstock "
         "serves NVIDIA GPUs and CPUs; give --device cpu, or install a torch built for CUDA"),
        ("XPU", "cuda", "linux",
         "--device: 'cuda' is not allowed; the installed torch is built for XPU, which is not supported: Penstock "
         "serves NVIDIA GPUs and CPUs; give --device cpu, or install a torch built for CUDA"),
        ("ROCm", "cpu", "linux", ""),
        ("", "auto", "linux", ""),
        ("", "cpu", "darwin",
         "--device: 'cpu' is not allowed; Penstock runs on Linux, and this is darwin; Metal and other systems' GPUs "
         "are not supported: run it in a Linux container with --device cpu"),
    ],
)  # fmt: skip
def test_an_accelerator_that_is_not_served(
    torch: str, device: str, platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server and `LLM` refuse it in the process that starts them, before any other starts."""
    monkeypatch.setattr(preflight, "foreign_accelerator", lambda: torch)
    monkeypatch.setattr(preflight, "sys", SimpleNamespace(platform=platform))
    options = ExecutorConfig(device=device)
    if not expected:
        started("", executor=options)
        return
    with pytest.raises(ConfigError) as caught:
        started("", executor=options)
    assert str(caught.value) == expected
    with pytest.raises(ConfigError) as caught:
        LLM("", device=device)
    assert str(caught.value) == expected
