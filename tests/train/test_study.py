"""Studies: run, stopped by the budget, continued, reported; and their statistics by hand."""

import dataclasses
import itertools
import json
import math
import shutil
import signal
import types

import jax
import pytest

import adahop_jax as ah
from tests.train.tiny import TINY, write_text
from train import study, study_patterns, study_report, study_watch
from train.compare import Gap
from train.configs import UserError
from train.log import Diverged, read_metrics
from train.model import next_token_loss
from train.study_config import Change, changed_plan, load_study

pytestmark = [
    pytest.mark.standard_promotion,  # Optax' AdamW, Flax's norms
    pytest.mark.usefixtures("compile_cache"),
]


def write_study(folder, recipes=("bf16", "iht"), seeds=(0, 1), more="", **options):
    """Writes folder/results/tiny/study.toml, on a text in `folder`."""
    given = {**TINY, "eval_every": 4, "data": str(write_text(folder)), **options}
    file = folder / "results/tiny/study.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {
        "bf16": '{ quant = "bf16" }',
        "iht": '{ quant = "iht" }',
        "adahop": '{ quant = "adahop", level = 1, calibration_steps = 3 }',
        "halo": '{ quant = "halo" }',
        "fwd in BF16": '{ quant = "adahop", of = "adahop", full = ["fwd"] }',
    }
    lines = ["[options]", *(f"{name} = {json.dumps(value)}" for name, value in given.items())]
    lines += ["[recipes]", *(f'"{name}" = {known[name]}' for name in recipes)]
    lines += ["[[runs]]", f"recipes = {list(recipes)}", f"seeds = {list(seeds)}"]
    lines += ["[report]", "average_last = 2", more]
    file.write_text("\n".join(lines))
    return file


def arguments(file, *more):
    folder = file.parents[2]
    return [str(file), "--scratch", str(folder / "runs"), "--cache-dir", str(folder), *more]


