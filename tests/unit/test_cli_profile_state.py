from __future__ import annotations

import io
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.cli import host_check, main
from nccltune.errors import HostError
from nccltune.export import EXPORTS
from nccltune.host.match import restricted
from nccltune.profile import format_profile
from nccltune.store import profiles_dir, read_active, save_candidate
from tests.support.command_line import FINGERPRINT
from tests.support.fake_nvml import island_host
from tests.support.gpu_launches import launch, read, seen_by
from tests.support.profiles import MINE, SETTINGS, profile_verb, put
from tests.support.readers import READERS

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint


def be(monkeypatch: pytest.MonkeyPatch, here: Fingerprint) -> None:
    """Let this host be another one."""
    monkeypatch.setattr(host_check, "read_here", lambda _python: here)


@pytest.fixture(autouse=True)
def same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, FINGERPRINT)


# activate


def test_activate_on_the_same_host_takes_effect(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["exit_code"] == 0
    assert envelope["command"] == "profile activate"
    assert envelope["data"]["active"] == "mine"
    assert envelope["data"]["match"] == "identical"
    assert envelope["warnings"] == []
    assert read_active().profile == MINE


def test_activate_on_an_equivalent_host_says_loudly_that_it_is_unverified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    be(monkeypatch, replace(FINGERPRINT, gpu_uuids=("GPU-8", "GPU-9")))

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["data"]["match"] == "equivalent"
    assert envelope["data"]["differing"] == ["gpu_uuids"]
    assert "UNVERIFIED" in envelope["warnings"][0]
    assert read_active().name == "mine"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nccl_version": "2.30.7"}, "nccl_version (2.28.9 there, 2.30.7 here)"),
        ({"gpu_names": ("Other", "Other")}, "gpu_names"),
        ({"driver_version": "2"}, "driver_version (1 there, 2 here)"),
    ],
)
def test_activate_on_a_foreign_host_is_refused_and_names_what_differs(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    field: str,
) -> None:
    save_candidate(MINE)
    be(monkeypatch, replace(FINGERPRINT, **change))

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["exit_code"] == 3
    assert envelope["errors"][0]["code"] == "foreign_host"
    assert field in envelope["errors"][0]["message"]
    assert read_active().name is None


def test_activate_on_a_foreign_host_keeps_what_was_active(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    save_candidate(replace(MINE, name="other"))
    profile_verb(capsys, "activate", "other")
    be(monkeypatch, replace(FINGERPRINT, nccl_version="9"))

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["data"]["active"] == "other"
    assert read_active().name == "other"


def test_activate_for_any_host_is_kept_for_this_host_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    be(monkeypatch, replace(FINGERPRINT, nccl_version="9"))

    envelope = profile_verb(capsys, "activate", "mine", "--any-host")

    assert envelope["exit_code"] == 0
    assert "launches on these GPUs get it" in envelope["warnings"][0]
    assert read_active().name == "mine"
    assert read_active().is_insisted_on(FINGERPRINT.gpu_uuids)


@pytest.mark.parametrize(
    ("source", "code"),
    [("shared-gpu", "shared_source"), ("recording:h200-2x-shm", "recorded_source")],
)
def test_activate_of_what_was_not_measured_needs_any_host(
    capsys: pytest.CaptureFixture[str], source: str, code: str
) -> None:
    save_candidate(replace(MINE, source=source))

    refused = profile_verb(capsys, "activate", "mine")
    forced = profile_verb(capsys, "activate", "mine", "--any-host")

    assert refused["exit_code"] == 3
    assert refused["errors"][0]["code"] == code
    assert forced["exit_code"] == 0
    assert "--any-host" in forced["warnings"][0]
    assert read_active().is_insisted_on(FINGERPRINT.gpu_uuids)


def test_activate_of_a_profile_for_no_host_says_that_it_was_not_measured_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    envelope = profile_verb(capsys, "activate", "folk-ll-ring")

    assert envelope["exit_code"] == 0
    assert envelope["warnings"] == ["profile folk-ll-ring names no host: not measured on this one"]
    assert read_active().name == "folk-ll-ring"


def test_activate_while_the_servers_nccl_is_unknown_compares_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    be(monkeypatch, replace(FINGERPRINT, nccl_version=None))

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["exit_code"] == 0
    assert "--python" in envelope["warnings"][0]


def test_activate_on_more_gpus_compares_as_many_as_there_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    row = ("NV18", "NV18", "X")
    wide = replace(
        FINGERPRINT,
        gpu_names=("Stand-in",) * 3,
        gpu_uuids=("GPU-0", "GPU-1", "GPU-2"),
        link_matrix=(("X", "NV18", "NV18"), ("NV18", "X", "NV18"), row),
        numa_nodes=(0, 0, 0),
        world_size=3,
    )
    be(monkeypatch, wide)

    assert profile_verb(capsys, "activate", "mine")["data"]["match"] == "identical"


@pytest.mark.parametrize("places", [(4, 5), (2, 6), (7, 0)])
def test_activate_compares_the_gpus_that_the_profile_was_found_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...]
) -> None:
    whole = seen_by(launch("--tp 8"), read(island_host(8, size=2)))
    save_candidate(replace(MINE, fingerprint=restricted(whole, places).to_json()))
    be(monkeypatch, whole)

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["data"]["match"] == "identical"
    assert envelope["warnings"] == []


