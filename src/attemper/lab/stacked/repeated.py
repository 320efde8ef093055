"""repeated: one step that is done many times. On a GPU its kernels are recorded once and then replayed together."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UP = 3  # steps before the recording, so that libraries have made their choices


class Repeated:
    """Calls a function that reads and writes the same tensors every time, and returns nothing.

    On CUDA the first steps run as they are, then one is recorded, and from there on the recording is replayed. Every call is one
    real step, whichever way it is done.
    """

    def __init__(self, step: Callable[[], None], device: str) -> None:
        self.step, self.on_gpu = step, torch.device(device).type == "cuda"
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self.calls += 1
        if not self.on_gpu:
            self.step()
        elif self.graph is not None:
            self.graph.replay()
        elif self.calls <= WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            self.graph.replay()
