"""What the bodies of embeddings, scores and reranks share: their draft, and the fields that are refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ApiForm, VectorForm

from pagestream_gateway.api.openai.generation import ParsedRequest, queued_arguments
from pagestream_gateway.api.openai.strict_body import QueuedBody
from pagestream_gateway.core.drafts import AskedPooling, Draft, Prompt, now_s

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "messages": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "mm_processor_kwargs": (),
    "activation": (),
    "use_activation": (),
    "softmax": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "instruction": (),
}
"""Fields of vLLM's bodies that are not supported, each with the values that ask for nothing."""


def vector_request(
    body: QueuedBody,
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
        pooling=pooling,
        **queued_arguments(body, headers, document, api),
    )
    return ParsedRequest(draft, stream=False)
