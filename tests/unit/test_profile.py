from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from nccltune.envvars import CATALOGUE, SEARCHED_NAMES, find_conflict, search_domain
from nccltune.errors import FileError, UsageProblem
from nccltune.profile import SCHEMA, Profile, check_name, format_profile, parse_profile

PATH = Path("/srv/profiles/mine.json")

TEXT = """\
{
  "schema": "nccltune.profile/1",
  "name": "mine",
  "settings": {
    "NCCL_PROTO": "allreduce:LL",
    "NCCL_NTHREADS": "256"
  }
}
"""


def refusal_of(text: str) -> FileError:
    with pytest.raises(FileError) as refusal:
        parse_profile(text, PATH)
    message = str(refusal.value)
    assert message.startswith("/srv/profiles/mine.json")
    assert "\n" not in message
    return refusal.value


def with_keys(**changes: Any) -> str:
    document = json.loads(TEXT)
    document.update(changes)
    return json.dumps(document, indent=2)


def test_parse_profile_with_the_least_that_is_needed() -> None:
    profile = parse_profile(TEXT, PATH)

    assert profile == Profile("mine", {"NCCL_PROTO": "allreduce:LL", "NCCL_NTHREADS": "256"})


def test_parse_profile_with_everything() -> None:
    text = with_keys(
        note="why",
        source="gpus",
        created_at="2026-11-29T14:00:00+02:00",
        fingerprint={"gpus": ["H200", "H200"]},
        measured={"score_ratio": 0.87},
        bands=[],
    )

    profile = parse_profile(text, PATH)

    assert profile.note == "why"
    assert profile.source == "gpus"
    assert profile.created_at == datetime(2026, 11, 29, 12, tzinfo=UTC)
    assert profile.fingerprint == {"gpus": ["H200", "H200"]}
    assert profile.measured == {"score_ratio": 0.87}
    assert profile.bands == ()


@pytest.mark.parametrize(
    ("old", "new", "line", "code", "reason"),
    [
        (
            '"256"',
            "256",
            6,
            "bad_value",
            'not in quotes, and environment values are text; write "256"',
        ),
        ('"256"', "true", 6, "bad_value", 'write "1"'),
        ('"256"', "null", 6, "bad_value", "leave the variable out"),
        ('"256"', '["256"]', 6, "bad_value", "one text in quotes"),
        ('"256"', '"100"', 6, "bad_value", "the maximum, 512"),
        ('"256"', '"4M"', 6, "bad_value", "reads 4"),
        ('"256"', r'"\"256\""', 6, "bad_value", "write 256"),
        ('"256"', "\"'256'\"", 6, "bad_value", "write 256"),
        ('"256"', r'"256\nLD_PRELOAD=x"', 6, "bad_value", "line break"),
        ('"allreduce:LL"', '"LL # small"', 5, "bad_value", "comment"),
        ("NCCL_NTHREADS", "NCCL_NTHREAD", 6, "unknown_variable", "did you mean NCCL_NTHREADS"),
        ("NCCL_NTHREADS", "LD_PRELOAD", 6, "unknown_variable", "not an NCCL variable"),
        ("NCCL_NTHREADS", "NCCL_DEBUG", 6, "forbidden_variable", "never set"),
        ("NCCL_NTHREADS", "NCCL_PROTO", 6, "bad_file", "appears twice"),
        ("profile/1", "profile/2", 2, "unknown_schema", '"nccltune.profile/1" only'),
        ('"nccltune.profile/1"', "1", 2, "unknown_schema", "schema 1"),
        ('"mine"', '"../mine"', 3, "bad_name", "no profile name"),
        ('"mine"', "7", 3, "bad_file", "name has to be text"),
        ('"name"', '"nmae"', 3, "bad_file", "did you mean name"),
        ('"settings"', '"setings"', 4, "bad_file", "did you mean settings"),
    ],
)
def test_parse_profile_with_a_mistake_names_line_and_text(
    old: str, new: str, line: int, code: str, reason: str
) -> None:
    text = TEXT.replace(old, new, 1)

    error = refusal_of(text)

    assert error.line == line
    assert error.code == code
    assert reason in str(error)
    assert repr(text.split("\n")[line - 1].strip()) in str(error)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bands": [{"low": 0}]}, "leave the list empty"),
        ({"bands": {}}, "bands has to be a list"),
        ({"fingerprint": "H200"}, "fingerprint has to be an object"),
        ({"measured": []}, "measured has to be an object"),
        ({"note": None}, "note has to be text"),
        ({"source": 3}, "source has to be text"),
        ({"created_at": "yesterday"}, "created_at has to be a moment"),
        ({"created_at": "2026-11-29T12:00:00"}, "created_at has to be a moment"),
        ({"created_at": 1764417600}, "created_at has to be a moment"),
        ({"settings": []}, "settings has to be an object"),
    ],
)
def test_parse_profile_with_a_field_of_another_type_is_refused(
    changes: dict[str, object], reason: str
) -> None:
    error = refusal_of(with_keys(**changes))

    assert reason in str(error)
    assert error.line is not None
    assert error.line > 1


