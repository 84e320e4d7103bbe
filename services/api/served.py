"""The model that this server serves, as far as the api has to know it."""

from __future__ import annotations

import msgspec

from engine_core.folder import Generation
from protocol.errors import NotFound


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Names, sizes and defaults of the one model; `names[0]` stands in responses."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    created: int  # unix seconds
    generation: Generation = Generation()

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, asked: str | None) -> None:
        """Raise NotFound unless a request may ask for `asked`; to leave the name out is to ask for the one model."""
        if asked is not None and asked not in self.names:
            raise NotFound(f"The model `{asked[:200]}` does not exist.", param="model", code="model_not_found")
