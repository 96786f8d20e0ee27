"""What rounds of starts tell: paired differences to plain starts, their interval, and a verdict. Standard library only."""

from stats import bootstrap_interval, median, trimmed_mean

# The second plain one shows what differs by chance: it must not be told apart from the first.
KINDS = ("plain", "high", "best-effort", "plain again")
PLAIN = ("plain", "plain again")
# Time to the result, its parts to the end of the imports and from there on, time to the end of the process, CPU time.
CLOCKS = ("start", "import", "gpu", "wall", "cpu")
PARTS = ("import", "gpu")
PROMISE_RATIO_MAX = 1.03


# Rounds in which each kind is in each place once, and once behind each other kind.
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))


def order(turn):
    """The kinds of a round."""
    return [KINDS[at] for at in ORDERS[turn % len(ORDERS)]]


def verdict(low, high, promise=PROMISE_RATIO_MAX):
    """What an interval says of a promise: at most so much."""
    if high <= promise:
        return "kept"
    return "not kept" if low > promise else "cannot tell"


def row(kind, clock, base, mine, whole=None):
    """Seconds that `mine` takes more than `base`, round by round; ratios are over the median of `whole`, or `base`."""
    differences = [b - a for a, b in zip(base, mine, strict=True)]
    plain = median(base)
    added, (low, high) = trimmed_mean(differences), bootstrap_interval(differences, trimmed_mean)
    ratios = [1 + seconds / median(whole or base) for seconds in (added, low, high)]
    return {
        "kind": kind,
        "clock": clock,
        "rounds": len(differences),
        "plain_s": round(plain, 3),
        "added_s": round(added, 4),
        "ratio": round(ratios[0], 4),
        "ratio_low": round(ratios[1], 4),
        "ratio_high": round(ratios[2], 4),
        "verdict": verdict(ratios[1], ratios[2]),
    }


def rows(times):
    """A row for each kind and clock. Ratios of a part are over the whole start."""
    by_clock = {clock: times[clock] for clock in CLOCKS if clock in times}
    all_rows = []
    for clock, of_kind in by_clock.items():
        both = [sum(pair) / 2 for pair in zip(*(of_kind[kind] for kind in PLAIN), strict=True)]
        whole = by_clock.get("start", by_clock.get("wall"))[PLAIN[0]] if clock in PARTS else None
        for kind in KINDS:
            if kind not in PLAIN:
                all_rows.append(row(kind, clock, both, of_kind[kind], whole))
        all_rows.append(row("plain again", clock, of_kind["plain"], of_kind["plain again"], whole))
    return all_rows
