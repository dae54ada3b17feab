"""What can be told from the arguments before they are parsed, and what is written for a shell."""

from __future__ import annotations

import os
import shlex
import subprocess

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


@pytest.mark.parametrize(
    ("launch", "shown"),
    [
        (["sglang", "--api-key", "sesame"], "sglang --api-key '***'"),
        (["sglang", "--admin-api-key=sesame"], "sglang '--admin-api-key=***'"),
        (["env", "HF_TOKEN=sesame", "sglang"], "env 'HF_TOKEN=***' sglang"),
        (["sglang", "--api_key", "sesame"], "sglang --api_key '***'"),
        (["sglang", "--max-total-tokens", "9"], "sglang --max-total-tokens 9"),
    ],
)
def test_format_again_tells_no_secret(launch: list[str], shown: str) -> None:
    again = Invocation.from_arguments(["verify", "--", *launch]).format_again("--resume")

    assert again == f"nccltune verify --resume -- {shown}"


def test_format_again_quotes_bytes_that_are_no_text_for_a_shell() -> None:
    words = ["a\udcffb", "it's\udcfe", "two\nlines", "n\u00e9"]

    again = Invocation.from_arguments(["verify", "--", *words]).format_again()

    assert again.isprintable()
    done = subprocess.run(
        ["bash", "-c", f"nccltune() {{ printf '%s\\0' \"$@\"; }}; {again}"],
        capture_output=True,
        check=True,
    )
    assert done.stdout.split(b"\0")[2:-1] == [os.fsencode(word) for word in words]


def test_format_again_repeats_no_flag_and_replaces_values() -> None:
    typed = ["search", "--trials", "40", "--resume", "--seed=1", "--trials=50"]

    again = Invocation.from_arguments(typed).format_again("--resume", trials=80)

    assert again == "nccltune search --resume --seed=1 --trials 80"
