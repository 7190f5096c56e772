"""The clock that compute is counted with."""

import time

import torch

from namm.clock import clock

CPU = torch.device("cpu")


def test_waiting_costs_nothing_and_computing_what_the_processor_takes():
    began, processor = clock(CPU), time.process_time()
    time.sleep(0.2)
    waited = clock(CPU) - began
    x = torch.rand(256, 256)
    while time.process_time() - processor < 0.1 * torch.get_num_threads():
        x = (x @ x).clamp(max=1)
    assert waited < 0.1 <= clock(CPU) - began


def test_threads_share_what_they_cost(monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 6.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert clock(CPU) == 2.0
