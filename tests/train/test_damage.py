"""Files damaged or changed meanwhile, and runs that ended too early: said, never guessed."""

import json
import shutil

import numpy as np
import pytest

import adahop_jax as ah
from tests.train.tiny import arguments, contents, refused, tiny_options
from train import compare, lm
from train.checkpoint import fingerprint
from train.data import Corpus
from train.log import read_metrics

pytestmark = pytest.mark.standard_promotion  # Optax' AdamW, Flax's norms


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert lm.main(arguments(tiny_options(folder, quant="bf16", steps=4))) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def _resume(run):
    return ["--resume", "--run-dir", str(run)]


def _largest_file(run):
    files = [path for path in (run / "checkpoints").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def _cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [_cut, _flip, lambda file: file.write_bytes(b""), lambda file: file.unlink()],
    ids=["cut", "flipped-bit", "empty", "missing"],
)
def test_damaged_checkpoint_is_not_restored(damage, run, capsys):
    damage(_largest_file(run))
    before = contents(run)
    refused(_resume(run), capsys, "checkpoints/4", "is missing or was changed", "remove it")
    assert contents(run) == before


@pytest.mark.parametrize(
    "name, value",
    [
        ("quant", "foo"),
        ("quant", ["x"]),
        ("steps", 4.0),
        ("seed", True),
        ("data", 5),
        ("tokenizer", None),
        ("layers", 1.0),
        ("dtype", "int8"),
        ("norm_eps", "a"),
        ("lr", "1e-3"),
    ],
    ids=str,
)
def test_configuration_edited_by_hand(name, value, run, capsys):
    file = run / "config.json"
    config = json.loads(file.read_text())
    part = next(p for p in (config, config["model"], config["optim"]) if name in p)
    part[name] = value
    file.write_text(json.dumps(config))
    refused(_resume(run), capsys, "config.json", f"{name} is {value!r}")


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe", b"[1]", b'{"loss": 1}', b'{"step": "a"}'], ids=repr
)
def test_damaged_metrics(line, run, capsys):
    file = run / "metrics.jsonl"
    file.write_bytes(line + b"\n" + file.read_bytes())
    refused(_resume(run), capsys, "metrics.jsonl, line 1", "remove the line")
    assert compare.main([str(run)]) == 2
    assert "metrics.jsonl, line 1" in capsys.readouterr().err


def test_metrics_cut_short_by_the_end_of_a_run_are_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    assert read_metrics(file) == [{"step": 0, "loss": 1.0}]


def test_finished_run_without_metrics_resumes(run):
    (run / "metrics.jsonl").unlink()
    assert lm.main(_resume(run)) == 0


def test_fingerprint_sees_every_token():
    def corpus(tokens):
        return Corpus(train=tokens, heldout=tokens[:5], vocab_size=9, description="")

    tokens = np.zeros(1_000_000, np.uint16)
    changed = tokens.copy()
    changed[500_000] = 1
    assert fingerprint(corpus(tokens)) == fingerprint(corpus(tokens.copy()))
    assert fingerprint(corpus(tokens)) != fingerprint(corpus(changed))


def test_run_that_ended_before_its_first_checkpoint_starts_again(run, finished, capsys):
    shutil.rmtree(run / "checkpoints")
    refused(_resume(run), capsys, "holds no checkpoint", "start it again without --resume")
    other = tiny_options(run.parent, quant="bf16", steps=5)
    refused(arguments(other), capsys, "is not empty and holds no checkpoint", "remove it")
    same = tiny_options(run.parent, quant="bf16", steps=4, data=str(finished / "text.txt"))
    assert lm.main(arguments(same)) == 0


@pytest.fixture
def plan_file(tmp_path):
    options = tiny_options(tmp_path, steps=4, level=1)
    job = lm.prepare(options)
    iht = ah.LayerPlan.uniform(ah.ProductPlan.iht())
    plan = ah.Plan(layers=tuple((layer.path, iht) for layer in job.layers), level=1)
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_plan_file_decides_the_level_and_leaves_its_digest(plan_file):
    job = lm.prepare(tiny_options(plan_file.parent, plan=str(plan_file)))
    assert job.config.level == 1
    assert compare.recipe_name(job.config) == f"adahop level 1, plan {job.config.plan}"
    plan = ah.Plan.load(plan_file)
    ah.Plan(layers=plan.layers, level=2).save(plan_file)
    other = lm.prepare(tiny_options(plan_file.parent, plan=str(plan_file)))
    assert (other.config.level, other.config.plan != job.config.plan) == (2, True)


@pytest.mark.parametrize("level", [2, 3])
def test_plan_file_of_another_level_than_asked_for(plan_file, capsys, level):
    options = tiny_options(plan_file.parent, plan=str(plan_file), level=level)
    refused(arguments(options), capsys, f"the plan is of level 1, and --level is {level}")


def test_plan_that_lacks_layers_names_them_all(plan_file, capsys):
    plan = ah.Plan.load(plan_file)
    ah.Plan(layers=(*plan.layers[2:], ("spare", plan.layers[0][1]))).save(plan_file)
    missing = [path for path, _ in plan.layers[:2]]
    options = tiny_options(plan_file.parent, plan=str(plan_file))
    refused(arguments(options), capsys, *missing, "entries that no layer uses: spare")


def test_token_file_takes_its_vocabulary_from_the_option(tmp_path, capsys):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "ids.u16")
    given = {"data": str(tmp_path / "ids.u16"), "quant": "bf16"}
    refused(
        arguments(tiny_options(tmp_path, **given, vocab_size=300)),
        capsys,
        "token 300 is 300",
        "raise it with --vocab-size",
    )
    assert lm.prepare(tiny_options(tmp_path, **given, vocab_size=2000)).corpus.vocab_size == 2000


@pytest.mark.parametrize(
    "words, message",
    [
        ({"tokenizer": "bytes", "vocab_size": 512}, "--vocab-size is the size of a BPE to train"),
        ({"dtype": "float16"}, "--dtype float16 is not to be had on a CPU"),
    ],
    ids=["vocabulary-of-bytes", "float16-on-cpu"],
)
def test_options_that_would_do_nothing_or_fail_later(words, message, tmp_path, capsys):
    refused(arguments(tiny_options(tmp_path, **words)), capsys, message)
    assert not (tmp_path / "run").exists()
