"""Whole runs: what they leave, that they repeat, stop, and continue to the same bits."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import pytest

import adahop_jax as ah
from tests.train.tiny import arguments, tiny_options
from train import lm
from train.log import read_metrics

pytestmark = [
    pytest.mark.standard_promotion,  # Optax' AdamW, Flax's norms
    pytest.mark.usefixtures("compile_cache"),
]

STOCHASTIC = {"dy_rounding": "stochastic", "accumulate": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 8 steps, 3 of them calibration, from which the others must not differ."""
    folder = tmp_path_factory.mktemp("finished")
    assert lm.main(arguments(tiny_options(folder, **STOCHASTIC))) == 0
    return folder / "run"


def final_params(run_dir):
    config = lm.RunFolder(run_dir).read_config()
    job = lm.prepare(lm.Options(resume=True, run_dir=str(run_dir)))
    snapshot = lm.resume(job)
    assert snapshot.step == config.steps
    return snapshot.state.params


def losses(run_dir):
    return [
        (line["step"], line.get("loss"), line.get("heldout"))
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def test_run_folder_is_complete(finished):
    assert (finished / "loss.png").stat().st_size > 1000
    assert (finished / "plan.png").stat().st_size > 1000
    assert json.loads((finished / "config.json").read_text())["quant"] == "adahop"
    plan = ah.Plan.load(finished / "plan.json")
    assert len(plan.paths) == 7 and plan["block_0/mlp/up"].patterns is not None
    assert plan["block_0/mlp/up"].dgrad.lhs.rounding == "stochastic"
    lines = read_metrics(finished / "metrics.jsonl")
    phases = [line["phase"] for line in lines if "phase" in line]
    assert phases == ["calibrate"] * 3 + ["train"] * 5
    assert {"heldout", "heldout_full", "unigram"} <= lines[-1].keys()
    assert lines[-1]["heldout"] != lines[-1]["heldout_full"]


@pytest.mark.parametrize("stop", [2, 6], ids=["calibrating", "training"])
def test_stopped_and_resumed_run_has_the_same_bits(finished, tmp_path, capfd, monkeypatch, stop):
    options = tiny_options(tmp_path, **STOCHASTIC)
    batch = lm.next_batch

    def interrupting(corpus, config, *, step):
        if step == stop - 1:
            signal.raise_signal(signal.SIGINT)
        return batch(corpus, config, step=step)

    monkeypatch.setattr(lm, "next_batch", interrupting)
    assert lm.main(arguments(options)) == 130
    printed = capfd.readouterr().out
    assert f"step {stop} is saved" in printed
    command = shlex.split(printed.splitlines()[-1])
    assert command[:3] == ["python", "-m", "train.lm"]
    # What a crash after the checkpoint would leave: a step not saved, and a line cut short.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": stop, "loss": 0.0, "phase": "train"}) + '\n{"step": 7, "lo')

    monkeypatch.setattr(lm, "next_batch", batch)
    assert lm.main(command[3:]) == 0
    assert losses(tmp_path / "run") == losses(finished)
    assert (tmp_path / "run/plan.json").read_text() == (finished / "plan.json").read_text()
    chex.assert_trees_all_equal(final_params(tmp_path / "run"), final_params(finished))


def test_finished_run_resumes_to_nothing(finished):
    before = losses(finished)
    assert lm.main(["--resume", "--run-dir", str(finished)]) == 0
    assert losses(finished) == before


def test_plan_file_skips_calibration(finished, tmp_path):
    plan_file = finished / "plan.json"
    assert lm.main(arguments(tiny_options(tmp_path, plan=str(plan_file), **STOCHASTIC))) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["phase"] for line in lines if "phase" in line] == ["train"] * 8
    assert (tmp_path / "run" / "plan.json").read_text() == plan_file.read_text()


def test_quantised_run_learns_below_unigram_entropy(tmp_path):
    options = tiny_options(tmp_path, quant="iht", steps=80, lr=1e-2, seq_len=32, batch=8)
    result = lm.train(options)
    unigram = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["unigram"]
    assert result.heldout is not None and result.heldout.recipe < 0.7 * unigram


def test_ctrl_c_saves_and_prints_the_command(tmp_path):
    options = tiny_options(tmp_path, quant="bf16", steps=1_000_000, log_every=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "train.lm", *arguments(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(lm.__file__).parents[1],
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and not (metrics.exists() and len(read_metrics(metrics)) > 3):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    step = int(re.search(r"step (\d+) is saved", out).group(1))
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
    assert out.splitlines()[-1].split() == (
        ["python", "-m", "train.lm", "--resume", "--run-dir", str(tmp_path / "run")]
    )


def test_default_run_folder_is_an_unused_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lm.unused_folder("nano").path.as_posix() == "runs/nano"
    (tmp_path / "runs" / "nano").mkdir(parents=True)
    assert lm.unused_folder("nano").path.as_posix() == "runs/nano-2"


def test_initial_state_depends_on_the_seed_alone():
    def params(seed):
        config = lm.resolve(lm.Options(seed=seed, layers=1, width=32), platform="cpu")
        return lm.init_state(lm.Llama(config.model, 257), config).params

    first, other = params(0), params(1)
    chex.assert_trees_all_equal(first, params(0))
    kernels = [tree["block_0"]["attn"]["query"]["kernel"] for tree in (first, other)]
    assert not (kernels[0] == kernels[1]).any()
    assert all(leaf.dtype == jax.numpy.float32 for leaf in jax.tree.leaves(first))
