"""The truth that the library's numerics are held against.

NumPy, float64 and integers, written from the specification alone and never from the library, so
that the two can disagree. Slow and obvious on purpose; `test_oracle.py` holds it against ml_dtypes,
gfloat, exact fractions and values worked out by hand.

Everything is exact where nothing else is said: a float32 value times a power of two within the
range of E8M0, and an element times such a power, are both exact in float64.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

BLOCK = 32
SCALE_RULES = ("even", "floor", "ceil")
MIN_NORMAL = np.float32(2.0**-126)


class Format(NamedTuple):
    """An element format whose codes are all finite: sign, exponent and mantissa bits."""

    exponent_bits: int
    mantissa_bits: int
    exponent_bias: int


E2M1 = Format(2, 1, 1)
E2M3 = Format(2, 3, 1)
E3M2 = Format(3, 2, 3)


def element_bits(fmt) -> int:
    return 1 + fmt.exponent_bits + fmt.mantissa_bits


def max_exponent(fmt) -> int:
    return 2**fmt.exponent_bits - 1 - fmt.exponent_bias


def grid(fmt) -> np.ndarray:
    """The non-negative values in the order of their codes, float64 (2^(bits-1),)."""
    values = []
    for code in range(2 ** (fmt.exponent_bits + fmt.mantissa_bits)):
        exponent, mantissa = divmod(code, 2**fmt.mantissa_bits)
        fraction = mantissa / 2**fmt.mantissa_bits
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - fmt.exponent_bias))
        else:
            values.append((1 + fraction) * 2.0 ** (exponent - fmt.exponent_bias))
    return np.array(values)


def to_float32(x) -> np.ndarray:
    """`x` in float32; what lies below 2^-126 is zero and keeps its sign."""
    with np.errstate(invalid="ignore"):  # of signalling NaNs, which turn quiet here
        x = np.asarray(x).astype(np.float32)
        x = np.where(np.isnan(x), np.float32(np.nan), x)
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(np.float32(0), x), x)


def scale_bytes(amax, fmt=E2M1, rule: str = "even") -> np.ndarray:
    """The E8M0 byte of blocks whose largest magnitude is `amax` (flushed): uint8, same shape."""
    amax = np.asarray(amax, np.float32)
    finite = np.isfinite(amax)
    significand, exponent = np.frexp(np.where(finite, amax, 0).astype(np.float64))
    significand, exponent = (
        2 * significand,
        exponent - 1,
    )  # amax = significand * 2^exponent, in [1, 2)
    if rule == "even":
        up = significand >= 2 - 2.0 ** -(fmt.mantissa_bits + 1)
    elif rule == "floor":
        up = np.zeros_like(finite)
    elif rule == "ceil":
        up = significand > grid(fmt)[-1] / 2.0 ** max_exponent(fmt)
    else:
        raise ValueError(rule)
    byte = exponent + up - max_exponent(fmt) + 127
    top = 254 - max_exponent(fmt)  # one higher, and the largest element would be 2^128 or more
    byte = np.where(amax == 0, 0, np.clip(byte, 0, top))
    return np.where(finite, byte, 255).astype(np.uint8)


def scale_values(byte) -> np.ndarray:
    """2^(byte - 127), NaN for 255: float64."""
    byte = np.asarray(byte)
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int64) - 127))


def round_nearest(a, fmt=E2M1) -> np.ndarray:
    """Index into `grid` of the value nearest to a >= 0, ties to the even code, saturating."""
    values = grid(fmt)
    midpoints = (values[1:] + values[:-1]) / 2
    below = np.searchsorted(midpoints, a, side="left")  # midpoints strictly under a
    tie = np.isin(a, midpoints)
    return below + (tie & (below % 2 == 1))


def round_stochastic(a, words, fmt=E2M1) -> np.ndarray:
    """Index into `grid` of a neighbour of a >= 0, chosen by 24 bits of the word; saturating."""
    values = grid(fmt)
    min_exponent = 1 - fmt.exponent_bias
    exponent = np.maximum(np.frexp(a)[1] - 1, min_exponent)
    step = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    u = (words >> np.uint64(8)).astype(np.float64) * 2.0**-24
    count = np.floor(a / step) + (u < a / step - np.floor(a / step))
    return np.searchsorted(values, np.minimum(count * step, values[-1]))


def philox(counter, key) -> np.ndarray:
    """Philox-4x32-10 (Salmon et al., SC11).

    Args:
      counter: (..., 4) integers below 2^32.
      key: two integers below 2^32.

    Returns:
      uint64 (..., 4), each below 2^32.
    """
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(counter, np.uint64)[..., i] for i in range(4))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        hi0, lo0, hi1, lo1 = p0 >> np.uint64(32), p0 & low, p1 >> np.uint64(32), p1 & low
        c0, c1, c2, c3 = hi1 ^ c1 ^ np.uint64(k0), lo1, hi0 ^ c3 ^ np.uint64(k1), lo0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1)


def random_words(shape, key) -> np.ndarray:
    """One word per element: (row, col) has word col % 4 of counter (col // 4, row, 0, 0)."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    counter = np.zeros((rows, -(-cols // 4), 4), np.uint64)
    counter[:, :, 0] = np.arange(counter.shape[1])[None, :]
    counter[:, :, 1] = np.arange(rows)[:, None]
    return philox(counter, key).reshape(rows, 4 * counter.shape[1])[:, :cols].reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Blocks along `axis`: `codes` one to a byte, padded to whole blocks; `scales` one a block."""

    codes: np.ndarray
    scales: np.ndarray
    fmt: Format
    axis: int
    length: int

    @property
    def packed(self) -> np.ndarray:
        return pack(self.codes, element_bits(self.fmt), self.axis)

    def dequantize(self) -> np.ndarray:
        """float64, exact, cut to `length`."""
        return dequantize(self.codes, self.scales, self.fmt, self.axis, self.length)


def to_blocks(x, axis: int) -> np.ndarray:
    """`axis` moved last, padded with zeros and split: (..., blocks, 32)."""
    x = np.moveaxis(x, axis, -1)
    pad = -x.shape[-1] % BLOCK
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def from_blocks(blocks, axis: int) -> np.ndarray:
    """Undoes `to_blocks`, but for the padding."""
    length = blocks.shape[-2] * blocks.shape[-1]
    return np.moveaxis(blocks.reshape(*blocks.shape[:-2], length), -1, axis)


def view_words(shape, axis: int, key) -> np.ndarray:
    """`random_words` of the 2-D view that is quantised, laid out as the array itself.

    Its rows are the leading dims where the blocks run along the last, else the block axis.
    """
    if axis % len(shape) == len(shape) - 1:
        return random_words(shape, key)
    others = tuple(np.delete(shape, axis))
    words = random_words((shape[axis], math.prod(others)), key)
    return np.moveaxis(words.reshape(shape[axis], *others), 0, axis)


def quantize(x, *, axis: int = -1, fmt=E2M1, rule: str = "even", key=None) -> Quantized:
    """Nearest-even under `rule`; with `key` (two uint32) stochastic, whose rule is `ceil`."""
    x = to_float32(x)
    blocks = to_blocks(x, axis)
    magnitude = np.abs(blocks)
    scales = scale_bytes(magnitude.max(axis=-1), fmt, rule if key is None else "ceil")
    a = np.ldexp(magnitude.astype(np.float64), 127 - scales.astype(np.int64)[..., None])
    a = np.where(scales[..., None] == 255, 0, a)
    if key is None:
        index = round_nearest(a, fmt)
    else:
        index = round_stochastic(a, to_blocks(view_words(x.shape, axis, key), axis), fmt)
    sign = np.signbit(blocks) & (scales[..., None] != 255)
    codes = (index + sign * 2 ** (element_bits(fmt) - 1)).astype(np.uint8)
    return Quantized(
        codes=from_blocks(codes, axis),
        scales=np.moveaxis(scales, -1, axis),
        fmt=fmt,
        axis=axis,
        length=x.shape[axis],
    )


def dequantize(codes, scales, fmt=E2M1, axis: int = -1, length: int | None = None) -> np.ndarray:
    """Exact values in float64 of codes held one to a byte: NaN where the scale byte is 255."""
    magnitudes = grid(fmt)
    values = np.concatenate([magnitudes, -magnitudes])[to_blocks(codes, axis)]
    scales = np.moveaxis(np.asarray(scales), axis, -1)[..., None]
    values = from_blocks(values * scale_values(scales), axis)
    return values if length is None else np.take(values, range(length), axis=axis)


def assert_equal(got, want: Quantized) -> None:
    """Holds every bit of an `adahop_jax.MXArray` against `want`."""
    np.testing.assert_array_equal(np.asarray(got.scales), want.scales, err_msg="scales")
    np.testing.assert_array_equal(np.asarray(got.codes), want.packed, err_msg="packed codes")


def pack(codes, bits: int, axis: int = -1) -> np.ndarray:
    """A little-endian bit stream along `axis`: bit i of code n is bit n * bits + i."""
    stream = np.unpackbits(np.moveaxis(codes, axis, -1)[..., None], axis=-1, bitorder="little")
    stream = stream[..., :bits].reshape(*stream.shape[:-2], stream.shape[-2] * bits)
    return np.moveaxis(np.packbits(stream, axis=-1, bitorder="little"), -1, axis)


def unpack(packed, bits: int, axis: int = -1) -> np.ndarray:
    """Undoes `pack`: one code to a byte."""
    stream = np.unpackbits(np.moveaxis(packed, axis, -1), axis=-1, bitorder="little")
    stream = stream.reshape(*stream.shape[:-1], stream.shape[-1] // bits, bits)
    return np.moveaxis(np.packbits(stream, axis=-1, bitorder="little")[..., 0], -1, axis)


def hadamard(x, *, axis: int = -1, size: int = BLOCK) -> np.ndarray:
    """Block-diagonal Sylvester H (entries +-1) along `axis`, zero-padded to whole blocks.

    float32, one rounding per addition: a butterfly of strides 1, 2, 4, ..., size / 2, which turns
    elements i and i + stride into their sum and their difference. -0 counts as 0.
    """
    x = np.moveaxis(to_float32(x) + np.float32(0), axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    stride = 1
    while stride < size:
        out = np.empty_like(x)
        for i in range(x.shape[-1]):
            if i // stride % 2 == 0:
                out[..., i] = x[..., i] + x[..., i + stride]
                out[..., i + stride] = x[..., i] - x[..., i + stride]
        x, stride = out, 2 * stride
    return np.moveaxis(x, -1, axis)


def quantized_product(a, b, *, fmt=E2M1, rule: str = "even", rotate: bool = False) -> np.ndarray:
    """a (M, K) times b (K, N), both quantised along K (after H_32 if `rotate`), in float64."""
    if rotate:
        a, b = hadamard(a, axis=1), hadamard(b, axis=0)
    a = quantize(a, axis=1, fmt=fmt, rule=rule).dequantize()
    b = quantize(b, axis=0, fmt=fmt, rule=rule).dequantize()
    return a @ b / (BLOCK if rotate else 1)


def spreads(x) -> tuple[float, float]:
    """How unequal the variances of the rows are, and of the columns: 1 is what chance gives.

    On `x` brought to a largest magnitude in [1, 2) by a power of two, so that the guard 1e-8 means
    the same at every scale. NaN where a variance is undefined.
    """
    x = np.asarray(x).astype(np.float64)
    x = x.reshape(-1, x.shape[-1])
    rows, cols = x.shape
    if min(rows, cols) < 2 or not np.isfinite(x).all():
        return math.nan, math.nan
    amax = np.abs(x).max()
    x = np.ldexp(x, 1 - np.frexp(amax)[1]) if amax > 0 else x
    row_var, col_var = x.var(axis=1, ddof=1), x.var(axis=0, ddof=1)
    cv_row = row_var.std(ddof=1) / (row_var.mean() + 1e-8) / math.sqrt(2 / (cols - 1))
    cv_col = col_var.std(ddof=1) / (col_var.mean() + 1e-8) / math.sqrt(2 / (rows - 1))
    return float(cv_row), float(cv_col)


def kurtosis(values) -> float:
    """Mean of z^4, z standardised by the unbiased standard deviation."""
    return float(np.mean(((values - values.mean()) / values.std(ddof=1)) ** 4))


def classify(x, *, threshold_ratio: float = 2.0, kurtosis_threshold: float = 0.0) -> str:
    """The detector of AdaHOP (arXiv:2604.02525) in float64: "row", "column" or "none"."""
    cv_row, cv_col = spreads(x)
    x = np.asarray(x).astype(np.float64).reshape(-1, np.shape(x)[-1])
    if cv_row / (cv_col + 1e-8) > threshold_ratio:
        pattern, axis = "row", 1
    elif cv_col / (cv_row + 1e-8) > threshold_ratio:
        pattern, axis = "column", 0
    else:
        return "none"
    return pattern if kurtosis(x.var(axis=axis, ddof=1)) >= kurtosis_threshold else "none"
