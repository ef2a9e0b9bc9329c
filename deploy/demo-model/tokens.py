"""The byte-level tokenizer, its chat template, and chats as token ids with the positions that are learned."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from corpus import Chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS = "<|bos|>"
END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (BOS, END, PAD, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles of this model are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NOT_LATIN = re.compile(r"[^\u0000-\u024f]")
IGNORED = -100
"""The label that torch's cross entropy ignores."""


@dataclass(frozen=True)
class Encoded:
    """One chat: its token ids, and as labels the ids that the model is to produce, else `IGNORED`."""

    token_ids: list[int]
    labels: list[int]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token of the vocabulary; KeyError when it has none."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def train_tokenizer(chats: Iterable[Chat], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: the bytes, `SPECIAL_TOKENS`, and the most frequent merges of the Latin text.

    Emoji and Japanese stay bytes, so that a stream has characters that only several tokens complete.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    latin = (NOT_LATIN.sub("", message.content) for chat in chats for message in chat)
    tokenizer.train_from_iterator(latin, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    return tokenizer


def chat_tokenizer(tokenizer: Tokenizer, *, context: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer as `transformers` saves and loads it, with `CHAT_TEMPLATE`."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


class Encoder:
    """Turns chats into ids exactly as `CHAT_TEMPLATE` would render them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bos, self._end = token_id(tokenizer, BOS), token_id(tokenizer, END)
        self._roles = {role: token_id(tokenizer, f"<|{role}|>") for role in ROLES}

    def encode(self, chat: Chat) -> Encoded:
        """Encode a chat. Only the assistant's tokens are learned; a chat of one message is text without a role mark."""
        ids = [self._bos]
        labels = [IGNORED]
        for message in chat:
            text = self._tokenizer.encode(message.content, add_special_tokens=False).ids
            head = [self._roles[message.role]] if len(chat) > 1 else []
            body = [*text, self._end]
            ids += head + body
            labels += [IGNORED] * len(head) + (body if message.role == "assistant" else [IGNORED] * len(body))
        return Encoded(ids, labels)
