"""One rank of test_exit.py: `python jobs_exit.py HOW STAGE`. Its last line names the threads that are left."""

import atexit
import os
import sys
import threading
import time
from pathlib import Path


def threads() -> list[str]:
    """gloo's threads, by the names that the system shows, and Python's."""
    names = [thread.name for thread in threading.enumerate()]
    for task in Path("/proc/self/task").iterdir():
        names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if "gloo" in name or name in ("MainThread", "flight recorder"))


# First registered, last run: after everything that the imports below register.
atexit.register(lambda: print(f"at the end: {threads()}", flush=True))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zerolab  # noqa: E402


def main(how: str, stage: int) -> zerolab.Engine:
    torch.set_num_threads(1)
    zerolab.init(5.0 if how == "fails" else 60.0)
    mesh = (2, 1) if how == "mesh" else None
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    zero = zerolab.shard(model, stage, units=[torch.nn.Linear], mesh=mesh)
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    for _ in range(2):
        zero.model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"at work: {threads()}", flush=True)
    if how == "destroy":
        time.sleep(2.0 * zero.rank)  # rank 0 holds the store, which goes with its group
        dist.destroy_process_group()
    if how == "forks":
        child = os.fork()
        if not child:  # not to Python's very end, where torch destroys its groups and may wait for a thread forever
            atexit._run_exitfuncs()
            os._exit(0)
        end = time.monotonic() + 20.0
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < end, "the fork waits for threads that it does not have"
            time.sleep(0.05)
    if how == "fails":
        if zero.rank == 0:
            time.sleep(600.0)  # until it is killed
        zero.comm.all_reduce(torch.ones(2), "nothing")  # which nobody waits for
        raise ValueError("rank 1 has failed")
    if how != "destroy":
        dist.barrier()
        time.sleep(2.0 * zero.rank)  # the store ends with rank 0
    return zero


if __name__ == "__main__":
    zero = main(sys.argv[1], int(sys.argv[2]))  # global, so that it lives as long as Python
