"""The models that ship with Penstock: the demo model, and a draft for it. The recipe is benchmarks/demo_model/."""

from pathlib import Path

_HERE = Path(__file__).parent


def demo_folder() -> Path:
    """Hugging Face folder of the demo model: Qwen3, 9.4 million parameters, context 4096, bf16."""
    return _HERE / "demo"


def draft_folder() -> Path:
    """Hugging Face folder of the demo model's draft: the same tokenizer, a tenth of the compute."""
    return _HERE / "draft"
