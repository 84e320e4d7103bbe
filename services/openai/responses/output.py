"""A response as types, and how blocks become its items.

Source: OpenAI API reference, "The response object". Beyond it stands only `penstock`, where there is a remark to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import PositionLogprobs
from penstock.services.client.output_collector import Usage
from penstock.services.openai.answers import ChatTokenLogprob, Remarks, chat_logprobs
from penstock.services.openai.output_blocks import Block
from penstock.services.openai.responses.items import sealed
from penstock.services.openai.responses.request import Metadata, ResponseToolChoice
from penstock.services.openai.responses.tools import Shown, ToolName
from penstock.services.openai.schema import Effort

Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag="output_text"):
    """What a message says."""

    text: str
    annotations: list[str] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    """What the model thought."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """An item of text."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    """An item of reasoning, told in full and never summed up. Its `encrypted_content` is the same once more, where the
    request asks for it: some clients send nothing else back."""

    id: str
    status: ItemStatus
    summary: list[str] = []
    content: tuple[ReasoningText, ...]
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    """A call. Its arguments are JSON unless it is incomplete or the model erred."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool. OpenAI's items of this type have no status in their description, and one in fact."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class Naming(msgspec.Struct, frozen=True):
    """How a response's items tell of blocks."""

    tools: Mapping[str, ToolName] = {}  # by the model's names
    sealed: bool = False  # reasoning has encrypted content

    def custom(self, block: Block) -> bool:
        """Whether a block is a call of a custom tool."""
        found = self.tools.get(block.name) if block.kind == PieceKind.CALL else None
        return found is not None and found.kind == "custom"


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class InputDetails(msgspec.Struct, frozen=True):
    """What is known of the prompt's tokens; what is written to the cache is not told apart."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Tokens of the reasoning, its markers among them."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """`usage`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        total = usage.prompt_tokens + usage.completion_tokens
        cached, thought = InputDetails(usage.cached_tokens or 0), OutputDetails(usage.reasoning_tokens)
        return cls(usage.prompt_tokens, cached, usage.completion_tokens, thought, total)


class ReasoningShown(msgspec.Struct, frozen=True):
    """What the request said of reasoning."""

    effort: Effort | None = None
    summary: str | None = None


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a response; a stream's events hold it as it stands."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: Metadata
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningShown
    service_tier: Literal["default"] = "default"
    temperature: float
    text: dict[str, Any]
    tool_choice: str | ResponseToolChoice
    tools: tuple[Shown, ...]  # those that are served
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    penstock: Remarks | msgspec.UnsetType = msgspec.UNSET


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """Body of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def item_id(block: Block, naming: Naming) -> str:
    prefix = {PieceKind.CONTENT: "msg", PieceKind.REASONING: "rs", PieceKind.CALL: "fc"}[PieceKind(block.kind)]
    return f"{'ctc' if naming.custom(block) else prefix}_{block.key}"


def item_of(block: Block, status: ItemStatus, naming: Naming, logprobs: Sequence[ChatTokenLogprob] = ()) -> OutputItem:
    """The item as far as it is written."""
    key = item_id(block, naming)
    match block.kind:
        case PieceKind.CALL:
            tool = naming.tools.get(block.name) or ToolName("function", block.name)
            space = msgspec.UNSET if tool.namespace is None else tool.namespace
            if tool.kind == "custom":
                return CustomCallItem(
                    id=key, status=status, call_id=block.call, name=tool.name, input=block.text, namespace=space
                )
            return CallItem(
                id=key, status=status, call_id=block.call, name=tool.name, arguments=block.text, namespace=space
            )
        case PieceKind.REASONING:
            content = sealed(block.text) if naming.sealed else msgspec.UNSET
            text = (ReasoningText(text=block.text),)
            return ReasoningItem(id=key, status=status, content=text, encrypted_content=content)
        case _:
            return MessageItem(id=key, status=status, content=(OutputText(text=block.text, logprobs=list(logprobs)),))


def empty_item(block: Block, naming: Naming) -> OutputItem:
    """The item as it stands in the event that adds it, whatever of it has come by then: clients add what the events
    behind it bring to what stands here."""
    item = item_of(block, "in_progress", naming)
    match item:
        case CallItem():
            return msgspec.structs.replace(item, arguments="")
        case CustomCallItem():
            return msgspec.structs.replace(item, input="")
        case ReasoningItem():
            return msgspec.structs.replace(item, content=(), encrypted_content=msgspec.UNSET)
        case MessageItem():
            return msgspec.structs.replace(item, content=())


def output_items(
    blocks: list[Block], finish: Finish, logprobs: list[ChatTokenLogprob], naming: Naming
) -> list[OutputItem]:
    """All items of a choice that has finished. Log-probabilities are of all tokens and stand with the last text."""
    texts = [block for block in blocks if block.kind == PieceKind.CONTENT]
    return [
        item_of(block, item_status(block, blocks, finish), naming, logprobs if texts and block is texts[-1] else ())
        for block in blocks
    ]


def item_status(block: Block, blocks: list[Block], finish: Finish) -> ItemStatus:
    """The last item is incomplete where the output was cut off."""
    return "incomplete" if block is blocks[-1] and finish == Finish.LENGTH else "completed"


def shaped(positions: list[PositionLogprobs]) -> list[ChatTokenLogprob]:
    return chat_logprobs(positions).content
