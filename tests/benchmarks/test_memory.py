"""What the memory benchmark counts, by hand; that its steps compile and train, and its search."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as ah
from benchmarks import memory, report, whole_step
from benchmarks.kept import GIB, kept, size
from benchmarks.shapes import PLAN
from train.configs import ModelConfig

CALIBRATED = ah.Plan.load(PLAN)


class TestKept:
    def test_by_hand(self):
        """sin keeps its argument's cosine; a product its operands, of which one is a parameter."""
        w, x = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32)
        found = kept(lambda w, x: jnp.sin(x @ w), w, x)
        assert sorted(a.shape for a in found) == [(2, 3), (2, 5)]
        assert sorted(map(size, found)) == [4 * 6, 4 * 10]

    def test_what_is_kept_twice_counts_once(self):
        w, x = jax.ShapeDtypeStruct((3, 3), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32)
        assert [a.shape for a in kept(lambda w, x: (x @ w, x @ (w + 1)), w, x)].count((2, 3)) == 1


class TestPublished:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls):
        return memory.stack(memory.published_plans(), **memory.PUBLISHED_SIZES)

    TOKENS, IN = 32_768, 6 * 4096 + 14_336

    def test_share_of_extraction(self, found):
        wgrads = [row.wgrad for row in found.alone["level 1"]]
        assert wgrads.count(("iht+oe(x)",)) == 87
        assert wgrads.count(("iht",)) == 224 - 87
        in_full = [row for row in found.alone["level 2"] if row.wgrad == ("full",)]
        assert len(in_full) == 40
        assert {memory.kernels(4096)[row.linears[0]][0] for row in in_full} == {4096}

    def test_bytes_are_the_arithmetic(self, found):
        bf16 = 32 * self.TOKENS * self.IN * 2
        columns, indices = self.TOKENS * 64 * 2, 64 * 4
        full = self.TOKENS * 4096 * 2
        want = {
            "bf16": bf16,
            "iht": bf16 * 17 // 64,
            "level 1": bf16 * 17 // 64 + 87 * (columns + indices),
            "level 2": bf16 * 17 // 64 + 47 * (columns + indices) + 40 * full * 47 // 64,
            "level 3": bf16 * 17 // 64 + 47 * (columns + indices) + 40 * full * 8 // 64,
        }
        assert {name: memory.total(rows) for name, rows in found.alone.items()} == want

    def test_goals(self, found):
        gib = {name: memory.total(rows) / GIB for name, rows in found.alone.items()}
        assert gib["bf16"] == 76
        assert gib["iht"] <= 20.2 and gib["level 1"] <= 20.6 and gib["level 2"] <= 27.8
        assert gib["level 3"] <= 21.7

    def test_sharing(self, found):
        """One X for query, key and value, one for gate and up; what differs is kept beside."""
        assert memory.total(found.shared["bf16"]) == 32 * self.TOKENS * (3 * 4096 + 14_336) * 2
        first = found.shared["level 2"][0]
        assert first.linears == ("query", "key", "value")
        assert first.wgrad == ("iht+oe(x)", "iht+oe(x)", "full")
        packed, columns = self.TOKENS * 4096 * 17 // 32, self.TOKENS * 64 * 2 + 64 * 4
        assert first.total == packed + columns + self.TOKENS * 4096 * 2
        first = found.shared["level 3"][0]
        assert first.wgrad == ("iht+oe(x)", "iht+oe(x)", "iht mxfp6")
        assert first.total == packed + columns + self.TOKENS * 4096 * 25 // 32

    def test_layers_of_one_x_have_one_pattern_of_x(self):
        for block in range(32):
            for group in memory.GROUPS:
                assert len({memory.published_patterns(block, n).x for n in group}) == 1

    def test_table_and_json(self, found):
        about = report.circumstances("abc")
        document = json.loads(report.to_json(about, {"published": found}))
        assert document["published"]["alone"]["iht"][0]["bytes"]["codes"] == self.TOKENS * 4096 // 2
        assert "| iht | 0 extract X, 0 in BF16 | 20.60 | 20.19 |" in str(
            memory.published_table(found)
        )


