"""One row for each feature that a stream must keep through every fault.

A new feature gets a row here: the kill matrix and the campaign run all rows at once, over gRPC and as server-sent
events, and compare each with its undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream.v1 import inference_pb2 as pb
from support.processes.stack import DEMO_MODEL

NUM_TOKENS = 48
EOS_TOKEN_ID = 1
STORY = "Once upon a time there was a lighthouse. The keeper of the lighthouse had a cat, and the cat had a boat. "


@dataclass(frozen=True)
class FeatureRow:
    """One request."""

    name: str
    prompt: str | tuple[str, ...]
    """A tuple is a list of prompts in one request, as POST /v1/completions and /v1/embeddings have it."""
    sampling: Mapping[str, Any]
    """vLLM's names, as in gRPC's SamplingParams and in the body of POST /v1/completions."""
    finish: str | None = "length"
    """The finish reason of every choice; None where it is not known beforehand."""
    seed_is_chosen: bool = field(default=False)
    """Whether the gateway chooses the seed: the reference is then run with the chosen one."""
    is_chat: bool = False
    """Whether the prompt is a user's message for the model's chat template."""
    echo: bool = False
    """Whether the prompts are echoed before the answers; POST /v1/completions."""
    is_adapted: bool = False
    """Whether it names a LoRA adapter as its model."""
    is_embedding: bool = False
    """Whether the prompts are inputs of POST /v1/embeddings."""
    priority: int = 0
    """Its class. One of class 2 begins first, and is interrupted for those of class 0."""

    @property
    def is_list(self) -> bool:
        """Whether there are several prompts: their order in the log varies, and so does its digest."""
        return not isinstance(self.prompt, str)


_TOKENIZER = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
_VOCABULARY: Mapping[str, int] = _TOKENIZER["model"]["vocab"]
# The bytes of two letters and of an emoji, and a letter that is one token: characters of one to four tokens.
BYTES_BIAS = dict.fromkeys((_VOCABULARY[token] for token in ("Ã©", "Ã", "¼", "ð", "Ł", "İ", "ī")), 100.0)

_LONG_LIST = """{"type": "array", "minItems": 40, "items": {"type": "object", "additionalProperties": false,
"properties": {"name": {"type": "string"}, "masts": {"type": "integer"}}, "required": ["name", "masts"]}}"""

FEATURE_ROWS = (
    FeatureRow("greedy", "The keeper of the lighthouse", {"temperature": 0.0}),
    FeatureRow("seeded", "Tell me a story about the harbour.", {"temperature": 0.9, "top_p": 0.95, "seed": 7}),
    FeatureRow("unseeded", "Tell me a story about a cat.", {"temperature": 0.9, "top_k": 50}, seed_is_chosen=True),
    FeatureRow(
        "stop string",
        "Tell me about Renée.",
        # A fact that any training teaches: "carries a" is held back and released, "is called" is the end.
        {"temperature": 0.0, "stop": ["carries a zebra", "is called"]},
        finish="stop",
        is_chat=True,
    ),
    FeatureRow(
        "stop string kept",
        "Tell me about Otto.",
        {"temperature": 0.0, "stop": ["is called"], "include_stop_str_in_output": True},
        finish="stop",
        is_chat=True,
    ),
    FeatureRow(
        "stop token",
        "Tell me about Inés.",
        {"temperature": 0.3, "seed": 41, "stop_token_ids": [_VOCABULARY["Ġcalled"], 0]},
        finish="stop",
        is_chat=True,
    ),
    FeatureRow("min_p", "A storm came over the harbour", {"temperature": 1.1, "min_p": 0.05, "seed": 37}),
    FeatureRow(
        "special tokens",
        "The baker and the boat",
        {"temperature": 0.9, "seed": 43, "logit_bias": {EOS_TOKEN_ID: 20.0}, "skip_special_tokens": False},
    ),
    FeatureRow("chat", "Who lives in the lighthouse?", {"temperature": 0.7, "seed": 47, "n": 2}, is_chat=True),
    FeatureRow(
        "list of prompts",
        ("The keeper had", "The captain of the ship said that", "Nobody knew"),
        {"temperature": 0.9, "seed": 53, "n": 2},
        echo=True,
    ),
    FeatureRow("multi-byte", "Say it.", {"temperature": 2.0, "seed": 11, "logit_bias": BYTES_BIAS}),
    FeatureRow("prefix cache", STORY * 6, {"temperature": 0.7, "seed": 13}),
    FeatureRow(
        "penalties",
        "Tell me a story about the baker.",
        {
            "temperature": 0.8,
            "seed": 17,
            "presence_penalty": 0.6,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.2,
        },
    ),
    FeatureRow("logprobs", "The sea was", {"temperature": 0.7, "seed": 19, "logprobs": 3}),
    FeatureRow("n", "A long time ago,", {"temperature": 0.9, "seed": 23, "n": 3}),
    FeatureRow(
        "min_tokens",
        "The cat and the boat",
        # The bias makes the model end at once, which min_tokens forbids up to 30 tokens.
        {"temperature": 0.0, "min_tokens": 30, "logit_bias": {EOS_TOKEN_ID: 100.0}, "ignore_eos": False},
        finish="stop",
    ),
    FeatureRow(
        "beam search",
        "The captain told the cat",
        # Nothing comes before the end, so that every death of its engine begins it anew.
        {
            "seed": 59,
            "n": 2,
            "use_beam_search": True,
            "beam_width": 4,
            "length_penalty": 0.7,
            "early_stopping": "never",
            "logprobs": 1,
        },
    ),
    FeatureRow("best_of", "A letter came to", {"temperature": 0.9, "seed": 61, "n": 2, "best_of": 5}),
    FeatureRow(
        "allowed tokens, bad words",
        "The baker said that",
        {"temperature": 0.9, "seed": 67, "allowed_token_ids": list(range(260, 900)), "bad_words": ["the", "boat"]},
    ),
    FeatureRow("logit_bias", "In the harbour", {"temperature": 0.8, "seed": 29, "logit_bias": {261: 3.0, 300: -100.0}}),
    FeatureRow(
        "all at once",
        "The lighthouse keeper",
        {
            "temperature": 0.8,
            "seed": 31,
            "n": 2,
            "logprobs": 2,
            "frequency_penalty": 0.5,
            "logit_bias": {261: 1.5},
            "min_tokens": 20,
            "stop": ["never said"],
        },
    ),
    FeatureRow(
        "grammar",
        "All the boats of the harbour:",
        {"temperature": 0.9, "seed": 67, "n": 2, "structured_outputs": {"json": _LONG_LIST}},
    ),
    FeatureRow("adapter", "The fisherman and the cat", {"temperature": 0.9, "seed": 71, "n": 2}, is_adapted=True),
    FeatureRow("embeddings", tuple(f"{STORY}{number}" for number in range(24)), {}, finish=None, is_embedding=True),
    FeatureRow("interrupted", "The mayor of the village", {"temperature": 0.9, "seed": 59}, priority=2),
    # Its blocks are evicted while it waits, and come back from host memory.
    FeatureRow("swapped", f"A tale. {STORY * 3}", {"temperature": 0.9, "seed": 61, "n": 2}, priority=2),
)


def sampling_of(row: FeatureRow, seed: int | None = None) -> dict[str, Any]:
    """Return the row's sampling parameters with defaults; `seed` replaces its own."""
    sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **row.sampling}
    if seed is not None:
        sampling["seed"] = seed
    return sampling


