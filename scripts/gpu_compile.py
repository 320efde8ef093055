"""Compile the Triton kernels for Ampere (sm_80, sm_86) and Hopper (sm_90) without a GPU, and look at what came out.

Prints registers, local memory, shared memory, seconds of one core (0 where Triton had it on disk: TRITON_CACHE_DIR) and the
instructions of the main loop for each score. Ends with 1 if a main loop of the forward on Hopper reads or writes local memory
(registers did not suffice), or waits for each product (`WARPGROUP` as often as `HGMMA`), if one of the backward or of float32
uses it often, or if a kernel needs more shared memory than the card has.

Needs triton 3.6 beside torch: `make triton` sets that up and runs this.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key
from triton.tools.tensor_descriptor import TensorDescriptor

from attemper.kernels import triton as kernel
from attemper.kernels.contract import ALL_SIGNS as ALL
from attemper.kernels.contract import OUTPUT_LOW_BIT, NeedsGrad, Problem, Upstream, empty_results
from attemper.kernels.triton import launch as running
from attemper.kernels.triton.tile import NUMBERS

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int16: "i16"}
TYPES |= {torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ROOM = {80: 163 << 10, 86: running.LEAST_ROOM, 90: 227 << 10}
"""Bytes of shared memory that a program may use, by the capability of a card."""
MOST_SPILLED = 16
"""Reads and writes of local memory in a main loop of the backward on Hopper; 156 of them made one take four times as long."""


def most_spilled(launch, body):
    """The same for any launch: none in the forward; in float32, a seventh of the instructions."""
    if launch.args[0].dtype == torch.float32:
        return len(body) // 7
    return MOST_SPILLED if "ARRIVED" in launch.constants or "SPLITS" in launch.constants else 0


def signature(arg):
    if isinstance(arg, torch.Tensor):
        return "*" + TYPES[arg.dtype]
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{TYPES[arg.base.dtype]}[{', '.join(map(str, arg.block_shape))}]>"
    return "fp32" if isinstance(arg, float) else "i32"


def source_of(launch):
    """What Triton compiles of a launch, with what it would specialise it on."""
    names = launch.kernel.arg_names
    types, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        if index >= len(launch.args):
            types[name], constants[(index,)] = "constexpr", launch.constants[name]
            continue
        arg = launch.args[index]
        types[name] = signature(arg)
        if name in NUMBERS:
            continue
        if isinstance(arg, int) and arg == 1:
            types[name], constants[(index,)] = "constexpr", 1
        elif isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, types, constants, attributes)


def compiled(launch, capability):
    """The launch for a card of this capability."""
    return triton.compile(source_of(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)


def key_on_disk(launch, capability):
    """Where Triton looks for it before it compiles."""
    backend = make_backend(GPUTarget("cuda", capability, 32))
    return hashlib.sha256(
        get_cache_key(source_of(launch), backend, backend.parse_options(launch.options), {}).encode()
    ).hexdigest()


def main_loop(binary):
    """The instructions of the first loop, by name; registers; bytes of local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)

        def tool(name, *options):
            return subprocess.run(
                [TOOLS / name, *options, file.name], capture_output=True, text=True, check=True
            ).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage"))
        listing = tool("nvdisasm", "-c").splitlines()
    labels, found = {}, []
    for line in listing:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                body = found[labels[back[1]] :]
                return [re.sub(r"^@!?U?P\w+\s+", "", one).split(".")[0].split()[0] for one in body], usage
    return [], usage


def launches(capability):
    """The launches that models make; on a card with the least shared memory, those that need most of it."""
    hopper = capability == 90
    kernel.is_hopper, kernel.room = lambda device: hopper, lambda device: ROOM[capability]
    kernel._decode.room = kernel.room
    gathered = []
    running.Launch.run = lambda self: gathered.append(self)
    gather_largest(gathered) if ROOM[capability] == running.LEAST_ROOM else gather_usual(gathered, hopper)
    if hopper:
        gather_float32(gathered)
    return gathered


