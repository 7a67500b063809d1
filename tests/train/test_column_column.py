"""Candidates for the column-column cell: what plans cannot say, by hand and against the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle
from tests.dense import normal
from train.column_column import (
    INNER,
    Candidate,
    candidate_product,
    candidates,
    measure_candidates,
    square_blocks,
)
from train.product_error import Tensors

TOKENS, IN, OUT = 128, 96, 64
IHT = ah.ProductPlan.iht()


def test_square_blocks_have_the_scale_that_their_largest_magnitude_asks_for():
    """Every element goes to the nearest of E2M1's at that scale."""
    w = normal(0, 64, 96) * 2.0 ** jnp.arange(96, dtype=jnp.float32)[None]
    got, w = np.asarray(jax.jit(square_blocks)(w), np.float64), np.asarray(w)
    for rows, columns in itertools.product(np.split(np.arange(64), 2), np.split(np.arange(96), 3)):
        tile, rounded = w[np.ix_(rows, columns)], got[np.ix_(rows, columns)]
        step = 2.0 ** (int(oracle.quantize(tile, axis=0, rule="even").scales.max()) - 127)
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * step
        off = np.abs(tile.astype(np.float64))[..., None] - magnitudes
        np.testing.assert_array_equal(np.abs(rounded - tile), np.abs(off).min(axis=-1))


@pytest.mark.parametrize("ranked_by, outlier", [("x", 5), ("both", 7)])
def test_inner_extraction_takes_outliers_off_the_quantized_operands(ranked_by, outlier):
    """Column 5 of a is largest, and column 7 times b's row 7."""
    a = normal(0, TOKENS, IN).at[:, 5].multiply(30).at[:, 7].multiply(20)
    b = normal(1, IN, OUT).at[7].multiply(20)
    candidate = Candidate(label="", plan=IHT, inner=1, ranked_by=ranked_by)
    got = np.asarray(candidate_product(a, b, candidate), np.float64)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    rest = np.arange(IN) != outlier
    want = np.asarray(
        ah.matmul(
            jnp.asarray(a * rest, jnp.float32), jnp.asarray(b * rest[:, None], jnp.float32), IHT
        )
    ) + np.outer(a[:, outlier], b[outlier])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("product", ["fwd", "wgrad"])
def test_every_candidate_is_measured(product):
    tensors = Tensors(x=normal(0, TOKENS, IN), w=normal(1, IN, OUT), dy=normal(2, TOKENS, OUT))
    found = {trial.strategy: trial for trial in measure_candidates("a", product, tensors)}
    assert list(found) == [candidate.label for candidate in candidates(product)]
    assert found["full"].error < 1e-5 and found["full"].share == 1
    assert 0.13 < found["iht"].error < 0.18 and found["iht"].share == 0
    assert 0.09 < found["iht, X mxfp6"].error < 0.13
    assert 0.03 < found["iht mxfp6"].error < 0.05
    of_extraction = found[f"iht, inner {INNER[0]} by X"]
    assert of_extraction.share == INNER[0] / (IN if product == "fwd" else TOKENS)
    bits = {"full": 16, "iht": 4.25, "iht mxfp6": 6.25, "iht, X mxfp6": 6.25}
    other = "W" if product == "fwd" else "dY"
    bits |= {f"iht, {other} mxfp6": 4.25, f"iht, inner {INNER[0]} by X": 4.25 + 16 / 8}
    if product == "wgrad":
        assert {label: found[label].saved_bits for label in bits} == bits
        assert found["iht+oe(x)"].saved_bits == 4.25 + 16 / IN
    else:
        assert not any(trial.saved_bits for trial in found.values())
        assert found["iht"].error < found["iht, W in 32 x 32"].error < 0.2
