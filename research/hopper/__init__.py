"""hopper: attention for Hopper GPUs in Gluon, with every vital sign and all gradients, on the way to `attemper.kernels`.

It fulfils the contract of the kernels (output, its rounding error, all signs, their gradients) and has run on no GPU yet:
`check.py` is the first thing to run there. What can be known without one is tested by `make triton`:

parts.py        sums without shuffles, turns of the warpgroups, what the warps of a program share, its tiles
sums.py         what a tile of logits adds to the sums of its rows, fast and careful; the signs of a row
forward.py      the kernel: the warp that copies, the warpgroups that compute, with values or without
terms.py        what the backward needs of each row
backward.py     its two kernels: dQ over the keys; dK and dV over the rows
schedule.py     which program computes which tiles, in which order
launch.py       the arguments and constants of launches
interpreter.py  runs the kernels on a CPU from their own source, one thread for each warp partition
gates.py        compiles them for sm_90a, and reads registers, spills, instructions and waits from the machine code
check.py        on a GPU: right, repeatable, and how fast beside cuDNN
"""
