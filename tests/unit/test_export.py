from __future__ import annotations

import random

import pytest

from nccltune.errors import UsageProblem
from nccltune.export import EXPORTS, ExportFormat, export_profile, export_warnings, format_lines
from nccltune.profile import Profile
from tests.support.random_profiles import random_settings, random_text
from tests.support.readers import READERS

PROFILE_COUNT = 200
SHELL_PROFILE_COUNT = 25
"""Each is a process of its own."""

THRESHOLDS = {"NCCL_THREAD_THRESHOLDS": "-2 -2 -2 4 -2 -2"}
TWO_LISTS = {"NCCL_ALGO": "allreduce:Tree;broadcast:Ring"}

each_format = pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)


def count_for(export: ExportFormat) -> int:
    return SHELL_PROFILE_COUNT if export.name == "shell" else PROFILE_COUNT


@each_format
def test_export_of_any_valid_profile_is_read_back_the_same(export: ExportFormat) -> None:
    rng = random.Random(1)
    for _ in range(count_for(export)):
        profile = Profile("any", random_settings(rng), source=random_text(rng))

        found = READERS[export.name](export_profile(profile, export))

        assert found == profile.settings


@each_format
def test_lines_with_any_printable_value_are_read_back_the_same(export: ExportFormat) -> None:
    rng = random.Random(2)
    for _ in range(count_for(export)):
        settings = {f"NCCL_X{i}": random_text(rng) for i in range(rng.randrange(1, 5))}
        if export.name == "nccl-conf":  # its reader complains of what a person would not mean
            settings = {name: _meant(value) for name, value in settings.items()}

        found = READERS[export.name]("\n".join(format_lines(settings, export)) + "\n")

        assert found == settings


def _meant(value: str) -> str:
    return value.replace("#", "").replace('"', "").replace("'", "").strip() or "x"


@each_format
def test_export_of_no_settings_is_read_back_as_none(export: ExportFormat) -> None:
    text = export_profile(Profile("none", {}), export)

    assert READERS[export.name](text) == {}


@each_format
def test_export_says_in_its_head_that_it_is_unconditional(export: ExportFormat) -> None:
    text = export_profile(Profile("mine", THRESHOLDS), export)

    head = [line for line in text.splitlines() if line.startswith("# ")]
    assert text.startswith("# NCCL settings of profile mine of nccltune")
    assert "knows no command and no host" in " ".join(line[2:] for line in head)
    assert all(len(line) <= 100 for line in head)


@each_format
@pytest.mark.parametrize(
    "source", ["recording:a\\", "recording:x\nNCCL_PROTO=LL", "recording:\r", "recording:é"]
)
def test_export_of_a_hostile_source_stays_within_its_comment(
    export: ExportFormat, source: str
) -> None:
    fingerprint = {"gpu_names": [source, 7], "nccl_version": "2.28.9\\\nNCCL_ALGO=Ring"}
    profile = Profile("mine", THRESHOLDS, source=source, fingerprint=fingerprint)

    text = export_profile(profile, export)

    assert READERS[export.name](text) == THRESHOLDS
    assert text.isascii()


@pytest.mark.parametrize(
    ("name", "value"),
    [("LD_PRELOAD", "/tmp/x.so"), ("NCCL_DEBUG", "INFO"), ("NCCL_PROTO", "LL\nLD_PRELOAD=x")],
)
def test_export_refuses_what_no_profile_may_set(name: str, value: str) -> None:
    with pytest.raises(UsageProblem, match=name):
        export_profile(Profile("mine", {name: value}), EXPORTS["docker"])


def test_docker_gets_no_quotes() -> None:
    text = export_profile(Profile("mine", THRESHOLDS | TWO_LISTS), EXPORTS["docker"])

    assert "NCCL_THREAD_THRESHOLDS=-2 -2 -2 4 -2 -2\n" in text
    assert "NCCL_ALGO=allreduce:Tree;broadcast:Ring\n" in text


def test_systemd_gets_quotes_where_a_value_needs_them() -> None:
    lines = list(format_lines({"A": "16", "B": "a b", "C": 'x"\\$`'}, EXPORTS["systemd"]))

    assert lines == ["A=16", 'B="a b"', 'C="x\\"\\\\\\$\\`"']


def test_kubernetes_gets_every_dollar_twice() -> None:
    lines = list(format_lines({"A": "$(B) $$"}, EXPORTS["k8s"]))

    assert lines == ["env:", "  - name: A", '    value: "$$(B) $$$$"']


def test_warnings_name_what_sglang_would_win_against_a_file() -> None:
    profile = Profile("mine", {"NCCL_CUMEM_ENABLE": "1", "NCCL_NTHREADS": "256"})

    (warning,) = export_warnings(profile, EXPORTS["nccl-conf"])

    assert "NCCL_CUMEM_ENABLE" in warning
    assert "NCCL_NTHREADS" not in warning
    assert export_warnings(profile, EXPORTS["docker"]) == ()


@pytest.mark.parametrize(
    ("source", "expected"), [("shared-gpu", "one GPU"), ("recording:h200-2x-shm", "h200-2x-shm")]
)
def test_warnings_say_when_nothing_was_measured_on_a_real_host(source: str, expected: str) -> None:
    profile = Profile("mine", THRESHOLDS, source=source)

    (warning,) = export_warnings(profile, EXPORTS["docker"])

    assert expected in warning
    assert "# Warning:" in export_profile(profile, EXPORTS["docker"])


@pytest.mark.parametrize("source", ["gpus", "shipped", ""])
def test_warnings_are_none_for_what_was_measured(source: str) -> None:
    assert export_warnings(Profile("mine", THRESHOLDS, source=source), EXPORTS["k8s"]) == ()
