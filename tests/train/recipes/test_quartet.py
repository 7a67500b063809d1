"""Quartet against its algorithm in float64, with the same random bits, and its clip mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.recipes.products import (
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
    tensors,
    unbiased_mxfp4,
)
from train.recipes import quartet

SEEDS = seeds(quartet.SEEDS)


def quest_by_hand(t):
    """Along the last axis."""
    blocks = t.reshape(*t.shape[:-1], -1, 32)
    scale = 2.0 ** np.floor(np.log2(2.92247856 / 6 * blocks.std(axis=-1, keepdims=True) + 1e-8))
    mask = np.abs(blocks / scale) < 6
    return (nearest(blocks / scale) * scale).reshape(t.shape), mask.reshape(t.shape)


def quartet_by_hand(x, w, dy, drawn):
    """As the algorithm has it, W as (out, in), every block along the last axis."""
    x, w, dy = float64(x, w, dy)
    width = x.shape[1]
    x, w = padded(x, 1, 32), padded(w.T, 1, 32)
    h_in = rotation(x.shape[1], 32)
    x_hat, x_mask = quest_by_hand(x @ h_in)
    w_hat, w_mask = quest_by_hand(w @ h_in)
    y = x_hat @ w_hat.T

    flip = signs(32, drawn[4])

    def sr(t, seed, transposed):
        t = padded(t, 1, 32)
        # An element's noise goes by its place in the tensor as it is stored.
        u = noise(t.shape[::-1], seed).T if transposed else noise(t.shape, seed)
        turned = (t * np.tile(flip, t.shape[1] // 32)) @ rotation(t.shape[1], 32)
        return unbiased_mxfp4(turned, u)

    # dY (tokens, out) and W^ (in, out) along out; dY^T (out, tokens) and X^^T (in, tokens) along
    # tokens, stored the other way round.
    turned_dx = sr(dy, drawn[0], False) @ sr(w_hat.T, drawn[1], False).T
    turned_dw = sr(dy.T, drawn[3], True) @ sr(x_hat.T, drawn[2], True).T
    dx = (turned_dx * x_mask) @ h_in.T
    dw = (turned_dw * w_mask) @ h_in.T
    return y, dx[:, :width], dw.T[:width]


@pytest.mark.parametrize("shape", shapes.values(), ids=shapes)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_products_against_the_definition(shape, dtype):
    x, w, dy = tensors(shape, dtype)
    got = results(quartet.product, x, w, dy, SEEDS)
    for ours, want in zip(got, quartet_by_hand(x, w, dy, SEEDS), strict=True):
        assert_near(ours, want, dtype)


def test_quest_clips_beyond_six_scales_and_masks_it():
    """By hand: 31 values of 1 and -1 and one of 8; std is 1.72, the scale 1/2, 8 / (1/2) > 6."""
    block = np.where(np.arange(32) % 2, 1.0, -1.0).astype(np.float32)
    block[5] = 8
    std = block.std()
    assert 0.5 <= 2.92247856 / 6 * std < 1
    values, mask = quartet.quest(jnp.asarray(block)[None], axis=1)
    np.testing.assert_array_equal(np.asarray(values, np.float32)[0], np.where(block == 8, 3, block))
    np.testing.assert_array_equal(mask[0], block != 8)


def test_no_gradient_passes_where_the_forward_pass_clipped():
    """In the rotated basis: X is made so that X H has one outlier in each block."""
    tokens, width, out = 64, 64, 32
    _, w, dy = tensors((tokens, width, out))
    rotated = np.where(np.random.default_rng(0).random((tokens, width)) < 0.5, 1.0, -1.0)
    rotated[:, [5, 40]] = 16
    x = jnp.asarray(rotated @ rotation(width, 32).T, jnp.float32)
    _, dx, _ = results(quartet.product, x, w, dy, SEEDS)
    back = float64(dx)[0] @ rotation(width, 32)
    largest = np.abs(back).max()
    assert np.abs(back[:, [5, 40]]).max() < 1e-6 * largest
    assert (np.abs(np.delete(back, [5, 40], axis=1)).max(axis=0) > 1e-3 * largest).all()


def test_backward_is_unbiased_given_the_forward_tensors():
    """The mean over draws is the masked product of dY and W^, not only near it."""
    x, w, dy = tensors((32, 32, 32))
    draws = 512
    many = jax.jit(jax.vmap(lambda d: results.__wrapped__(quartet.product, x, w, dy, d)[1:]))
    drawn = jax.random.bits(jax.random.key(7), (draws, quartet.SEEDS, 2), jnp.uint32)
    dx, dw = (np.asarray(g, np.float64) for g in many(drawn))
    x64, w64, dy64 = float64(x, w, dy)
    h = rotation(32, 32)
    (x_hat, x_mask), (w_hat, w_mask) = quest_by_hand(x64 @ h), quest_by_hand(w64.T @ h)
    for got, want in (
        (dx, ((dy64 @ w_hat) * x_mask) @ h.T),
        (dw, (((dy64.T @ x_hat) * w_mask) @ h.T).T),
    ):
        error = got.mean(axis=0) - want
        deviation = got.std(axis=0, ddof=1) / np.sqrt(draws)
        z = error / np.maximum(deviation, 1e-12 + 1e-6 * np.abs(want))
        assert np.abs(z).max() < 6 and 0.8 < np.square(z).mean() < 1.25
