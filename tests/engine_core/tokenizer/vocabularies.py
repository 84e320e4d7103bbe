"""Small tokenizers of every kind, made with the `tokenizers` library, and how tests turn ids into text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.engine_core.text.detokenizer import detokenizer
from penstock.engine_core.tokenizer.codec import FastCodec
from penstock.engine_core.tokenizer.vocabulary import Vocabulary

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's asleep.",
    "Größe, naïveté, façade — “quoted”. Привет, мир! 你好，世界。 안녕하세요 😀 👩‍👩‍👧‍👦",
    "def main():\n    return 'ok'  # a comment\n\n\ttabs and   spaces",
    "one two three four five six seven eight nine ten",
)
SPECIAL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "x y")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(folder: Path, kind: str = "byte_level", max_model_len: int = 512) -> Path:
    """A model folder without weights: config, tokenizer and chat template."""
    size = tokenizer(kind).get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "rms_norm_eps": 1e-5,
        "vocab_size": size, "max_position_embeddings": max_model_len, "torch_dtype": "float32",
        "eos_token_id": tokenizer(kind).token_to_id("<|im_end|>"),
    }  # fmt: skip
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": CHAT_TEMPLATE}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json(kind))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@functools.cache
def tokenizer_json(kind: str) -> str:
    """tokenizer.json of one kind."""
    tokenizer = BUILDERS[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return str(tokenizer.to_str())


def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(kind))


@functools.cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(FastCodec(tokenizer(kind)), {"bos_token": "<s>", "eos_token": "</s>"})


def stream(
    vocabulary: Vocabulary, token_ids: Sequence[int], *, skip: bool, context: Sequence[int] = (), flush: bool = True
) -> str:
    """Text of the ids, pushed one by one."""
    found = detokenizer(vocabulary, skip_special_tokens=skip, context=context)
    text = "".join([found.push(token_id) for token_id in token_ids])
    return text + (found.flush() if flush else "")


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def byte_fallback() -> Tokenizer:
    """As Llama 2: SentencePiece BPE, a leading space, unknown characters as bytes, <s> before every text."""
    made = sentencepiece()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def gemma() -> Tokenizer:
    """As Gemma: no leading space."""
    made = sentencepiece()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def sentencepiece() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:1] + CORPUS[2:], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    for token in model["vocab"]:
        if token not in tokens:
            tokens.append(token)
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    return Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def unigram() -> Tokenizer:
    """As T5: Metaspace decoder, unknown characters lost."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def wordpiece() -> Tokenizer:
    """As BERT, with clean-up of spaces before punctuation."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def suffix() -> Tokenizer:
    """As GPT-1: a mark at the end of each word becomes a space, except at the end of a text."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=250, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def window_fallback() -> Tokenizer:
    """Byte fallback under a decoder that is none of the known ones."""
    made = sentencepiece()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def window_bytes() -> Tokenizer:
    """Byte-level with a step after it."""
    made = byte_level()
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\u00a0", " ")])
    return made


def plain() -> Tokenizer:
    """No decoder: tokens with spaces between."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


BUILDERS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "suffix": suffix,
    "window_fallback": window_fallback,
    "window_bytes": window_bytes,
    "plain": plain,
}
KINDS = tuple(BUILDERS)
