"""Which speculation a runner has, by its settings and its stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, thread_time

import torch

from pagestream_engine.config import EngineConfig
from pagestream_engine.grammar.sampling import ConstrainedSampling
from pagestream_engine.parallel.ranks import Ranks
from pagestream_engine.parallel.stages import Stage
from pagestream_engine.plan import Int32Array
from pagestream_engine.runner.persistent_batch import PersistentBatch
from pagestream_engine.runner.speculation.draft_model import DraftModel, LoadedDraft
from pagestream_engine.runner.speculation.followed import FollowedSpeculation
from pagestream_engine.runner.speculation.ngram import NgramProposer
from pagestream_engine.runner.speculation.proposer import NoProposer, Proposer
from pagestream_engine.runner.speculation.speculation import Speculation


def make_speculation(
    config: EngineConfig,
    draft: LoadedDraft | None,
    batch: PersistentBatch,
    sampling: Callable[[], ConstrainedSampling],
    *,
    ranks: Ranks,
    stage: Stage,
) -> Speculation | FollowedSpeculation | None:
    """Return None where the settings name no method.

    Args:
        draft: the model of `speculative_model`, if there is one and this is the last stage.
        sampling: returns the state of the runner's rows.
        ranks: of the stage, which have the same drafts: those of its first rank.
        stage: of this process. The last one makes the drafts of all.
    """
    settings, max_num_seqs = config.speculation, config.scheduler.max_num_seqs
    if settings.method is None:
        return None
    if not stage.is_last:
        return FollowedSpeculation(stage, settings.most_drafts)

    def agree(token_ids: Sequence[int]) -> list[int]:
        return [int(each) for each in ranks.first_of_stage(token_ids)]

    def publish(drafts: Int32Array) -> None:
        sent = torch.from_numpy(drafts).to(batch.device, torch.int64)
        for other in range(stage.count - 1):
            stage.send_tokens(sent, other)

    proposer: Proposer
    if draft is not None:
        proposer = DraftModel(draft, batch, max_num_seqs, lambda *given: sampling().guess(*given), agree)
    elif settings.method == "ngram":
        proposer = NgramProposer(max_num_seqs, settings.prompt_lookup_min, settings.prompt_lookup_max)
    else:
        proposer = NoProposer()
    return Speculation(
        proposer,
        sampling,
        max_num_seqs,
        settings.most_drafts,
        lambda number: ranks.first_of_stage([number])[0],
        # A CPU computes on this thread, among others: its own time is not that of other programs. Nor is it that of
        # other stages, for which it waits.
        clock=thread_time if batch.device.type == "cpu" and stage.count == 1 else perf_counter,
        publish=publish if stage.count > 1 else None,
    )
