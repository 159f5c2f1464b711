"""A GPU is lent for ten minutes at a time: three calls that answer the most valuable questions first. README.md has what each
plan answers."""

MINUTES = 9  # of one plan; the rest of the ten is for the start and for what comes back

# Names of checks, or their families. A plan runs them in this order.
PLANS = {
    1: ("probe", "facts", "attach", "cupti", "live", "sizes", "kinds", "pools", "gap", "cost.memory", "table"),
    2: ("torch.caching", "torch.async", "torch.profiler", "torch.slowdown_small", "torch.names_gpt", "cost.launch",
        "cost.cuinit", "faults"),
    3: ("libs", "cost.pair", "torch.slowdown", "torch.expandable", "torch.names_resnet", "torch.trace_teardown", "processes",
        "views", "cost", "nvml", "torch"),
}
LAST = 3  # it has what the others leave, too


def plan_of(name):
    """The number of the plan that a check belongs to, and its place there."""
    for number, entries in PLANS.items():
        for place, entry in enumerate(entries):
            if name == entry or name.startswith(entry + "."):
                return number, place
    return LAST, len(PLANS[LAST])


def members(number, names):
    """Those of these checks that belong to the plan, in its order."""
    placed = [(plan_of(name), order, name) for order, name in enumerate(names)]
    return [name for (plan, _), _, name in sorted(placed) if plan == number]


def times(results):
    """Lines: for each plan of which a check ran, how long its checks took, and what was left out for want of time."""
    out = []
    for number in PLANS:
        ours = [r for r in results if plan_of(r["name"])[0] == number]
        ran = [r for r in ours if "seconds" in r]
        if not ran:
            continue
        slowest = max(ran, key=lambda r: r["seconds"])
        late = [r["name"] for r in ours if r.get("late")]
        out.append(f"plan {number}: {len(ran)} checks took {sum(r['seconds'] for r in ran):.0f} s of {60 * MINUTES} s, the longest "
                   f"{slowest['name']} with {slowest['seconds']:.0f} s" + (f"; no time for {', '.join(late)}" if late else ""))
    return out
