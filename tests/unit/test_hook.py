from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nccltune_hook
from nccltune import paths
from nccltune.envvars import CATALOGUE, Kind
from nccltune.errors import NccltuneError
from nccltune.host.fingerprint import Fingerprint, MatchKind, compare
from nccltune.inject.decision import command_digest
from nccltune.inject.marker import (
    NOTHING_APPLIED,
    format_marker,
    parse_marker,
    settings_digest,
)
from nccltune.inject.overrides import share_out
from nccltune.installing import hook_files
from nccltune.live.launch_inbox import MAX_MESSAGE_BYTES, parse_message
from nccltune.paths import reading_dir, state_dir
from nccltune.profile import Profile, format_profile
from nccltune.sglang.command import parse_launch
from nccltune.store import (
    activate,
    read_active,
    read_launch_records,
    rollback,
    save_candidate,
)
from nccltune.store.launches import MAX_FILE_BYTES
from nccltune_hook import command as hook_command
from nccltune_hook import host as hook_host
from nccltune_hook import launching
from nccltune_hook import store as hook_store
from tests.support.launch_host import not_mounted
from tests.support.random_profiles import random_settings
from tests.support.standin_sglang.program import (
    Running,
    module_command,
    running_server,
    serve_command,
    standin_environ,
)

ROOT = Path(__file__).parents[2]
SETTINGS = {"NCCL_PROTO": "allreduce:LL", "NCCL_MAX_CTAS": "8"}
EAGLE3 = ["--model-path", "/models/kimi", "--tp", "2", "--speculative-algorithm", "EAGLE3"]
UUIDS = [f"GPU-{digit * 8}-0000-0000-0000-{digit * 12}" for digit in "abcd"]


def save(name: str = "kimi", settings: Mapping[str, str] = SETTINGS, **parts: Any) -> Path:
    """Put a profile into the state folder, and make it the active one."""
    path = state_dir() / "profiles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_profile(Profile(name, settings, **parts)))
    activate(name, reason="manual")
    return path


def decide(*tokens: str, **environ: str) -> launching.Decision:
    own = {"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"], **environ}
    return launching.decide(list(tokens or EAGLE3), own)


# The same reading as the rest of the project


def test_allowed_names_are_those_of_the_catalogue() -> None:
    wanted = {name for name, variable in CATALOGUE.items() if variable.kind is not Kind.FORBIDDEN}

    assert hook_store.allowed_names() == wanted


def test_version_is_that_of_its_project() -> None:
    files = hook_files(ROOT / "hook")

    assert f"nccltune_hook-{nccltune_hook.__version__}.dist-info/METADATA" in files


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        ["--tp", "8"],
        ["--tp=8"],
        ["--tensor-parallel-size", "4", "--nnodes", "2"],
        ["--tensor", "4", "--speculative-algo", "eagle3"],
        ["--speculative-algorithm", "NONE"],
        ["--speculative_algorithm=NEXTN", "--pp-size", "2", "--dp", "3"],
        ["--enable-dp-attention", "--dp-size", "4", "--tp-size", "4"],
        ["--base-gpu-id", "2", "--gpu-id-step", "2", "--temperature", "-1.5"],
        ["--trust-remote-code", "--tp", "2", "--tp", "4"],
        ["-x", "--tp", "2"],
    ],
    ids=" ".join,
)
def test_command_is_read_as_everywhere(tokens: list[str]) -> None:
    ours = hook_command.read_command(tokens)
    theirs = parse_launch(["python3", "-m", "sglang.launch_server", *tokens])

    assert (ours.algorithm, ours.tp_size, ours.nnodes) == (
        theirs.speculative_algorithm,
        theirs.tp_size,
        theirs.nnodes,
    )
    assert ours.replicas == theirs.dp_size * theirs.pp_size
    assert str(ours.base_gpu_id) == (theirs.value("base_gpu_id") or "0")


