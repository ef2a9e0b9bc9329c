"""The model's shape and the loop that trains it: packed rows, Muon for matrices, AdamW for the rest."""

import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Corpus
from muon import Muon
from tokens import IGNORED, Encoder
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 1024


@dataclass(frozen=True)
class Recipe:
    """The training's length and rates; the committed model is made with the defaults."""

    steps: int = 3400
    """Optimizer steps."""
    batch_tokens: int = 2048
    """Tokens per step; few, since the text has little noise."""
    row_length: int = 256
    """Tokens per row for most of the run; attention costs half as much as at 512."""
    long_row_share: float = 0.1
    """Share of the steps, at the end, with rows of the whole context, so that long chats work."""
    muon_lr: float = 0.004
    """Learning rate of the matrices inside the layers, at the scale of AdamW's updates."""
    adam_lr: float = 0.003
    """Learning rate of the embedding and the norms."""
    warmup_steps: int = 50
    decay_share: float = 0.6
    """Share of the steps, at the end, over which the rates fall to zero."""
    hidden_size: int = 256
    layers: int = 4
    intermediate_size: int = 512


@dataclass(frozen=True)
class Batch:
    """`ids` and `labels` of shape (rows, row length); labels are shifted, so that column i is what follows ids i."""

    ids: Tensor
    labels: Tensor


def build_model(recipe: Recipe, *, vocab_size: int, bos: int, eos: int, pad: int) -> LlamaForCausalLM:
    """Return an untrained Llama with grouped queries, heads of 64 and tied embeddings; weights follow torch's seed."""
    heads = recipe.hidden_size // 64
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


class Packer:
    """Fills rows with chats one after the other; a chat that does not fit continues in the next row."""

    def __init__(self, corpus: Corpus, encoder: Encoder) -> None:
        self._corpus = corpus
        self._encoder = encoder
        self._ids: list[int] = []
        self._labels: list[int] = []

    def batch(self, *, rows: int, row_length: int) -> Batch:
        """Return the next rows * row_length tokens of the stream."""
        count = rows * row_length
        while len(self._ids) <= count:
            for chat in self._corpus.chats(64):
                encoded = self._encoder.encode(chat)
                self._ids += encoded.token_ids
                self._labels += encoded.labels
        ids = torch.tensor(self._ids[:count]).view(rows, row_length)
        labels = torch.tensor(self._labels[1 : count + 1]).view(rows, row_length)
        del self._ids[:count], self._labels[:count]
        return Batch(ids, labels)


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    return [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def rate_factor(step: int, recipe: Recipe) -> float:
    """Return the factor of the learning rates: linear warm-up, a plateau, then linear decay to zero."""
    decay_steps = max(1, round(recipe.steps * recipe.decay_share))
    return min(1.0, (step + 1) / recipe.warmup_steps, (recipe.steps - step) / decay_steps)


def row_length(step: int, recipe: Recipe) -> int:
    """Return the row length of this step: short rows first, the whole context at the end."""
    return CONTEXT if step >= recipe.steps * (1 - recipe.long_row_share) else recipe.row_length


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the mean cross entropy over the learned positions, in float32 throughout."""
    hidden = model.model(batch.ids, use_cache=False).last_hidden_state
    learned = batch.labels != IGNORED
    return cross_entropy(model.lm_head(hidden[learned]), batch.labels[learned])


class Run:
    """A training with all that it needs to go on from a checkpoint as if it had not been interrupted."""

    def __init__(self, model: LlamaForCausalLM, packer: Packer, recipe: Recipe) -> None:
        self._model, self._packer, self._recipe = model, packer, recipe
        self._tools = optimizers(model, recipe)
        self._losses: list[float] = []

    @property
    def loss(self) -> float:
        """The mean loss of the last 50 steps."""
        return sum(self._losses[-50:]) / len(self._losses[-50:])

    def train(self, checkpoint: Path | None) -> None:
        """Train in place and print a line every 50 steps. `checkpoint` is read where it exists, written every 200."""
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        self._model.train()
        start = time.monotonic()
        for step in range(len(self._losses), self._recipe.steps):
            self._step(step)
            done = step + 1
            if done % 50 == 0 or done == self._recipe.steps:
                spent = time.monotonic() - start
                print(f"step {done}/{self._recipe.steps}  loss {self.loss:.4f}  {spent:.0f} s", flush=True)
            if checkpoint is not None and done % 200 == 0:
                self._save(checkpoint)
        self._model.train(mode=False)

    def _step(self, step: int) -> None:
        length = row_length(step, self._recipe)
        rows = max(1, self._recipe.batch_tokens // length)
        loss = batch_loss(self._model, self._packer.batch(rows=rows, row_length=length))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        factor = rate_factor(step, self._recipe)
        for tool, rate in zip(self._tools, (self._recipe.muon_lr, self._recipe.adam_lr), strict=True):
            for group in tool.param_groups:
                group["lr"] = rate * factor
            tool.step()
            tool.zero_grad()
        self._losses.append(loss.item())

    def _save(self, path: Path) -> None:
        state = {
            "model": self._model.state_dict(),
            "tools": [tool.state_dict() for tool in self._tools],
            "packer": pickle.dumps(self._packer),
            "losses": self._losses,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def _load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self._model.load_state_dict(state["model"])
        for tool, saved in zip(self._tools, state["tools"], strict=True):
            tool.load_state_dict(saved)
        self._packer = pickle.loads(state["packer"])  # noqa: S301  a file that this script wrote
        self._losses = state["losses"]
