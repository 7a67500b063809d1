"""Bad input: one clear error that says where, what, and what to do; exit code 2; nothing lost."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import tyro

import adahop_jax as ah
from tests.train.tiny import arguments, contents, refused, tiny_options
from train import lm
from train.configs import UserError
from train.log import RunLog
from train.options import Options, resolve
from train.recipes import RECIPES

pytestmark = pytest.mark.standard_promotion  # Optax' AdamW, Flax's norms


OPTIONS = {
    "no steps": ({"steps": 0}, "--steps is 0, wanted 1 or more"),
    "no batch": ({"batch": 0}, "--batch is 0"),
    "negative length": ({"seq_len": -5}, "--seq-len is -5"),
    "batch not of micro-batches": ({"accumulate": 3}, "--batch 4 is not a multiple of"),
    "no learning rate": ({"lr": 0.0}, "--lr is 0.0, wanted a value above 0.0"),
    "learning rate nan": ({"lr": float("nan")}, "--lr is nan"),
    "negative decay": ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
    "no clipping norm": ({"clip": 0.0}, "--clip is 0.0"),
    "negative warm-up": ({"warmup": -1}, "--warmup is -1"),
    "negative seed": ({"seed": -1}, "--seed is -1"),
    "no layers": ({"layers": 0}, "--layers is 0"),
    "width not of heads": ({"width": 33}, "width 33 is not a multiple of heads 2"),
    "heads not of kv heads": ({"heads": 4, "kv_heads": 3}, "heads 4 is not a multiple of kv"),
    "odd head": ({"width": 6}, "width / heads = 3 dims, an odd number"),
    "no calibration": ({"calibration_steps": 0}, "--calibration-steps is 0"),
    "only calibration": ({"calibration_steps": 8}, "leaves nothing to train after 8"),
    "level of bf16": ({"quant": "bf16", "level": 1}, "--level belongs to --quant adahop"),
    "calibration of iht": (
        {"quant": "iht", "calibration_steps": 3},
        "--calibration-steps belongs to --quant adahop",
    ),
    "plan of mxfp4": ({"quant": "mxfp4", "plan": "p"}, "--plan belongs to --quant adahop"),
    "plan and calibration": ({"plan": "p", "calibration_steps": 3}, "--plan skips the calibration"),
    "rounding of bf16": ({"quant": "bf16", "dy_rounding": "stochastic"}, "nothing to round"),
    "rounding of tseng": ({"quant": "tseng", "dy_rounding": "stochastic"}, "nothing to round with"),
    "format of bf16": ({"quant": "bf16", "fwd": "mxfp6"}, "--fwd mxfp6 has no format to change"),
    "format of nvfp4": ({"quant": "nvfp4", "fwd": "mxfp6"}, "choose --quant mxfp4, iht, adahop,"),
    "level of halo": ({"quant": "halo", "level": 1}, "belongs to --quant adahop or control"),
    "text of no name": ({"data": ""}, 'data: "" names nothing'),
    "text with a null byte": ({"data": "a\0b"}, "--data 'a\\x00b' can't be a path"),
    "text with a long name": ({"data": "a" * 300}, "can't be read (File name too long)"),
    "tokenizer with a null byte": ({"tokenizer": "\0.json"}, "--tokenizer '\\x00.json' can't"),
    "missing text": ({"data": "nowhere.txt"}, "nowhere.txt"),
    "unknown tokenizer": ({"tokenizer": "words"}, '"words" is unknown'),
    "missing tokenizer": ({"tokenizer": "no.json"}, "no.json can't be read"),
    "tiny vocabulary": ({"tokenizer": "bpe", "vocab_size": 5}, "BPE of 5 tokens"),
    "sequence longer than the text": ({"seq_len": 100_000}, "too few for one sequence of 100000"),
    "sequence longer than the held-out text": ({"seq_len": 1_000}, "the held-out tokens are 102"),
    "missing plan": ({"plan": "no-plan.json"}, "no-plan.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be(name, tmp_path, capsys):
    options, message = OPTIONS[name]
    refused(arguments(tiny_options(tmp_path, **options)), capsys, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [["--quant", "int8"], ["--level", "4"], ["--preset", "7b"], ["--steps", "many"],
     ["--level", "None"], ["--steps", "None"], ["--lr", "None"]],
    ids=" ".join,
)  # fmt: skip
def test_words_that_the_command_line_does_not_know(words, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        lm.main([*arguments(tiny_options(tmp_path)), *words])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert words[0] in error
    assert "None" not in error or words[1] == "None"
    assert not (tmp_path / "run").exists()


def test_choices_are_offered_in_order_and_without_none(tmp_path, capsys):
    with pytest.raises(SystemExit):
        lm.main([*arguments(tiny_options(tmp_path)), "--quant", "int8"])
    words = re.findall(r"'(\w+)'", capsys.readouterr().err.split("Expected one of")[1])
    assert words == list(RECIPES)


def test_recipe_that_is_not_there_is_refused_from_python_too():
    with pytest.raises(UserError, match="--quant 'int8' is unknown; choose one of bf16, mxfp4"):
        resolve(Options(quant="int8"), platform="cpu")


@pytest.mark.parametrize("platform, dtype", [("cpu", "bfloat16"), ("gpu", "float32")])
def test_attention_that_cannot_run_is_refused(platform, dtype):
    options = Options(attention="cudnn", dtype=dtype)
    with pytest.raises(UserError, match=f"needs a GPU and 16 bits.* {platform} .*{dtype}.* xla"):
        resolve(options, platform=platform)


def test_options_keep_their_types():
    words = "--level 1 --quant mxfp4 --lr 1e-3 --steps 7 --data None".split()
    options = tyro.cli(Options, args=words)
    assert options == Options(level=1, quant="mxfp4", lr=1e-3, steps=7, data="None")


def test_local_dataset_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("set", "./set"):
        given = Options(data=f"hf:{name}:train[:9]").given()
        assert given["data"] == f"hf:{(tmp_path / 'set').resolve()}:train[:9]"
    assert Options(data="hf:some/set:train").given()["data"] == "hf:some/set:train"
    assert Options(data="hf:").given()["data"] == "hf:"


TEXTS = {
    "empty": (b"", "holds no text"),
    "blank": (b" \n\n ", "holds no text"),
    "not UTF-8": (b"caf\xe9 au lait", "byte 3"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_cannot_be_read(name, tmp_path, capsys):
    data, message = TEXTS[name]
    argv = arguments(tiny_options(tmp_path))
    (tmp_path / "text.txt").write_bytes(data)
    refused(argv, capsys, "text.txt", message)
    assert not (tmp_path / "run").exists()


def test_token_beyond_the_vocabulary(tmp_path, capsys):
    file = tmp_path / "ids.u16"
    file.write_bytes(np.array([1, 2, 300] * 100, "<u2").tobytes())
    options = tiny_options(tmp_path, data=str(file), vocab_size=257)
    refused(arguments(options), capsys, "token 2 is 300", "257")


def other_plans():
    plan = ah.Plan.uniform("iht")
    paths = [f"block_0/attn/{n}" for n in ("query", "key", "value", "out")]
    paths += [f"block_0/mlp/{n}" for n in ("gate", "up", "down")]
    layers = tuple((path, plan.default) for path in paths)
    narrow = dataclasses.replace(plan.default, in_features=48, out_features=48)
    return {
        "fewer layers": (ah.Plan(layers=layers[:-1]), "mlp/down"),
        "more layers": (ah.Plan(layers=(*layers, ("block_1/mlp/up", plan.default))), "block_1"),
        "other dims": (ah.Plan(layers=((paths[0], narrow), *layers[1:])), "made for 48"),
    }


@pytest.mark.parametrize("name", other_plans())
def test_plan_of_another_model(name, tmp_path, capsys):
    plan, message = other_plans()[name]
    file = tmp_path / "other.json"
    plan.save(file)
    argv = arguments(tiny_options(tmp_path, plan=str(file)))
    refused(argv, capsys, str(file), message, "calibrate this model")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda text: text.replace('"version": 1', '"version": 99'), "version 99"),
     (lambda text: text[:-20], "not JSON"),
     (lambda text: "[]", "not a plan")],
    ids=["version", "cut short", "something else"],
)  # fmt: skip
def test_plan_file_that_cannot_be_read(change, message, tmp_path, capsys):
    file = tmp_path / "plan.json"
    ah.Plan.uniform("iht").save(file)
    file.write_text(change(file.read_text()))
    refused(arguments(tiny_options(tmp_path, plan=str(file))), capsys, str(file), message)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A short run, for tests that continue copies of it."""
    folder = tmp_path_factory.mktemp("original")
    with_checkpoints = tiny_options(folder, quant="bf16", steps=2, checkpoint_every=1)
    assert lm.main(arguments(with_checkpoints)) == 0
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy of the run, on the same text."""
    shutil.copytree(original / "run", tmp_path / "run")
    return tmp_path / "run"


def test_new_run_in_a_used_folder(run, original, capsys):
    before = contents(run)
    options = dataclasses.replace(tiny_options(original), run_dir=str(run))
    refused(arguments(options), capsys, "is not empty", "--resume", "--run-dir")
    assert contents(run) == before


def test_run_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("notes")
    refused(arguments(tiny_options(tmp_path)), capsys, "is a file")
    assert (tmp_path / "run").read_text() == "notes"


def test_resume_without_a_folder(capsys):
    refused(["--resume"], capsys, "--resume needs the --run-dir")


def test_resume_of_nothing(tmp_path, capsys):
    argv = ["--resume", "--run-dir", str(tmp_path / "none")]
    refused(argv, capsys, "holds no run to resume", "config.json")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--width", "64"], "--width 64 (the run has 32)"),
     (["--quant", "adahop"], "--quant adahop (the run has bf16)"),
     (["--seed", "7", "--lr", "1"], "--seed 7 (the run has 0); --lr 1.0"),
     (["--plan", "plan.json"], "leave out --plan")],
    ids=["width", "quant", "two", "plan"],
)  # fmt: skip
def test_resume_as_another_run(words, message, run, capsys):
    before = contents(run)
    refused(["--resume", "--run-dir", str(run), *words], capsys, message)
    assert contents(run) == before


def damage_config(run):
    (run / "config.json").write_text('{"preset": "nano"}')


def widen_config(run):
    config = json.loads((run / "config.json").read_text())
    config["model"]["width"] = 64
    (run / "config.json").write_text(json.dumps(config))


def drop_checkpoints(run):
    shutil.rmtree(run / "checkpoints")


def damage_checkpoint(run):
    for file in (run / "checkpoints" / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00" * 10)


def change_plan(run):
    ah.Plan.uniform("iht").save(run / "plan.json")


def drop_plan(run):
    (run / "plan.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(damage_config, "not a run configuration"),
     (widen_config, "config.json was changed since"),
     (drop_checkpoints, "holds no checkpoint"),
     (damage_checkpoint, "it is damaged: remove it"),
     (change_plan, "plan.json was changed since"),
     (drop_plan, "plan.json")],
)  # fmt: skip
def test_resume_of_a_spoilt_run(spoil, message, run, capsys):
    spoil(run)
    before = contents(run)
    refused(["--resume", "--run-dir", str(run)], capsys, str(run), message)
    assert contents(run) == before


def test_resume_on_other_text(run, original, capsys):
    text = original / "text.txt"
    whole = text.read_bytes()
    text.write_bytes(whole.replace(b"cat", b"cow"))
    try:
        refused(["--resume", "--run-dir", str(run)], capsys, "the run was on other text")
    finally:
        text.write_bytes(whole)


def test_diverged_run_says_so_and_keeps_its_last_checkpoint(tmp_path):
    config = resolve(tiny_options(tmp_path), platform="cpu")
    metrics = {"loss": np.float32(np.nan), "grad_norm": np.float32(1), "lr": np.float32(1)}
    with RunLog(tmp_path / "metrics.jsonl", config, start=0) as log:
        with pytest.raises(UserError, match="step 0: the loss is nan.*lower --lr"):
            log.step(0, phase="train", metrics=metrics)
