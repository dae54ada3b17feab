"""How far a profile holds on the GPUs of one launch."""

from __future__ import annotations

import pytest

from nccltune.host.fingerprint import MatchKind
from nccltune.host.match import match_host
from nccltune.sglang.command import parse_launch
from tests.support.command_line import FINGERPRINT

MADE_ON = FINGERPRINT.to_json()
LAUNCH = "sglang serve --model-path /m --tp 2"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--tp 2000000000", 2 * 10**9),
        ("--dp-size 2000000000", 4 * 10**9),
        ("--pp-size 2000000000", 4 * 10**9),
        ("--dp-size 2000000000 --pp-size 2000000000", 8 * 10**18),
        ("--base-gpu-id 999999999", 10**9 + 1),
        ("--gpu-id-step 999999999", 10**9),
        ("--tp 2000000000 --nnodes 2", 10**9),
    ],
)
def test_launch_that_asks_for_any_number_of_gpus_is_answered_at_once(
    flags: str, needed: int
) -> None:
    match = match_host(MADE_ON, FINGERPRINT, parse_launch(f"{LAUNCH} {flags}".split()))

    assert match.kind is MatchKind.FOREIGN
    assert f"needs {needed} GPUs and sees {len(FINGERPRINT.gpu_names)}" in match.reason


@pytest.mark.parametrize("flag", ["--base-gpu-id", "--gpu-id-step"])
def test_number_that_is_none_is_left_to_sglang(flag: str) -> None:
    command = parse_launch([*LAUNCH.split(), flag, "9" * 5000])

    assert match_host(MADE_ON, FINGERPRINT, command).kind is MatchKind.IDENTICAL
