"""The NEON variants of the native kernel without an ARM processor: cross-compiled, and run under qemu.

    python scripts/neon.py --cases 2000 --seed 0
    python scripts/neon.py --tests tests/kernels/test_agreement.py

Runs the cases of scripts/fuzz.py, or tests, in this process, and sends every call of the native kernel to neon.c, which holds the
kernel's own sources and runs under qemu-aarch64. What comes back is judged here, as the results of the library are.
"""

import argparse
import ast
import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import fuzz
import torch

from attemper.kernels.contract import Results, Upstream
from attemper.kernels.cpu import native

ROOT = Path(__file__).parents[1]
KERNEL = ROOT / "src/attemper/kernels/cpu/c"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
PROCESSOR = "cortex-a53"  # the first generation of 64-bit ARM: an instruction that not every one has ends the run

# bytes of a dtype, as native.DTYPES and tensors.h count them
SIZE = {0: 4, 1: 8, 2: 2, 3: 2, 4: 1, -16: 2, -32: 4, -64: 8}
READ, WRITTEN, BOTH = 0, 1, 2
UNBOUND = 1 << 40
NEEDS_GAIN = 16  # GRAD_GAIN
INPUTS = ("query", "key", "value", "mask", "gain")
SIGNS = ("argmax", "lse_low", "visible", "mean", "variance", "peak", "lse", "entropy", "sum_p2")


class Strided(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("step", c_int64 * 4))


class Rows(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in SIGNS)


class Call(ctypes.Structure):
    """As call.h has it; neon.c compares the sizes."""

    _fields_ = (
        *((name, Strided) for name in INPUTS),
        *((name, c_int64) for name in ("batch", "heads", "groups", "rows", "keys", "dim", "value_dim", "dtype")),
        *((name, c_int64) for name in ("mask_dtype", "device", "number", "left", "right", "sign_bits", "seed")),
        *(("output", c_void_p), ("output_low", c_void_p), ("measured", Rows)),
        *(("g_output", Strided), ("upstream", Rows), ("needs_grad", c_int64)),
        *((name, c_void_p) for name in ("d_query", "d_key", "d_value", "d_gain", "d_mask")),
        *(("d_mask_step", c_int64 * 4), ("d_mask_part", c_int64), ("parts", c_int64)),
        *(("parallel", c_void_p), ("threads", c_int64), ("poison", c_int64)),
        *((name, c_double) for name in ("scale", "softcap", "dropout")),
        *(("origin", c_int64), ("all_keys", c_int64)),
    )


