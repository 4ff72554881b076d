from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from ridgeline.compress.batches import EncodedDocument, WindowStream, pack
from ridgeline.compress.cross_entropy import TOKENS_PER_BLOCK, cross_entropy
from ridgeline.compress.distill import DistillationConfig, distillation_loss
from ridgeline.compress.optimizer import OptimizerConfig, orthogonalize
from ridgeline.compress.pretrain import (
    Schedule,
    TrainingConfig,
    load_checkpoint,
    next_token_loss,
    train,
)
from ridgeline.compress.trainable import (
    QUERY_BLOCK,
    LlamaShape,
    TrainableLlama,
    causal_attention,
)

SHAPE = LlamaShape(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
)
CONFIG = TrainingConfig(
    schedule=Schedule(warmup_steps=2, stable_steps=6, decay_steps=4),
    micro_batch_tokens=128,
    num_micro_batches=2,
    checkpoint_every=100,
    log_every=1,
    compile=False,
)


@pytest.fixture
def stream() -> WindowStream:
    ids = np.tile(np.arange(64, dtype=np.uint16), 40)
    return WindowStream(ids=ids, length_tokens=32, seed=3)


def run(
    folder: Path,
    stream: WindowStream,
    stop: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    model = TrainableLlama(SHAPE, seed=5)
    return train(
        model=model,
        loss_function=next_token_loss(model, dtype),
        stable=stream,
        decay=stream,
        config=replace(CONFIG, optimizer=OptimizerConfig(dtype=dtype)),
        folder=folder,
        stop_at_step=stop,
    )


def test_loss_falls(tmp_path: Path, stream: WindowStream) -> None:
    losses = run(tmp_path, stream)
    assert len(losses) == 12
    assert losses[0] == pytest.approx(np.log(64), abs=0.3)
    assert losses[-1] < 0.8 * losses[0]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_resumed_run_equals_uninterrupted_run(
    tmp_path: Path, stream: WindowStream, dtype: torch.dtype
) -> None:
    whole = run(tmp_path / "whole", stream, dtype=dtype)
    parts = [
        *run(tmp_path / "parts", stream, stop=5, dtype=dtype),
        *run(tmp_path / "parts", stream, dtype=dtype),
    ]
    assert parts == whole
    models = [TrainableLlama(SHAPE), TrainableLlama(SHAPE)]
    for model, name in zip(models, ("whole", "parts"), strict=True):
        assert load_checkpoint(folder=tmp_path / name, model=model)[0] == 12
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@DTYPES
def test_two_runs_are_equal(tmp_path: Path, stream: WindowStream, dtype: torch.dtype) -> None:
    runs = [run(tmp_path / name, stream, stop=4, dtype=dtype) for name in ("first", "second")]
    assert runs[0] == runs[1]


def test_bfloat16_follows_the_losses_of_float32(tmp_path: Path, stream: WindowStream) -> None:
    exact = run(tmp_path / "float32", stream)
    rough = run(tmp_path / "bfloat16", stream, dtype=torch.bfloat16)
    assert rough == pytest.approx(exact, rel=0.02)
    assert rough != exact


def test_weights_gradients_and_state_stay_in_float32(tmp_path: Path, stream: WindowStream) -> None:
    run(tmp_path, stream, stop=1, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "checkpoint.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    model = TrainableLlama(SHAPE, seed=5)
    ids = torch.randint(64, (2, 16))
    torch.autograd.backward(next_token_loss(model, torch.bfloat16)(ids, ids))
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("num_tokens", [1, TOKENS_PER_BLOCK, 2 * TOKENS_PER_BLOCK + 7])
def test_cross_entropy_in_blocks_is_cross_entropy(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 16, generator=generator, dtype=torch.float64).float()
    head = torch.randn(40, 16, generator=generator)
    targets = torch.randint(40, (num_tokens,), generator=generator)
    grads: list[tuple[Tensor, Tensor]] = []
    losses: list[Tensor] = []
    for blockwise in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if blockwise:
            loss = cross_entropy(hidden_TD=h, head_VD=w, next_T=targets)
        else:
            loss = functional.cross_entropy(h @ w.T, targets)
        torch.autograd.backward(3.0 * loss)
        assert h.grad is not None
        assert w.grad is not None
        losses.append(loss)
        grads.append((h.grad, w.grad))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("length", [1, QUERY_BLOCK, 2 * QUERY_BLOCK + 3])
def test_attention_in_blocks_is_attention(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q_BGRSE = torch.randn(2, 2, 3, length, 8, generator=generator)
    k_BGSE, v_BGSE = torch.randn(2, 2, 2, length, 8, generator=generator)
    mask = torch.full((length, length), float("-inf")).triu(1)
    got = causal_attention(q_BGRSE, k_BGSE, v_BGSE, mask)
    k, v = (x[:, :, None].expand_as(q_BGRSE) for x in (k_BGSE, v_BGSE))
    expected = functional.scaled_dot_product_attention(q_BGRSE, k, v, is_causal=True)
    torch.testing.assert_close(got, expected)


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(warmup_steps=2, stable_steps=3, decay_steps=4, final_scale=0.0)
    scales = [schedule.scale(step) for step in range(schedule.total_steps)]
    assert scales == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_every_window_is_seen_once_per_epoch(stream: WindowStream) -> None:
    starts = [stream.window(i).tobytes() for i in range(stream.num_windows)]
    distinct = WindowStream(ids=np.arange(1000, dtype=np.uint16), length_tokens=10, seed=0)
    seen = sorted(int(distinct.window(i)[0]) for i in range(distinct.num_windows))
    assert seen == list(range(0, 990, 10))
    assert len(starts) == (64 * 40 - 1) // 32


def test_pack_repeats_by_weight() -> None:
    documents = [
        EncodedDocument(kind="a" if i % 2 else "b", path=str(i), ids=np.array([i], np.uint16))
        for i in range(1000)
    ]
    ids = pack(documents=documents, weights={"a": 2.0, "b": 0.3}, seed=0)
    assert sum(int(i) % 2 for i in ids) == 1000
    assert 110 < sum(1 - int(i) % 2 for i in ids) < 190


def test_orthogonalize_gives_singular_values_near_one() -> None:
    update = torch.randn(3, 96, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(update))
    assert values.min() > 0.8
    assert values.max() < 1.2


def test_distilling_a_copy_leaves_only_its_own_entropy() -> None:
    teacher, student = TrainableLlama(SHAPE, seed=1), TrainableLlama(SHAPE, seed=1)
    loss = distillation_loss(
        teacher=teacher, student=student, config=DistillationConfig(kl_share=1.0)
    )
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    assert loss(ids, ids).item() == pytest.approx(0.0, abs=1e-6)
