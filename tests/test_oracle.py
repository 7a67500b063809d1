"""The oracle against ml_dtypes, gfloat, exact fractions and values worked out by hand."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from gfloat import RoundMode, compute_scale_amax, decode_ndarray, encode_ndarray, round_ndarray
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e2m3, format_info_ocp_e3m2
from scipy.linalg import hadamard as scipy_hadamard

from tests import oracle

FORMATS = [
    pytest.param(oracle.E2M1, ml_dtypes.float4_e2m1fn, format_info_ocp_e2m1, id="e2m1"),
    pytest.param(oracle.E2M3, ml_dtypes.float6_e2m3fn, format_info_ocp_e2m3, id="e2m3"),
    pytest.param(oracle.E3M2, ml_dtypes.float6_e3m2fn, format_info_ocp_e3m2, id="e3m2"),
]
BF16_PATTERNS = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("fmt, dtype, info", FORMATS)
def test_grid_is_the_one_of_ml_dtypes(fmt, dtype, info):
    values = oracle.grid(fmt)
    codes = np.arange(len(values), dtype=np.uint8)
    np.testing.assert_array_equal(codes.view(dtype).astype(np.float64), values)
    assert values[-1] == float(ml_dtypes.finfo(dtype).max) == info.max
    assert oracle.max_exponent(fmt) == info.emax


def test_e2m1_grid_by_hand():
    np.testing.assert_array_equal(oracle.grid(oracle.E2M1), [0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("fmt, dtype, info", FORMATS)
def test_round_nearest_is_the_cast_of_ml_dtypes(fmt, dtype, info):
    values = oracle.grid(fmt)
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    a = np.concatenate(
        [
            np.abs(BF16_PATTERNS[np.isfinite(BF16_PATTERNS)]),
            *(np.nextafter(ties, np.float32(toward)) for toward in (0, np.inf)),
            ties,
            np.random.default_rng(0).uniform(0, 2 * values[-1], 10**5).astype(np.float32),
        ]
    )
    np.testing.assert_array_equal(oracle.round_nearest(a, fmt), a.astype(dtype).view(np.uint8))


def test_round_nearest_ties_by_hand():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    np.testing.assert_array_equal(
        oracle.grid(oracle.E2M1)[oracle.round_nearest(ties)], [0, 1, 1, 2, 2, 4, 4]
    )


@pytest.mark.parametrize("fmt, dtype, info", FORMATS)
def test_floor_rule_is_gfloat_for_every_bf16_pattern(fmt, dtype, info):
    patterns = BF16_PATTERNS[np.isfinite(BF16_PATTERNS)]
    x = np.zeros((len(patterns), 32), np.float32)
    x[:, 5] = patterns
    x[:, 6] = oracle.to_float32(patterns * np.float32(0.3))
    x[:, 7] = 1.0
    x = oracle.to_float32(x)
    scale = np.array([compute_scale_amax(info.emax, row) for row in x.astype(np.float64)])
    scaled = x / scale[:, None]
    codes = encode_ndarray(info, round_ndarray(info, scaled, RoundMode.TiesToEven, sat=True))
    want = decode_ndarray(info, codes) * scale[:, None]
    got = oracle.quantize(x, fmt=fmt, rule="floor")
    np.testing.assert_array_equal(got.codes, codes)
    np.testing.assert_array_equal(oracle.scale_values(got.scales)[:, 0], scale)
    np.testing.assert_array_equal(got.dequantize(), want)


# Each rule restated on exact fractions, by search over all exponents.
def _exponent_floor(amax: Fraction, fmt) -> int:
    return max(e for e in range(-140, 140) if Fraction(2) ** e <= amax) - oracle.max_exponent(fmt)


def _exponent_even(amax: Fraction, fmt) -> int:
    binade = max(e for e in range(-140, 140) if Fraction(2) ** e <= amax)
    half_unit = Fraction(2) ** (binade - fmt.mantissa_bits - 1)
    return _exponent_floor(amax + half_unit, fmt)


def _exponent_ceil(amax: Fraction, fmt) -> int:
    top = Fraction(float(oracle.grid(fmt)[-1]))
    return min(e for e in range(-140, 140) if top * Fraction(2) ** e >= amax)


EXPONENTS = {"floor": _exponent_floor, "even": _exponent_even, "ceil": _exponent_ceil}


@pytest.mark.parametrize("rule", oracle.SCALE_RULES)
@pytest.mark.parametrize("fmt, dtype, info", FORMATS)
def test_scale_rules_on_exact_fractions(fmt, dtype, info, rule):
    edges = [1.0, 1.5, 1.75, 1.875, 1.9375, 1.96875]
    near = [np.float32(e) for e in edges]
    near += [np.nextafter(e, np.float32(to)) for e in near for to in (0, 4)]
    amax = np.array(
        [v * np.float32(2.0) ** e for v in near for e in (-126, -100, -1, 0, 40, 126, 127)]
    )
    amax = np.concatenate([amax[np.isfinite(amax)], [np.finfo(np.float32).max]]).astype(np.float32)
    amax = amax[amax >= oracle.MIN_NORMAL]
    limit = Fraction(2) ** 128
    for value, byte in zip(amax, oracle.scale_bytes(amax, fmt, rule), strict=True):
        want = EXPONENTS[rule](Fraction(float(value)), fmt)
        want -= Fraction(float(oracle.grid(fmt)[-1])) * Fraction(2) ** want >= limit
        assert byte == max(want + 127, 0), f"{value.hex()} under {rule}"


@pytest.mark.parametrize(
    "rule, want", [("floor", [6, 6, 6, 6]), ("even", [6, 6, 8, 8]), ("ceil", [6, 6, 8, 8])]
)
def test_largest_element_by_hand(rule, want):
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = [6.0, 6.5, 7.0, 7.5]
    np.testing.assert_array_equal(oracle.quantize(x, rule=rule).dequantize()[:, 0], want)


def test_even_differs_from_floor_in_a_fifth_of_random_blocks():
    x = np.random.default_rng(0).normal(size=(4096, 32)) * np.exp(
        np.random.default_rng(1).normal(size=(4096, 1))
    )
    even, floor = (oracle.quantize(x, rule=rule).scales for rule in ("even", "floor"))
    assert np.mean(even != floor) == pytest.approx(0.189, abs=0.02)


@pytest.mark.parametrize("rule", oracle.SCALE_RULES)
def test_special_blocks_by_hand(rule):
    x = np.zeros((6, 32), np.float32)
    x[1] = -0.0
    x[2, 3] = np.nan
    x[3, 31] = -np.inf
    x[4] = -1e-40
    x[5] = np.finfo(np.float32).max
    got = oracle.quantize(x, rule=rule)
    np.testing.assert_array_equal(got.scales[:, 0], [0, 0, 255, 255, 0, 252])
    np.testing.assert_array_equal(got.codes[:5], np.repeat([[0], [8], [0], [0], [8]], 32, axis=1))
    assert (got.dequantize()[5] == 6 * 2.0**125).all()
    assert np.isnan(got.dequantize()[2:4]).all()


@pytest.mark.parametrize(
    "counter, key, want",
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, want):
    assert " ".join(f"{word:08x}" for word in oracle.philox(counter, key)) == want


def test_random_words_are_indexed_by_row_and_column():
    words = oracle.random_words((2, 3, 7), (5, 9))
    assert words[1, 2, 6] == oracle.philox((1, 5, 0, 0), (5, 9))[2]


@pytest.mark.parametrize("fmt, dtype, info", FORMATS)
def test_round_stochastic_goes_up_iff_the_draw_is_under_the_fraction(fmt, dtype, info):
    values = oracle.grid(fmt)
    for low, high in zip(values[:-1], values[1:], strict=True):
        for sixteenths in range(16):
            a = low + (high - low) * sixteenths / 16
            draws = np.arange(0, 2**24, 2**14, dtype=np.uint64)  # evenly spaced: the mean is exact
            codes = oracle.round_stochastic(np.full(len(draws), a), draws << np.uint64(8), fmt)
            assert set(values[codes]) <= {low, high}
            assert values[codes].mean() == a


def test_round_stochastic_saturates():
    words = np.array([0, 2**32 - 1], np.uint64)
    np.testing.assert_array_equal(oracle.round_stochastic(np.array([7.5, 7.5]), words), [7, 7])


def test_pack_by_hand():
    np.testing.assert_array_equal(oracle.pack(np.uint8([1, 2, 15, 8]), 4), [0x21, 0x8F])
    np.testing.assert_array_equal(oracle.pack(np.uint8([1, 2, 3, 4]), 6), [0x81, 0x30, 0x10])
    # 63 = 0b111111 in each place of four: which bytes it fills
    places = [oracle.pack(np.uint8(np.eye(4) * 63)[i], 6).tolist() for i in range(4)]
    assert places == [[0x3F, 0, 0], [0xC0, 0x0F, 0], [0, 0xF0, 0x03], [0, 0, 0xFC]]


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_unpack_undoes_pack(bits, axis):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (32, 64, 32), np.uint8)
    np.testing.assert_array_equal(oracle.unpack(oracle.pack(codes, bits, axis), bits, axis), codes)


def test_dequantize_by_hand():
    codes = np.zeros((4, 32), np.uint8)
    codes[:, 0], codes[:, 1] = 2, 9  # 1.0 and -0.5
    values = oracle.dequantize(codes, np.uint8([[0], [127], [254], [255]]))
    np.testing.assert_array_equal(
        values[:3, :3],
        [[2.0**-127, -(2.0**-128), 0], [1, -0.5, 0], [2.0**127, -(2.0**126), 0]],
    )
    assert np.isnan(values[3]).all()


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_axis_is_a_transposition(axis):
    x = np.random.default_rng(3).normal(size=(33, 40, 65)).astype(np.float32)
    moved = oracle.quantize(np.moveaxis(x, axis, -1))
    got = oracle.quantize(x, axis=axis)
    np.testing.assert_array_equal(np.moveaxis(got.codes, axis, -1), moved.codes)
    np.testing.assert_array_equal(np.moveaxis(got.packed, axis, -1), moved.packed)
    np.testing.assert_array_equal(np.moveaxis(got.dequantize(), axis, -1), moved.dequantize())


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_hadamard_is_sylvester(size):
    np.testing.assert_array_equal(
        oracle.hadamard(np.eye(size, dtype=np.float32), size=size), scipy_hadamard(size)
    )


def test_hadamard_sums_neighbours_first():
    x = np.zeros(32, np.float32)
    x[:4] = [1, 0, 2.0**-24, 2.0**-24]
    # the two small ones meet first; with stride 2 first, each would be lost in a 1
    assert oracle.hadamard(x)[0] == 1 + 2.0**-23


def test_classify_by_hand():
    noise = np.random.default_rng(0).normal(size=(64, 96))
    rows, cols = noise.copy(), noise.copy()
    rows[3] *= 30
    cols[:, 5] *= 30
    assert [oracle.classify(x) for x in (noise, rows, cols)] == ["none", "row", "column"]
    assert oracle.classify(rows, kurtosis_threshold=1e9) == "none"
    assert oracle.classify(rows, threshold_ratio=1e9) == "none"
    assert math.isnan(oracle.spreads(noise[:1])[0])
    cv_row, cv_col = oracle.spreads(np.random.default_rng(1).normal(size=(2000, 2000)))
    assert cv_row == pytest.approx(1, abs=0.05) and cv_col == pytest.approx(1, abs=0.05)
