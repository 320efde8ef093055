"""repeated: a step that runs many times. On a GPU its kernels are recorded once as a CUDA graph, and then replayed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from attemper.extension.tools import out_of_memory


class Repeated:
    """Calls a function that reads and writes the same tensors every time, and returns nothing.

    On CUDA the first calls, ``warm_up`` of them, run as they are, so that libraries make their choices; the next is recorded,
    and from there on the recording is replayed. Every call is one real step, whichever way it is done. Two that share a
    ``pool`` share the memory of what lies between their inputs and outputs.
    """

    def __init__(self, step: Callable[[], None], device: str, pool: Any = None, warm_up: int = 2) -> None:
        self.step, self.on_gpu = step, torch.device(device).type == "cuda"
        self.pool, self.warm_up, self.calls = pool, warm_up, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.graph is not None:
            self.graph.replay()
        elif not self.on_gpu or self.calls <= self.warm_up:
            self.step()
        else:
            torch.cuda.synchronize()
            self.graph = self._recorded()
            (self.step if self.graph is None else self.graph.replay)()

    def _recorded(self) -> torch.cuda.CUDAGraph | None:
        """Record the step without running it. If it cannot be recorded, note that and return None: it then runs as it is."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self.step()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            self.on_gpu = False
            reason = str(error).strip().splitlines()[0]
            print(f"steps are not recorded, and run one kernel at a time: {reason}", file=sys.stderr, flush=True)
            return None
        return graph
