"""The corpus of packages: what is taken, that no document or paragraph is in both parts."""

import json
import lzma
import shutil
import struct
import subprocess
import zipfile
import zlib

import numpy as np
import pytest

from train import corpus, data
from train.corpus_sources import SOURCES, Source, described, fortunes, html_text, plain, rfcs, sword

WORDS = "the cat sat on the mat and the dog lay by the door all day".split()


def _text(seed):
    """Paragraphs of random words, all different."""
    rng = np.random.default_rng(seed)
    return "\n\n".join(" ".join(rng.choice(WORDS, 30)) for _ in range(8)) + "\n"


def _wheel(folder, package, files):
    with zipfile.ZipFile(folder / f"{package}-1.2-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


@pytest.fixture
def packages(tmp_path):
    _wheel(tmp_path, "texts", {f"doc/{i}.txt": _text(i) for i in range(60)} | {"code.py": "1"})
    _wheel(tmp_path, "more", {f"doc/{i}.txt": _text(i % 40 + 40) for i in range(40)})
    return tmp_path


def _source(package, **changes):
    fields = {"files": ("doc/*.txt",), "licence": "none", "read": plain, "is_wheel": True}
    return Source(package=package, **fields | changes)


def test_token_file_is_what_the_trainer_holds_the_last_20th_out_of(packages, tmp_path):
    options = corpus.Options(packages=str(packages), out=str(tmp_path / "out"), vocab_size=300)
    corpus.make(options, (_source("texts"), _source("more")))
    facts = json.loads((tmp_path / "out/corpus.json").read_text())
    loaded = data.load_tokens(
        str(tmp_path / "out/tokens.u16"), tokenizer="bytes", vocab_size=300, cache_dir=tmp_path
    )
    assert (len(loaded.train), len(loaded.heldout)) == (
        facts["train_tokens"],
        facts["heldout_tokens"],
    )
    tokenizer = corpus.BPETokenizer(
        corpus.tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")), "bpe"
    )
    assert tokenizer.end_of_document in loaded.heldout
    trained = set(tokenizer.decode(loaded.train).split("\n"))
    held = [line for line in tokenizer.decode(loaded.heldout).split("\n") if len(line) > 80]
    assert held and not trained & set(held)
    # 20 of the second package's 40 documents are in the first: their text is there once.
    rows = facts["sources"]
    assert (rows["texts"]["documents"], rows["more"]["documents"]) == (60, 20)
    assert rows["texts"]["version"] == "1.2"
    assert "| texts | 1.2 | 60 |" in (tmp_path / "out/corpus.md").read_text()
    parts = sorted((tmp_path / "out/parts").glob("*"))
    whole = b"".join(lzma.decompress(part.read_bytes()) for part in parts)
    assert whole == (tmp_path / "out/tokens.u16").read_bytes()


def test_limit_takes_sources_in_their_order(packages):
    sources = (_source("more"), _source("texts"))
    _, documents = corpus.collect(sources, packages, limit=5_000)
    assert {document.source.package for document in documents} == {"more"}
    assert 5_000 <= sum(len(d.text) for d in documents) < 7_000
    _, again = corpus.collect(sources, packages, limit=5_000)
    assert documents == again


def test_a_20th_is_held_out_whatever_the_lengths():
    lengths = np.random.default_rng(0).integers(200, 9_000, 2_000)
    documents = [corpus.Document(source=_source("texts"), text="x" * n) for n in lengths]
    train, held = corpus.split(documents)
    assert len(train) + len(held) == 2_000
    share = sum(len(d.text) for d in held) / lengths.sum()
    assert share == pytest.approx(1 / 20, abs=1e-3)


def test_parts_stay_below_their_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_COMPRESSED_AT_ONCE", 1_000)
    tokens = np.random.default_rng(0).integers(0, 2**16, 10_000).astype(np.uint16)
    corpus.write_parts(tokens, tmp_path, limit=5_000)
    parts = sorted(tmp_path.glob("*.xz"))
    assert len(parts) > 4 and all(part.stat().st_size <= 5_000 for part in parts)
    whole = b"".join(lzma.decompress(part.read_bytes()) for part in parts)
    assert whole == tokens.astype("<u2").tobytes()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb to make a package")
def test_debian_packages_are_read_without_installing_them(tmp_path):
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    control = "Package: some-doc\nVersion: 3.1\nArchitecture: all\nMaintainer: a <a@b>\n"
    (root / "DEBIAN/control").write_text(control + "Description: text\n")
    (root / "usr/doc").mkdir(parents=True)
    (root / "usr/doc/a.txt").write_text("caf\u00e9", encoding="latin-1")
    (root / "usr/doc/b.bin").write_bytes(b"\0")
    target = tmp_path / "some-doc_3.1_all.deb"
    subprocess.run(["dpkg-deb", "--build", root, target], check=True, capture_output=True)
    source = _source("some-doc", files=("*.txt",), is_wheel=False)
    assert corpus.read_source(source, tmp_path) == ("3.1", ["caf\u00e9"])


def test_missing_package_is_named(tmp_path, capsys):
    assert corpus.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"nothing of package {SOURCES[0].package}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_are_those_to_download(capsys):
    assert corpus.main(["--names", "whl"]) == 0
    assert capsys.readouterr().out.split() == ["botocore", "google-api-python-client"]


def test_readers():
    page = "Page one.\n\n\nSmith      Standards Track      [Page 2]\n\f\nRFC 1  Title  1999\n\nOn."
    assert list(rfcs({"a": page.encode()})) == ["Page one.\n\nOn."]
    assert html_text("<style>s</style><p>One <b>two</b></p><li>a</li>") == "One two\n\na\n"
    blob = zlib.compress(b"<verse>In the beginning</verse>")
    index = struct.pack("<III", 0, len(blob), 0) + struct.pack("<III", 0, 0, 0)
    assert list(sword({"ot.bzs": index, "ot.bzz": blob})) == ["In the beginning\n"]
    assert list(fortunes({"a": b"One.\n%\nTwo.\n"})) == ["One.\n\nTwo.\n"]
    nested = json.dumps({"documentation": "<p>A</p>", "more": [{"documentation": "B"}, 3]})
    assert list(described("documentation")({"a": nested.encode()})) == ["A\n\nB\n"]
