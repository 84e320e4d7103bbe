"""What an executor leaves behind when it fails: a file that says what it was doing.

The newest few reports stay in the run directory. They hold token ids only with --report-prompts.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from penstock.protocol.step_columns import chunk_table, draft_table, drafting_table, integers
from penstock.protocol.steps import ExecutorReady, SlotStart, StepPlan
from penstock.protocol.version import VERSION
from penstock.services.supervisor import logs
from penstock.services.supervisor.run_directory import private

log = logging.getLogger(__name__)

FOLDER = "crashes"
MAX_REPORTS = 16
MAX_PLANS = 8  # in a report: the last ones
WITHHELD = "<withheld: --report-prompts>"


class Reports:
    """Writes one executor's reports, and keeps the last plans for them."""

    def __init__(self, run_dir: Path, process: str, ready: ExecutorReady, *, prompts: bool) -> None:
        self._folder = run_dir / FOLDER
        self._process = process
        self._ready = ready
        self._prompts = prompts
        self.plans: deque[StepPlan] = deque(maxlen=MAX_PLANS)

    def write(self, reason: str, trace: str, slots: Sequence[int]) -> Path | None:
        """Write a report; its path, or None if that fails. Asks nothing of the device, which may not answer."""
        report = {
            "reason": reason,
            "process": self._process,
            "pid": os.getpid(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "epoch": self.plans[-1].epoch if self.plans else 0,
            "versions": versions(),
            "device": device_state(self._ready),
            "slots": sorted(slots),  # that were decoding
            "plans": [record(plan, self._prompts) for plan in self.plans],  # oldest first
            "trace": trace,
        }
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._folder / f"{self._process}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.json"
            with open(path, "xb", opener=private) as file:
                file.write(msgspec.json.format(msgspec.json.encode(report), indent=1))
            for old in sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MAX_REPORTS]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logs.error(log, "no_report", reason=error.strerror)
            return None
        logs.error(log, "report", reason=reason, file=str(path))
        return path


def versions() -> dict[str, str]:
    return {
        "penstock": VERSION,
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
    }


def device_state(ready: ExecutorReady) -> dict[str, object]:
    """What this process knows of the device without asking it."""
    state: dict[str, object] = {
        "name": ready.device,
        "dtype": ready.dtype,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "blocks": ready.blocks,
        "weight_bytes": ready.weight_bytes,
        "cache_bytes": ready.cache_bytes,
    }
    if ready.device != "cpu":
        state["allocated_bytes"] = torch.cuda.memory_allocated()
        state["reserved_bytes"] = torch.cuda.memory_reserved()
        state["peak_bytes"] = torch.cuda.max_memory_allocated()
    return state


def record(plan: StepPlan, prompts: bool) -> dict[str, object]:
    """A plan as a report shows it: what is empty is left out."""
    found: dict[str, object] = {
        "starts": [start_record(start, prompts) for start in plan.starts],
        "decode_on": integers(plan.decode_on).tolist(),
        "decode_off": integers(plan.decode_off).tolist(),
        "chunks": chunk_table(plan.chunks).tolist(),  # slot, start, count, sample
        "blocks": len(plan.blocks) // 8,  # whatever is wrong with the column, which may be what broke the step
        "drafts": draft_table(plan.drafts).tolist(),  # slot, count
        "masked": integers(plan.masked).tolist(),
        "drafting": len(drafting_table(plan.drafting)),  # rows
    }
    return {"step": plan.step, "epoch": plan.epoch, **{name: value for name, value in found.items() if value}}


def start_record(start: SlotStart, prompts: bool) -> dict[str, object]:
    """A request that entered a slot."""
    sampling = msgspec.structs.asdict(start.sampling)
    if not prompts:  # these hold parts of prompts, too
        sampling |= {name: WITHHELD for name in ("bad_words", "logit_bias", "allowed_token_ids") if sampling.get(name)}
    return {
        "slot": start.slot,
        "prompt_tokens": start.prompt_tokens,
        "tokens": len(integers(start.token_ids)),
        "computed": start.computed,
        "sampling": sampling,
        **({"token_ids": integers(start.token_ids).tolist()} if prompts else {}),
    }