def gather_usual(gathered, hopper):
    """Forward plain, with all signs, signs alone; decode; backward of the output alone, and with all signs but the peak."""
    for dim in (64, 128):
        for causal in (False, True):
            query, key, value = (torch.empty(1, 2, 4096, dim, dtype=torch.bfloat16) for _ in range(3))
            problem = Problem(query, key, value, *[None] * 6, dim**-0.5, None, 0 if causal else None, None, 0.0)
            alone = problem._replace(value=None)
            for what, sign_bits in ((problem, 0), (problem, ALL), (alone, ALL)):
                gathered.append(kernel.forward_launch(what, empty_results(what, sign_bits), sign_bits, hopper))
        row = problem._replace(query=query[:, :, :1])
        gathered += gather_decode(row)
        results = empty_results(problem, ALL | OUTPUT_LOW_BIT)
        of_signs = Upstream(torch.empty_like(results.output), *[torch.empty_like(results.lse) for _ in range(6)])
        needs_grad = NeedsGrad(True, True, True, False, False)
        kernel.backward(problem, results, Upstream(of_signs.output, *[None] * 6), needs_grad)
        for what in (problem, problem._replace(right=None)):
            kernel.backward(what, results, of_signs._replace(peak=None), needs_grad)


def gather_float32(gathered):
    """Forward with all signs and backward of the output in float32, which is multiplied without matrix units."""
    query, key, value = (torch.empty(1, 2, 4096, 128) for _ in range(3))
    problem = Problem(query, key, value, *[None] * 6, 128**-0.5, None, 0, None, 0.0)
    results = empty_results(problem, ALL)
    gathered.append(kernel.forward_launch(problem, results, ALL, True))
    upstream = Upstream(torch.empty_like(results.output), *[None] * 6)
    kernel.backward(problem, results, upstream, NeedsGrad(True, True, True, False, False))


def gather_decode(problem):
    results = empty_results(problem, ALL)
    return kernel._decode.decode_launches(
        problem, results, ALL, kernel._decode.Split.of(problem, results.lse.numel(), 8)
    )


def gather_largest(gathered):
    """Forward, decode and backward with a mask and a gain that have gradients, a softcap, and gradients at every sign."""
    # the gradient of the last mask is summed in float64
    cases = (
        (torch.bfloat16, 128, 4096),
        (torch.bfloat16, 256, 4096),
        (torch.float32, 256, 4096),
        (torch.bfloat16, 128, 256),
    )
    for dtype, dim, keys in cases:
        query, key, value = (
            torch.empty(1, heads, n, dim, dtype=dtype) for heads, n in ((8, 4096), (1, keys), (1, keys))
        )
        mask, gain = torch.empty(1, 1, 4096, keys, dtype=dtype), torch.empty(1, 8, 4096)
        problem = Problem(query, key, value, mask, gain, *[None] * 4, dim**-0.5, None, 0, 30.0, 0.0)
        results = empty_results(problem, ALL | OUTPUT_LOW_BIT)
        gathered.append(kernel.forward_launch(problem, results, ALL | OUTPUT_LOW_BIT, False))
        rows = problem._replace(query=query[:, :, :8], mask=mask[:, :, :8], gain=gain[:, :, :8])
        gathered += gather_decode(rows)[:1] if keys > 512 else []
        upstream = Upstream(torch.empty_like(results.output), *[torch.empty_like(results.lse) for _ in range(6)])
        kernel.backward(problem, results, upstream._replace(peak=None), NeedsGrad(True, True, True, True, True))


def main():
    faults = []
    for capability in ROOM:
        for launch in launches(capability):
            before = sum(os.times()[:4])  # of this process and of the assembler
            found = compiled(launch, capability)
            seconds = sum(os.times()[:4]) - before
            shared = found.metadata.shared
            body, usage = main_loop(found.asm["cubin"])
            tile = launch.constants.get("BM", 0) * launch.constants.get("BN", 0)
            scores = tile / 32 / launch.options["num_warps"]
            name = launch.kernel.fn.__name__
            facts = " ".join(
                f"{key}={launch.constants[key]}"
                for key in ("E", "RIGHT", "VALUES", "BITS", "ARRIVED")
                if key in launch.constants
            )
            each = f"{len(body) / scores:5.1f} instructions per score" if scores and body else ""
            print(
                f"sm_{capability} {name:18} {facts:40} {usage[1]:>3} registers {usage[2]:>4} bytes local "
                f"{shared:>6} shared {seconds:4.1f} s  {each}"
            )
            if shared > ROOM[capability]:
                faults.append(f"sm_{capability} {name} {facts}: {shared} bytes of shared memory, of {ROOM[capability]}")
            spilled, waits = sum(one in ("LDL", "STL") for one in body), body.count("WARPGROUP")
            if capability == 90 and spilled > most_spilled(launch, body):
                faults.append(f"{name} {facts}: {spilled} reads and writes of local memory in the main loop")
            if launch.constants.get("FAST") and waits > max(8, body.count("HGMMA") // 2):
                faults.append(f"{name} {facts}: {waits} waits in the main loop")
    print("\n".join(faults) or "no main loop on Hopper spills or waits, and all tiles fit")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
