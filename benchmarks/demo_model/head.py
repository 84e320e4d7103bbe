"""Train an EAGLE head for the demo model, on a GPU or on a CPU's cores.

    python -m benchmarks.demo_model.head --teacher engine_core/embedded/demo --out engine_core/embedded/eagle

The head is that of EAGLE (https://arxiv.org/abs/2401.15077), written under the names of published heads: from a token
and the teacher's last hidden state at the position before it, the next such state, which the teacher's output embedding
reads. It learns the teacher's distribution where the teacher has to speak, and its states; then the same again from its
own states in place of the teacher's, as it will meet them behind its own drafts. The text is made while the
training runs, and each batch, with what the teacher said of it, is learned from a few times.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.demo_model import folder
from benchmarks.demo_model.batches import IGNORED, Batch, loader
from benchmarks.demo_model.network import Mask, Mlp, Network, Norm, Shape, document_mask, rotate
from benchmarks.demo_model.optimizer import Optimizer

HEADS, KV_HEADS, WIDTH = 4, 2, 288
SHARES = (1.0, 0.8, 0.6, 0.4)  # of the loss from the teacher's states, then from its own, again and again
STATE_SHARE = 0.5  # of the distance between states


@dataclass(frozen=True)
class Lesson:
    """A batch and what the teacher makes of it."""

    ids: torch.Tensor  # [rows, tokens]
    spoken: torch.Tensor  # bool [rows, tokens], whether the next token is the teacher's to say
    documents: torch.Tensor  # [rows, tokens]
    states: torch.Tensor  # [rows, tokens, hidden], behind the last norm


class PlainAttention(nn.Module):
    """Llama's: grouped queries without norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._head = shape.head
        self.q_proj = nn.Linear(shape.hidden, HEADS * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, KV_HEADS * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, KV_HEADS * shape.head, bias=False)
        self.o_proj = nn.Linear(HEADS * shape.head, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        rows, tokens, _ = x.shape
        query, key, value = (
            part(x).view(rows, tokens, -1, self._head).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )  # [rows, heads, tokens, head]
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class Layer(nn.Module):
    """Attention over the joined input as it is, then the gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = PlainAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        x = x + self.self_attn(x, cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """States from tokens and the states before them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(Shape(**asdict(shape) | {"intermediate": WIDTH}))])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=generator) * 0.6 * parameter.shape[1] ** -0.5
                    )

    def forward(
        self, embedded: torch.Tensor, before: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        """[rows, tokens, hidden] of two such."""
        return self.layers[0](self.fc(torch.cat((embedded, before), dim=-1)), cos, sin, mask)


def hidden_states(network: Network, ids: torch.Tensor, mask: Mask) -> torch.Tensor:
    """What the network's last norm gives: [rows, tokens, hidden]."""
    tokens = ids.shape[1]
    x = network.embed_tokens(ids)
    for layer in network.layers:
        x = layer(x, network.cos[:tokens], network.sin[:tokens], mask)
    return network.norm(x)


def lesson(teacher: Network, batch: Batch, device: torch.device) -> Lesson:
    """Dense masks: rows are short."""
    ids, labels = batch.ids.to(device).long(), batch.labels.to(device)
    documents = batch.documents.to(device).int()
    with torch.no_grad():
        states = hidden_states(teacher, ids, dense_mask(documents))
    return Lesson(ids, labels != IGNORED, documents, states)


def dense_mask(documents: torch.Tensor) -> torch.Tensor:
    """Causal attention inside each document: bool [rows, 1, tokens, tokens]."""
    if not documents.is_cuda:
        found = document_mask(documents)
        assert isinstance(found, torch.Tensor)
        return found
    tokens = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()


def shifted(states: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Each position gets the state before it, the first of a document zeros."""
    before = functional.pad(states[:, :-1], (0, 0, 1, 0))
    first = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return before.masked_fill(first[..., None], 0.0)


def learn(head: Head, teacher: Network, given: Lesson, turns: int) -> tuple[torch.Tensor, list[float]]:
    """The loss, and how often the best token is the teacher's: from its states, then from the head's own."""
    tokens = given.ids.shape[1]
    cos, sin, mask = teacher.cos[:tokens], teacher.sin[:tokens], dense_mask(given.documents)
    output = teacher.embed_tokens.weight
    with torch.no_grad():
        embedded = teacher.embed_tokens(given.ids)
        wanted = functional.linear(given.states[given.spoken], output)  # [spoken, vocabulary]
        chances, best = wanted.softmax(-1), wanted.argmax(-1)
    loss, found, states = torch.zeros((), device=output.device), [], given.states
    for share in SHARES[:turns]:
        states = head(embedded, shifted(states, given.documents), cos, sin, mask)
        said = functional.linear(states[given.spoken], output)
        distance = functional.smooth_l1_loss(states[given.spoken], given.states[given.spoken])
        loss = loss + share * (functional.cross_entropy(said, chances) + STATE_SHARE * distance)
        found.append(float((said.argmax(-1) == best).float().mean()))
    return loss, found


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "head_dim": shape.head,
        "hidden_act": "silu", "hidden_size": shape.hidden, "intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon, "rope_theta": shape.rope_theta, "tie_word_embeddings": True,
        "vocab_size": shape.vocabulary,
    }  # fmt: skip


def write(head: Head, out: Path) -> None:
    """config.json and the weights in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config(head.shape), indent=2) + "\n")
    weights = {name: value.detach().bfloat16().cpu().contiguous() for name, value in head.named_parameters()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    folder.write_sums(out)


def fit(arguments: argparse.Namespace, teacher: Network, head: Head) -> None:
    """Train `head` in place until the time is over, with a line every few steps."""
    device = next(teacher.parameters()).device
    batches = loader(arguments.teacher / "tokenizer.json", arguments.rows, arguments.context, arguments.seed, 0)
    optimizer, chance, known = Optimizer(head), Random(arguments.seed), list[Lesson]()
    begin, step, done = time.monotonic(), 0, 0.0
    while done < 1.0:
        known.append(lesson(teacher, next(batches), device))
        for given in (known[-1], *chance.choices(known, k=arguments.again)):
            loss, found = learn(head, teacher, given, arguments.turns)
            loss.backward()
            optimizer.step(arguments.rate * min(1.0, (step + 1) / 20, 2 * (1.0 - done) + 0.01))
            step += 1
        done = (time.monotonic() - begin) / (60 * arguments.minutes)
        if len(known) % 10 == 0:
            print(json.dumps({"batches": len(known), "steps": step, "minutes": round(done * arguments.minutes, 2),
                              "loss": round(float(loss.detach()), 4), "agrees": [round(one, 3) for one in found]}),
                  flush=True)  # fmt: skip
            write(head, arguments.out)
    write(head, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="the demo model's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=12.0, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--again", type=int, default=2, help="older batches learned from per new one")
    parser.add_argument("--turns", type=int, default=3, help="drafts to learn to make (default: %(default)s)")
    parser.add_argument("--start", type=Path, help="a folder to start from instead of random weights")
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and data (default: %(default)s)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = folder.read(arguments.teacher).to(device).requires_grad_(False)
    head = Head(teacher.shape, arguments.seed)
    if arguments.start is not None:
        head.load_state_dict(load_file(str(arguments.start / "model.safetensors")))
    head.to(device)
    print(json.dumps({"parameters": sum(one.numel() for one in head.parameters()), "device": str(device)}), flush=True)
    fit(arguments, teacher, head)


if __name__ == "__main__":
    main()
