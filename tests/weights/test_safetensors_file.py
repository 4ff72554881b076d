"""Reading single files: the same values as the library, and what a file may do to us."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.arrays import Array, empty
from ridgeline.core.errors import (
    CorruptFileError,
    DiskError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ridgeline.kernels.tensors import as_tensor
from ridgeline.weights import SafetensorsFile

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
EIGHT_BIT_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor: Array | torch.Tensor) -> bytes:
    if not isinstance(tensor, torch.Tensor):
        return tensor.tobytes()
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"float.{index}": torch.randn(5, 3, generator=generator).to(dtype)
        for index, dtype in enumerate(FLOATS)
    }
    tensors |= {
        f"integer.{index}": torch.randint(0, 2, (4, 2), generator=generator).to(dtype)
        for index, dtype in enumerate(INTEGERS)
    }
    tensors |= {
        f"eight.{index}": torch.randn(6, generator=generator).to(dtype)
        for index, dtype in enumerate(EIGHT_BIT_FLOATS)
    }
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(some_tensors(), tmp_path / "some.safetensors", metadata={"format": "pt"})
    return tmp_path / "some.safetensors"


def test_views_and_reads_equal_the_library(path: Path) -> None:
    expected = load_file(path)
    with SafetensorsFile(path) as file:
        assert set(file.names()) == set(expected)
        for name, want in expected.items():
            kind = str(want.dtype).removeprefix("torch.")
            assert (file.shape(name), file.dtype(name)) == (tuple(want.shape), kind)
            assert file.num_bytes(name) == want.nbytes
            out = empty(tuple(want.shape), kind)
            file.read_into(name, out)
            for got in (file.tensor(name), out):
                assert as_tensor(got).dtype == want.dtype
                assert got.shape == want.shape
                assert bits(got) == bits(want)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_reading_converts_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, wanted: torch.dtype
) -> None:
    monkeypatch.setattr("ridgeline.weights.safetensors_file._BLOCK_BYTES", 64)
    values = torch.randn(13, 17, generator=torch.Generator().manual_seed(1)).to(stored)
    save_file({"w": values}, tmp_path / "w.safetensors")
    out, steps = empty((13, 17), str(wanted).removeprefix("torch.")), []
    with SafetensorsFile(tmp_path / "w.safetensors") as file:
        file.read_into("w", out, steps.append)
    assert bits(out) == bits(values.to(wanted))
    assert sum(steps) == values.nbytes
    assert max(steps) <= 64


def test_a_view_is_no_copy_outlives_the_file_and_leaves_it_alone(path: Path) -> None:
    before = path.read_bytes()
    with SafetensorsFile(path) as file:
        first, second = file.tensor("float.1"), file.tensor("float.1")
    assert first.ctypes.data == second.ctypes.data
    expected = load_file(path)["float.1"]
    assert np.array_equal(first, expected)
    first[...] = 0
    assert path.read_bytes() == before


def test_unaligned_data_is_read_right(tmp_path: Path) -> None:
    header = b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    values = torch.tensor([1.5, -2.25])
    data = len(header).to_bytes(8, "little") + header + b"\x09" + bits(values)
    (tmp_path / "u.safetensors").write_bytes(data)
    with SafetensorsFile(tmp_path / "u.safetensors") as file:
        view = file.tensor("w")
        assert view.tolist() == [1.5, -2.25]
        assert view.ctypes.data % view.itemsize == 0
        out = empty((2,), "float32")
        file.read_into("w", out)
    assert out.tolist() == [1.5, -2.25]


@pytest.mark.parametrize("dtype", ["F6_E2M3", "I4", "F4", "U16", "C64"])
def test_other_dtypes_are_named(tmp_path: Path, dtype: str) -> None:
    header = f'{{"layers.0.w":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,4]}}}}'.encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "q.safetensors").write_bytes(data)
    with SafetensorsFile(tmp_path / "q.safetensors") as file:
        for use in (file.dtype, file.tensor):
            with pytest.raises(UnsupportedModelError, match=f"'layers.0.w'.*'{dtype}'"):
                use("layers.0.w")


def test_a_missing_file_a_folder_and_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", ".", "pipe"):
        with pytest.raises(ModelNotFoundError):
            SafetensorsFile(tmp_path / name)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4096)}, tmp_path / "w.safetensors")
    with SafetensorsFile(tmp_path / "w.safetensors") as file:
        os.truncate(tmp_path / "w.safetensors", 2000)
        with pytest.raises(CorruptFileError, match=r"w\.safetensors became shorter"):
            file.read_into("w", empty((4096,), "float32"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with SafetensorsFile(path) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(DiskError, match=os.strerror(code)):
            file.read_into("float.1", empty((5, 3), "float32"))


def test_no_descriptors_are_left_open(path: Path) -> None:
    count = len(os.listdir("/proc/self/fd"))
    bad = path.with_name("bad.safetensors")
    bad.write_bytes(path.read_bytes()[:-1])
    for _ in range(3):
        SafetensorsFile(path).close()
        with pytest.raises(CorruptFileError):
            SafetensorsFile(bad)
    assert len(os.listdir("/proc/self/fd")) == count
