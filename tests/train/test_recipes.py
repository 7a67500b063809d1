"""Every recipe through the trainer: from the same start, with what it says of itself."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from adahop_jax._plan import PRODUCTS
from adahop_jax._strategy import layer_plan
from tests.dense import assert_same, backend, normal, run
from tests.train.tiny import tiny_options
from train import calibrate, lm
from train.compare import recipe_name
from train.configs import RunConfig
from train.log import read_metrics
from train.model import Llama
from train.options import Options, resolve
from train.recipes import RECIPES, halo, quartet
from train.recipes.execution import execution
from train.recipes.own_product import OwnProduct

pytestmark = [
    pytest.mark.standard_promotion,  # Optax' AdamW, Flax's norms
    pytest.mark.usefixtures("compile_cache"),
]

EMULATED = ("halo", "quartet", "nvfp4")
STEPS, CALIBRATION = 4, 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Recipe -> what a run of 4 steps returned, run when first asked for."""

    @functools.cache
    def of(quant, **options):
        if RECIPES[quant].is_calibrated:
            options["calibration_steps"] = CALIBRATION
        folder = tmp_path_factory.mktemp(quant)
        return lm.train(tiny_options(folder, quant=quant, steps=STEPS, log_every=1, **options))

    return of


def losses(result):
    lines = read_metrics(result.run_dir / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


def said(result):
    """What the run said of its execution, last."""
    lines = read_metrics(result.run_dir / "metrics.jsonl")
    return [line for line in lines if "recipe" in line][-1]


def test_every_recipe_is_one_kind_of_thing():
    for name, recipe in RECIPES.items():
        kinds = (recipe.plan, recipe.of_calibrated, recipe.dot_general_cls)
        assert sum(kind is not None for kind in kinds) == 1, name
        assert recipe.is_emulated == (name in EMULATED) == ("emulated" in recipe.summary)
        assert recipe.is_calibrated == (name in ("adahop", "control"))


@pytest.mark.parametrize("quant", RECIPES)
def test_recipe_trains_from_the_same_start_and_says_what_runs(quant, finished):
    """The first loss is BF16's own where the first forward pass is; else as near as MXFP4 is.

    One test, so that no recipe is trained on two of the workers that share the tests.
    """
    mine, base = losses(finished(quant)), losses(finished("bf16"))
    assert len(mine) == STEPS and np.isfinite(mine).all()
    if quant in ("bf16", "tseng", "adahop", "control"):
        assert mine[0] == base[0]
    else:
        assert 0 < abs(mine[0] - base[0]) < 0.02
    if quant != "bf16":
        assert mine[1:] != base[1:]
    assert mine[-1] < mine[0]
    heldout = finished(quant).heldout
    assert (heldout.recipe == heldout.full) == (quant in ("bf16", "tseng"))

    line = said(finished(quant))
    runs_on = {"bf16": "dtype"} | dict.fromkeys(EMULATED, "emulated")
    assert line["runs_on"] == runs_on.get(quant, backend())
    assert line["recipe"].startswith(quant)
    share = line["share_in_dtype"]
    fixed = {"bf16": 1, "tseng": 1 / 3} | dict.fromkeys(("mxfp4", "iht", *EMULATED), 0)
    if quant in fixed:
        assert share == pytest.approx(fixed[quant])
    assert line["step"] == (CALIBRATION if RECIPES[quant].is_calibrated else 0)
    if quant == "halo":
        check_no_plan_and_resumed_to_its_end(finished(quant))
    if quant == "adahop":
        check_plan_is_level_1_with_its_forward_in_mxfp6(finished(quant))


def check_no_plan_and_resumed_to_its_end(result):
    assert result.plan is None and not (result.run_dir / "plan.json").exists()
    before = (result.run_dir / "metrics.jsonl").read_text()
    again = lm.train(Options(resume=True, run_dir=str(result.run_dir)))
    assert again.heldout == result.heldout
    assert (result.run_dir / "metrics.jsonl").read_text() == before


def check_plan_is_level_1_with_its_forward_in_mxfp6(result):
    for _, layer in result.plan:
        assert formats(layer, "fwd") == {"mxfp6"}
        assert formats(layer, "dgrad") == formats(layer, "wgrad") == {"mxfp4"}
    assert ah.Plan.load(result.run_dir / "plan.json") == result.plan
    config = RunConfig.from_json((result.run_dir / "config.json").read_text(), where="here")
    assert said(result)["recipe"] == recipe_name(config) == "adahop level 1, fwd mxfp6"


def formats(layer, product):
    plan = layer[product]
    return set() if plan.is_full else {spec.format for spec in plan.specs}


@pytest.mark.parametrize("quant", RECIPES)
def test_parameters_are_the_same_tree_with_the_same_values(quant):
    config = resolve(Options(layers=1, width=32, mlp_width=48), platform="cpu")
    model = Llama(config.model, 64)
    recipe = RECIPES[quant]
    plan = None if recipe.is_emulated else recipe.plan or ah.Plan.uniform("iht")
    params = lm.init_state(recipe.applied(model, plan), config).params
    chex.assert_trees_all_equal(params, lm.init_state(model, config).params)


def decided(folder, quant, fwd):
    """The run that would be, and the plan that labels of every kind give it."""
    job = lm.prepare(tiny_options(folder, run_dir=str(folder / quant), quant=quant, fwd=fwd))
    codes = np.array([[2, 1, 2], [2, 0, 1], [1, 0, 2], [0, 2, 0]], np.int32)  # X, W, dY
    votes = [{layer.path: codes[i % 4] for i, layer in enumerate(job.layers)}]
    return job, votes, calibrate.decide(votes, job.layers, job.config)


@pytest.mark.parametrize("fwd", ["mxfp4", "mxfp6"])
def test_control_mirrors_the_plan_and_the_share_of_adahop(fwd, tmp_path):
    job, votes, plan = decided(tmp_path, "adahop", fwd)
    _, _, control = decided(tmp_path, "control", fwd)
    assert plan == ah.plan_from_labels(votes, layers=job.layers, level=1, fwd=fwd)
    shares = [execution(p, job.layers).share_in_dtype for p in (plan, control)]
    assert shares[0] > 0.01 and shares[1] == pytest.approx(shares[0])
    for (path, mine), (other, theirs) in zip(control, plan, strict=True):
        assert path == other and mine.patterns == theirs.patterns
        for product in PRODUCTS:
            outliers = mine[product].outliers
            assert outliers is None or outliers.norm == "random"
            wanted = fwd if product == "fwd" else "mxfp4"
            assert formats(mine, product) == formats(theirs, product) == {wanted}


def test_control_of_a_plan_that_is_given(tmp_path):
    iht = ah.ProductPlan.iht
    layer = ah.LayerPlan(fwd=iht(outliers="w", k=3), dgrad=iht(), wgrad=iht(outliers="x"))
    layers = lm.prepare(tiny_options(tmp_path)).layers
    plan = ah.Plan(layers=tuple((info.path, layer) for info in layers), level=1)
    plan.save(tmp_path / "given.json")
    given = str(tmp_path / "given.json")
    result = lm.train(tiny_options(tmp_path, quant="control", plan=given, steps=2))
    assert {layer.fwd.strategy for _, layer in result.plan} == {"iht+random(w)"}
    want = execution(plan, layers)
    assert want.share_in_dtype > 0.02
    assert said(result)["share_in_dtype"] == pytest.approx(want.share_in_dtype)
    assert ah.Plan.load(result.run_dir / "plan.json") == result.plan


def test_a_plan_that_is_given_keeps_its_formats():
    for given, wanted in (({}, "mxfp6"), ({"plan": "p"}, "mxfp4"), ({"quant": "iht"}, "mxfp4")):
        assert resolve(Options(**given), platform="cpu").fwd == wanted


def test_level_3_runs_the_column_column_pair_in_mxfp6(tmp_path):
    """Here every pair is made one, through a plan."""
    patterns = ah.Patterns(x=ah.Pattern.COLUMN, w=ah.Pattern.ROW, dy=ah.Pattern.ROW)
    job = lm.prepare(tiny_options(tmp_path, level=3))
    assert job.config.level == 3
    entries = (
        (
            info.path,
            layer_plan(
                patterns, level=3, in_features=info.in_features, out_features=info.out_features
            ),
        )
        for info in job.layers
    )
    plan = ah.Plan(layers=tuple(entries), level=3)
    plan.save(tmp_path / "given.json")
    given = {"plan": str(tmp_path / "given.json"), "steps": STEPS, "log_every": 1}
    result = lm.train(tiny_options(tmp_path, run_dir=str(tmp_path / "other"), **given))
    assert result.plan == plan
    mine = losses(result)
    assert np.isfinite(mine).all() and mine[-1] < mine[0]
    assert said(result)["recipe"].startswith("adahop level 3")
    assert said(result)["share_in_dtype"] == 0


@pytest.mark.parametrize("quant", ["mxfp4", "iht"])
def test_forward_format_and_stochastic_dy_of_uniform_plans(quant):
    config = resolve(Options(quant=quant, fwd="mxfp6", dy_rounding="stochastic"), platform="cpu")
    layer = calibrate.uniform_plan(config).default
    assert [formats(layer, product) for product in ("fwd", "dgrad", "wgrad")] == [
        {"mxfp6"}, {"mxfp4"}, {"mxfp4"},
    ]  # fmt: skip
    assert layer.dgrad.lhs.rounding == "stochastic"


class TestOwnProduct:
    """A layer with a product of its own is `Dense` in all but that product."""

    X, DY = normal(0, 32, 64), normal(1, 32, 48)
    VARIABLES = {"params": {"kernel": normal(2, 64, 48)}}

    def layer(self, product, seeds, **arguments):
        cls = functools.partial(OwnProduct, product=product, seeds=seeds)
        return ah.Dense(48, use_bias=False, dot_general_cls=cls, **arguments)

    def test_results_are_the_product_s(self):
        got = run(self.layer(halo.product, 0), self.VARIABLES, self.X, self.DY)
        w = self.VARIABLES["params"]["kernel"]

        @jax.jit
        def by_itself(x, w, dy):
            seeds = jnp.zeros((0, 2), jnp.uint32)
            y, pullback = jax.vjp(lambda x, w: halo.product(x, w, seeds), x, w)
            return y, *pullback(dy)

        y, dx, dw = by_itself(self.X, w, self.DY)
        for ours, want in zip(
            (got[0], got[2], got[1]["params"]["kernel"]), (y, dx, dw), strict=True
        ):
            np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-4)

    def test_leading_dims_and_bias(self):
        layer = ah.Dense(48, dot_general_cls=functools.partial(
            OwnProduct, product=halo.product, seeds=0))  # fmt: skip
        params = {**self.VARIABLES["params"], "bias": normal(3, 48)}
        x = self.X.reshape(4, 8, 64)
        y = layer.apply({"params": params}, x)
        flat = layer.apply({"params": params}, self.X)
        assert y.shape == (4, 8, 48)
        np.testing.assert_array_equal(y.reshape(32, 48), flat)

    def test_random_bits_differ_from_layer_to_layer_and_call_to_call(self):
        class Two(nn.Module):
            make: functools.partial

            @nn.compact
            def __call__(self, x):
                return jnp.stack(ah.dense_group(x, self.make(name="a"), self.make(name="b")))

        cls = functools.partial(OwnProduct, product=quartet.product, seeds=quartet.SEEDS)
        model = Two(functools.partial(ah.Dense, 48, use_bias=False, dot_general_cls=cls))
        kernel = self.VARIABLES["params"]
        variables = {"params": {"a": kernel, "b": kernel}}
        dy = jnp.stack([self.DY, self.DY])

        def gradients(seed):
            return run(model, variables, self.X, dy, {"quantize": jax.random.key(seed)})

        y, by_variables, _ = gradients(0)
        a, b = (by_variables["params"][name]["kernel"] for name in "ab")
        np.testing.assert_array_equal(y[0], y[1])  # the forward pass draws nothing
        assert (a != b).mean() > 0.9
        assert_same(gradients(0), gradients(0))
        assert (gradients(1)[1]["params"]["a"]["kernel"] != a).mean() > 0.9
