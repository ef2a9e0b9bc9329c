"""Modelling code in which tokens meet outside attention is refused in every dtype: others' tokens are in the same step.

Each case adds one such structure to a small model that runs without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from pagestream_engine import LLM, SamplingParams, UnsupportedModel
from support.engines.architectures import write_model
from torch import Tensor

pytestmark = pytest.mark.served

SIZE = 64
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
Structure = Callable[[Tensor, Tensor], Tensor]
"""Hidden states (1, tokens, SIZE) and positions (1, tokens) -> what is added to them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("granite")
    import transformers  # takes seconds

    config = transformers.GraniteConfig(**SMALL)
    config.architectures = ["GraniteForCausalLM"]
    config.save_pretrained(made)
    write_model(made, config)
    return made


def add(monkeypatch: pytest.MonkeyPatch, structure: Structure) -> None:
    from transformers.models.granite.modeling_granite import GraniteMLP, GraniteRotaryEmbedding  # takes seconds

    positions: list[Tensor] = []
    rotate, compute = GraniteRotaryEmbedding.forward, GraniteMLP.forward

    def noting(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        positions[:] = [position_ids]
        return rotate(self, x, position_ids)

    def adding(self: Any, x: Tensor) -> Any:
        return compute(self, x) + structure(x, positions[0]).to(x.dtype)

    monkeypatch.setattr(GraniteRotaryEmbedding, "forward", noting)
    monkeypatch.setattr(GraniteMLP, "forward", adding)


def start(folder: Path, dtype: str = "bfloat16") -> LLM:
    return LLM(folder, dtype=dtype, num_gpu_blocks_override=32, max_num_seqs=4, max_num_batched_tokens=64)


def convolution(x: Tensor, _: Tensor) -> Tensor:
    weight = torch.full((SIZE, 1, 3), 1e-4, dtype=x.dtype)
    return F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), weight, groups=SIZE).transpose(1, 2)


def convolution_that_begins_with_its_sequence(x: Tensor, positions: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return torch.where(positions[..., None] == 0, 0.0, 1e-3 * before)


def state_that_begins_with_its_sequence(x: Tensor, positions: Tensor) -> Tensor:
    states, state = [], torch.zeros_like(x[:, 0])
    for index in range(x.shape[1]):
        state = x[:, index] if int(positions[0, index]) == 0 else 0.9 * state + 0.1 * x[:, index]
        states.append(state)
    return torch.stack(states, 1)


def weak_shift(x: Tensor, _: Tensor) -> Tensor:
    return 1e-7 * torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def windows(x: Tensor, _: Tensor) -> Tensor:
    return 1e-4 * F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).mean(-1)


def look_ahead(x: Tensor, _: Tensor) -> Tensor:
    return 1e-4 * torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)


def linear_attention(x: Tensor, _: Tensor) -> Tensor:
    return 1e-4 * (x @ (x.transpose(1, 2) @ x))


def attention_of_its_own(x: Tensor, _: Tensor) -> Tensor:
    head = x[:, None]
    return 1e-4 * F.scaled_dot_product_attention(head, head, head, is_causal=True)[:, 0]


def plain_softmax(x: Tensor, _: Tensor) -> Tensor:
    return 1e-4 * ((x @ x.transpose(1, 2)).tril().softmax(-1) @ x)


def expert_choice(x: Tensor, _: Tensor) -> Tensor:
    chosen = x[0].norm(dim=-1).topk(4).indices
    return 1e-4 * torch.zeros_like(x).index_add(1, chosen, x[:, chosen])


def capacity(x: Tensor, _: Tensor) -> Tensor:
    routed = F.one_hot(x[0, :, :4].argmax(-1), 4)
    place = (routed.cumsum(0) * routed).sum(-1)
    return torch.where((place <= 3)[None, :, None], 1e-4 * x, 0.0)


