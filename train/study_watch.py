"""Looks at a run along the way: patterns labelled again, and errors of products at its end."""

from train import lm
from train.study_config import Run, Study


def watch_of(study: Study, run: Run) -> lm.Watch:
    """Returns what the study looks at along `run`."""
    return {}
