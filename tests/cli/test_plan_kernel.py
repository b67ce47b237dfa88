"""Check the line of the kernel that `plan` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import Run
from tests.searches import DONE, write_run_file


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "laplace kernel, bandwidth auto: of 0.015625 to 16 times the median distance"),
        (["model.bandwidth=median"],
         "laplace kernel, bandwidth median: the median distance between 1,000 centers"),
        (["model.bandwidth=2.5"], "laplace kernel, bandwidth 2.5\n"),
        (["model.kernel=linear"], "linear kernel\n"),
        (["model.kernel={kind='polynomial', degree=2, c0=0.5}"],
         "polynomial(degree 2, c0 0.5) kernel\n"),
        (["model.kernel={kind='sum', parts=[{kind='laplace', bandwidth=8.0}, {kind='gaussian', "
          "bandwidth=4.0}], weights=[0.7, 0.3]}"],
         "0.7 laplace(bandwidth 8) + 0.3 gaussian(bandwidth 4) kernel\n"),
        (["model.kernel={kind='sum', parts=['laplace', {kind='gaussian', bandwidth=4}]}",
          "model.bandwidth=2"],
         "laplace + gaussian(bandwidth 4) kernel, other bandwidths 2\n"),
        (["model.kernel={kind='product', parts=['linear', {kind='sum', parts=['laplace', "
          "'gaussian'], weights=[1, 0.5]}]}"],
         "linear * (laplace + 0.5 gaussian) kernel, bandwidth auto: of 0.015625 to 16 times"),
    ],
)  # fmt: skip
def test_plan_describes_the_kernel(
    settings: list[str], line: str, run: Run, tmp_path: Path
) -> None:
    arguments = (word for text in settings for word in ("--set", text))
    code, out, _ = run("plan", write_run_file(tmp_path), *arguments)
    assert code == DONE
    assert f"\n{line}" in out