def grpc_request(row: FeatureRow, *, model: str, key: str, seed: int | None = None) -> pb.GenerateRequest:
    """Return the row's gRPC request."""
    options = sampling_of(row, seed)
    if options.get("early_stopping") == "never":
        options["early_stopping"] = pb.EARLY_STOPPING_NEVER
    sampling = pb.SamplingParams(**options)
    request = pb.GenerateRequest(model=model, sampling=sampling, idempotency_key=key, priority=row.priority)
    if row.is_chat:
        request.chat.messages.add(role="user", content=str(row.prompt))
    else:
        request.prompt = str(row.prompt)
    return request


def http_body(row: FeatureRow, *, model: str, seed: int | None = None) -> dict[str, Any]:
    """Return the row's body for POST /v1/completions, /v1/chat/completions or /v1/embeddings."""
    sampling = sampling_of(row, seed)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(token): bias for token, bias in sampling["logit_bias"].items()}
    if row.is_embedding:
        return {"model": model, "priority": row.priority, "input": list(row.prompt), "on_disconnect": "continue"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    asked: dict[str, Any] = {"prompt": list(row.prompt) if row.is_list else row.prompt}
    if row.echo:
        asked["echo"] = True
    if row.is_chat:
        asked = {"messages": [{"role": "user", "content": row.prompt}]}
    return {"model": model, "priority": row.priority, **asked, **sampling, **options}
