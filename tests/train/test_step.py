"""One step: what it changes, that it compiles once, and what it draws its random bits from."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from train.lm import Options, init_state, make_step, resolve
from train.model import Llama

pytestmark = pytest.mark.standard_promotion  # Optax' AdamW, Flax's norms

VOCAB = 64
FULL = ah.Plan.full()
STOCHASTIC = ah.Plan.uniform("iht").with_stochastic_dy()


@functools.cache
def compiled(plan, *, calibrating=False, accumulate=1):
    """The step with its configuration and model; each is compiled once for all tests."""
    given = {
        "layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 48,
        "seq_len": 24, "batch": 4, "warmup": 0, "steps": 40,
    }  # fmt: skip
    config = resolve(Options(**given, accumulate=accumulate), platform="cpu")
    model = Llama(config.model, VOCAB, plan=plan)
    return make_step(model, config, calibrating=calibrating), config, model


def setup(plan, **options):
    step, config, model = compiled(plan, **options)
    return step, init_state(model, config), config


def tokens(config, seed=0):
    shape = (config.batch, config.seq_len + 1)
    return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


@pytest.mark.parametrize("plan", [FULL, STOCHASTIC], ids=["full", "iht"])
def test_step_moves_every_parameter_and_compiles_once(plan):
    step, state, config = setup(plan)
    before = jax.device_get(state.params)
    for i in range(3):
        state, metrics, labels = step(state, tokens(config, seed=i))
        assert np.isfinite(metrics["loss"]) and labels == {}
    assert step.func._cache_size() == 1
    assert int(state.step) == 3
    still = [
        jax.tree_util.keystr(path)
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(state.params), strict=True
        )
        if (old == np.asarray(new)).all()
    ]
    assert still == []


def test_calibrating_step_is_a_full_step_with_labels():
    """And micro-batches give it the same gradient and the same labels."""
    step, state, config = setup(FULL)
    plain, plain_metrics, _ = step(state, tokens(config))
    labels_seen = []
    for accumulate in (1, 4):
        step, state, config = setup(FULL, calibrating=True, accumulate=accumulate)
        state, metrics, labels = step(state, tokens(config))
        chex.assert_trees_all_close(metrics, plain_metrics, rtol=1e-5)
        # Adam's first step is a gradient's sign: where that is near nothing the two may differ.
        moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), state.params, plain.params)
        assert max(jax.tree.leaves(moved)) < 0.1 * config.optim.lr
        labels_seen.append(jax.device_get(labels))
    whole, parts = labels_seen
    chex.assert_trees_all_equal(whole, parts)
    assert len(whole) == 7 and all(codes.shape == (3,) for codes in whole.values())
    assert {code for codes in whole.values() for code in codes.tolist()} <= {0, 1, 2}


def test_stochastic_rounding_is_a_function_of_seed_and_step():
    step, start, config = setup(STOCHASTIC)

    def params_after(**changes):
        state = jax.tree.map(jnp.copy, start)
        return step(state.replace(**changes), tokens(config))[0].params

    same = params_after()
    chex.assert_trees_all_equal(same, params_after())
    kernel = params_after(step=jnp.int32(1))["block_0"]["mlp"]["up"]["kernel"]
    assert not np.array_equal(kernel, same["block_0"]["mlp"]["up"]["kernel"])
