"""What a crash leaves behind: enough to see what ran, and nobody's words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.protocol.messages import Sampling
from penstock.protocol.steps import ExecutorReady, SlotStart, StepPlan
from penstock.services.executor.crash_report import FOLDER, MAX_PLANS, MAX_REPORTS, WITHHELD, Reports

SECRET = 271828
READY = ExecutorReady(
    epoch=7, blocks=64, block_size=16, step_tokens=64, device="cpu", dtype="float32", weight_bytes=1, cache_bytes=2,
    load_seconds=0.5,
)  # fmt: skip


def plan(step: int) -> StepPlan:
    sampling = Sampling(temperature=0.5, bad_words=((SECRET,),), logit_bias=((SECRET, 1.0),))
    start = SlotStart(
        slot=3, token_ids=np.array([SECRET, 5], np.int32).tobytes(), prompt_tokens=1, computed=0,
        blocks=np.array([1], np.int32).tobytes(), sampling=sampling, seed=0,
    )  # fmt: skip
    return StepPlan(
        step=step, epoch=7, starts=(start,), decode_on=np.array([1, 2], np.int32).tobytes(),
        chunks=np.array([[3, 0, 2, 1]], np.int32).tobytes(), drafts=np.array([[1, 1]], np.int32).tobytes(),
        draft_ids=np.array([SECRET], np.int32).tobytes(), blocks=np.array([[1, 9]], np.int32).tobytes(),
    )  # fmt: skip


def written(folder: Path, *, prompts: bool, steps: int = 1) -> dict[str, Any]:
    reports = Reports(folder, "executor-0", READY, prompts=prompts)
    reports.plans.extend(plan(step) for step in range(steps))
    path = reports.write("crashed", "Traceback: here", (2, 1))
    assert path is not None
    assert path.parent == folder / FOLDER
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_it_says_what_ran_without_anybodys_words(tmp_path: Path) -> None:
    report = written(tmp_path, prompts=False, steps=20)
    assert (report["reason"], report["process"], report["pid"]) == ("crashed", "executor-0", os.getpid())
    assert (report["epoch"], report["slots"], report["trace"]) == (7, [1, 2], "Traceback: here")
    assert set(report["versions"]) == {"penstock", "python", "torch", "cuda"}
    assert report["device"]["name"] == "cpu"
    assert [each["step"] for each in report["plans"]] == list(range(20 - MAX_PLANS, 20))
    last = report["plans"][-1]
    assert (last["decode_on"], last["chunks"], last["drafts"], last["blocks"]) == ([1, 2], [[3, 0, 2, 1]], [[1, 1]], 1)
    (start,) = last["starts"]
    assert (start["slot"], start["prompt_tokens"], start["tokens"]) == (3, 1, 2)
    assert start["sampling"]["temperature"] == 0.5
    assert start["sampling"]["bad_words"] == WITHHELD
    assert str(SECRET) not in json.dumps(report)


def test_prompts_stand_there_when_they_were_asked_for(tmp_path: Path) -> None:
    (start,) = written(tmp_path, prompts=True)["plans"][0]["starts"]
    assert start["token_ids"] == [SECRET, 5]


def test_before_the_first_plan(tmp_path: Path) -> None:
    assert written(tmp_path, prompts=False, steps=0)["plans"] == []


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    for number in range(MAX_REPORTS + 4):
        old = folder / f"executor-0-{number}.json"
        old.touch()
        os.utime(old, (number, number))
    written(tmp_path, prompts=False)
    kept = {path.name for path in folder.iterdir()}
    assert len(kept) == MAX_REPORTS
    assert "executor-0-4.json" not in kept
    assert "executor-0-19.json" in kept


def test_a_disk_that_takes_none_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    assert Reports(tmp_path, "executor-0", READY, prompts=False).write("hung", "", ()) is None
    assert "no_report" in caplog.text
