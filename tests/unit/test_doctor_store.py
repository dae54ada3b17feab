from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nccltune import paths
from nccltune.doctor import Status, store_checks
from nccltune.doctor.mounts import mount_of, parse_mountinfo
from nccltune.paths import state_dir
from nccltune.profile import Profile
from nccltune.store import activate, save_candidate
from nccltune.store.state import empty_state, format_state
from tests.support.doctor_hosts import (
    MOUNTINFO,
    SERVER,
    DoctorHost,
    assert_status,
    doctor_host,
    launch_words,
    write_models,
)
from tests.support.fake_nvml import pcie_host
from tests.support.launch_host import make_site, not_mounted

SETTINGS = {"NCCL_PROTO": "allreduce:LL", "NCCL_MAX_CTAS": "16"}


@pytest.fixture
def host(tmp_path: Path) -> DoctorHost:
    return doctor_host(tmp_path / "root")


def keep(host: DoctorHost, **changes: object) -> Profile:
    made_on = host.fingerprint().to_json()
    profile = replace(Profile("kimi", dict(SETTINGS), source="gpus", fingerprint=made_on))
    profile = replace(profile, **changes)  # type: ignore[arg-type]
    save_candidate(profile)
    activate("kimi", reason="manual", is_any_host=True)
    return profile


@pytest.mark.parametrize("place", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}], ids=str)
@pytest.mark.parametrize("words", [("-i", "PATH=/bin"), ("-u", "NCCLTUNE_HOME")])
def test_store_is_the_one_that_run_reads_whatever_env_keeps_from_the_server(
    host: DoctorHost, tmp_path: Path, words: tuple[str, ...], place: dict[str, str]
) -> None:
    write_models(tmp_path)
    keep(host)
    host.environ = {**place, "SGLANG_PLUGINS": "other"}

    plain = host.look(*launch_words(tmp_path))
    checks = host.look("env", *words, *launch_words(tmp_path))

    assert checks["state_folder"] == plain["state_folder"]
    assert checks["active_profile"] == plain["active_profile"]
    asked_in = host.asked_in[-1]
    assert "NCCLTUNE_HOME" not in asked_in
    assert ("SGLANG_PLUGINS" in asked_in) == ("-i" not in words)
    assert host.case("env", *words, *launch_words(tmp_path)).environ == asked_in


# Where the state folder lies.


def test_mountinfo_of_odd_lines_keeps_the_others() -> None:
    text = (
        "nonsense\n22 1 0:1 / / rw - ext4 x rw\n23 22 0:2 /a\\040b /m\\134n ro,x - overlay y rw\n"
    )

    first, second = parse_mountinfo(text)

    assert first.path == Path("/")
    assert (second.path, second.source_path, second.options) == (
        Path("/m\\n"),
        "/a b",
        ("ro", "x"),
    )
    assert second.is_overlay


def test_mount_of_a_path_is_the_deepest_and_the_last_one_mounted() -> None:
    text = (
        "1 0 0:1 / / rw - overlay o rw\n"
        "2 1 0:2 / /var rw - ext4 a rw\n"
        "3 2 0:3 / /var/lib rw - tmpfs t rw\n"
        "4 2 0:4 / /var/lib rw - xfs b rw\n"
    )
    mounts = parse_mountinfo(text)

    found = [mount_of(Path(path), mounts) for path in ("/etc", "/var", "/var/lib/n")]
    assert [mount.type for mount in found if mount] == ["overlay", "ext4", "xfs"]
    assert mount_of(Path("/variable"), mounts) == mounts[0]
    assert mount_of(Path("/x"), ()) is None


def test_state_folder_on_a_disk_is_fine(host: DoctorHost) -> None:
    assert_status(host.look()["state_folder"], Status.OK, "ext4")