def test_calibrated_block():
    found = memory.stack(memory.calibrated_plans(CALIBRATED, 2048), width=2048, blocks=1, tokens=96)
    rows = {row.linears[0]: row for row in found.alone["level 1"]}
    for linear, row in rows.items():
        in_features, _ = memory.kernels(2048)[linear]
        k = CALIBRATED[f"d2048/{linear}"].wgrad.outliers.count(in_features)
        assert row.bytes == {
            memory.X: 0,
            memory.CODES: 96 * in_features // 2,
            memory.SCALES: 96 * in_features // 32,
            memory.COLUMNS: 96 * k * 2,
            memory.INDICES: k * 4,
        }
    assert "| down | iht+oe(x) | - |" in str(memory.block_table(found, "level 1"))


TINY = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=48)
SIZES = {"batch": 2, "sequence": 32, "vocab_size": 50}
PLANNED = ah.Plan(
    layers=tuple(
        (f"d32/{linear}", ah.LayerPlan.uniform(ah.ProductPlan.iht())) for linear in whole_step.PATHS
    ),
    level=1,
)


@pytest.fixture(scope="module")
def tiny():
    """Recipes by name."""
    return {recipe.name: recipe for recipe in whole_step.recipes(PLANNED, TINY, SIZES)}


@pytest.mark.standard_promotion
class TestWholeStep:
    def test_held(self, tiny):
        """Under the policy, packed X of every linear, shared, and each block's input."""
        held = whole_step.held(tiny["level 1, remat but save_quantized"])
        kinds = {kind: count for kind, count, _ in held.kinds}
        tokens = 2 * 32
        assert kinds[f"u8[2,32,{tokens // 2}]"] == 3
        assert kinds[f"u8[2,48,{tokens // 2}]"] == 1
        assert kinds["bf16[2,2,32,32]"] == 1
        assert held.bytes == sum(kind[2] for kind in held.kinds)
        inputs_alone = whole_step.held(tiny["level 1, remat"])
        packed = 2 * tokens * (3 * 32 + 48) * 17 // 32
        assert held.bytes - inputs_alone.bytes == packed
        assert "save_quantized" in str(whole_step.held_table([held]))

    def test_a_compiled_step_trains(self, tiny):
        recipe = tiny["level 1, remat but save_quantized"]
        step, shapes = whole_step.compiled_step(recipe)
        state = whole_step.initial(recipe)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(lambda s: s.shape, shapes)
        assert whole_step.taken(step) > sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        tokens = jnp.asarray(np.arange(66).reshape(2, 33) % 50, jnp.int32)
        losses = []
        for _ in range(12):
            state, loss = step(state, tokens)
            losses.append(float(loss))
        assert losses[-1] < losses[0]

    def test_largest_model(self, tiny):
        recipe = tiny["bf16, remat"]
        two, _ = whole_step.compiled_step(recipe)
        found = whole_step.largest_model(recipe, limit=whole_step.taken(two))
        assert (found.layers, found.compiled) == (2, whole_step.taken(two))
        state = jax.eval_shape(lambda: whole_step.initial(recipe))
        assert found.parameters == sum(leaf.size for leaf in jax.tree.leaves(state[0]))
        assert "| bf16, remat | 2 |" in str(whole_step.largest_table([found]))
        assert whole_step.largest_model(recipe, limit=1).layers == 0


class TestMost:
    @pytest.mark.parametrize("limit, want", [(9, 0), (10, 1), (59, 10), (60, 11)])
    def test_linear(self, limit, want):
        assert whole_step.most(lambda n: 5 + 5 * n, limit) == want

    @pytest.mark.parametrize("limit", [12, 100, 555])
    def test_a_line_that_misses(self, limit):
        """The guess is put right in both directions."""
        for needs in (lambda n: 10 * n + n * n // 9, lambda n: 10 * n - n // 3):
            n = whole_step.most(needs, limit)
            assert needs(n) <= limit < needs(n + 1)
