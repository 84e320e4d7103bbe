"""Per-request messages between api, tokenizer and scheduler, and the columnar batches that answer them.

Request ids are 63-bit integers made by the api process (request_ids.py), never by a client. A request with n choices is
one message on every link; its choices are identified by their index. Every (id, choice) gets exactly one terminal
row (finish other than NONE) on each link, unless the whole request was answered with `Rejected`, which is terminal for
all of its choices.

Columns are raw little-endian arrays that `rows()` reads: int64 ids, uint16 choices, int32 counts, uint8 finish.
"""

from __future__ import annotations

import enum
import secrets

from penstock.protocol.images import Image, ImageFile
from penstock.protocol.message import Message, Part


class Finish(enum.IntEnum):
    """Why a choice ended."""

    NONE = 0
    STOP = 1  # end-of-sequence token, stop token id or stop string
    LENGTH = 2  # max_tokens or the model's length
    ABORT = 3  # the client disconnected or cancelled it
    ERROR = 4  # the row's extra says what
    GRAMMAR = 6  # the automaton of its structure failed; the row's extra says how
    UNAVAILABLE = 7  # a part of the server will not come back; the row's extra says which
    PREFILLED = 8  # it goes on at another replica behind its first token; the scheduler's own, and told by `Prefilled`
    CALLS = 5  # as STOP, behind tool calls that are complete; known to the tokenizer and the api alone


class PieceKind(enum.IntEnum):
    """What a stretch of an output is."""

    CONTENT = 0
    REASONING = 1
    CALL = 2  # a tool call begins; the text is the function's name
    ARGUMENTS = 3  # of the call that began last


class TraceContext(Part, frozen=True):
    """W3C trace context: the client's as received, or that of a span of ours; empty when there is none."""

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty without a context."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """The parent of spans recorded under this context, 16 hexadecimal digits; empty at the root of a trace."""
        return self.traceparent[36:52]

    @property
    def is_root(self) -> bool:
        """Whether it names a trace that has no span yet."""
        return bool(self.traceparent) and not self.span_id

    def child(self, span_id: str = "") -> TraceContext:
        """The context of a sampled span of ours under this one, new unless it is named."""
        return TraceContext(f"00-{self.trace_id}-{span_id or secrets.token_hex(8)}-01", self.tracestate)

    def unsampled(self) -> TraceContext:
        """The same trace and span, of which nothing is recorded."""
        return TraceContext(f"00-{self.trace_id}-{self.span_id}-00") if self.sampled else self

    @property
    def sampled(self) -> bool:
        """Whether spans are recorded: decided once, where the trace began."""
        return len(self.traceparent) >= 55 and bool(int(self.traceparent[53:55], 16) & 1)


class Written(Part, frozen=True):
    """The output of a choice when a process was lost: the next process continues from there."""

    token_ids: bytes = b""  # int32, the output so far
    ended: bool = False  # it is complete


class Sampling(Part, frozen=True, kw_only=True):
    """How tokens of one request are chosen. Validated at the api; every number is finite and in range."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0  # always filled: the client's, or a random one
    max_tokens: int | None = None  # None until the tokenizer knows the prompt's length; 0 until then: the echo alone
    min_tokens: int = 0  # until then end-of-sequence and stop token ids are masked
    stop_token_ids: tuple[int, ...] = ()  # the request's own; kept in the ids
    eos_token_ids: tuple[int, ...] = ()  # the model's; filled by the tokenizer, also under ignore_eos
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that must not be completed
    allowed_token_ids: tuple[int, ...] = ()  # empty allows all
    logprobs: int = -1  # -1 none, 0 the chosen token's, k the k best as well
    prompt_logprobs: int = -1  # of the raw distribution
    processed_logprobs: bool = False  # of what masks, biases, penalties and temperature leave, not of the raw one


class Grammar(Part, frozen=True, kw_only=True):
    """What a request's output must follow, as the client asked for it."""

    kind: str  # json_object, json_schema, regex, grammar, choice or structural_tag
    source: str = ""  # JSON text of the schema, tag or list of choices; the regex; the grammar in EBNF or Lark form
    unread: bytes = b""  # in place of it: JSON of the field that holds it, if that is long; the compiler reads it
    whitespace: str = "bounded"  # between JSON tokens: none, bounded, or a regex
    lenient: bool = False  # approximate what has no exact form, and say so, instead of refusing it
    param: str = ""  # the request's field that holds it, for errors


class Automaton(Part, frozen=True, kw_only=True):
    """A grammar that has been checked and compiled once within its limits, in the form the scheduler runs."""

    source: str  # serialised grammar of llguidance
    after: bytes = b""  # int32 [tokens]: the output is free until it holds these in a row; empty: bound at once
    memory: int = 0  # bytes that it took where it was compiled; 0: unknown
    unique: bytes = b""  # JSON: places of arrays that the source lets repeat items, and that must not


