"""Chat templates as families of models have them, shortened to what they do with contents, and their control tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec
from tokenizers import AddedToken, Tokenizer

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.tokenizer.codec import FastCodec
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from tests.engine_core.tokenizer.vocabularies import BUILDERS, CHAT_TEMPLATE


class Family(msgspec.Struct, frozen=True):
    """A template, its special tokens, and the added ones that are not special."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}"
    "{%- endif %}{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\n<tool_call>\\n{\"name\": <function-name>}\\n</tool_call><|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not("
    "message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set reasoning = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}"
    '{%- for call in message.tool_calls or [] %}{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name }}'
    "{{- '\", \"arguments\": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    "{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}"
    "{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- '{\"name\": \"' + call.function.name + '\", ' }}"
    "{{- '\"parameters\": ' }}{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}"
    "{%- elif message.content is mapping %}{{- message.content | tojson }}{%- else %}{{- message['content'] | trim }}"
    "{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}{%- if tools %}{%- for t in tools %}{{- t | tojson(indent=4) }}"
    "{{- '\\n\\n' }}{%- endfor %}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == messages | length - 1 %}{{- '[AVAILABLE_TOOLS] [' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in m.tool_calls %}{{- (call.function | tojson)[:-1] + '}' }}{%- endfor %}{{- ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}{%- elif m.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + m.content | string + '}[/TOOL_RESULTS]' }}{%- else %}{{- m.content }}"
    "{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\\n' + m.content | default('', true) | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{{ tools | tojson if tools }}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + '\\n' + (m['content'] or '') + '<|end|>' + '\\n' }}{% endfor %}"
    "{{ tools | tojson if tools }}{% if add_generation_prompt %}{{ '<|assistant|>' + '\\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content or '' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '\\n```json\\n' + c.function.arguments | tojson + '\\n```' }}"
    "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools | tojson if tools }}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% if m.thinking or m.content %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json' }}"
    "{{ '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else %}"
    "{{ '<|start|>developer<|message|># Instructions\\n\\n' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|start|>developer<|message|># Tools\\n\\n' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
FAMILIES: Mapping[str, Family] = {
    "chatml": Family(CHAT_TEMPLATE, CHATML),
    "qwen3": Family(QWEN3, CHATML, ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                                    "</tool_response>", "<|fim_prefix|>")),
    "llama3": Family(LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                              "<|python_tag|>")),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                                "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("\n\n", "<table>", "   ")),
    "phi3": Family(PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|endoftext|>")),
    "deepseek": Family(DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
                       ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁call▁begin｜>",
                        "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")),
    "harmony": Family(HARMONY, ("<|startoftext|>", "<|return|>", "<|start|>", "<|channel|>", "<|constrain|>",
                                "<|message|>", "<|end|>", "<|call|>")),
    "embedded": Family((demo_folder() / "chat_template.jinja").read_text(), CHATML,
                       ("<tool_call>", "</tool_call>", "<think>", "</think>")),
}  # fmt: skip


def tokenizer_of(name: str, kind: str = "byte_level") -> Tokenizer:
    """A small tokenizer with a family's control tokens."""
    family, made = FAMILIES[name], BUILDERS[kind]()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    return made


@functools.cache
def vocabulary_of(name: str, kind: str = "byte_level") -> Vocabulary:
    """The vocabulary of such a tokenizer."""
    special = FAMILIES[name].special
    return Vocabulary(FastCodec(tokenizer_of(name, kind)), {"bos_token": special[0], "eos_token": special[1]})
