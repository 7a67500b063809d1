"""Every product under every strategy, against float64 products of the oracle's operands.

The layer is called as a user calls it; Y, dX and dW are read off at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import adahop_jax as ah
from adahop_jax import _product
from adahop_jax.reference.hadamard import random_signs
from tests import oracle_product as op
from tests.dense import backend, jit_fast

PRODUCTS = ("fwd", "dgrad", "wgrad")
RESULT = {"fwd": "y", "dgrad": "dx", "wgrad": "dw"}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
ODD = (41, 75, 66)  # tokens, in, out: none a multiple of 32, and more than one block
EVEN = (64, 96, 32)

PLAIN, ROTATED = ah.OperandSpec(), ah.OperandSpec(hadamard=32)
SIX, SIX_ROTATED = ah.OperandSpec(format="mxfp6"), ah.OperandSpec(format="mxfp6", hadamard=32)
SR = ah.OperandSpec(hadamard=32, rounding="stochastic", scale_rule="ceil")
SR_PLAIN = dataclasses.replace(SR, hadamard=0)
SIGNS = ah.OperandSpec(hadamard=32, signs="random")


def _both(lhs, rhs=None):
    return dict.fromkeys(PRODUCTS, ah.ProductPlan(lhs=lhs, rhs=rhs or lhs))


def _extracting(plans, side, k=None, norm="l2"):
    return {
        name: dataclasses.replace(
            plan, outliers=ah.OutlierSpec(tensor=op.OPERANDS[name][side], k=k, norm=norm)
        )
        for name, plan in plans.items()
    }


def _scaled(spec, factor):
    return dataclasses.replace(spec, pre_scale=factor)


PLANS = {
    "full": dict.fromkeys(PRODUCTS, ah.ProductPlan.full()),
    "mxfp4": dict.fromkeys(PRODUCTS, ah.ProductPlan.mxfp4()),
    "iht": dict.fromkeys(PRODUCTS, ah.ProductPlan.iht()),
    "iht-oe-lhs": _extracting(_both(ROTATED), 0),
    "iht-oe-rhs": _extracting(_both(ROTATED), 1),
    "iht-oe-lhs-k5": _extracting(_both(ROTATED), 0, k=5),
    "iht-oe-rhs-k5": _extracting(_both(ROTATED), 1, k=5),
    "mxfp4-oe-lhs": _extracting(_both(PLAIN), 0, k=2),
    "mxfp4-oe-rhs": _extracting(_both(PLAIN), 1, k=2),
    "oe-of-all-lhs": _extracting(_both(ROTATED), 0, k=1000),
    "oe-of-all-rhs": _extracting(_both(ROTATED), 1, k=1000),
    "random-oe-lhs": _extracting(_both(ROTATED), 0, k=5, norm="random"),
    "random-oe-rhs": _extracting(_both(ROTATED), 1, k=5, norm="random"),
    "sr-random-oe-rhs": _extracting(_both(SR), 1, norm="random"),
    "prescale-oe-rhs": _extracting(_both(_scaled(ROTATED, 0.75), _scaled(ROTATED, 3.0)), 1, k=2),
    "signs": _both(SIGNS),
    "signs-oe-lhs": _extracting(_both(SIGNS), 0, k=2),
    "signs-oe-rhs": _extracting(_both(SIGNS), 1, k=2),
    "hadamard-16": _both(ah.OperandSpec(hadamard=16)),
    "hadamard-64": _both(ah.OperandSpec(hadamard=64)),
    "mxfp6": _both(SIX),
    "mxfp6-iht": _both(SIX_ROTATED),
    "mxfp6-mxfp4": _both(SIX_ROTATED, ROTATED),
    "mxfp6-oe-rhs": _extracting(_both(SIX_ROTATED), 1, k=2),
    "floor-ceil": _both(
        ah.OperandSpec(hadamard=32, scale_rule="floor"),
        ah.OperandSpec(hadamard=32, scale_rule="ceil"),
    ),
    "sr-lhs": _both(SR, ROTATED),
    "sr-rhs": _both(ROTATED, SR),
    "sr-plain": _both(SR_PLAIN),
    "sr-oe-lhs": _extracting(_both(SR), 0, k=2),
    "sr-oe-rhs": _extracting(_both(SR), 1, k=2),
}


def _tensors(shape, dtype, seed=0):
    """x, w and dy in `dtype`, rows and columns of very different size."""
    tokens, width, out = shape
    rng = np.random.default_rng(seed)

    def one(rows, columns):
        t = rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)))
        return jnp.asarray(t * np.exp(rng.standard_normal((1, columns))), dtype)

    return {"x": one(tokens, width), "w": one(width, out), "dy": one(tokens, out)}


def _layer_products(plan, tensors, key):
    """Y, dX and dW of a layer without bias."""
    layer = ah.Dense(
        tensors["w"].shape[1],
        use_bias=False,
        plan=ah.Plan(default=plan),
        dtype=tensors["x"].dtype,
        param_dtype=tensors["w"].dtype,
    )

    def apply(x, w):
        return layer.apply({"params": {"kernel": w}}, x, rngs={"quantize": key})

    y, pullback = jax.vjp(apply, tensors["x"], tensors["w"])
    dx, dw = pullback(tensors["dy"])
    return {"fwd": y, "dgrad": dx, "wgrad": dw}


@functools.partial(jit_fast, static_argnums=0)
def _run_and_seeds(plan, tensors, key):
    """The products, and the seeds that were drawn for them."""
    drawn = {}
    original = _product.product_seeds

    def noting(name, plan, key):
        drawn[name] = original(name, plan, key)
        return drawn[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adahop_jax._dense.product_seeds", noting)
        return _layer_products(plan, tensors, key), drawn


def _run(plan, tensors, key):
    return _run_and_seeds(plan, tensors, key)[0]


def _product_and_bound(name, tensors, plan, **options):
    return op.product(name, tensors, plan, backend=backend(), **options)


def _check(plans, tensors, got, seeds):
    for name in PRODUCTS:
        plan = plans[name]
        k = 0
        if plan.outliers is not None:
            side = op.OPERANDS[name].index(plan.outliers.tensor)
            k = plan.outliers.count(
                tensors[plan.outliers.tensor].shape[1 - op.CONTRACT[name][side]]
            )
        drawn = {tensor: np.asarray(seed) for tensor, seed in seeds.get(name, {}).items()}
        signs = None
        if "signs" in drawn:
            signs = np.asarray(random_signs(plan.lhs.hadamard, jnp.asarray(drawn["signs"])))
            assert set(np.unique(signs)) == {-1.0, 1.0}
        want, bound = _product_and_bound(name, tensors, plan, k=k, seeds=drawn, signs=signs)
        op.assert_close(got[name], want, bound, tensors["x"].dtype)


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_products_against_the_oracle(plans, key):
    tensors = _tensors(ODD, jnp.float32)
    got, seeds = _run_and_seeds(ah.LayerPlan(**plans), tensors, key)
    _check(plans, tensors, got, seeds)


@pytest.mark.parametrize("strategy", ["mxfp4", "iht", "iht-oe-lhs-k5", "iht-oe-rhs-k5"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_low_precision_layers_against_the_oracle(dtype, strategy, key):
    """Operands are read in `dtype`, and results rounded to it once."""
    tensors = _tensors(ODD, DTYPES[dtype])
    got = _run(ah.LayerPlan(**PLANS[strategy]), tensors, key)
    _check(PLANS[strategy], tensors, got, {})


SHAPES = [(1, 1, 1), (16, 31, 33), (33, 16, 31), (31, 33, 40), (40, 1, 16), (1, 40, 1), (33, 40, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_any_dims_against_the_oracle(shape, key):
    tensors = _tensors(shape, jnp.float32)
    plans = _extracting(_both(ROTATED), sum(shape) % 2)
    _check(plans, tensors, _run(ah.LayerPlan(**plans), tensors, key), {})


class TestExtraction:
    """What is extracted is overwritten, all else is that of plain IHT.

    On small integers, whose sums in float32 are exact in any order.
    """

    K = 5

    @pytest.fixture(scope="class", params=["f32", "bf16"])
    @classmethod
    def results(cls, request, platform):
        rng = np.random.default_rng(4)
        tensors = {
            n: jnp.asarray(rng.integers(-9, 10, t.shape), DTYPES[request.param])
            for n, t in _tensors(ODD, jnp.float32).items()
        }
        key = jax.random.key(0)
        plans = {"iht": "iht", "lhs": "iht-oe-lhs-k5", "rhs": "iht-oe-rhs-k5"}
        return tensors, {n: _run(ah.LayerPlan(**PLANS[p]), tensors, key) for n, p in plans.items()}

    @pytest.mark.parametrize("name", PRODUCTS)
    @pytest.mark.parametrize("side", [0, 1], ids=["lhs", "rhs"])
    def test_the_others_are_untouched(self, results, side, name):
        tensors, got = results
        index = self._index(tensors, name, side)
        extracted, plain = got[("lhs", "rhs")[side]][name], got["iht"][name]
        changed = np.asarray(extracted != plain)
        others = np.delete(changed, index, axis=side)
        assert not others.any()
        assert changed.take(index, axis=side).mean() > 0.5

    @pytest.mark.parametrize("name, side", [("fwd", 0), ("fwd", 1), ("dgrad", 0), ("dgrad", 1)])
    def test_overwritten_by_the_product_in_dtype(self, results, name, side):
        tensors, got = results
        a, b = (tensors[tensor] for tensor in op.OPERANDS[name])
        want = self._dot(a, b, op.CONTRACT[name])
        index = self._index(tensors, name, side)
        np.testing.assert_array_equal(
            np.asarray(got[("lhs", "rhs")[side]][name]).take(index, axis=side),
            np.asarray(want).take(index, axis=side),
        )

    def test_columns_of_x_in_wgrad_are_exact_too(self, results):
        tensors, got = results
        want = self._dot(tensors["x"], tensors["dy"], (0, 0))
        index = self._index(tensors, "wgrad", 0)
        np.testing.assert_array_equal(np.asarray(got["lhs"]["wgrad"])[index], want[index])

    def _index(self, tensors, name, side):
        tensor = tensors[op.OPERANDS[name][side]]
        return op.largest(tensor, axis=1 - op.CONTRACT[name][side], k=self.K)

    def _dot(self, a, b, axes):
        dims = (((axes[0],), (axes[1],)), ((), ()))
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32).astype(a.dtype)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("side", [0, 1], ids=["lhs", "rhs"])
def test_ties_go_to_the_lower_index(name, side, key):
    """Every row and column holds the same magnitudes; the first k are extracted."""
    rng = np.random.default_rng(1)
    tensors = {
        n: jnp.asarray(rng.choice([-1.3, 1.3], t.shape), jnp.float32)
        for n, t in _tensors(ODD, jnp.float32).items()
    }
    plans = PLANS[("iht-oe-lhs-k5", "iht-oe-rhs-k5")[side]]
    got = _run(ah.LayerPlan(**plans), tensors, key)[name]
    plain = _run(ah.LayerPlan(**PLANS["iht"]), tensors, key)[name]
    changed = np.asarray(got != plain).any(axis=1 - side)
    np.testing.assert_array_equal(np.flatnonzero(changed), range(5))


class TestDyExtractedInWgrad:
    """dW's columns come from X as it is kept, rotated and in MXFP4, and from dY in `dtype`."""

    TOKENS, IN, OUT, K = 512, 96, 128, 4

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls, platform):
        rng = np.random.default_rng(2)
        x = rng.standard_normal((cls.TOKENS, cls.IN))
        dy = rng.standard_normal((cls.TOKENS, cls.OUT))
        index = [7, 50, 64, 127]
        dy[:, index] *= 30
        w = rng.standard_normal((cls.IN, cls.OUT))
        tensors = {n: jnp.asarray(t, jnp.bfloat16) for n, t in (("x", x), ("w", w), ("dy", dy))}
        plans = {"iht": PLANS["iht"], "oe": _extracting(_both(ROTATED), 1, k=cls.K)}
        got = {
            n: np.asarray(_run(ah.LayerPlan(**p), tensors, jax.random.key(0))["wgrad"], np.float64)
            for n, p in plans.items()
        }
        return tensors, got, index

    def test_documented_formula(self, results):
        """dY[:, idx]^T, rotated along tokens in bfloat16, times the residual of X, over 32."""
        tensors, got, index = results
        kept = op.operand(tensors["x"], axis=0, spec=ROTATED)
        turned = op.rotated(np.asarray(tensors["dy"])[:, index], axis=0, spec=ROTATED)
        turned = turned.astype(jnp.bfloat16).astype(np.float64)
        want = kept.T @ turned / 32
        bound = 2.0**-8 * np.abs(want) + 1e-4 * (np.abs(kept.T) @ np.abs(turned) / 32)
        assert (np.abs(got["oe"][:, index] - want) <= bound).all()

    def test_error_against_the_true_x(self, results):
        """One MXFP4 operand leaves about .11 of a Gaussian product, two leave .155."""
        tensors, got, index = results
        x, dy = (np.asarray(tensors[n]).astype(np.float64) for n in ("x", "dy"))
        want = (x.T @ dy)[:, index]

        def error(y):
            return np.linalg.norm(y[:, index] - want) / np.linalg.norm(want)

        assert 0.095 < error(got["oe"]) < 0.125
        assert 0.14 < error(got["iht"]) < 0.17

    def test_other_columns_are_those_of_iht(self, results):
        _, got, index = results
        np.testing.assert_array_equal(
            np.delete(got["oe"], index, axis=1), np.delete(got["iht"], index, axis=1)
        )

    def test_float16_stays_finite(self, key):
        """X rotated reaches 32 times its size, beyond float16."""
        tensors = {
            "x": jnp.full((64, 40), 3000.0, jnp.float16),
            "w": jnp.ones((40, 8), jnp.float16) / 64,
            "dy": jnp.full((64, 8), 1e-3, jnp.float16),
        }
        plans = _extracting(_both(ROTATED), 1, k=2)
        got = np.asarray(_run(ah.LayerPlan(**plans), tensors, key)["wgrad"], np.float64)
        want = 64 * 3000 * float(np.float16(1e-3))
        np.testing.assert_allclose(got, want, rtol=0.15)


