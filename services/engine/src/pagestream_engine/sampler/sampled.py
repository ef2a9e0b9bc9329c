"""What a step's sampling gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.errors import RequestFault


class DrawFault(IntEnum):
    """Why a row's token is none."""

    NOT_FINITE = 1
    NOTHING_ALLOWED = 2

    @property
    def message(self) -> str:
        """What to tell a request that is not to blame."""
        return "the model gave logits that are not finite numbers"

    def blame(self, bans: Sequence[str]) -> str:
        """Return what to tell a request: a RequestFault where its own fields leave no token.

        Args:
            bans: fields of the request that ban tokens at this place of its output.
        """
        if self is DrawFault.NOT_FINITE or not bans:
            return self.message
        together = "together they ban" if len(bans) > 1 else "it bans"
        return RequestFault(f"{', '.join(bans)}: no token may be chosen to go on with: {together} all of them")


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of some rows' chosen and likeliest tokens, on the device of the logits."""

    places: NDArray[np.int64]
    """(rows,): their places among the sampled rows."""
    counts: NDArray[np.int64]
    """(rows,): how many of the likeliest tokens each row asked for; the columns beyond belong to others."""
    token_ids: Tensor
    """(rows, 1 + most) int64: the chosen token, then the likeliest ones in order."""
    logprobs: Tensor
    """(rows, 1 + most) float32."""
    ranks: Tensor
    """(rows,) int32: the chosen token's place among all, from 1; equally likely ones by their ids."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row, on the device of the logits."""

    token_ids: Tensor
    """(rows,) int64."""
    values: Tensor
    """(rows,) of any float dtype: what each token was chosen by. Where it is not finite the token means nothing, and
    the row's request has failed."""
    logprobs: LogprobTensors | None = None
    """Of the rows that asked for them; None where none did."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """By place: what a row's sampling has raised. Its token means nothing; the other rows are whole."""
    left_out: tuple[int, ...] = ()
    """Places of rows that were not sampled, for their grammars' masks are not there yet. Their tokens mean nothing, and
    their state stays as it is."""
    bans: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By place: fields of a row's request that ban tokens."""

    def draw_faults(self) -> dict[int, DrawFault]:
        """By place: what is wrong with the tokens that mean nothing. Waits for the device."""
        values = self.values.tolist()
        if all(map(math.isfinite, values)):
            return {}
        return {
            place: DrawFault.NOTHING_ALLOWED if value == -math.inf else DrawFault.NOT_FINITE
            for place, value in enumerate(values)
            if not math.isfinite(value)
        }

    def spread(self, places: NDArray[np.int64], num_rows: int, errors: Mapping[int, str]) -> Sampled:
        """Return the result for `num_rows` rows of which these are at `places`; `errors` are the others'."""
        index = torch.from_numpy(places).to(self.token_ids.device)
        token_ids, values = self.token_ids.new_zeros(num_rows), self.values.new_zeros(num_rows)
        token_ids[index], values[index] = self.token_ids, self.values
        logprobs = None if self.logprobs is None else replace(self.logprobs, places=places[self.logprobs.places])
        bans = {int(places[place]): fields for place, fields in self.bans.items()}
        return Sampled(token_ids, values, logprobs, errors, bans=bans)
