"""Check the help of every command: descriptions of options, and examples that can be parsed."""

from __future__ import annotations

import re
import shlex

import pytest

from streamkern.cli import main
from streamkern.cli.help_text import EXAMPLES
from tests.runs import Run


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_examples_and_option_metavars(name: str, run: Run) -> None:
    code, message, _ = run(name, "-h")
    assert code == 0
    assert message.startswith(f"Usage: streamkern {name} ")
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in message
        program, command, *words = shlex.split(example)
        assert (program, command) == ("streamkern", name)
        main._command(name).make_context(name, words)  # refuses what it does not know
    assert not re.search(r"<\w+|\bINTEGER\b|\bFLOAT\b|\[\[", message)
    for param in main._command(name).params:
        if param.param_type_name == "option" and not param.is_flag:
            assert f"{param.opts[0]} {param.metavar}" in message
