"""MXArray: what codes and scales stand for, and that it is a pytree like any other."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import adahop_jax as ah
from tests import oracle

FORMATS = [
    pytest.param(ah.MXFP4, oracle.E2M1, id="mxfp4"),
    pytest.param(ah.MXFP6, oracle.E2M3, id="mxfp6"),
]
each_format = pytest.mark.parametrize("fmt, spec", FORMATS)

quantize = jax.jit(ah.quantize, static_argnames=("axis", "format"))
dequantize = jax.jit(lambda q: q.dequantize())


def _array(codes, scales, fmt, spec, axis=-1):
    packed = oracle.pack(codes, oracle.element_bits(spec), axis)
    return ah.MXArray(
        codes=jnp.asarray(packed),
        scales=jnp.asarray(scales),
        format=fmt,
        axis=axis,
        length=codes.shape[axis],
    )


def _every_byte_and_code(spec):
    """(256, codes) with byte i in row i; whole blocks of every code."""
    count = max(32, 2 ** oracle.element_bits(spec))
    codes = np.tile(np.arange(count) % 2 ** oracle.element_bits(spec), (256, 1)).astype(np.uint8)
    return codes, np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, count // 32))


def _bits(x):
    return np.asarray(x).view(np.uint32)


@each_format
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_dequantize_every_byte_and_code(wrap, axis, fmt, spec):
    codes, scales = _every_byte_and_code(spec)
    if axis == -2:
        codes, scales = codes.T.copy(), scales.T.copy()
    got = np.asarray(wrap(lambda q: q.dequantize())(_array(codes, scales, fmt, spec, axis)))
    with np.errstate(over="ignore"):
        want = oracle.dequantize(codes, scales, spec, axis).astype(np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(_bits(got)[number], _bits(want)[number])


def test_A4_ends_of_the_scale_by_hand():
    codes = np.full((3, 32), 2, np.uint8)  # 1.0
    scales = np.uint8([[0], [254], [255]])
    values = np.asarray(dequantize(_array(codes, scales, ah.MXFP4, oracle.E2M1)))
    assert values[0, 0].view(np.uint32) == 0x00400000  # 2^-127, a subnormal
    assert values[1, 0] == 2.0**127 and np.isnan(values[2]).all()


@each_format
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
def test_dequantize_to_a_short_dtype(dtype, fmt, spec):
    codes, scales = _every_byte_and_code(spec)
    got = np.asarray(jax.jit(lambda q: q.dequantize(dtype))(_array(codes, scales, fmt, spec)))
    with np.errstate(over="ignore", invalid="ignore"):
        want = oracle.dequantize(codes, scales, spec).astype(dtype)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def test_A16_unpack_by_hand():
    codes = np.zeros(16, np.uint8)
    codes[:4] = [0x21, 0x43, 0x65, 0xF8]
    array = ah.MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.full((1,), 128, jnp.uint8),
        format=ah.MXFP4,
        axis=-1,
        length=8,
    )
    assert np.asarray(array.unpack())[:8].tolist() == [1, 2, 3, 4, 5, 6, 8, 15]
    values = np.asarray(dequantize(array))
    np.testing.assert_array_equal(values, [1, 2, 3, 4, 6, 8, -0.0, -12])
    assert np.signbit(values)[6]


@each_format
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_unpack_gives_padding_too(axis, fmt, spec):
    codes = np.random.default_rng(0).integers(0, 2 ** oracle.element_bits(spec), (32, 64, 96))
    codes = codes.astype(np.uint8)
    scales = np.full(np.moveaxis(codes, axis, -1)[..., ::32].shape, 127, np.uint8)
    array = _array(codes, np.moveaxis(scales, -1, axis), fmt, spec, axis)
    np.testing.assert_array_equal(array.unpack(), codes)


@each_format
@pytest.mark.parametrize("axis", [-1, -2])
def test_mxarray_is_a_pytree_of_two_uint8_arrays(axis, fmt, spec):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 33, 40)).astype(np.float32))
    array = quantize(x, axis=axis, format=fmt)
    leaves, structure = jax.tree.flatten(array)
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8, jnp.uint8]
    again = jax.tree.unflatten(structure, leaves)
    assert (again.format, again.axis, again.length) == (fmt, axis, x.shape[axis])
    want = np.asarray(dequantize(array))
    assert again.shape == x.shape == want.shape
    through_jit = jax.jit(lambda q: q)(array)
    np.testing.assert_array_equal(dequantize(through_jit), want)
    by_row = jax.vmap(lambda q: q.dequantize())(array)
    np.testing.assert_array_equal(by_row, want)
    scanned = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), None, array)[1]
    np.testing.assert_array_equal(scanned, want)


def test_mxarrays_of_other_axes_or_formats_have_other_structures():
    x = jnp.ones((32, 32), jnp.float32)
    structures = {
        jax.tree.structure(quantize(x, axis=axis, format=fmt))
        for axis in (0, 1)
        for fmt in (ah.MXFP4, ah.MXFP6)
    }
    assert len(structures) == 4  # a square array and its transpose cannot be mixed up


def test_mxarray_takes_the_bytes_it_says():
    x = jnp.ones((8, 64), jnp.float32)
    sizes = {fmt.name: quantize(x, format=fmt) for fmt in (ah.MXFP4, ah.MXFP6)}
    assert sizes["mxfp4"].codes.shape == (8, 32) and sizes["mxfp6"].codes.shape == (8, 48)
    assert sizes["mxfp4"].scales.shape == sizes["mxfp6"].scales.shape == (8, 2)
