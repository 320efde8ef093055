"""What an installed attemper must do, wheel or not: it is where pip puts packages, and runs calls on the kernel that it should.

python scripts/installed.py cpu          # a wheel of Linux or macOS
python scripts/installed.py blockwise    # of Windows, or an sdist that was installed without a C compiler: it says so, once
"""

import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper import demo, env, report

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of numbers near 1


def gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> list[torch.Tensor]:
    return [output, *torch.autograd.grad(output.sum(), (query, key, value))]


def main(wanted: str) -> None:
    at = Path(attemper.__file__).resolve()
    assert at.is_relative_to(Path(sysconfig.get_path("platlib")).resolve()), f"attemper was imported from {at}"
    query = torch.randn(1, 2, 9, 8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            attemper.attention(query, query, query)
    slow = [str(one.message) for one in said if "attemper" in str(one.message)]
    assert len(slow) == (wanted != "cpu"), f"warnings: {slow}"
    for dtype, tolerance in TOLERANCE.items():
        for rows, keys in ((40, 40), (1, 600), (70, 3)):
            shapes = ((2, 4, rows, 16), (2, 2, keys, 16), (2, 2, keys, 24))
            tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
            wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
            taken = [choice.kernel for choice in attemper.kernels.why(*tensors) if choice.taken]
            assert taken == [wanted], f"{dtype} runs on {taken}"
            found = gradients(*tensors, attemper.attention(*tensors).output)
            exact = gradients(*wide, scaled_dot_product_attention(*wide, enable_gqa=True))
            for ours, theirs in zip(found, exact, strict=True):
                error = (ours.double() - theirs).abs().max() / (1 + theirs.abs().max())
                assert error < tolerance, f"{dtype}, {rows} rows, {keys} keys: off by {error:.1e}"
    assert report.html({"schema": "attemper.scan/1"}).count("</script>") == 2  # what is no Python came along
    assert demo.named("demo:scaled")[1].parent.name == "scaled"
    compilers = [name for name in ("cc", "gcc", "clang", "cl") if shutil.which(name)]
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, compilers: {', '.join(compilers) or 'none'}")
    print(f"cpu: {env.describe()['kernels']['cpu']['reason']}")
    print(*slow, f"installed: calls run on {wanted}, and are right", sep="\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1])
