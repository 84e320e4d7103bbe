"""The models that ship with Penstock: the demo model, its draft and its EAGLE head, made by benchmarks/demo_model/."""

from pathlib import Path

_HERE = Path(__file__).parent


def demo_folder() -> Path:
    """Hugging Face folder of the demo model: Qwen3, 9.4 million parameters, context 4096, bf16."""
    return _HERE / "demo"


def draft_folder() -> Path:
    """Hugging Face folder of the demo model's draft: the same tokenizer, a tenth of the compute."""
    return _HERE / "draft"


def eagle_folder() -> Path:
    """Folder of the demo model's EAGLE head: 0.7 million parameters over the demo model's own states and embeddings."""
    return _HERE / "eagle"
