"""The model's shape and the loop that trains it: packed rows, Muon for matrices, AdamW for the rest."""

import time
from dataclasses import dataclass

import torch
from corpus import Corpus
from tokens import IGNORED, Encoder
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 1024


@dataclass(frozen=True)
class Recipe:
    """The training's length and rates; the committed model is made with the defaults."""

    steps: int = 2000
    """Optimizer steps."""
    batch_tokens: int = 2048
    """Tokens per step; few, since the text has little noise."""
    row_length: int = 512
    """Tokens per row for most of the run."""
    long_row_share: float = 0.15
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
    """Return Muon (Jordan et al., 2024) for matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
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
    """Return the mean cross entropy over the learned positions; matmuls in bfloat16, weights and loss in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(batch.ids, use_cache=False).last_hidden_state
        learned = batch.labels != IGNORED
        logits = model.lm_head(hidden[learned])
    return cross_entropy(logits.float(), batch.labels[learned])


def train(model: LlamaForCausalLM, packer: Packer, recipe: Recipe) -> float:
    """Train in place and return the mean loss of the last 50 steps; print a line every 50 steps."""
    tools = optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(tool, lambda step: rate_factor(step, recipe)) for tool in tools]
    model.train()
    losses: list[float] = []
    start = time.monotonic()
    for step in range(recipe.steps):
        length = row_length(step, recipe)
        loss = batch_loss(model, packer.batch(rows=max(1, recipe.batch_tokens // length), row_length=length))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool, schedule in zip(tools, schedules, strict=True):
            tool.step()
            schedule.step()
            tool.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == recipe.steps:
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1}/{recipe.steps}  loss {recent:.4f}  {time.monotonic() - start:.0f} s", flush=True)
    model.train(mode=False)
    return sum(losses[-50:]) / len(losses[-50:])
