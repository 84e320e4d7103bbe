"""host.py and engine.py from outside: a program that starts an engine and is killed, or just ends, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.llm.processes import LIMIT, dead, engine_process, engine_processes, gone

ROOT = Path(__file__).resolve().parents[3]
# No guard around the main part, and the engine is made by a thread that ends: both have ended engines of other makers.
SCRIPT = """
import sys, threading, time
from penstock import LLM, SamplingParams
made = []
thread = threading.Thread(target=lambda: made.append(LLM(max_num_seqs=2, tokenizer_processes=1)))
thread.start()
thread.join()
llm = made[0]
print(llm._engine.launcher.directory, flush=True)
word = sys.stdin.readline().strip()
if word == "generate":
    print(len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids))
elif word == "raise":
    raise RuntimeError("the program fails")
elif word == "run":
    print(llm.generate("x", SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False))
"""


@pytest.fixture
def program(tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"},
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def test_a_script_that_ends_leaves_nothing(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    run_dir = program.stdout.readline().strip()
    assert len(engine_processes(run_dir)) == 4
    out, said = program.communicate("generate\n", timeout=LIMIT)
    assert (program.returncode, out.strip()) == (0, "3"), said
    gone(run_dir)


def test_a_script_that_fails_leaves_nothing(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    run_dir = program.stdout.readline().strip()
    _, said = program.communicate("raise\n", timeout=LIMIT)
    assert "the program fails" in said
    assert program.returncode == 1
    gone(run_dir)


def test_a_program_that_is_killed_leaves_nothing(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    assert program.stdin is not None
    run_dir = program.stdout.readline().strip()
    program.stdin.write("run\n")
    program.stdin.flush()
    program.send_signal(signal.SIGKILL)
    program.wait()
    gone(run_dir)


def test_a_launcher_that_is_killed_leaves_nothing(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    run_dir = program.stdout.readline().strip()
    launcher = engine_process(run_dir, "engine")
    os.kill(launcher, signal.SIGKILL)
    dead(run_dir)
    _, said = program.communicate("generate\n", timeout=LIMIT)
    assert "the engine ended" in said
    gone(run_dir)