def quantisation_by_the_largest(x: Tensor, _: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale - x


def recurrent_layer(x: Tensor, _: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.GRU(SIZE, SIZE, batch_first=True, dtype=torch.float32)
    return 1e-4 * layer(x.float())[0]


STRUCTURES: dict[str, Structure] = {
    function.__name__: function
    for function in (
        convolution,
        convolution_that_begins_with_its_sequence,
        state_that_begins_with_its_sequence,
        weak_shift,
        windows,
        look_ahead,
        linear_attention,
        attention_of_its_own,
        plain_softmax,
        expert_choice,
        capacity,
        quantisation_by_the_largest,
        recurrent_layer,
    )
} | {
    "roll": lambda x, _: 1e-4 * x.roll(1, dims=1),
    "running sum": lambda x, _: 1e-6 * x.cumsum(1),
    "mean of all": lambda x, _: 1e-6 * x.mean(1, keepdim=True),
    "maximum of all": lambda x, _: 1e-4 * x.amax(1, keepdim=True),
    "pooling": lambda x, _: 1e-4 * F.avg_pool1d(F.pad(x.transpose(1, 2), (1, 0)), 2, 1).transpose(1, 2),
    "fourier": lambda x, _: 1e-4 * torch.fft.fft(x.float(), dim=1).real,
    "norm of a batch": lambda x, _: 1e-4 * F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "norm of all": lambda x, _: 1e-4 * F.layer_norm(x, x.shape[1:]),
    "length of all": lambda x, _: 1e-4 * x / x.norm(),
    "median of all": lambda x, _: 1e-4 * x.median(1, keepdim=True).values,
    "sorted": lambda x, _: 1e-4 * x.sort(1).values,
    "counted positions": lambda x, _: 1e-2 * torch.arange(x.shape[1], dtype=x.dtype)[:, None].expand(x.shape[1:]),
}


FIRST = {
    "convolution_that_begins_with_its_sequence",
    "weak_shift",
    "linear_attention",
    "expert_choice",
    "capacity",
    "mean of all",
    "counted positions",
}
"""One of each kind, which also run outside of `make deep`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in STRUCTURES]
)
def test_tokens_that_meet_outside_attention(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    add(monkeypatch, STRUCTURES[name])
    with pytest.raises(UnsupportedModel, match=r"GraniteForCausalLM: layers: given .* attention"):
        start(folder)


@pytest.mark.parametrize(("name", "dtype"), [("weak_shift", "float32"), ("capacity", "float16")])
def test_in_every_dtype(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, dtype: str) -> None:
    add(monkeypatch, STRUCTURES[name])
    with pytest.raises(UnsupportedModel, match="layers: given"):
        start(folder, dtype)


TOKENS_OF_THEIR_OWN: dict[str, Structure] = {
    "convolution of one token": lambda x, _: F.conv1d(
        x.transpose(1, 2), torch.ones(SIZE, 1, 1, dtype=x.dtype), groups=SIZE
    ).transpose(1, 2),
    "running sum of a token": lambda x, _: x.cumsum(-1),
    "best experts of a token": lambda x, _: x.topk(2, -1).values.sum(-1, keepdim=True).expand_as(x),
    "places": lambda x, positions: 1e-2 * positions[..., None].to(x.dtype).expand_as(x),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "best experts of a token" else pytest.mark.slow)
        for name in TOKENS_OF_THEIR_OWN
    ],
)
def test_what_reads_a_token_alone_runs(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    add(monkeypatch, TOKENS_OF_THEIR_OWN[name])
    (output,) = start(folder).generate([3, 4, 5], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    assert output.outputs[0].error is None


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_published_architecture_with_convolutions(tmp_path: Path, dtype: str) -> None:
    import transformers  # takes seconds

    config = transformers.Lfm2Config(**SMALL, layer_types=["full_attention", "conv"])
    config.architectures = ["Lfm2ForCausalLM"]
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    with pytest.raises(UnsupportedModel, match="Lfm2ForCausalLM: given layers whose cache is no keys and values"):
        start(tmp_path, dtype)
