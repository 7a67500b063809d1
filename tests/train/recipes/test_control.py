"""The control: AdaHOP's shares, product by product, and nothing else of AdaHOP's."""

import numpy as np
import pytest

import adahop_jax as ah
from train.recipes.control import control_plan

IHT, FULL = ah.ProductPlan.iht(), ah.ProductPlan.full()
PRODUCTS = ("fwd", "dgrad", "wgrad")
BLOCKS = 6


def dims(path):
    return {"query": (64, 64), "key": (64, 32), "value": (64, 32), "up": (64, 96)}[path[-1]]


def calibrated():
    """Key and value run wgrad in full in half of the blocks, up extracts of W and X."""
    entries = []
    for block in range(BLOCKS):
        for name in ("query", "key", "value", "up"):
            products = {"fwd": IHT, "dgrad": IHT, "wgrad": IHT}
            if name in ("key", "value"):
                products["wgrad"] = FULL if block < 3 else ah.ProductPlan.iht(outliers="x")
            if name == "up":
                products["fwd"] = ah.ProductPlan.iht(outliers="w", k=7)
                products["dgrad"] = ah.ProductPlan.iht(outliers="dy")
            path = (f"block_{block}", name)
            width, out = dims(path)
            layer = ah.LayerPlan(**products, in_features=width, out_features=out)
            entries.append(("/".join(path), layer))
    return ah.Plan(layers=tuple(entries), level=2)


PLAN = calibrated()
LAYERS = [
    ah.LayerInfo(path=path, tokens=256, in_features=layer.in_features,
                 out_features=layer.out_features)
    for path, layer in PLAN
]  # fmt: skip


def shares(plan):
    """By product and kernel's shape."""
    sums = {}
    for row, info in zip(
        ah.explain(plan, LAYERS).rows, (x for x in LAYERS for _ in PRODUCTS), strict=True
    ):
        group = row.product, info.in_features, info.out_features
        sums[group] = sums.get(group, 0.0) + row.share_in_dtype
    return sums


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_the_plan_that_it_mirrors(seed):
    control = control_plan(PLAN, seed)
    assert shares(control) == pytest.approx(shares(PLAN))
    same = ah.explain(PLAN, LAYERS).share_in_dtype
    assert ah.explain(control, LAYERS).share_in_dtype == pytest.approx(same) and same > 0


def test_every_extraction_is_at_random_and_of_the_same_tensor():
    control = control_plan(PLAN, 0)
    for path, layer in control:
        for product in PRODUCTS:
            plan = layer[product]
            if plan.outliers is not None:
                assert plan.outliers.norm == "random" and plan.is_random
            if not path.endswith(("key", "value")):
                mine, theirs = plan.outliers, PLAN[path][product].outliers
                assert (mine and (mine.tensor, mine.k)) == (theirs and (theirs.tensor, theirs.k))
    assert ah.Plan.from_json(control.to_json()) == control


def full_places(plan):
    return frozenset(path for path, layer in plan if layer.wgrad.is_full)


def test_full_products_move_among_layers_of_one_shape_by_the_seed():
    places = [full_places(control_plan(PLAN, seed)) for seed in range(20)]
    assert all(len(found) == 6 for found in places)
    assert all(path.endswith(("key", "value")) for found in places for path in found)
    assert len(set(places)) > 15 and control_plan(PLAN, 3) == control_plan(PLAN, 3)
    # Every layer gets its turn, whether the plan had it in full or not.
    turns = [sum(path in found for found in places) for path, _ in PLAN if path[-3:] in "keylue"]
    assert min(turns) >= 3 and max(turns) <= 17
    assert np.mean(turns) == pytest.approx(10)


def test_layers_in_full_throughout_stay():
    full = ah.Plan(
        layers=tuple(
            (path, ah.LayerPlan(fwd=IHT, dgrad=IHT, wgrad=FULL, in_features=8, out_features=8))
            for path in ("a", "b")
        )
    )
    assert control_plan(full, 0) == full
