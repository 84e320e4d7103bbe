"""The network as it is trained: Qwen3's layers (RMS norm, QK norm, rotary positions, grouped queries, gated MLP, tied
embeddings) over packed rows. Parameter names are Hugging Face's, so that the export is a copy.

Qwen3: https://arxiv.org/abs/2505.09388. Rotary positions: https://arxiv.org/abs/2104.09864.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = BlockMask | torch.Tensor  # a tensor is [rows, 1, tokens, tokens], true where attention may look


@dataclass(frozen=True)
class Shape:
    """Sizes of a network."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head: int = 64
    vocabulary: int = 4096
    context: int = 4096
    rope_theta: float = 100_000.0
    epsilon: float = 1e-6


TARGET = Shape(hidden=320, layers=6, heads=8, kv_heads=4, intermediate=896)
DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=2, intermediate=320)


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._epsilon).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves layout. x: [rows, heads, tokens, head]; cos, sin: [tokens, head / 2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head, shape.epsilon)
        self.k_norm = Norm(shape.head, shape.epsilon)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        rows, tokens, _ = x.shape
        split = (rows, tokens, -1, self._shape.head)
        query = rotate(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)  # [rows, heads, tokens, head]
        key = rotate(
            self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin
        )  # [rows, kv_heads, tokens, head]
        value = self.v_proj(x).view(split).transpose(1, 2)  # [rows, kv_heads, tokens, head]
        if isinstance(mask, BlockMask):
            mixed = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class Mlp(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Token ids to logits over packed rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)
        frequency = shape.rope_theta ** -(torch.arange(0, shape.head, 2).float() / shape.head)
        angle = torch.outer(torch.arange(shape.context).float(), frequency)  # [context, head / 2]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Normal weights; the projections that write to the residual stream are scaled down by its depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                depth = (2 * self.shape.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                spread = 0.02 if name == "embed_tokens.weight" else 0.6 * parameter.shape[1] ** -0.5
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread * depth)

    def forward(self, ids: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Logits [rows, tokens, vocabulary] for ids [rows, tokens]."""
        tokens = ids.shape[1]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def document_mask(documents: torch.Tensor) -> Mask:
    """Causal attention inside each document. documents: [rows, tokens], equal numbers mark one document.

    Without a GPU the mask is dense, as FlexAttention trains on GPUs only.
    """
    rows, tokens = documents.shape
    if not documents.is_cuda:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same & torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    return create_block_mask(visible, rows, None, tokens, tokens, device=str(documents.device))
