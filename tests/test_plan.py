"""Plans: what they say, how they read and write, and every fault of a file with its place."""

import dataclasses
import json

import pytest

import adahop_jax as ah

SR = ah.OperandSpec(hadamard=32, rounding="stochastic", scale_rule="ceil")
ROTATED = ah.OperandSpec(hadamard=32)
SIX = ah.OperandSpec(format="mxfp6", hadamard=32)


def _layer(**products):
    return ah.LayerPlan(**{n: ah.ProductPlan.iht() for n in ("fwd", "dgrad", "wgrad")} | products)


EVERYTHING = ah.Plan(
    layers=(
        (
            "block_0/attn/query",
            ah.LayerPlan(
                fwd=ah.ProductPlan(
                    lhs=ah.OperandSpec(
                        scale_rule="floor", pre_scale=0.75, hadamard=64, format="mxfp6"
                    ),
                    rhs=ah.OperandSpec(hadamard=64),
                    outliers=ah.OutlierSpec(tensor="w", k=5),
                ),
                dgrad=ah.ProductPlan(lhs=SR, rhs=ROTATED),
                wgrad=ah.ProductPlan(
                    lhs=ah.OperandSpec(hadamard=32, signs="random"),
                    rhs=ah.OperandSpec(hadamard=32, signs="random"),
                ),
                patterns=ah.Patterns(x=ah.Pattern.COLUMN, w=ah.Pattern.ROW, dy=ah.Pattern.NONE),
                in_features=256,
                out_features=128,
            ),
        ),
        ("naïve/ünicode", ah.LayerPlan.uniform(ah.ProductPlan.mxfp4())),
    ),
    default=ah.LayerPlan.uniform(ah.ProductPlan.full()),
    level=2,
)
PLANS = {
    "full": ah.Plan.full(),
    "mxfp4": ah.Plan.uniform("mxfp4"),
    "iht": ah.Plan.uniform("iht"),
    "stochastic": ah.Plan.uniform("iht").with_stochastic_dy(),
    "product": ah.Plan.uniform(ah.ProductPlan(lhs=SIX, rhs=SIX)),
    "empty": ah.Plan(),
    "everything": EVERYTHING,
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)

GOLDEN = """\
{
  "kind": "adahop_jax plan",
  "version": 1,
  "level": 2,
  "default": null,
  "layers": {
    "block_3/attn/key": {
      "fwd": {},
      "dgrad": {
        "lhs": {
          "scale_rule": "ceil",
          "rounding": "stochastic",
          "hadamard": 32
        },
        "rhs": {
          "hadamard": 32
        },
        "outliers": {
          "tensor": "dy"
        }
      },
      "wgrad": {
        "lhs": {
          "hadamard": 32
        },
        "rhs": {
          "hadamard": 32
        }
      },
      "patterns": {
        "x": "column",
        "w": "row",
        "dy": "none"
      },
      "in_features": 64,
      "out_features": 32
    }
  }
}
"""
GOLDEN_PLAN = ah.Plan(
    layers=(
        (
            "block_3/attn/key",
            ah.LayerPlan(
                fwd=ah.ProductPlan(),
                dgrad=ah.ProductPlan(lhs=SR, rhs=ROTATED, outliers=ah.OutlierSpec(tensor="dy")),
                wgrad=ah.ProductPlan(lhs=ROTATED, rhs=ROTATED),
                patterns=ah.Patterns(x=ah.Pattern.COLUMN, w=ah.Pattern.ROW, dy=ah.Pattern.NONE),
                in_features=64,
                out_features=32,
            ),
        ),
    ),
    level=2,
)


@each_plan
def test_json_round_trip(plan):
    again = ah.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()


@each_plan
def test_file_round_trip(plan, tmp_path):
    file = tmp_path / "plan.json"
    plan.save(file)
    assert ah.Plan.load(file) == plan
    assert ah.Plan.load(str(file)) == plan
    assert list(tmp_path.iterdir()) == [file]


def test_json_text_is_as_it_was():
    assert GOLDEN_PLAN.to_json() == GOLDEN
    assert ah.Plan.from_json(GOLDEN) == GOLDEN_PLAN


def test_saving_over_a_plan_replaces_it(tmp_path):
    file = tmp_path / "plan.json"
    EVERYTHING.save(file)
    ah.Plan.full().save(file)
    assert ah.Plan.load(file) == ah.Plan.full()


