"""Text to tokens and back, byte for byte: a byte-level BPE, trained on the spot or given."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sharded_train.data.cache import cached_file
from sharded_train.data.corpus import Document
from sharded_train.errors import ConfigError

NUM_BYTES = 256
SAMPLE_BYTES_PER_TOKEN = 2048  # how much of the training text a trained tokenizer sees: enough for its rarest merges
MAX_TOKEN_BYTES = 64  # of a trained tokenizer: rulers and tables of one character do not become tokens
_END_OF_TEXT = "<|end_of_text|>"
_KNOWN_ENDS = (_END_OF_TEXT, "<|endoftext|>", "<|eos|>", "<eos>", "</s>")
_PROBE = "\tif a  !=  'e\u0301\u6587':\r\n    pass  "


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A byte-level BPE. `token_text[i]` is what token i stands for; nothing, for end of text and other special tokens.

    The literal text of a special token in a document is text: it never becomes that token.
    """

    backend: tokenizers.Tokenizer
    end_of_text: int
    token_text: tuple[bytes, ...]
    sha256: str  # of its serialised form

    @property
    def vocab_size(self) -> int:
        """One more than the largest token there is."""
        return len(self.token_text)

    @functools.cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """[vocab_size] How many bytes of text each token stands for: what turns a loss into bits per byte."""
        return np.array([len(text) for text in self.token_text], np.int32)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any at its start or end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every text, worked out on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; tokens of the model's vocabulary that no text has, and special ones, are nothing."""
        text = b"".join(self.token_text[token] for token in tokens if token < self.vocab_size)
        return text.decode("utf-8", errors="replace")


def trained_tokenizer(
    documents: Sequence[Document], vocab_size: int, cache_dir: Path, progress: Callable[[str], None]
) -> TextTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, trained on the first part of the text, kept in `cache_dir`."""
    if vocab_size <= NUM_BYTES:
        raise ConfigError(
            f"model.vocab_size = {vocab_size} is too small for a byte-level tokenizer, which has at least "
            f"{NUM_BYTES} bytes + 1 end of text = {NUM_BYTES + 1} tokens"
        )
    wanted = SAMPLE_BYTES_PER_TOKEN * vocab_size
    sizes = np.array([document.num_bytes for document in documents], np.int64)
    sample = documents[: int(np.searchsorted(np.cumsum(sizes), wanted)) + 1]
    name = f"byte-level BPE {MAX_TOKEN_BYTES} {vocab_size} {wanted} {[document.sha256 for document in sample]}"
    path = cache_dir / f"tokenizer-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"

    def build(temporary: Path) -> None:
        progress(
            f"data: training a tokenizer of {vocab_size} tokens on {min(wanted, sizes.sum()) / 1e6:.1f} MB of text"
        )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=MAX_TOKEN_BYTES,
            show_progress=False,
        )
        backend.train_from_iterator(_first(sample, wanted), trainer)
        temporary.write_text(backend.to_str(), encoding="utf-8")

    cached_file(path, build, progress)
    return load_tokenizer(path, vocab_size, progress)


def load_tokenizer(path: Path, vocab_size: int, progress: Callable[[str], None]) -> TextTokenizer:
    """The tokenizer of a tokenizer.json, for a model of this vocabulary.

    Raises ConfigError for a file that is none, a tokenizer that is not byte-level, that has more tokens than the
    model, or without a token for the end of a text.
    """
    try:
        serialised = path.read_bytes()
        backend = tokenizers.Tokenizer.from_str(serialised.decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"data.tokenizer: {path} is not a readable tokenizer.json: {error}") from error
    # What the file's author did to single sentences: cut them off, fill them up.
    backend.no_truncation()
    backend.no_padding()
    settings = json.loads(serialised)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _is_byte_level(settings) or not set(_byte_characters()) <= vocabulary.keys():
        raise ConfigError(
            f"data.tokenizer: {path} is not a byte-level tokenizer (GPT-2's and Llama 3's are): some text would "
            "have no tokens, and bits per byte no meaning"
        )
    size = 1 + max(vocabulary.values())
    if size > vocab_size:
        raise ConfigError(
            f"data.tokenizer: {path} has {size} tokens, more than model.vocab_size = {vocab_size}. Set "
            f"model.vocab_size to at least {size}"
        )
    end = next((name for name in _KNOWN_ENDS if name in vocabulary), None)
    if end is None:
        added = [token["content"] for token in settings.get("added_tokens", [])]
        raise ConfigError(
            f"data.tokenizer: {path} has no token for the end of a text. Known are {', '.join(_KNOWN_ENDS)}; its "
            f"added tokens are {', '.join(added[:20]) or 'none'}"
        )
    backend.add_special_tokens([end])
    backend.encode_special_tokens = True  # in a document they are text
    texts = _token_texts(settings, vocabulary, size)
    texts[vocabulary[end]] = b""
    tokenizer = TextTokenizer(backend, vocabulary[end], tuple(texts), hashlib.sha256(serialised).hexdigest())
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        progress(f"data: {path} alters text before it splits it; bits per byte count the bytes of the altered text")
    return tokenizer


def _first(documents: Sequence[Document], num_bytes: int) -> Iterator[str]:
    """The text of documents up to a number of bytes, in pieces: one document may be larger than any sample."""
    for document in documents:
        for piece in document.pieces():
            yield piece
            num_bytes -= len(piece.encode())
            if num_bytes <= 0:
                return


def _is_byte_level(settings: dict[str, Any]) -> bool:
    decoder = settings.get("decoder") or {}
    return "ByteLevel" in [part.get("type") for part in [decoder, *decoder.get("decoders", [])]]


def _token_texts(settings: dict[str, Any], vocabulary: dict[str, int], size: int) -> list[bytes]:
    added = {token["content"]: token["special"] for token in settings.get("added_tokens", [])}
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    texts = [b""] * size
    for name, token in vocabulary.items():
        if name not in added:
            texts[token] = bytes(byte_of[character] for character in name)
        elif not added[name]:
            texts[token] = name.encode()
    return texts


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]