def summaries(file):
    found = sorted(file.parent.glob("runs/*/summary.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def after(monkeypatch, looks):
    """Makes the time run out when the study has looked at the clock so many times."""
    ticks = itertools.chain([0.0] * looks, itertools.repeat(1e9))
    monkeypatch.setattr(study, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study of two recipes and two seeds, stopped by its budget amid the second run, finished."""
    folder = tmp_path_factory.mktemp("done")
    file = write_study(folder)
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        # Once at the start, for each of two runs, and after each of 8 and of 5 steps.
        after(patch, 1 + 2 + 8 + 5)
        assert study.main(arguments(file, "--minutes", "1")) == 0
    stopped = set(summaries(file)), sorted(p.name for p in (folder / "runs/tiny").iterdir())
    with jax.numpy_dtype_promotion("standard"):
        assert study.main(arguments(file)) == 0
    return file, stopped


def test_budget_saves_the_run_under_way_and_starts_no_other(done):
    _, (finished, scratch) = done
    assert finished == {"bf16-seed0"}
    assert scratch == ["bf16-seed0", "iht-seed0"]


def test_every_run_leaves_what_tables_are_made_of(done):
    file, _ = done
    found = summaries(file)
    assert set(found) == {"bf16-seed0", "bf16-seed1", "iht-seed0", "iht-seed1"}
    for name, summary in found.items():
        folder = file.parent / "runs" / name
        assert {path.name for path in folder.iterdir()} == {
            "config.json",
            "plan.json",
            "metrics.jsonl",
            "summary.json",
        }
        lines = read_metrics(folder / "metrics.jsonl")
        assert [line["step"] for line in lines if "loss" in line] == list(range(8))
        assert {x["runs_on"] for x in lines if "runs_on" in x} == {summary["runs_on"]}
        held = [(line["step"], line["heldout"]) for line in lines if "heldout" in line]
        assert [(line["step"], line["recipe"]) for line in summary["heldout"]] == held
        assert [step for step, _ in held] == [4, 8]
        assert summary["tokens"] == 8 * 4 * 16 and summary["tokens_per_second"] > 0
        assert summary["heldout_tokens"] == 64
    bf16, iht = found["bf16-seed0"], found["iht-seed0"]
    assert (bf16["share_in_bf16"], iht["share_in_bf16"]) == (1.0, 0.0)
    assert (bf16["runs_on"], iht["runs_on"]) == ("dtype", "reference")
    assert iht["kept_bytes"] < bf16["kept_bytes"]
    assert bf16["parameters"] == iht["parameters"] > 1_000
    # Checkpoints are neither among the results nor kept.
    assert not list(file.parents[2].rglob("checkpoints"))


def test_gaps_of_the_table_are_those_of_the_metrics(done):
    file, _ = done
    found = summaries(file)
    ends = {name: summary["heldout"][-1] for name, summary in found.items()}
    gaps = [ends[f"iht-seed{i}"]["recipe"] - ends[f"bf16-seed{i}"]["full"] for i in (0, 1)]
    mean, error = sum(gaps) / 2, abs(gaps[0] - gaps[1]) / 2
    readme = (file.parent / "README.md").read_text()
    assert f"| iht | 2 | {sum(ends[f'iht-seed{i}']['recipe'] for i in (0, 1)) / 2:.4f} | " in readme
    assert f"| {mean:+.4f} ± {error:.4f} | 1 | " in readme
    assert "Not run yet" not in readme and "| bf16 | " in readme
    assert (file.parent / "gaps.png").stat().st_size > 5_000


def test_shared_device_states_no_speed(tmp_path):
    file = write_study(tmp_path, recipes=("bf16",), seeds=(0,))
    assert study.main(arguments(file, "--shared-device")) == 0
    (summary,) = summaries(file).values()
    assert summary["tokens_per_second"] is None
    row = (file.parent / "README.md").read_text().partition("| bf16 | 1 |")[2].partition("\n")[0]
    assert "| 100.00% | - |" in row


def test_finished_runs_are_not_run_again(done, monkeypatch):
    file, _ = done
    monkeypatch.setattr(study.lm, "train", lambda *_, **__: pytest.fail("ran again"))
    assert study.main(arguments(file)) == 0


def test_report_keeps_what_stands_above_its_mark(done, monkeypatch):
    file, _ = done
    readme = file.parent / "README.md"
    below = readme.read_text().partition(study_report.MARK)[2]
    readme.write_text(f"# Mine\n\nWords.\n\n{study_report.MARK}\n\nold")
    monkeypatch.setattr(study.lm, "train", lambda *_, **__: pytest.fail("ran again"))
    assert study.main(arguments(file, "--report")) == 0
    assert readme.read_text() == f"# Mine\n\nWords.\n\n{study_report.MARK}{below}"


def test_changed_configuration_is_refused(done, tmp_path, capsys):
    file, _ = done
    shutil.copytree(file.parent / "runs", tmp_path / "results/tiny/runs")
    changed = write_study(tmp_path, lr=1e-4)
    assert study.main(arguments(changed)) == 2
    error = capsys.readouterr().err
    assert "bf16-seed0 was made with another configuration: optim is" in error
    assert "give the recipe another name" in error


def test_results_that_were_lost_are_taken_from_scratch(done, tmp_path, monkeypatch):
    file, _ = done
    write_study(tmp_path)
    shutil.copytree(file.parents[2] / "runs", tmp_path / "runs")
    monkeypatch.setattr(study.lm, "train", lambda *_, **__: pytest.fail("ran again"))
    moved = tmp_path / "results/tiny/study.toml"
    assert study.main(arguments(moved)) == 0
    assert summaries(moved) == summaries(file)


def test_ctrl_c_saves_the_run_and_ends_the_study(tmp_path, monkeypatch, capsys):
    file = write_study(tmp_path)
    batch = study.lm.next_batch

    def interrupting(corpus, config, *, step):
        if step == 5:
            signal.raise_signal(signal.SIGINT)
        return batch(corpus, config, step=step)

    monkeypatch.setattr(study.lm, "next_batch", interrupting)
    assert study.main(arguments(file)) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs/tiny").iterdir()] == ["bf16-seed0"]
    assert (tmp_path / "runs/tiny/bf16-seed0/checkpoints/6").is_dir()


def test_only_named_runs(tmp_path, capsys):
    file = write_study(tmp_path)
    assert study.main(arguments(file, "--only", "iht-seed1")) == 0
    assert set(summaries(file)) == {"iht-seed1"}
    readme = (file.parent / "README.md").read_text()
    assert "Not run yet: bf16-seed0, iht-seed0, bf16-seed1." in readme
    assert study.main(arguments(file, "--only", "iht-seed7")) == 2
    assert "no run is named 'iht-seed7'" in capsys.readouterr().err


@pytest.mark.slow
def test_plan_of_another_run_changed(tmp_path):
    file = write_study(tmp_path, recipes=("adahop", "fwd in BF16"), seeds=(0,))
    assert study.main(arguments(file)) == 0
    plans = [
        ah.Plan.load(file.parent / "runs" / name / "plan.json")
        for name in ("adahop-seed0", "fwd-in-BF16-seed0")
    ]
    for (path, one), (_, other) in zip(*plans, strict=True):
        assert other.fwd.is_full and not one.fwd.is_full, path
        assert (one.dgrad, one.wgrad) == (other.dgrad, other.wgrad)
    assert study.main(arguments(file)) == 0  # and its configuration is taken for the same


WATCH = """
[watch]
runs = ["adahop-seed0"]
points = 2
batches = 3
error_tokens = 32
"""


@pytest.mark.slow
def test_watched_run_is_labelled_along_the_way_and_measured_at_its_end(tmp_path):
    file = write_study(tmp_path, recipes=("adahop",), seeds=(0, 1), more=WATCH, accumulate=2)
    assert study.main(arguments(file)) == 0
    folders = [file.parent / f"runs/adahop-seed{seed}" for seed in (0, 1)]
    lines = [read_metrics(folder / "metrics.jsonl") for folder in folders]
    seen = {line["step"]: line["patterns"] for line in lines[0] if "patterns" in line}
    assert list(seen) == [4, 8] and not any("patterns" in line for line in lines[1])
    plan = ah.Plan.load(folders[0] / "plan.json")
    for votes in seen.values():
        assert len(votes) == 3
        assert all(vote.keys() == set(plan.paths) for vote in votes)
    measured = json.loads((folders[0] / "errors.json").read_text())
    assert {row["path"] for row in measured} == set(plan.paths)
    assert all(row["pair"].count("-") == 1 and row["error"] < 1 for row in measured)
    text = (file.parent / "patterns.md").read_text()
    assert text.count("## ") == 1 and "| X column | " in text and "| dY | " in text
    for name in ("patterns", "shares", "errors"):
        assert (file.parent / f"{name}-adahop-seed0.png").stat().st_size > 5_000
        assert f"({name}-adahop-seed0.png)" in text


def test_labels_along_the_way_are_those_of_calibration(tmp_path):
    """A run of one layer, labelled by hand on the same held-out batches."""
    file = write_study(tmp_path, recipes=("adahop",), seeds=(0,), more=WATCH, heldout_batches=2)
    loaded = load_study(file)
    job = study.lm.prepare(
        dataclasses.replace(loaded.runs[0].options, run_dir=str(tmp_path / "x"), accumulate=2)
    )
    params = study.lm.init_state(job.model, job.config).params
    look = study_watch.watch_of(loaded, loaded.runs[0])[4]
    got = look(job, params, 4)["patterns"]
    loss_fn, key = next_token_loss(job.model), jax.random.key(0)
    statistics = [
        ah.observe(loss_fn)({"params": params}, (batch, key))[2]
        for batch in [*job.batches, *job.batches][:2]
    ]
    wanted = ah.label({"params": params}, ah.merge_statistics(*statistics))
    for vote in got:
        assert vote == {path: codes.tolist() for path, codes in wanted.items()}


def _seen(**patterns):
    """A plan of layers whose three tensors show the pattern that each letter stands for."""
    kinds = {"r": ah.Pattern.ROW, "c": ah.Pattern.COLUMN, "n": ah.Pattern.NONE}
    uniform = ah.LayerPlan.uniform(ah.ProductPlan.iht())
    return ah.Plan(
        layers=tuple(
            (
                path,
                dataclasses.replace(
                    uniform, patterns=ah.Patterns(x=kinds[x], w=kinds[w], dy=kinds[dy])
                ),
            )
            for path, (x, w, dy) in patterns.items()
        )
    )


def test_shares_and_agreement_by_hand():
    seen = {
        "plan": _seen(a="crn", b="crr", c="cnr", d="cnr"),
        "10": _seen(a="crn", b="nrr", c="cnn", d="cnr"),
    }
    assert study_patterns.shares(seen["plan"], "dy") == {"none": 0.25, "row": 0.75, "column": 0}
    table = study_patterns.shares_table(seen)
    assert "| X column | 100% | 75% |" in table and "| W row | 50% | 50% |" in table
    assert "| X | 75% |" in (text := study_patterns.stability_table(seen))
    assert "| W | 100% |" in text and "| dY | 75% |" in text


def test_errors_by_pair_by_hand():
    rows = [
        ("fwd", "column-row", "iht", 0.1),
        ("fwd", "column-row", "iht", 0.3),
        ("fwd", "none-none", "iht", 0.5),
        ("fwd", "column-row", "iht+oe(w)", 0.05),
        ("fwd", "column-row", "full", 0.0),
        ("dgrad", "none-none", "iht", 0.7),
    ]
    names = ("product", "pair", "strategy", "error")
    measured = [dict(zip(names, row, strict=True)) for row in rows]
    assert study_patterns.errors_table(measured, "fwd").splitlines()[2:] == [
        "| column-row | 2 | 0.2000 | 0.0500 |",
        "| none-none | 1 | 0.5000 | - |",
    ]


def test_emulated_recipe_says_so(tmp_path):
    file = write_study(tmp_path, recipes=("halo",), seeds=(0,))
    assert study.main(arguments(file, "--commit", "abc")) == 0
    summary = summaries(file)["halo-seed0"]
    assert (summary["runs_on"], summary["share_in_bf16"]) == ("emulated", 0.0)
    assert summary["commit"] and summary["kept_bytes"] > 0
    assert not (file.parent / "runs/halo-seed0/plan.json").exists()
    assert "| emulated |" in (file.parent / "README.md").read_text()


def test_changes_of_a_plan_are_of_the_layers_named():
    uniform = ah.LayerPlan.uniform(ah.ProductPlan.iht())
    plan = ah.Plan(layers=(("block_0/mlp/up", uniform), ("block_1/mlp/up", uniform)))
    change = Change(of="any", full=("fwd", "wgrad"), layers="block_1/.*")
    changed = changed_plan(plan, change)
    assert changed["block_0/mlp/up"] == uniform
    assert [changed["block_1/mlp/up"][p].is_full for p in ("fwd", "dgrad", "wgrad")] == [1, 0, 1]


def test_run_that_diverges_is_reported_and_the_next_one_runs(tmp_path, monkeypatch):
    file = write_study(tmp_path, seeds=(0,))
    train = study.lm.train

    def diverging(options, **more):
        result = train(options, **more)
        if options.quant == "iht":
            raise Diverged("step 5: the loss is nan")
        return result

    monkeypatch.setattr(study.lm, "train", diverging)
    assert study.main(arguments(file)) == 0
    assert summaries(file)["iht-seed0"]["diverged"] == "step 5: the loss is nan"
    assert "| iht | 0, 1 diverged | - |" in (file.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "text, message",
    [
        ("[options", "can't be read"),
        ("[optons]\nx = 1", "'optons' is unknown"),
        ('[[runs]]\nrecipes = ["iht"]\nseeds = [0]', "recipe 'iht' is not under [recipes]"),
        ("[recipes]", "no runs"),
        (
            '[recipes]\na = { lr = 0.1 }\nb = { lr = 0.2 }\n[[runs]]\nrecipes = ["a", "b"]\n'
            "seeds = [0]",
            "differ in optim",
        ),
        ('[recipes]\na = {}\n[[runs]]\nrecipes = ["a", "a"]\nseeds = [0]', "there twice"),
        (
            '[recipes]\na = { of = "b" }\n[[runs]]\nrecipes = ["a"]\nseeds = [0]',
            "has to come before it",
        ),
        ('[recipes]\na = {}\n[[runs]]\nrecipes = ["a"]\nseeds = [0]\n[watch]\nx = 1', "[watch]"),
        ('[recipes]\na = {}\n[[runs]]\nrecipes = ["a"]\n', "recipes and seeds"),
    ],
)
def test_studies_that_make_no_sense(tmp_path, text, message):
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=None) as caught:
        load_study(file)
    assert message in str(caught.value)


def test_options_that_the_trainer_refuses_are_refused_by_name(tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text('[recipes]\na = { quand = 1 }\n[[runs]]\nrecipes = ["a"]\nseeds = [0]')
    with pytest.raises(SystemExit):
        load_study(file)
    assert "--quand" in capsys.readouterr().err


def _row(recipe, mean, error):
    return study_report.Row(
        recipe=recipe,
        seeds=(0, 1, 2),
        diverged=(),
        loss=3.0,
        gap=Gap(mean=mean, error=error),
        steady=None,
        in_full=None,
        losses={},
        along={},
        summary={},
        speed=None,
        share=0.0,
    )


def test_ranks_need_a_difference_of_two_combined_errors():
    rows = [
        _row("a", 0.010, 0.003),
        _row("b", 0.019, 0.004),  # 0.009 behind a, the errors combined are 0.005
        _row("c", 0.021, 0.004),  # 0.011 behind a
        _row("d", 0.100, math.nan),
    ]
    assert study_report.ranks(rows) == {"a": 1, "b": 1, "c": 2, "d": None}


def test_rows_against_numbers_by_hand(tmp_path):
    """Three seeds, three evaluations: gaps at the end, of the last two, and along the way."""
    file = write_study(tmp_path, seeds=(0, 1, 2))
    base = {0: (5.0, 4.0, 3.0), 1: (5.5, 4.5, 3.5), 2: (6.0, 5.0, 4.0)}
    gaps = {0: (0.5, 0.2, 0.10), 1: (0.5, 0.3, 0.12), 2: (0.5, 0.1, 0.08)}
    for seed, losses in base.items():
        for recipe, more in (("bf16", (0, 0, 0)), ("iht", gaps[seed])):
            folder = file.parent / f"runs/{recipe}-seed{seed}"
            folder.mkdir(parents=True)
            held = [
                {"step": i + 1, "recipe": loss + d, "full": loss + d / 2, "unigram": 7.0}
                for i, (loss, d) in enumerate(zip(losses, more, strict=True))
            ]
            summary = {"recipe": recipe, "seed": seed, "diverged": None, "heldout": held}
            summary |= {"data": {"fingerprint": "x"}, "tokens_per_second": 10.0 + seed}
            (folder / "summary.json").write_text(json.dumps(summary | {"share_in_bf16": 0.25}))
    bf16, iht = study_report.read_rows(load_study(file))
    assert (bf16.recipe, iht.recipe) == ("bf16", "iht")
    assert iht.loss == pytest.approx(3.6) and iht.speed == 11.0
    assert (iht.gap.mean, iht.gap.error) == pytest.approx((0.1, 0.02 / math.sqrt(3)))
    # Means of the last two: 0.15, 0.21, 0.09.
    assert (iht.steady.mean, iht.steady.error) == pytest.approx((0.15, 0.06 / math.sqrt(3)))
    assert iht.in_full.mean == pytest.approx(0.05)
    assert [bf16.losses[step] for step in (1, 2, 3)] == pytest.approx([5.5, 4.5, 3.5])
    assert [iht.along[step].mean for step in (1, 2, 3)] == pytest.approx([0.5, 0.2, 0.1])
    summary = json.loads((file.parent / "runs/iht-seed2/summary.json").read_text())
    summary["data"] = {"fingerprint": "y"}
    (file.parent / "runs/iht-seed2/summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match="on different text"):
        study_report.read_rows(load_study(file))
