"""Which version of FlashAttention is found, and why one that is there is not used."""

import sys

import pytest

from ridgeline.kernels.flash_attention import (
    FlashAttention,
    flash_attention_versions,
    installed_flash_attention,
)

SECOND = """
def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, block_table=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0): pass
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, block_table=None): pass
"""
THIRD = """
def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None,
    cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0): pass
"""
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Modules of other projects, for this test alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name, text):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    yield add
    for name in [each for each in sys.modules if each.startswith("flash_attn")]:
        del sys.modules[name]


def test_without_any_it_says_so():
    assert installed_flash_attention(HOPPER) == "FlashAttention is not installed (flash-attn)."
    assert flash_attention_versions() == "not installed"


@pytest.mark.parametrize("place", ["flash_attn_interface", "flash_attn_3/flash_attn_interface"])
def test_version_3_is_for_hopper(install, place):
    install("flash_attn", SECOND)
    install(place, THIRD)
    found = {each: installed_flash_attention(each) for each in (HOPPER, AMPERE, BLACKWELL)}
    assert [each.name.split()[1] for each in found.values()] == ["3", "of", "of"]
    assert (found[HOPPER].varlen, found[HOPPER].page_multiple) == (None, 1)
    assert found[AMPERE].varlen is not None
    assert found[AMPERE].page_multiple == 256


def test_version_2_is_taken_where_3_cannot_be_imported(install):
    install("flash_attn_interface", "raise OSError('undefined symbol')")
    assert installed_flash_attention(HOPPER) == (
        "FlashAttention 3 of unknown version cannot be imported: OSError: undefined symbol."
    )
    install("flash_attn", SECOND)
    assert isinstance(installed_flash_attention(HOPPER), FlashAttention)
    assert "flash_attn of unknown version" in flash_attention_versions()


@pytest.mark.parametrize(
    ("name", "text", "lacking"),
    [
        ("flash_attn", SECOND.replace(", softcap=0.0): pass", "): pass"), "softcap"),
        ("flash_attn", SECOND.replace(", block_table=None): pass", "): pass"), "block_table"),
        ("flash_attn_interface", THIRD.replace("page_table=None,", ""), "page_table"),
    ],
)
def test_versions_that_lack_an_argument_are_not_used(install, name, text, lacking):
    install(name, text)
    reason = installed_flash_attention(HOPPER)
    assert f"has no {lacking} of flash_attn_" in reason
