"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 differ only in biases and in the norm of query and key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention import AttentionBackend
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.row_counts import RowCounts
from pagestream_engine.models.config import ModelInfo


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: Tensor
    qkv: Linear
    """Query, key and value projections as one, rows in this order."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    """Gate and up projections as one, rows in this order."""
    down: Linear


class LlamaModel:
    """The forward pass over packed tokens. Weights come from `loader`, everything between them from the backend."""

    def __init__(self, info: ModelInfo, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Linear) -> None:
        """`embedding` is (vocab_size, hidden_size), `head` maps a hidden state to logits."""
        self.info = info
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self._row_counts: dict[tuple[object, ...], RowCounts] = {}

    def forward(self, token_ids: Tensor, rows: Tensor, backend: AttentionBackend[Any], plan: Any) -> Tensor:
        """Run all layers.

        Args:
            token_ids: (tokens,) int64, packed.
            rows: (rows,) int64: the tokens whose hidden state is wanted. The others end with their keys and values in
                the last layer: what comes after would be thrown away.
            backend: whose cache holds the earlier tokens, and takes these.
            plan: `backend.plan` of this step.

        Returns:
            (rows, hidden_size), before the last norm.
        """
        eps = self.info.rms_norm_eps
        residual = F.embedding(token_ids, self.embedding)
        x = backend.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            if index:
                x, residual = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attend(index, layer, x, backend, plan)
            if layer is self.layers[-1] and len(rows) < len(token_ids):
                x, residual = x[rows], residual[rows]
            x = layer.output(x)
            x, residual = backend.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(backend.silu_and_mul(layer.gate_up(x)))
        return x.add_(residual)

    def logits(self, hidden: Tensor, backend: AttentionBackend[Any]) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size), for the rows that are sampled."""
        return self.head(backend.rms_norm(hidden, self.norm, self.info.rms_norm_eps))

    def probe_row_counts(self) -> list[RowCounts]:
        """Try, for each shape of linear, which row counts agree bit for bit; see `use_row_counts`."""
        found: dict[tuple[object, ...], RowCounts] = {}
        for linear in self.linears():
            key = _kernel_key(linear)
            if key not in found:
                found[key] = RowCounts(linear.product, linear.shape[1], self.embedding.dtype)
        self._row_counts = found
        return list(found.values())

    def use_row_counts(self) -> None:
        """Make every linear give a row the same bits in any batch, after `probe_row_counts`."""
        for linear in self.linears():
            linear.row_counts = self._row_counts[_kernel_key(linear)]

    def linears(self) -> Iterator[Linear]:
        """All of them, the head last."""
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    def weight_bytes(self) -> int:
        """Bytes of all weights; a head that is the embedding counts once."""
        norms = [
            norm for layer in self.layers for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
        ]
        biases = [linear.bias for linear in self.linears()]
        single = [tensor for tensor in (self.embedding, self.norm, *norms, *biases) if tensor is not None]
        products = [linear for linear in self.linears() if linear.weight is not self.embedding]
        in_products = sum(linear.shape[0] * linear.shape[1] for linear in products) * self.embedding.itemsize
        return in_products + sum(tensor.numel() * tensor.itemsize for tensor in single)

    def _attend(self, index: int, layer: Layer, x: Tensor, backend: AttentionBackend[Any], plan: Any) -> Tensor:
        info = self.info
        heads = layer.qkv(x).view(x.shape[0], -1, info.head_dim)
        query, key, value = heads.tensor_split((info.num_heads, info.num_heads + info.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = backend.rms_norm(query, layer.q_norm, info.rms_norm_eps)
            key = backend.rms_norm(key, layer.k_norm, info.rms_norm_eps)
        return backend.attend(index, query, key, value, plan)


def _kernel_key(linear: Linear) -> tuple[object, ...]:
    """What a library chooses its kernel by, apart from the number of rows."""
    return linear.shape, linear.packed, linear.by_onednn, linear.bias is not None
