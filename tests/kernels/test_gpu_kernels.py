"""The kernels on a GPU against the reference and the oracle.

All memory is filled with NaN before it is handed out, so that nothing passes for a result that was
never written. The reference runs on the CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from adahop_jax._dispatch import resolve
from adahop_jax.reference import operations as reference
from benchmarks.shapes import AWKWARD
from tests import oracle_product
from tests.kernels.on_gpu import lost, poison
from triton_kernels.machines import MACHINES
from triton_kernels.quantize_tiles import takes

pytestmark = pytest.mark.gpu

SEED = np.array([123456789, 987654321], np.uint32)
IHT, PLAIN = ah.OperandSpec(hadamard=32), ah.OperandSpec()
STOCHASTIC = ah.OperandSpec(hadamard=32, rounding="stochastic", scale_rule="ceil")
OTHERS = {
    "plain": PLAIN,
    "floor": ah.OperandSpec(scale_rule="floor", hadamard=32),
    "ceil-scaled": ah.OperandSpec(scale_rule="ceil", hadamard=16, pre_scale=0.75),
    "plain-stochastic": dataclasses.replace(STOCHASTIC, hadamard=0),
    "h64-signs": ah.OperandSpec(hadamard=64, signs="random"),
    "mxfp6": ah.OperandSpec(format="mxfp6", hadamard=32),
}
LEAST_STEP = {"mxfp4": -30, "mxfp6": -15}  # half of FP8's least step, over a row's largest scale
NEAR = {"mxfp4": 2.0**-18, "mxfp6": 2.0**-16}  # relative; its least boundary is 4 times as low
DATA = ("normal", "spread", "faults", "edges", "zeros first")
FROM_THE_ORACLE = ("normal", "spread")

FROBENIUS = 5e-3
"""Of a whole product in BF16: 1.7e-3 of rounding, and up to 3e-3 of cut sums of one sign."""


@pytest.fixture(scope="module")
def ops():
    name, operations = resolve(None)
    if not name.endswith(":fp8"):
        pytest.skip(f"folded operands are Hopper's and Ada's; products run on {name} here")
    return operations


@pytest.fixture(params=["triton:fp8", "triton+pallas"])
def product_ops(request):
    try:
        return resolve(request.param)[1]
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.fixture
def rng(request):
    return np.random.default_rng([ord(c) for c in request.node.name])


def _data(rng, rows, columns, kind):
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    match kind:
        case "spread":
            x *= 2.0 ** rng.integers(-20, 20, x.shape)
            x[rng.random(x.shape) < 0.1] = 0
        case "faults":
            x[1, 2], x[2, 1], x[5, 7] = np.inf, np.nan, -np.inf
            x[3] = -0.0
        case "edges":
            x *= 2.0 ** rng.choice([-126, -120, -100, 0, 119, 120], (rows, 1))
        case "zeros first":
            x[: rows // 2], x[:, : columns // 2] = 0, 0
            x[:, -1] *= 1e6
            x[-1] *= 1e-6
    return x


def _all(operations, spec, axis):
    """x -> residual with norms, the operand, and the residual loaded as one."""

    def run(x, seed):
        common = {"axis": axis, "spec": spec, "seed": seed, "sign_seed": seed}
        codes, scales, norms = operations.residual(x, norms=True, **common)
        operand, _ = operations.operand(x, **common)
        return codes, scales, norms, operand, operations.load(codes, scales, spec=spec)

    return jax.jit(run)


def _values(operand):
    """Of a folded operand, float64."""
    view = operand.values
    exponents = np.asarray(view.refs, np.float64) - 127
    return np.asarray(view.data.astype(jnp.float32), np.float64) * 2.0 ** exponents[:, None]


def _assert_folded(got, want, scales, fmt):
    """Exact within the window of binades below a row's largest scale, and near below it."""
    scales = scales.astype(np.int64)
    top = np.where(scales == 255, 0, scales).max(axis=1)[:, None]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    error = np.where(np.isnan(want), 0, np.abs(got - want))
    assert (error <= 2.0 ** (top - 127 + LEAST_STEP[fmt])).all()
    inside = np.repeat(scales > top + LEAST_STEP[fmt] + 5, 32, axis=1)
    assert not error[inside].any()


