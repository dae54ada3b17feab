from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.errors import FileError
from nccltune.jsontext import parse_json

PATH = Path("/etc/thing.json")

DOCUMENT = """\
{
  "name": "a {tricky} \\" [one]",
  "list": [
    {"x": 1},
    {
      "y": [], "z": {}
    },
    "text"
  ],
  "last": null
}
"""


def test_parse_json_knows_the_line_of_every_key_and_element() -> None:
    document = parse_json(DOCUMENT, PATH)

    assert document.lines == {
        (): 1,
        ("name",): 2,
        ("list",): 3,
        ("list", 0): 4,
        ("list", 0, "x"): 4,
        ("list", 1): 5,
        ("list", 1, "y"): 6,
        ("list", 1, "z"): 6,
        ("list", 2): 8,
        ("last",): 10,
    }


def test_problem_shows_file_line_reason_and_text() -> None:
    document = parse_json(DOCUMENT, PATH)

    problem = document.problem("is odd", "list", 0, "x")

    assert str(problem) == "/etc/thing.json:4: is odd: '{\"x\": 1},'"
    assert problem.line == 4


def test_problem_of_a_missing_key_points_at_its_object() -> None:
    document = parse_json(DOCUMENT, PATH)

    assert document.problem("is missing", "list", 1, "nothing").line == 5
    assert document.problem("is missing", "nothing").line == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"a": 1, "a": 2}', 1),
        ('{\n "a": 1,\n "b": {"a": 1},\n "\\u0061": 2\n}', 4),
        ('[\n {"k": 1,\n "k": 1}]', 3),
    ],
    ids=["same line", "escaped spelling", "nested"],
)
def test_parse_json_with_a_key_twice_names_the_second(text: str, line: int) -> None:
    with pytest.raises(FileError, match="appears twice") as refusal:
        parse_json(text, PATH)

    assert refusal.value.line == line


def test_parse_json_cut_anywhere_is_refused_with_a_line() -> None:
    text = DOCUMENT.rstrip()
    for end in range(len(text)):
        with pytest.raises(FileError) as refusal:
            parse_json(text[:end], PATH)

        assert refusal.value.line == max(text[:end].rstrip().count("\n"), 0) + 1
        assert refusal.value.code == "bad_json"
        assert "\n" not in str(refusal.value)


def test_parse_json_of_a_syntax_error_shows_the_line() -> None:
    with pytest.raises(FileError, match="not JSON") as refusal:
        parse_json('{\n  "a": 1\n  "b": 2\n}\n', PATH)

    assert refusal.value.line == 3
    assert '"b": 2\'' in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ('{"a": NaN}', "cannot be used: NaN"),
        ('{"a": -Infinity}', "cannot be used: -Infinity"),
        ('{"a": ' + "1" * 5000 + "}", "a number that cannot be used"),
        ("[" * 100_000, "too deeply|too early"),
        ('{"a": "\\ud800"}', "half of a"),
    ],
    ids=["empty", "blank", "nan", "infinity", "huge number", "deep", "surrogate"],
)
def test_parse_json_of_what_json_allows_but_we_do_not_is_refused(text: str, reason: str) -> None:
    with pytest.raises(FileError, match=reason) as refusal:
        parse_json(text, PATH)

    assert refusal.value.code == "bad_json"


@pytest.mark.parametrize("depth", [65, 500, 50_000])
def test_parse_json_of_a_deep_valid_document_is_refused(depth: int) -> None:
    with pytest.raises(FileError, match="too deeply"):
        parse_json("[" * depth + "]" * depth, PATH)


def test_parse_json_of_a_reasonably_deep_document_is_read() -> None:
    assert parse_json("[" * 64 + "]" * 64, PATH).lines[(0,) * 63] == 1


def test_check_keys_with_a_typing_error_suggests_the_name() -> None:
    document = parse_json('{\n"setings": {}}', PATH)

    with pytest.raises(FileError, match="did you mean settings") as refusal:
        document.check_keys({"setings": {}}, ["name", "settings"])

    assert refusal.value.line == 2


def test_check_keys_with_a_stranger_lists_what_is_known() -> None:
    document = parse_json('{"zzz": 1}', PATH)

    with pytest.raises(FileError, match="known are name, settings"):
        document.check_keys({"zzz": 1}, ["name", "settings"])
