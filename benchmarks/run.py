"""The benchmark: prints tables, writes JSON.

    python -m benchmarks.run --out results.json

Times are medians of device time, baselines measured in turns with what is held against them.
Nothing is printed before results at a small shape agree with the reference.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import adahop_jax as ah
from adahop_jax._dispatch import resolve
from benchmarks import gate, kernels, layers, product, report, sweep, timing
from benchmarks.shapes import PLAN

GROUPS = ("product", "kernels", "pallas", "layers", "sweep")


def main() -> None:
    """Runs the groups that are asked for."""
    parser = argparse.ArgumentParser(description="Benchmark the kernels on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups to run")
    parser.add_argument(
        "--runs", type=int, default=timing.RUNS, help="of each; their median counts"
    )
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--commit", help="of the sources, where they lie in no git checkout")
    options = parser.parse_args()
    backend, ops = resolve(None)
    if not backend.endswith(":fp8"):
        sys.exit(f"error: the benchmark is for backends on the path fp8; here it is {backend!r}")
    plan = ah.Plan.load(options.plan)
    try:
        gate.check(ops, gated(plan))
        benchmark(ops, plan, options)
    except (gate.GateError, timing.TimingError) as error:
        sys.exit(f"error: {error}")


def gated(plan: ah.Plan) -> dict[str, ah.LayerPlan]:
    """The different plans that are timed, each under the name of one that has it."""
    found: dict[ah.LayerPlan, str] = {}
    for projection in layers.PROJECTIONS:
        for recipe in layers.recipes(projection, plan):
            found.setdefault(recipe.plan, f"{recipe.label} of {projection.name}")
    return {name: of_layer for of_layer, name in found.items()}


def benchmark(ops: Any, plan: ah.Plan, options: argparse.Namespace) -> None:
    """Measures, prints and writes, group by group."""
    about = report.circumstances(options.commit)
    machine, versions = about["machine"], about["versions"]
    print(f"{machine['device']}, {versions}, {about['date']}, commit {about['commit']}\n")
    # Always: every floor is made of its rates.
    found = product.run(ops, runs=options.runs)
    results: dict[str, Any] = {"product": found}
    tables = {"product": product.table(found)}
    for group in GROUPS:
        if group not in options.only:
            continue
        if group == "kernels":
            results[group] = rows = kernels.run(ops, runs=options.runs)
            tables[group] = kernels.table(rows)
        elif group == "pallas":
            results[group] = rows = kernels.run(resolve("pallas")[1], runs=options.runs)
            tables[group] = kernels.table(rows, of="Pallas")
        elif group == "layers":
            results[group] = rows = layers.run(ops, plan, found.rates, runs=options.runs)
            tables[group] = layers.table(rows)
        elif group == "sweep":
            results[group] = rows = sweep.run(runs=options.runs)
            tables[group] = sweep.table(rows)
        print(tables[group], flush=True)
        options.out.write_text(report.to_json(about, results), encoding="utf-8")


if __name__ == "__main__":
    main()
