"""The command line of the benchmark's studies."""

from __future__ import annotations

import pytest

from bench_runs import bench


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["experts", "--models", "gpt-5"], "--models: gpt-5: choose from qwen3-235b"),
        (["attention", "--models", "gpt-5"], "--models: gpt-5: choose from llama-3-8b"),
        (["programs"], "argument study: invalid choice: 'programs'"),
    ],
    ids=str,
)
def test_studies_say_what_is_allowed(argv, message, capsys):
    with pytest.raises(SystemExit):
        bench("study").main([*argv, "--device", "cpu"])
    assert message in capsys.readouterr().err