def _check(ops, rng, shape, dtype, spec, axis):
    kernels, plain = _all(ops, spec, axis), _all(reference, spec, axis)
    for kind in DATA:
        if kind == "edges" and dtype == "float16":
            continue  # they are beyond its range
        x = _data(rng, *shape, kind)
        if dtype == "float16":
            x = np.where(np.isfinite(x), np.clip(x, -65504, 65504), x)
        x = x.astype(jnp.dtype(dtype))
        with jax.default_device(jax.devices("cpu")[0]):
            codes, scales, norms, values, _ = jax.tree.map(np.asarray, plain(x, SEED))
        poison()
        got = kernels(x, SEED)
        odd = _odd_blocks(got, codes, scales)
        if not takes(jnp.asarray(x), spec, MACHINES["9.0"]):
            assert not odd.any(), kind
        _assert_few_and_near(odd, got, x, axis, spec, limit=0.01 if kind == "spread" else 1e-4)
        finite = np.isfinite(norms)
        np.testing.assert_array_equal(np.isfinite(got[2]), finite)
        np.testing.assert_allclose(np.asarray(got[2])[finite], norms[finite], rtol=1e-5)
        for operand in got[3:]:
            same = np.repeat(odd, 32, axis=1)
            want = np.where(same, _values(operand), values.astype(np.float64))
            _assert_folded(_values(operand), want, scales, spec.format)
        if kind in FROM_THE_ORACLE and spec.signs == "none" and not odd.any():
            want = _oracle(x, axis, spec)
            np.testing.assert_array_equal(_last(got[0], axis), want.packed, err_msg=kind)
            np.testing.assert_array_equal(_last(got[1], axis), want.scales, err_msg=kind)


def _odd_blocks(got, codes, scales):
    """Which blocks of a residual differ from the reference's: (rows, blocks)."""
    differ = (np.asarray(got[0]) != codes).reshape(*scales.shape, -1).any(-1)
    return differ | (np.asarray(got[1]) != scales)


def _assert_few_and_near(odd, got, x, axis, spec, *, limit):
    """Blocks that differ are rare, and what a value NEAR to the right one would give.

    Where sums of the tensor cores are not exact, they are cut off. What is rounded to zero may have
    either sign.
    """
    assert odd.sum() <= max(1, limit * odd.size), odd.sum()
    if not odd.any():
        return
    assert spec.signs == "none"
    codes = oracle_product.oracle.unpack(np.asarray(got[0]), spec.mx.element_bits)
    turned = oracle_product.rotated(x, axis=axis, spec=spec)
    fits = False
    for sign in (-1, 1):
        want = oracle_product.oracle.quantize(
            turned * np.float32(1 + sign * NEAR[spec.format]),
            axis=axis,
            fmt=oracle_product.FORMATS[spec.format],
            rule=spec.scale_rule,
        )
        same = np.repeat(np.asarray(got[1]) == _last(want.scales, axis), 32, axis=1)
        right = _last(want.codes, axis)
        zeros = (codes | right) & spec.mx.max_code == 0
        fits |= same & ((codes == right) | zeros)
    assert fits[np.repeat(odd, 32, axis=1)].all()


def _oracle(x, axis, spec):
    turned = oracle_product.rotated(x, axis=axis, spec=spec)
    return oracle_product.oracle.quantize(
        turned,
        axis=axis,
        fmt=oracle_product.FORMATS[spec.format],
        rule=spec.scale_rule,
        key=SEED if spec.rounding == "stochastic" else None,
    )


def _last(stored, axis):
    """A residual, which has the contracted axis last, as the oracle lays it out."""
    return np.asarray(stored).T if axis == 0 else np.asarray(stored)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", [IHT, STOCHASTIC], ids=["iht", "stochastic"])
