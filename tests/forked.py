"""Processes for tests, forked from one that has imported what tests import: an import costs seconds, a fork nothing.

The nursery is itself a fork of this process, made when all tests are collected, and so imported, and none has run: in the
fork of a process that has computed gradients torch refuses to compute any.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
import warnings

_PIPES = []  # to the nursery and from it, once there is one


def prepare():
    """Fork the nursery. It ends with its input."""
    (theirs, ours), (answers, told) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        try:
            _tend(theirs, told)
        finally:
            os._exit(1)
    os.close(theirs)
    os.close(told)
    _PIPES.extend((os.fdopen(ours, "w"), os.fdopen(answers)))
    atexit.register(_end, child)


def _end(child):
    for pipe in _PIPES:
        pipe.close()
    os.waitpid(child, 0)


def _tend(theirs, told):
    """In the nursery: run what is asked for, one order after the other."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        # close what this process has open: whoever waits for the end of such a file would wait for the nursery too
        if (file := int(name)) not in (theirs, told, nothing) and _is_open(file):
            os.dup2(nothing, file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _late)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _import()
    gc.freeze()
    with os.fdopen(theirs) as orders, os.fdopen(told, "w") as answers:
        for line in orders:
            print(json.dumps(_run(**json.loads(line))), file=answers, flush=True)
    os._exit(0)


def _is_open(file):
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _import():
    """Import what most of these processes need, in case only a few tests were collected."""
    import torch
    import torch._dynamo
    from torch import distributed  # noqa: F401
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    from attemper.watch import session  # noqa: F401

    with contextlib.suppress(ModuleNotFoundError):  # the library alone is tested too
        from attemper_lab.bench import memory  # noqa: F401

    torch.set_num_threads(1)


def _start(code, call, output, timeout):
    child = os.fork()
    if child:
        return child
    file, nothing = os.open(output, os.O_CREAT | os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0), os.dup2(file, 1), os.dup2(file, 2)
    faulthandler.enable(), faulthandler.dump_traceback_later(max(1, timeout - 2))
    try:
        exec(compile(code, "child", "exec"), {"__name__": "child", "argv": call})
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def _late(*_):  # what the processes printed gives the reason, or shows where they wait
    raise TimeoutError


def _run(code, calls, folder, timeout, expected):
    started = {}
    for number, call in enumerate(calls):
        output = f"{folder}/{number}.out"
        started[_start(code, call, output, timeout)] = call, output
    signal.alarm(timeout)
    failed = []
    try:
        while started:
            child, status = os.wait()
            call, output = started.pop(child)
            if status != expected:
                failed.append((call, status, output))
                signal.alarm(5)  # for those that wait for this one
    except TimeoutError:
        failed += [(call, "still running", output) for call, output in started.values()]
        for child in started:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    signal.alarm(0)
    return "".join(f"{call} {status} {open(output).read()}" for call, status, output in failed)


def run(code, calls, folder, timeout=300, expected=0):
    """Run code once for each list of words in calls, all at the same time, with the words as `argv`.

    `expected` is the status that each process must end with: 0, the number of a signal, or 256 times an exit code. What
    each printed is then in `folder`: `0.out`, `1.out`, …
    """
    if not _PIPES:
        prepare()
    words = {"calls": [list(map(str, call)) for call in calls], "folder": str(folder)}
    order = json.dumps({"code": code, **words, "timeout": timeout, "expected": expected})
    print(order, file=_PIPES[0], flush=True)
    failures = json.loads(_PIPES[1].readline())
    assert not failures, failures
