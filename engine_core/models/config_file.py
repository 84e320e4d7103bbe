"""JSON files of a model folder, read value by value with complaints that name the file and the key."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.protocol.errors import ModelError

# Words of settings that change arithmetic.
ARITHMETIC = re.compile(
    r"soft_?cap|multipl|scal(e|ing)|clip|clamp|(^|_)norm|norm(_|\Z)|layer_?norm|sink|sandwich|residual|gate|gating"
    r"|alibi|rotary|rope|interleave|bias|lora_rank|mamba|ssm|conv|recurren|linear_(key|value|num|head|attn)|lru"
    r"|query_pre_attn|(^|_)qk?v?_|attn_(temp|scale|window)|attention_(chunk|window|sink|temp|scale|head_dim|gate)"
    r"|window|sparse|shared|per_layer|altup|laurel|swiglu|glu_|activation|hidden_act|parallel_(attn|residual)"
    r"|_attn_layers|n_group|topk_group|topk_method|scoring_func|dense_(replace|layers|intermediate)|swa_|index_(topk|n)"
    r"|expert|moe_|(^|_)v_head_dim|attn_layer|full_attn|global_attn|local_(attention|layer)|block_types?\Z|attention_(k_eq|type)"
    r"|double_wide|prefix_lm|(alpha|beta)_factor|indexer|ngram|hyper_connection|hc_mult|mup|new_decoder|bidirectional|multi_query|kv_channels|num_kv_heads|position_embedding_type"
)
# Words of settings that only training, quantization tools, or another task reads.
HARMLESS = re.compile(
    r"dropout|pdrop|initializ|init_|loss|jitter|aux|output_(router|hidden_states|attentions|scores)|^_|classifier|unsloth|quant|label|pretraining|token|cache"
    r"|checkpoint|implementation|problem_type|summary|max_norm|version|sbert|kernels?\Z"
)
ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_READ = frozenset(
    (
        *("rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "rope_theta"),
        *("partial_rotary_factor", "finetuned", "llama_4_scaling_beta", "max_position_embeddings"),
    )
)
FACTORS = frozenset(("short_factor", "long_factor"))  # of longrope
ALPHA = frozenset(("alpha",))  # of Hunyuan's dynamic positions
NOTHING: tuple[object, ...] = (None, 0, 1, "", "silu", "swish", "rope", "rotary", "rmsnorm")
POINTER = b"version https://git-lfs.github.com/spec/"  # begins the file that stands for another one in a git clone


Value = TypeVar("Value")


class ConfigFile(msgspec.Struct, frozen=True):
    """A JSON object and where it stands; complaints name the file and the key. `defaults` answer for silent keys, and
    `asked` has the keys that somebody read."""

    path: Path
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = {}
    asked: set[str] = msgspec.field(default_factory=set)

    def get(self, key: str) -> Any:
        """The value, or the family's default, or None."""
        self.asked.add(key)
        return self.values.get(key, self.defaults.get(key))

    def error(self, key: str, complaint: str) -> ModelError:
        return ModelError(f"{self.path}: {key} is {self.get(key)!r}; {complaint}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"it must be an integer of {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = math.inf) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(key, f"it must be a number of {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, "it must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or nothing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise self.error(key, "it must be a token id or a list of token ids")
        return tuple(ids)


def read_json(path: Path) -> ConfigFile:
    """A JSON object as a ConfigFile. Raises ModelError that names the file when it is missing or not an object."""
    return ConfigFile(path, decode_json(path, dict[str, Any]))


def decode_json(path: Path, kind: type[Value]) -> Value:
    """The content of a JSON file as msgspec reads it into a type. Raises ModelError that names the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if content.startswith(POINTER):
            raise pointer_error(path) from None
        wrong = f"a JSON object is expected: {error}" if content.strip() else "it is empty"
        raise ModelError(f"{path}: {wrong}; download it again, or mend it") from None


def unreadable(path: Path, error: OSError) -> ModelError:
    """A file that the system does not let be read, as an error for the operator."""
    return ModelError(f"{path}: it cannot be read: {error.strerror or error}; the server's user needs the right to")


def pointer_error(path: Path) -> ModelError:
    """What a git clone without LFS leaves in place of a file."""
    return ModelError(f"{path}: a Git LFS pointer stands in place of the file; run `git lfs pull` in {path.parent}")


def refuse_unread(file: ConfigFile, ignored: Collection[str] = (), same: Collection[str] = ()) -> None:
    """Raise ModelError naming a key that changes arithmetic and that nobody read, with a value that asks for something.

    ignored: keys without effect in the family. same: keys whose true says what it does anyway.
    """
    for key, value in file.values.items():
        if key in file.asked or key in ignored or key in ROPE_KEYS or (value is True and key in same):
            continue
        if ARITHMETIC.search(key) and not HARMLESS.search(key) and not asks_for_nothing(file, key, value):
            raise file.error(key, "Penstock does not know what it changes in this family, and does not pass it over")
    for key in ROPE_KEYS:
        refuse_unread_rope(file, key, file.values.get(key))


def refuse_unread_rope(file: ConfigFile, key: str, values: Any) -> None:
    """The same of rotary settings, those of each kind of layer among them."""
    if not isinstance(values, Mapping):
        return
    kinds = values.get("rope_type"), values.get("type")
    named = set(filter(None, map(str, kinds)))
    read = ROPE_READ | (FACTORS if named & {"longrope", "su", "yarn"} else ALPHA if "dynamic" in named else frozenset())
    for name, value in values.items():
        if isinstance(value, Mapping):
            refuse_unread_rope(file, key, value)
        elif name not in read and not asks_for_nothing(file, name, value):
            raise file.error(key, f"Penstock does not know {name}, and does not pass it over")


def asks_for_nothing(file: ConfigFile, key: str, value: Any) -> bool:
    """Whether a setting has the value that leaves the arithmetic as it is: empty, one, or what another key says."""
    if isinstance(value, list | dict):
        return not value
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value in (0.0, 1.0) or ("eps" in key and value == file.get("rms_norm_eps"))
    return value in NOTHING or (key == "num_kv_heads" and value == file.get("num_key_value_heads"))