class CustomInput(Part, frozen=True, kw_only=True):
    """A custom tool's input: text, given as the one argument `input` of a function that the model is shown."""

    name: str
    syntax: str = ""  # lark or regex; empty: any text
    definition: str = ""  # what the text follows, in that syntax


class ToolUse(Part, frozen=True, kw_only=True):
    """Which of a request's tools may be called, and which must be."""

    names: tuple[str, ...]  # functions that may be called
    required: bool = False  # the answer is a call
    parallel: bool = True  # there may be several calls
    bound: bool = False  # no other function than these, although others stand in the prompt
    strict: tuple[str, ...] = ()  # those whose arguments follow their schema exactly
    customs: tuple[CustomInput, ...] = ()  # those that are custom tools


class Reasoning(Part, frozen=True, kw_only=True):
    """What a request says about reasoning."""

    effort: str = ""  # for the template; "none" asks for no reasoning; empty: nothing was said
    budget: int | None = None  # most tokens of reasoning; then its closing marker is forced
    split: bool = True  # it is separated from the content


class Pooling(Part, frozen=True, kw_only=True):
    """A request for a vector in place of text: hidden states of its prompt behind the final norm, or logits there."""

    kind: str  # mean: of all positions; last, cls: the last or the first one's; logits: those behind the last position
    tokens: tuple[int, ...] = ()  # whose logits are wanted
    words: tuple[str, ...] = ()  # the same as text, one token each; the tokenizer fills `tokens`
    closing: str = ""  # text that follows the prompt, whatever is truncated of it
    param: str = ""  # the request's field that holds the prompt, for errors
    classify: bool = False  # what the model's classifier makes of the state is wanted: logits of its labels
    pair: str | None = None  # the text that goes with the prompt; the tokenizer joins both as the model wants it
    second: int = 0  # first token of `pair` where the model tells both texts apart; the tokenizer fills it

    @property
    def whole(self) -> bool:
        """Whether it needs more than the last position: then none may come from the prefix cache."""
        return self.kind in ("mean", "cls")


class Adapter(Part, frozen=True):
    """A LoRA adapter: its weights are added to those of the model."""

    name: str
    path: str  # of its folder, where executors read it
    version: str  # hexadecimal digest of what the folder held when the name was given to it

    @property
    def identity(self) -> str:
        """What tells its keys and values from those of other adapters; no base model has it."""
        return f"{self.version}/{self.name}"


class Client(Part, frozen=True):
    """The client of a request, for fair scheduling: digests, which only tell whether two are equal."""

    tenant: str = ""  # of the key; empty where the server has none
    name: str = ""  # among the tenant's: of the user, the session or the connection


class SubmitText(Message, frozen=True, kw_only=True):
    """api → tokenizer: one request. Exactly one of `messages`, `prompt`, `prompt_ids` is given."""

    id: int = 0  # the engine client's to give
    messages: bytes | None = None  # JSON array of chat messages; a part of type image stands for the next of `images`
    images: tuple[ImageFile, ...] = ()  # in the order of their parts
    tools: bytes | None = None  # JSON array, rendered by the template
    tool_use: ToolUse | None = None  # None: no calls are expected
    reasoning: Reasoning = Reasoning()
    chat_template: str | None = None  # in place of the model's own
    template_arguments: bytes | None = None  # JSON object: further names for the template
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prompt: str | None = None
    prompt_ids: bytes | None = None  # int32
    add_special_tokens: bool = True
    sampling: Sampling
    grammar: Grammar | None = None
    pooling: Pooling | None = None  # a vector is wanted and nothing is generated
    prediction: str = ""  # text that the output is expected to repeat; its tokens are drafts
    speculate: bool = True  # whether drafts other than forced ones may be proposed, its prediction included
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    bad_words: tuple[str, ...] = ()  # as text; the tokenizer adds their ids to `sampling`
    skip_special_tokens: bool = True
    detokenize: bool = True  # false: no text is made; there can be no stop strings then
    with_token_ids: bool = False  # token ids of the prompt and the output are returned with the text
    echo: bool = False  # the prompt's text comes first in every choice
    stream: bool = False  # false: text may be held back and sent in one piece
    priority: int = 0  # larger goes first under the priority policy
    truncate: int = 0  # keep so many of the prompt's tokens; -1: as many as leave room for the output; 0: all
    keep_first: bool = False  # of a prompt that is truncated the first tokens stay, not the last
    clamp: bool = False  # an output longer than the prompt leaves room for takes that room
    cache_salt: str = ""
    trace: TraceContext = TraceContext()
    arrival: float = 0.0  # unix seconds
    written: tuple[Written, ...] = ()  # [n], of a request that continues; empty: it is new
    session: str = ""  # requests of one session go to one replica where nothing else decides
    client: Client = Client()
    suspect: bool = False  # its tokenizer died, maybe of it: it runs in a trial process first
    adapter: Adapter | None = None  # None: the model itself
    rid: str = ""  # what the operator calls it, to end it alone; others may have the same