def test_activate_without_a_driver_needs_any_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_python: str) -> None:
        raise HostError("no NVIDIA driver found", code="nvml_absent")

    save_candidate(MINE)
    monkeypatch.setattr(host_check, "read_here", absent)

    assert profile_verb(capsys, "activate", "mine")["exit_code"] == 5
    envelope = profile_verb(capsys, "activate", "mine", "--any-host")

    assert envelope["exit_code"] == 0
    assert "nccltune run --any-host" in envelope["warnings"][0]
    assert read_active().any_host_gpus == ()


def test_activate_of_a_fingerprint_that_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_candidate(replace(MINE, fingerprint={"gpu_names": 7}))

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["exit_code"] == 3
    assert envelope["errors"][0]["code"] == "bad_fingerprint"


def test_activate_asks_the_interpreter_of_the_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def read_here(python: str) -> Fingerprint:
        asked.append(python)
        return FINGERPRINT

    monkeypatch.setattr(host_check, "read_here", read_here)
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    save_candidate(MINE)
    launch = [str(python), "-m", "sglang.launch_server", "--tp", "2"]

    profile_verb(capsys, "activate", "mine", "--json", "--", *launch)
    profile_verb(capsys, "activate", "mine", "--python", str(tmp_path))

    assert asked == [str(python), str(tmp_path)]


def test_activate_says_what_sglang_does_with_each_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("NCCL_ALGO", "NCCL_GRAPH_REGISTER", "NCCL_NTHREADS")
    settings = dict(zip(names, ("allreduce:Ring", "1", "256"), strict=True))
    save_candidate(replace(MINE, settings=settings))

    envelope = profile_verb(capsys, "activate", "mine")

    effects = {each["variable"]: each["effect"] for each in envelope["data"]["sglang"]}
    assert effects == {
        "NCCL_ALGO": "depends",
        "NCCL_GRAPH_REGISTER": "gives_way",
        "NCCL_NTHREADS": "untouched",
    }


def test_activate_says_what_a_launch_does_with_each_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"NCCL_ALGO": "allreduce:Ring", "NCCL_MAX_CTAS": "4", "NCCL_CUMEM_ENABLE": "1"}
    save_candidate(replace(MINE, settings=settings))
    launch = ["python", "-m", "sglang.launch_server", "--tp", "2", "--enable-symm-mem"]
    launch += ["--enable-deterministic-inference"]

    envelope = profile_verb(capsys, "activate", "mine", "--json", "--", *launch)

    effects = {each["variable"]: each for each in envelope["data"]["sglang"]}
    assert effects["NCCL_ALGO"]["effect"] == "overwritten"
    assert "--enable-deterministic-inference" in effects["NCCL_ALGO"]["message"]
    assert effects["NCCL_MAX_CTAS"]["effect"] == "overwritten"
    assert effects["NCCL_CUMEM_ENABLE"]["effect"] == "untouched"  # the same value


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (["activate", "nobody"], "no_such_profile", 2),
        (["activate", "../mine"], "bad_name", 2),
        (["activate", "mine", "--python", "/no/such/python"], "no_such_python", 2),
        (["activate", "mine", "--json", "--", "vllm", "serve"], "not_sglang", 2),
    ],
)
def test_activate_of_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], code: str, exit_code: int
) -> None:
    save_candidate(MINE)

    envelope = profile_verb(capsys, *words)

    assert (envelope["exit_code"], envelope["errors"][0]["code"]) == (exit_code, code)
    assert read_active().name is None


def test_activate_of_a_file_says_to_import_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = put(tmp_path / "mine.json", MINE)

    envelope = profile_verb(capsys, "activate", str(path))

    assert envelope["exit_code"] == 2
    assert f"nccltune profile import {path}" in envelope["errors"][0]["message"]


