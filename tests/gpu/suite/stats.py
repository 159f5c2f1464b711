"""Statistics of measured values, independent of their meaning and unit."""

import math
import random
import statistics


def median(values):
    return statistics.median(values) if values else None


def quantile(values, share):
    """Returns the smallest value that at least `share` of the values do not exceed; None without values."""
    if not values:
        return None
    rank = math.ceil(share * len(values) - 1e-9)
    return sorted(values)[max(rank, 1) - 1]


def summary(values):
    """Summarises repeated measurements of one value."""
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "min": min(values),
        "p50": median(values),
        "p95": quantile(values, 0.95),
        "p99": quantile(values, 0.99),
        "max": max(values),
    }


def interval(values, of=median, share=0.95, rounds=2000, seed=1):
    """Bootstrap confidence interval of a statistic: (low, high). The seed makes a run repeatable."""
    if not values:
        return (None, None)
    draw = random.Random(seed)
    found = sorted(of(draw.choices(values, k=len(values))) for _ in range(rounds))
    edge = int((1 - share) / 2 * rounds)
    return (found[edge], found[rounds - 1 - edge])


def paired(without, with_it):
    """Returns the effect of a change from pairs measured next to each other.

    The result is the median difference, its 95 % confidence interval, and both as shares of the baseline. Drift that
    affects
    both members of a pair cancels out.
    """
    if len(without) != len(with_it) or not without:
        raise ValueError(f"{len(without)} and {len(with_it)} values are not pairs")
    differences = [b - a for a, b in zip(without, with_it)]
    base = median(without)
    low, high = interval(differences)
    shares = [100 * (b - a) / a for a, b in zip(without, with_it) if a]
    share_low, share_high = interval(shares)
    return {
        "pairs": len(differences),
        "without": base,
        "with": median(with_it),
        "difference": median(differences),
        "difference_95": [low, high],
        "percent": median(shares),
        "percent_95": [share_low, share_high],
    }


def slope(xs, ys):
    """Least squares: (y at x = 0, y per x)."""
    if len(xs) < 2 or len(set(xs)) < 2:
        return (median(list(ys)), None)
    line = statistics.linear_regression(xs, ys)
    return (line.intercept, line.slope)
