"""Three calls of run.py for a GPU that is lent for ten minutes at a time, most valuable checks first. README.md lists the questions
of each plan."""

MINUTES = 9  # limit of one plan; one of the ten is for transfers and the start

# Names of checks, or of families of checks, in the order in which a plan runs them.
PLANS = {
    1: ("probe", "facts", "attach", "cupti", "live", "sizes", "kinds", "pools", "gap", "cost.memory", "table"),
    2: ("torch.caching", "torch.async", "torch.profiler", "torch.slowdown_small", "torch.names_gpt", "cost.launch",
        "cost.cuinit", "faults"),
    3: ("libs", "cost.pair", "torch.slowdown", "torch.expandable", "torch.names_resnet", "torch.trace_teardown", "processes",
        "views", "cost", "nvml", "torch"),
}
LAST = 3  # also runs the checks that no entry names


def plan_of(name):
    """Returns the number of the plan that a check belongs to, and the place of its entry there."""
    for number, entries in PLANS.items():
        for place, entry in enumerate(entries):
            if name == entry or name.startswith(entry + "."):
                return number, place
    return LAST, len(PLANS[LAST])


def members(number, names):
    """Returns the checks among NAMES that belong to the plan, in its order."""
    placed = [(plan_of(name), order, name) for order, name in enumerate(names)]
    return [name for (plan, _), _, name in sorted(placed) if plan == number]


def times(results):
    """Returns a line for each plan with a check that ran: seconds of its checks, and the checks skipped because time was over."""
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
