"""The tokenizer of a model folder, over the ``tokenizers`` library."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path

from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import InvalidRequestError
from ridgeline.text.chat_template_files import find_chat_template
from ridgeline.text.decoding import DecoderPlan
from ridgeline.text.length_bound import LengthBound, length_bound
from ridgeline.text.reading import backend_errors, read_json
from ridgeline.text.special_tokens import SpecialTokens, add_missing_tokens, eos_token_ids
from ridgeline.text.tokenizer_files import load_backend

_ID_LIMIT = 2**32


class Tokenizer:
    """Text to token ids and back; immutable after construction, safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        with backend_errors("The tokenizer cannot be used"):
            # Truncation and padding are the engine's business, and must not alter a prompt.
            backend.no_truncation()
            backend.no_padding()
            added = backend.get_added_tokens_decoder()
            decoder = None if backend.decoder is None else backend.decoder.__getstate__()
            self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
            # decode goes by the spelling, which a normalizer may have changed for an added token.
            special = {token.content for token in added.values() if token.special}
            skipped = [index for index in added if backend.id_to_token(index) in special]
        self._backend = backend
        self._decoder_state: bytes | None = decoder
        self.special_ids = frozenset(skipped)
        self._shown: tuple[dict[int, str | None], ...] = ({}, {})  # without and with special ones
        self.decoder = DecoderPlan.from_json(decoder)
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> "Tokenizer":
        """Load the tokenizer of a model folder.

        Reads ``tokenizer.json`` (or ``vocab.json`` and ``merges.txt``), and where they exist
        ``tokenizer_config.json``, ``special_tokens_map.json``, ``added_tokens.json``,
        ``generation_config.json``, ``config.json`` and the chat templates. Raises TokenizerError.
        """
        path = Path(folder)
        config = read_json(path / "tokenizer_config.json")
        tokens = SpecialTokens.read(path, config)
        backend = load_backend(path, config, tokens)
        with backend_errors("The special tokens cannot be added to the tokenizer"):
            add_missing_tokens(backend, tokens)
            eos = tokens.named.get("eos_token")
            eos_id = None if eos is None else backend.token_to_id(eos.content)
        return cls(
            backend,
            special_tokens={name: token.content for name, token in tokens.named.items()},
            eos_token_ids=eos_token_ids(path, eos_id),
            chat_template=find_chat_template(path, config),
        )

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        """Return the first ``max_tokens`` token ids of ``text``, those of special tokens among
        them; InvalidRequestError as `encode`, or if not even these fit."""
        _check_text(text)
        backend = self._backend
        with backend_errors("The tokenizer failed on the text"):
            (encoding,) = backend.encode_batch([text], add_special_tokens=False)
            room = max_tokens - backend.num_special_tokens_to_add(False)
            _check_room(room, max_tokens)
            encoding.truncate(room)
            return backend.post_process(encoding, None, True).ids

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Return the token ids of two texts as one, and where the second begins if its tokens are
        of another type.

        With ``max_tokens`` the longer one is cut until both fit. InvalidRequestError as `encode`,
        or if special tokens alone do not fit.
        """
        _check_text(first)
        _check_text(second)
        backend = self._backend
        with backend_errors("The tokenizer failed on the text"):
            one, two = backend.encode_batch([first, second], add_special_tokens=False)
            if max_tokens is not None:
                room = max_tokens - backend.num_special_tokens_to_add(True)
                _check_room(room - 1, max_tokens)
                lengths = _cut_longest(len(one), len(two), room)
                one.truncate(lengths[0])
                two.truncate(lengths[1])
            joined = backend.post_process(one, two, True)
            types = joined.type_ids
            return joined.ids, types.index(1) if 1 in types else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; InvalidRequestError if it is not valid Unicode.

        ``add_special_tokens`` runs the post-processor (BOS, EOS); leave it off after a chat
        template. Special tokens that are spelt out in the text become tokens in either case.
        """
        _check_text(text)
        with backend_errors("The tokenizer failed on the text"):
            # Of the library's methods the one that lets go of the interpreter's lock meanwhile.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `encode` gives at least, found without tokenizing."""
        bound = self._length_bound
        return 0 if bound is None else bound.least_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids that the vocabulary lacks stand for nothing.

        ``clean_up_tokenization_spaces`` is ignored, as transformers 5 does for BPE: the cleanup
        alters text that the model wrote. InvalidRequestError for an id outside 32 bits.
        """
        if any(not isinstance(index, int) or not 0 <= index < _ID_LIMIT for index in ids):
            raise InvalidRequestError("A token id must be an integer from 0 to 2**32 - 1.")
        with backend_errors("The tokenizer failed on the token ids"):
            (text,) = self._backend.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )
            return text

    @property
    def bos_token_id(self) -> int | None:
        """The id of the begin-of-sequence token, None where the model has none."""
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self.token_to_id(bos)

    def is_special(self, token_id: int) -> bool:
        """Say whether ``decode`` leaves this token out when it skips special tokens."""
        return token_id in self.special_ids

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, None if there is no such id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None

    def shown_token(self, token_id: int, *, skip_special: bool) -> str | None:
        """Return `id_to_token`, but None for a special token that is to be skipped; remembered."""
        shown = self._shown[not skip_special]
        if token_id in shown:
            return shown[token_id]
        token = self.id_to_token(token_id)
        if token is not None:  # so that no more is kept than the vocabulary has
            shown[token_id] = None if skip_special and self.is_special(token_id) else token
            return shown[token_id]
        return None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None if there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, empty for an id without a token.

        A leading space is kept even where the decoder drops it at the start of a text.
        """
        token = self.id_to_token(token_id)
        return b"" if token is None else self.decoder.token_bytes(token)

    def to_json(self) -> str:
        """Return the whole tokenizer in the format of ``tokenizer.json``."""
        return self._backend.to_str()

    def digest(self) -> str:
        """Return a SHA-256 (hex) of the vocabulary: which id means which bytes.

        Two models may share token ids (a draft and its target) iff their digests are equal.
        """
        return self._digest

    @cached_property
    def _length_bound(self) -> LengthBound | None:
        with backend_errors("The tokenizer cannot be used"):
            return length_bound(self._backend)

    @cached_property
    def _digest(self) -> str:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        decoder = json.loads(self._decoder_state) if self._decoder_state is not None else None
        content = [sorted((index, token) for token, index in vocabulary.items()), decoder]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_text(text: str) -> None:
    """Raise InvalidRequestError unless it is a string of valid Unicode."""
    if not isinstance(text, str):
        raise InvalidRequestError("The text to tokenize must be a string.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "The text is not valid Unicode: it has a lone surrogate, which is half of a "
            "character, or stands for a byte that was not UTF-8."
        ) from error


def _check_room(room: int, max_tokens: int) -> None:
    if room < 1:
        raise InvalidRequestError(f"{max_tokens} tokens leave no room beside special tokens.")


def _cut_longest(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts that fit together: the longer one is cut to the other's, then both.

    >>> _cut_longest(10, 3, 8), _cut_longest(11, 10, 7), _cut_longest(2, 3, 9)
    ((5, 3), (4, 3), (2, 3))
    """
    if first + second <= room:
        return first, second
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= half:
        return room - second, second
    return (room - half, half) if first > second else (half, room - half)
