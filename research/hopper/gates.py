"""Compile forward and backward for sm_90a without a GPU, and look at its main loop. Ends with 1 if a gate is broken.

    PYTHONPATH=src python -m research.hopper.gates      needs triton 3.6, whose package has the assembler and the disassembler

A main loop must not spill; it must not wait for each product by itself (the compiler serialises them without a word if it has too
few registers, or if a product under way crosses the edge of a loop); every exponential must come before the wait for the product
with the values, or the two do not overlap; and it must not have more instructions than when it was last looked at. In the
backward the assembler moves most exponentials behind a wait: forbidding that made our prototype 4 to 8 % slower on an H200.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attemper.kernels.contract import ALL_SIGNS, BIT, OUTPUT_LOW_BIT, empty_results

from .backward import keys_kernel, rows_kernel
from .forward import forward_kernel
from .launch import backward_arguments, forward_arguments, problem_of
from .terms import PLACES

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ROOM = 227 << 10
CORE = BIT["visible"] | BIT["peak"] | BIT["entropy"] | BIT["sum_p2"]
MOST_SPILLED = 1
"""Reads and writes of local memory in a main loop: with all signs a number that does not change lies there."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int16: "i16", torch.int32: "i32"}
TYPES |= {torch.int64: "i64"}


class Gate(NamedTuple):
    """A launch and the most instructions that its main loop may have for 64 scores of a thread."""

    name: str
    dim: int
    causal: bool
    bits: int
    most: int
    values: bool = True
    exact: bool = True
    keys: int = 4096
    dtype: torch.dtype = torch.bfloat16


GATES = (
    Gate("plain, divided by the exact sum", 128, True, 0, 310, exact=False),
    Gate("plain", 128, True, 0, 438),
    Gate("plain, with what rounding takes", 128, True, OUTPUT_LOW_BIT, 438),
    Gate("core signs", 128, True, CORE, 598),
    Gate("core signs, full", 128, False, CORE, 598),
    Gate("core signs, float16", 128, True, CORE, 650, dtype=torch.float16),
    Gate("core signs, 1,024 keys", 128, True, CORE, 332, keys=1024),
    Gate("all signs", 128, True, ALL_SIGNS, 800),
    Gate("plain", 64, True, 0, 430),
    Gate("core signs", 64, True, CORE, 590),
    Gate("all signs", 64, True, ALL_SIGNS, 790),
    Gate("signs alone", 128, True, ALL_SIGNS, 588, values=False),
    Gate("signs alone", 64, True, ALL_SIGNS, 580, values=False),
)


class BackwardGate(NamedTuple):
    """A backward, and the most instructions of the main loops of its two kernels:"""

    name: str
    dim: int
    causal: bool
    arrived: int
    most_over_keys: int  # of 64 rows and 64 keys, or 128 at head dim 64
    most_over_rows: int  # of 64 keys and 64 rows, or 32 if gradients of signs arrive at head dim 128
    dtype: torch.dtype = torch.bfloat16


OUTPUT, ALL_ARRIVED = 1, 127
BACKWARD_GATES = (
    BackwardGate("gradient of the output", 128, True, OUTPUT, 270, 305),
    BackwardGate("gradient of the output, full", 128, False, OUTPUT, 270, 295),
    BackwardGate("gradient of the output, float16", 128, True, OUTPUT, 308, 370, torch.float16),
    BackwardGate("gradient of the output", 64, True, OUTPUT, 385, 255),
    BackwardGate("gradients of all signs", 128, True, ALL_ARRIVED, 515, 335),
    BackwardGate("gradients of all signs", 64, True, ALL_ARRIVED, 800, 500),
)
MOST_SPILLED_BACKWARD = 2
MOST_WAITS_BACKWARD = 8


class Tile(NamedTuple):
    """What a descriptor of tiles is compiled for."""

    dtype: torch.dtype
    block: tuple[int, ...]

    def signature(self) -> str:
        half = self.dtype.itemsize == 2
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=128 if half else 0, element_bitwidth=16 if half else 32, rank=len(self.block)
        )
        return f"tensordesc<{TYPES[self.dtype]}[{', '.join(map(str, self.block))}],{layout!r}>"


def tile_of(tensor: torch.Tensor, rows: int, dim: int) -> Tile:
    return Tile(tensor.dtype, (1, 1, rows, dim))


def compiled(gate: Gate) -> Any:
    query, key, value = (torch.empty(1, 2, gate.keys, gate.dim, dtype=gate.dtype) for _ in range(3))
    problem = problem_of(query, key, value if gate.values else None, 0 if gate.causal else None)
    results = empty_results(problem, gate.bits)
    _, args, constants = forward_arguments(problem, results, gate.bits, 132, tile_of, gate.exact)
    return compile_kernel(forward_kernel, args, constants)


def compiled_backward(gate: BackwardGate) -> tuple[Any, Any]:
    query, key, value, g = (torch.empty(1, 2, 4096, gate.dim, dtype=gate.dtype) for _ in range(4))
    problem = problem_of(query, key, value, 0 if gate.causal else None)
    terms = torch.empty(2, 2 if gate.arrived == OUTPUT else PLACES.value, 4096)
    over_keys, over_rows = backward_arguments(
        problem, g, terms, (query, key, value), gate.arrived, terms if gate.dtype == torch.float16 else None, tile_of,
        lambda tensor, rows: Tile(tensor.dtype, (1, 1, rows)),
    )  # fmt: skip
    return compile_kernel(rows_kernel, *over_keys[1:]), compile_kernel(keys_kernel, *over_rows[1:])


