"""The policy file as docs/deploying.md describes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.cli import main
from nccltune.paths import state_dir
from nccltune.store import Launches, Policy, read_policy
from nccltune.store.policy import POLICY_NAME

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text()
SECTION = PAGE.split("### Which launches get it")[1].split("\n### ")[0]
[EXAMPLE] = re.findall(r"```json\n(.*?)\n```", SECTION, flags=re.DOTALL)


def test_example_is_a_policy_that_says_what_the_text_says() -> None:
    path = state_dir() / POLICY_NAME
    path.write_text(EXAMPLE)
    path.chmod(0o600)

    assert read_policy() == Policy(Launches.SPECULATIVE)


def test_every_word_of_the_file_is_documented() -> None:
    assert f"`{POLICY_NAME}`" in SECTION
    assert f"`{Launches.EAGLE3}`, the default" in SECTION
    assert Policy() == Policy(Launches.EAGLE3)
    assert all(f"`{each}`" in SECTION for each in Launches)


def test_help_of_launch_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    main(["launch", "--help"])

    assert POLICY_NAME in capsys.readouterr().out