def test_activate_of_a_broken_file_names_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = save_candidate(MINE)
    path.write_text(path.read_text().replace("allreduce:LL", "allreduce:XX"))

    envelope = profile_verb(capsys, "activate", "mine")

    assert envelope["exit_code"] == 6
    assert "mine.json:" in envelope["errors"][0]["message"]
    assert "allreduce:XX" in envelope["errors"][0]["message"]


def test_activate_shows_people_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)

    assert main(["profile", "activate", "mine"]) == 0

    shown = capsys.readouterr().out
    assert "Active: mine. Before: none." in shown
    assert "the one that it was made on" in shown
    assert "NCCL_PROTO=allreduce:LL" in shown


def test_refusal_is_shown_to_people_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_candidate(MINE)
    be(monkeypatch, replace(FINGERPRINT, nccl_version="9"))

    assert main(["profile", "activate", "mine"]) == 3

    captured = capsys.readouterr()
    assert "Active as before: no profile." in captured.out
    assert captured.err.startswith("nccltune: profile mine was not activated")
    assert captured.err.count("\n") == 1


# off, rollback


def test_off_and_rollback_go_back_and_forth(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)
    profile_verb(capsys, "activate", "mine")

    off = profile_verb(capsys, "off")
    back = profile_verb(capsys, "rollback")

    assert (off["data"]["active"], off["data"]["replaced"]) == (None, "mine")
    assert back["data"]["active"] == "mine"
    assert read_active().name == "mine"


def test_rollback_without_anything_before_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    envelope = profile_verb(capsys, "rollback")

    assert envelope["exit_code"] == 2
    assert envelope["errors"][0]["code"] == "nothing_to_roll_back"


def test_off_tells_of_a_broken_state_that_it_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)
    (profiles_dir().parent / "state.json").write_text("{")

    envelope = profile_verb(capsys, "off")

    assert envelope["exit_code"] == 0
    assert "state.json" in envelope["warnings"][0]


def test_list_and_show_say_which_one_is_active(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)
    save_candidate(replace(MINE, name="other"))
    profile_verb(capsys, "activate", "mine")

    listed = profile_verb(capsys, "list")["data"]
    shown = profile_verb(capsys, "show", "mine")["data"]

    states = {each["name"]: each["state"] for each in listed["profiles"]}
    assert (states["mine"], states["other"]) == ("active", "candidate")
    assert listed["active"] == "mine"
    assert shown["state"] == "active"


def test_list_calls_the_active_one_active_where_its_file_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_candidate(MINE)
    profile_verb(capsys, "activate", "mine")
    for name in ("mine", "other"):
        (profiles_dir() / f"{name}.json").write_text("{")

    listed = profile_verb(capsys, "list")
    main(["profile", "list"])

    states = {each["name"]: each["state"] for each in listed["data"]["profiles"]}
    assert (states["mine"], states["other"]) == ("active", "candidate")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mine", "active", "-", "broken"] in rows


# import


def test_import_keeps_a_candidate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = put(tmp_path / "any.json", MINE)

    envelope = profile_verb(capsys, "import", str(path))

    assert envelope["exit_code"] == 0
    assert envelope["data"]["state"] == "candidate"
    assert Path(envelope["data"]["path"]) == profiles_dir() / "mine.json"
    assert read_active().name is None
    assert profile_verb(capsys, "show", "mine")["data"]["settings"] == SETTINGS


