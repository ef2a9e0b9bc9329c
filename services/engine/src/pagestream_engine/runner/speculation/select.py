"""Which speculation a runner has, by its settings."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

from pagestream_engine.config import EngineConfig
from pagestream_engine.grammar.sampling import ConstrainedSampling
from pagestream_engine.parallel.ranks import Ranks
from pagestream_engine.runner.persistent_batch import PersistentBatch
from pagestream_engine.runner.speculation.draft_model import DraftModel, LoadedDraft
from pagestream_engine.runner.speculation.ngram import NgramProposer
from pagestream_engine.runner.speculation.proposer import NoProposer, Proposer
from pagestream_engine.runner.speculation.speculation import Speculation


def make_speculation(
    config: EngineConfig,
    draft: LoadedDraft | None,
    batch: PersistentBatch,
    sampling: Callable[[], ConstrainedSampling],
    ranks: Ranks,
) -> Speculation | None:
    """Return None where the settings name no method.

    Args:
        config: settings.
        draft: the model of `speculative_model`, if there is one.
        batch: of the runner.
        sampling: returns the state of the runner's rows.
        ranks: that have the same drafts: rank 0's.
    """
    settings, max_num_seqs = config.speculation, config.scheduler.max_num_seqs
    if settings.method is None:
        return None
    proposer: Proposer
    if draft is not None:
        proposer = DraftModel(draft, batch, max_num_seqs, lambda *given: sampling().guess(*given), ranks.first_integers)
    elif settings.method == "ngram":
        proposer = NgramProposer(max_num_seqs, settings.prompt_lookup_min, settings.prompt_lookup_max)
    else:
        proposer = NoProposer()
    # A CPU computes on this thread, among others: its own time is not that of other programs.
    clock = thread_time if batch.device.type == "cpu" else perf_counter
    # Of a pipeline's stages the last one alone has the rows' grammars, and all must have the same drafts.
    grammars = sampling if config.parallel.pipeline_parallel_size == 1 else None
    return Speculation(proposer, grammars, max_num_seqs, settings.most_drafts, ranks.first, clock=clock)
