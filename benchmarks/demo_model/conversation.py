"""Conversations as data, and their text as chat_template.jinja renders it, cut into trained and untrained parts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Thinking(Enum):
    """What the caller of the chat template says about thinking (its keyword `enable_thinking`)."""

    UNSAID = "unsaid"
    ON = "on"
    OFF = "off"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Call:
    """One tool call of an assistant message."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One chat message. `thought` is what the assistant thinks before it says `content`.

    The model learns to say what the assistant says, but for a foreign message, which another assistant said, and the
    first `given` characters, which a grammar writes for it.
    """

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    thought: str = ""
    foreign: bool = False
    given: int = 0

    def as_openai(self) -> dict[str, Any]:
        """The message in the shape of the chat completions API."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.role == "tool":
            message["tool_call_id"] = "call_0"
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{number}", "type": "function",
                 "function": {"name": call.name, "arguments": _json(call.arguments)}}
                for number, call in enumerate(self.calls)
            ]  # fmt: skip
        return message


@dataclass(frozen=True)
class Exercise:
    """One question with its one right answer: user, assistant, perhaps tool and assistant again.

    `key` is the content that decides the split: equal keys are either all in training or all held out.
    An empty key marks a closed set that both splits share. `thinks` says that the last answer begins with its thought.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    thinks: bool = False


@dataclass(frozen=True)
class Conversation:
    """A whole chat that ends in an assistant message."""

    exercises: tuple[Exercise, ...]
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    thinking: Thinking = Thinking.UNSAID

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, the system's first if there is one."""
        head = (Message("system", self.system),) if self.system else ()
        return head + tuple(message for exercise in self.exercises for message in exercise.messages)

    @property
    def thinks(self) -> bool:
        """Whether the last answer begins with its thought."""
        return self.thinking is Thinking.ON or (self.thinking is Thinking.UNSAID and self.exercises[-1].thinks)

    @property
    def answer(self) -> str:
        """What the model should generate for the last message, without the end token."""
        return said(self.messages[-1], thinks=self.thinks)


@dataclass(frozen=True)
class Part:
    """A piece of the text; `trained` pieces are what the model has to say. Pieces meet where tokens do."""

    text: str
    trained: bool


THINK_INSTRUCTION = "Think first, inside <think> tags."
TOOLS_HEAD = "You can call tools. These are their signatures, one JSON object per line:\n<tools>\n"
TOOLS_TAIL = (
    "</tools>\nTo call a tool, answer with its name and its arguments as JSON:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def said(message: Message, *, thinks: bool) -> str:
    """The text of an assistant message as the model writes it."""
    pieces = [message.content] if message.content else []
    for call in message.calls:
        body = _json({"name": call.name, "arguments": call.arguments})
        pieces.append(f"<tool_call>\n{body}\n</tool_call>")
    text = "\n".join(pieces)
    return f"<think>\n{message.thought}\n</think>\n\n{text}" if thinks else text


def system_text(conversation: Conversation) -> str:
    """The content of the system turn: the caller's words, the tools, the wish to think. Empty when there is none."""
    blocks = [conversation.system] if conversation.system else []
    if conversation.tools:
        lines = "".join(_json(tool) + "\n" for tool in conversation.tools)
        blocks.append(TOOLS_HEAD + lines + TOOLS_TAIL)
    if conversation.thinking is Thinking.ON:
        blocks.append(THINK_INSTRUCTION)
    return "\n\n".join(blocks)


def parts(conversation: Conversation) -> Iterator[Part]:
    """The conversation's text in order.

    Every assistant message is trained; a thought is written in the last one only, as the template drops older ones.
    Where the caller asked for thoughts, the older answers stand without theirs and are no example to learn from.
    """
    pending = ""
    system = system_text(conversation)
    if system:
        pending = f"<|im_start|>system\n{system}<|im_end|>\n"
    messages = [message for message in conversation.messages if message.role != "system"]
    previous = ""
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        if message.role == "assistant":
            pending += "<|im_start|>assistant\n"
            if last and conversation.thinking is Thinking.OFF:
                pending += EMPTY_THOUGHT
            thinks = last and conversation.thinks
            given = 0 if thinks else message.given
            text = said(message, thinks=thinks)
            yield Part(pending + text[:given], trained=False)
            trained = (last or conversation.thinking is not Thinking.ON) and not message.foreign
            yield Part(text[given:] + "<|im_end|>", trained)
            pending = "\n"
        elif message.role == "tool":
            following = messages[index + 1].role
            opening = "" if previous == "tool" else "<|im_start|>user"
            closing = "" if following == "tool" else "<|im_end|>\n"
            pending += f"{opening}\n<tool_response>\n{message.content}\n</tool_response>{closing}"
        else:
            pending += f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n"
        previous = message.role


def prompt(conversation: Conversation) -> str:
    """The text up to the last answer: what a server feeds the model."""
    pieces = list(parts(conversation))
    text = "".join(piece.text for piece in pieces[:-1])
    given = 0 if conversation.thinks else conversation.messages[-1].given
    return text[: len(text) - given]


def exchange(task: str, key: str, question: str, answer: str, thought: str = "") -> Exercise:
    """An exercise of one question and one answer."""
    return Exercise(task, key, (Message("user", question), Message("assistant", answer, thought=thought)))