@pytest.mark.parametrize("missing", ["schema", "name", "settings"])
def test_parse_profile_without_a_needed_key_says_which(missing: str) -> None:
    document = json.loads(TEXT)
    del document[missing]

    error = refusal_of(json.dumps(document))

    assert missing in str(error)
    assert error.line == 1


@pytest.mark.parametrize("text", ["[]", '"x"', "3", "null"])
def test_parse_profile_of_other_json_is_refused(text: str) -> None:
    assert "an object in {}" in str(refusal_of(text))


def test_parse_profile_with_settings_that_contradict_names_the_line_of_one() -> None:
    text = TEXT.replace('"NCCL_NTHREADS": "256"', '"NCCL_MIN_CTAS": "9", "NCCL_MAX_CTAS": "8"')

    error = refusal_of(text)

    assert error.line == 6
    assert error.code == "conflict"
    assert "NCCL_MIN_CTAS: above NCCL_MAX_CTAS=8" in str(error)


def test_parse_profile_cut_anywhere_is_refused_with_its_last_line() -> None:
    text = TEXT.rstrip()
    for end in range(len(text)):
        error = refusal_of(text[:end])

        assert error.code == "bad_json"
        assert error.line == text[:end].rstrip().count("\n") + 1


@pytest.mark.parametrize(
    "name", ["a", "h200-2x.nvlink_v2", "0", "a" * 64, "kimi-k2.5", "a.json.bak"]
)
def test_check_name_of_a_plain_name_passes(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "A",
        "-a",
        ".a",
        "a b",
        "a\n",
        "ä",
        "a" * 65,
        "x.json",
    ],
)
def test_check_name_of_a_path_or_file_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem, match="no profile name") as refusal:
        check_name(name)

    assert refusal.value.code == "bad_name"
    assert "\n" not in str(refusal.value)


def test_profile_with_a_naive_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        Profile("a", {}, created_at=datetime(2026, 1, 1))


def test_format_profile_has_a_stable_order_and_ends_with_a_line_break() -> None:
    one = format_profile(Profile("a", {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}, note="grün"))
    other = format_profile(Profile("a", {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, note="grün"))

    assert one == other
    assert one.endswith("}\n")
    assert '  "note": "grün",\n' in one
    assert list(json.loads(one)) == [
        "schema",
        "name",
        "note",
        "source",
        "created_at",
        "settings",
        "fingerprint",
        "measured",
        "bands",
    ]
    assert json.loads(one)["schema"] == SCHEMA


def random_profile(rng: random.Random) -> Profile:
    names = rng.sample(SEARCHED_NAMES, rng.randint(0, len(SEARCHED_NAMES)))
    settings = {name: rng.choice(search_domain(name)) for name in names}
    if find_conflict(settings):
        del settings["NCCL_MIN_CTAS"]
    letters = 'abc "\\/\n\t{}[]:,é漢😀\u2028\x7f'
    zone = timezone(timedelta(hours=rng.randint(-12, 12)))
    moment = datetime.fromtimestamp(rng.uniform(0, 4e9), zone)
    return Profile(
        name="p" + "".join(rng.choices("abz059._-", k=rng.randint(0, 63))),
        settings=settings,
        note="".join(rng.choices(letters, k=rng.randint(0, 40))),
        source=rng.choice(["", "gpus", "recording:h200-2x-shm"]),
        created_at=rng.choice([None, moment]),
        fingerprint=rng.choice([None, {}, {"links": [["NV18"], []], "numa": None}]),
        measured=rng.choice([{}, {"score_ratio": rng.random(), "ci": [0.5, 1e-9, 10**18]}]),
    )


@pytest.mark.parametrize("seed", range(100))
def test_profile_survives_being_written_and_read(seed: int) -> None:
    profile = random_profile(random.Random(seed))

    text = format_profile(profile)
    again = parse_profile(text, PATH)

    assert again == profile
    assert format_profile(again) == text


def test_parse_profile_accepts_every_injectable_variable() -> None:
    settings = {
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_NCHANNELS": "8",
        "NCCL_SYM_NOWIN_ENABLE": "1",
    }

    profile = parse_profile(with_keys(settings=settings), PATH)

    assert profile.settings == settings
    assert all(CATALOGUE[name].choices is None for name in settings)
