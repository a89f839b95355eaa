"""Tokenizers as they come: tokenizer.json, SentencePiece's .model, and tiktoken's encodings by their names."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from sharded_train.errors import ConfigError, did_you_mean

NUM_BYTES = 256
_KNOWN_ENDS = ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>", "[SEP]")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE, _TIKTOKEN = "sentencepiece_model", "tiktoken_encoding"  # the keys of our own JSON of these kinds
_SPACE = "\u2581"  # SentencePiece's sign for a space


class Backend(Protocol):
    """What encodes. `to_str` gives a text that `revive` makes the same backend of."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def to_str(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A backend, its token for the end of a text, and the text of every token (nothing for special ones)."""

    backend: Backend
    end_of_text: int
    token_text: list[bytes]


def read_tokenizer(name: Path | str) -> Loaded:
    """The tokenizer of a file or of one of tiktoken's names. Raises ConfigError."""
    path = Path(name).expanduser()
    if path.suffix not in (".json", ".model") and not path.exists():
        return _named(str(name))
    try:
        contents = path.read_bytes()
        text = _json_of_model(contents) if path.suffix == ".model" else contents.decode()
        return revive(text)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer: {path} {error}") from error
    except Exception as error:  # tokenizers and sentencepiece raise bare Exceptions and RuntimeErrors
        raise ConfigError(f"data.tokenizer: {path} is not a readable tokenizer.json or .model: {error}") from error


def revive(serialised: str) -> Loaded:
    """The tokenizer of its serialised form: a tokenizer.json, or our JSON of a kind that has none."""
    settings = json.loads(serialised)
    for key, kind in ((_SENTENCEPIECE, _sentencepiece), (_TIKTOKEN, _tiktoken)):
        if key in settings:
            return kind(settings, serialised)
    return _tokenizer_json(settings, serialised)


@dataclasses.dataclass(frozen=True)
class _Backend:
    encode: Callable[[Sequence[str]], list[list[int]]]
    serialised: str

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode(texts)

    def to_str(self) -> str:
        return self.serialised


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _tokenizer_json(settings: dict[str, Any], serialised: str) -> Loaded:
    backend = tokenizers.Tokenizer.from_str(serialised)
    # What the file's author did to single sentences: cut them off, fill them up.
    backend.no_truncation()
    backend.no_padding()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    end = next((name for name in _KNOWN_ENDS if name in vocabulary), None)
    if end is None:
        added = [token["content"] for token in settings.get("added_tokens", [])]
        raise ConfigError(
            f"has no token for the end of a text. Known are {', '.join(_KNOWN_ENDS)}; its added tokens are "
            f"{', '.join(added[:20]) or 'none'}"
        )
    texts = _token_texts(settings, backend, vocabulary)
    if _is_byte_level(settings) and not set(_byte_characters()) <= vocabulary.keys():
        raise ConfigError("is byte-level but lacks some of the 256 bytes: some text would have no tokens")
    texts[vocabulary[end]] = b""
    backend.add_special_tokens([end])
    backend.encode_special_tokens = True  # in a document they are text

    def encode(batch: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(batch, add_special_tokens=False)]

    return Loaded(_Backend(encode, serialised), vocabulary[end], texts)


def _decoders(settings: dict[str, Any]) -> list[str]:
    decoder = settings.get("decoder") or {}
    return [part.get("type") for part in [decoder, *decoder.get("decoders", [])]]


def _is_byte_level(settings: dict[str, Any]) -> bool:
    return "ByteLevel" in _decoders(settings)


def _token_texts(settings: dict[str, Any], backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> list[bytes]:
    """What each token stands for: by the byte-level alphabet, by its name as a byte, or by what it adds to a word."""
    added = {token["content"]: token["special"] for token in settings.get("added_tokens", [])}
    characters = _byte_characters() if _is_byte_level(settings) else []
    byte_of = {character: byte for byte, character in enumerate(characters)}
    word = [token for name, token in vocabulary.items() if name.isascii() and name.isalpha() and name not in added][:1]
    alone = backend.decode(word)

    def text_of(name: str, token: int) -> bytes:
        if name in added:
            return b"" if added[name] else name.encode()
        if byte_of:
            return bytes(byte_of[character] for character in name)
        if "ByteFallback" in _decoders(settings) and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return backend.decode([*word, token]).removeprefix(alone).encode()

    texts = [b""] * (1 + max(vocabulary.values()))
    for name, token in vocabulary.items():
        texts[token] = text_of(name, token)
    return texts


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def _json_of_model(contents: bytes) -> str:
    return json.dumps({_SENTENCEPIECE: base64.b64encode(contents).decode()})


def _sentencepiece(settings: dict[str, Any], serialised: str) -> Loaded:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=base64.b64decode(settings[_SENTENCEPIECE]))
    end = model.eos_id()
    if end < 0:
        raise ConfigError("has no token for the end of a text (it was trained with eos_id=-1)")

    def text_of(token: int) -> bytes:
        if model.is_byte(token):
            return bytes([int(model.id_to_piece(token)[3:5], 16)])
        special = model.is_control(token) or model.is_unknown(token) or model.is_unused(token)
        return b"" if special else model.id_to_piece(token).replace(_SPACE, " ").encode()

    texts = [text_of(token) for token in range(model.get_piece_size())]
    return Loaded(_Backend(lambda batch: model.encode(list(batch)), serialised), end, texts)


# --- tiktoken --------------------------------------------------------------------------------------------------------


def _named(name: str) -> Loaded:
    """One of tiktoken's encodings; tiktoken downloads its files when they are first asked for, and keeps them."""
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ConfigError(
            f"data.tokenizer = {name!r}: no such file, and not one of tiktoken's encodings{did_you_mean(name, known)}. "
            f"Give a tokenizer.json, a SentencePiece .model, or one of {', '.join(known)}"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # requests and urllib3 have many
        raise ConfigError(
            f"data.tokenizer: tiktoken cannot get the files of {name!r}: {textwrap.shorten(str(error), 200)}. On a "
            "machine without internet, copy tiktoken's cache from another one and set TIKTOKEN_CACHE_DIR to it"
        ) from error
    try:
        return revive(_json_of_encoding(encoding))
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer: {name} {error}") from error


def _json_of_encoding(encoding: Any) -> str:
    """All that makes an encoding, so that a run's workdir needs neither the name nor the download again."""
    ranks = {base64.b64encode(text).decode(): rank for text, rank in encoding._mergeable_ranks.items()}
    specials = encoding._special_tokens
    return json.dumps({_TIKTOKEN: encoding.name, "pattern": encoding._pat_str, "ranks": ranks, "specials": specials})


def _tiktoken(settings: dict[str, Any], serialised: str) -> Loaded:
    import tiktoken

    ranks = {base64.b64decode(text): rank for text, rank in settings["ranks"].items()}
    specials = settings["specials"]
    end = next((specials[name] for name in _KNOWN_ENDS if name in specials), None)
    if end is None:
        raise ConfigError(f"has no token for the end of a text. Known are {', '.join(_KNOWN_ENDS)}")
    encoding = tiktoken.Encoding(
        settings[_TIKTOKEN], pat_str=settings["pattern"], mergeable_ranks=ranks, special_tokens=specials
    )
    texts = [b""] * (encoding.max_token_value + 1)
    for text, rank in ranks.items():
        texts[rank] = text
    return Loaded(_Backend(lambda batch: encoding.encode_ordinary_batch(list(batch)), serialised), end, texts)
