"""The README's example runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.standard_promotion  # a user's own arithmetic mixes dtypes
def test_readme_example_calibrates_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["ah"].Plan.load("plan.json") == names["plan"]
    untrained = names["Mlp"]().init(names["jax"].random.key(0), names["batch"])
    assert names["loss"] < 0.9 * names["loss_fn"](untrained, names["batch"])
    assert "up     fwd" in capsys.readouterr().out


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
