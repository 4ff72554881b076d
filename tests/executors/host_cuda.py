"""The CUDA executor on the CPU: its own device protocol, and ops in PyTorch."""

from ridgeline.executors.cuda import CUDAExecutor
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.torch_kernels import TorchKernels


class DecidesOnDevice(TorchKernels):
    """As Triton's kernels: a recorded step serves every context, greedy or not."""

    decides_on_device = True


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
        memory_share=options.gpu_memory_utilization,
        attention=AttentionBackends(wanted=options.attention_backend),
    )
