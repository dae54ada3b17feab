from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccltune.envvars import CATALOGUE, Kind
from nccltune.errors import HostError
from nccltune.host import facts as host_facts
from nccltune.host.facts import HostFacts, read_visible
from nccltune.host.fingerprint import MatchKind
from nccltune.host.server_python import installed_version
from nccltune.inject import decision as inject
from nccltune.inject.decision import Injection, apply, command_digest, decide
from nccltune.inject.marker import (
    KEEP_ENVIRON,
    MARKER,
    NOTHING_APPLIED,
    OWN_NAMES,
    format_marker,
    settings_digest,
)
from nccltune.inject.resolver import Decision
from nccltune.profile import Profile
from nccltune.store import (
    Launches,
    activate,
    deactivate,
    profiles_dir,
    read_active,
    save_candidate,
)
from tests.support.launch_host import FLAGS, SETTINGS, LaunchHost, make_host, not_mounted


@pytest.fixture
def host(tmp_path: Path) -> LaunchHost:
    """A host with an active profile that was made on it."""
    host = make_host(tmp_path / "host")
    save_candidate(host.profile())
    activate("kimi", reason="manual")
    return host


def decide_on(
    host: LaunchHost, environ: Mapping[str, str] | None = None, **changes: Any
) -> Injection:
    """Decide about the host's command, with its stand-in driver."""
    argv = changes.pop("argv", host.command)
    changes.setdefault("read_gpus", lambda seen: read_visible(seen, nvml=host.fake))
    return decide(argv, host.environ() if environ is None else environ, **changes)


def test_decide_applies_the_active_profile_of_the_store(host: LaunchHost) -> None:
    decision, record = decide_on(host)

    assert decision.applied == SETTINGS
    assert decision.match is MatchKind.IDENTICAL
    assert decision.warnings == ()
    assert (record.profile_name, record.digest) == ("kimi", settings_digest(SETTINGS))
    assert record.settings == SETTINGS
    assert record.reason == decision.reason


@pytest.mark.parametrize("flags", [("-u", "CUDA_VISIBLE_DEVICES"), ("-i",)])
def test_decide_looks_at_the_gpus_that_env_leaves_to_the_server(
    host: LaunchHost, flags: tuple[str, ...]
) -> None:
    asked: list[str | None] = []

    def noted(environ: Mapping[str, str]) -> Any:
        asked.append(environ.get("CUDA_VISIBLE_DEVICES"))
        return read_visible(environ, nvml=host.fake)

    environ = host.environ() | {"CUDA_VISIBLE_DEVICES": "7,6"}
    decide_on(host, environ, argv=("env", *flags, *host.command), read_gpus=noted)
    decide_on(host, environ, read_gpus=noted)

    assert asked == [None, "7,6"]


FOREIGN = {"SGLANG_NCCL_SO_PATH": "/x/libnccl.so.2.99.9"}


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("-u SGLANG_NCCL_SO_PATH", "is applied: identical host"),
        ("-i PYTHONPATH={path}", "would not reach the server: env -i in the command"),
    ],
)
def test_decide_takes_no_nccl_that_env_keeps_from_the_server(
    host: LaunchHost, before: str, reason: str
) -> None:
    environ = host.environ(**FOREIGN)
    words = before.format(path=environ["PYTHONPATH"]).split()

    outside = decide_on(host, environ).decision
    decision = decide_on(host, environ, argv=("env", *words, *host.command)).decision

    assert not outside.is_applied
    assert "nccl_version (2.28.9 there, 2.99.9 here)" in outside.reason
    assert decision.match is MatchKind.IDENTICAL
    assert reason in decision.reason


