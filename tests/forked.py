"""Processes for tests, forked from one that has imported torch and attemper: an import costs seconds, a fork nothing."""

import json
import os
import subprocess
import sys

NURSERY = """
import faulthandler, json, os, signal, sys, traceback
import torch, torch._dynamo, attemper
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from attemper.watch import watching

code, calls = sys.argv[1], json.loads(sys.argv[2])
started = {}
for number, call in enumerate(calls):
    place = f"{sys.argv[3]}/{number}.out"
    child = os.fork()
    if child:
        started[child] = call, place
        continue
    file = os.open(place, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1), os.dup2(file, 2)
    faulthandler.enable(), faulthandler.dump_traceback_later(max(1, int(sys.argv[4]) - 2))
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

signal.signal(signal.SIGALRM, late)
signal.alarm(int(sys.argv[4]))
failed = []
try:
    while started:
        child, status = os.wait()
        call, place = started.pop(child)
        if status:
            failed.append((call, status, place))
            signal.alarm(5)  # those who wait for it need not
except TimeoutError:
    failed += [(call, "still running", place) for call, place in started.values()]
    for child in started:
        os.kill(child, signal.SIGKILL)
for call, status, place in failed:
    print(call, status, open(place).read(), flush=True)
sys.exit(bool(failed))
"""


def run(code, calls, folder, timeout=60):
    """Run code once for each list of words in calls, all at the same time, with the words as `argv`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [code, json.dumps([list(map(str, call)) for call in calls]), str(folder), str(timeout)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NURSERY, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
