"""The three products in float64, from operands that `tests/oracle.py` quantized.

Written from the plan's meaning alone. Only random bits are taken from outside: the seeds of
stochastic rounding and the signs of a randomized transform.
"""

import numpy as np

from tests import oracle

FORMATS = {"mxfp4": oracle.E2M1, "mxfp6": oracle.E2M3}
OPERANDS = {"fwd": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
CONTRACT = {"fwd": (1, 0), "dgrad": (1, 1), "wgrad": (0, 0)}


def contract(a, b, axes):
    """Sums over one axis of each in float64: (rows, columns)."""
    a = a if axes[0] == 1 else a.T
    b = b if axes[1] == 0 else b.T
    return a.astype(np.float64) @ b.astype(np.float64)


def rotated(t, *, axis, spec, signs=None):
    """float32: pre-scale, signs, H along `axis`, each as far as `spec` asks for it."""
    t = oracle.to_float32(t) * np.float32(spec.pre_scale)
    if spec.signs == "random":
        padded = np.pad(t, [(0, -t.shape[axis] % len(signs) if i == axis else 0) for i in range(2)])
        t = padded * np.expand_dims(np.tile(signs, padded.shape[axis] // len(signs)), 1 - axis)
    return oracle.hadamard(t, axis=axis, size=spec.hadamard) if spec.hadamard else t


def operand(t, *, axis, spec, seed=None, signs=None):
    """The values that an operand's codes and scales stand for, float64, blocks along `axis`."""
    t = rotated(t, axis=axis, spec=spec, signs=signs)
    key = seed if spec.rounding == "stochastic" else None
    quantized = oracle.quantize(
        t, axis=axis, fmt=FORMATS[spec.format], rule=spec.scale_rule, key=key
    )
    return quantized.dequantize()


def largest(t, *, axis, k):
    """Indices along `axis` of the k largest, by float64 sums of squares; ties to the lower."""
    norms = np.square(np.asarray(t).astype(np.float64)).sum(axis=1 - axis)
    return np.argsort(-norms, kind="stable")[:k]


def drawn(size, k, seed):
    """The k indices whose 24-bit draws, element (0, i) of the seed's, are largest."""
    draws = oracle.random_words((1, size), seed)[0] >> np.uint64(8)
    return np.argsort(-draws.astype(np.int64), kind="stable")[:k]


def product(name, tensors, plan, *, k=0, seeds=None, signs=None, backend="reference"):
    """The product before it is rounded to `dtype`, float64.

    Args:
      name: "fwd", "dgrad" or "wgrad".
      tensors: x (tokens, in), w (in, out) and dy (tokens, out) in the layer's dtype.
      plan: an `adahop_jax.ProductPlan`, read for its fields.
      k: rows or columns that it extracts.
      seeds: two uint32 for every tensor that is rounded stochastically, and for "outliers" drawn.
      signs: +-1 of the randomized transform.
      backend: that computes it, which decides how exactly sums are accumulated.

    Returns:
      The product and a bound of what accumulation may add to it, same shape.
    """
    names, axes = OPERANDS[name], CONTRACT[name]
    lhs, rhs = (np.asarray(tensors[n]) for n in names)
    if plan.lhs is None:
        y, size = contract(lhs, rhs, axes), contract(np.abs(lhs), np.abs(rhs), axes)
        return y, _bound(size, lhs.shape[axes[0]], backend)
    seeds = seeds or {}
    specs = dict(zip(names, (plan.lhs, plan.rhs), strict=True))
    a, b = (
        operand(tensors[n], axis=axis, spec=specs[n], seed=seeds.get(n), signs=signs)
        for n, axis in zip(names, axes, strict=True)
    )
    undo = 1 / (max(plan.lhs.hadamard, 1) * plan.lhs.pre_scale * plan.rhs.pre_scale)
    length = max(a.shape[axes[0]], b.shape[axes[1]])
    a, b = _padded(a, axes[0], length), _padded(b, axes[1], length)
    y, size = contract(a, b, axes) * undo, contract(np.abs(a), np.abs(b), axes) * undo
    bound = _bound(size, length, backend)
    if backend.endswith(":fp8"):
        bound += _cut_off(a if axes[0] == 1 else a.T, b.T if axes[1] == 0 else b) * undo
    if plan.outliers is not None:
        side = names.index(plan.outliers.tensor)
        out_axis = 1 - axes[side]
        if plan.outliers.norm == "random":
            index = drawn((lhs, rhs)[side].shape[out_axis], k, seeds["outliers"])
        else:
            index = largest((lhs, rhs)[side], axis=out_axis, k=k)
        taken = np.take((lhs, rhs)[side], index, axis=out_axis)
        if name == "wgrad" and side == 1:
            # The documented formula: X as it is kept, and the columns of dY rotated as X was, in
            # `dtype`, or in float32 where that is float16, which may not hold 32 times a value.
            dtype = np.dtype(np.float32) if lhs.dtype == np.float16 else lhs.dtype
            turned = rotated(taken, axis=0, spec=plan.rhs, signs=signs).astype(dtype)
            kept = a.astype(np.float32).astype(dtype)
            pair = kept, _padded(turned, 0, length)
            factor = undo
        else:
            pair = (taken, rhs) if side == 0 else (lhs, taken)
            factor = 1
        places = (index, slice(None)) if side == 0 else (slice(None), index)
        y[places] = contract(*pair, axes) * factor
        size = contract(np.abs(pair[0]), np.abs(pair[1]), axes) * factor
        bound[places] = _bound(size, length, backend)
    return y, bound


def _bound(size, length, backend):
    """float32 rounds once per addition, and once more for the factor; `size` is of |a| |b|.

    A GPU's matrix units cut off in place of rounding, which is twice that.
    """
    return (length + 2) * (2.0**-24 if backend == "reference" else 2.0**-23) * size


def _cut_off(a, b):
    """What Hopper's FP8 units may lose of the sums a @ b^T, as long as they do not break them off.

    They add 32 products at a time to the sum so far; of each, what lies 2^-13 below the largest of
    them is cut off (docs/numerics.md). Here 2^-12, as the largest is known up to rounding only.
    """
    length = -(-a.shape[1] // 32) * 32
    a, b = _padded(a, 1, length), _padded(b, 1, length)
    products = (a[:, None, :] * b[None, :, :]).reshape(len(a), len(b), -1, 32)
    sums = np.cumsum(products.sum(axis=-1), axis=-1)
    before = np.concatenate([np.zeros_like(sums[..., :1]), sums[..., :-1]], axis=-1)
    largest = np.maximum(np.abs(products).max(axis=-1), np.abs(before))
    unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - 12)
    lost = np.fmod(np.abs(products), unit[..., None]).sum(axis=-1) + np.where(before != 0, unit, 0)
    return lost.sum(axis=-1)


def _padded(t, axis, length):
    return np.pad(t, [(0, length - t.shape[axis] if i == axis else 0) for i in range(2)])


def assert_close(got, want, bound, dtype):
    """`got`, rounded once to `dtype` (an ml_dtypes or NumPy float), against a float64 product."""
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[np.dtype(dtype).name]
    got = np.asarray(got)
    assert got.dtype == np.dtype(dtype)
    got = got.astype(np.float64)
    allowed = bound + unit * (np.abs(want) + bound) + 2.0**-40
    worst = np.argmax(np.abs(got - want) - allowed) if got.size else 0
    assert (np.abs(got - want) <= allowed).all(), (
        f"at {np.unravel_index(worst, got.shape)}: got {got.flat[worst]}, "
        f"want {want.flat[worst]} +- {allowed.flat[worst]}"
    )
