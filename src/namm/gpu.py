"""What a GPU likes: weights channels-last, and launches recorded beforehand. What is computed stays the same.

There are two ways to a recording. The compiler of torch takes any network: it writes kernels for it, which takes it
minutes for a large one, and records their launches. A network for which we have written kernels ourselves is `Recorded`
as it runs, within seconds; only the masks of dropout are others then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

HAS_TRITON = find_spec("triton") is not None
QUICK = 2**12
"""Numbers in a batch for each weight tensor, up to which its kernels are done before the next ones are launched."""


def use_channels_last(module: nn.Module, device: torch.device) -> None:
    """On a GPU, keep the weights of convolutions channels-last: images follow them, as its matrix units like it."""
    for weight in module.parameters() if device.type == "cuda" else ():
        if weight.ndim == 4:
            strides = torch.empty_like(weight, device="meta", memory_format=torch.channels_last).stride()
            if weight.stride() != strides:
                weight.data = weight.data.clone(memory_format=torch.channels_last)  # one input channel needs it too


def compile_options(network: nn.Module, device: torch.device, numbers: int, world: int = 1) -> dict[str, Any]:
    """Options of inductor for `network` on batches of so many numbers, B·C·H·W.

    Random numbers are drawn as without compiling: the same ones, and faster than inductor's own, one at a time. A GPU
    may wait longer for launches, whose number grows with that of the weights, than for the kernels, whose time grows
    with the batch. Then they are recorded once as CUDA graphs and replayed; otherwise the replay would be what it waits
    for. Not so where `world` > 1 processes exchange gradients, which cannot be recorded.
    """
    weights = sum(1 for _ in network.parameters())
    graphs = device.type == "cuda" and world == 1 and numbers <= QUICK * weights
    return {"fallback_random": True, "triton.cudagraphs": graphs}


# Kernels of our own

_recording = ContextVar("recording", default=False)


def uses_kernels() -> bool:
    """Whether layers that have kernels of their own shall use them here; where they are compiled, a compiler's are."""
    return not torch.compiler.is_compiling() and _recording.get()


@contextmanager
def with_kernels() -> Iterator[None]:
    """Layers use their kernels inside; whoever asks for it sees to it that there is triton, and something to run it."""
    before = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(before)


def can_record(network: nn.Module, device: torch.device) -> bool:
    """Whether `network` has kernels of its own, and `device` can run them: in float32 or less, where triton is."""
    dtypes = {weight.dtype for weight in network.parameters()}
    able = device.type == "cuda" and torch.float64 not in dtypes and HAS_TRITON
    return able and bool(getattr(network, "has_kernels", False))


class Recorded:
    """`call(*tensors)` by our kernels, its launches recorded as a CUDA graph; the call alone where that cannot be.

    That is without a GPU, and where gradients of `tensors` are needed. `call` returns a tensor or a dict of them, may
    not wait for the GPU and draws random numbers from torch's own generator alone. A recording holds sizes and
    addresses: it is made anew where tensors of other sizes come, where the precision changes and, if `call` is a
    network, where its weights have moved or its mode is another.
    """

    WARM_UP = 3
    """Calls before a recording, in which libraries choose their algorithms."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made_for: tuple[object, ...] = ()
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: dict[str, Tensor] | Tensor = {}

    def __call__(self, *tensors: Tensor) -> Any:
        """What `call` returns, for the caller to keep."""
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not tensors[0].is_cuda or needs_gradient:
            return self.call(*tensors)
        with torch.cuda.device(tensors[0].device):
            if self._graph is None or self._made_for != self._circumstances(tensors):
                self._record(tensors)
            assert self._graph is not None
            for recorded, tensor in zip(self._inputs, tensors, strict=True):
                recorded.copy_(tensor)
            self._graph.replay()
            if isinstance(self._outputs, Tensor):
                return self._outputs.clone()
            return {name: output.clone() for name, output in self._outputs.items()}

    def _circumstances(self, tensors: tuple[Tensor, ...]) -> tuple[object, ...]:
        autocast = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        tf32 = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
        inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        circumstances = (*inputs, torch.is_grad_enabled(), *autocast, *tf32)
        if not isinstance(self.call, nn.Module):
            return circumstances
        held = (*self.call.parameters(), *self.call.buffers())
        return (*circumstances, self.call.training, *(tensor.data_ptr() for tensor in held))

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        self._graph, self._outputs = None, {}
        self._made_for = self._circumstances(tensors)
        with torch.inference_mode(False):  # what is made in that mode could not be written to outside of it
            self._inputs = tuple(tensor.detach().clone() for tensor in tensors)
        with with_kernels():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(self.WARM_UP):
                    self.call(*self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            _forget_shared_memory()
            side = torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # others may use the GPU
                outputs = self.call(*self._inputs)
            _forget_shared_memory()
        if isinstance(outputs, Tensor):
            self._outputs = outputs.detach()
        else:
            self._outputs = {name: output.detach() for name, output in outputs.items()}
        self._graph = graph


def _forget_shared_memory() -> None:
    """Clear the autocast cache and cuBLAS workspaces, so that a CUDA graph gets its own."""
    torch.clear_autocast_cache()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