@pytest.mark.parametrize("name", PRODUCTS)
def test_random_signs_cancel(name, key):
    """Nothing but rounding noise is left of the signs: the error is that of the plain transform."""
    tensors = _gaussian()
    a, b = (np.asarray(tensors[n]) for n in op.OPERANDS[name])
    want = op.contract(a, b, op.CONTRACT[name])
    got = np.asarray(_run(ah.LayerPlan(**PLANS["signs"]), tensors, key)[name])
    assert 0.13 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.18
    other = np.asarray(_run(ah.LayerPlan(**PLANS["signs"]), tensors, jax.random.key(1))[name])
    assert (got != other).mean() > 0.9


@pytest.mark.parametrize("strategy, low, high", [("mxfp6-iht", 0.035, 0.05), ("iht", 0.14, 0.17)])
def test_error_of_a_gaussian_product(strategy, low, high, key):
    tensors = _gaussian()
    got = _run(ah.LayerPlan(**PLANS[strategy]), tensors, key)
    for name in PRODUCTS:
        a, b = (np.asarray(tensors[n]) for n in op.OPERANDS[name])
        want = op.contract(a, b, op.CONTRACT[name])
        assert low < np.linalg.norm(np.asarray(got[name]) - want) / np.linalg.norm(want) < high


def _gaussian():
    rng = np.random.default_rng(3)
    return {
        n: jnp.asarray(rng.standard_normal(t.shape), jnp.float32)
        for n, t in _tensors(ODD, jnp.float32).items()
    }


