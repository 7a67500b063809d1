"""Calibration finds planted patterns, however the batch is cut, scaled or sharded."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adahop_jax as ah
from adahop_jax._calibrate import plan_from_labels
from adahop_jax._patterns import CODES
from adahop_jax._plan import PRODUCTS
from tests.dense import assert_near

NONE, ROW, COLUMN = CODES


class Mlp(nn.Module):
    plan: ah.Plan = ah.Plan.full()

    @nn.compact
    def __call__(self, x):
        h = nn.silu(ah.Dense(96, plan=self.plan, name="up")(x))
        return ah.Dense(64, plan=self.plan, name="down")(h)


def _batch(seed, tokens=256):
    x = jax.random.normal(jax.random.key(seed), (tokens, 64))
    return x.at[:, 3].multiply(30)  # an outlier column


def _loss(scale=1.0):
    # Few tokens carry most of the loss: outlier rows of dY.
    def loss_fn(variables, x):
        weight = jnp.where(jnp.arange(x.shape[0]) % 8 == 0, 30.0, 1.0)
        y = Mlp().apply(variables, x)
        return scale * jnp.mean(weight * jnp.mean((y - 1) ** 2, axis=-1))

    return loss_fn


@pytest.fixture(scope="module")
def variables(platform):
    return Mlp().init(jax.random.key(9), _batch(0))


@pytest.fixture(scope="module")
def whole(variables):
    return ah.calibrate(_loss(), variables, [_batch(i) for i in range(3)], steps=3, level=1)


def test_planted_patterns_are_found(whole):
    assert whole.paths == ("up", "down")
    patterns = whole["up"].patterns
    assert (patterns.x, patterns.w) == (COLUMN, NONE)
    assert whole["down"].patterns.dy is ROW
    assert (whole["up"].in_features, whole["up"].out_features, whole.level) == (64, 96, 1)
    # wgrad of "down": opp(dy) - x; its x is "up"'s activation.
    assert whole["up"].wgrad.outliers.tensor == "x"


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_micro_batches_give_the_same_plan(variables, whole, parts):
    batches = [part for i in range(3) for part in jnp.split(_batch(i), parts)]
    found = ah.calibrate(_loss(), variables, batches, steps=3, level=1, accumulate=parts)
    assert found == whole


@pytest.mark.parametrize("exponent", [-40, 40])
def test_scale_of_the_loss_does_not_matter(variables, whole, exponent):
    batches = [_batch(i) for i in range(3)]
    found = ah.calibrate(_loss(2.0**exponent), variables, batches, steps=3, level=1)
    assert found == whole


def test_micro_batches_of_very_different_scale_merge(variables):
    loss_fn = jax.jit(lambda v, x: ah.observe(_loss())(v, x)[2])
    parts = [_batch(0)[:128], _batch(0)[128:] * 2.0**30]
    seen = ah.merge_statistics(loss_fn(variables, parts[0]), loss_fn(variables, parts[1]))
    together = loss_fn(variables, jnp.concatenate(parts))
    for merged, one in zip(
        jax.tree.leaves(seen["up"].x), jax.tree.leaves(together["up"].x), strict=True
    ):
        np.testing.assert_allclose(merged, one, rtol=1e-5, atol=1e-12)


@pytest.mark.cpu_only("needs two devices")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batches_give_the_same_plan(variables, whole, axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        batches = [jax.device_put(_batch(i), sharding) for i in range(3)]
        assert ah.calibrate(_loss(), variables, batches, steps=3, level=1) == whole


def test_gradients_and_loss_are_those_of_training(variables, platform):
    loss, gradients, _ = jax.jit(ah.observe(_loss()))(variables, _batch(0))
    want, want_gradients = jax.jit(jax.value_and_grad(_loss()))(variables, _batch(0))
    # XLA on a GPU sums in another order where statistics are fused with what they are of.
    tolerance = 0 if platform == "cpu" else 1e-5
    assert_near((loss, gradients), (want, want_gradients["params"]), tolerance)


def test_variables_are_left_as_they_were(variables, whole):
    again = Mlp().init(jax.random.key(9), _batch(0))
    jax.tree.map(np.testing.assert_array_equal, variables, again)


def test_planned_model_calibrates_in_full(variables, whole):
    """The model's own plan plays no part."""

    def loss_fn(v, x):
        weight = jnp.where(jnp.arange(x.shape[0]) % 8 == 0, 30.0, 1.0)
        y = Mlp(plan=ah.Plan.uniform("mxfp4")).apply(v, x)
        return jnp.mean(weight * jnp.mean((y - 1) ** 2, axis=-1))

    found = ah.calibrate(loss_fn, variables, [_batch(i) for i in range(3)], steps=3, level=1)
    assert found == whole


def test_loss_that_was_compiled_before_is_looked_into(variables, whole):
    loss_fn = jax.jit(_loss())
    loss_fn(variables, _batch(0))
    for _ in range(2):  # the second time over its own traces
        batches = [_batch(i) for i in range(3)]
        assert ah.calibrate(loss_fn, variables, batches, steps=3, level=1) == whole


