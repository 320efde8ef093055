"""Entropy as a loss over 4096 tokens: gradient descent finds the scale at which 64 keys share the weight of a row."""

import math
import resource
import sys

import torch

import attemper

TOKENS, WANTED = 4096, 64
MIB = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in KiB elsewhere


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


torch.manual_seed(0)
query, key = torch.randn(2, TOKENS, 64)
log_scale = torch.zeros((), requires_grad=True)  # exp(0) = 1 is no scale at all
optimizer = torch.optim.SGD([log_scale], lr=0.02)

before = peak_memory()
for step in range(8):
    vitals = attemper.measure(query, key, scale=log_scale.exp(), signs="entropy")
    entropy = vitals.entropy.mean()
    loss = (entropy - math.log(WANTED)).square()
    print(f"step {step}  loss {loss:6.3f}  scale {log_scale.exp():.3f}  effective keys {entropy.exp():5.1f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

matrix = TOKENS**2 * 4 / 2**20
print(f"The process grew by {peak_memory() - before:.0f} MiB; one {TOKENS} × {TOKENS} matrix is {matrix:.0f} MiB.")
