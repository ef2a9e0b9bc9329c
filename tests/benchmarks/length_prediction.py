"""How well the engine's length predictor expects outputs on traces, beside the best constant.

Each request is predicted, then learnt, in the order of the trace, which has neither tenants nor parameters.

    python tests/benchmarks/length_prediction.py azure_llm_2023_conv.csv azure_llm_2023_code.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import fmean, median

from pagestream_engine.request import Sequence
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler.policies import LengthPredictor

MOST_TOKENS = 131_072


def errors(lengths: list[tuple[int, int]]) -> list[float]:
    """Return the absolute error of each prediction, from pairs of prompt and output tokens."""
    predictor, found = LengthPredictor(), list[float]()
    for number, (num_prompt, num_output) in enumerate(lengths):
        seq = Sequence("s", [0] * num_prompt, SamplingParams(), seed=0, arrival=number, max_total_tokens=MOST_TOKENS)
        # What an unlimited request may have is no prediction: the first one counts as none.
        found.append(abs(num_output - (predictor.expected(seq) if number else 0)))
        seq.token_ids += [0] * num_output
        predictor.note(seq)
    return found


def main() -> None:
    """Print the mean absolute errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    for path in parser.parse_args().traces:
        with path.open(newline="") as file:
            lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
        middle = median(output for _, output in lengths)
        constant = fmean(abs(output - middle) for _, output in lengths)
        print(f"{path.name}: {len(lengths)} requests, constant {constant:.1f}, predictor {fmean(errors(lengths)):.1f}")


if __name__ == "__main__":
    main()
