"""The host of a profile, for people: nothing of Python's shows, whatever the file holds."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import pytest

import nccltune.cli.host_words as host_words
from nccltune.cli import main
from nccltune.cli.host_words import host_facts
from nccltune.profile import Profile
from nccltune.store import save_candidate
from tests.support.command_line import FINGERPRINT

LEAKS = ("None", "True", "False", "[", "]", "{", "}", "'", '"')
NODES = (("X", "NV18", "SYS"), ("NV18", "X", None), ("SYS", None, "X"))
HIDDEN = replace(FINGERPRINT, nccl_version=None, numa_nodes=(0, None), is_partial=True)


def shown(fingerprint: dict[str, Any]) -> dict[str, str]:
    return dict(host_facts(fingerprint))


@pytest.mark.parametrize(
    "fingerprint",
    [
        FINGERPRINT.to_json(),
        HIDDEN.to_json(),
        replace(FINGERPRINT, link_matrix=NODES).to_json(),
        replace(FINGERPRINT, link_matrix=(("X", None), (None, "X"))).to_json(),
        {"link_matrix": 7, "numa_nodes": None, "other": {"a": [True, {"b": None}]}, "empty": []},
        {"link_matrix": [["X", "NV18"], 3], "is_partial": "yes"},
        {"link_matrix": [["X"], ["NV18", None, "X"]]},
    ],
    ids=["whole", "hidden", "mixed", "unknown_links", "nonsense", "half_a_matrix", "ragged"],
)
def test_profile_show_has_nothing_of_python(
    capsys: pytest.CaptureFixture[str], fingerprint: dict[str, Any]
) -> None:
    save_candidate(Profile("mine", {"NCCL_PROTO": "LL"}, fingerprint=fingerprint))

    assert main(["profile", "show", "mine"]) == 0

    text = capsys.readouterr().out
    assert "Holds for" in text
    assert not [leak for leak in LEAKS if leak in text.split("File")[0]]


def test_links_of_one_kind_are_one_phrase() -> None:
    assert shown(FINGERPRINT.to_json())["links"] == "NV18 between all"


def test_links_of_several_kinds_are_a_matrix_with_its_columns_in_line() -> None:
    links = shown(replace(FINGERPRINT, link_matrix=NODES).to_json())["links"].splitlines()

    assert [line.split() for line in links] == [
        [cell or "unknown" for cell in row] for row in NODES
    ]
    assert links[0].index("NV18") == links[1].index("X") == links[2].index("unknown")


def test_one_gpu_has_no_links() -> None:
    assert shown({"link_matrix": [["X"]]})["links"] == "none: one GPU"


def test_hidden_facts_are_mentioned_only_where_there_are_any() -> None:
    whole, partial = shown(FINGERPRINT.to_json()), shown(HIDDEN.to_json())

    assert "hidden" not in whole
    assert not any("partial" in name for name in (*whole, *partial))
    assert "could not be read" in partial["hidden"]


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(host_words).failed == 0
