"""--speculative-config: how the server drafts, as one JSON object."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from penstock.protocol.errors import ConfigError

FLAG = "--speculative-config"
METHODS = ("none", "ngram", "draft_model", "eagle", "mtp")
WITH_MODEL = ("draft_model", "eagle", "mtp")  # the executors draft, by a model of their own
HEADS = ("eagle", "mtp")  # which reads the model's hidden states
IN_FOLDERS = ("draft_model", "eagle")  # of its own
# Whole numbers: the least and the most that each may be.
BOUNDS: Mapping[str, tuple[int, int]] = {
    "num_speculative_tokens": (1, 64),
    "prompt_lookup_max": (1, 64),
    "prompt_lookup_min": (1, 64),
}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The object's keys. Jump-forward and a request's own prediction give drafts whatever the method is.

    Names as in vLLM's `--speculative-config`.
    """

    method: str = "none"  # or "ngram": prompt lookup; "draft_model": a smaller model with the same tokenizer;
    # "eagle": a head that reads the model's hidden states; "mtp": the one that the model's own checkpoint has
    num_speculative_tokens: int = 4  # most drafts of a row that nothing forces
    model: str = (
        ""  # of the two before: a folder in Hugging Face layout or a hub id; penstock-demo-draft, penstock-demo-eagle
    )
    prompt_lookup_max: int = 4  # of "ngram": longest run of tokens that is looked up
    prompt_lookup_min: int = 2  # shortest
    adaptive: bool = True  # rows get as many drafts as pay by measured step times; false: as many as there may be
    synthetic_acceptance: float | None = None  # for benchmarks, makes output wrong: the chance that a draft is kept,
    # 0 to 1, whatever the model says


def read_speculative(text: str) -> SpeculativeConfig:
    """The option's value; empty: the defaults. Raises ConfigError naming the key that is wrong.

    With one end of the lookup given and beyond the other's default, the other one follows.
    """
    if not text:
        return SpeculativeConfig()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ConfigError(FLAG, text, f"it must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(FLAG, text, "it must be a JSON object")
    method = value.get("method")
    known = SpeculativeConfig.__struct_fields__
    for key, entry in value.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{FLAG} {key}", entry, f"there is no such key{hint}")
    if method not in METHODS:
        raise ConfigError(f"{FLAG} method", method, f"it must be one of {', '.join(METHODS)}")
    check_model(method, value.get("model", ""))
    for key, (low, high) in BOUNDS.items():
        entry = value.get(key, low)
        if type(entry) is not int or not low <= entry <= high:
            raise ConfigError(f"{FLAG} {key}", entry, f"it must be a whole number between {low} and {high}")
    if type(value.get("adaptive", True)) is not bool:
        raise ConfigError(f"{FLAG} adaptive", value["adaptive"], "it must be true or false")
    rate = value.get("synthetic_acceptance")
    if rate is not None and (type(rate) not in (int, float) or not 0 <= rate <= 1):
        raise ConfigError(f"{FLAG} synthetic_acceptance", rate, "it must be a number between 0 and 1")
    return with_both_ends(value)


def check_model(method: object, model: object) -> None:
    """Raises ConfigError unless there is a model where the method needs one, and only there."""
    if type(model) is not str:
        raise ConfigError(f"{FLAG} model", model, "it must be a folder or a hub id, as text")
    if method in IN_FOLDERS and not model:
        raise ConfigError(f"{FLAG} model", model, f"method {method} needs one: a folder or a hub id")
    if model and method not in IN_FOLDERS:
        raise ConfigError(f"{FLAG} model", model, f"method {method} has none")


def with_both_ends(value: dict[str, object]) -> SpeculativeConfig:
    """Checked keys as a struct whose shortest lookup is no longer than its longest where anything is looked up."""
    found = msgspec.convert(value, SpeculativeConfig)
    longest, shortest = found.prompt_lookup_max, found.prompt_lookup_min
    if shortest <= longest or found.method != "ngram":
        return found
    if "prompt_lookup_max" not in value:
        return msgspec.structs.replace(found, prompt_lookup_max=shortest)
    if "prompt_lookup_min" not in value:
        return msgspec.structs.replace(found, prompt_lookup_min=longest)
    raise ConfigError(f"{FLAG} prompt_lookup_min", shortest, f"it must be at most prompt_lookup_max ({longest})")
