"""Token streams: what to train on, what is held out, and which tokens a step sees.

A batch is a pure function of (tokens, seed, step), so a resumed run needs no state but its step.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.sources import load_documents
from train.tokenizer import DataError as DataError
from train.tokenizer import Tokenizer, load_tokenizer, token_dtype

Tokens = NDArray[np.unsignedinteger]

HELDOUT_ONE_IN = 20
_TOKEN_FILES: dict[str, np.dtype[np.unsignedinteger]] = {
    ".u16": np.dtype("<u2"),
    ".u32": np.dtype("<u4"),
}
_CHUNK = 1 << 22
_ROUNDS = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens to train on and tokens held out; no token is in both.

    Attributes:
      train: uint16 or uint32 [tokens], in memory or memory-mapped.
      heldout: the same, for evaluation only.
      vocab_size: every id is below it.
      description: one line: what it is, how much, what is held out.
    """

    train: Tokens
    heldout: Tokens
    vocab_size: int
    description: str


def load_tokens(spec: str | None, *, tokenizer: str, vocab_size: int, cache_dir: Path) -> Corpus:
    """Loads and splits the text or the token file that `spec` names.

    One document in 20 is held out (the 10th, 30th, 50th, ...); with fewer than 20 documents, or a
    token file, the last 20th of the tokens. The split depends on nothing else: no seed moves it.
    A BPE is trained on the training documents alone.

    Args:
      spec: None for Shakespeare's plays; a text file; a folder of .txt and .md files; a file of
        raw little-endian token ids ending in .u16 or .u32, which stays memory-mapped; or
        `hf:NAME[:SPLIT]`.
      tokenizer: "bytes", "bpe" or the path of a tokenizer.json. A token file is not tokenized, and
        takes the size of its vocabulary from a tokenizer.json alone.
      vocab_size: of "bpe", and of a token file.
      cache_dir: for trained tokenizers and datasets.

    Raises:
      DataError: `spec` or `tokenizer` is unknown; text that is unreadable, empty or not UTF-8; a
        token beyond the vocabulary; too little of it to split.
    """
    path = Path(spec or "")
    if is_token_file(spec):
        if tokenizer not in ("bytes", "bpe"):
            tok = load_tokenizer(tokenizer, (), cache_dir=cache_dir, vocab_size=vocab_size)
            vocab_size = tok.vocab_size
        train, heldout = _tail(_map_tokens(path, vocab_size), path)
        description, held = f"{path}, vocabulary {vocab_size:,}", "the last 20th"
    else:
        documents = load_documents(spec, cache_dir=cache_dir)
        texts = documents.texts
        split = len(texts) >= HELDOUT_ONE_IN
        kept = [text for i, text in enumerate(texts) if not (split and _is_held(i))]
        tok = load_tokenizer(tokenizer, kept, cache_dir=cache_dir, vocab_size=vocab_size)
        vocab_size, train = tok.vocab_size, _encode(tok, kept)
        if split:
            heldout = _encode(tok, [text for i, text in enumerate(texts) if _is_held(i)])
            held = f"{len(texts) - len(kept)} of {len(texts):,} documents"
        else:
            train, heldout = _tail(train, documents.description)
            held = "the last 20th"
        description = f"{documents.description}, {tok.name} vocabulary {vocab_size:,}"
    return Corpus(
        train=train,
        heldout=heldout,
        vocab_size=vocab_size,
        description=f"{description}: {len(train):,} tokens to train on, {len(heldout):,} held out "
        f"({held})",
    )


def is_token_file(spec: str | None) -> bool:
    """Whether `spec` names a file of token ids, by its suffix."""
    return not (spec or "").startswith("hf:") and Path(spec or "").suffix in _TOKEN_FILES


def unigram_entropy(corpus: Corpus) -> float:
    """Returns the loss of the best context-free guess, in nats per held-out token.

    The cross-entropy of the held-out tokens under the training tokens' frequencies, one added to
    each count: what a model has learned beyond word counts shows as a loss below this.
    """
    counts = _counts(corpus.train, corpus.vocab_size)
    log_p = np.log(counts + 1.0) - np.log(counts.sum() + float(corpus.vocab_size))
    held = _counts(corpus.heldout, corpus.vocab_size)
    return float(-(held * log_p).sum() / held.sum())


