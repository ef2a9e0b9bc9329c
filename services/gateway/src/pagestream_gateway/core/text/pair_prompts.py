"""From queries and documents to prompts that a model reads both in, without more work than their bodies may cause."""

from collections.abc import Generator, Sequence

from pagestream_gateway.core.drafts import AskedPooling, Draft, TextPrompt, most_tokens
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.sampling.pooling import check_num_tokens
from pagestream_gateway.core.text.encoder import Encoded, EncodingJob
from pagestream_gateway.core.text.pairs import NO_FRAME
from pagestream_gateway.core.text.truncation import truncation_of
from pagestream_gateway.errors import InvalidRequest, PromptTooLong, UnsupportedField
from pagestream_gateway.settings import LimitSettings

Encoding = Generator[list[EncodingJob], list[Encoded], list[Sequence[int]]]


def encoding_pairs(
    draft: Draft, asked: AskedPooling, model: LoadedModel, limits: LimitSettings, scope: bytes
) -> Encoding:
    """Yield the texts to encode, get what came of them, and return the token ids of a prompt for each document.

    As in vLLM: by a chat template that has roles for query and document, else as the tokenizer makes one prompt of two
    texts, else, where the model's files say so, one after the other. Raises InvalidRequest, UnsupportedField.
    """
    texts = [prompt for prompt in draft.prompts if isinstance(prompt, TextPrompt)]
    queries, documents = (
        [prompt.text for prompt in part] for part in (texts[: asked.num_queries], texts[asked.num_queries :])
    )
    for field, part in ((asked.query_field, queries), (draft.prompt_field, documents)):
        if not all(part):
            raise InvalidRequest(field, "must not be empty")
    pairs = list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))
    truncation = truncation_of(draft, model)
    most = most_tokens(draft, model.max_model_len, limits)
    adds_special_tokens = all(prompt.add_special_tokens for prompt in texts)
    if model.has_pair_template or model.card.embedding.joins_pairs:
        _check_num_chars(pairs, draft.prompt_field, limits)
        rendered = [_rendered(pair, draft.prompt_field, model) for pair in pairs]
        jobs = [_job(text, draft.prompt_field, model, scope, most, adds=adds_special_tokens) for text in rendered]
        found = yield jobs
        prompts = [model.ids_of(job, each) for job, each in zip(jobs, found, strict=True)]
        if truncation is None:
            return list(prompts)
        return [truncation.of_prompt(ids, has_special_tokens=adds_special_tokens) for ids in prompts]
    frame = model.encoder.pair_frame if adds_special_tokens else NO_FRAME
    if frame is None:
        raise UnsupportedField("model", f"{model.name}: its tokenizer changes two texts that it puts into one prompt")
    fields = dict.fromkeys(queries, asked.query_field) | dict.fromkeys(documents, draft.prompt_field)
    by_text = {text: _job(text, field, model, scope, most) for text, field in fields.items()}
    found = yield list(by_text.values())
    ids = {text: model.ids_of(job, each) for (text, job), each in zip(by_text.items(), found, strict=True)}
    lengths = [len(ids[query]) + len(ids[document]) + frame.num_tokens for query, document in pairs]
    if truncation is not None:
        lengths = [min(length, truncation.num_tokens) for length in lengths]
    check_num_tokens(sum(lengths), draft.prompt_field, limits)
    if truncation is not None:
        return [truncation.of_pair(ids[query], ids[document], frame) for query, document in pairs]
    for number, length in enumerate(lengths):
        if length >= model.max_model_len:
            raise PromptTooLong(
                draft.prompt_field,
                f"document {number} and its query are {length} tokens together, but the model's context length is "
                f"{model.max_model_len} tokens, one of which is left for the output",
            )
    return [frame.join(ids[query], ids[document]) for query, document in pairs]


def _job(text: str, field: str, model: LoadedModel, scope: bytes, limit: int, *, adds: bool = False) -> EncodingJob:
    return model.check(EncodingJob(text, adds, limit, field, scope))


def _check_num_chars(pairs: Sequence[tuple[str, str]], field: str, limits: LimitSettings) -> None:
    """Refuse a query that is long and stands before many documents. Raises InvalidRequest."""
    num_chars = sum(len(query) + len(document) for query, document in pairs)
    if num_chars > limits.max_body_bytes:
        raise InvalidRequest(
            field,
            f"each document is read with its query: {num_chars} characters in all, at most {limits.max_body_bytes}",
        )


def _rendered(pair: tuple[str, str], field: str, model: LoadedModel) -> str:
    query, document = pair
    if model.chat_template is None or not model.has_pair_template:
        return query + document
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    try:
        return model.chat_template.render(messages, add_generation_prompt=False)
    except InvalidRequest as error:
        raise InvalidRequest(field, error.message) from error
