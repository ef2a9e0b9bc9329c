from pagestream_engine.scheduler.restore_cost import RestoreCost
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep
from support.engines.cached_sequences import make_seq


def step(num_prompt_tokens: int, num_decodes: int = 0) -> ScheduledStep:
    seq = make_seq([1] * 200)
    prefills = [ScheduledSequence(seq, num_prompt_tokens, needs_sample=False)] if num_prompt_tokens else []
    return ScheduledStep(prefills, [ScheduledSequence(seq, 1, needs_sample=True)] * num_decodes)


def test_the_cheaper_way_is_chosen_by_what_was_measured() -> None:
    cost = RestoreCost(load_page_s=0.010)
    assert cost.pays(1, 16), "nothing was computed yet"
    cost.note(step(0, num_decodes=4), 9.0)
    assert cost.pays(1, 16), "decodes tell nothing of prompts"
    cost.note(step(100), 0.05)
    assert not cost.pays(1, 16), "16 tokens take 8 ms"
    assert cost.pays(1, 21)
    cost.note(step(4, num_decodes=4), 99.0)
    assert not cost.pays(1, 16)
    for _ in range(100):
        cost.note(step(100), 0.1)
    assert cost.pays(1, 16), "the machine got slower: 16 ms"
    assert not cost.pays(2, 16)