def test_import_takes_what_is_piped_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(format_profile(MINE).encode())))

    envelope = profile_verb(capsys, "import", "-")

    assert Path(envelope["data"]["path"]) == profiles_dir() / "mine.json"
    assert profile_verb(capsys, "show", "mine")["data"]["settings"] == SETTINGS


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "standard input:1: is empty"),
        (b"\xff", "is not UTF-8"),
        (b" " * (2**20 + 1), "larger than 1 MiB"),
        (b'{"schema": "nccltune.profile/1"', "ends too early"),
    ],
    ids=["empty", "binary", "large", "cut"],
)
def test_import_of_what_is_no_profile_through_a_pipe_is_refused(
    content: bytes,
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    envelope = profile_verb(capsys, "import", "-")

    assert envelope["exit_code"] == 6
    assert problem in envelope["errors"][0]["message"]


def test_activate_names_the_folder_that_it_wrote_to(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)

    envelope = profile_verb(capsys, "activate", "mine")
    main(["profile", "activate", "mine"])

    folder = str(profiles_dir().parent)
    assert envelope["data"]["state_folder"] == folder
    assert folder in capsys.readouterr().out.replace("\n", "")


def test_import_under_another_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = put(tmp_path / "mine.json", MINE)

    envelope = profile_verb(capsys, "import", str(path), "--name", "theirs")

    assert Path(envelope["data"]["path"]).name == "theirs.json"


def test_import_twice_is_no_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = put(tmp_path / "mine.json", MINE)
    profile_verb(capsys, "import", str(path))

    assert profile_verb(capsys, "import", str(path))["exit_code"] == 0


def test_import_over_another_profile_has_to_be_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_candidate(replace(MINE, note="kept"))
    path = put(tmp_path / "mine.json", MINE)

    refused = profile_verb(capsys, "import", str(path))
    replaced = profile_verb(capsys, "import", str(path), "--replace")

    assert (refused["exit_code"], refused["errors"][0]["code"]) == (2, "name_taken")
    assert replaced["data"]["is_replaced"] is True


def test_import_over_a_broken_file_needs_no_asking(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_candidate(MINE).write_text("{")
    path = put(tmp_path / "mine.json", MINE)

    assert profile_verb(capsys, "import", str(path))["exit_code"] == 0


def test_import_of_a_recordings_profile_says_what_it_is_worth(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = put(tmp_path / "mine.json", replace(MINE, source="recording:h200-2x-shm"))

    assert "h200-2x-shm" in profile_verb(capsys, "import", str(path))["warnings"][0]


@pytest.mark.parametrize(
    ("change", "line", "text"),
    [
        ('"NCCL_PROTO": "\\"allreduce:LL\\""', 8, "quotes"),
        ('"NCCL_PROTO": "allreduce:LL # small"', 8, "comment"),
        ('"LD_PRELOAD": "/tmp/x.so"', 8, "LD_PRELOAD"),
        ('"NCCL_DEBUG": "INFO"', 8, "NCCL_DEBUG"),
        ('"NCCL_BUFFSIZE": 4194304', 8, "not in quotes"),
        ('"NCCL_PROTO": "allreduce:LL', 8, "not JSON"),
    ],
)
def test_import_of_a_bad_file_names_file_line_and_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: str, line: int, text: str
) -> None:
    path = put(tmp_path / "mine.json", MINE)
    path.write_text(path.read_text().replace('"NCCL_PROTO": "allreduce:LL"', change))

    envelope = profile_verb(capsys, "import", str(path))

    assert envelope["exit_code"] == 6
    message = envelope["errors"][0]["message"]
    assert message.startswith(f"{path}:{line}: ")
    assert text in message
    assert not profiles_dir().exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root refuses what others can write")
def test_import_of_a_file_that_others_can_write_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = put(tmp_path / "mine.json", MINE)
    path.chmod(0o666)

    envelope = profile_verb(capsys, "import", str(path))

    assert envelope["errors"][0]["code"] == "unsafe_owner"


# export


@pytest.mark.parametrize("format_name", EXPORTS)
def test_export_prints_what_its_reader_reads_back(
    capsys: pytest.CaptureFixture[str], format_name: str
) -> None:
    save_candidate(MINE)

    assert main(["profile", "export", "mine", "--format", format_name]) == 0

    assert READERS[format_name](capsys.readouterr().out) == SETTINGS


def test_export_takes_the_active_profile_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    save_candidate(MINE)
    profile_verb(capsys, "activate", "mine")

    envelope = profile_verb(capsys, "export", "--format", "docker")

    assert envelope["data"]["name"] == "mine"
    assert READERS["docker"](envelope["data"]["text"]) == SETTINGS


def test_export_without_an_active_profile_asks_for_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    envelope = profile_verb(capsys, "export", "--format", "docker")

    assert (envelope["exit_code"], envelope["errors"][0]["code"]) == (2, "no_active_profile")


def test_export_writes_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_candidate(MINE)
    path = tmp_path / "settings.env"

    envelope = profile_verb(capsys, "export", "mine", "--format", "systemd", "--output", str(path))

    assert READERS["systemd"](path.read_text()) == SETTINGS
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert envelope["data"]["path"] == str(path)


def test_export_into_a_missing_folder_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_candidate(MINE)
    path = tmp_path / "missing" / "settings.env"

    envelope = profile_verb(capsys, "export", "mine", "--format", "shell", "--output", str(path))

    assert envelope["exit_code"] == 6
    assert str(path) in envelope["errors"][0]["message"]


def test_export_of_a_file_and_its_warnings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = put(tmp_path / "mine.json", replace(MINE, source="shared-gpu"))

    envelope = profile_verb(capsys, "export", str(path), "--format", "docker")

    assert "one GPU" in envelope["warnings"][0]


@pytest.mark.parametrize("words", [["export", "mine"], ["export", "mine", "--format", "toml"]])
def test_export_without_a_known_format_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    save_candidate(MINE)

    envelope = profile_verb(capsys, *words)

    assert envelope["exit_code"] == 2
    assert "docker" in json.dumps(envelope["errors"])
