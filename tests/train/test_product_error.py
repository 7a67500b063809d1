"""Capturing a model's tensors and measuring products: against plain gradients and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from train import column_column, product_error, real_tensors
from train.configs import ModelConfig
from train.model import Llama, next_token_loss
from train.product_error import KEPT_X, Tensors, capture, measure

pytestmark = pytest.mark.standard_promotion

CONFIG = ModelConfig(layers=1, width=32, heads=2, kv_heads=1, mlp_width=48, dtype="float32")
VOCAB = 40
# Sizes of the axes that extraction takes one row or column of, for 32 tokens, 32 in, 48 out.
EXTRACTED_OF = {
    ("fwd", "x"): 32,
    ("fwd", "w"): 48,
    ("dgrad", "dy"): 32,
    ("dgrad", "w"): 32,
    ("wgrad", "dy"): 48,
    ("wgrad", "x"): 32,
}


@pytest.fixture(scope="module")
def case():
    model = Llama(CONFIG, VOCAB)
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, VOCAB)
    variables = model.init(jax.random.key(0), tokens[:, :-1])
    loss_fn, batch = next_token_loss(model), (tokens, jax.random.key(2))
    return loss_fn, variables, batch, capture(loss_fn, variables, batch)


def test_captured_tensors_give_the_gradient(case):
    loss_fn, variables, batch, found = case
    gradients = jax.grad(loss_fn)(variables, batch)["params"]
    assert len(found) == 7
    for path, tensors in found.items():
        node = gradients
        for name in (*path.split("/"), "kernel"):
            node = node[name]
        want = np.asarray(node, np.float64)
        got = product_error.true_products(tensors)["wgrad"]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_every_strategy_of_every_product_is_measured(case):
    path = "block_0/mlp/up"
    tensors = case[-1][path]
    layer = ah.LayerInfo(path, 32, 32, 48)
    measured = {(m.product, m.strategy): m for m in measure(layer, tensors)}
    want = {
        "fwd": {"full", "mxfp4", "iht", "iht mxfp6", "iht+oe(x)", "iht+oe(w)"},
        "dgrad": {"full", "mxfp4", "iht", "iht mxfp6", "iht+oe(dy)", "iht+oe(w)"},
        "wgrad": {"full", "mxfp4", "iht", "iht mxfp6", "iht+oe(dy)", "iht+oe(x)", KEPT_X},
    }
    assert measured.keys() == {(product, s) for product, names in want.items() for s in names}
    for (product, strategy), m in measured.items():
        assert m.work == 32 * 32 * 48
        if strategy == "full":
            assert (m.share, m.error < 1e-6) == (1.0, True)
        else:
            assert 0.02 < m.error < 0.5
            assert 0.02 < m.row_error < 0.5
            tensor = strategy.partition("(")[2].partition(")")[0]
            assert m.share == (1 / EXTRACTED_OF[product, tensor] if tensor else 0)
    assert measured["wgrad", KEPT_X].error < measured["wgrad", "iht+oe(dy)"].error


def test_extraction_with_x_kept_is_exact_in_its_columns():
    x, w, dy = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((64, 32), (32, 8), (64, 8)))
    )
    tensors = Tensors(x=x, w=w, dy=dy.at[:, 3].multiply(100.0))
    got = product_error._with_x_kept(np.zeros((32, 8), np.float32), tensors, 1)
    want = product_error.true_products(tensors)["wgrad"]
    np.testing.assert_allclose(got[:, 3], want[:, 3], rtol=1e-4)
    assert not got[:, np.arange(8) != 3].any()


def test_errors_by_hand():
    true = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    got = (true + [[0.0, 5.0], [0.0, 0.0], [0.0, 0.1], [0.4, 0.0]]).astype(np.float32)
    error, row_error = product_error.errors(got, true)
    assert error == pytest.approx(np.sqrt((25 + 0.01 + 0.16) / 30), rel=1e-6)
    assert row_error == pytest.approx(0.2, rel=1e-6)


def test_tables_hold_every_case():
    kinds = [("attn", "query"), ("attn", "value"), ("mlp", "up")]
    layers = [ah.LayerInfo(f"block_0/{a}/{b}", 32, 32, 32) for a, b in kinds]
    # Codes of X, W and dY: 0 none, 1 row, 2 column.
    codes = np.array([[2, 1, 2], [2, 0, 1], [2, 0, 0]], np.int32)
    labels = [{layer.path: code for layer, code in zip(layers, codes, strict=True)}]
    plans = {n: ah.plan_from_labels(labels, layers=layers, level=n, fwd="mxfp4") for n in (1, 2, 3)}
    explained = {n: ah.explain(plan, layers) for n, plan in plans.items()}
    errors = {"full": 0.002, "mxfp4": 0.2, "iht": 0.15, "iht mxfp6": 0.04, "iht+oe": 0.1}
    measured = [
        product_error.Measurement(
            path=row.path,
            product=row.product,
            strategy=row.strategy,
            error=errors[row.strategy.partition("(")[0]],
            row_error=0.3,
            share=row.share_in_dtype,
            work=row.multiply_adds,
        )
        for plan in product_error.strategies()
        for row in ah.explain(ah.Plan(default=plan), layers).rows
    ]
    cell = column_column.chosen(layers, explained[2])
    value = layers[1].path  # its dY is row-wise
    fwd = [(layer.path, "fwd") for layer in layers]
    assert cell == [*fwd[:2], (value, "wgrad"), *fwd[2:]]
    trials = [
        column_column.Trial(
            path=path, product=product, strategy="iht, X mxfp6", error=0.1 if i else 0.4,
            row_error=0.1, share=0.0, work=1, saved_bits=6.25 if product == "wgrad" else 0,
        )
        for i, (path, product) in enumerate(cell)
    ]  # fmt: skip
    report = real_tensors.tables(measured, trials, plans[2], explained, perplexity=16.7)
    for text in (
        "perplexity 16.70",
        "all 3 linears",
        "| query | column 1 (column 30) | row 1 (row 21, none 9) | column 1 (",
        "| fwd | column-none 2, column-column 1 | column-column 105,",
        "| key | linears | full | mxfp4 | iht | iht mxfp6 | iht+oe(x) | iht+oe(w) | the table's "
        "choice |",
        "| column-column | 1 | 0.002 / 0.300 | 0.200 / 0.300 | 0.150 / 0.300 | 0.040 / 0.300 | "
        "0.100 / 0.300 | 0.100 / 0.300 | iht+oe(w), level 2 full, level 3 iht mxfp6 |",
        "| share in BF16 |  | 100.0% | 0.0% | 0.0% | 0.0% | 3.1% | 3.1% |  |",
        "| BF16 | 0.002 / 0.300 | 0.002 / 0.300 | 0.002 / 0.300 | 100.0% |",
        "| AdaHOP level 1 | 0.133 / 0.300 |",
        "| AdaHOP level 3 | 0.113 / 0.300 |",
        "| least error of MXFP4, case by case | 0.100 / 0.300 |",
        "|  | column-column (1) | all (3) | share in BF16 | bits of the saved X |",
        "| iht, X mxfp6 | 0.400 / 0.100 | 0.200 / 0.100 | 0.0% | - |",
        "|  | column-column (1) | share in BF16 | bits of the saved X |",
        "| iht, X mxfp6 | 0.100 / 0.100 | 0.0% | 6.25 |",
    ):
        assert text in report
    first = [m for m in measured if m.path == layers[0].path]
    report = real_tensors.tables(first, [], plans[2], explained, perplexity=16.7)
    assert "the first 1 of 3 linears" in report


def test_tensors_are_read_in_the_model_s_dtype(case):
    assert {t.x.dtype for t in case[-1].values()} == {jnp.dtype("float32")}
    assert all(t.x.ndim == t.w.ndim == t.dy.ndim == 2 for t in case[-1].values())
