"""POST /v1/rerank and POST /v1/score: how well texts go together, by their vectors' cosine, by the model's yes or no,
or by its classifier.

Sources: Cohere API reference, "Rerank" (v1 and v2), and Jina's of the same name; vLLM documentation, "Score API"; the
prompt of yes_no is that of Qwen3-Reranker's model card.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.engine_core.models.pooler import ClassifierSpec
from penstock.protocol import limits
from penstock.protocol.errors import Unsupported, invalid
from penstock.protocol.messages import Pooling, SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.classification import activated
from penstock.services.openai.embeddings import (
    Vector,
    VectorRequest,
    VectorUsage,
    check_count,
    cosines,
    pooled,
    read_vector_request,
    text_submission,
    vector_submission,
)
from penstock.services.openai.generation import model_name
from penstock.services.openai.validation import missing

Strings = str | Annotated[list[str], Meta(min_length=1)]

OPENING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
)
CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WORDS = ("no", "yes")
SCORE_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreRequest(VectorRequest, frozen=True, kw_only=True):
    """Body of POST /v1/score: one text with each of several, or as many pairs as there are of both. Each side has one
    of its names, which are those of vLLM's versions."""

    text_1: Strings | None = None
    text_2: Strings | None = None
    queries: Strings | None = None
    documents: Strings | None = None
    items: Strings | None = None
    data_1: Strings | None = None
    data_2: Strings | None = None


