"""The terms of the scaling law, derived in docs/autoscaling.md. The highest need of all of them counts."""

from collections.abc import Callable

from pagestream_scaling.terms.backlog import age_term, backlog_term, work_term
from pagestream_scaling.terms.kv_utilization import kv_utilization_term
from pagestream_scaling.terms.term import Situation, Term
from pagestream_scaling.terms.ttft import ttft_term

TERMS: tuple[Callable[[Situation], Term], ...] = (
    kv_utilization_term,
    backlog_term,
    age_term,
    ttft_term,
    work_term,
)

__all__ = ["TERMS", "Situation", "Term"]