class View:
    """A tensor as native.readable describes it: address, dtype, sizes and strides."""

    def __init__(self, described: tuple[int, ...]) -> None:
        self.at, self.dtype, *rest = described
        self.shape, self.step = rest[: len(rest) // 2], rest[len(rest) // 2 :]

    @property
    def bytes(self) -> int:
        if 0 in self.shape:
            return 0
        return SIZE[self.dtype] * (1 + sum((n - 1) * step for n, step in zip(self.shape, self.step, strict=True)))

    def broadcast(self) -> list[int]:
        """Its four steps; a dimension of size 1 repeats."""
        step = [0 if n == 1 else step for n, step in zip(self.shape, self.step, strict=True)]
        return step + [0] * (4 - len(step))


class Emulated:
    """The library, with its forward and backward on an emulated processor; `sent` counts their calls."""

    def __init__(self, driver: Path) -> None:
        self.here, self.sent, self.arrays = native.library, Counter[str](), []
        self.driver = subprocess.Popen(
            [EMULATOR, "-cpu", PROCESSOR, str(driver)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.variants = tuple(self.driver.stdout.readline().decode().split())
        native.library, native.VARIANTS, native.variant = self, self.variants, self.variants[-1]
        native._how["variant"] = len(self.variants) - 1
        self.here.configure(0, 0, native._how["parallel"])
        # so that every call comes by `write` and `backward`
        native.bound, native.offered, native.extension = False, native.twin, None

    def close(self) -> None:
        self.driver.stdin.close()
        self.driver.wait()
        self.driver.stdout.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here, name)

    def best(self) -> int:
        return len(self.variants) - 1

    def configure(self, variant: int, poison: int, parallel: int) -> None:
        self.variant, self.poison = variant, poison

    def write(self, *given: Any) -> None:
        call = self.asked(given[:11])
        call.sign_bits = given[11]
        self.add_results(call, given[12], WRITTEN)
        self.run("forward", call)

    def backward(self, *given: Any) -> tuple[()] | None:
        call = self.asked(given[:11])
        saved, upstream, needs, memory, call.parts = given[11:]
        arriving = Upstream(*upstream)
        if any(t is not None and not contiguous(View(t)) for t in (*saved, *arriving[1:])):
            self.arrays = []
            return None
        if given[4] is not None and needs & NEEDS_GAIN:
            assert len(View(given[4]).shape) == 3, "the gain of a backward has a number per row"
        self.add_results(call, saved, READ)
        if not call.parts:
            call.parts = self.here.parts(call.keys, call.batch * call.groups)
        if arriving.output is not None:
            call.g_output = self.strided("g_output", View(arriving.output))
        if needs & ~4:  # no sign depends on the values
            for name in Upstream._fields[1:]:
                self.add(f"upstream.{name}", getattr(arriving, name), READ)
        for index, (tensor, to) in enumerate(zip(given[:5], memory, strict=True)):
            if tensor is None or to is None:
                needs &= ~(1 << index)
            elif needs >> index & 1:
                self.add(f"d_{INPUTS[index]}", to, BOTH if INPUTS[index] == "mask" else WRITTEN)
        if memory[3] is not None:
            view = View(memory[3])
            call.d_mask_step[:] = [0 if n == 1 else step for n, step in zip(view.shape[1:], view.step[1:], strict=True)]
            call.d_mask_part = view.step[0] if view.shape[0] > 1 else 0
        call.needs_grad = needs
        self.run("backward", call)
        return ()

    def asked(self, given: tuple[Any, ...]) -> Call:
        """The tensors and numbers of a problem, as problem.c reads them."""
        seed, left, right, scale, softcap, dropout = given[5:]
        query, key, value, mask, gain = (None if t is None else View(t) for t in given[:5])
        call = Call(parts=1, mask_dtype=5, threads=torch.get_num_threads(), poison=self.poison, device=1)
        call.query, call.key = self.strided("query", query), self.strided("key", key)
        (call.batch, call.heads, call.rows, call.dim), call.dtype = query.shape, query.dtype
        call.groups, call.keys = key.shape[1:3]
        if value is not None:
            call.value, call.value_dim = self.strided("value", value), value.shape[3]
        if mask is not None:
            call.mask, call.mask_dtype = self.strided("mask", mask, mask.broadcast()), mask.dtype
        if gain is not None:
            step = [0, *gain.broadcast()[:1], 0, 0] if len(gain.shape) == 1 else gain.broadcast()
            call.gain = self.strided("gain", gain, step)
        call.seed, call.scale = seed or 0, scale
        call.left, call.right = (UNBOUND if bound is None else bound for bound in (left, right))
        call.softcap, call.dropout = softcap or 0, dropout or 0
        return call

    def strided(self, name: str, view: View, step: list[int] | None = None) -> Strided:
        self.add(f"{name}.at", (view.at, view.dtype, *view.shape, *view.step), READ)
        return Strided(None, (c_int64 * 4)(*(step or view.step)))

    def add_results(self, call: Call, results: tuple[Any, ...], kind: int) -> None:
        for name, tensor in zip(Results._fields, results, strict=True):
            self.add(f"measured.{name}" if name in SIGNS else name, tensor, kind)

    def add(self, name: str, described: Any, kind: int) -> None:
        """An array of the next call, by the name of its address in Call."""
        if described is None or not View(described).bytes:
            return
        place, of = 0, Call
        for part in name.split("."):
            place, of = place + getattr(of, part).offset, dict(of._fields_)[part]
        self.arrays.append((place, View(described), kind))

    def run(self, of_pass: str, call: Call) -> None:
        self.sent[of_pass] += 1
        to, arrays, self.arrays = self.driver.stdin, self.arrays, []
        to.write(words(ctypes.sizeof(Call), of_pass == "backward", self.variant, len(arrays)) + bytes(call))
        for place, view, kind in arrays:
            to.write(words(place, view.bytes, view.at % 64, kind))
            if kind != WRITTEN:
                to.write(ctypes.string_at(view.at, view.bytes))
        to.flush()
        failed = int.from_bytes(self.receive(8), "little")
        assert failed == 0, f"{of_pass}: the kernel returned {failed}"
        for _, view, kind in arrays:
            if kind != READ:
                ctypes.memmove(view.at, self.receive(view.bytes), view.bytes)

    def receive(self, count: int) -> bytes:
        found = self.driver.stdout.read(count)
        if len(found) < count:
            sys.exit(
                f"neon: the emulated process ended ({self.driver.wait()}): call.h and neon.py differ, or it crashed"
            )
        return found


def contiguous(view: View) -> bool:
    wanted = 1
    for n, step in zip(reversed(view.shape), reversed(view.step), strict=True):
        if view.bytes and n > 1 and step != wanted:
            return False
        wanted *= n
    return True


def words(*numbers: int) -> bytes:
    return b"".join(int(number).to_bytes(8, "little", signed=True) for number in numbers)


def build(folder: Path) -> Path:
    """neon.c with the kernel, by the flags of setup.py."""
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        sys.exit(f"neon: {' and '.join(missing)} not found. On Debian or Ubuntu: apt-get install {PACKAGES}")
    assigned = (node for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Assign))
    flags = next(ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "FLAGS")
    sources = [ROOT / "scripts/neon.c", KERNEL / "native.c", *sorted(KERNEL.glob("variants/*.c"))]
    found = folder / "neon"
    options = [*flags, "-Wall", "-Wextra", "-Werror", "-static", "-pthread"]
    subprocess.run([COMPILER, *options, *sources, "-lm", "-o", found], check=True)
    return found


def kind_of(seed: int) -> tuple[str, str, str]:
    """By what cases are counted: the variant, the dtype, and which pass computes the forward."""
    (query, key, _), _, how = fuzz.draw(seed)
    rows = query.shape[2] * (query.shape[1] // key.shape[1])
    way = "few rows" if rows <= 8 else "few keys" if key.shape[2] <= 4 else "tiles"
    return native.VARIANTS[how["variant"]], str(query.dtype).removeprefix("torch."), way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="run these tests instead: arguments for pytest")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        emulated = Emulated(build(Path(folder)))
        native.configure(poison=1)
        if asked.tests:
            import pytest

            failed = pytest.main(asked.tests)
            emulated.close()
            print(f"sent {dict(emulated.sent)} to {', '.join(emulated.variants)}")
            sys.exit(failed or not emulated.sent)
        cases, wrong, started = Counter[Any](), Counter[Any](), time.monotonic()
        for seed in range(asked.seed, asked.seed + asked.cases):
            kind = kind_of(seed)
            cases[kind] += 1
            before = emulated.sent["forward"]
            try:
                fuzz.check(seed)
                assert emulated.sent["forward"] > before, "no call came to the emulated kernel"
            except AssertionError as error:
                wrong[kind] += 1
                print(f"case {seed}: {error}", flush=True)
        emulated.close()
    for kind in sorted(cases):
        print(f"{' '.join(f'{word:10}' for word in kind)} {cases[kind]:5} cases, {wrong[kind]} wrong")
    sent = ", ".join(f"{count} {name}s" for name, count in emulated.sent.items())
    print(f"{cases.total()} cases ({sent}), {wrong.total()} wrong, {time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
