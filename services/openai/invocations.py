"""POST /invocations, where Amazon SageMaker sends every request: the body's fields decide which endpoint answers.

Source: Amazon SageMaker developer guide, "Custom inference code with hosting services", as vLLM reads it.
"""

from __future__ import annotations

from penstock.protocol.errors import InvalidRequest
from penstock.services.http.request_context import RequestContext
from penstock.services.http.routing import Handler
from penstock.services.openai.app_state import AppState
from penstock.services.openai.chat import create_chat_completion
from penstock.services.openai.completions import create_completion
from penstock.services.openai.embeddings import create_embeddings
from penstock.services.openai.scoring import create_score, rerank
from penstock.services.openai.validation import raw_fields

# Fields of a body → the endpoint whose body has them; the first that fits.
ENDPOINTS: tuple[tuple[frozenset[str], Handler], ...] = (
    (frozenset(("messages",)), create_chat_completion),
    (frozenset(("prompt",)), create_completion),
    (frozenset(("text_1", "text_2")), create_score),
    (frozenset(("query", "documents")), rerank),
    (frozenset(("input",)), create_embeddings),
)


async def invoke(app: AppState, context: RequestContext) -> None:
    """Answer as the endpoint that the body is for."""
    context.body = await context.read_json()
    names = raw_fields(context.body).keys()
    handler = next((handler for fields, handler in ENDPOINTS if fields <= names), None)
    if handler is None:
        known = "; ".join(" and ".join(sorted(fields)) for fields, _ in ENDPOINTS)
        raise InvalidRequest(f"the body is for no endpoint: it holds none of {known}", code="invalid_value")
    await handler(app, context)
