from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from nccltune.errors import FileError
from nccltune.host.fingerprint import Fingerprint
from nccltune.profile import Profile
from nccltune.verify.boot_data import boot_from_json, boot_to_json
from nccltune.verify.model import Arm, Boot, Chunk, RankState, Run, Seen, Stream
from nccltune.verify.record import (
    Problem,
    VerifyRecord,
    load,
    newest_records,
    save,
    verifies_dir,
)
from nccltune.verify.resuming import telling
from nccltune.verify.sameness import hidden

STREAM = Stream(
    prompt_tokens=31,
    tokens=6,
    duration_s=0.75,
    chunks=(Chunk(0.123456, 2), Chunk(0.25, 4), Chunk(0.5, 6)),
    verify_count=3,
    accept_length=2.0,
    accept_rate=0.5,
    accept_by_position=(1, 2, 0),
    cached_tokens=1,
)
PLAIN = replace(
    STREAM, verify_count=None, accept_length=None, accept_rate=None, accept_by_position=()
)
SEEN = Seen(
    ranks={"TP0": {"NCCL_PROTO": RankState.IN_EFFECT}, "TP1": {"NCCL_PROTO": RankState.LOST}},
    is_nccl_on_path=False,
    path_reason="custom all-reduce",
    is_simulated_acceptance=True,
    version="0.5.15.post1",
    server_info={"tp_size": 2, "speculative_num_steps": None},
)
BOOT = Boot(
    arm="folk",
    position=1,
    started_at="2026-11-29T12:00:00+00:00",
    start_s=61.5,
    runs=(Run((STREAM, PLAIN), 0.8), Run((STREAM,), 0.9)),
    ttft_short_ms=(12.5, 13.0),
    ttft_long_ms=(99.0,),
    seen=SEEN,
)
RECORD = VerifyRecord(
    id="20261129-120000-7",
    created_at="2026-11-29T12:00:00+00:00",
    launch=("sglang", "serve", "m"),
    arms=(
        Arm("default", ("sglang", "serve", "m"), num_steps=2),
        Arm("folk", ("sglang", "serve", "m"), Profile("folk", {"NCCL_PROTO": "LL"}), note="so"),
    ),
    load={"run_count": 2, "tokens": 6, "deadline_s": 600.0},
    boot_total=8,
    boots=(replace(BOOT, arm="default", position=0), BOOT),
    fingerprint=Fingerprint(("H200",), ("GPU-1",), "580.1", None, (("X",),), (None,), 1),
    flags={"default": {"tp_size": ("2",), "enable_metrics": ()}, "folk": {"tp_size": ("2",)}},
    sglang_version="0.5.15.post1",
    environ={"NCCL_DEBUG": "WARN"},
    problems=(Problem("folk", 2, "server_died", "boot 3 of 8: it died", "/x/02.log"),),
    notes=("GPU memory is not watched",),
    judgement={"verdict": "inconclusive", "effect_pct": 1.5},
)


def test_boot_comes_back_as_it_was() -> None:
    text = json.dumps(boot_to_json(BOOT), allow_nan=False)

    assert boot_from_json(json.loads(text)) == BOOT


def test_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(RECORD, tmp_path)

    assert path == tmp_path / "verifies" / "20261129-120000-7.json"
    assert load(path) == RECORD
    bare = replace(RECORD, id="b", fingerprint=None, boots=(), problems=(), url="http://h:1")
    assert load(save(bare, tmp_path)) == bare


def test_saving_again_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    save(RECORD, tmp_path)
    finished = replace(RECORD, is_finished=True, problems=())

    assert load(save(finished, tmp_path)) == finished
    assert [path.name for path in verifies_dir(tmp_path).iterdir()] == ["20261129-120000-7.json"]


def test_interruption_is_not_kept(tmp_path: Path) -> None:
    assert load(save(replace(RECORD, is_interrupted=True), tmp_path)) == RECORD


def test_moments_are_kept_to_the_microsecond(tmp_path: Path) -> None:
    exact = replace(STREAM, chunks=(Chunk(0.1234564999, 2), Chunk(1 / 3, 6)))
    boot = replace(BOOT, runs=(Run((exact,), 1.0),))

    (kept,) = load(save(replace(RECORD, boots=(boot,)), tmp_path)).boots[0].runs[0].streams

    assert [chunk.at_s for chunk in kept.chunks] == [0.123456, 0.333333]


def test_long_verify_stays_small(tmp_path: Path) -> None:
    chunks = tuple(Chunk(0.01 * idx + 1 / 3, 2 * idx) for idx in range(1, 251))
    run = Run((replace(STREAM, tokens=500, chunks=chunks),), 3.0)
    boot = replace(BOOT, runs=(run,) * 5)

    path = save(replace(RECORD, boots=(boot,) * 8), tmp_path)

    assert path.stat().st_size < 250_000


def test_records_are_listed_newest_first_and_damage_hides_none(tmp_path: Path) -> None:
    later = replace(RECORD, id="20261130-120000-7", created_at="2026-11-30T12:00:00+00:00")
    save(RECORD, tmp_path)
    save(later, tmp_path)
    (verifies_dir(tmp_path) / "torn.json").write_text('{"schema": "nccltune.ver')
    (verifies_dir(tmp_path) / ".nccltune-x.tmp").write_text("")

    assert list(newest_records(tmp_path)) == [later, RECORD]


