"""Our folder `kernels` hides Hugging Face's optional distribution of that name; transformers must not mind."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import kernels

SCRIPT = """
import sys
import transformers
from transformers.utils import is_kernels_available
assert not is_kernels_available()
folder = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
config = transformers.AutoConfig.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
inputs = tokenizer("a b c", return_tensors="pt")
assert inputs["input_ids"].tolist() == [[0, 1, 2]]
assert model(**inputs).logits.shape == (1, 3, 8)
assert model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0).shape[0] == 1
import kernels
print(kernels.__file__, end="")
"""


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    config.save_pretrained(folder)


def test_transformers_works_beside_our_kernels(tmp_path: Path) -> None:
    """In a process of its own, outside of the repository, with the project installed."""
    write_model(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == kernels.__file__


def test_the_other_distribution_is_not_installed() -> None:
    """Where it is, the order of the path decides which one is imported: hence an environment of its own."""
    assert "kernels" not in {found.metadata["Name"] for found in importlib.metadata.distributions()}
