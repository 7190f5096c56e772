"""What a computation costs, in seconds that do not depend on who else uses the machine."""

import time

import torch


def clock(device: torch.device) -> float:
    """Seconds since some fixed time, once all work queued on `device` is done.

    On a CPU only those count in which this process computes, per thread: a busy machine makes a training longer, not
    dearer, so that whatever is to cost as much gets as many steps.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else time.perf_counter()