@pytest.mark.parametrize(
    "tokens",
    [
        ["--tp", "eight"],
        ["--tp", "0"],
        ["--tp"],
        ["--tp", "4", "8"],
        ["stray"],
        ["--nnodes", "0"],
        ["--config=/x.yaml"],
        ["--config", "/nowhere.yaml"],
    ],
    ids=" ".join,
)
def test_command_that_sglang_does_not_take_is_refused_as_everywhere(tokens: list[str]) -> None:
    with pytest.raises(hook_command.Unreadable):
        hook_command.read_command(tokens)
    with pytest.raises(NccltuneError):
        parse_launch(["python3", "-m", "sglang.launch_server", *tokens])


def test_config_file_counts_where_the_command_line_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("tp-size: 8\nspeculative-algorithm: EAGLE3\nnnodes: 2\nenable-metrics: false\n")
    tokens = ["--config", str(path), "--nnodes", "1"]

    ours = hook_command.read_command(tokens)

    assert (ours.tp_size, ours.algorithm, ours.nnodes) == (8, "EAGLE3", 1)


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/site/sglang/launch_server.py", "--tp", "2"], None),
        (["/bin/sglang", "serve", "--tp", "2"], None),
        (["/bin/sglang", "serve", "/models/kimi", "--model-type", "llm", "--tp", "2"], None),
    ],
    ids=["module", "serve", "serve-model-first"],
)
def test_command_digest_is_that_of_every_route(argv: list[str], typed: list[str] | None) -> None:
    tokens = hook_command.server_tokens(argv)
    assert tokens is not None

    line = launching._launch_data(tokens, {}, launching.Decision(""))

    typed = ["python3", "-m", "sglang.launch_server", *argv[1:]] if "serve" not in argv else argv
    assert line["command_digest"] == command_digest(typed)


@pytest.mark.parametrize(
    "argv",
    [[], ["/usr/bin/pytest"], ["/bin/sglang", "generate"], ["-c"], ["/x/ray/default_worker.py"]],
)
def test_process_that_launches_no_server_is_left_alone(argv: list[str]) -> None:
    save()
    environ: dict[str, str] = {"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"]}

    launching.tune(argv, environ)

    assert set(environ) == {"NCCLTUNE_HOME"}
    assert read_launch_records() == ()


