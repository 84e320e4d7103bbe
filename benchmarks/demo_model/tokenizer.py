"""The byte-level BPE tokenizer: trained on the generator's text, digits one by one, chat and tool tags added.

python -m benchmarks.demo_model.tokenizer --out FOLDER
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.demo_model.generator import Split, sample, text_of

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
SPECIAL = (END_OF_TEXT, START, END)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with their leading space, single digits, runs of punctuation with the newlines after them, white space.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _corpus(documents: int, seed: int) -> Iterator[str]:
    rng = Random(seed)
    for _ in range(documents):
        text = text_of(sample(rng, Split.TRAINING))
        for token in SPECIAL + TAGS:
            text = text.replace(token, "\n")
        yield text


def train(documents: int = 60_000, seed: int = 1) -> Tokenizer:
    """Train the tokenizer. The same arguments give the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(documents, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} entries, not {VOCABULARY}: raise --documents")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write tokenizer.json into")
    parser.add_argument("--documents", type=int, default=60_000, help="documents to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of those documents (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(arguments.documents, arguments.seed).save(str(arguments.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