class Document(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(VectorRequest, frozen=True, kw_only=True):
    """Body of POST /v1/rerank, /v2/rerank and /rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1, le=limits.MAX_TOKEN_ID)] | None = None
    return_documents: bool | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a score's answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A document's place among the results; `index` is its place in the request."""

    index: int
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a rerank's answer, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage


SCORE = msgspec.json.Decoder(ScoreRequest)
RERANK = msgspec.json.Decoder(RerankRequest)


class Pair(msgspec.Struct, frozen=True):
    """Two texts, and the fields that hold them."""

    first: str
    second: str
    first_param: str
    second_param: str


async def create_score(app: AppState, context: RequestContext) -> None:
    """Score pairs of texts."""
    request = await read_vector_request(app, context, SCORE)
    sheet = Sheet(request, pairs_of(request), app.model, context.trace)
    found = await pooled(app, context, request, sheet.submits)
    data = [Score(index=index, score=score) for index, score in enumerate(sheet.scores(found.vectors))]
    answer = ScoreAnswer(
        id="score-" + secrets.token_hex(16), created=int(time.time()), model=model_name(app, context),
        data=data, usage=found.usage,
    )  # fmt: skip
    await context.send_json(msgspec.json.encode(answer))


async def rerank(app: AppState, context: RequestContext, *, documents: bool = True) -> None:
    """Rank documents. `documents`: whether they are returned where the request leaves it open."""
    model = app.model
    request = await read_vector_request(app, context, RERANK)
    check_count(len(request.documents), "documents")
    sheet = Sheet(request, document_pairs(request, model), model, context.trace)
    found = await pooled(app, context, request, sheet.submits)
    told = documents if request.return_documents is None else request.return_documents
    results = ranked(request, sheet.scores(found.vectors), documents=told)
    name = model_name(app, context)
    answer = RerankAnswer(id="rerank-" + secrets.token_hex(16), model=name, results=results, usage=found.usage)
    await context.send_json(msgspec.json.encode(answer))


class Sheet:
    """Pairs that are to be scored: the messages that it takes, without ids, and what their vectors mean.

    By cosine each different text is asked for once; by yes_no and by a classifier each pair is. Raises
    Unsupported for a model whose scores cannot be made.
    """

    def __init__(self, request: VectorRequest, pairs: Sequence[Pair], model: ModelInfo, trace: TraceContext) -> None:
        if model.pooler.unscored:
            raise Unsupported(f"this model scores nothing here: {model.pooler.unscored}", param="model")
        self._answers = model.pooler.scorer == "yes_no"
        self._classifier = model.classifier if model.pooler.scorer == "classifier" else None
        self._places: dict[str, int] = {}  # of each text among the messages
        self._pairs = pairs
        self.submits: list[SubmitText] = []
        if self._answers:
            self.submits = [pair_submission(request, pair, trace) for pair in pairs]
            return
        if self._classifier is not None:
            self.submits = [classified_pair(request, pair, self._classifier, trace) for pair in pairs]
            return
        for pair in pairs:
            for text, param in ((pair.first, pair.first_param), (pair.second, pair.second_param)):
                if text not in self._places:
                    self._places[text] = len(self.submits)
                    self.submits.append(text_submission(request, model, text, param, trace))

    def scores(self, vectors: Sequence[Vector]) -> list[float]:
        """Of each pair. vectors: of the messages, in their order."""
        if self._answers:
            return [chance(float(no), float(yes)) for no, yes in vectors]
        if self._classifier is not None:
            return [activated(vector, self._classifier)[0] for vector in vectors]
        places = self._places
        return cosines((vectors[places[pair.first]], vectors[places[pair.second]]) for pair in self._pairs)


def pair_submission(request: VectorRequest, pair: Pair, trace: TraceContext) -> SubmitText:
    """The question whether a document meets a query, for the logits of its answer."""
    pooling = Pooling(kind="logits", words=WORDS, closing=CLOSING, param=pair.second_param)
    text = OPENING.format(query=pair.first, document=pair.second)
    return vector_submission(request, text, pooling, trace, special=False)


def classified_pair(request: VectorRequest, pair: Pair, classifier: ClassifierSpec, trace: TraceContext) -> SubmitText:
    """Both texts, joined by the tokenizer, for the logit of the one label (cross-encoders: Nogueira and Cho, 2019)."""
    pooling = Pooling(kind=classifier.kind, classify=True, pair=pair.second, param=pair.second_param)
    return vector_submission(request, pair.first, pooling, trace)


def chance(no: float, yes: float) -> float:
    """Of a yes, where the answer is one of the two."""
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def pairs_of(request: ScoreRequest) -> list[Pair]:
    """The pairs of a score request. Raises InvalidRequest if the numbers of texts do not go together."""
    (one, first), (other, second) = (
        side(request, tuple(dict.fromkeys(names))) for names in zip(*SCORE_FIELDS, strict=True)
    )
    if len(first) != len(second) and len(first) != 1:
        message = f"holds {len(first)} texts and {other} {len(second)}; one of {one}, or as many, are taken"
        raise invalid(one, message)
    first = first * len(second) if len(first) == 1 else first
    return [Pair(left[0], right[0], left[1], right[1]) for left, right in zip(first, second, strict=True)]


def side(request: ScoreRequest, names: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The name that one side of the pairs has, and its texts."""
    found = [name for name in names if getattr(request, name) is not None]
    if not found:
        raise missing(names[0])
    if len(found) > 1:
        raise invalid(found[1], f"and {found[0]} cannot both be given")
    return found[0], listed(getattr(request, found[0]), found[0])


def listed(texts: Strings, param: str) -> list[tuple[str, str]]:
    """Each text with the name of its field."""
    if isinstance(texts, str):
        return [(texts, param)]
    check_count(len(texts), param)
    return [(text, f"{param}[{number}]") for number, text in enumerate(texts)]


def document_pairs(request: RerankRequest, model: ModelInfo) -> list[Pair]:
    """The query with each document; vectors are made of them with what the model's makers put before each kind."""
    by_vectors = model.pooler.scorer == "cosine"
    query = (model.pooler.query if by_vectors else "") + request.query
    before = model.pooler.document if by_vectors else ""
    return [
        Pair(query, before + text_of(document), "query", f"documents[{number}]")
        for number, document in enumerate(request.documents)
    ]


def text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def ranked(request: RerankRequest, scores: Sequence[float], *, documents: bool) -> list[Ranked]:
    """The best `top_n`; of equal scores the earlier document comes first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    return [
        Ranked(
            index=index,
            document=Document(text_of(request.documents[index])) if documents else msgspec.UNSET,
            relevance_score=scores[index],
        )
        for index in order
    ]