class Abort(Message, frozen=True):
    """api → tokenizer → scheduler: end every choice of the request. Unknown ids are ignored: ends may cross."""

    id: int


class Tokenize(Message, frozen=True, kw_only=True):
    """api → tokenizer: ids of a text or of a chat; answered by `Tokenized` or `Rejected`."""

    id: int = 0  # as of `SubmitText`
    messages: bytes | None = None
    images: tuple[ImageFile, ...] = ()  # as of `SubmitText`
    tools: bytes | None = None
    reasoning: Reasoning = Reasoning()
    template_arguments: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prompt: str | None = None
    add_special_tokens: bool = True
    with_strings: bool = False
    suspect: bool = False  # as of `SubmitText`
    client: Client = Client()


class Detokenize(Message, frozen=True):
    """api → tokenizer: text of token ids (int32); answered by `Detokenized` or `Rejected`."""

    id: int = 0  # as of `SubmitText`
    token_ids: bytes = b""
    suspect: bool = False  # as of `SubmitText`


class Tokenized(Message, frozen=True):
    id: int
    token_ids: bytes  # int32
    token_strings: tuple[str, ...] | None = None


class Detokenized(Message, frozen=True):
    id: int
    text: str


class ContextLength(Part, frozen=True):
    """What does not fit the model's context, as `protocol.errors.ContextExceeded` has it."""

    prompt: int
    wanted: int
    limit: int


class Rejected(Message, frozen=True, kw_only=True):
    """scheduler → tokenizer → api: the request ends here with an error; terminal for all of its choices."""

    id: int
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    context: ContextLength | None = None  # of a prompt or an output that is too long


class BlocksAddress(Part, frozen=True):
    """Where executors of other hosts read an executor's KV blocks, by NIXL. Whoever has it can read them: it travels on
    links alone."""

    metadata: bytes  # of its agent
    label: str  # of the chip, types and layers
    run_bytes: int  # of a block
    blocks: int
    stamps_at: int  # address of the stamps of all blocks, int64 each
    blocks_at: int  # address of block 0; the others follow


BlocksAddresses = tuple[BlocksAddress | None, ...]  # of a group's executors, by their places in it; empty: of none


class KVTransfer(Part, frozen=True):
    """KV blocks of a request, in memory of a prefill replica's host, which executors of other replicas can read.

    A block can be read once it has its stamp. Who has read it looks again: where the stamp is another one, the block
    has been written again since.
    """

    replica: int  # whose
    weights: str  # version of those that they were computed with
    places: bytes  # int32 [columns, KV groups], -1 where nothing reads a block
    stamps: bytes  # int64 [columns, KV groups]
    addresses: BlocksAddresses = ()


class SubmitTokens(Message, frozen=True, kw_only=True):
    """tokenizer → scheduler: one request as token ids. `sampling.max_tokens` is filled; prompt + max_tokens fits.
    One that pools has one choice, and only its prompt must fit."""

    id: int
    token_ids: bytes  # int32 [prompt]
    sampling: Sampling
    automaton: Automaton | None = None
    pooling: Pooling | None = None  # a vector is wanted and nothing is generated
    prediction: bytes = b""  # int32 [tokens] that the output is expected to repeat
    speculate: bool = True  # whether drafts other than forced ones may be proposed, its prediction included
    stop_strings: bool = False  # they may end its choices, so rows with drafts tell what became of those so far
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    trace: TraceContext = TraceContext()
    written: tuple[Written, ...] = ()  # [n], as in `SubmitText`
    client: Client = Client()
    turns: tuple[int, ...] = ()  # positions of the prompt, ascending, where its system prompt and past turns end
    adapter: Adapter | None = None  # None: the model itself
    images: tuple[Image, ...] = ()  # ascending by position
    rid: str = ""  # as of `SubmitText`
    prefill: bool = False  # each choice has one token here, and goes on elsewhere: `Prefilled`
    transfer: KVTransfer | None = None  # where blocks of it are


class Prefilled(Message, frozen=True):
    """scheduler → tokenizer: each choice has its token, and those that have not ended go on elsewhere. Terminal for all
    of them."""

    id: int
    transfer: KVTransfer | None = None  # held until `ReleaseTransfer`, or for a time; None: all is computed again


class ReleaseTransfer(Message, frozen=True):
    """tokenizer → scheduler: the blocks that `Prefilled` named have been read, or nobody wants them. Unknown ids are
    ignored."""

    id: int


class StopHit(Message, frozen=True):
    """tokenizer → scheduler: a stop string ended this choice after `tokens` output tokens; a terminal row confirms."""

    id: int
    choice: int
    tokens: int
