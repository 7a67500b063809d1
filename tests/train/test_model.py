"""The decoder: positions, causality, shared heads, and what stays out of the plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from train.calibrate import find_layers
from train.configs import ModelConfig
from train.evaluate import make_evaluate
from train.model import Llama, _rotate, _rotation
from train.options import Options, resolve

pytestmark = pytest.mark.standard_promotion  # Flax's norms

CONFIG = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, dtype="float32")
VOCAB = 50
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12), dtype=np.int32)


def built(config=CONFIG, plan=None):
    model = Llama(config, VOCAB, plan=plan or ah.Plan.full())
    return model, model.init(jax.random.key(0), TOKENS)


def test_logits_do_not_see_the_future():
    model, variables = built()
    changed = TOKENS.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model.apply(variables, TOKENS), model.apply(variables, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_rotary_scores_depend_on_the_distance_alone(key):
    q, k = jax.random.normal(key, (2, 1, 1, 1, 8))
    rotation = _rotation(20, CONFIG)
    q, k = (_rotate(jnp.tile(x, (1, 20, 1, 1)), rotation)[0, :, 0] for x in (q, k))
    scores = np.asarray(q @ k.T)
    for distance in (0, 1, 5):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert not np.isclose(scores[0, 0], scores[5, 0])


def test_rotation_is_half_split():
    """By hand, at position 1: pair (i, i + K / 2) turns by theta^(-2 i / K)."""
    config = dataclasses.replace(CONFIG, width=16)  # K = 4
    x = jnp.array([1.0, 2.0, 3.0, 4.0])[None, None, None, :]
    turned = _rotate(jnp.tile(x, (1, 2, 1, 1)), _rotation(2, config))[0, 1, 0]
    a, b = 1.0, 10_000.0**-0.5
    cos, sin = np.cos([a, b]), np.sin([a, b])
    wanted = [cos[0] - 3 * sin[0], 2 * cos[1] - 4 * sin[1], 3 * cos[0] + sin[0]]
    np.testing.assert_allclose(turned, [*wanted, 4 * cos[1] + 2 * sin[1]], rtol=1e-6)


def test_shared_heads_equal_repeated_heads():
    grouped, variables = built()
    wide = Llama(dataclasses.replace(CONFIG, kv_heads=4), VOCAB)

    def repeat(path, leaf):
        if path[-2].key not in ("key", "value"):
            return leaf
        heads = leaf.reshape(leaf.shape[0], 2, CONFIG.head_dim)
        return jnp.repeat(heads, 2, axis=1).reshape(leaf.shape[0], -1)

    repeated = jax.tree_util.tree_map_with_path(repeat, variables)
    np.testing.assert_allclose(
        grouped.apply(variables, TOKENS), wide.apply(repeated, TOKENS), rtol=1e-4, atol=1e-5
    )


def test_plan_covers_the_blocks_and_nothing_else():
    config = resolve(Options(layers=2), platform="cpu")
    layers = find_layers(Llama(config.model, VOCAB), config)
    parts = [f"attn/{n}" for n in ("query", "key", "value", "out")]
    parts += [f"mlp/{n}" for n in ("gate", "up", "down")]
    assert [x.path for x in layers] == [f"block_{i}/{part}" for i in range(2) for part in parts]
    assert {x.tokens for x in layers} == {config.batch * config.seq_len}


def test_tied_head_is_the_embedding():
    model, variables = built(dataclasses.replace(CONFIG, tie_embeddings=True))
    assert "head" not in variables["params"]
    _, untied = built()
    untied["params"]["head"]["kernel"] = variables["params"]["embed"]["embedding"].T
    same = Llama(CONFIG, VOCAB).apply(untied, TOKENS)
    np.testing.assert_allclose(model.apply(variables, TOKENS), same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_and_parameters_are_float32(dtype):
    model, variables = built(dataclasses.replace(CONFIG, dtype=dtype))
    assert model.apply(variables, TOKENS).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


def test_evaluation_runs_as_planned_and_in_full():
    plan = ah.Plan.uniform("mxfp4").with_stochastic_dy()
    model, variables = built(plan=plan)
    evaluate = make_evaluate(model, [TOKENS, TOKENS[::-1]])
    result = evaluate(variables["params"])
    assert evaluate(variables["params"]) == result
    assert 0 < abs(result.recipe - result.full) < 0.1
    in_full = make_evaluate(model.clone(plan=ah.Plan.full()), [TOKENS, TOKENS[::-1]])
    again = in_full(variables["params"])
    assert again.recipe == again.full == result.full


@pytest.mark.gpu
def test_attention_by_cudnn_agrees_with_xla():
    config = dataclasses.replace(CONFIG, width=256, dtype="bfloat16")  # heads of 64
    by_name = {}
    for name in ("xla", "cudnn"):
        model, variables = built(dataclasses.replace(config, attention=name))
        by_name[name] = np.asarray(model.apply(variables, TOKENS))
    scale = np.abs(by_name["xla"]).max()
    np.testing.assert_allclose(by_name["cudnn"], by_name["xla"], atol=0.02 * scale)
