"""Questions that only hardware can answer: the fifteen of reference/cupti.md 12, and two more.

Checks list the questions they settle and give the answer as a sentence (`t.answer`); results.md collects the answers.
"""

QUESTIONS = {
    1: "Can the agent subscribe inside the hook, on CUDA 12 and 13 drivers, and what does that add to cuInit?",
    2: "What if the hook is run by another client's cuptiSubscribe?",
    3: "Do cuMemAllocPitch, cudaMallocArray, cudaMalloc3D make inner callbacks?",
    4: "Does GRAPHNODE_CREATED come while a captured cuMemAllocAsync runs?",
    5: "What does NVML charge for a cuMemAlloc of 1 B to 64 MiB, and in which unit?",
    6: "What does NVML charge for IPC and handle imports, managed and pinned memory, multicast?",
    7: "By which step does a driver pool grow, and when does it shrink?",
    8: "What does a subscription of the first kind get after one that allows several (r610 and later)?",
    9: "What do torch.profiler and the agent do to each other, with and without KINETO_USE_DAEMON?",
    10: "What does a callback cost cuMemAlloc and cuMemAllocAsync, and does a launch cost nothing?",
    11: "Do stacks, printf FIFO and malloc heap follow the model?",
    12: "What does the end of CUPTI for everybody (TEARDOWN_CUPTI=1) do to the agent's subscription?",
    13: "Does an older CUPTI work on a newer driver, and the other way round?",
    14: "Does cuptiEnableCallback refuse an id beyond the last one with 1?",
    15: "What do calls give in a forked child, and does cuInit's own fork disturb the agent's handlers?",
    16: "Does libcudart make its primary context by cuDevicePrimaryCtxRetain (386), or is CONTEXT_CREATED the only callback? "
        "Does cuptiGetDeviceId answer inside of that callback?",
    17: "Does an exported VMM handle stay charged to its exporter after cuMemRelease, until the descriptor is closed?",
}


def answers(results):
    """Returns lines of results.md: each question with its answers, or the reason why it has none."""
    out = []
    for number, text in QUESTIONS.items():
        asked = [r for r in results if number in r.get("questions", ())]
        if not asked:
            continue
        said = [f"{a['text']} ({r['name']})" for r in asked for a in r.get("answers", ()) if a["question"] == number]
        silent = [f"{r['name']}: {r['verdict']}" + (f", {' '.join(r['reason'].split())[:160]}" if r["reason"] else "")
                  for r in asked if not any(a["question"] == number for a in r.get("answers", ()))]
        out.append(f"{number}. {text} " + (" ".join(said) if said else "**No answer**") +
                   (f" [{'; '.join(silent)}]" if silent else ""))
    return out
