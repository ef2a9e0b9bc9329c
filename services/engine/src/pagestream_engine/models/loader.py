"""From a model folder to a model: each tensor is read once, into the place where it stays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagestream_engine.errors import DOWNLOAD_AGAIN, WeightsError
from pagestream_engine.layers.linear import Linear
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.llama import Layer, LlamaModel
from pagestream_engine.models.safetensors_file import Entry, FileCache, open_files, read_folder

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # old checkpoints hold what is computed
_COPIED_HEAD_BYTES = 16 << 20
"""Largest tied head that is packed: a stream alone then needs no padding to be deterministic."""


def load_model(folder: Path, info: ModelInfo, *, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """Load the weights of `folder`, in `dtype`, onto `device`.

    At its peak it needs the model's size and one layer's largest matrix once more (while it is laid out for oneDNN).

    Raises:
        ModelFolderError: a file is missing or malformed.
        WeightsError: a tensor is missing, unexpected, or mis-shaped.
    """
    entries = read_folder(folder)
    with open_files() as files:
        reader = WeightReader(entries, files, dtype, device)
        model = _Builder(info, reader).build()
        reader.check_all_used(tied=info.tie_word_embeddings)
    return model


class WeightReader:
    """Hands out tensors by name, and remembers which were asked for."""

    def __init__(self, entries: dict[str, Entry], files: FileCache, dtype: torch.dtype, device: torch.device) -> None:
        self._entries = entries
        self._files = files
        self._dtype = dtype
        self._device = device
        self._used: set[str] = set()

    def read(self, parts: dict[str, int], *trailing: int) -> Tensor:
        """Stack tensors along their first dimension.

        Args:
            parts: name -> its rows, in order.
            trailing: the other dimensions, the same for all.

        Returns:
            (sum of the rows, *trailing).
        """
        target = torch.empty(sum(parts.values()), *trailing, dtype=self._dtype, device=self._device)
        begin = 0
        for name, rows in parts.items():
            self._read_one(target[begin : begin + rows], name)
            begin += rows
        return target

    def check_all_used(self, *, tied: bool) -> None:
        """Raise WeightsError if the files hold a tensor that no part of the model took."""
        allowed = {"lm_head.weight"} if tied else set()
        left = [name for name in self._entries if name not in self._used | allowed]
        left = sorted(name for name in left if not name.endswith(_IGNORED_SUFFIXES))
        if left:
            raise WeightsError(
                f"weights: given {len(left)} tensors that the architecture does not have ({', '.join(left[:5])}), "
                "expected none; check that config.json belongs to these weights"
            )

    def _read_one(self, target: Tensor, name: str) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise WeightsError(
                f"{name}: missing, expected among the weights with shape {tuple(target.shape)}; {DOWNLOAD_AGAIN}"
            )
        if entry.shape != tuple(target.shape):
            raise WeightsError(f"{name}: given shape {entry.shape}, expected {tuple(target.shape)} by config.json")
        self._files.read(entry, target)
        self._used.add(name)


@dataclass(frozen=True, slots=True)
class _Builder:
    info: ModelInfo
    reader: WeightReader

    def build(self) -> LlamaModel:
        info = self.info
        embedding = self.reader.read({"model.embed_tokens.weight": info.vocab_size}, info.hidden_size)
        layers = [self._layer(f"model.layers.{index}.") for index in range(info.num_layers)]
        norm = self._norm("model.norm.weight", info.hidden_size)
        if info.tie_word_embeddings:
            return LlamaModel(info, embedding, layers, norm, _tied_head(embedding))
        head = self._linear({"lm_head": info.vocab_size}, info.hidden_size, bias=False)
        return LlamaModel(info, embedding, layers, norm, head)

    def _layer(self, prefix: str) -> Layer:
        info, attention, mlp = self.info, prefix + "self_attn.", prefix + "mlp."
        query_size, kv_size = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
        qkv = {attention + "q_proj": query_size, attention + "k_proj": kv_size, attention + "v_proj": kv_size}
        gate_up = {mlp + "gate_proj": info.intermediate_size, mlp + "up_proj": info.intermediate_size}
        return Layer(
            input_norm=self._norm(prefix + "input_layernorm.weight", info.hidden_size),
            qkv=self._linear(qkv, info.hidden_size, bias=info.qkv_bias),
            q_norm=self._norm(attention + "q_norm.weight", info.head_dim) if info.qk_norm else None,
            k_norm=self._norm(attention + "k_norm.weight", info.head_dim) if info.qk_norm else None,
            output=self._linear({attention + "o_proj": info.hidden_size}, query_size, bias=info.output_bias),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight", info.hidden_size),
            gate_up=self._linear(gate_up, info.hidden_size, bias=info.mlp_bias),
            down=self._linear({mlp + "down_proj": info.hidden_size}, info.intermediate_size, bias=info.mlp_bias),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        return self.reader.read({name: size})

    def _linear(self, parts: dict[str, int], in_features: int, *, bias: bool) -> Linear:
        weight = self.reader.read({f"{name}.weight": rows for name, rows in parts.items()}, in_features)
        linear = Linear(
            weight, self.reader.read({f"{name}.bias": rows for name, rows in parts.items()}) if bias else None
        )
        linear.pack()
        return linear


def _tied_head(embedding: Tensor) -> Linear:
    """The embedding needs the plain layout, and a packed head is a second copy: made only of a small one."""
    head = Linear(embedding)
    if embedding.nbytes <= _COPIED_HEAD_BYTES:
        head.pack()
    else:
        head.prefer_onednn()
    return head