@pytest.mark.parametrize("name", ["NCCLTUNE_HOME", "XDG_STATE_HOME", "HOME"])
def test_state_folder_is_that_of_every_route(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    environ = {name: str(tmp_path)}

    assert hook_store.reading_dir(environ) == reading_dir(environ)


@pytest.mark.parametrize("has_own", [False, True], ids=["none", "own"])
@pytest.mark.parametrize("has_system", [False, True], ids=["none", "system"])
def test_state_folder_of_a_user_without_a_store_is_the_hosts(
    has_own: bool, has_system: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    system, own = tmp_path / "system", tmp_path / "own" / "nccltune"
    for module in (paths, hook_store):
        monkeypatch.setattr(module, "SYSTEM_STATE_DIR", system)
    for folder, is_there in ((system, has_system), (own, has_own)):
        folder.mkdir(parents=True)
        if is_there:
            (folder / "state.json").write_text("broken or not")
    environ = {"XDG_STATE_HOME": str(own.parent)}

    assert hook_store.reading_dir(environ) == reading_dir(environ)
    assert reading_dir(environ) == (system if has_system and not has_own else own)


@pytest.mark.parametrize("kind", ["missing", "dangling", "file"])
def test_state_folder_that_is_not_mounted_is_loud(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = not_mounted(tmp_path, kind)
    environ = {"NCCLTUNE_HOME": str(home)}

    assert decide(NCCLTUNE_HOME=str(home)).is_degraded
    launching.tune(["/site/sglang/launch_server.py", *EAGLE3], environ)

    assert f"NCCLTUNE_HOME={home}: there is no such folder" in capfd.readouterr().err
    assert not home.is_dir()
    assert "NCCL_PROTO" not in environ


@pytest.mark.parametrize("seed", range(40))
def test_share_out_leaves_the_operator_what_every_route_leaves(seed: int) -> None:
    rng = random.Random(seed)
    settings = random_settings(rng)
    operator = {name: value for name, value in random_settings(rng).items() if rng.random() < 0.3}

    applied, kept = launching.share_out(settings, operator)

    theirs = share_out(settings, operator)
    assert (applied, kept) == (dict(theirs.applied), dict(theirs.kept))


def test_marker_and_digest_are_those_of_every_route() -> None:
    save()
    environ = {"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"]}

    launching.tune(["/site/sglang/launch_server.py", *EAGLE3], environ)

    assert environ["NCCLTUNE_APPLIED"] == format_marker(settings_digest(SETTINGS), SETTINGS)
    assert environ["SPT_NOENV"] == "1"
    assert {name: environ[name] for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize(
    "text",
    [
        "0123456789abcdef:",
        "0123456789abcdef:NCCL_ALGO",
        "yes",
        "",
        "0123:NCCL_ALGO",
        "none",
        "none:",
    ],
)
def test_marker_is_recognised_as_by_every_route(text: str) -> None:
    is_mark = parse_marker(text) is not None or text == NOTHING_APPLIED

    assert launching.is_decided({"NCCLTUNE_APPLIED": text}) == is_mark


def test_marker_of_a_launch_that_gets_nothing_is_left_too() -> None:
    environ = {"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"]}

    launching.tune(["/site/sglang/launch_server.py", *EAGLE3], environ)

    assert environ.pop("NCCLTUNE_APPLIED") == NOTHING_APPLIED
    assert set(environ) == {"NCCLTUNE_HOME"}


# The store


def break_json(path: Path) -> None:
    path.write_text(path.read_text()[:40])


def add_line(line: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(path.read_text().replace("{", f"{{{line},", 1))

    return change


def set_setting(name: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = json.loads(path.read_text())
        data["settings"][name] = value
        path.write_text(json.dumps(data))

    return change


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


BROKEN: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "truncated": break_json,
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "huge": lambda path: path.write_text(" " * (2**20 + 1)),
    "pipe": make_pipe,
    "folder": make_folder,
    "dangling": make_dangling,
    "other-schema": lambda path: path.write_text(
        path.read_text().replace("profile/1", "profile/9")
    ),
    "unknown-key": add_line('"colour": 1'),
    "key-twice": add_line('"source": "a"'),
    "other-name": add_line('"name": "other"'),
    "bands": lambda path: path.write_text(path.read_text().replace('"bands": []', '"bands": [1]')),
    "nan": lambda path: path.write_text(
        path.read_text().replace('"measured": {}', '"measured": {"a": NaN}')
    ),
    "preload": set_setting("LD_PRELOAD", "/tmp/x.so"),
    "forbidden": set_setting("NCCL_CONF_FILE", "/tmp/x"),
    "made-up": set_setting("NCCL_ALGORITHM", "Ring"),
    "number": set_setting("NCCL_MAX_CTAS", 8),
    "quoted": set_setting("NCCL_MAX_CTAS", '"8"'),
    "comment": set_setting("NCCL_PROTO", "LL # small"),
    "line-break": set_setting("NCCL_PROTO", "LL\nNCCL_X=1"),
    "blank": set_setting("NCCL_MAX_CTAS", " 8"),
    "no-value": set_setting("NCCL_MAX_CTAS", ""),
    "world-writable": lambda path: path.chmod(0o666),
    "other-owner": give_away,
}


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
def test_profile_that_the_store_refuses_is_refused(fault: Callable[[Path], object]) -> None:
    path = save()
    fault(path)
    if os.geteuid() != 0 and path.exists() and path.stat().st_mode & 0o002:
        pytest.skip("only root minds who can write a profile")

    assert read_active().profile is None
    decision = decide()

    assert (decision.digest, decision.applied, decision.is_degraded) == (None, {}, True)
    assert "kimi" in decision.reason
    assert decision.reason.startswith("warning: ")


@pytest.mark.parametrize(
    "settings",
    [
        {"NCCL_BUFFSIZE": "-1"},
        {"NCCL_ALGO": "Foo"},
        {"NCCL_NTHREADS": "7"},
        {"NCCL_MAX_CTAS": "0"},
        {"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "8"},
        {"NCCL_ALGO": "allreduce:Ring", "NCCL_PROTO": "LL"},
        {"NCCL_MAX_CTAS": "8", "NCCL_MAX_NCHANNELS": "8"},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_profile_with_values_that_the_store_refuses_is_refused(settings: dict[str, str]) -> None:
    path = save()
    path.write_text(format_profile(Profile("kimi", settings)))

    assert read_active().profile is None
    decision = decide()

    assert (decision.digest, decision.applied, decision.is_degraded) == (None, {}, True)
    assert "nccltune profile activate kimi" in decision.reason


@pytest.mark.parametrize("change", [{"digest": None}, {"digest": "0" * 16}, {"digest": 7}])
def test_profile_that_nobody_has_checked_is_refused(change: dict[str, object]) -> None:
    path = save().parents[1] / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, **change}))

    decision = decide()

    assert (decision.digest, decision.is_degraded) == (None, True)
    assert "nccltune profile activate kimi" in decision.reason


def test_profile_after_every_step_is_the_one_that_was_checked() -> None:
    other = {"NCCL_PROTO": "allreduce:LL128"}
    save("other", other)
    save()
    assert decide().applied == SETTINGS

    rollback()
    assert decide().applied == other
    rollback()
    assert decide().applied == SETTINGS

    save_candidate(Profile("kimi", {"NCCL_MAX_CTAS": "4"}))  # the active one keeps its settings
    assert decide().applied == SETTINGS


@pytest.mark.parametrize("seed", range(20))
def test_profile_that_the_store_takes_is_taken(seed: int) -> None:
    settings = random_settings(random.Random(seed))
    save(settings=settings)

    decision = decide()

    assert decision.digest == settings_digest(settings)
    assert decision.applied == settings


@pytest.mark.parametrize(
    ("text", "is_silent"),
    [
        (None, True),
        ('{"schema": "nccltune.state/1", "active": null}', True),
        ('{"schema": "nccltune.state/1", "active": "../x"}', False),
        ('{"schema": "nccltune.state/9", "active": "kimi"}', False),
        ('{"schema": ', False),
    ],
    ids=["absent", "none-active", "walks", "other-schema", "truncated"],
)
def test_state_without_an_active_profile_changes_nothing(text: str | None, is_silent: bool) -> None:
    path = save().parents[1] / "state.json"
    path.unlink()
    if text is not None:
        path.write_text(text)

    decision = decide()

    assert (decision.digest, decision.is_silent) == (None, is_silent)


@pytest.mark.parametrize(
    ("policy", "tokens", "is_covered"),
    [
        ("eagle3", ["--tp", "2", "--speculative-algorithm", "EAGLE3"], True),
        ("eagle3", ["--tp", "2", "--speculative-algorithm", "NEXTN"], False),
        ("speculative", ["--tp", "2", "--speculative-algorithm", "NEXTN"], True),
        ("speculative", ["--tp", "2"], False),
        ("all", ["--tp", "2"], True),
        ("all", ["--tp", "1"], False),
        ("all", ["--tp", "16", "--nnodes", "2"], False),
    ],
)
def test_policy_decides_which_launches_are_covered(
    policy: str, tokens: list[str], is_covered: bool
) -> None:
    save()
    text = json.dumps({"schema": "nccltune.policy/1", "launches": policy})
    (state_dir() / "policy.json").write_text(text)

    assert (decide(*tokens).digest is not None) == is_covered


def test_policy_that_cannot_be_read_covers_eagle3_alone(capfd: pytest.CaptureFixture[str]) -> None:
    save()
    (state_dir() / "policy.json").write_text('{"schema": "nccltune.policy/1", "launches": "any"}')

    assert decide("--tp", "2").digest is None
    assert decide().digest is not None
    assert "EAGLE-3 launches alone get a profile" in capfd.readouterr().err


# The host


def make_driver(
    root: Path,
    *,
    version: str = "580.159.04",
    uuids: list[str] = UUIDS,
    model: str = "NVIDIA H200",
    line: str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build",
) -> tuple[Path, Path]:
    """Lay out what the driver shows in procfs, and its device files; return both folders."""
    proc, dev = root / "proc", root / "dev"
    folder = proc / "driver/nvidia"
    for idx, uuid in enumerate(uuids):
        gpu = folder / "gpus" / f"0000:{idx + 1:02x}:00.0"
        gpu.mkdir(parents=True)
        facts = f"Model: \t\t {model}\nIRQ: 1\nGPU UUID: \t {uuid}\nDevice Minor: \t {idx}\n"
        (gpu / "information").write_text(facts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version").write_text(line.format(version) + "\nGCC version: gcc 12\n")
    dev.mkdir()
    for idx in range(len(uuids)):
        (dev / f"nvidia{idx}").touch()
    return proc, dev


def made_on(count: int = 2, **changes: Any) -> Fingerprint:
    same = Fingerprint(
        gpu_names=("NVIDIA H200",) * count,
        gpu_uuids=tuple(UUIDS[:count]),
        driver_version="580.159.04",
        nccl_version="2.28.9",
        link_matrix=tuple(
            tuple("X" if i == j else "NODE" for j in range(count)) for i in range(count)
        ),
        numa_nodes=(0,) * count,
        world_size=count,
    )
    return replace(same, **changes)


def fit(
    root: Path, fingerprint: Fingerprint, *tokens: str, driver: Any = None, **environ: str
) -> str:
    proc, dev = driver or make_driver(root)
    launch = hook_command.read_command(["--tp", "2", *tokens])
    library = root / "libnccl.so.2.28.9"
    library.touch()
    own = {"SGLANG_NCCL_SO_PATH": str(library), **environ}
    data = fingerprint.to_json()
    return hook_host.check_fit(data, launch, own, proc_root=proc, dev_root=dev)


@pytest.mark.parametrize(
    ("said_of", "visible", "is_it"),
    [
        (UUIDS, None, True),
        (UUIDS[:2], "0,1", True),
        (UUIDS[:2], None, False),
        (UUIDS[:2], "0,2", False),
        (UUIDS, "9", False),
        ([], None, False),
        ([7, None], None, False),
    ],
)
def test_a_persons_word_is_for_the_gpus_that_it_was_said_of(
    said_of: list[Any], visible: str | None, is_it: bool, tmp_path: Path
) -> None:
    proc, dev = make_driver(tmp_path)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    found = hook_host.is_insisted_on(said_of, environ, proc_root=proc, dev_root=dev)

    assert found is is_it


@pytest.mark.parametrize("source", ["shared-gpu", "recording:h200-2x-shm"])
def test_decide_on_what_was_not_measured_on_real_ranks_needs_a_person(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [hook_host.Gpu(uuid, "NVIDIA H200") for uuid in UUIDS]
    monkeypatch.setattr(hook_host, "read_gpus", lambda *_: gpus)
    path = save()
    path.write_text(format_profile(Profile("kimi", SETTINGS, source=source)))

    refused = decide()
    assert (refused.digest, refused.is_degraded) == (None, True)
    assert decide(NCCLTUNE_ANY_HOST="1").applied == SETTINGS

    activate("kimi", reason="manual", is_any_host=True, gpu_uuids=UUIDS)
    assert decide().applied == SETTINGS
    monkeypatch.setattr(hook_host, "read_gpus", lambda *_: [hook_host.Gpu("GPU-other", "x")])
    assert decide().is_degraded


def test_fit_on_the_same_gpus_is_identical(tmp_path: Path) -> None:
    assert fit(tmp_path, made_on()) == "identical"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"driver_version": "580.10.01"}, "equivalent"),
        ({"driver_version": "570.10.01"}, "foreign"),
        ({"driver_version": None}, "foreign"),
        ({"nccl_version": "2.27.5"}, "foreign"),
        ({"nccl_version": None}, "foreign"),
        ({"gpu_uuids": (UUIDS[1], UUIDS[0])}, "unsure"),
        ({"gpu_names": ("NVIDIA B200",) * 2, "gpu_uuids": ("GPU-1", "GPU-2")}, "foreign"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fit_is_never_more_generous_than_a_full_comparison(
    changes: dict[str, Any], outcome: str, tmp_path: Path
) -> None:
    fingerprint = made_on(**changes)

    try:
        found = fit(tmp_path, fingerprint)
    except hook_host.Foreign:
        found = "foreign"
    except hook_host.Unsure:
        found = "unsure"

    # What is not read here is hidden; the pure rule then says what the same GPUs are worth.
    hidden = ((None,) * 2,) * 2
    here = made_on(link_matrix=hidden, numa_nodes=(None,) * 2, is_partial=True)
    full = compare(fingerprint, here).kind
    assert found == outcome
    assert (found in ("identical", "equivalent")) == (full is MatchKind.EQUIVALENT)


@pytest.mark.parametrize(
    ("tokens", "environ", "uuids"),
    [
        (["--base-gpu-id", "2"], {}, UUIDS[2:]),
        (["--gpu-id-step", "2"], {}, [UUIDS[0], UUIDS[2]]),
        ([], {"CUDA_VISIBLE_DEVICES": "3,1"}, [UUIDS[3], UUIDS[1]]),
        ([], {"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]}, {UUIDS[0][:10]}"}, [UUIDS[2], UUIDS[0]]),
    ],
)
def test_fit_follows_the_order_that_the_launch_asks_for(
    tokens: list[str], environ: dict[str, str], uuids: list[str], tmp_path: Path
) -> None:
    assert fit(tmp_path, made_on(gpu_uuids=tuple(uuids)), *tokens, **environ) == "identical"


@pytest.mark.parametrize(
    "visible", ["", "0", "0,9", "0,0", "0,-1", "MIG-1234", "GPU-zz,0", "0,,1", "none"]
)
def test_visible_devices_that_name_no_gpus_apply_nothing(visible: str, tmp_path: Path) -> None:
    with pytest.raises((hook_host.Unsure, hook_host.Foreign)):
        fit(tmp_path, made_on(), CUDA_VISIBLE_DEVICES=visible)


def test_gpus_without_a_device_file_are_not_counted(tmp_path: Path) -> None:
    driver = make_driver(tmp_path)
    for idx in (0, 2):
        (driver[1] / f"nvidia{idx}").unlink()

    assert fit(tmp_path, made_on(gpu_uuids=(UUIDS[1], UUIDS[3])), driver=driver) == "identical"


@pytest.mark.parametrize("fault", ["no-driver", "no-gpus", "no-uuid", "two-models", "groups"])
def test_what_cannot_be_seen_applies_nothing(fault: str, tmp_path: Path) -> None:
    proc, dev = make_driver(tmp_path)
    folder = proc / "driver/nvidia"
    tokens: list[str] = []
    if fault == "no-driver":
        (folder / "version").unlink()
    elif fault == "no-gpus":
        (folder / "gpus").rename(folder / "hidden")
    elif fault == "groups":
        tokens = ["--dp-size", "2"]
    else:
        path = min((folder / "gpus").glob("*/information"))
        old, new = (UUIDS[0], "GPU-????????") if fault == "no-uuid" else ("H200", "B200")
        path.write_text(path.read_text().replace(old, new))

    with pytest.raises(hook_host.Unsure):
        fit(tmp_path, made_on(), *tokens, driver=(proc, dev))


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb", "535.161.08"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Rel", "580.65.06"),
    ],
)
def test_driver_version_is_read_in_either_wording(line: str, version: str, tmp_path: Path) -> None:
    proc, _ = make_driver(tmp_path, line=line)

    assert hook_host.read_driver(proc) == version


@pytest.mark.parametrize(
    ("size", "count", "version"), [(4, 1, "2.28.9"), (5, 1, None), (4, 2, None)]
)
def test_nccl_version_is_believed_where_the_wheel_speaks_of_that_file(
    size: int, count: int, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/lib/libnccl.so.2").write_bytes(b"nccl")
    for idx in range(count):
        info = tmp_path / f"nvidia_nccl_cu1{2 + idx}-2.28.9.dist-info"
        info.mkdir()
        (info / "RECORD").write_text(f"nvidia/nccl/lib/libnccl.so.2,sha256=x,{size}\n")
    monkeypatch.setattr(sys, "path", ["", "/nowhere", str(tmp_path)])

    assert hook_host.nccl_version({}) == version


def test_profile_of_a_shared_gpu_is_refused_unless_a_person_insists() -> None:
    path = save()
    path.write_text(path.read_text().replace('"source": ""', '"source": "shared-gpu"'))

    assert decide().digest is None
    assert decide(NCCLTUNE_ANY_HOST="1").digest is not None


def test_profile_of_an_unknown_host_is_applied_only_where_a_person_insists() -> None:
    save(fingerprint=made_on().to_json())

    refused, forced = decide(), decide(NCCLTUNE_ANY_HOST="1")

    assert (refused.digest, refused.is_degraded) == (None, True)
    assert "NCCLTUNE_ANY_HOST=1 overrides" in refused.reason
    assert forced.applied == SETTINGS


# Never a server that does not start


@pytest.mark.parametrize("place", ["store", "host", "say", "import"])
def test_load_never_raises(
    place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save(fingerprint=made_on().to_json())
    monkeypatch.setattr(sys, "argv", ["/site/sglang/launch_server.py", *EAGLE3])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken\nin two lines")

    if place == "import":
        monkeypatch.setitem(sys.modules, "nccltune_hook.launching", None)
    else:
        name = {"store": "read_active", "host": "read_driver", "say": "say"}[place]
        owner = {"store": hook_store, "host": hook_host, "say": launching}[place]
        monkeypatch.setattr(owner, name, fail)

    nccltune_hook.load()

    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("nccltune: warning: the hook failed (")
    assert not set(SETTINGS) & set(os.environ)


def test_record_that_cannot_be_written_costs_nothing() -> None:
    save()
    (state_dir() / "launches.jsonl").mkdir()
    environ = {"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"]}

    launching.tune(["/site/sglang/launch_server.py", *EAGLE3], environ)

    assert set(SETTINGS) <= set(environ)


def test_record_after_a_torn_line_is_read_back() -> None:
    save()
    (state_dir() / "launches.jsonl").write_text('{"route": "ru')

    launching.tune(["/site/sglang/launch_server.py", *EAGLE3], dict(os.environ))

    (found,) = read_launch_records()
    assert (found.route, found.pid, found.profile_name) == ("hook", os.getpid(), "kimi")
    assert found.settings == SETTINGS
    assert found.started_ticks > 0


def test_record_is_only_appended_however_large_the_file_is() -> None:
    path = save().parents[1] / "launches.jsonl"
    path.write_text("{}\n" * (MAX_FILE_BYTES // 3 + 1))
    before = path.stat()

    launching.tune(["/site/sglang/launch_server.py", *EAGLE3], dict(os.environ))

    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_size > before.st_size
    assert not path.with_name("launches.1.jsonl").exists()


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        ("short", "short"),
        ("x" * 5000, "x" * 200),
        ("\N{SNOWMAN}" * 200, "\N{SNOWMAN}" * 200),
        ("\N{OPEN FILE FOLDER}" * 200, ""),
    ],
    ids=["short", "long", "escaped", "no_room"],
)
def test_record_that_is_handed_over_fits_into_a_message(
    reason: str, found: str, tmp_path: Path
) -> None:
    save()
    (state_dir() / "launches.jsonl").mkdir()
    kept = {"NCCL_PROTO": "LL"}
    decision = launching.Decision(reason, name="kimi", applied=SETTINGS, kept=kept)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.settimeout(5.0)
        inbox.bind(str(tmp_path / "launches.sock"))
        launching.record(EAGLE3, {**os.environ, "NCCLTUNE_RUN_DIR": str(tmp_path)}, decision)
        message = inbox.recv(65536)

    record = parse_message(message)
    assert len(message) <= MAX_MESSAGE_BYTES
    assert record is not None
    assert (record.reason, record.settings) == (found, SETTINGS)
    assert record.kept == ({"NCCL_PROTO": ""} if found else {})


# In a server


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with the hook, as 'nccltune install' writes it."""
    folder = tmp_path / "hook-site"
    for name, text in hook_files(ROOT / "hook").items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def ranks(server: Running) -> list[dict[str, str]]:
    found = []
    for entry in server.records():
        if entry["role"] == "rank":
            assert isinstance(entry["environ"], dict)
            found.append(entry["environ"])
    return found


def test_every_rank_of_a_launch_typed_by_hand_gets_the_profile(site: Path, tmp_path: Path) -> None:
    save()

    with running_server(tmp_path, environ={**os.environ, "PYTHONPATH": str(site)}) as server:
        found = ranks(server)
        log = server.log_path.read_text()
        (launch,) = read_launch_records()

    assert len(found) == 2
    for environ in found:
        assert SETTINGS.items() <= environ.items()
        assert environ["SPT_NOENV"] == "1"
    assert log.count("nccltune: ") == 1
    assert "nccltune: profile kimi is applied" in log
    assert (launch.pid, launch.route) == (server.process.pid, "hook")


def test_operators_value_wins_and_is_named(site: Path, tmp_path: Path) -> None:
    save()
    environ = {**os.environ, "PYTHONPATH": str(site), "NCCL_MAX_NCHANNELS": "4"}

    with running_server(tmp_path, environ=environ) as server:
        found = ranks(server)
        log = server.log_path.read_text()

    assert [each.get("NCCL_MAX_CTAS") for each in found] == [None, None]
    assert [each["NCCL_PROTO"] for each in found] == ["allreduce:LL", "allreduce:LL"]
    assert "kept as you set it: NCCL_MAX_NCHANNELS=4" in log


@pytest.mark.parametrize(
    "changes",
    [
        {"NCCLTUNE_APPLIED": "0123456789abcdef:"},
        {"NCCLTUNE_APPLIED": "none:"},
        {"NCCLTUNE_HOOK": "0"},
        {"SGLANG_PLUGINS": "another"},
    ],
    ids=["decided", "decided-none", "off", "not-listed"],
)
def test_launch_that_is_not_the_hooks_to_decide_stays_as_it_is(
    changes: dict[str, str], site: Path, tmp_path: Path
) -> None:
    save()
    environ = {**os.environ, "PYTHONPATH": str(site), **changes}

    with running_server(tmp_path, environ=environ) as server:
        found = ranks(server)
        log = server.log_path.read_text()

    assert not [each for each in found if set(SETTINGS) & set(each)]
    assert "nccltune: " not in log
    assert read_launch_records() == ()


@pytest.mark.parametrize("fault", ["truncated", "deleted", "preload", "pipe"])
def test_server_starts_on_defaults_under_a_broken_profile(
    fault: str, site: Path, tmp_path: Path
) -> None:
    BROKEN[fault](save())

    with running_server(tmp_path, environ={**os.environ, "PYTHONPATH": str(site)}) as server:
        found = ranks(server)
        log = server.log_path.read_text()

    assert not [each for each in found if {"NCCL_PROTO", "LD_PRELOAD"} & set(each)]
    assert log.count("nccltune: warning: profile kimi cannot be used") == 1


def test_server_starts_with_a_hook_that_is_half_there(site: Path, tmp_path: Path) -> None:
    save()
    (site / "nccltune_hook/host.py").unlink()

    with running_server(tmp_path, environ={**os.environ, "PYTHONPATH": str(site)}) as server:
        log = server.log_path.read_text()

    assert log.count("nccltune: warning: the hook failed (ModuleNotFoundError") == 1


def test_failed_launch_is_on_record_with_its_process(site: Path, tmp_path: Path) -> None:
    save()
    environ = standin_environ({**os.environ, "PYTHONPATH": str(site)}, fail="usage")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    process = subprocess.Popen(
        module_command(port=port), env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    process.wait(30)

    assert process.returncode != 0
    (found,) = read_launch_records()
    assert (found.pid, found.profile_name) == (process.pid, "kimi")
    assert found.command_digest == command_digest(serve_command(port=port))


def test_hook_loads_nothing_but_the_standard_library(site: Path) -> None:
    save()
    code = (
        "import sys; sys.argv = ['/x/sglang/launch_server.py', *sys.argv[1:]]\n"
        "before = set(sys.modules)\n"
        "import nccltune_hook; nccltune_hook.load()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names - {'__mp_main__'}))"
    )

    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *EAGLE3],
        env={"PYTHONPATH": str(site), "NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"]},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == ["nccltune_hook"]
    assert "profile kimi is applied" in done.stderr
