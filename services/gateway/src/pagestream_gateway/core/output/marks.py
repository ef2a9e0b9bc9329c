"""The tokens around the reasoning that comes before what a grammar holds."""

from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import ReasoningMarks

from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.output.reasoning import Marks


def reasoning_marks(model: LoadedModel, prompt: str, marks: Marks, *, is_open: bool) -> ReasoningMarks | None:
    """Return the marks of an output's reasoning; None where a grammar has to hold from the first token.

    That is so where the model's engines know no marks, and where a mark is no token of its vocabulary: text may be
    written in any tokens, and the engine compares tokens.

    Args:
        prompt: as its template has rendered it.
        marks: their texts.
        is_open: whether the prompt has opened the reasoning, which the output may do otherwise.
    """
    begin, end = model.tokenizer.token_to_id(marks.begin), model.tokenizer.token_to_id(marks.end)
    if end is None or not model.card.takes_output_constraints:
        return None
    if is_open:
        return ReasoningMarks(end=TokenIds(ids=[end]))
    if begin is None:
        return None
    openings = [[begin]]
    if not prompt[-1:].isspace():  # GLM's outputs begin with a line end
        on_a_line = model.tokenizer.encode(f"\n{marks.begin}", add_special_tokens=False).ids
        openings += [on_a_line] if on_a_line[1:] == [begin] else []
    return ReasoningMarks(end=TokenIds(ids=[end]), openings=[TokenIds(ids=each) for each in openings])
