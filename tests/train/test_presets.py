"""Golden dumps: a preset or a default changed by accident shows in review.

`UPDATE_GOLDEN=1 pytest tests/train/test_presets.py` writes them anew.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.configs import PRESETS, OptimConfig, RunConfig
from train.model import Llama
from train.optim import decays, make_schedule
from train.options import Options, contradictions, resolve

GOLDEN = Path(__file__).parent / "golden"

MILLIONS = {"nano": (0.5, 1.5), "60m": (54, 66), "125m": (115, 135), "350m": (330, 370)}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_its_golden_dump(name):
    dump, file = PRESETS[name].to_json(), GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(dump)
    assert dump == file.read_text()
    assert RunConfig.from_json(dump, where=str(file)) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.standard_promotion  # Flax's norms in bfloat16
def test_preset_has_the_size_of_its_name(name):
    config = PRESETS[name]
    vocab_size = 257 if config.tokenizer == "bytes" else config.vocab_size
    model = Llama(config.model, vocab_size)
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    millions = sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e6
    low, high = MILLIONS.get(name, (900, 1_150))
    assert low < millions < high


def test_said_options_go_over_the_preset():
    options = Options(preset="60m", quant="iht", width=256, lr=1e-4, steps=50)
    config = resolve(options, platform="gpu")
    assert (config.quant, config.steps) == ("iht", 50)
    assert (config.model.width, config.model.layers) == (256, PRESETS["60m"].model.layers)
    assert (config.optim.lr, config.model.dtype) == (1e-4, "bfloat16")
    assert resolve(options, platform="cpu").model.dtype == "float32"
    assert contradictions(options, config) == []
    [line] = contradictions(Options(seed=3), config)
    assert "--seed 3" in line and "the run has 0" in line


def test_schedule_warms_up_and_decays():
    rate = make_schedule(OptimConfig(lr=1.0, warmup=10), steps=100)
    warm, late = [rate(i) for i in range(11)], [rate(i) for i in range(10, 100)]
    assert warm[0] > 0 and np.all(np.diff(warm) > 0) and np.isclose(warm[-1], 1.0)
    assert np.all(np.diff(late) < 0) and np.isclose(rate(100), 0.1)


def test_only_kernels_decay():
    params = {"norm": {"scale": 0}, "embed": {"embedding": 0}, "up": {"kernel": 0, "bias": 0}}
    marked = decays(params)
    assert marked == {
        "norm": {"scale": False}, "embed": {"embedding": False},
        "up": {"kernel": True, "bias": False},
    }  # fmt: skip
