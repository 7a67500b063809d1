"""Format descriptors against ml_dtypes, and that nothing else decides what an element is."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import adahop_jax as ah
from adahop_jax import _formats
from tests import oracle

E3M2 = ah.MXFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, exponent_bias=3)
FORMATS = [
    pytest.param(ah.MXFP4, ml_dtypes.float4_e2m1fn, oracle.E2M1, id="mxfp4"),
    pytest.param(ah.MXFP6, ml_dtypes.float6_e2m3fn, oracle.E2M3, id="mxfp6"),
    pytest.param(E3M2, ml_dtypes.float6_e3m2fn, oracle.E3M2, id="e3m2"),
]


@pytest.mark.parametrize("fmt, dtype, spec", FORMATS)
def test_format_says_what_ml_dtypes_says(fmt, dtype, spec):
    info = ml_dtypes.finfo(dtype)
    assert fmt.element_bits == info.bits == oracle.element_bits(spec)
    assert fmt.max_value == float(info.max) == oracle.grid(spec)[-1]
    assert fmt.max_exponent == oracle.max_exponent(spec) == int(np.log2(float(info.max)))
    assert fmt.block_size == 32
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.exponent_bias) == spec


def test_formats_by_hand():
    assert (ah.MXFP4.max_value, ah.MXFP4.max_exponent, ah.MXFP4.element_bits) == (6.0, 2, 4)
    assert (ah.MXFP6.max_value, ah.MXFP6.max_exponent, ah.MXFP6.element_bits) == (7.5, 2, 6)


def test_formats_are_found_by_name():
    assert _formats.FORMATS == {"mxfp4": ah.MXFP4, "mxfp6": ah.MXFP6}


def test_formats_are_values():
    same = ah.MXFormat(name="mxfp4", exponent_bits=2, mantissa_bits=1, exponent_bias=1)
    assert same == ah.MXFP4 and hash(same) == hash(ah.MXFP4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        same.mantissa_bits = 3  # type: ignore[misc]


@pytest.mark.parametrize("rule", oracle.SCALE_RULES)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_third_format_needs_no_more_than_its_descriptor(axis, rule, monkeypatch):
    monkeypatch.setitem(_formats.FORMATS, "e3m2", E3M2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(95, 129)) * np.exp2(rng.integers(-120, 120, (95, 1)))
    x = x.astype(np.float32)
    x[3, 5], x[50] = np.nan, np.finfo(np.float32).max
    got = jax.jit(lambda x: ah.quantize(x, axis=axis, format=E3M2, scale_rule=rule))(x)
    want = oracle.quantize(x, axis=axis, fmt=oracle.E3M2, rule=rule)
    oracle.assert_equal(got, want)
    values, codes = jax.jit(lambda q: (q.dequantize(), q.unpack()))(got)
    np.testing.assert_array_equal(values, want.dequantize())
    np.testing.assert_array_equal(codes, want.codes)


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="e3m2"):
        ah.quantize(jnp.ones((2, 32), jnp.float32), format=E3M2)
