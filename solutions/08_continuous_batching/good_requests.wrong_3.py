# ruff: noqa: F821
from itertools import pairwise


def good_requests(
    arrivals: dict[int, float], times: dict[int, list[float]], slo: SLO
) -> int:
    """Divide by the tokens, of which there is one more than gaps."""
    good = 0
    for name, each in times.items():
        gaps = [after - before for before, after in pairwise(each)]
        in_time = each[0] - arrivals[name] <= slo.ttft
        good += in_time and sum(gaps) <= slo.inter_token * len(each)
    return good
