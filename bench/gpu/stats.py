"""Statistics helpers. Standard library only: CI tests them without a GPU.

Percentiles are nearest-rank (a value that was measured, never an
interpolation): the smallest value with at least `p` of the sample at or below.
"""

import math
import random


def percentile(values, p):
    """The nearest-rank percentile, `p` in 0..1, of a non-empty sample."""
    if not values:
        raise ValueError("percentile of an empty sample")
    if not 0 <= p <= 1:
        raise ValueError(f"p must lie in 0..1, got {p}")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(p * len(ordered)) - 1)]


def median(values):
    """The usual median: the mean of the two middle values of an even sample."""
    if not values:
        raise ValueError("median of an empty sample")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def median_row(rows):
    """One row of several of the same: the last, with the median of each figure, and of each in an object of figures."""
    merged = dict(rows[-1])
    for key in merged:
        values = [row.get(key) for row in rows]
        if any(isinstance(value, float) for value in values):
            # What one of them does not have nobody's median is of.
            merged[key] = None if None in values else round(median(values), 4)
        elif all(isinstance(value, dict) and all(isinstance(v, float) for v in value.values()) for value in values):
            merged[key] = {part: round(median([value[part] for value in values]), 4) for part in merged[key]}
    return merged


def poisson_schedule(rate_per_s, seconds, seed):
    """Arrival times in seconds from the start, within `seconds`; exponential gaps.

    The same arguments give the same arrivals, so every mode of a comparison
    serves the very same requests.
    """
    if rate_per_s <= 0:
        raise ValueError(f"the rate must be positive, got {rate_per_s}")
    source = random.Random(seed)
    at, arrivals = 0.0, []
    while True:
        at += source.expovariate(rate_per_s)
        if at >= seconds:
            return arrivals
        arrivals.append(at)


def summary(values):
    """Count, median, p99 and extremes, rounded for a result file."""
    return {
        "n": len(values),
        "p50": round(percentile(values, 0.50), 4),
        "p99": round(percentile(values, 0.99), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def trimmed_mean(values, share=0.2):
    """The mean without so much of either end of a non-empty sample: nearly as exact as the mean, and robust."""
    ordered = sorted(values)
    cut = min(int(share * len(ordered)), (len(ordered) - 1) // 2)
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def bootstrap_interval(values, of, seed=1, resamples=2000, confidence=0.95):
    """A bootstrap confidence interval of `of(values)`, as (low, high)."""
    source = random.Random(seed)
    n = len(values)
    found = sorted(of([values[source.randrange(n)] for _ in range(n)]) for _ in range(resamples))
    tail = (1 - confidence) / 2
    return percentile(found, tail), percentile(found, 1 - tail)


def paired_ratio(a_rounds, b_rounds):
    """How much slower `b` is than `a`, from rounds measured in turns.

    Returns the median over the rounds of b/a, its bootstrap interval and the
    extremes. Pairing by round cancels what drifts slowly (clocks, heat).
    """
    if len(a_rounds) != len(b_rounds) or not a_rounds:
        raise ValueError("both sides need the same, positive number of rounds")
    ratios = [b / a for a, b in zip(a_rounds, b_rounds)]
    low, high = bootstrap_interval(ratios, median)
    return {
        "ratio": round(median(ratios), 5),
        "ratio_low": round(low, 5),
        "ratio_high": round(high, 5),
        "ratio_min": round(min(ratios), 5),
        "ratio_max": round(max(ratios), 5),
        "rounds": len(ratios),
    }


# How much longer an inference alone may take in a mode than beside idle programs in plain mode; and under MPS so much more.
DRIFT_MAX, MPS_ALONE = 1.25, 0.25


def host_drift(own_ms, idle_ms, under_mps):
    """How much slower the inference alone was than beside idle programs before, if so much that ratios to that say nothing.

    Under MPS a CUDA graph takes up to a quarter longer for the other clients that are connected.
    """
    most = DRIFT_MAX + (MPS_ALONE if under_mps else 0)
    return own_ms / idle_ms if own_ms and own_ms > idle_ms * most else None
