"""bench: what attention with vitals and a watch cost in time and memory, compared with torch's SDPA and eager attention.

Data passes the files in this order:

    run           options, defaults and checks; calls the parts and returns one document
    candidates    what is measured: attemper, torch's SDPA and eager attention on one case
    eager         attention in plain PyTorch, with and without the vitals
    speed         the part `speed`: the time of each candidate
    memory        the part `memory`: the peak memory of a call, in a process of its own
    calls, cpu    the part `cpu`: short and unusual calls, and a table of sizes
    cuda          the part `cuda`: forward, backward, signs alone and decode on a GPU
    watch         the part `watch`: what watching a small encoder costs on a CPU
    watch_cuda    the same on a GPU, with models of the size that people train
    watch_compiled    the same for compiled models: cost, graph breaks, recompilations
    host          the part `host`: time on the host of small calls, watched layers and compiled steps
    promises      the part `promises`: the ratios of the documents, few enough to be measured at every change
    render        tables for the terminal

The interleaved timer is `attemper_lab.timing`, which the experiments use too.
"""

from typing import Any

BenchRow = dict[str, Any]
"""One measured case, as the JSON has it."""
