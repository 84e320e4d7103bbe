"""Models that see images, as far as their prompts go: tiny vocabularies with the special tokens, the templates of the
families shortened to what they do with images, and vision specs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.engine_core.images.processor_spec import FixedSize, LongestEdge, ProcessorSpec, SmartResize
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.engine_core.tokenizer.codec import FastCodec
from penstock.engine_core.tokenizer.vocabulary import Vocabulary

HALF = (0.5, 0.5, 0.5)
QWEN_TEMPLATE = (
    "{%- macro shown(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for item in content %}"
    "{%- if 'image' in item or 'image_url' in item or item.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- elif 'text' in item %}{{- item.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endmacro %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{{- shown(message.content) }}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\\n' }}{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
MISTRAL_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST]' }}"
    "{%- for block in message['content'] %}{%- if block['type'] == 'text' %}{{- block['text'] }}"
    "{%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}{%- endif %}{%- endfor %}{{- '[/INST]' }}"
    "{%- endif %}{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)


class Sighted(msgspec.Struct, frozen=True):
    """One family."""

    template: str
    special: tuple[str, ...]
    placeholder: str
    eos: str
    processor: ProcessorSpec
    patch: int
    merge: int = 1
    pooled: int = 0

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE, with tokens for several ends of lines as Gemma's has."""
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        made.train_from_iterator(["\n\n\n\n a\n\n\n\nb\n\n\n cd\n\nwhat is this, and what is that?"] * 9, trainer)
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in self.special])
        return made

    def vocabulary(self) -> Vocabulary:
        names = {"bos_token": self.special[0], "eos_token": self.eos}
        return Vocabulary(FastCodec(Tokenizer.from_str(text_of(self.special, self.eos))), names)

    def write(self, folder: Path) -> Path:
        """A folder with its tokenizer and template."""
        names = {"bos_token": self.special[0], "eos_token": self.eos, "chat_template": self.template}
        (folder / "tokenizer.json").write_text(text_of(self.special, self.eos))
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        return folder

    def vision(self) -> VisionSpec:
        token_id = self.vocabulary().token_id(self.placeholder)
        assert token_id is not None
        return VisionSpec(
            kind="any", token_id=token_id, processor=self.processor, patch=self.patch, merge=self.merge,
            pooled=self.pooled, layers=1, hidden=16, heads=1, width=16, outputs=16,
        )  # fmt: skip


FAMILIES = {
    "qwen": Sighted(
        QWEN_TEMPLATE,
        ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        "<|image_pad|>", "<|im_end|>",
        ProcessorSpec(mean=HALF, std=HALF, resize=SmartResize(least=2048, most=20_000, factor=32)), patch=16, merge=2,
    ),
    "gemma": Sighted(
        GEMMA_TEMPLATE,
        ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<image_soft_token>", "<end_of_turn>",
        ProcessorSpec(mean=HALF, std=HALF, resize=FixedSize(height=56, width=56), resample=2), patch=14, pooled=4,
    ),
    "mistral": Sighted(
        MISTRAL_TEMPLATE,
        ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]", "</s>",
        ProcessorSpec(mean=HALF, std=HALF, resize=LongestEdge(height=140, width=140, factor=28)), patch=14, merge=2,
    ),
}  # fmt: skip


@functools.cache
def text_of(special: tuple[str, ...], eos: str) -> str:
    """A family's tokenizer.json."""
    found = next(family for family in FAMILIES.values() if family.special == special and family.eos == eos)
    return str(found.tokenizer().to_str())
