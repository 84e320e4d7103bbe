"""Train the demo model, or its draft, on one GPU.

    python -m benchmarks.demo_model.train --out FOLDER
    python -m benchmarks.demo_model.train --draft --teacher FOLDER --out FOLDER

The text is made while the training runs. A line every 50 steps shows loss and speed; scores on held-out text follow
every `--score-every` steps. The same arguments give the same data; the weights differ by the GPU's rounding.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional

from benchmarks.demo_model import folder, scores, tokenizer
from benchmarks.demo_model.batches import IGNORED, Batch, loader
from benchmarks.demo_model.network import DRAFT, TARGET, Network, document_mask
from benchmarks.demo_model.optimizer import Optimizer

_Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # ids, labels, document numbers -> loss


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--draft", action="store_true", help="train the draft instead of the demo model")
    parser.add_argument("--teacher", type=Path, help="the demo model's folder, for --draft")
    parser.add_argument("--start", type=Path, help="a folder to start from instead of random weights")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json (default: the teacher's, the start's or a new one)"
    )
    parser.add_argument("--steps", type=int, default=6000, help="steps (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="anneal early if time runs out (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=14, help="processes that make text (default: %(default)s)")
    parser.add_argument(
        "--score-every", type=int, default=500, help="steps between scores, 0: at the end only (default: %(default)s)"
    )
    parser.add_argument("--quiz", type=int, default=64, help="held-out conversations per suite (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="do not compile (always so without a GPU)")
    return parser.parse_args()


def rate_at(progress: float, peak: float) -> float:
    """Warm-up over the first 2 %, flat to the middle, then linearly down to zero. progress: 0 to 1."""
    return peak * min(1.0, progress / 0.02 + 0.01, (1.0 - progress) / 0.5)


def cross_entropy(network: Network) -> _Objective:
    """The loss on what the model has to say."""

    def objective(ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        logits = network(ids, document_mask(documents))  # [rows, context, vocabulary]
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    return objective


def distillation(network: Network, teacher: Network) -> _Objective:
    """Cross entropy against the teacher's distribution where the model has to speak (https://arxiv.org/abs/1503.02531)."""

    def objective(ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        mask = document_mask(documents)
        with torch.no_grad():
            wanted = teacher(ids, mask).float().softmax(dim=-1)  # [rows, context, vocabulary]
        said = network(ids, mask).float().log_softmax(dim=-1)
        spoken = (labels != IGNORED).float()
        return -((wanted * said).sum(dim=-1) * spoken).sum() / spoken.sum()

    return objective


def _to(device: torch.device, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (batch.ids, batch.labels, batch.documents)
    ids, labels, documents = (tensor.to(device, non_blocking=True).long() for tensor in tensors)
    return ids, labels, documents.int()


def _log(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def fit(arguments: argparse.Namespace, network: Network, objective: _Objective, tokenizer_file: Path) -> None:
    """Train `network` in place, with progress lines and scores."""
    device = next(network.parameters()).device
    batches = loader(tokenizer_file, arguments.rows, arguments.context, arguments.seed, arguments.workers)
    questions = scores.quiz(tokenizer_file, arguments.quiz, arguments.context)
    optimizer = Optimizer(network)
    step_loss = objective if arguments.eager or device.type != "cuda" else torch.compile(objective, dynamic=False)
    begin = mark = time.monotonic()
    total, waited, tokens = torch.zeros((), device=device), 0.0, arguments.rows * arguments.context
    for step in range(arguments.steps):
        asked = time.monotonic()
        ids, labels, documents = _to(device, next(batches))
        waited += time.monotonic() - asked
        if step == 1:  # compiling is over
            begin = time.monotonic()
        progress = max(step / arguments.steps, (time.monotonic() - begin) / (60 * arguments.minutes))
        if progress >= 1.0:
            _log(stopped=step, reason="out of time")
            break
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_loss(ids, labels, documents)
        loss.backward()
        optimizer.step(rate_at(progress, arguments.rate))
        total += loss.detach()
        if (step + 1) % 50 == 0 or step == 0:
            count = 1 if step == 0 else 50 if step > 50 else 49
            average = total.item() / count
            now = time.monotonic()
            _log(step=step + 1, loss=round(average, 4), tokens_per_s=round(count * tokens / (now - mark)),
                 waiting=round(waited / (now - mark), 2), minutes=round((now - begin) / 60, 2),
                 rate=round(rate_at(progress, arguments.rate), 6))  # fmt: skip
            mark, waited = now, 0.0
            total.zero_()
        if arguments.score_every and (step + 1) % arguments.score_every == 0:
            _log(step=step + 1, scores={k: round(v, 3) for k, v in scores.take(network, questions, device).items()})
            folder.write(network, tokenizer_file, arguments.out)
            mark = time.monotonic()
    _log(tokens=(step + 1) * tokens, minutes=round((time.monotonic() - begin) / 60, 2))
    folder.write(network, tokenizer_file, arguments.out)
    _log(scores={k: round(v, 3) for k, v in scores.take(network, questions, device).items()})


def main() -> None:
    arguments = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer_file = arguments.tokenizer
    if tokenizer_file is None and (known := arguments.teacher or arguments.start) is not None:
        tokenizer_file = known / "tokenizer.json"
    if tokenizer_file is None:
        tokenizer_file = arguments.out / "tokenizer.json"
        tokenizer.train().save(str(tokenizer_file))
    if arguments.start is not None:
        network = folder.read(arguments.start)
    else:
        network = Network(DRAFT if arguments.draft else TARGET)
        network.initialise(arguments.seed)
    network.to(device)
    _log(parameters=sum(parameter.numel() for parameter in network.parameters()), device=str(device))
    if arguments.draft:
        if arguments.teacher is None:
            raise SystemExit("--draft needs --teacher")
        teacher = folder.read(arguments.teacher).to(device).requires_grad_(False)
        objective = distillation(network, teacher)
    else:
        objective = cross_entropy(network)
    fit(arguments, network, objective, tokenizer_file)


if __name__ == "__main__":
    main()
