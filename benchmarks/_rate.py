"What this machine reaches for a product of a model's shape: by it, benchmarks turn operations into a floor in seconds."

import statistics
import time

import torch


def matmul_rate(weight: torch.Tensor, rows: int, seconds: float = 0.5) -> float:
    "Floating-point operations a second (two for each multiply-add) of `rows` states times a matrix of the backbone: the median."
    states, times, began = torch.randn(rows, weight.shape[1], dtype=weight.dtype), [], time.perf_counter()
    while (start := time.perf_counter()) - began < seconds:
        torch.nn.functional.linear(states, weight)
        times.append(time.perf_counter() - start)
    return 2 * weight.numel() * rows / statistics.median(times)