def test_failed_save_leaves_the_old_plan(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    EVERYTHING.save(file)

    def no_space(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(ah.PlanError, match="cannot write the plan .no space left."):
        ah.Plan.full().save(file)
    assert ah.Plan.load(file) == EVERYTHING


@pytest.mark.parametrize("order", [["b", "a"], ["a", "b"]], ids="".join)
def test_order_of_layers_is_kept(order):
    plan = ah.Plan(layers=tuple((path, _layer()) for path in order))
    assert list(plan.paths) == list(ah.Plan.from_json(plan.to_json()).paths) == order


def test_plans_are_hashable_and_distinct():
    assert len(set(PLANS.values())) == len(PLANS)
    assert len({ah.Plan.uniform("iht"), ah.Plan.uniform("iht")}) == 1


@pytest.mark.parametrize(
    "made",
    [ah.Plan.full(), _layer(), ah.ProductPlan.iht(), ROTATED, ah.OutlierSpec(tensor="x")],
    ids=lambda made: type(made).__name__,
)
def test_frozen(made):
    field = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field, None)


def test_lookup():
    layer = _layer(fwd=ah.ProductPlan.full())
    plan = ah.Plan(layers=(("a/b", layer),), default=_layer())
    assert plan["a/b"] == layer
    assert plan["elsewhere"] == _layer()
    assert dict(plan) == {"a/b": layer}
    assert plan["a/b"]["fwd"] == ah.ProductPlan.full()


def test_lookup_without_default_names_the_layer_and_some_that_are():
    plan = ah.Plan(layers=(("block_0/up", _layer()), ("block_0/down", _layer())))
    with pytest.raises(ah.PlanError) as error:
        plan["block_1/up"]
    for part in ("block_1/up", "2 layers", "block_0/up", "block_0/down", "calibrate"):
        assert part in str(error.value)


STRATEGIES = {
    "full": ah.ProductPlan.full(),
    "mxfp4": ah.ProductPlan.mxfp4(),
    "iht": ah.ProductPlan.iht(),
    "iht+oe(x)": ah.ProductPlan.iht(outliers="x"),
    "iht+oe(w)": ah.ProductPlan.iht(outliers="w", k=3),
    "iht+oe(dy)": ah.ProductPlan.iht(outliers="dy"),
    "iht mxfp6": ah.ProductPlan(lhs=SIX, rhs=SIX),
    "iht mxfp6/mxfp4": ah.ProductPlan(lhs=SIX, rhs=ROTATED),
    "mxfp6": ah.ProductPlan(lhs=ah.OperandSpec(format="mxfp6"), rhs=ah.OperandSpec(format="mxfp6")),
}


@pytest.mark.parametrize("name, plan", STRATEGIES.items(), ids=STRATEGIES)
def test_strategy_name(name, plan):
    assert plan.strategy == name


@pytest.mark.parametrize(
    "size, k, want",
    [(0, None, 0), (1, None, 1), (63, None, 1), (127, None, 1), (128, None, 2), (576, None, 9)]
    + [(4095, None, 63), (4096, None, 64), (8192, None, 64)]
    + [(256, 64, 64), (31, 64, 31), (3, 5, 3), (5, 5, 5), (8, 1, 1)],
)
def test_k(size, k, want):
    assert ah.OutlierSpec(tensor="x", k=k).count(size) == want


class TestStochasticDy:
    @pytest.mark.parametrize("strategy", ["mxfp4", "iht"])
    def test_dy_alone_is_rounded_stochastically(self, strategy):
        plan = ah.Plan.uniform(strategy).with_stochastic_dy().default
        sides = {(n, s): plan[n].specs[s] for n in ("fwd", "dgrad", "wgrad") for s in (0, 1)}
        stochastic = {place for place, spec in sides.items() if spec.rounding == "stochastic"}
        assert stochastic == {("dgrad", 0), ("wgrad", 1)}
        for place, spec in sides.items():
            assert spec.scale_rule == ("ceil" if place in stochastic else "even")
            assert spec.hadamard == (32 if strategy == "iht" else 0)

    def test_products_in_full_stay(self):
        assert ah.Plan.full().with_stochastic_dy() == ah.Plan.full()

    def test_all_else_stays(self):
        got = EVERYTHING.with_stochastic_dy()
        assert got.paths == EVERYTHING.paths
        assert got.level == EVERYTHING.level
        (_, before), *_ = EVERYTHING
        (_, after), *_ = got
        assert after.fwd == before.fwd
        assert after.wgrad.lhs == before.wgrad.lhs
        assert (after.patterns, after.in_features, after.out_features) == (
            before.patterns,
            before.in_features,
            before.out_features,
        )
        assert after.wgrad.rhs == dataclasses.replace(
            before.wgrad.rhs, rounding="stochastic", scale_rule="ceil"
        )

    def test_outliers_stay(self):
        plan = ah.Plan.uniform(ah.ProductPlan.iht())
        layer = _layer(wgrad=ah.ProductPlan.iht(outliers="dy", k=7))
        got = dataclasses.replace(plan, default=layer).with_stochastic_dy().default
        assert got.wgrad.outliers == ah.OutlierSpec(tensor="dy", k=7)
        assert got.is_random and not layer.is_random

    def test_twice_is_once(self):
        once = EVERYTHING.with_stochastic_dy()
        assert once.with_stochastic_dy() == once


class TestCheck:
    plan = ah.Plan(layers=(("a", _layer()), ("b", _layer())))

    def test_fits(self):
        self.plan.check(["b", "a"])
        self.plan.check(iter(["a", "b"]))
        ah.Plan.uniform("iht").check(["anything"])

    @pytest.mark.parametrize(
        "paths, missing, unused",
        [
            (["a"], [], ["b"]),
            (["a", "b", "c"], ["c"], []),
            (["a", "c", "d"], ["c", "d"], ["b"]),
            ([], [], ["a", "b"]),
        ],
    )
    def test_names_both(self, paths, missing, unused):
        with pytest.raises(ah.PlanError) as error:
            self.plan.check(paths)
        text = str(error.value)
        without, _, rest = text.partition("entries that no layer uses: ")
        assert ("layers without an entry: " + ", ".join(missing) in without) == bool(missing)
        assert rest.startswith(", ".join(unused)) if unused else not rest
        assert "calibrate" in text

    def test_a_default_serves_missing_layers_yet_not_unused_entries(self):
        plan = dataclasses.replace(self.plan, default=_layer())
        plan.check(["a", "b", "c"])
        with pytest.raises(ah.PlanError, match="no layer uses: b"):
            plan.check(["a", "c"])


def _changed(place, value):
    """The golden document with `value` at `place`; a value of None ends the key there."""
    document = json.loads(GOLDEN)
    node = document
    *way, last = place
    for name in way:
        node = node[name]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return json.dumps(document)


KEY = ("layers", "block_3/attn/key")
LHS = (*KEY, "dgrad", "lhs")
FAULTS = {
    "empty": ("", "not JSON"),
    "cut short": (GOLDEN[:-20], "not JSON"),
    "a list": ("[]", "not a plan"),
    "another file": ('{"model": "llama"}', "not a plan"),
    "another kind": (_changed(("kind",), "recipe"), "not a plan"),
    "no version": (_changed(("version",), KeyError), "version None, this library reads 1"),
    "version 2": (_changed(("version",), 2), "version 2, this library reads 1"),
    "version as text": (_changed(("version",), "1"), "version '1'"),
    "version true": (_changed(("version",), True), "version True"),
    "unknown field": (_changed(("levle",), 1), "unknown levle"),
    "level 4": (_changed(("level",), 4), "level is 4; wanted 1, 2, 3 or null"),
    "level true": (_changed(("level",), True), "level is True; wanted 1, 2, 3 or null"),
    "layers a list": (_changed(("layers",), []), "layers: found []"),
    "no layers": (_changed(("layers",), KeyError), "layers"),
    "layer null": (_changed(KEY, None), "block_3/attn/key: found None"),
    "no wgrad": (_changed((*KEY, "wgrad"), KeyError), "block_3/attn/key: no wgrad"),
    "unknown product": (_changed((*KEY, "bwd"), {}), "block_3/attn/key: unknown bwd"),
    "product as text": (_changed((*KEY, "fwd"), "iht"), "block_3/attn/key: fwd: found 'iht'"),
    "default as text": (_changed(("default",), "iht"), "default: found 'iht'"),
    "one operand": (_changed((*KEY, "dgrad", "rhs"), KeyError), "block_3/attn/key: dgrad: lhs and"),
    "unknown format": (_changed((*LHS, "format"), "mxfp5"), "attn/key: dgrad: lhs: format 'mxfp5'"),
    "format a list": (_changed((*LHS, "format"), []), "attn/key: dgrad: lhs: format []"),
    "unknown rule": (_changed((*LHS, "scale_rule"), "odd"), "dgrad: lhs: scale_rule 'odd'"),
    "unknown rounding": (_changed((*LHS, "rounding"), "up"), "dgrad: lhs: rounding 'up'"),
    "rule that clips": (_changed((*LHS, "scale_rule"), "even"), "dgrad: lhs: scale_rule 'even'"),
    "unknown signs": (_changed((*LHS, "signs"), "both"), "dgrad: lhs: signs 'both'"),
    "unknown operand field": (_changed((*LHS, "bits"), 4), "dgrad: lhs: unknown bits"),
    "hadamard 48": (_changed((*LHS, "hadamard"), 48), "dgrad: lhs: hadamard must be"),
    "hadamard negative": (_changed((*LHS, "hadamard"), -32), "dgrad: lhs: hadamard must be"),
    "hadamard as text": (_changed((*LHS, "hadamard"), "32"), "dgrad: lhs: hadamard must be"),
    "hadamard 32.0": (_changed((*LHS, "hadamard"), 32.0), "dgrad: lhs: hadamard must be"),
    "sizes that differ": (_changed((*LHS, "hadamard"), 64), "dgrad: lhs and rhs must share"),
    "pre_scale 0": (_changed((*LHS, "pre_scale"), 0), "dgrad: lhs: pre_scale must be"),
    "pre_scale NaN": (_changed((*LHS, "pre_scale"), float("nan")), "dgrad: lhs: pre_scale must be"),
    "pre_scale as text": (_changed((*LHS, "pre_scale"), "1"), "dgrad: lhs: pre_scale must be"),
    "unknown tensor": (
        _changed((*KEY, "dgrad", "outliers", "tensor"), "y"),
        "outliers: tensor 'y'",
    ),
    "no operand": (_changed((*KEY, "dgrad", "outliers", "tensor"), "x"), "dgrad: extracts 'x'"),
    "no tensor": (_changed((*KEY, "dgrad", "outliers"), {"k": 1}), "dgrad: outliers:"),
    "k 0": (_changed((*KEY, "dgrad", "outliers", "k"), 0), "outliers: k must be"),
    "k 1.5": (_changed((*KEY, "dgrad", "outliers", "k"), 1.5), "outliers: k must be"),
    "k true": (_changed((*KEY, "dgrad", "outliers", "k"), True), "outliers: k must be"),
    "norm l1": (_changed((*KEY, "dgrad", "outliers", "norm"), "l1"), "outliers: norm 'l1'"),
    "outliers in full": (_changed((*KEY, "fwd"), {"outliers": {"tensor": "w"}}), "key: fwd: "),
    "unknown pattern": (_changed((*KEY, "patterns", "w"), "diagonal"), "patterns: w is 'diagonal'"),
    "pattern missing": (_changed((*KEY, "patterns", "dy"), KeyError), "patterns: dy is None"),
    "pattern of y": (_changed((*KEY, "patterns", "y"), "row"), "attn/key: patterns: "),
    "in_features as text": (_changed((*KEY, "in_features"), "64"), "key: in_features is '64'"),
    "in_features true": (_changed((*KEY, "in_features"), True), "key: in_features is True"),
    "named twice": (GOLDEN.replace('"fwd": {},', '"fwd": {}, "fwd": {},'), "named twice: fwd"),
}


@pytest.mark.parametrize("text, part", FAULTS.values(), ids=FAULTS)
def test_fault_in_a_file_is_told_with_its_place(text, part, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ah.PlanError) as error:
        ah.Plan.load(file)
    assert str(error.value).startswith(f"{file}: ")
    assert part in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(ah.PlanError) as error:
        ah.Plan.load(tmp_path / "none.json")
    for part in (str(tmp_path / "none.json"), "No such file", "check the path"):
        assert part in str(error.value)


@pytest.mark.parametrize("make", [lambda f: f.mkdir(), lambda f: f.write_bytes(b"\xff\xfe\x00")])
def test_unreadable_file(make, tmp_path):
    file = tmp_path / "plan.json"
    make(file)
    with pytest.raises(ah.PlanError, match=r"plan\.json: cannot read the plan"):
        ah.Plan.load(file)


def test_named_twice():
    with pytest.raises(ah.PlanError, match="named twice: a"):
        ah.Plan(layers=(("a", _layer()), ("b", _layer()), ("a", _layer())))
