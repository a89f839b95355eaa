"""Text to tokens and back: a byte-level BPE trained on the spot, or a tokenizer that is given."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sharded_train.data.cache import cached_file
from sharded_train.data.tokenizer_files import NUM_BYTES, Backend, Loaded, read_tokenizer, revive
from sharded_train.errors import ConfigError

SAMPLE_BYTES_PER_TOKEN = 2048  # how much of the training text a trained tokenizer sees: enough for its rarest merges
MAX_TOKEN_BYTES = 64  # of a trained tokenizer: rulers and tables of one character do not become tokens
_END_OF_TEXT = "<|end_of_text|>"
_PROBE = "\tif a  !=  'e\u0301\u6587':\r\n    pass  "


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer. `token_text[i]` is what token i stands for; nothing, for end of text and other special tokens.

    The literal text of a special token in a document is text: it never becomes that token.
    """

    backend: Backend
    end_of_text: int
    token_text: tuple[bytes, ...]
    sha256: str  # of its serialised form

    @classmethod
    def of(cls, loaded: Loaded) -> TextTokenizer:
        serialised = loaded.backend.to_str()
        sha256 = hashlib.sha256(serialised.encode()).hexdigest()
        return cls(loaded.backend, loaded.end_of_text, tuple(loaded.token_text), sha256)

    def __reduce__(self) -> tuple[Callable[[str], TextTokenizer], tuple[str]]:
        """How it goes to another process."""
        return _revived, (self.backend.to_str(),)

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
        return self.backend.encode_batch(texts)

    def encode_pieces(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """The tokens of pieces of documents; what `continues` a document is not given a space at its start.

        Some tokenizers begin every text as if it came after a space. There, what continues is encoded after a line
        end, and the line end's tokens are dropped.
        """
        if not self._line_end:
            return self.encode_batch(texts)
        behind = ["\n" + text if goes_on else text for text, goes_on in zip(texts, continues, strict=True)]
        size = len(self._line_end)
        return [
            tokens if not goes_on else tokens[size:] if tokens[:size] == self._line_end else self.encode(text)
            for text, goes_on, tokens in zip(texts, continues, self.encode_batch(behind), strict=True)
        ]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; tokens of the model's vocabulary that no text has, and special ones, are nothing."""
        text = b"".join(self.token_text[token] for token in tokens if token < self.vocab_size)
        return text.decode("utf-8", errors="replace")

    @functools.cached_property
    def _line_end(self) -> list[int]:
        """The tokens of a line end, if this tokenizer puts a space before every text."""
        return self.encode("\n") if self.decode(self.encode("a")).startswith(" ") else []


@functools.lru_cache(1)
def _revived(serialised: str) -> TextTokenizer:
    return TextTokenizer.of(revive(serialised))


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError for a vocabulary that is too small for a trained tokenizer."""
    if vocab_size <= NUM_BYTES:
        raise ConfigError(
            f"model.vocab_size = {vocab_size} is too small for a byte-level tokenizer, which has at least "
            f"{NUM_BYTES} bytes + 1 end of text = {NUM_BYTES + 1} tokens"
        )


def trained_tokenizer(
    sample: Callable[[], Iterator[str]],
    sample_key: str,
    vocab_size: int,
    cache_dir: Path,
    progress: Callable[[str], None],
) -> TextTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, kept in `cache_dir`.

    It is trained on `sample()`, about SAMPLE_BYTES_PER_TOKEN of the training text for every token; `sample_key` says
    what text that is.
    """
    check_vocab_size(vocab_size)
    name = f"byte-level BPE {MAX_TOKEN_BYTES} {vocab_size} {sample_key}"
    path = cache_dir / f"tokenizer-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"

    def build(temporary: Path) -> None:
        most = SAMPLE_BYTES_PER_TOKEN * vocab_size / 1e6
        progress(f"data: training a tokenizer of {vocab_size} tokens on at most {most:.1f} MB of text")
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
        backend.train_from_iterator(sample(), trainer)
        temporary.write_text(backend.to_str(), encoding="utf-8")

    cached_file(path, build, progress)
    return load_tokenizer(path, vocab_size, progress)


def load_tokenizer(name: Path | str, vocab_size: int, progress: Callable[[str], None]) -> TextTokenizer:
    """The tokenizer of a file or of a name, for a model of this vocabulary.

    A file is a tokenizer.json, SentencePiece's .model, or what `backend.to_str()` gave of any kind; a name is one of
    tiktoken's. Raises ConfigError for what is none of these, a tokenizer that has more tokens than the model, or one
    without a token for the end of a text.
    """
    loaded = read_tokenizer(name)
    size = len(loaded.token_text)
    if size > vocab_size:
        raise ConfigError(
            f"data.tokenizer: {name} has {size} tokens, more than model.vocab_size = {vocab_size}. Set "
            f"model.vocab_size to at least {size}"
        )
    tokenizer = TextTokenizer.of(loaded)
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        progress(
            f"data: {name} does not give text back as it was; bits per byte count the bytes of the text that it gives"
        )
    return tokenizer