@pytest.mark.parametrize("kind", ["overlay", "fuse.fuse-overlayfs", "aufs"])
def test_state_folder_on_a_containers_layer_is_told(host: DoctorHost, kind: str) -> None:
    host.put("proc/self/mountinfo", f"22 1 0:50 / / rw - {kind} overlay rw\n")

    check = host.look()["state_folder"]

    assert_status(check, Status.WARN, "own layer", "nothing would last", "NCCLTUNE_HOME")


def test_state_folder_with_a_profile_on_a_containers_layer_is_a_failure(host: DoctorHost) -> None:
    keep(host)
    host.put("proc/self/mountinfo", "22 1 0:50 / / rw - overlay overlay rw\n")

    check = host.look()["state_folder"]

    assert_status(check, Status.FAIL, "what is kept there goes with it", "mount a volume")


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_state_folder_on_any_root_of_a_container_is_told(host: DoctorHost, mark: str) -> None:
    host.put(mark, "")  # storage drivers other than overlay show their own type

    assert_status(host.look()["state_folder"], Status.WARN, "ext4", "own layer")


def test_state_folder_on_the_root_of_a_pod_is_told(host: DoctorHost) -> None:
    host.environ["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"

    assert_status(host.look()["state_folder"], Status.WARN, "own layer")


def test_state_folder_on_a_volume_of_a_container_is_fine(host: DoctorHost) -> None:
    host.put(".dockerenv", "")
    volume = f"24 22 8:1 /volumes/v {state_dir()} rw - ext4 /dev/sda1 rw\n"
    host.put("proc/self/mountinfo", f"22 1 0:50 / / rw - overlay overlay rw\n{volume}")

    assert_status(host.look()["state_folder"], Status.OK, str(state_dir()))


def test_state_folder_in_memory_is_told(host: DoctorHost) -> None:
    host.put("proc/self/mountinfo", f"{MOUNTINFO}24 22 0:9 / {state_dir()} rw - tmpfs t rw\n")

    assert_status(host.look()["state_folder"], Status.WARN, "memory", "next reboot")


def test_state_folder_that_is_mounted_read_only_is_told(host: DoctorHost) -> None:
    host.put("proc/self/mountinfo", "22 1 254:0 / / ro,relatime - ext4 /dev/vda rw\n")

    assert_status(host.look()["state_folder"], Status.WARN, "cannot be written")


@pytest.mark.parametrize("has_own", [False, True], ids=["none", "own"])
def test_state_folder_of_the_host_need_not_be_writable_for_users_who_read_it(
    host: DoctorHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    system, own = tmp_path / "system", tmp_path / "own" / "nccltune"
    for folder in (system, own) if has_own else (system,):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(format_state(empty_state()))
    monkeypatch.setattr(paths, "SYSTEM_STATE_DIR", system)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(store_checks, "_is_writable", lambda _folder: False)
    host.environ |= {"NCCLTUNE_HOME": "", "XDG_STATE_HOME": str(own.parent)}

    check = host.look()["state_folder"]

    if has_own:
        assert_status(check, Status.WARN, str(own), "cannot be written")
    else:
        assert_status(check, Status.OK, str(system), "the host's")


@pytest.mark.parametrize("kind", ["missing", "dangling", "file"])
def test_state_folder_that_is_not_mounted_fails(
    host: DoctorHost, tmp_path: Path, kind: str
) -> None:
    host.environ["NCCLTUNE_HOME"] = str(not_mounted(tmp_path, kind))

    assert_status(host.look()["state_folder"], Status.FAIL, "names is not there", "mount it")


def test_state_folder_of_a_relative_name_is_a_failure(host: DoctorHost) -> None:
    host.environ["NCCLTUNE_HOME"] = "state"

    assert_status(host.look()["state_folder"], Status.FAIL, "NCCLTUNE_HOME=state")


def test_state_folder_without_procfs_is_skipped(host: DoctorHost) -> None:
    (host.root / "proc/self/mountinfo").unlink()

    assert host.look()["state_folder"].status is Status.SKIP


# The active profile.


def test_active_profile_of_this_host_is_fine(host: DoctorHost) -> None:
    keep(host)

    checks = host.look()

    assert_status(checks["active_profile"], Status.OK, "kimi", "2 settings", "by hand")
    assert_status(checks["profile_match"], Status.OK, "kimi")


def test_active_profile_that_was_deleted_is_a_failure(host: DoctorHost) -> None:
    keep(host)
    (state_dir() / "profiles" / "kimi.json").unlink()

    checks = host.look()

    assert_status(checks["active_profile"], Status.FAIL, "defaults", "kimi.json", "rollback")
    assert checks["profile_match"].status is Status.SKIP


def test_active_profile_that_was_cut_short_is_told_with_its_line(host: DoctorHost) -> None:
    keep(host)
    path = state_dir() / "profiles" / "kimi.json"
    path.write_text(path.read_text()[:200])

    assert_status(host.look()["active_profile"], Status.FAIL, "kimi.json:", "cut short")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_active_profile_of_another_user_is_a_failure_for_root(host: DoctorHost) -> None:
    keep(host)
    os.chown(state_dir() / "profiles" / "kimi.json", 1234, 0)

    assert_status(host.look()["active_profile"], Status.FAIL, "user 1234", "chown root")


def test_no_active_profile_is_said_and_no_failure(host: DoctorHost) -> None:
    assert_status(host.look()["active_profile"], Status.OK, "no profile is active")


def test_profile_of_an_equivalent_host_is_unverified(host: DoctorHost) -> None:
    keep(host)
    host.nvml.driver_version = "580.200.01"

    assert_status(host.look()["profile_match"], Status.WARN, "driver_version", "equivalent")


def test_profile_of_other_gpus_is_a_failure(host: DoctorHost) -> None:
    keep(host)
    host.nvml = pcie_host()

    assert_status(host.look()["profile_match"], Status.FAIL, "gpu_names", "another kind")


def test_profile_of_another_nccl_is_a_failure(host: DoctorHost) -> None:
    keep(host)
    library = replace(SERVER.torch_nccl, version="2.30.7")  # type: ignore[type-var]
    host.server = replace(SERVER, torch_nccl=library)

    assert_status(host.look()["profile_match"], Status.FAIL, "nccl_version")


def test_profile_of_half_the_gpus_is_compared_with_as_many(host: DoctorHost) -> None:
    host.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    keep(host)
    del host.environ["CUDA_VISIBLE_DEVICES"]

    assert host.look()["profile_match"].status is Status.OK


def test_profile_is_not_compared_while_the_servers_nccl_is_unknown(host: DoctorHost) -> None:
    keep(host)
    host.server = "did not answer within 90 s"

    assert_status(host.look()["profile_match"], Status.SKIP, "did not answer")


def test_profile_of_no_host_says_that_it_was_not_measured_here(host: DoctorHost) -> None:
    keep(host, fingerprint=None)

    check = host.look()["profile_match"]

    # A verify may have been done here, so that it must not be called unverified.
    assert_status(check, Status.WARN, "names no host: not measured on this one")
    assert "verified" not in check.message


def test_profile_with_a_fingerprint_that_makes_no_sense_is_a_failure(host: DoctorHost) -> None:
    keep(host, fingerprint={"gpu_names": 7})

    assert host.look()["profile_match"].status is Status.FAIL


# What a launch gets of it.


def test_launch_of_this_host_gets_the_profile(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    keep(host)

    check = host.look(*launch_words(tmp_path))["profile_for_launch"]

    assert_status(check, Status.OK, "kimi is applied", "identical", "2 variables")


@pytest.mark.parametrize(
    ("settings", "said", "given"),
    [
        ({}, "0 settings,", "0 variables"),
        ({"NCCL_MAX_CTAS": "16"}, "1 setting,", "1 variable"),
        (SETTINGS, "2 settings,", "2 variables"),
    ],
)
def test_profile_is_counted_in_words_that_fit_the_number(
    host: DoctorHost, tmp_path: Path, settings: dict[str, str], said: str, given: str
) -> None:
    write_models(tmp_path)
    keep(host, settings=settings)

    checks = host.look(*launch_words(tmp_path))

    assert_status(checks["active_profile"], Status.OK, said)
    assert checks["profile_for_launch"].message.endswith(given)


def test_launch_with_settings_of_the_operator_names_them(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    keep(host)
    host.environ["NCCL_PROTO"] = "Simple"

    checks = host.look(*launch_words(tmp_path))

    assert_status(checks["profile_for_launch"], Status.WARN, "NCCL_PROTO=Simple", "operator")
    assert_status(checks["environment"], Status.WARN, "NCCL_PROTO=Simple", "wins over allreduce:LL")


def test_launch_that_sglang_overwrites_names_what(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    keep(host)
    words = launch_words(tmp_path, "--enable-deterministic-inference")

    check = host.look(*words)["profile_for_launch"]

    assert_status(check, Status.WARN, "NCCL_MAX_CTAS=8", "--enable-deterministic-inference")


def test_launch_is_judged_by_the_nccl_that_launches_take_it_for(
    host: DoctorHost, tmp_path: Path
) -> None:
    write_models(tmp_path)
    keep(host)
    make_site(tmp_path / "site", nccl="2.28.9")
    host.environ["PYTHONPATH"] = str(tmp_path / "site")
    host.server = "did not answer within 90 s"
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    host.python = python

    check = host.look(str(python), *launch_words(tmp_path)[1:])["profile_for_launch"]

    assert_status(check, Status.OK, "identical")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--base-gpu-id", "4"), "profile kimi is applied: identical"),
        (("--base-gpu-id", "4", "--dp-size", "1"), "profile kimi is applied: identical"),
        ((), "profile kimi is applied: equivalent"),
        (("--dp-size", "2"), "profile kimi is applied: equivalent"),
        (("--base-gpu-id", "5"), "needs 9 GPUs and sees 8"),
    ],
)
def test_profile_of_some_gpus_is_judged_by_those_that_the_launch_uses(
    host: DoctorHost, tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    write_models(tmp_path)
    host.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    profile = keep(host)
    del host.environ["CUDA_VISIBLE_DEVICES"]
    save_candidate(profile)
    activate("kimi", reason="manual")
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    host.python = python
    make_site(tmp_path / "site", nccl="2.28.9")
    host.environ["PYTHONPATH"] = str(tmp_path / "site")

    words = (str(python), *launch_words(tmp_path, *flags, tp=4)[1:])

    check = host.look(*words)["profile_for_launch"]

    assert expected in check.message


@pytest.mark.parametrize("visible", ["4,5,6,7", "6,2", "7,5,3,1"])
def test_without_a_launch_a_profile_of_some_gpus_is_compared_with_those(
    host: DoctorHost, visible: str
) -> None:
    host.environ["CUDA_VISIBLE_DEVICES"] = visible
    keep(host)
    del host.environ["CUDA_VISIBLE_DEVICES"]

    assert_status(host.look()["profile_match"], Status.OK, "this is the host")


def test_launch_of_a_foreign_host_fails(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    keep(host)
    host.nvml = pcie_host()

    check = host.look(*launch_words(tmp_path))["profile_for_launch"]

    assert_status(check, Status.FAIL, "gets no profile", "another kind")


def test_launch_that_the_policy_leaves_alone_is_no_failure(
    host: DoctorHost, tmp_path: Path
) -> None:
    write_models(tmp_path)
    keep(host)
    plain = launch_words(tmp_path)[:7]

    assert_status(host.look(*plain)["profile_for_launch"], Status.OK, "does not speculate")


def test_broken_policy_file_is_told(host: DoctorHost, tmp_path: Path) -> None:
    write_models(tmp_path)
    keep(host)
    (state_dir() / "policy.json").write_text(json.dumps({"schema": "nccltune.policy/9"}))

    checks = host.look(*launch_words(tmp_path))

    assert_status(checks["policy"], Status.WARN, "policy.json")