@pytest.mark.parametrize("flags", [(), ("-u", "PYTHONPATH"), ("-u", "SGLANG_NCCL_SO_PATH")])
def test_decide_shows_one_environment_to_all_who_look_at_the_server(
    host: LaunchHost, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    seen: dict[str, Mapping[str, str]] = {}

    def packages(_python: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
        seen["packages"] = environ
        return (host.site,)

    def nccl(_python: str | None, environ: Mapping[str, str]) -> str:
        seen["nccl"] = environ
        return "2.28.9"

    def gpus(environ: Mapping[str, str]) -> HostFacts:
        seen["gpus"] = environ
        return read_visible(environ, nvml=host.fake)

    monkeypatch.setattr(inject, "package_dirs", packages)
    monkeypatch.setattr(host_facts, "nccl_version", nccl)
    environ = host.environ(**FOREIGN)
    argv = ("env", *flags, "ADDED=1", *host.command)

    decide_on(host, environ, argv=argv, read_gpus=gpus)

    kept = {name: value for name, value in environ.items() if name not in flags}
    found = {**kept, "ADDED": "1"}
    assert seen == {"packages": found, "nccl": found, "gpus": found}


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("python3", "outer"),
        ("env python3", "outer"),
        ("env PATH={root}/inner python3", "inner"),
        ("env -u PATH python3", "default"),
        ("env -i python3", "default"),
        ("env -i PATH={root}/inner python3", "inner"),
        ("env -i {root}/other/python3", "other"),
        ("env -i {root}/other/sglang", "other"),
    ],
)
def test_decide_asks_the_interpreter_that_env_would_find(
    host: LaunchHost,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    folder: str,
) -> None:
    for name in ("outer", "inner", "default", "other"):
        (tmp_path / name).mkdir()
        for program in ("python3", "sglang"):
            text = f"#!{tmp_path / name}/python3\n" if program == "sglang" else ""
            (tmp_path / name / program).write_text(text)
            (tmp_path / name / program).chmod(0o755)
    monkeypatch.setattr(os, "defpath", str(tmp_path / "default"))
    asked: list[str] = []

    def packages(python: str, _environ: Mapping[str, str]) -> tuple[Path, ...]:
        asked.append(python)
        return ()

    monkeypatch.setattr(inject, "package_dirs", packages)
    begin = words.format(root=tmp_path).split()
    end = ["serve"] if begin[-1].endswith("sglang") else ["-m", "sglang.launch_server"]

    decide_on(host, host.environ(PATH=str(tmp_path / "outer")), argv=(*begin, *end, *FLAGS))

    assert asked == [str(tmp_path / folder / "python3")]


def test_decide_names_the_process_for_ever(host: LaunchHost) -> None:
    record = decide_on(host, route="launch").record

    assert (record.route, record.pid) == ("launch", os.getpid())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert record.started_ticks == int(fields[19])
    assert record.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert record.launched_at.endswith("+00:00")


def test_decide_for_another_process_records_that(host: LaunchHost) -> None:
    record = decide_on(host, pid=1, environ=host.environ(INVOCATION_ID="abc")).record

    assert (record.pid, record.invocation_id) == (1, "abc")
    assert decide_on(host, pid=2**30).record.started_ticks == 0


def test_decide_takes_the_order_of_gpus_from_the_command(host: LaunchHost) -> None:
    argv = ("env", "CUDA_VISIBLE_DEVICES=7,6,5,4,3,2,1,0", *host.command)

    assert decide_on(host, argv=argv).decision.match is MatchKind.EQUIVALENT


def test_decide_where_the_driver_is_absent_gives_nothing_and_says_so(host: LaunchHost) -> None:
    def refuse(_environ: Mapping[str, str]) -> HostFacts:
        raise HostError("no NVIDIA driver found", code="nvml_absent")

    decision = decide_on(host, read_gpus=refuse).decision
    assert "no NVIDIA driver found" in decision.reason
    assert (decision.applied, decision.is_degraded) == ({}, True)

    forced = decide_on(host, read_gpus=refuse, is_any_host=True).decision
    assert forced.applied == SETTINGS


