from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.errors import FileError
from nccltune.store import Launches, Policy, read_policy


def write(folder: Path, text: str) -> Path:
    (folder / "policy.json").write_text(text)
    return folder


def test_read_policy_without_a_file_covers_eagle3_alone(tmp_path: Path) -> None:
    assert read_policy(tmp_path) == Policy(Launches.EAGLE3)


@pytest.mark.parametrize("launches", list(Launches))
def test_read_policy_knows_every_kind(tmp_path: Path, launches: Launches) -> None:
    text = f'{{"schema": "nccltune.policy/1", "launches": "{launches}"}}'

    assert read_policy(write(tmp_path, text)) == Policy(launches)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("[]", "an object"),
        ('{"launches": "all"}', "this version reads"),
        ('{\n"schema": "nccltune.policy/1",\n"launches": "some"}', 'policy.json:3: .*"eagle3"'),
        ('{"schema": "nccltune.policy/1", "launches": ["all"]}', '"eagle3"'),
        ('{"schema": "nccltune.policy/1", "launch": "all"}', "did you mean launches"),
    ],
    ids=["empty", "list", "schema", "value", "type", "key"],
)
def test_read_policy_that_is_broken_is_refused_with_its_line(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(FileError, match=reason):
        read_policy(write(tmp_path, text))
