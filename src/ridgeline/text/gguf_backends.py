"""The models of GGUF tokenizers as pipelines of the ``tokenizers`` library."""

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ridgeline.text.gguf_vocabulary import BYTE, USER_DEFINED, Vocabulary
from ridgeline.text.pre_tokenizers import PreTokenization

_SPACE = "▁"


def byte_level_bpe(vocabulary: Vocabulary, pre: PreTokenization) -> Backend:
    """GPT-2's BPE over bytes spelt as characters."""
    backend = Backend(
        models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges,
            ignore_merges=pre.ignore_merges,
        )
    )
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_bpe(vocabulary: Vocabulary) -> Backend:
    """SentencePiece's BPE: spaces spelt ``▁``, pairs merged by score, bytes for the rest."""
    ids = _spelt(vocabulary)
    prefix = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.token_id("unknown_token_id")
    backend = Backend(
        models.BPE(
            vocab=ids,
            merges=vocabulary.merges or _merges(vocabulary, ids),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
    spell = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spell]) if prefix else spell
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def unigram(vocabulary: Vocabulary) -> Backend:
    """SentencePiece's Unigram (Kudo 2018, arXiv 1804.10959): the most likely segmentation."""
    backend = Backend(
        models.Unigram(
            list(zip(vocabulary.tokens, vocabulary.scores(), strict=True)),
            vocabulary.token_id("unknown_token_id"),
            BYTE in vocabulary.kinds,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if charsmap := vocabulary.raw("precompiled_charsmap"):
        steps.append(normalizers.Precompiled(charsmap))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.flag("add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def _spelt(vocabulary: Vocabulary) -> dict[str, int]:
    """Token to id; converters write the spaces of user-defined tokens as spaces."""
    ids = dict(vocabulary.ids)
    for token, index in vocabulary.ids.items():
        if vocabulary.kinds[index] == USER_DEFINED and " " in token:
            spelt = token.replace(" ", _SPACE)
            if spelt not in ids:
                del ids[token]
                ids[spelt] = index
    return ids


def _merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, by falling score, then the longer parts first.

    SentencePiece keeps no list of merges: it joins the pair whose result has the best score.
    transformers derives the same order (``generate_merges`` in ``convert_slow_tokenizer.py``).
    User-defined tokens come first, as their score of 0 in SentencePiece's own file makes them;
    converters replace it by −1000.
    """
    scores, kinds = vocabulary.scores(), vocabulary.kinds
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in sorted(ids.items(), key=lambda item: item[1]):
        score = 0.0 if kinds[index] == USER_DEFINED else scores[index]
        pairs = [
            (ids[token[:cut]], ids[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        for _, _, cut in sorted(pairs):
            found.append((-score, -cut, cut - len(token), token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