def test_decide_never_asks_the_driver_for_a_command_that_gets_nothing(host: LaunchHost) -> None:
    def refuse(_environ: Mapping[str, str]) -> HostFacts:
        pytest.fail("the driver was asked")

    assert not decide_on(host, argv=("echo",), read_gpus=refuse).decision.is_applied
    argv = (*host.command, "--tp-size", "1")
    assert not decide_on(host, argv=argv, read_gpus=refuse).decision.is_applied


def test_decide_follows_the_policy_file_and_what_was_asked(host: LaunchHost) -> None:
    argv = tuple("EAGLE" if word == "EAGLE3" else word for word in host.command)
    policy = profiles_dir().parent / "policy.json"

    assert not decide_on(host, argv=argv).decision.is_applied
    policy.write_text('{"schema": "nccltune.policy/1", "launches": "speculative"}')
    assert decide_on(host, argv=argv).decision.is_applied
    assert not decide_on(host, argv=argv, launches=Launches.EAGLE3).decision.is_applied


def test_decide_with_a_broken_policy_goes_on_without_it(host: LaunchHost) -> None:
    (profiles_dir().parent / "policy.json").write_text("{")

    decision = decide_on(host).decision

    assert decision.applied == SETTINGS
    assert "policy.json:1" in decision.warnings[0]


def test_decide_without_a_state_folder_gives_nothing_and_says_so(host: LaunchHost) -> None:
    decision = decide_on(host, environ=host.environ(NCCLTUNE_HOME="relative")).decision

    assert "not an absolute path" in decision.reason
    assert decision.is_degraded


@pytest.mark.parametrize("kind", ["missing", "dangling", "file"])
def test_decide_where_the_state_folder_is_not_mounted_is_degraded(
    host: LaunchHost, tmp_path: Path, kind: str
) -> None:
    home = not_mounted(tmp_path, kind)

    injection = decide_on(host, environ=host.environ(NCCLTUNE_HOME=str(home)))

    assert f"{home}: the state folder that NCCLTUNE_HOME names is not there" in (
        injection.decision.reason
    )
    assert (injection.decision.is_degraded, injection.record.is_degraded) == (True, True)
    echo = decide_on(host, argv=("echo",), environ=host.environ(NCCLTUNE_HOME=str(home)))
    assert not echo.decision.is_degraded


def test_decide_with_a_broken_previous_applies_the_active_one_and_says_so(
    host: LaunchHost,
) -> None:
    path = profiles_dir().parent / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "previous": "../x"}))

    decision = decide_on(host).decision

    assert decision.applied == SETTINGS
    assert "there is no profile to roll back to" in decision.warnings[0]


