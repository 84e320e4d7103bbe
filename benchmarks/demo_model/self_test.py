"""Write the canary of a model folder: a prompt, and what the model says to it greedily. Each start asks for it.

python -m benchmarks.demo_model.self_test FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from penstock import LLM, SamplingParams
from penstock.engine_core.execution.self_test import FILE, Canary

QUESTION = "What is 128 + 457?"


def canary(folder: Path) -> Canary:
    """What the model in `folder` says to the question, its end included."""
    (folder / FILE).unlink(missing_ok=True)
    with LLM(str(folder), max_num_seqs=1, device="cpu", verify_weights=False) as llm:
        asked = [{"role": "user", "content": QUESTION}]
        (answer,) = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    said = answer.outputs[0]
    assert said.finish_reason == "stop", "the answer of a canary has an end"
    return Canary(list(answer.prompt_token_ids or ()), list(said.token_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = canary(folder)
    (folder / FILE).write_bytes(msgspec.json.encode(found) + b"\n")
    print(f"{len(found.prompt_token_ids)} tokens of prompt, {len(found.token_ids)} of answer")


if __name__ == "__main__":
    main()
