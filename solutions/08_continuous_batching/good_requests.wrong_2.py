# ruff: noqa: F821
from itertools import pairwise


def good_requests(
    arrivals: dict[int, float], times: dict[int, list[float]], slo: SLO
) -> int:
    """Count the time to the first token from 0."""
    good = 0
    for _, each in times.items():
        gaps = [after - before for before, after in pairwise(each)]
        in_time = each[0] <= slo.ttft
        good += in_time and sum(gaps) <= slo.inter_token * len(gaps)
    return good