def test_decide_waits_for_the_driver_only_when_all_else_is_read(
    host: LaunchHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            read.append(name)
            return work(*arguments)

        return wrapper

    monkeypatch.setattr(inject, "read_shape", noted("model", inject.read_shape))
    monkeypatch.setattr(inject, "installed_version", noted("sglang", installed_version))
    monkeypatch.setattr(host_facts, "nccl_version", noted("nccl", host_facts.nccl_version))

    decide_on(host, read_gpus=noted("gpus", lambda seen: read_visible(seen, nvml=host.fake)))

    assert sorted(read[:-1]) == ["model", "nccl", "sglang"]
    assert read[-1] == "gpus"


def test_decide_survives_a_fault_of_ours(host: LaunchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> Decision:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(inject, "resolve", fail)

    decision, record = decide_on(host)

    assert decision.reason == "this is a bug in nccltune: ZeroDivisionError: oops"
    assert (decision.applied, decision.is_degraded) == ({}, True)
    assert record.digest is None


def test_decide_reads_sglangs_release_from_its_interpreter(host: LaunchHost) -> None:
    argv = (*host.command, "--enable-deterministic-inference")
    (host.site / "sglang-0.5.15.post1.dist-info").rename(host.site / "sglang-0.5.20.dist-info")

    newer = decide_on(host, argv=argv).decision.overwritten_by_sglang

    assert [name for name, _, _ in newer] == ["NCCL_ALGO"]


def test_decide_survives_a_model_whose_config_is_not_known(
    host: LaunchHost, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    argv = tuple(str(tmp_path) if word == "/nowhere/model" else word for word in host.command)

    assert decide_on(host, argv=argv).decision.is_applied


def test_apply_adds_the_profile_and_two_names_of_our_own(host: LaunchHost) -> None:
    before = {"PATH": "/bin", "HOME": "/root"}

    after = apply(before, decide_on(host).decision)

    assert after == {
        **before,
        **SETTINGS,
        MARKER: format_marker(settings_digest(SETTINGS), SETTINGS),
        KEEP_ENVIRON: "1",
    }


def test_apply_without_a_profile_changes_nothing() -> None:
    before = {"PATH": "/bin", "NCCL_ALGO": "Ring"}

    assert apply(before, Decision("none")) == before


def test_apply_marks_a_launch_that_gets_nothing_and_no_other_command(host: LaunchHost) -> None:
    before = host.environ()
    deactivate()

    assert apply(before, decide_on(host).decision) == {**before, MARKER: NOTHING_APPLIED}
    shell = ("bash", "-c", "sglang serve m")
    assert apply(before, decide_on(host, argv=shell).decision) == before


def test_apply_marks_only_what_survives_the_way_to_the_server(host: LaunchHost) -> None:
    decision, record = decide_on(host, argv=("env", "-u", "NCCL_ALGO", *host.command))

    survivors = {name: value for name, value in SETTINGS.items() if name != "NCCL_ALGO"}
    after = apply({}, decision)
    assert after[MARKER] == format_marker(settings_digest(SETTINGS), survivors)
    assert "NCCL_ALGO" not in after
    assert record.settings == survivors


def test_apply_takes_an_earlier_marker_and_its_values_out() -> None:
    before = {"NCCL_ALGO": "Ring", MARKER: format_marker("0" * 16, ["NCCL_ALGO"]), "A": "1"}

    assert apply(before, Decision("none", removed=("NCCL_ALGO",))) == {"A": "1"}


def test_apply_leaves_the_operators_word_about_titles_alone(host: LaunchHost) -> None:
    after = apply({KEEP_ENVIRON: "yes"}, decide_on(host).decision)

    assert after[KEEP_ENVIRON] == "yes"


def test_nothing_but_the_catalogue_and_our_own_names_is_ever_set(host: LaunchHost) -> None:
    hostile = dict.fromkeys(CATALOGUE, "1") | {"LD_PRELOAD": "/x.so", "PATH": "/x", "A=B": "c"}
    path = profiles_dir() / "kimi.json"
    profile = Profile("kimi", hostile, fingerprint=host.fingerprint().to_json())
    before = host.environ()

    # A broken profile is refused whole, and the resolver does not rely on that.
    path.write_text(inject.__doc__ or "")
    assert apply(before, decide_on(host).decision) == {**before, MARKER: NOTHING_APPLIED}
    with pytest.MonkeyPatch.context() as patch:
        state = read_active(profiles_dir().parent)
        patch.setattr(
            inject, "read_active", lambda _: replace(state, profile=profile, problem=None)
        )
        after = apply(before, decide_on(host).decision)

    added = after.keys() - before.keys() - OWN_NAMES
    assert added
    assert all(CATALOGUE[name].kind is not Kind.FORBIDDEN for name in added)


def test_command_digest_is_the_same_however_sglang_is_started() -> None:
    flags = ("--model-path", "/m", "--tp", "8")
    one = command_digest(("python3", "-m", "sglang.launch_server", *flags))

    assert one == command_digest(("env", "A=1", "/opt/py", "-m", "sglang.launch_server", *flags))
    assert one == command_digest(("sglang", "serve", "/m", "--tp", "8"))
    assert one != command_digest(("sglang", "serve", "/m", "--tp", "4"))
    assert command_digest(("echo", "a b")) != command_digest(("echo", "a", "b"))
    assert command_digest(("\udcff",)) == command_digest(("\udcff",))
