"""A step's ids are those that the request has, whichever sequences compute for them."""

from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sibling, TokenSequence, with_extra_ids
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep
from pagestream_worker.stepping.scheduled_ids import decoding, prefill_remaining


def test_beams_count_as_a_choice_of_their_request() -> None:
    params = SamplingParams(use_beam_search=True, beam_width=4)
    ids = with_extra_ids([Sibling("r/n/0", params), Sibling("r/n/1", params)], 4)
    beams = [
        TokenSequence(seq_id, [1, 2], params, seed=0, arrival=place, max_total_tokens=3)
        for place, seq_id in enumerate(ids)
    ]
    chunk = ScheduledSequence(beams[3], 2, needs_sample=True, siblings=beams[:3])
    assert prefill_remaining(ScheduledStep(prefills=[chunk])) == {"r/n/0": 0, "r/n/1": 0}
    decodes = [ScheduledSequence(beam, 1, needs_sample=True) for beam in beams]
    assert decoding(ScheduledStep(decodes=decodes)) == {"r/n/0", "r/n/1"}