@pytest.mark.parametrize("shape", AWKWARD, ids=str)
def test_quantizing_equals_the_reference(ops, rng, shape, spec, axis):
    _check(ops, rng, shape, "bfloat16", spec, axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", OTHERS.values(), ids=OTHERS)
def test_every_way_to_quantize_equals_the_reference(ops, rng, spec, axis):
    _check(ops, rng, (130, 161), "bfloat16", spec, axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_dtype_equals_the_reference(ops, rng, dtype, axis):
    _check(ops, rng, (130, 161), dtype, STOCHASTIC, axis)


TILES = {"iht": IHT, "floor": OTHERS["floor"], "mxfp6": OTHERS["mxfp6"]}


@pytest.mark.parametrize("spec", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", [(64, 64), (200, 328), (2048, 1536)], ids=str)
def test_both_directions_in_one_read(ops, rng, shape, spec):
    """Equal to each by itself; of ordinary data hardly a block differs from the reference's."""
    x = rng.standard_normal(shape).astype(jnp.bfloat16)
    wanted = [
        reference.Wanted(stored, axis, spec, norms=stored)
        for stored, axis in ((True, 0), (False, 1), (True, 1), (False, 0))
    ]
    poison()
    pairs = [jax.jit(lambda x, w=w: ops.views(x, *w))(x) for w in (wanted[:2], wanted[2:])]
    for w, got in zip(wanted, [*pairs[0], *pairs[1]], strict=True):
        alone = jax.jit(lambda x, w=w: ops.views(x, w))(x)[0]
        if not w.stored:
            # Rows alone are rotated by a butterfly, and have other reference exponents.
            differ = (_values(got[0]) != _values(alone[0])).reshape(-1, 32).any(-1)
            assert differ.sum() <= max(1, 1e-4 * differ.size)
            continue
        with jax.default_device(jax.devices("cpu")[0]):
            codes, scales, norms = map(np.asarray, reference.views(x, w)[0])
        odd = _odd_blocks(got, codes, scales)
        _assert_few_and_near(odd, got, x, w.axis, spec, limit=1e-4)
        differ = _odd_blocks(got, np.asarray(alone[0]), np.asarray(alone[1]))
        assert differ.sum() <= max(1, 1e-4 * differ.size)
        np.testing.assert_allclose(np.asarray(got[2]), norms, rtol=1e-5)


def _product(ops, spec, dtype, rhs_axis=0):
    def run(a, b):
        left, _ = ops.operand(a, axis=1, spec=spec)
        right, _ = ops.operand(b, axis=rhs_axis, spec=spec)
        return ops.matmul(left, right, scale=1 / max(spec.hadamard, 1), dtype=jnp.dtype(dtype))

    return jax.jit(run)


def _exact(a, b, spec):
    """The float64 product of the reference's operands, and that of their magnitudes."""
    with jax.default_device(jax.devices("cpu")[0]):
        left = reference.operand(a, axis=1, spec=spec)[0]
        right = reference.operand(b, axis=0, spec=spec)[0]
    left, right = (np.asarray(side).astype(np.float64) for side in (left, right))
    scale = 1 / max(spec.hadamard, 1)
    return left @ right.T * scale, np.abs(left) @ np.abs(right).T * scale


PRODUCTS = {  # rows, columns, length: edges of tiles, several tiles, shares of a long sum
    "one": (1, 1, 32, PLAIN, "float32"),
    "edges": (33, 40, 96, PLAIN, "float32"),
    "odd-columns": (129, 77, 4096, IHT, "bfloat16"),
    "tiles": (700, 1040, 2880, IHT, "float32"),
    "long": (256, 136, 16_384, PLAIN, "bfloat16"),
    "long-odd": (130, 77, 16_384, PLAIN, "float32"),
    "many-tiles": (2048, 2560, 512, IHT, "bfloat16"),
    "many-tiles-long": (1664, 2048, 4480, PLAIN, "float32"),
}


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_products_against_float64(product_ops, rng, case):
    """Also of values of one sign, whose sums lose most, and of rows of very different size."""
    m, n, k, spec, dtype = case
    multiply = _product(product_ops, spec, dtype)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8}[dtype]
    for kind in ("normal", "one sign", "rows apart"):
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
        if kind == "one sign":
            a, b = np.abs(a), np.abs(b)
        if kind == "rows apart":
            a *= 2.0 ** rng.integers(-30, 30, (m, 1))
            b *= 2.0 ** rng.integers(-30, 30, (1, n))
        a, b = (t.astype(jnp.dtype(dtype)) for t in (a, b))
        want, size = _exact(a, b, spec)
        poison()
        got = np.asarray(multiply(a, b)).astype(np.float64)
        allowed = lost(size, k, spec) + unit * np.abs(want) + 2.0**-126
        assert (np.abs(got - want) <= allowed).all(), kind
        if kind != "rows apart":
            assert np.linalg.norm(got - want) < FROBENIUS * np.linalg.norm(want), kind


@pytest.mark.parametrize("shape", [(33, 40, 96), (700, 1040, 96), (2176, 1920, 128)], ids=str)
def test_small_integers_are_exact(product_ops, rng, shape):
    m, n, k = shape
    # 0, 1, 2, 3 and 4 are exact in a block of them; sums stay below 2^11.
    a, b = (rng.integers(-4, 5, s).astype(np.float32) for s in ((m, k), (k, n)))
    poison()
    np.testing.assert_array_equal(_product(product_ops, PLAIN, "float32")(a, b), a @ b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("what", ["rows", "columns"])
def test_outliers_are_overwritten_and_nothing_else(ops, rng, what, dtype):
    m, n, k, count = 130, 161, 96, 5
    a, b = (
        rng.standard_normal(s).astype(np.float32).astype(jnp.dtype(dtype)) for s in ((m, k), (k, n))
    )
    index = rng.choice(m if what == "rows" else n, count, replace=False).astype(np.int32)
    values = rng.standard_normal((count, n) if what == "rows" else (m, count)).astype(np.float32)

    def run(a, b, index, values):
        left, right = (ops.operand(t, axis=x, spec=IHT)[0] for t, x in ((a, 1), (b, 0)))
        both = {"scale": 1 / 32, "dtype": jnp.dtype(dtype)}
        plain = ops.matmul(left, right, **both)
        return plain, ops.matmul(left, right, **both, **{what: (index, values)})

    poison()
    plain, got = (np.asarray(y) for y in jax.jit(run)(a, b, index, values))
    want = plain.copy()
    want[(index, slice(None)) if what == "rows" else (slice(None), index)] = values
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("n, k", [(1, 1), (100, 3), (4096, 64), (16_384, 64), (70_000, 64)])
def test_largest_norms(ops, rng, n, k):
    """Many ties, which go to the lower index; NaN before all."""
    select = jax.jit(functools.partial(ops.largest, k=k))
    for faults in (0, min(2, k)):
        norms = np.round(np.abs(rng.standard_normal(n)), 2).astype(np.float32)
        norms[rng.choice(n, faults, replace=False)] = np.nan
        poison()
        got = np.sort(np.asarray(select(norms)))
        order = np.argsort(-np.where(np.isnan(norms), np.inf, norms), kind="stable")
        np.testing.assert_array_equal(got, np.sort(order[:k]))


@pytest.mark.parametrize("spec", [IHT, OTHERS["mxfp6"]], ids=["mxfp4", "mxfp6"])
def test_path_through_bfloat16(rng, spec):
    """What a GPU without FP8 units takes; its sums are float32's."""
    ops = resolve("triton:bf16")[1]
    a, b = rng.standard_normal((130, 161)), rng.standard_normal((161, 40))
    a, b = (np.asarray(t, np.float32) for t in (a, b))
    want, size = _exact(a, b, spec)
    poison()
    got = np.asarray(_product(ops, spec, "float32")(a, b)).astype(np.float64)
    assert (np.abs(got - want) <= 192 * 2.0**-23 * size).all()


def test_path_that_is_not_there_is_refused(ops):
    with pytest.raises(NotImplementedError, match="'triton:native' cannot run on .* has no path"):
        resolve("triton:native")
