# ruff: noqa: F821
from itertools import pairwise


def good_requests(
    arrivals: dict[int, float], times: dict[int, list[float]], slo: SLO
) -> int:
    """Hold the longest gap against the limit, not the mean."""
    good = 0
    for name, each in times.items():
        gaps = [after - before for before, after in pairwise(each)]
        in_time = each[0] - arrivals[name] <= slo.ttft
        good += in_time and max(gaps, default=0.0) <= slo.inter_token
    return good
