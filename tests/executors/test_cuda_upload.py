"""Weights on their way to the device: with whatever order of two streams that events allow."""

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ridgeline.core.formats import number_format
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.upload import Uploads
from ridgeline.executors.cuda.weights import load_weights
from ridgeline.kernels.tensors import as_tensor

PART = 64  # bytes


class Queue:
    """A stream whose copies run as late as they may, or as soon: once the events that it waits for
    have passed."""

    def __init__(self, *, lazy):
        self.lazy, self.work = lazy, deque()

    @contextmanager
    def scope(self):
        with Deferred(self):
            yield

    def record(self, *, timed=False):
        event = Event(self)
        self.add(event.passes)
        return event

    def wait_for(self, event):
        event.waiting.append(self)
        self.add(event)

    def add(self, item):
        self.work.append(item)
        if not self.lazy:
            self.run_ready()

    def run_ready(self):
        """As far as events allow without forcing another stream."""
        while self.work and not (isinstance(self.work[0], Event) and not self.work[0].passed):
            self.step()

    def step(self):
        item = self.work.popleft()
        if isinstance(item, Event):
            item.wait()
        else:
            item()

    def finish(self):
        while self.work:
            self.step()


class Event:
    def __init__(self, queue):
        self.queue, self.passed, self.waiting = queue, False, []

    def passes(self):
        self.passed = True
        for queue in self.waiting:
            if not queue.lazy:
                queue.run_ready()

    def wait(self):
        while not self.passed:
            self.queue.step()

    def seconds_since(self, earlier):
        return 0.0


class Deferred(TorchDispatchMode):
    """Puts copies into a queue; what else is issued only makes tensors and views."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and not is_hosts(args):
            self.queue.add(partial(alone, func, *args, **kwargs))
            return args[0]
        return alone(func, *args, **kwargs)


def alone(func, *args, **kwargs):
    with _disable_current_modes():
        return func(*args, **kwargs)


HOSTS = set()


def is_hosts(args):
    """Whether the host itself writes, into pinned memory."""
    return args[0].untyped_storage().data_ptr() in HOSTS


class TwoStreams(HostDevice):
    def __init__(self, *, lazy_work, lazy_copies):
        super().__init__()
        self.work, self.copies = Queue(lazy=lazy_work), Queue(lazy=lazy_copies)
        self.scope, self.record, self.wait_for = (
            self.work.scope,
            self.work.record,
            self.work.wait_for,
        )
        self.pinned = []
        HOSTS.clear()

    def copy_stream(self):
        return self.copies

    def staging(self, shape, dtype):
        buffer = super().staging(shape, dtype)
        HOSTS.add(buffer.untyped_storage().data_ptr())
        self.pinned.append(buffer)
        return buffer

    def synchronize(self):
        self.copies.run_ready()
        self.work.finish()
        self.copies.finish()


ORDERS = [(work, copies) for work in (False, True) for copies in (False, True)]


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(7, 11, generator=generator),
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.randn(40, 4, generator=generator).bfloat16().T,  # strided
        torch.randint(-128, 127, (130,), dtype=torch.int8, generator=generator),
        torch.randn(2, 3, 5, generator=generator).to(torch.float8_e4m3fn),
        torch.tensor(2.5),
        torch.empty(0, 4),
    ]


@pytest.mark.parametrize(("lazy_work", "lazy_copies"), ORDERS)
def test_tensors_arrive_whole_whatever_the_streams_do(lazy_work, lazy_copies):
    device = TwoStreams(lazy_work=lazy_work, lazy_copies=lazy_copies)
    sources = tensors()
    with device.scope():
        uploads = Uploads(device, part_bytes=PART)
        arrived = []
        for source in sources:
            passing = source.clone()
            arrived.append(uploads.send(passing))
            passing.zero_() if passing.dtype != torch.float8_e4m3fn else None  # it has been read
    device.synchronize()
    for source, found in zip(sources, arrived, strict=True):
        assert found.dtype == source.dtype
        assert found.shape == source.shape
        assert torch.equal(found.double(), source.double())
    assert [buffer.nbytes for buffer in device.pinned] == [PART, PART]


@pytest.mark.parametrize(("lazy_work", "lazy_copies"), ORDERS)
def test_tensors_take_the_models_type_on_the_device(lazy_work, lazy_copies):
    device = TwoStreams(lazy_work=lazy_work, lazy_copies=lazy_copies)
    source = torch.linspace(-3, 3, 77).bfloat16()
    with device.scope():
        found = Uploads(device, part_bytes=PART).send(source, torch.float16)
    assert found.dtype == torch.float16
    device.synchronize()
    assert torch.equal(found, source.half())


def test_the_host_is_no_more_than_two_parts_ahead():
    device = TwoStreams(lazy_work=True, lazy_copies=True)
    with device.scope():
        Uploads(device, part_bytes=PART).send(torch.arange(10 * PART, dtype=torch.uint8))
    assert 0 < sum(not isinstance(each, Event) for each in device.copies.work) <= 2 * 2
    device.synchronize()


def test_the_next_part_is_copied_while_one_is_worked_on():
    """The stream of work does nothing at all here, and copies go on until both buffers are full."""
    device = TwoStreams(lazy_work=True, lazy_copies=False)
    source = torch.arange(2 * PART, dtype=torch.uint8)
    before = len(device.work.work)
    with device.scope():
        uploads = Uploads(device, part_bytes=PART)
        device.work.finish()
        uploads.send(source)
    landed = [lane.landed for lane in (next(uploads._lanes) for _ in range(2))]
    assert torch.equal(torch.cat(landed), source)
    assert len(device.work.work) > before
    device.synchronize()


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_model_is_the_same_through_any_size_of_buffer(monkeypatch, quantization):
    from tests.executors.test_cuda_weights import WIDE, tiny_model_of

    form = quantization and number_format(quantization)
    model = replace(tiny_model_of(WIDE), quantization=form)
    loaded = []
    for part_bytes in (32 << 20, 1000):
        sized = partial(Uploads, part_bytes=part_bytes)
        monkeypatch.setattr("ridgeline.executors.cuda.weights.Uploads", sized)
        loaded.append(load_weights(HostDevice(), model, memory_share=0.9))
    for name, matrix in loaded[0].matrices.items():
        assert torch.equal(matrix.codes, loaded[1].matrices[name].codes)
    for name, tensor in loaded[0].tensors.items():
        assert torch.equal(tensor, loaded[1].tensors[name])
    expected = as_tensor(model.weights["layers.0.o"])
    if form is None:
        assert torch.equal(loaded[1].matrices["layers.0.o"].codes, expected)
        assert loaded[1].matrices["layers.0.o"].codes.data_ptr() != expected.data_ptr()
