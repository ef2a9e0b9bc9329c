"""The byte-level tokenizer, its chat template, and chats as token ids with the positions that are learned."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from calls import CALL_BEGIN, CALL_END, MARKERS, TOOLS_BEGIN, TOOLS_END
from corpus import Chat, Message
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS = "<|bos|>"
END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (BOS, END, PAD, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    # The tools stand at the end of the system message, or in one of their own: names and parameters are all that so
    # small a model needs.
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    f"{{{{ '{TOOLS_BEGIN}' }}}}"
    "{% for tool in tools %}"
    "{{ tool['function']['name'] + '(' }}"
    "{{ ((tool['function']['parameters'] or {})['properties'] or {}) | join(', ') }}"
    "{{ ')' if loop.last else ') ' }}"
    "{% endfor %}"
    f"{{{{ '{TOOLS_END}' + eos_token }}}}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('the roles of this model are system, user, assistant and tool, not ' + message['role']) }}"
    "{% endif %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ '' if loop.first and not message['content'] else '\n' }}"
    f"{{{{ '{CALL_BEGIN}\n' }}}}"
    """{{ '{"name": "' + call['function']['name'] + '", "arguments": ' }}"""
    "{{ arguments if arguments is string else arguments | tojson }}"
    f"{{{{ '}}\n{CALL_END}' }}}}"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LEARNED_ELSEWHERE = re.compile("|".join(map(re.escape, MARKERS)) + r"|[^\u0000-\u024f]")
"""What gets no merges: markers, which are tokens of their own, and characters that stay bytes."""
WORDS = r"'(?:[sdmt]|ll|ve|re)| (?=\p{Lu}|[\p{L}_]+\()| ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"
"""How text falls into words, as in GPT-2, but each digit is one, an underscore is a letter, and the space before a
capital or the name of a function is a word of its own: names are copied from questions into JSON, and there they stand
without the space."""
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
    """Train a byte-level BPE tokenizer: the bytes, `SPECIAL_TOKENS`, the most frequent merges of the Latin text, and
    `MARKERS`.

    Each digit is a token, so that numbers are copied and added digit by digit. A name has the same tokens after a space
    and after a quotation mark. Emoji and Japanese stay bytes, so that a stream has characters that only several tokens
    complete.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    latin = (LEARNED_ELSEWHERE.sub("", message.content) for chat in chats for message in chat)
    tokenizer.train_from_iterator(latin, trainer=trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
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
        """Encode a chat. Only the assistant's tokens are learned, but for those that a grammar would have given; a chat
        of one message is text without a role mark.
        """
        ids = [self._bos]
        labels = [IGNORED]
        for message in chat:
            text = self._tokenizer.encode(message.content, add_special_tokens=False)
            head = [self._roles[message.role]] if len(chat) > 1 else []
            ids += [*head, *text.ids, self._end]
            labels += [IGNORED] * len(head) + _labels(message, text, self._end)
        return Encoded(ids, labels)


def _labels(message: Message, text: Encoding, end: int) -> list[int]:
    if message.role != "assistant":
        return [IGNORED] * (len(text.ids) + 1)
    is_given = [any(begin <= start < stop for begin, stop in message.given) for start, _ in text.offsets]
    learned = [IGNORED if given else token for token, given in zip(text.ids, is_given, strict=True)]
    return [*learned, end]
