"""Tokenizers: trained here, tokenizer.json of any kind, SentencePiece's models and tiktoken's encodings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from sharded_train.data.tokenizer import TextTokenizer, load_tokenizer, trained_tokenizer
from sharded_train.errors import ConfigError


def quiet(_: str) -> None:
    pass


def saved(path: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(path))
    return path


def byte_level(*specials: str, vocab_size: int = 270) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=alphabet)
    backend.train_from_iterator(["one and two and three"] * 3, trainer)
    return backend


def test_given_tokenizer_is_used_as_it_is_but_for_what_would_lose_text(tmp_path: Path) -> None:
    backend = byte_level("<|begin|>", "<|endoftext|>")
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    backend.add_tokens(["<tool>"])
    tokenizer = load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, quiet)
    assert tokenizer.end_of_text == 1
    text = "one <|endoftext|> and <tool> tw\u00f6 <|begin|>\r\n\t"
    tokens = tokenizer.encode(text)
    assert not {0, 1} & set(tokens)
    assert len(tokenizer.encode("o")) == 1
    assert tokenizer.decode([0, *tokens, 1, 299]) == text
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert tokenizer.token_bytes[[0, 1]].tolist() == [0, 0]
    assert tokenizer.token_bytes.dtype == np.int32
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size == backend.get_vocab_size()


def test_end_of_text_that_is_not_marked_special_is_special_all_the_same(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["<|endoftext|>"])
    tokenizer = load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, quiet)
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


def test_unusable_tokenizers_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable"):
        load_tokenizer(path, 300, quiet)
    path.write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable"):
        load_tokenizer(path, 300, quiet)
    with pytest.raises(ConfigError, match=r"no token for the end of a text.*its added tokens are <odd>"):
        load_tokenizer(saved(path, byte_level("<odd>")), 300, quiet)
    size = byte_level("<|endoftext|>").get_vocab_size()
    with pytest.raises(ConfigError, match=rf"has {size} tokens, more than model\.vocab_size = {size - 1}\."):
        load_tokenizer(saved(path, byte_level("<|endoftext|>")), size - 1, quiet)
    few = tokenizers.Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1}, []))
    few.decoder = decoders.ByteLevel()
    with pytest.raises(ConfigError, match="lacks some of the 256 bytes"):
        load_tokenizer(saved(path, few), 300, quiet)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 is too small.* = 257 tokens"):
        trained_tokenizer(lambda: iter([]), "", 256, tmp_path, quiet)


def test_tokenizer_that_alters_text_is_said(tmp_path: Path) -> None:
    backend = byte_level("</s>")
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    said: list[str] = []
    load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, said.append)
    assert "does not give text back" in said[0]


def test_the_smallest_vocabulary_is_the_bytes(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(lambda: iter(["one and two"]), "", 257, tmp_path, quiet)
    assert tokenizer.vocab_size == 257
    assert sorted(tokenizer.token_text) == [b"", *sorted(bytes([byte]) for byte in range(256))]


TEXT = "the quick  brown fox\n\n\tjumps over 13 \u6587 dogs\r\n"
LINES = [f"the quick brown fox number {n} jumps over {n * 7} lazy dogs" for n in range(300)]


def sentencepiece_model(path: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 350,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        **changes,
    }
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=file, minloglevel=2, num_threads=1, **settings
        )
    return path


def llama_json(path: Path) -> Path:
    """A tokenizer.json of Llama 2's kind: a space before every text, bytes for what has no token."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("o", "x")]
    names += ["".join(pair) for pair in merges]
    model = models.BPE({name: n for n, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return saved(path, backend)


@pytest.fixture
def tiktoken_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A small encoding under a name, as a plugin of tiktoken's registers it."""

    def constructor() -> dict[str, Any]:
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {b"th": 256, b"the": 257, b" the": 259}
        return {
            "name": "tiny",
            "pat_str": r"\s?\w+|\s+|[^\s\w]+",
            "mergeable_ranks": ranks,
            "special_tokens": {"<|endoftext|>": 261},
        }

    tiktoken.list_encoding_names()
    assert tiktoken.registry.ENCODING_CONSTRUCTORS is not None
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "tiny", constructor)
    yield "tiny"
    tiktoken.registry.ENCODINGS.pop("tiny", None)


@pytest.mark.parametrize("kind", ["llama", "sentencepiece", "tiktoken", "byte-level"])
def test_every_kind_gives_text_back_whole_in_pieces_in_copies_and_from_the_workdir(
    kind: str, tmp_path: Path, tiktoken_name: str
) -> None:
    name: Path | str = tiktoken_name
    if kind == "llama":
        name = llama_json(tmp_path / "tokenizer.json")
    elif kind == "sentencepiece":
        name = sentencepiece_model(tmp_path / "some.model")
    elif kind == "byte-level":
        name = saved(tmp_path / "tokenizer.json", byte_level("<|endoftext|>"))
    said: list[str] = []
    tokenizer = load_tokenizer(name, 400, said.append)
    adds_space = kind in ("llama", "sentencepiece")
    assert len(said) == adds_space
    text = TEXT + "</s> <|endoftext|>"
    tokens = tokenizer.encode(text)
    assert tokenizer.end_of_text not in tokens
    assert tokenizer.decode(tokens) == " " * adds_space + text
    assert tokenizer.token_bytes[tokens].sum() == adds_space + len(text.encode())
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    cut = ["the qu", "ick brown\n", "\n fox", "", "the dog"]
    encoded = tokenizer.encode_pieces(cut, [False, True, True, True, False])
    assert [tokenizer.decode(part) for part in encoded] == [
        *(" " * adds_space + cut[0], *cut[1:4], " " * adds_space + cut[4])
    ]
    (tmp_path / "kept.json").write_text(tokenizer.backend.to_str())
    for again in (copy.copy(tokenizer), load_tokenizer(tmp_path / "kept.json", 400, quiet)):
        assert again.encode(text) == tokens
        assert (again.token_text, again.end_of_text, again.sha256) == (
            tokenizer.token_text,
            tokenizer.end_of_text,
            tokenizer.sha256,
        )


def test_a_tokenizer_of_words_is_used_and_what_it_loses_is_said(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "[SEP]": 1, "the": 2, "fox": 3, "##es": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    said: list[str] = []
    tokenizer = load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, said.append)
    assert "does not give text back" in said[0]
    assert tokenizer.encode("the foxes [SEP]")[:3] == [2, 3, 4]
    assert tokenizer.end_of_text == 1
    assert tokenizer.token_text == (b"", b"", b" the", b" fox", b"es")


def test_unusable_names_and_models_are_refused_in_words(tmp_path: Path, tiktoken_name: str) -> None:
    with pytest.raises(ConfigError, match=r"'cl100k_bas': no such file, .*did you mean cl100k_base\?"):
        load_tokenizer("cl100k_bas", 300, quiet)
    with pytest.raises(ConfigError, match=r"tiny has 262 tokens, more than model\.vocab_size = 261"):
        load_tokenizer(tiktoken_name, 261, quiet)
    path = tmp_path / "some.model"
    with pytest.raises(ConfigError, match=r"some\.model is not a readable"):
        load_tokenizer(path, 300, quiet)
    path.write_bytes(b"no model at all")
    with pytest.raises(ConfigError, match=r"some\.model is not a readable"):
        load_tokenizer(path, 300, quiet)
    with pytest.raises(ConfigError, match=r"some\.model has no token for the end of a text .*eos_id"):
        load_tokenizer(sentencepiece_model(path, eos_id=-1), 400, quiet)


def test_an_encoding_that_cannot_be_downloaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ConfigError, match=r"cannot get the files of 'o200k_base': .*no route.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("o200k_base", 200_100, quiet)


def test_tokens_are_kept_as_numbers_that_hold_them(tmp_path: Path) -> None:
    tokenizer: TextTokenizer = load_tokenizer(saved(tmp_path / "t.json", byte_level("</s>")), 300, quiet)
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.decode([299, 10**6]) == ""
