"""What can be told from the arguments before they are parsed, and what is written for a shell."""

from __future__ import annotations

import shlex

import pytest

from nccltune.cli.invocation import Invocation


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("search --trials 3", "search"),
        ("--json search", "search"),
        ("profile show x", "profile show"),
        ("recording --json list", "recording list"),
        ("recording", "recording"),
        ("", ""),
        ("search -- python -m sglang.launch_server", "search"),
    ],
)
def test_command_is_the_verb_as_the_envelope_names_it(typed: str, command: str) -> None:
    assert Invocation.from_arguments(shlex.split(typed)).command == command


def test_json_counts_only_before_the_launch_command() -> None:
    assert Invocation.from_arguments(["search", "--json", "--", "x"]).wants_json
    assert not Invocation.from_arguments(["search", "--", "x", "--json"]).wants_json


def test_stray_launch_is_seen_only_before_the_two_dashes() -> None:
    launch = ["python", "-m", "sglang.launch_server"]

    assert Invocation.from_arguments(["search", *launch]).has_stray_launch
    assert not Invocation.from_arguments(["search", "--", *launch]).has_stray_launch


def test_format_again_adds_flags_before_the_launch_command_and_quotes() -> None:
    invocation = Invocation.from_arguments(
        ["search", "--try", "NCCL_THREAD_THRESHOLDS=8 8", "--", "sglang", "serve"]
    )

    again = invocation.format_again("--resume")

    assert again == "nccltune search --try 'NCCL_THREAD_THRESHOLDS=8 8' --resume -- sglang serve"


def test_format_again_repeats_no_flag_and_replaces_values() -> None:
    typed = ["search", "--trials", "40", "--resume", "--seed=1", "--trials=50"]

    again = Invocation.from_arguments(typed).format_again("--resume", trials=80)

    assert again == "nccltune search --resume --seed=1 --trials 80"