def test_newest_records_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    later = replace(RECORD, id="20261130-120000-7", created_at="2026-11-30T12:00:00+00:00")
    save(later, tmp_path)
    older = save(RECORD, tmp_path)
    found = newest_records(tmp_path)

    assert next(found) == later
    older.unlink()  # it would have been there, had it been read
    assert list(found) == []


def test_newest_records_of_a_folder_that_is_none_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("", encoding="utf-8")

    with pytest.raises(FileError):
        newest_records(tmp_path / "home")


def test_without_a_folder_there_are_no_records(tmp_path: Path) -> None:
    assert list(newest_records(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": "nccltune.verify/2"}, 'reads "nccltune.verify/1" only'),
        ({"arms": None}, "is damaged"),
        ({"boots": [{}]}, "is damaged"),
        ({"boots": [{**boot_to_json(BOOT), "seen": {"ranks": {"TP0": {"A": "odd"}}}}]}, "damaged"),
        ({"fingerprint": {"gpu_names": 3}}, "is damaged"),
    ],
)
def test_damaged_record_is_refused_with_its_name(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    path = save(RECORD, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(FileError, match=reason) as caught:
        load(path)

    assert str(path) in str(caught.value)


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A record's JSON values, with another one in one place."""
    with TemporaryDirectory() as folder:
        data: dict[str, Any] = json.loads(save(RECORD, Path(folder)).read_text())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


RUN = ("boots", 0, "runs", 0)
STREAM_0 = (*RUN, "streams", 0)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("created_at",), "yesterday"),
        (("created_at",), "9999-12-31T23:59:59-12:00"),
        (("launch",), "sglang serve"),
        (("launch",), [1]),
        (("arms",), []),
        (("arms", 1, "name"), "default"),
        (("arms", 0, "name"), "another"),
        (("arms", 0, "num_steps"), [1]),
        (("load", "tokens"), [1]),
        (("boot_total",), 0),
        (("flags",), []),
        (("flags",), {"default": {"tp_size": "2"}}),
        (("sglang_version",), {}),
        (("judgement",), [1]),
        (("problems",), [{"arm": "a"}]),
        (("boots", 0, "position"), True),
        (("boots", 0, "start_s"), -1.0),
        (("boots", 0, "runs"), []),
        (("boots", 0, "ttft_short_ms"), [-5.0]),
        (("boots", 0, "seen", "version"), 1),
        (("boots", 0, "seen", "is_nccl_on_path"), "no"),
        ((*RUN, "duration_s"), 0),
        ((*RUN, "duration_s"), "1"),
        ((*RUN, "streams"), []),
        ((*STREAM_0, "tokens"), 0),
        ((*STREAM_0, "tokens"), 10**400),
        ((*STREAM_0, "tokens"), 1.5),
        ((*STREAM_0, "duration_s"), 1e308),
        ((*STREAM_0, "at_s"), []),
        ((*STREAM_0, "at_s"), [0.5, 0.25, 0.125]),
        ((*STREAM_0, "tokens_at"), [6, 4, 2]),
        ((*STREAM_0, "accept_length"), -1.0),
        ((*STREAM_0, "accept_by_position"), [10**400]),
        ((*STREAM_0, "verify_count"), -3),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_record_of_what_nobody_can_have_measured_is_damaged(
    tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    path = save(RECORD, tmp_path)
    path.write_text(json.dumps(changed(place, value)))

    with pytest.raises(FileError, match="is damaged") as caught:
        load(path)

    assert caught.value.code == "damaged_verify"


def test_record_of_an_earlier_version_is_read_without_what_it_lacks(tmp_path: Path) -> None:
    path = save(RECORD, tmp_path)
    data = json.loads(path.read_text())
    del data["flags"], data["sglang_version"]
    path.write_text(json.dumps(data))

    assert load(path) == replace(RECORD, flags={}, sglang_version=None)


@pytest.mark.parametrize("text", ["m\udcff", "half \ud800"])
def test_what_is_no_text_is_kept_escaped_wherever_it_stands(tmp_path: Path, text: str) -> None:
    info = {text: [text]}
    boot = replace(BOOT, seen=replace(SEEN, server_info=info))
    record = replace(RECORD, boots=(boot,), notes=(text,), url=text, launch=(text,))

    kept = load(save(record, tmp_path))

    assert kept.notes == kept.launch == (kept.url,)
    assert kept.url.isprintable()
    assert kept.boots[0].seen.server_info == {kept.url: [kept.url]}


@pytest.mark.parametrize("place", ["home/verifies", "home"])
def test_folder_that_is_none_is_no_empty_store(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("")

    with pytest.raises(FileError, match="Not a directory"):
        newest_records(tmp_path / "home")


def test_keys_are_not_kept() -> None:
    assert hidden(["sglang", "serve", "--api-key", "abc"]) == (
        "sglang",
        "serve",
        "--api-key",
        "***",
    )


def test_only_what_servers_react_to_is_kept_of_an_environment() -> None:
    environ = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "x", "PATH": "/bin"}

    assert telling(environ) == {"CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO"}
