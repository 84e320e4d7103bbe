"""What a tokenizer process tells of itself, with what schedulers told, to every api process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from penstock.engine_core.placement.placement import PlacementStatistics
from penstock.protocol.figures import Census, ProcessFigures
from penstock.services.links.async_link import Watch
from penstock.services.metrics.snapshot import Sheet, Vitals, add_link
from penstock.services.tokenizer.grammar_compiler import Compiler, CompilerStatistics
from penstock.services.tokenizer.server_loop import Relay, RelayStatistics
from penstock.services.tokenizer.templates import Templates, TemplateStatistics

TOTALS: Mapping[str, str] = {
    "submitted": "tokenizer_submitted_requests",
    "rejected": "tokenizer_rejected_requests",
    "aborted": "tokenizer_aborted_requests",
    "failed": "tokenizer_failed_requests",
    "stop_hits": "tokenizer_stop_strings",
    "prompt_tokens": "tokenizer_prompt_tokens",
    "output_tokens": "tokenizer_output_tokens",
}


class Figures:
    """The parts of the process that have any."""

    def __init__(
        self,
        vitals: Vitals,
        relay: Relay,
        compiler: Compiler,
        templates: Templates,
        text: Watch,
        tokens: Sequence[Watch],
    ) -> None:
        self._vitals = vitals
        self._relay = relay
        self._compiler = compiler
        self._templates = templates
        self._text = text
        self._tokens = tuple(tokens)

    def tell(self) -> None:
        """Send them on; who has no credit left gets the next ones."""
        peers = [peer for peer in self._text.peers if peer.credit > 0]
        if peers:
            schedulers = [peer for watch in self._tokens for peer in watch.peers]
            others = self._relay.register.processes(schedulers)
            self._text.send_each(peers, Census((self._own(time.time()), *others)))

    def _own(self, wall: float) -> ProcessFigures:
        sheet, found = self._vitals.sheet(), self._relay.statistics()
        add_link(sheet, "text", [self._text.statistics()], found.frontend.outward)
        add_link(sheet, "tokens", [watch.statistics() for watch in self._tokens], found.frontend.dispatch.upward)
        add_texts(sheet, found)
        add_placement(sheet, found.frontend.dispatch.placement)
        add_grammars(sheet, self._compiler.statistics())
        add_templates(sheet, self._templates.statistics())
        return sheet.figures(self._vitals.me, wall)


def add_texts(sheet: Sheet, found: RelayStatistics) -> None:
    """Requests and their tokens."""
    frontend = found.frontend
    sheet.put("tokenizer_requests", frontend.requests)
    sheet.put("tokenizer_stalls", found.stalls)
    for field, name in TOTALS.items():
        sheet.put(name, getattr(frontend, field))
    sheet.put("waiting_requests", frontend.encoding - found.compiling, "text")
    sheet.put("waiting_requests", found.compiling, "grammar")
    sheet.put("waiting_requests", frontend.dispatch.held, "engine")
    sheet.put("tokenizer_moved_requests", frontend.dispatch.moved)


def add_placement(sheet: Sheet, found: PlacementStatistics) -> None:
    """Where requests went, and why."""
    for number, replica in enumerate(found.replicas):
        sheet.put("placement_requests", replica.placed, str(number))
    sheet.put("placement_tokens", found.tokens)
    sheet.put("placement_expected_tokens", found.expected)
    sheet.put("placement_prefixes", found.prefixes)
    sheet.put("placement_sessions", found.sessions)
    sheet.put("placement_spills", found.spills)


def add_grammars(sheet: Sheet, found: CompilerStatistics) -> None:
    """Compilations."""
    sheet.put("grammar_workers", found.workers)
    sheet.put("grammar_compiles", found.compiled, "done")
    sheet.put("grammar_compiles", found.refused, "refused")
    sheet.put("grammar_cache_hits", found.hits)
    sheet.put("grammar_cache_entries", found.remembered)
    sheet.put("grammar_cache_bytes", found.bytes)
    sheet.put("grammar_workers_replaced", found.replaced)
    sheet.spread("grammar_compile_seconds", found.seconds)


def add_templates(sheet: Sheet, found: TemplateStatistics) -> None:
    """Renderings by requests' own templates."""
    sheet.put("template_workers", found.workers)
    sheet.put("template_cache_bytes", found.remembered)
    sheet.put("template_renderings", found.rendered, "done")
    sheet.put("template_renderings", found.refused - found.ended, "refused")
    sheet.put("template_renderings", found.ended, "limit")
