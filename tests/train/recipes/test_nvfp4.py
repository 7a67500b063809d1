"""NVFP4 against its definition in float64 and ml_dtypes, with the same random bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.train.recipes.products import (
    E2M1,
    assert_near,
    float64,
    nearest,
    noise,
    padded,
    results,
    rotation,
    seeds,
    shapes,
    signs,
    stochastic,
    tensors,
)
from train.recipes import nvfp4

SEEDS = seeds(nvfp4.SEEDS)


def nvfp4_by_hand(t, block, u=None):
    """The definition, block by block; scales and what they divide in float32, ties and all."""
    t = padded(t, *block)
    top = 6.0 if u is None else 6.0 * 16 / 17
    tensor_scale = np.float32(np.abs(t).max()) * np.float32(1 / (448 * top))
    out = np.empty_like(t)
    for i in range(0, t.shape[0], block[0]):
        for j in range(0, t.shape[1], block[1]):
            where = slice(i, i + block[0]), slice(j, j + block[1])
            largest = np.float32(np.abs(t[where]).max())
            wanted = min(largest / (np.float32(top) * tensor_scale), np.float32(448))
            scale = np.float64(wanted.astype(ml_dtypes.float8_e4m3fn)) or 1.0
            scaled = t[where].astype(np.float32) / (np.float32(scale) * tensor_scale)
            scaled = scaled.astype(np.float64)
            elements = nearest(scaled) if u is None else stochastic(scaled, u[where])
            out[where] = elements * scale * np.float64(tensor_scale)
    return out


def by_hand(x, w, dy, drawn):
    x, w, dy = float64(x, w, dy)
    width, out = w.shape
    w_hat = nvfp4_by_hand(w, (16, 16))
    y = nvfp4_by_hand(x, (1, 16)) @ w_hat[:, :out]
    sr_dy = nvfp4_by_hand(dy, (1, 16), noise(padded(dy, 1, 16).shape, drawn[0]))
    dx = sr_dy @ w_hat.T
    flip = signs(16, drawn[2])

    def turned(t):
        t = padded(t, 32, 1)
        return rotation(len(t), 16).T @ (t * np.tile(flip, len(t) // 16)[:, None])

    turned_dy = turned(dy)
    sr_turned = nvfp4_by_hand(turned_dy, (16, 1), noise(turned_dy.shape, drawn[1]))
    dw = nvfp4_by_hand(turned(x), (16, 1)).T @ sr_turned
    return y, dx[:, :width], dw


@pytest.mark.parametrize("shape", shapes.values(), ids=shapes)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_products_against_the_definition(shape, dtype):
    x, w, dy = tensors(shape, dtype)
    got = results(nvfp4.product, x, w, dy, SEEDS)
    for ours, want in zip(got, by_hand(x, w, dy, SEEDS), strict=True):
        assert_near(ours, want, dtype)


def test_scales_are_e4m3_under_one_scale_for_the_tensor():
    """By hand: the largest value is 448 * 6 tensor scales, its block's scale 448, both exact."""
    t = np.zeros((2, 32), np.float32)
    t[0, 0], t[0, 20], t[1, 5] = 448 * 6, 100.0, 6 * 0.3
    values, scale = nvfp4.quantize(jnp.asarray(t), nvfp4.ALONG_COLUMNS)
    assert float(scale) == 1.0
    values = np.asarray(values, np.float64)
    assert values[0, 0] == 448 * 6
    # 100 / 6 = 16.67 is 16 in E4M3 (steps of 2), where 100 is 6.25 scales: clipped to 6.
    assert values[0, 20] == 96
    # 0.3 lies between 0.28125 and 0.3125, and is nearer to the latter.
    assert values[1, 5] == 6 * 0.3125


def test_weights_share_one_scale_over_16_by_16():
    """Its transpose is quantized to the same values, which forward and dgrad need."""
    _, w, _ = tensors(shapes["even"])
    values, scale = nvfp4.quantize(w, nvfp4.SQUARE)
    other, same = nvfp4.quantize(w.T, nvfp4.SQUARE)
    np.testing.assert_array_equal(np.asarray(values.T), np.asarray(other))
    assert scale == same
    tile = np.asarray(values, np.float64)[:16, :16]
    scales = np.abs(tile).max() / E2M1[1:]
    assert any(np.isin(np.abs(tile) / unit, E2M1).all() for unit in scales)


def test_stochastic_rounding_never_clips_and_is_unbiased():
    """The block scale that E4M3 rounds down most: 17/16 times a power of two, a tie."""
    row = np.linspace(0, 1, 16, dtype=np.float32)
    rows = np.stack([row * 448 * 6, row * 17 * 6 * 16 / 17, row * 0.53])
    t = jnp.asarray(rows)
    draws = 4096
    drawn = jax.random.bits(jax.random.key(1), (draws, 2), jnp.uint32)

    @jax.jit
    @jax.vmap
    def many(seed):
        values, scale = nvfp4.quantize(t, nvfp4.ALONG_COLUMNS, seed=seed)
        return values.astype(jnp.float32) * scale

    got = np.asarray(many(drawn), np.float64)
    deviation = got.std(axis=0, ddof=1) / np.sqrt(draws)
    error = np.abs(got.mean(axis=0) - rows)
    assert (error <= 5 * deviation + 1e-6 * rows.max(axis=1, keepdims=True)).all()


def test_zero_tensors_stay_zero():
    x, w, dy = (jnp.zeros_like(t) for t in tensors(shapes["odd"]))
    for result in results(nvfp4.product, x, w, dy, SEEDS):
        assert (np.asarray(result) == 0).all()
