"""The CUDA executor on the CPU: its own device protocol, and ops in PyTorch."""

from functools import partial

from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.executor import CUDAExecutor
from ridgeline.executors.cuda.host_device import HostDevice, HostGraph, OpCall, OpRecorder
from ridgeline.executors.cuda.torch_kernels import TorchKernels
from ridgeline.executors.cuda.traits import DEFAULT_MEMORY_SHARE


class DecidesOnDevice(TorchKernels):
    """As Triton's kernels: a recorded step serves every context, greedy or not."""

    decides_on_device = True


class RecordsLaunches(HostDevice):
    """A device whose graphs hold launches of interpreted Triton kernels beside PyTorch's ops."""

    def __init__(self):
        super().__init__()
        self.names = []  # of the ops and kernels of each graph

    def capture(self, body, pool=None):
        recorder, run = OpRecorder(), InterpretedFunction.run

        def launch(kernel, *args, **options):
            with _disable_current_modes():
                run(kernel, *args, **options)
            recorder.calls.append(OpCall(partial(run, kernel), args, options, ()))

        InterpretedFunction.run = launch
        try:
            with recorder:
                body()
        finally:
            InterpretedFunction.run = run
        self.names.append([_name(call.op) for call in recorder.calls])
        return HostGraph(self, recorder.calls)


def _name(op):
    return op.args[0].__name__ if isinstance(op, partial) else str(op)


def host_executor(models, block_tokens, *, device=None, **settings):
    settings = {"num_slots": 8, "kernels": TorchKernels()} | settings
    return CUDAExecutor(models, block_tokens, device=device or HostDevice(), **settings)


def host_factory(models, options, device=None):
    """What the registry would call for ``cuda``."""
    return host_executor(
        models,
        options.block_tokens,
        device=device,
        kv_cache_dtype=options.kv_cache_dtype,
        num_slots=options.max_num_seqs,
        memory_share=options.gpu_memory_utilization or DEFAULT_MEMORY_SHARE,
        attention=AttentionBackends(wanted=options.attention_backend),
    )
