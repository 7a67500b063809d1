"""The smallest runs that go through everything."""

import hashlib
from pathlib import Path

from train import lm
from train.options import Options

# Text that repeats itself, so that a few steps show learning; 20 documents, one held out.
LINES = "the cat sat on the mat and the dog lay by the door\n" * 40

TINY = {
    "tokenizer": "bytes",
    "layers": 1,
    "width": 32,
    "heads": 2,
    "kv_heads": 1,
    "mlp_width": 32,
    "seq_len": 16,
    "batch": 4,
    "steps": 8,
    "warmup": 2,
    "eval_every": 100,
    "checkpoint_every": 100,
    "heldout_batches": 1,
    "log_every": 4,
}


def write_text(folder: Path) -> Path:
    """Writes a text file into `folder` and returns its path."""
    file = folder / "text.txt"
    file.write_text(LINES)
    return file


def tiny_options(folder: Path, **options) -> Options:
    """Options of a tiny run in folder/run, on a text in `folder`."""
    given = {"data": str(write_text(folder)), "run_dir": str(folder / "run"), **TINY, **options}
    if given.get("quant", "adahop") in ("adahop", "control") and "plan" not in given:
        given.setdefault("calibration_steps", 3)
    return Options(**given)


def arguments(options: Options) -> list[str]:
    """The same as a command line, without what is not given."""
    words = []
    for name in Options.__dataclass_fields__:
        value = getattr(options, name)
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def contents(folder):
    """Digest of every file below `folder`."""
    files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(argv, capsys, *fragments):
    """Runs the command line; checks the exit code and the message's parts."""
    assert lm.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    assert [part for part in fragments if part not in error] == [], error
