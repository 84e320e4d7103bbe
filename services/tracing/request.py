"""An HTTP exchange as a span, and the one decision whether it is traced."""

from __future__ import annotations

from penstock.protocol.messages import TraceContext
from penstock.services.tracing import names
from penstock.services.tracing.context import beginning, begins, chosen, joined, under
from penstock.services.tracing.names import Kind
from penstock.services.tracing.span import Attributes, Span
from penstock.services.tracing.tracer import Tracer


class Served:
    """The span of one HTTP exchange that is traced. Source: OpenTelemetry semantic conventions, "HTTP server"."""

    def __init__(self, tracer: Tracer, parent: TraceContext, *, remote: bool) -> None:
        self._tracer = tracer
        self._parent = parent
        self._remote = remote
        self._id = tracer.ids.span()
        self.context = under(parent, self._id)

    def end(self, method: str, route: str, status: int, attributes: Attributes, times: tuple[float, float]) -> None:
        """Tell it: `route` as in the log, and when it began and ended."""
        told = {names.HTTP_METHOD: method, names.HTTP_ROUTE: route, names.HTTP_STATUS: status, **attributes}
        failed = status >= 500
        if status >= 400:
            told[names.ERROR_TYPE] = str(status)
        self._tracer.tell(Span(
            parent=self._parent, id=self._id, name=f"{method} {route}", start=times[0], end=times[1],
            kind=Kind.SERVER, remote=self._remote, attributes=told, error="" if failed else None,
        ))  # fmt: skip


def decided(tracer: Tracer, context: TraceContext) -> TraceContext | None:
    """What the first span of ours stands under, for what came with `context`, or without one; None: it is not traced.
    Decided here, for every process: by the client where it has decided and we follow, else by the share."""
    sampling = tracer.settings.sampling
    if context.traceparent:
        wanted = context.sampled if sampling.follow else chosen(context.trace_id, sampling.ratio)
        return context if wanted else None
    trace = tracer.ids.trace()
    return beginning(trace) if chosen(trace, sampling.ratio) else None


def served(tracer: Tracer, context: TraceContext) -> Served | None:
    """The span of an exchange that came with `context`, or without one; None: it is not traced."""
    parent = decided(tracer, context)
    return None if parent is None else Served(tracer, parent, remote=not begins(parent))


def carried(context: TraceContext, span: Served | None) -> TraceContext:
    """What the requests of an exchange that came with `context` carry on."""
    if span is not None:
        return span.context
    return joined(context.trace_id, context.span_id, sampled=False) if context.sampled else context
