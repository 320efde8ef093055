"""Processes for tests, forked from one that has imported torch and attemper: an import costs seconds, a fork nothing."""

import atexit
import functools
import json
import os
import subprocess
import sys

NURSERY = """
import faulthandler, json, os, signal, sys, traceback
import torch, torch._dynamo, attemper
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from attemper.bench import memory
from attemper.watch import session


def start(code, call, place, timeout):
    child = os.fork()
    if child:
        return child
    file, nothing = os.open(place, os.O_CREAT | os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0), os.dup2(file, 1), os.dup2(file, 2)
    faulthandler.enable(), faulthandler.dump_traceback_later(max(1, timeout - 2))
    try:
        exec(compile(code, "child", "exec"), {"__name__": "child", "argv": call})
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def late(*_):  # what the others said is the reason, or shows where they wait
    raise TimeoutError


def run(code, calls, folder, timeout, expected):
    started = {}
    for number, call in enumerate(calls):
        place = f"{folder}/{number}.out"
        started[start(code, call, place, timeout)] = call, place
    signal.alarm(timeout)
    failed = []
    try:
        while started:
            child, status = os.wait()
            call, place = started.pop(child)
            if status != expected:
                failed.append((call, status, place))
                signal.alarm(5)  # those who wait for it need not
    except TimeoutError:
        failed += [(call, "still running", place) for call, place in started.values()]
        for child in started:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    signal.alarm(0)
    return "".join(f"{call} {status} {open(place).read()}" for call, status, place in failed)


signal.signal(signal.SIGALRM, late)
for line in sys.stdin:
    print(json.dumps(run(**json.loads(line))), flush=True)
"""


@functools.cache
def _nursery() -> subprocess.Popen:
    """One for all tests of this process; it ends with its input."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-c", NURSERY]
    nursery = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(nursery.communicate)  # closes its input, and waits for its end
    return nursery


def run(code, calls, folder, timeout=60, expected=0):
    """Run code once for each list of words in calls, all at the same time, with the words as `argv`.

    `expected` is the status that each process must end with: 0, or the number of a signal.
    """
    nursery = _nursery()
    words = {"calls": [list(map(str, call)) for call in calls], "folder": str(folder)}
    nursery.stdin.write(json.dumps({"code": code, **words, "timeout": timeout, "expected": expected}) + "\n")
    nursery.stdin.flush()
    failures = json.loads(nursery.stdout.readline())
    assert not failures, failures