@pytest.mark.parametrize("name", PRODUCTS)
def test_seeds_of_products_and_operands_differ(name, key):
    plan = ah.ProductPlan(lhs=SR, rhs=SR)
    seeds = {
        (n, tensor): tuple(np.asarray(seed).tolist())
        for n in PRODUCTS
        for tensor, seed in _product.product_seeds(n, plan, key).items()
    }
    assert len(seeds) == 6
    assert len(set(seeds.values())) == 6


_matmul = jax.jit(ah.matmul, static_argnums=2)


class TestMatmul:
    """`ah.matmul` is the forward product."""

    @pytest.mark.parametrize("strategy", ["full", "mxfp4", "iht"])
    def test_named(self, strategy, key):
        tensors = _tensors(ODD, jnp.float32)
        got = _matmul(tensors["x"], tensors["w"], strategy)
        want, bound = _product_and_bound("fwd", tensors, ah.ProductPlan.named(strategy))
        op.assert_close(got, want, bound, jnp.float32)

    @pytest.mark.parametrize("tensor", ["x", "w"])
    def test_extraction(self, tensor):
        tensors = _tensors(EVEN, jnp.bfloat16)
        plan = ah.ProductPlan.iht(outliers=tensor, k=3)
        got = _matmul(tensors["x"], tensors["w"], plan)
        want, bound = _product_and_bound("fwd", tensors, plan, k=3)
        op.assert_close(got, want, bound, jnp.bfloat16)

    def test_leading_dims(self):
        tensors = _tensors(EVEN, jnp.float32)
        x = tensors["x"].reshape(2, 4, 8, 96)
        got = _matmul(x, tensors["w"], "iht")
        assert got.shape == (2, 4, 8, 32)
        want = _matmul(tensors["x"], tensors["w"], "iht")
        np.testing.assert_array_equal(got.reshape(64, 32), want)

    def test_key(self, key):
        tensors = _tensors(EVEN, jnp.float32)
        plan = ah.ProductPlan(lhs=SR, rhs=ROTATED)
        one = _matmul(tensors["x"], tensors["w"], plan, key=key)
        np.testing.assert_array_equal(one, _matmul(tensors["x"], tensors["w"], plan, key=key))
        other = _matmul(tensors["x"], tensors["w"], plan, key=jax.random.key(1))
        assert (np.asarray(one) != np.asarray(other)).any()
