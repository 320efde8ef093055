"""How exact half-precision gradients are where keys and values share a part, and what that exactness costs.

    OMP_NUM_THREADS=1 python scripts/half_gradients.py

Errors are relative, against float64 on the same rounded inputs: torch's fused SDPA, its math backend, and attemper with and
without the bits that rounding takes from the output. Costs are those of a forward and backward step, interleaved, in CPU time.
"""

import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper.kernels.contract import OUTPUT_LOW_BIT, gradient_bits
from attemper.operation import run as running

SHAPE = (1, 8, 1024, 64)
DIVISOR = SHAPE[-1] ** -0.5


def draw(dtype: torch.dtype, keys: float = 5.0, values: float = 3.0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    query, key, value, cotangent = (torch.randn(SHAPE) for _ in range(4))
    for tensor, size in ((key, keys), (value, values)):
        tensor += size * torch.randn(1, SHAPE[1], 1, SHAPE[3])
    return [t.to(dtype) for t in (query, key, value, cotangent)]


def fused(q, k, v, scale):
    return scaled_dot_product_attention(q * (scale / DIVISOR).view(-1, 1, 1).to(q.dtype), k, v)


def plain(q, k, v, scale):
    with sdpa_kernel(SDPBackend.MATH):
        return fused(q, k, v, scale)


def ours(q, k, v, scale):
    return attemper.attention(q, k, v, scale=scale, signs=()).output


def gradients(run, tensors, dtype=None):
    *inputs, cotangent = (t.to(dtype or t.dtype) for t in tensors)
    scale = torch.full((SHAPE[1],), DIVISOR, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    leaves = [t.detach().requires_grad_() for t in (*inputs, scale)]
    return torch.autograd.grad(run(*leaves), leaves, cotangent)


def without(sign_bits):
    return gradient_bits(sign_bits) & ~OUTPUT_LOW_BIT


def main() -> None:
    print(f"{'':10}{'':28}{'d(query)':>10}{'d(key)':>10}{'d(value)':>10}{'d(scale)':>10}")
    for dtype in (torch.bfloat16, torch.float16):
        tensors = draw(dtype)
        exact = gradients(plain, tensors, torch.float64)
        ways = {"torch, fused": fused, "torch, math": plain, "attemper": ours, "attemper, rounded output": ours}
        for name, run in ways.items():
            running.gradient_bits = without if name.endswith("output") else gradient_bits
            found = gradients(run, tensors)
            errors = [(a.double() - b).norm().item() / b.norm().item() for a, b in zip(found, exact, strict=True)]
            print(f"{str(dtype)[6:]:10}{name:28}" + "".join(f"{error:10.1e}" for error in errors))
    for dtype in (torch.bfloat16, torch.float16):
        times = {gradient_bits: [], without: []}
        for _ in range(20):
            for ask, found in times.items():
                running.gradient_bits = ask
                start = time.process_time()
                gradients(ours, tensors, dtype)
                found.append(time.process_time() - start)
        ratio = statistics.median(times[gradient_bits]) / statistics.median(times[without])
        print(
            f"{str(dtype)[6:]}: a step takes {ratio:.2f} times as long, and keeps 2 bytes more for each output number"
        )


if __name__ == "__main__":
    main()
