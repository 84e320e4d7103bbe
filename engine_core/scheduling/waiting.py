"""What those in the queue wait for."""

from __future__ import annotations

from itertools import islice

from penstock.engine_core.scheduling.admission import LOOKAHEAD
from penstock.engine_core.scheduling.state import State

REASONS = ("trial", "slot", "blocks", "step", "prefix")


def reasons(state: State) -> dict[str, int]:
    """Choices in the queue by what they wait for. Nobody overtakes, so all wait for what the first one lacks, but those
    that wait for a prefix which somebody else is computing.

    trial: one of those that executors may have died of runs alone. slot: --max-num-seqs run. blocks: there is no KV
    cache for more. step: there is room, and the next step will have it, or the one after that.
    """
    waiting = len(state.queue)
    if not waiting:
        return {}
    behind = sum(choice.behind is not None for choice in islice(state.queue, LOOKAHEAD))
    if state.accused:
        reason = "trial"
    elif not state.slots.free:
        reason = "slot"
    elif state.refused is not None or state.tight:
        reason = "blocks"
    else:
        reason = "step"
    return {name: count for name, count in ((reason, waiting - behind), ("prefix", behind)) if count}
