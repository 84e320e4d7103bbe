"""What the scheduler process tells of itself and of its engine, with what its executors told, to every tokenizer."""

from __future__ import annotations

from penstock.engine_core.scheduling.admission import REASONS
from penstock.protocol.figures import Census
from penstock.protocol.messages import EngineStatus, Finish
from penstock.services.links.link import Port
from penstock.services.metrics.snapshot import INTERVAL, Sheet, Vitals, add_link
from penstock.services.scheduler.server_loop import Loop, LoopStatistics

STATUS_GAUGES = ("ready", "running", "waiting", "blocks", "blocks_free", "blocks_idle", "drain_rate", "epoch")
STATUS_TOTALS = (
    "step", "prompt_tokens", "cached_tokens", "output_tokens", "finished", "aborted", "failed", "preemptions",
    "drafts", "draft_tokens", "accepted_tokens",
)  # fmt: skip
BRAIN_FIGURES = (
    "prefix_lookups", "prefix_hits", "scheduled_tokens", "surplus_tokens", "rejected", "condemned", "stale_results",
    "yielded", "waiting_clients",
)  # fmt: skip
PHASES = ("queue", "prefill", "decode", "inference")
ENDS = (Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.ERROR, Finish.GRAMMAR, Finish.UNAVAILABLE)  # of choices here


class Figures:
    """Owner of the time at which they are told next, and of what the device had done at the last one."""

    def __init__(self, vitals: Vitals, loop: Loop, tokens: Port, steps: Port, now: float) -> None:
        self._vitals = vitals
        self._loop = loop
        self._tokens = tokens
        self._steps = steps
        self._next = now + INTERVAL
        self._looked = now
        self._busy = 0.0

    def tick(self, now: float, wall: float) -> None:
        """Tell them if it is time; monotonic and unix seconds."""
        if now < self._next:
            return
        self._next = now + INTERVAL
        peers = [peer for peer in self._tokens.peers if peer.credit > 0]
        if not peers:
            return
        sheet, found = self._vitals.sheet(), self._loop.statistics()
        sheet.put("engine_device_idle_ratio", self._idle(found.times.busy, now))
        add_link(sheet, "tokens", [self._tokens.statistics()], found.queued)
        add_link(sheet, "steps", [self._steps.statistics()], 0)
        add_engine(sheet, self._loop.status(now, wall), found)
        own = sheet.figures(self._vitals.me, wall)
        self._tokens.send_each(peers, Census((own, *self._loop.register.processes(self._steps.peers))))

    def _idle(self, busy: float, now: float) -> float:
        """Share of the time since it was last asked in which the device ran no step."""
        passed, worked = now - self._looked, busy - self._busy
        self._looked, self._busy = now, busy
        return min(1.0, max(0.0, 1.0 - worked / passed)) if passed > 0 else 1.0


def add_engine(sheet: Sheet, status: EngineStatus, found: LoopStatistics) -> None:
    """Everything under `engine_`, the parts of steps, and who waits for what."""
    for name in (*STATUS_GAUGES, *STATUS_TOTALS):
        sheet.put(f"engine_{name}", getattr(status, name))
    sheet.put("engine_slots", status.max_num_seqs)
    sheet.put("engine_step_age_seconds", status.step_age)
    used = status.blocks - status.blocks_free - status.blocks_idle
    sheet.put("engine_kv_used_ratio", used / status.blocks if status.blocks else 0.0)
    for place, count in enumerate(status.accepted_at):
        sheet.put("engine_accepted_tokens_by_position", count, str(place))
    for part, histogram in found.times.parts.items():
        sheet.spread("step_part_seconds", histogram, part)
    sheet.spread("step_part_seconds", found.masks.steps, "mask")
    sheet.put("engine_device_busy_seconds", found.times.busy)
    sheet.put("engine_device_stalled_seconds", found.times.stalled)
    sheet.put("engine_block_faults", found.faults)
    sheet.put("engine_grammar_cache_entries", found.guides.remembered)
    sheet.put("engine_grammar_cache_bytes", found.guides.bytes)
    sheet.put("engine_guides_built", found.guides.built)
    sheet.put("engine_guide_hits", found.guides.hits)
    sheet.put("engine_guide_failures", found.guides.failed)
    sheet.put("engine_masked_rows", found.masks.rows)
    sheet.put("engine_mask_seconds", found.masks.seconds)
    sheet.put("waiting_requests", found.guides.waiting, "grammar")
    brain = found.brain
    if brain is None:
        return
    for name in BRAIN_FIGURES:
        sheet.put(f"engine_{name}", getattr(brain, name))
    sheet.put("engine_blocks_quarantined", brain.pool.quarantined)
    sheet.put("engine_evicted_blocks", brain.prefix.evicted)
    for finish in ENDS:
        sheet.put("engine_ended", brain.finishes.get(finish, 0), finish.name.lower())
    for phase in PHASES:
        sheet.spread(f"engine_{phase}_seconds", getattr(brain.durations, phase))
    sheet.spread("engine_request_prompt_tokens", brain.lengths.prompt)
    sheet.spread("engine_request_output_tokens", brain.lengths.output)
    for reason in REASONS:
        sheet.put("waiting_requests", brain.reasons.get(reason, 0), reason)