def compile_kernel(kernel: Any, args: list[Any], constants: dict[str, Any]) -> Any:
    names, types, fixed, attributes = kernel.arg_names, {}, {}, {}
    for place, name in enumerate(names):
        if place >= len(args):
            types[name], fixed[(place,)] = "constexpr", constants[name]
            continue
        arg = args[place]
        if isinstance(arg, torch.Tensor):
            types[name], attributes[(place,)] = "*" + TYPES[arg.dtype], [["tt.divisibility", 16]]
        else:
            types[name] = arg.signature() if isinstance(arg, Tile) else "fp32" if isinstance(arg, float) else "i32"
    source = GluonASTSource(kernel, types, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def loops(binary: bytes) -> tuple[list[list[str]], str]:
    """The instructions of each loop that multiplies and has no other such loop inside; and what the kernel uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)

        def tool(name: str, *options: str) -> str:
            command = [str(TOOLS / name), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, listing = tool("cuobjdump", "-res-usage"), tool("nvdisasm", "-c").splitlines()
    labels: dict[str, int] = {}
    code: list[str] = []
    found: list[tuple[int, int]] = []
    for line in listing:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(re.sub(r"^@!?U?P\w+\s+", "", instruction[1]))
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", code[-1])
            if back and back[1] in labels and any("HGMMA" in one for one in code[labels[back[1]] :]):
                found.append((labels[back[1]], len(code)))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None
    return [code[a:b] for a, b in inner], f"{registers[1]} registers, {registers[2]} bytes of stack"


def faults_of(gate: Gate, body: list[str]) -> list[str]:
    count = Counter(one.split()[0].split(".")[0] for one in body)
    waits = [place for place, one in enumerate(body) if "DEPBAR" in one]
    late = [place for place, one in enumerate(body) if one.startswith("MUFU.EX2") and waits and place > waits[-1]]
    faults = []
    if count["LDL"] + count["STL"] > MOST_SPILLED:
        faults.append(f"{count['LDL'] + count['STL']} reads and writes of local memory")
    if count["WARPGROUP"] > 6:
        faults.append(f"{count['WARPGROUP']} waits: products are serialised")
    if gate.values and late:
        faults.append(f"{len(late)} exponentials behind the wait for the product with values")
    if len(body) > gate.most:
        faults.append(f"{len(body)} instructions, of {gate.most}")
    return faults


def backward_faults(bodies: list[list[str]], most: int) -> tuple[list[str], list[int]]:
    """Faults and lengths of the two loops, one for each warpgroup, in which all keys are visible."""
    # what is no loop ends with a copy to memory; the other loops have masks, which make them longer
    whole = sorted((body for body in bodies if not any(one.startswith("STS") for one in body)), key=len)
    faults = [] if len(whole) == 4 else [f"{len(whole)} main loops, two for each warpgroup were expected"]
    for body in whole[:2]:
        count = Counter(one.split()[0].split(".")[0] for one in body)
        if count["LDL"] + count["STL"] > MOST_SPILLED_BACKWARD:
            faults.append(f"{count['LDL'] + count['STL']} reads and writes of local memory")
        if count["WARPGROUP"] > MOST_WAITS_BACKWARD:
            faults.append(f"{count['WARPGROUP']} waits: products are serialised")
        if len(body) > most:
            faults.append(f"{len(body)} instructions, of {most}")
    return faults, [len(body) for body in whole[:2]]


def said_by_assembler(binary: Any) -> list[str]:
    """Its warnings of serialised products (C7510, C7512, C7514 and others of their kind), which Triton does not show."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(binary.asm["ptx"])
        command = [
            str(TOOLS / "ptxas"),
            "-v",
            "--gpu-name=sm_90a",
            str(source),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted(set(re.findall(r"C75\d\d", said.stdout + said.stderr)))


def main() -> int:
    broken = 0
    for gate in GATES:
        binary = compiled(gate)
        bodies, usage = loops(binary.asm["cubin"])
        fast = [body for body in bodies if not any(one.startswith("FMNMX") for one in body)]
        faults = [fault for body in fast for fault in faults_of(gate, body)]
        faults += [] if len(fast) == 2 else [f"{len(fast)} main loops, one for each warpgroup was expected"]
        broken += report(gate, gate.name, binary, usage, [len(body) for body in fast], faults)
    for back in BACKWARD_GATES:
        kernels = zip(("over keys", "over rows"), compiled_backward(back), back[4:6], strict=True)
        for name, binary, most in kernels:
            bodies, usage = loops(binary.asm["cubin"])
            faults, lengths = backward_faults(bodies, most)
            broken += report(back, f"{back.name}, {name}", binary, usage, lengths, faults)
    many = len(GATES) + 2 * len(BACKWARD_GATES)
    print(f"{broken} of {many} gates are broken" if broken else f"{many} gates hold")
    return int(broken > 0)


def report(
    gate: Gate | BackwardGate, name: str, binary: Any, usage: str, lengths: list[int], faults: list[str]
) -> bool:
    faults += [f"the assembler warns: {', '.join(said)}"] if (said := said_by_assembler(binary)) else []
    if binary.metadata.shared > ROOM:
        faults.append(f"{binary.metadata.shared} bytes of shared memory, of {ROOM}")
    what = f"d {gate.dim} {'causal' if gate.causal else 'full'} {name}"
    sizes = ", ".join(map(str, lengths))
    print(f"{what:58} {usage}, {binary.metadata.shared} shared, main loops {sizes}", "; ".join(faults), flush=True)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
