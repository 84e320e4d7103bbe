"""--limit-mm-per-prompt as vLLM's users write it: a number, image=N or {"image": N}."""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.errors import ConfigError

FLAG = "--limit-mm-per-prompt"
MOST = 1024  # images of one prompt
USUAL = 16
NUMBER = re.compile(r"(?:image=)?([0-9]{1,9})")


def read_image_limit(text: str) -> int:
    """Most images of one prompt; 0: images are refused. Raises ConfigError; other media may be limited to 0 alone."""
    found = NUMBER.fullmatch(text.strip())
    if found is not None:
        limits = {"image": int(found[1])}
    else:
        try:
            limits = msgspec.json.decode(text, type=dict[str, int])
        except msgspec.DecodeError:
            raise ConfigError(FLAG, text, 'it must be a number, image=N or {"image": N}') from None
    for kind, limit in limits.items():
        if kind != "image" and limit:
            raise ConfigError(FLAG, text, f"this server takes images alone, and nothing of the kind {kind!r:.40}")
    limit = limits.get("image", USUAL)
    if not 0 <= limit <= MOST:
        raise ConfigError(FLAG, text, f"images must be 0 to {MOST}")
    return limit
