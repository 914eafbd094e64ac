"""From logits to a token: the likeliest one, or a draw that can be repeated.

A draw depends on the request's seed, the sample's index and the token's
position, and on nothing else. So a request gets the same tokens in any batch,
and again after it was preempted.
"""

import numpy as np
import torch
from torch import Tensor

from llm_systems_cookbook.serving.request import Request


def draw_token(
    logits: Tensor, request: Request, sample: int, position: int
) -> int:
    """Draw the token of one position.

    Args:
        logits: [vocab_size], none of them NaN.
        request: has the temperature, above 0, and the seed.
        sample: index of the sample.
        position: of the token in the sequence, prompt included.

    Returns:
        A token id; a token of probability 0 is never drawn.
    """
    scores = logits.to("cpu", torch.float64)
    scores = (scores - scores.max()) / request.temperature
    total = scores.exp().cumsum(0)
    rng = np.random.default_rng([request.seed, sample, position])
    at = torch.tensor(rng.random(), dtype=torch.float64) * total[-1]
    return int(torch.searchsorted(total, at, right=True))


def unusable(logits: Tensor) -> Tensor:
    """Tell which rows no token can be chosen from: [num_rows] bool.

    A row needs a largest number: NaN and positive infinity leave none, and
    neither does a row of negative infinity alone.
    """
    return ~logits.max(dim=1).values.isfinite()
