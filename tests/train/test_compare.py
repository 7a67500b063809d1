"""Comparison of finished runs, on run folders written by hand."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from train.compare import gap, main, read_runs
from train.configs import PRESETS, UserError


def _run(path: Path, *, heldout: float | None, full: float = 2.0, step: int = 300, **changes):
    config = dataclasses.replace(PRESETS["nano"], steps=300, **changes)
    path.mkdir(parents=True)
    (path / "config.json").write_text(config.to_json())
    lines = [{"step": 0, "loss": 5.0}]
    if heldout is not None:
        lines.append({"step": step, "heldout": heldout, "heldout_full": full, "unigram": 3.3})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_gaps_are_paired_by_seed(tmp_path, capsys):
    # The losses of seeds differ by 0.5, the gaps by 0.02: only pairing shows it.
    base, gaps = (1.0, 1.5, 2.0), (0.10, 0.12, 0.08)
    runs = [
        _run(tmp_path / f"b{seed}", heldout=loss, full=loss, quant="bf16", seed=seed)
        for seed, loss in enumerate(base)
    ] + [
        _run(tmp_path / f"m{seed}", heldout=loss + d, full=loss + d / 2, quant="mxfp4", seed=seed)
        for seed, (loss, d) in enumerate(zip(base, gaps, strict=True))
    ]
    assert main([str(run) for run in runs]) == 0
    table = capsys.readouterr().out
    error = 0.02 / math.sqrt(3)
    assert f"| mxfp4 | 3 | 1.6000 | +0.1000 ± {error:.4f} | 1.5500 | +0.0500 ± " in table
    assert "| bf16 | 3 | 1.5000 | - | 1.5000 | - | 3.3000 |" in table


def test_only_seeds_that_both_ran_count(tmp_path):
    runs = read_runs(
        [
            _run(tmp_path / "a", heldout=1.0, full=1.0, quant="bf16", seed=0),
            _run(tmp_path / "b", heldout=1.2, quant="iht", seed=0),
            _run(tmp_path / "c", heldout=9.0, quant="iht", seed=1),
        ]
    )
    found = gap(runs["iht"], runs["bf16"], "recipe", "full")
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert math.isnan(found.error)


def test_levels_and_rounding_are_recipes_of_their_own(tmp_path):
    runs = read_runs(
        [
            _run(tmp_path / "a", heldout=1.0, quant="adahop", level=1),
            _run(tmp_path / "b", heldout=1.0, quant="adahop", level=2),
            _run(tmp_path / "c", heldout=1.0, quant="iht", dy_rounding="stochastic"),
        ]
    )
    assert list(runs) == ["adahop level 1", "adahop level 2", "iht, dY stochastic"]


@pytest.mark.parametrize(
    "others, message",
    [
        ([], "no runs given"),
        ([{"heldout": None}], "has not finished"),
        ([{"heldout": 1.0, "step": 200}], "has not finished"),
        ([{"heldout": 1.0}, {"heldout": 1.0}], "another run has its recipe and seed"),
        ([{"heldout": 1.0}, {"heldout": 1.0, "batch": 32}], "differ in batch"),
    ],
    ids=["none", "no-evaluation", "stopped-early", "twice", "other-batch"],
)
def test_runs_that_cannot_be_compared(tmp_path, capsys, others, message):
    runs = [_run(tmp_path / str(i), **changes) for i, changes in enumerate(others)]
    assert main([str(run) for run in runs]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UserError):
        read_runs(runs)