LAYER = ah.LayerInfo(path="a", tokens=8, in_features=64, out_features=32)


@pytest.mark.parametrize(
    "votes, winner",
    [
        ([1, 1, 2], ROW),
        ([2, 2, 0, 0, 2], COLUMN),
        ([1, 2], NONE),
        ([1, 1, 2, 2, 0], NONE),
        ([0, 0, 1], NONE),
        ([2], COLUMN),
    ],
    ids=str,
)
def test_majority_wins_and_a_tie_is_none(votes, winner):
    labels = [{"a": np.array([vote, 0, 0], np.int32)} for vote in votes]
    plan = plan_from_labels(labels, layers=[LAYER], level=2)
    assert plan["a"].patterns == ah.Patterns(x=winner, w=NONE, dy=NONE)


def test_all_none_is_uniform_iht():
    labels = [{"a": np.zeros(3, np.int32)}]
    iht = ah.ProductPlan.iht()
    plan = plan_from_labels(labels, layers=[LAYER], fwd="mxfp4")
    assert [plan["a"][p] for p in PRODUCTS] == [iht] * 3
    ours = plan_from_labels(labels, layers=[LAYER])
    assert ours == plan.with_format("mxfp6") and ours.level == 1
    assert [ours["a"][p] == iht for p in PRODUCTS] == [False, True, True]


@pytest.mark.parametrize("fwd", ["mxfp4", "mxfp6"])
def test_format_of_the_forward_leaves_cells_that_have_their_own(fwd):
    """Column-column at level 2 and 3, which is in full and in MXFP6 whatever the rest is in."""
    labels = [{"a": np.array([2, 1, 0], np.int32)}]  # W is stored as (in, out)
    full = plan_from_labels(labels, layers=[LAYER], level=2, fwd=fwd)["a"].fwd
    six = plan_from_labels(labels, layers=[LAYER], level=3, fwd=fwd)["a"].fwd
    assert full == ah.ProductPlan.full()
    assert six == ah.Plan.uniform("iht").with_format("mxfp6")["a"].fwd


def test_layer_without_statistics_is_named():
    with pytest.raises(ah.PlanError, match="layer 'a' has no statistics"):
        plan_from_labels([{"b": np.zeros(3, np.int32)}], layers=[LAYER], level=2)


class Stack(nn.Module):
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + ah.Dense(x.shape[-1], name="dense")(x), None

        stack = nn.scan(
            nn.remat(Block),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=3,
        )
        return stack(name="stack")(x, None)[0]


def test_stacked_layers_vote_together():
    x = _batch(0)
    variables = Stack().init(jax.random.key(0), x)
    plan = ah.calibrate(
        lambda v, x: jnp.mean(Stack().apply(v, x) ** 2), variables, [x] * 2, steps=2
    )
    assert plan.paths == ("stack/dense",)
    assert plan["stack/dense"].patterns.x is COLUMN


def test_kernels_stacked_along_another_axis_are_refused():
    variables = Stack(axis=1).init(jax.random.key(0), _batch(0))
    with pytest.raises(ah.PlanError, match="layer 'stack/dense'.*stack kernels along their first"):
        ah.calibrate(
            lambda v, x: jnp.mean(Stack(axis=1).apply(v, x)), variables, [_batch(0)], steps=1
        )


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = ah.Dense(64, name="shared")
        return dense(jnp.tanh(dense(x)))


def test_layer_that_runs_twice_is_named():
    variables = Twice().init(jax.random.key(0), _batch(0))
    with pytest.raises(ah.PlanError, match="layer 'shared' runs more than once"):
        ah.calibrate(lambda v, x: jnp.mean(Twice().apply(v, x)), variables, [_batch(0)], steps=1)


def test_frozen_layer_is_named(variables):
    def loss_fn(v, x):
        frozen = {"params": {**v["params"], "up": jax.lax.stop_gradient(v["params"]["up"])}}
        return jnp.mean(Mlp().apply(frozen, x))

    with pytest.raises(ah.PlanError, match="no gradient reaches layer 'up'"):
        ah.calibrate(loss_fn, variables, [_batch(0)], steps=1)


def test_root_layer_and_partitioned_kernels():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layer = ah.Dense(32, kernel_init=init)
    variables = layer.init(jax.random.key(0), _batch(0))
    plan = ah.calibrate(
        lambda v, x: jnp.mean(layer.apply(v, x) ** 2), variables, [_batch(0)], steps=1
    )
    assert plan.paths == ("",)
    assert plan[""].patterns.x is COLUMN


def test_observation_compiles_once_over_steps(variables):
    traces = 0

    def loss_fn(v, x):
        nonlocal traces
        traces += 1
        return _loss()(v, x)

    step = jax.jit(ah.observe(loss_fn))
    for i in range(4):
        step(variables, _batch(i))
    once = traces
    step(variables, _batch(9))
    assert traces == once
