"""Tokenizers: lossless, cached whole or not at all, clear about what they can't read."""

import json

import numpy as np
import pytest

from train import tokenizer as tok
from train.tokenizer import DataError, load_tokenizer

TEXTS = ["To be, or not to be: that is the question.\n" * 20, "Whether 'tis nobler\n" * 20]
ODD = [
    "",
    "\n\n",
    "naïve — 東京 🎭",
    "<|endoftext|> spelled out",
    "tab\tnul\0",
    " lead",
    "a" * 70_000,
]


def load(spec, tmp_path, vocab_size=300, texts=TEXTS):
    return load_tokenizer(spec, texts, cache_dir=tmp_path / "cache", vocab_size=vocab_size)


def cached(tmp_path):
    (path,) = (tmp_path / "cache").iterdir()
    return path


@pytest.mark.parametrize("text", ODD + TEXTS, ids=range(len(ODD + TEXTS)))
@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_round_trip_is_exact(spec, text, tmp_path):
    tokenizer = load(spec, tmp_path)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert ids.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.end_of_document not in ids


def test_bytes_are_utf8():
    tokenizer = load_tokenizer("bytes", (), cache_dir="unused", vocab_size=0)
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("é!").tolist() == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([0x21, 256, 0x22]) == '!"'


def test_bpe_is_shorter_than_bytes_and_of_the_size_asked(tmp_path):
    tokenizer = load("bpe", tmp_path, vocab_size=290)
    assert tokenizer.vocab_size == 290
    assert tokenizer.name == "bpe"
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_bpe_of_a_tiny_text_gives_the_vocabulary_it_has(tmp_path):
    assert load("bpe", tmp_path, vocab_size=5000, texts=["ab"]).vocab_size < 300


def test_pieces_join_to_the_text():
    text = "line of text\n" * 10_000 + "x" * 100_000
    assert "".join(tok._pieces(text)) == text


def test_cache_is_used_and_keyed_by_text_and_size(tmp_path, monkeypatch):
    first = load("bpe", tmp_path).encode(TEXTS[0])
    path = cached(tmp_path)
    monkeypatch.setattr(tok, "train_bpe", lambda *_: pytest.fail("trained again"))
    np.testing.assert_array_equal(load("bpe", tmp_path).encode(TEXTS[0]), first)
    monkeypatch.undo()
    load("bpe", tmp_path, vocab_size=301)
    load("bpe", tmp_path, texts=["".join(TEXTS)])
    load("bpe", tmp_path, texts=TEXTS[::-1])
    assert len(list(path.parent.iterdir())) == 4


def test_training_is_deterministic():
    assert tok.train_bpe(TEXTS, 300) == tok.train_bpe(TEXTS, 300)


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty", "not UTF-8"])
def test_broken_cache_is_rebuilt(damage, tmp_path):
    load("bpe", tmp_path)
    path = cached(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:-1],
            "one byte": whole[:-20] + b"#" + whole[-19:],
            "empty": b"",
            "not UTF-8": b"\xff" + whole,
        }[damage]
    )
    load("bpe", tmp_path)
    assert path.read_bytes() == whole
    assert cached(tmp_path) == path


def test_tokenizer_json_is_loaded(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tok.train_bpe(TEXTS, 292), encoding="utf-8")
    tokenizer = load(str(path), tmp_path)
    assert tokenizer.vocab_size == 292
    assert tokenizer.end_of_document == 0
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]


def test_tokenizer_json_without_an_end_token(tmp_path):
    content = json.loads(tok.train_bpe(TEXTS, 300))
    content["added_tokens"] = []
    del content["model"]["vocab"]["<|endoftext|>"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load(str(path), tmp_path).end_of_document is None


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        (b"\xff", "can't decode"),
        (b"", "no model"),
        (b'{"model": ', "no model"),
        (b"[1]", "no model"),
        (b"{}", "no model"),
        (b'{"model": {"type": "BPE", "vocab": 3}}', "refused"),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no tokens"),
    ],
    ids=["missing", "binary", "empty", "cut", "list", "no-model", "bad-model", "no-tokens"],
)
def test_bad_tokenizer_json(content, found, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"(?s)tokenizer.json.*{found}.*wanted"):
        load(str(path), tmp_path)


@pytest.mark.parametrize("size", [-1, 0, 256, 1 << 25])
def test_bad_vocabulary_size(size, tmp_path):
    with pytest.raises(DataError, match=f"{size} tokens can't be; wanted 257"):
        load("bpe", tmp_path, vocab_size=size)


@pytest.mark.parametrize("spec", ["", "BPE", "gpt2", "tokenizer.model"])
def test_unknown_tokenizer(spec, tmp_path):
    with pytest.raises(DataError, match=f'"{spec}" is unknown; wanted "bytes"'):
        load(spec, tmp_path)


@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_lone_surrogate(spec, tmp_path):
    with pytest.raises(DataError, match="character 2 .* lone surrogate"):
        load(spec, tmp_path).encode("ab\ud800")


@pytest.mark.parametrize("below", ["", "folder"])
def test_cache_below_a_file(below, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    message = r"cache folder .* is a file, or below one; name another with --cache-dir"
    with pytest.raises(DataError, match=message):
        load_tokenizer("bpe", TEXTS, cache_dir=tmp_path / "cache" / below, vocab_size=300)


@pytest.mark.parametrize("blocked", ["read", "write"])
def test_unusable_cache(blocked, tmp_path):
    if blocked == "write":
        (tmp_path / "cache").symlink_to(tmp_path / "nowhere")
    else:
        load("bpe", tmp_path)
        path = cached(tmp_path)
        path.unlink()
        path.mkdir()
    with pytest.raises(DataError, match=r"cache.*can't be.*cache"):
        load("bpe", tmp_path)
