from __future__ import annotations

import pytest

from nccltune.inject import running
from nccltune.inject.marker import (
    KEEP_ENVIRON,
    MARKER,
    NOTHING_APPLIED,
    OWN_NAMES,
    Marker,
    format_marker,
    parse_marker,
    settings_digest,
)

DIGEST = "0123456789abcdef"


@pytest.mark.parametrize("keys", [(), ("NCCL_ALGO",), ("NCCL_ALGO", "NCCL_PROTO")])
def test_parse_marker_reads_what_format_marker_wrote(keys: tuple[str, ...]) -> None:
    assert parse_marker(format_marker(DIGEST, reversed(keys))) == Marker(DIGEST, keys)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "yes",
        DIGEST,
        f"{DIGEST}:NCCL_ALGO,",
        f"{DIGEST}:nccl_algo",
        f"{DIGEST}:NCCL_ALGO=x",
        f"{DIGEST}0:NCCL_ALGO",
        f"{DIGEST.upper()}:NCCL_ALGO",
        ":NCCL_ALGO",
        NOTHING_APPLIED,
        "none:NCCL_ALGO",
    ],
)
def test_parse_marker_of_what_is_none_of_ours_is_none(text: str | None) -> None:
    assert parse_marker(text) is None


def test_settings_digest_depends_on_settings_alone() -> None:
    one = settings_digest({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"})

    assert one == settings_digest({"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"})
    assert one != settings_digest({"NCCL_PROTO": "LL"})
    assert len(one) == 16


def test_own_names_are_the_two_that_are_set_beside_a_profile() -> None:
    assert {MARKER, KEEP_ENVIRON} == OWN_NAMES


def test_run_names_the_mark_as_every_route() -> None:
    assert (running._MARKER, running._NOTHING_APPLIED) == (MARKER, NOTHING_APPLIED)
