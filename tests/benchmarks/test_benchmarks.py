"""What the benchmarks compute from times, by hand; and what they refuse."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from adahop_jax.reference import operations as reference
from benchmarks import floor, gate, kernels, layers, make_plan, report, shapes, timing
from benchmarks.timing import Event, Time

RATES = floor.Rates(copy=4e12, fp8=1.5e15, bf16=0.75e15)
IHT = ah.ProductPlan.iht()
PLAN = ah.Plan.load(shapes.PLAN)


def _time(seconds):
    return Time(busy=seconds, span=seconds, runs=20, kernels=())


class TestShapes:
    def test_projections_are_llamas(self):
        assert [p.name for p in shapes.PROJECTIONS] == [
            *("4096x4096", "4096x1024", "4096x14336", "14336x4096"),
            *("2048x2048", "2048x512", "2048x8192", "8192x2048"),
        ]
        for width in (4096, 2048):
            linears = [n for p in shapes.PROJECTIONS if p.width == width for n in p.linears]
            assert sorted(linears) == ["down", "gate", "key", "out", "query", "up", "value"]

    def test_committed_plan_is_what_its_patterns_say(self):
        patterns = {path.partition("/")[2]: layer.patterns for path, layer in PLAN}
        assert make_plan.benchmark_plan(patterns) == PLAN
        assert PLAN.level == 1
        assert not any(
            layer[name].is_full for _, layer in PLAN for name in ("fwd", "dgrad", "wgrad")
        )

    def test_equal_plans_of_a_shape_are_timed_once(self):
        for projection in shapes.PROJECTIONS:
            *planned, iht = layers.recipes(projection, PLAN)
            assert sorted(n for r in planned for n in r.linears) == sorted(projection.linears)
            assert len({r.plan for r in planned}) == len(planned)
            assert iht.name == layers.IHT


class TestFloor:
    def test_the_slower_of_bytes_and_operations(self):
        assert floor.Work(name="", bytes=8e12).seconds(RATES) == 2
        assert floor.Work(name="", bytes=8e12, operations=4.5e15).seconds(RATES) == 3
        bf16 = floor.Work(name="", bytes=8e12, operations=4.5e15, unit="bf16")
        assert bf16.seconds(RATES) == 6

    def test_kernels_by_hand(self):
        assert floor.quantizer("", 1024, "folded").bytes == 2048 + 1024
        assert floor.quantizer("", 1024, "mxfp4").bytes == 2048 + 512 + 32
        assert floor.quantizer("", 1024, "folded", "mxfp6").bytes == 2048 + 1024 + 768 + 32
        assert floor.fold("", 1024, "mxfp4").bytes == 512 + 32 + 1024
        work = floor.product("", 2, 3, 5)
        assert (work.bytes, work.operations) == (2 * 5 + 3 * 5 + 2 * 2 * 3, 2 * 2 * 3 * 5)
        assert floor.product("", 2, 3, 5, unit="bf16").bytes == 2 * (2 * 5 + 3 * 5 + 2 * 3)

    def test_layer_of_iht(self):
        works = floor.layer(ah.LayerPlan.uniform(IHT), tokens=64, in_features=128, out_features=256)
        assert [work.name for work in works] == [
            *("fwd, wgrad: quantize x", "fwd: quantize w"),
            *("dgrad: quantize w", "dgrad, wgrad: quantize dy"),
            *("fwd: product", "dgrad: product", "wgrad: product", "wgrad: fold x"),
        ]
        sizes = {"x": 64 * 128, "w": 128 * 256, "dy": 64 * 256}
        for work in works:
            _, _, what = work.name.partition(": ")
            if what == "product":
                assert work.operations == 2 * 64 * 128 * 256
            elif what == "fold x":
                assert work.bytes == sizes["x"] * (1 + 1 / 32 + 1 / 2)
            else:
                written = {"x": 1 + 0.5 + 1 / 32, "w": 1, "dy": 2}
                tensor = what.split()[1]
                assert work.bytes == sizes[tensor] * (2 + written[tensor])

    @pytest.mark.parametrize(
        "product, tensor, k, other, size",
        [
            ("fwd", "w", 4, 64, 2),  # k columns of W meet all of X
            ("fwd", "x", 1, 256, 2),
            ("dgrad", "dy", 1, 128, 2),
            ("wgrad", "x", 2, 256, 2),
            ("wgrad", "dy", 4, 128, 1 / 2 + 1 / 32),  # X as it is kept
        ],
    )
    def test_side_product(self, product, tensor, k, other, size):
        plan = {name: IHT for name in ("fwd", "dgrad", "wgrad")}
        plan[product] = ah.ProductPlan.iht(outliers=tensor)
        works = floor.layer(ah.LayerPlan(**plan), tokens=64, in_features=128, out_features=256)
        (side,) = [work for work in works if "side" in work.name]
        length = {"fwd": 128, "dgrad": 256, "wgrad": 64}[product]
        assert side.operations == 2 * k * other * length
        assert side.bytes == other * length * size + 2 * k * (length + other)
        assert side.unit == "bf16"

    def test_full_is_three_products_in_bf16(self):
        works = floor.layer(
            ah.LayerPlan.uniform(ah.ProductPlan.full()), tokens=4, in_features=8, out_features=16
        )
        assert [(work.unit, work.operations) for work in works] == [("bf16", 1024)] * 3


class TestLayers:
    def _times(self, projection):
        times = {layers.BF16: _time(3e-3)}
        for recipe in layers.recipes(projection, PLAN):
            times[recipe.label] = _time(2e-3)
            times |= {name: _time(1e-4) for name, *_ in layers._w_kernels(recipe.plan)}
        return times

    def test_shared_w_leaves_three_quarters_of_its_quantizers_out(self):
        projection = shapes.PROJECTIONS[0]
        *_, iht = layers.recipes(projection, PLAN)
        row = layers.row(projection, iht, self._times(projection), RATES)
        # Two, one for fwd and one for dgrad.
        assert row.ours_shared_w == pytest.approx(2e-3 - 0.75 * 2 * 1e-4)
        w = 4096 * 4096 * 3 / RATES.copy
        assert row.floor_shared_w == pytest.approx(row.floor - 0.75 * 2 * w)

    def test_sum_counts_every_shape_once(self):
        rows = [
            layers.row(projection, recipe, self._times(projection), RATES)
            for projection in shapes.PROJECTIONS
            for recipe in layers.recipes(projection, PLAN)
        ]
        for recipe in (layers.PLANNED, layers.IHT):
            total = layers.summed(rows, 4096, recipe)
            assert total["ours"] == pytest.approx(4 * 2e-3)
            assert total["bf16"] == pytest.approx(4 * 3e-3)
        text = str(layers.table(rows))
        assert text.count("**d 4096, four shapes**") == 2
        assert "| 1.50 |" in text

    def test_jobs_are_traced_without_data(self):
        projection = dataclasses.replace(
            shapes.PROJECTIONS[0], in_features=64, out_features=32, linears=("down",)
        )
        free = dataclasses.replace(PLAN["d4096/down"], in_features=None, out_features=None)
        plan = ah.Plan(layers=((projection.path("down"), free),))
        jobs = layers.jobs_of(reference, projection, layers.recipes(projection, plan))
        assert len({job.name for job in jobs}) == len(jobs)
        for job in jobs:
            jax.eval_shape(job.function, *job.args)


class TestTiming:
    def _events(self, runs):
        """A call of two kernels, and one of one."""
        names, start = ("a", "b", "c"), 0
        for i in range(runs):
            for name in names:
                yield Event(name=name, start=start, duration=100 + i)
                start += 200

    def test_turns_are_told_apart(self):
        found = timing.split(list(self._events(5)), {"ab": 2, "c": 1}, 5)
        assert [[e.name for e in run] for run in found["ab"]] == [["a", "b"]] * 5
        time = timing.summary(found["ab"])
        assert time.busy == pytest.approx(204e-9)
        assert time.span == pytest.approx(302e-9)
        assert time.kernels == (("a", pytest.approx(102e-9)), ("b", pytest.approx(102e-9)))

    def test_lost_events_are_noticed(self):
        events = list(self._events(5))
        with pytest.raises(timing.TimingError, match="14 events, wanted 15"):
            timing.split(events[:-1], {"ab": 2, "c": 1}, 5)
        events[1], events[2] = events[2], events[1]
        with pytest.raises(timing.TimingError, match="runs of 'ab' differ"):
            timing.split(events, {"ab": 2, "c": 1}, 5)

    def test_what_runs_nothing_on_a_gpu_is_noticed(self, monkeypatch):
        monkeypatch.setattr(timing, "WARM_SECONDS", 0)
        with pytest.raises(timing.TimingError, match="2 runs of 'f' left 0 events"):
            timing.measure({"f": lambda: jnp.ones(3)}, runs=2)


class TestGate:
    def test_passes_the_reference_and_the_layer(self):
        for axis in (0, 1):
            assert not list(gate._kernel(reference, "stochastic", axis))
        assert not list(gate._layer("iht", ah.LayerPlan.uniform(IHT)))

    def test_stops_one_wrong_scale(self):
        class Broken:
            @staticmethod
            def residual(x, **options):
                codes, scales, norms = reference.residual(x, **options)
                return codes, scales.at[3, 5].add(1), norms

        for name in kernels.SPECS:
            found = list(gate._kernel(Broken, name, 0))
            assert found == [f"{name}, axis 0: scales differ from the reference's"]


def test_json_holds_circumstances_and_results():
    rows = [kernels.Row(name="fold", bytes=1.0, seconds=2.0, copy_seconds=1.5)]
    text = report.to_json(report.circumstances("abc"), {"kernels": rows, "rates": RATES})
    found = json.loads(text)
    assert found["commit"] == "abc"
    assert found["machine"]["device"] and found["date"][:2] == "20"
    assert found["versions"]["jax"] == jax.__version__
    assert found["kernels"] == [dataclasses.asdict(rows[0])]
    assert found["rates"]["copy"] == RATES.copy
    with pytest.raises(TypeError, match="ndarray has no place in JSON"):
        report.to_json({}, {"x": np.zeros(3)})


def test_commit_is_the_checkouts():
    commit = report.circumstances()["commit"]  # None where the sources were unpacked without git
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_table_is_markdown():
    table = report.Table(title="T", head=("a", "b"), rows=(("1", "2"),), note="n")
    assert str(table) == "## T\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nn\n"
