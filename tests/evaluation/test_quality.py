"""Figures of quality, against torch's own loss functions in float64."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from ridgeline.core.errors import InvalidRequestError
from ridgeline.evaluation import QualitySum, encode_documents, log_softmax, read_texts


def documents(seed, noise):
    rng = np.random.default_rng(seed)
    for length in (40, 23, 2):
        logits = rng.normal(size=(length, 30)) * 3
        other = logits + rng.normal(size=logits.shape) * noise
        yield tuple(rng.integers(0, 30, length).tolist()), logits, other


def measured(seed=0, noise=0.3):
    total = QualitySum()
    for tokens, logits, other in documents(seed, noise):
        total.add(tokens, log_softmax(other), log_softmax(logits))
    return total.quality()


def test_figures_are_those_of_torch_in_float64():
    quality = measured()
    kl, nats, wanted, dp, same = [], [], [], [], []
    for tokens, logits, other in documents(0, 0.3):
        p, q = torch.tensor(logits).log_softmax(-1), torch.tensor(other).log_softmax(-1)
        following = torch.tensor(tokens[1:])
        kl.append(functional.kl_div(q, p, log_target=True, reduction="none").sum(-1))
        nats.append(functional.nll_loss(q[:-1], following, reduction="none"))
        wanted.append(functional.nll_loss(p[:-1], following, reduction="none"))
        dp.append((-nats[-1]).exp() - (-wanted[-1]).exp())
        same.append(p.argmax(-1) == q.argmax(-1))
    kl = torch.cat(kl)
    assert quality.num_tokens == len(kl) == 65
    assert quality.kl == pytest.approx(kl.mean().item(), rel=1e-6)
    assert quality.kl_error == pytest.approx(kl.std().item() / 65**0.5, rel=1e-5)
    assert quality.kl_tail == pytest.approx(kl.quantile(0.999).item(), rel=1e-5)
    assert quality.kl_max == pytest.approx(kl.max().item(), rel=1e-5)
    assert quality.perplexity == pytest.approx(torch.cat(nats).mean().exp().item(), rel=1e-6)
    assert quality.reference_perplexity == pytest.approx(torch.cat(wanted).mean().exp().item())
    assert quality.rms_dp == pytest.approx(torch.cat(dp).square().mean().sqrt().item(), rel=1e-5)
    assert quality.same_top == torch.cat(same).double().mean().item() < 1


def test_the_same_is_perfect_and_more_noise_is_worse():
    same = measured(noise=0.0)
    assert same.kl == pytest.approx(0, abs=1e-12)
    assert (same.same_top, same.rms_dp) == (1.0, 0.0)
    assert same.perplexity == same.reference_perplexity
    assert measured(noise=0.1).kl < measured(noise=0.3).kl / 4


def test_texts_of_files(tmp_path):
    plain, lines, broken = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo")
    lines.write_text('{"text": "one"}\n\n{"text": "two", "kind": "x"}\n')
    broken.write_text(json.dumps({"text": "fine"}) + '\n{"content": 1}\n')
    assert read_texts(plain) == ["one\ntwo"]
    assert read_texts(lines) == ["one", "two"]
    with pytest.raises(InvalidRequestError, match="Line 2"):
        read_texts(broken)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        read_texts(plain)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_texts(tmp_path / "none.txt")


def test_documents_of_less_than_two_tokens_are_left_out():
    class Words:
        def encode(self, text):
            return list(range(len(text.split())))

    assert encode_documents(Words(), ["a b c d", "a", "", "a b"], max_tokens=3) == [
        (0, 1, 2),
        (0, 1),
    ]
    with pytest.raises(InvalidRequestError, match="nothing to predict"):
        encode_documents(Words(), ["a"], max_tokens=3)


def test_a_line_of_json_may_have_line_ends_of_other_alphabets(tmp_path):
    text = "one\u2028two\u0085three\x0cfour"
    (tmp_path / "texts.jsonl").write_text(
        json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert read_texts(tmp_path / "texts.jsonl") == [text]