def batch(tokens: Tokens, *, seed: int, step: int, batch: int, seq_len: int) -> NDArray[np.int32]:
    """Returns the windows that step `step` trains on: int32 [batch, seq_len + 1].

    The tokens are cut into windows that share one token with their neighbour (a window's last
    token is only a target, its first only an input). An epoch visits each window once, in an
    order that (seed, epoch) alone fix: a keyed permutation, evaluated at the places asked for, so
    the cost doesn't grow with the data.

    Raises:
      DataError: not one window fits into the tokens.
    """
    windows = _windows(tokens, seq_len, "the training tokens")
    places = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
    epochs, places = np.divmod(places, windows)
    chosen = np.empty(batch, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        chosen[here] = _permuted(places[here], windows, seed=seed, epoch=int(epoch))
    return _cut(tokens, chosen, seq_len)


def heldout_batches(
    tokens: Tokens, *, batch: int, seq_len: int, limit: int | None
) -> list[NDArray[np.int32]]:
    """Returns the batches to evaluate on, int32 [batch, seq_len + 1]: always the same ones.

    Args:
      limit: at most so many batches, spread evenly over the tokens; None for all that fill up.
        Where not even one fills up, one smaller batch holds every window.

    Raises:
      DataError: not one window fits into the tokens.
    """
    windows = _windows(tokens, seq_len, "the held-out tokens")
    count = max(1, windows // batch)
    count = count if limit is None else min(count, limit)
    size = min(batch, windows)
    chosen = np.arange(count * size, dtype=np.int64) * windows // (count * size)
    return [_cut(tokens, part, seq_len) for part in chosen.reshape(count, size)]


def _is_held(index: int) -> bool:
    return index % HELDOUT_ONE_IN == HELDOUT_ONE_IN // 2 - 1


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    end = tokenizer.end_of_document
    dtype = token_dtype(tokenizer.vocab_size)
    after = np.array([] if end is None else [end], dtype)
    return np.concatenate([part for text in texts for part in (tokenizer.encode(text), after)])


def _tail(tokens: Tokens, where: str | Path) -> tuple[Tokens, Tokens]:
    held = max(2, len(tokens) // HELDOUT_ONE_IN)
    if len(tokens) < held + 2:
        raise DataError(
            f"data: {where} holds {len(tokens)} tokens; wanted at least 4, to train on some and "
            "hold some out; give more text"
        )
    return tokens[:-held], tokens[-held:]


def _map_tokens(path: Path, vocab_size: int) -> Tokens:
    dtype = _TOKEN_FILES[path.suffix]
    wanted = f"wanted raw little-endian {dtype.name} token ids"
    try:
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise DataError(
                f"data: {path} is {size} bytes long, not a positive multiple of {dtype.itemsize}; "
                f"{wanted}; write it whole, or give it the suffix of its type"
            )
        tokens: Tokens = np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise DataError(f"data: {path} can't be read ({error.strerror}); {wanted}") from error
    for start, part in _chunks(tokens):
        beyond = np.flatnonzero(part >= vocab_size)
        if beyond.size:
            place = start + int(beyond[0])
            raise DataError(
                f"data: {path}: token {place} is {int(tokens[place])}; wanted ids below the "
                f"vocabulary's {vocab_size}; raise it with --vocab-size, or check the file's type"
            )
    return tokens


def _chunks(tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
    for start in range(0, len(tokens), _CHUNK):
        yield start, tokens[start : start + _CHUNK]


def _counts(tokens: Tokens, vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, np.int64)
    for _, part in _chunks(tokens):
        counts += np.bincount(part, minlength=vocab_size)
    return counts


def _windows(tokens: Tokens, seq_len: int, what: str) -> int:
    windows = (len(tokens) - 1) // seq_len
    if windows < 1:
        raise DataError(
            f"data: {what} are {len(tokens)}, too few for one sequence of {seq_len} and its next "
            f"token; wanted at least {seq_len + 1}; give more text or a shorter sequence"
        )
    return windows


def _cut(tokens: Tokens, windows: NDArray[np.int64], seq_len: int) -> NDArray[np.int32]:
    starts = windows * seq_len
    return np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int32)


def _permuted(places: NDArray[np.int64], size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Maps places in [0, size) by a permutation of [0, size) that (seed, epoch) fix.

    A Feistel network permutes the smallest [0, 4^b) around it; a value that falls outside is sent
    through again until it is inside, which leaves a permutation of [0, size). Source: Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002 (cycle walking).
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = left << shift | right
        outside = values >= size
    return values.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
