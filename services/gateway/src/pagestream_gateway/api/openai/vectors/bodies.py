"""What the bodies of embeddings, scores and reranks share: their draft, and the fields that are refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ApiForm, VectorForm
from pydantic import Field

from pagestream_gateway.api.openai.generation import ParsedRequest, queued_arguments
from pagestream_gateway.api.openai.strict_body import NumKeptTokens, QueuedBody, Side, asked_truncation
from pagestream_gateway.core.drafts import AskedPooling, Draft, Prompt, now_s

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "padding": ("do_not_pad",),
    "media_io_kwargs": ({},),
    "messages": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "activation": (),
    "softmax": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "instruction": (),
}
"""Fields of vLLM's bodies that are not supported, each with the values that ask for nothing."""


class VectorBody(QueuedBody):
    """The fields of all these bodies."""

    truncate_prompt_tokens: NumKeptTokens | None = Field(
        None, description="Most tokens that are kept of each prompt; -1: as many as fit."
    )
    truncation_side: Side | None = Field(
        None, description="Where they are cut off. Default: at the text's end, before the special tokens there."
    )
    use_activation: bool | None = Field(
        None, description="false: the scores of labels or pairs themselves. Default: as the model's files say."
    )


def vector_request(
    body: VectorBody,
    headers: Mapping[str, str],
    document: Mapping[str, Any],
    api: ApiForm,
    *,
    prompts: Sequence[Prompt],
    prompt_field: str,
    form: VectorForm,
    pooling: AskedPooling,
) -> ParsedRequest:
    """Return a request for vectors. Raises InvalidRequest."""
    draft = Draft(
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=SamplingParams(seed=0),
        answer=AnswerForm(api=api, created=now_s(), vectors=form),
        truncation=asked_truncation(body.truncate_prompt_tokens, body.truncation_side),
        pooling=pooling,
        **queued_arguments(body, headers, document, api),
    )
    return ParsedRequest(draft, stream=False)
