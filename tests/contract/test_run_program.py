"""``nccltune run`` as a real program: what it becomes, what it hands over, what it survives."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nccltune.inject.decision import command_digest
from nccltune.inject.marker import (
    KEEP_ENVIRON,
    MARKER,
    NOTHING_APPLIED,
    format_marker,
    settings_digest,
)
from nccltune.profile import Profile
from nccltune.store import (
    activate,
    deactivate,
    profiles_dir,
    read_launch_records,
    save_candidate,
)
from tests.support.launch_host import (
    REPOSITORY,
    SETTINGS,
    LaunchHost,
    make_host,
    not_mounted,
    read_block,
)

IS_ROOT = os.geteuid() == 0
MARK = format_marker(settings_digest(SETTINGS), SETTINGS)
NOTHING = {MARKER: NOTHING_APPLIED}
OURS = {**SETTINGS, MARKER: MARK, KEEP_ENVIRON: "1"}
SHOW_SELF = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(),
    "children": open("/proc/self/task/%d/children" % os.getpid()).read(),
    "fds": sorted(os.listdir("/proc/self/fd")),
    "status": open("/proc/self/status").read(),
    "argv": sys.argv,
}))
"""


@pytest.fixture
def host(tmp_path: Path) -> LaunchHost:
    """A host with an active profile that was made on it."""
    host = make_host(tmp_path / "host")
    save_candidate(host.profile())
    activate("kimi", reason="manual")
    return host


class Ran:
    """What became of one ``nccltune run``."""

    def __init__(self, process: subprocess.CompletedProcess[str], pid: int, report: Path) -> None:
        self.status = process.returncode
        self.out = process.stdout
        self.lines = process.stderr.splitlines()
        self.pid = pid
        self.environ = read_block(report) if report.exists() else None


def run(
    host: LaunchHost,
    *words: str,
    environ: dict[str, str] | None = None,
    command: Sequence[str] | None = None,
    before: str = "",
    **changes: Any,
) -> Ran:
    """Run the program as installed; ``before`` is Python that breaks something in it."""
    entry = host.root / "nccltune"
    lines = [
        f"#!{sys.executable}",
        "import sys",
        f"sys.path.insert(0, {str(REPOSITORY)!r})",
        before,
        "from nccltune.entry import main",
        "sys.exit(main())",
    ]
    entry.write_text("\n".join(lines))
    entry.chmod(0o755)
    report = host.root / "environ"
    report.unlink(missing_ok=True)
    full = {**(host.environ() if environ is None else environ), "STANDIN_REPORT": str(report)}
    argv = [str(entry), "run", *words, "--", *(host.command if command is None else command)]
    changes.setdefault("stderr", subprocess.PIPE)
    process = subprocess.Popen(argv, env=full, stdout=subprocess.PIPE, text=True, **changes)
    out, err = process.communicate(timeout=60)
    done = subprocess.CompletedProcess(argv, process.returncode, out, err or "")
    return Ran(done, process.pid, report)


def added(host: LaunchHost, ran: Ran) -> dict[str, str]:
    """Return what the command got beside what it was started with."""
    assert ran.environ is not None
    before = host.environ()
    assert {name: ran.environ.get(name) for name in before} == before
    return {n: v for n, v in ran.environ.items() if n not in before and n != "STANDIN_REPORT"}


def test_the_command_gets_the_profile_and_nothing_else(host: LaunchHost) -> None:
    ran = run(host)

    assert ran.status == 0
    assert added(host, ran) == OURS
    assert len(ran.lines) == 1
    assert ran.lines[0].startswith("nccltune: profile kimi is applied: identical host: NCCL_ALGO=")


def test_the_launch_is_on_record_as_the_process_that_it_becomes(host: LaunchHost) -> None:
    ran = run(host)

    (record,) = read_launch_records()
    assert (record.route, record.pid, record.profile_name) == ("run", ran.pid, "kimi")
    assert record.started_ticks > 0
    assert record.command_digest == command_digest(host.command)
    assert record.settings == SETTINGS


def test_the_command_is_this_process_with_nothing_of_ours_left(host: LaunchHost) -> None:
    ran = run(host, command=(sys.executable, "-S", "-c", SHOW_SELF, "-x", ""))

    found = json.loads(ran.out)
    assert found["pid"] == ran.pid
    assert found["argv"] == ["-c", "-x", ""]
    assert found["children"] == ""
    assert found["fds"] == ["0", "1", "2", "3"]  # the last is the listing itself
    ignored = next(row for row in found["status"].splitlines() if row.startswith("SigIgn"))
    # Python ignores these two for itself, and it is Python again that shows it.
    assert int(ignored.split()[1], 16) & ~_bits(signal.SIGPIPE, signal.SIGXFSZ) == 0


def test_signals_that_python_ignores_are_the_commands_again(host: LaunchHost) -> None:
    ran = run(host, command=("grep", "SigIgn", "/proc/self/status"))

    assert int(ran.out.split()[1], 16) == 0


def test_signals_that_the_shell_ignores_stay_ignored(host: LaunchHost) -> None:
    run(host)
    script = f"trap '' PIPE; \"{host.root}/nccltune\" run -- grep SigIgn /proc/self/status; exit $?"

    done = subprocess.run(
        ["sh", "-c", script], env=host.environ(), stdout=subprocess.PIPE, text=True, check=True
    )

    assert int(done.stdout.split()[1], 16) == _bits(signal.SIGPIPE)


def _bits(*signals: int) -> int:
    return sum(1 << (number - 1) for number in signals)


def test_an_empty_environment_gets_the_profile_and_nothing_else(host: LaunchHost) -> None:
    save_candidate(Profile("kimi", SETTINGS))
    home = {"NCCLTUNE_HOME": os.environ["NCCLTUNE_HOME"]}

    ran = run(host, environ=home)

    assert ran.status == 0
    assert ran.environ == {
        **home,
        **OURS,
        "STANDIN_REPORT": str(host.root / "environ"),
    }


def test_a_locale_that_the_operator_set_stays(host: LaunchHost) -> None:
    ran = run(host, environ=host.environ(LC_CTYPE="C.UTF-8"))

    assert (ran.environ or {})["LC_CTYPE"] == "C.UTF-8"


def test_values_that_are_no_text_arrive_as_they_are(host: LaunchHost) -> None:
    ran = run(host, environ=host.environ(ODD=os.fsdecode(b"\xff\xfe\n=x")))

    assert os.fsencode((ran.environ or {})["ODD"]) == b"\xff\xfe\n=x"


@pytest.mark.parametrize("status", [0, 3, 42])
def test_the_commands_status_is_the_programs(host: LaunchHost, status: int) -> None:
    assert run(host, environ=host.environ(STANDIN_STATUS=str(status))).status == status


def test_the_commands_signal_is_the_programs(host: LaunchHost) -> None:
    assert run(host, command=("sh", "-c", "kill -TERM $$")).status == -signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("no-such-command-here",), 127),
        (("/nowhere/sglang", "serve"), 127),
        (("/etc",), 126),
        (("/etc/passwd",), 126),
    ],
)
def test_a_command_that_cannot_be_run_ends_as_with_env(
    host: LaunchHost, command: tuple[str, ...], status: int
) -> None:
    ran = run(host, command=command)

    assert ran.status == status == _env_status(command)
    assert len(ran.lines) == 1
    assert read_launch_records() == ()


def _env_status(command: Sequence[str]) -> int:
    return subprocess.run(["env", *command], stderr=subprocess.DEVNULL, check=False).returncode


def test_a_broken_interpreter_line_ends_as_with_env(host: LaunchHost) -> None:
    script = host.root / "script"
    script.write_text("#!/nowhere/python\n")
    script.chmod(0o755)

    assert run(host, command=(str(script),)).status == _env_status([str(script)]) == 127


def test_a_script_without_its_first_line_is_the_shells(host: LaunchHost) -> None:
    script = host.root / "script"
    script.write_text('echo "$1 $NCCL_ALGO"\n')
    script.chmod(0o755)

    ran = run(host, command=(str(script), "hello"))

    assert (ran.status, ran.out) == (0, "hello \n")


def test_an_environment_with_no_room_for_the_profile_costs_the_profile_alone(
    host: LaunchHost,
) -> None:
    def start(pad_bytes: int) -> Ran | None:
        pads = {f"PAD{idx}": "x" * (pad_bytes // 4) for idx in range(4)}
        pads["PAD"] = "x" * (pad_bytes % 4)
        try:
            return run(
                host,
                environ=host.environ(**pads),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20)),
            )
        except OSError as error:
            # Another one says that this machine is busy, and nothing of the room.
            if error.errno != errno.E2BIG:
                raise
            return None

    # The most that the program itself can still be started with.
    low, high = 0, 2**18
    fullest: Ran | None = None
    while high - low > 1:
        middle = (low + high) // 2
        ran = start(middle)
        if ran is None:
            high = middle
        else:
            low, fullest = middle, ran

    assert fullest is not None
    assert fullest.status == 0
    assert "there is no room for the profile" in fullest.lines[-1]
    assert fullest.environ is not None
    assert fullest.environ.get(MARKER, NOTHING_APPLIED) == NOTHING_APPLIED
    assert not SETTINGS.keys() & fullest.environ.keys()


def test_ctrl_c_ends_quietly(host: LaunchHost) -> None:
    before = (
        "import nccltune.inject.decision as i, os, signal\n"
        "def decide(*_, **__):\n"
        "    for pid in (os.getppid(), os.getpid()):  # as a terminal does\n"
        "        os.kill(pid, signal.SIGINT)\n"
        "i.decide = decide"
    )

    ran = run(host, before=before)

    assert (ran.status, ran.lines, ran.environ) == (130, [], None)


def test_bad_usage_ends_as_with_env(host: LaunchHost) -> None:
    assert run(host, "--nonsense").status == 125


def test_a_closed_stderr_costs_nothing(host: LaunchHost) -> None:
    words = f'exec "{host.root}/nccltune" run -- "$@" 2>&- 0<&-'
    run(host)
    report = host.root / "environ"
    report.unlink()
    argv = ["sh", "-c", words, "sh", *host.command]

    subprocess.run(argv, env={**host.environ(), "STANDIN_REPORT": str(report)}, check=True)

    assert read_block(report)[MARKER] == MARK


def _delete(host: LaunchHost) -> None:
    (profiles_dir() / "kimi.json").unlink()


def _cut(host: LaunchHost) -> None:
    path = profiles_dir() / "kimi.json"
    os.truncate(path, path.stat().st_size // 2)


def _empty_state(host: LaunchHost) -> None:
    os.truncate(profiles_dir().parent / "state.json", 0)


def _binary(host: LaunchHost) -> None:
    (profiles_dir() / "kimi.json").write_bytes(bytes(range(256)) * 64)


def _foreign(host: LaunchHost) -> None:
    other = make_host(host.root / "other", kind="nvswitch")
    save_candidate(other.profile())


def _other_nccl(host: LaunchHost) -> None:
    (host.site / "nvidia_nccl_cu13-2.28.9.dist-info").rename(
        host.site / "nvidia_nccl_cu13-2.30.7.dist-info"
    )


def _pipe(host: LaunchHost) -> None:
    path = profiles_dir() / "kimi.json"
    path.unlink()
    os.mkfifo(path)


def _link(host: LaunchHost) -> None:
    path = profiles_dir() / "kimi.json"
    path.unlink()
    path.symlink_to("/dev/zero")


def _hostile(host: LaunchHost) -> None:
    path = profiles_dir() / "kimi.json"
    path.write_text(path.read_text().replace("NCCL_MAX_CTAS", "LD_PRELOAD"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_delete, "kimi.json: cannot be read (No such file or directory)"),
        (_cut, "ends too early"),
        (_empty_state, "state.json:1: is empty"),
        (_binary, "kimi.json"),
        (_foreign, "gpu_names (8x NVIDIA H200 there, 8x NVIDIA RTX PRO 6000 here)"),
        (_other_nccl, "nccl_version (2.28.9 there, 2.30.7 here)"),
        (_pipe, "not a regular file"),
        (_link, "not a regular file"),
        (_hostile, "LD_PRELOAD"),
    ],
    ids=["deleted", "cut", "state", "binary", "foreign", "nccl", "pipe", "device", "hostile"],
)
def test_a_profile_that_cannot_be_used_costs_the_profile_alone(
    host: LaunchHost, damage: Any, named: str
) -> None:
    damage(host)

    ran = run(host)

    assert ran.status == 0
    assert added(host, ran) == NOTHING
    assert len(ran.lines) == 1
    assert "the command starts WITHOUT its profile" in ran.lines[0]
    assert named in ran.lines[0]
    (record,) = read_launch_records()
    assert (record.digest, record.is_degraded) == (None, True)

    refused = run(host, "--require-profile")
    assert refused.status == 3
    assert refused.environ is None
    assert named in refused.lines[0]
    assert len(read_launch_records()) == 1


@pytest.mark.skipif(not IS_ROOT, reason="needs root to give files away")
@pytest.mark.parametrize("name", ["state.json", "profiles/kimi.json"])
def test_a_profile_in_other_hands_costs_the_profile_alone(host: LaunchHost, name: str) -> None:
    os.chown(profiles_dir().parent / name, 4711, 4711)

    ran = run(host)

    assert ran.status == 0
    assert added(host, ran) == NOTHING
    assert "belongs to user 4711" in ran.lines[0]


def test_without_an_active_profile_the_command_starts_as_it_is(host: LaunchHost) -> None:
    deactivate()

    ran = run(host)

    assert added(host, ran) == NOTHING
    assert ran.lines == ["nccltune: no profile for this command: no profile is active"]


def test_another_command_starts_as_it_is(host: LaunchHost) -> None:
    ran = run(host, command=("sh", "-c", "env | grep -c NCCL_"))

    assert ran.out == "0\n"
    assert "not an SGLang launch" in ran.lines[0]


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ("sys.modules['nccltune.inject.decision'] = None", "ModuleNotFoundError"),
        ("sys.modules['nccltune.store'] = None", "ModuleNotFoundError"),
        (
            "import nccltune.inject.resolver as r\nr.resolve = lambda **_: 1 / 0\n"
            "import nccltune.inject.decision as i\ni.resolve = r.resolve",
            "bug in nccltune: ZeroDivisionError",
        ),
        (
            "import nccltune.inject.decision as i, os\n"
            "i.decide = lambda *_, **__: os.kill(os.getpid(), 11)",
            "SIGSEGV",
        ),
        (
            "import nccltune.inject.decision as i, nccltune.inject.running as r, time\n"
            "r.LOOK_UP_TIMEOUT_S = 0.5\ni.decide = lambda *_, **__: time.sleep(60)",
            "no answer within 0.5 s",
        ),
        (
            "import nccltune.inject.decision as i, sys\ni.decide = lambda *_, **__: sys.exit(7)",
            "without an answer",
        ),
        ("import os\nos.fork = lambda: (_ for _ in ()).throw(OSError(11, 'no pids'))", "no pids"),
    ],
    ids=["import", "store", "raises", "crashes", "hangs", "exits", "fork"],
)
def test_a_fault_of_ours_costs_the_profile_alone(host: LaunchHost, before: str, named: str) -> None:
    ran = run(host, before=before)

    assert ran.status == 0
    assert added(host, ran) == {}  # nothing was decided, and the hook may still
    assert len(ran.lines) == 1
    assert named in ran.lines[0]
    assert "WITHOUT" in ran.lines[0]
    assert run(host, "--require-profile", before=before).status == 3


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("raise ImportError('no pynvml')", "ImportError: no pynvml"),
        ("import os; os.kill(os.getpid(), 11)", "the NVIDIA driver does not answer"),
        ("import time; time.sleep(60)", "no answer within 0.3 s"),
    ],
    ids=["absent", "crashes", "hangs"],
)
def test_a_fault_of_the_driver_costs_the_profile_alone(
    host: LaunchHost, module: str, named: str
) -> None:
    (host.nvml / "pynvml.py").write_text(module)
    patience = "import nccltune.inject.driver_answer as d\nd.DRIVER_TIMEOUT_S = 0.3"

    ran = run(host, before=patience)

    assert ran.status == 0
    assert added(host, ran) == NOTHING
    assert named in ran.lines[0]

    forced = run(host, "--any-host", before=patience)
    assert added(host, forced) == OURS


def test_a_person_who_insists_at_activation_need_not_at_every_launch(host: LaunchHost) -> None:
    save_candidate(host.profile("far", source="recording:h200-2x-shm"))
    gpus = host.fingerprint().gpu_uuids
    activate("far", reason="manual", is_any_host=True, gpu_uuids=gpus)

    assert added(host, run(host)) == OURS

    activate("kimi", reason="manual")
    activate("far", reason="manual", is_any_host=True, gpu_uuids=("GPU-of-another-host",))
    state = profiles_dir().parent / "state.json"
    state.write_text(state.read_text().replace(gpus[0], "GPU-gone"))
    ran = run(host)
    assert added(host, ran) == NOTHING
    assert "--any-host overrides" in ran.lines[0]


def test_a_host_without_a_driver_gets_no_profile_unless_a_person_says_so(
    host: LaunchHost,
) -> None:
    environ = host.environ(PYTHONPATH=f"{host.site}:{REPOSITORY}")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")

    ran = run(host, environ=environ)
    assert "this host is unknown: no NVIDIA driver found" in ran.lines[0]
    assert (ran.environ or {})[MARKER] == NOTHING_APPLIED

    assert (run(host, "--any-host", environ=environ).environ or {})[MARKER] == MARK


def test_a_record_that_cannot_be_written_costs_the_record_alone(host: LaunchHost) -> None:
    (profiles_dir().parent / "launches.jsonl").mkdir()

    ran = run(host)

    assert added(host, ran) == OURS
    assert "not on record" in ran.lines[1]


@pytest.mark.parametrize("kind", ["missing", "dangling", "file"])
def test_a_state_folder_that_is_not_mounted_is_loud_and_stays_as_it_is(
    host: LaunchHost, tmp_path: Path, kind: str
) -> None:
    home = not_mounted(tmp_path, kind)

    ran = run(host, environ=host.environ(NCCLTUNE_HOME=str(home)))

    assert ran.status == 0
    assert ran.lines[0].startswith("nccltune: warning: the command starts WITHOUT its profile: ")
    assert "NCCLTUNE_HOME names is not there" in ran.lines[0]
    assert not home.is_dir()
    required = run(host, "--require-profile", environ=host.environ(NCCLTUNE_HOME=str(home)))
    assert (required.status, required.environ) == (3, None)


@pytest.mark.parametrize("words", ["-i", "-vi", "--ignore-env", "-u NCCL_A -uNCCL_B"])
def test_a_profile_that_env_keeps_out_does_not_meet_the_requirement(
    host: LaunchHost, words: str
) -> None:
    names = dict(zip(("NCCL_A", "NCCL_B"), ("NCCL_ALGO", "NCCL_PROTO"), strict=True))
    for short, name in names.items():
        words = words.replace(short, name)
    settings = {name: SETTINGS[name] for name in names.values()}
    save_candidate(host.profile(settings=settings))
    activate("kimi", reason="manual")
    # The server's own packages are to be found all the same.
    packages = f"PYTHONPATH={host.environ()['PYTHONPATH']}"
    command = ("env", *words.split(), packages, *host.command)

    ran = run(host, "--require-profile", command=command)

    assert (ran.status, ran.environ) == (3, None)
    assert "would not reach the server: env -" in ran.lines[0]


@pytest.mark.parametrize("kind", ["device", "link", "pipe", "stdout"])
def test_a_report_goes_where_it_is_told_to_and_destroys_nothing(
    host: LaunchHost, tmp_path: Path, kind: str
) -> None:
    path = {"device": Path("/dev/null"), "stdout": Path("/dev/stdout")}.get(kind, tmp_path / kind)
    if kind == "link":
        path.symlink_to("report.json")
    if kind == "pipe":
        os.mkfifo(path)  # that nobody reads
    before = path.lstat().st_mode

    ran = run(host, "--report-file", str(path))

    assert ran.status == 0
    assert (ran.environ or {})[MARKER] == MARK
    assert path.lstat().st_mode == before
    if kind == "link":
        assert json.loads((tmp_path / "report.json").read_text())["data"]["profile"] == "kimi"
    if kind == "stdout":
        assert json.loads(ran.out)["data"]["profile"] == "kimi"


def test_a_report_that_cannot_be_written_costs_the_report_alone(host: LaunchHost) -> None:
    ran = run(host, "--report-file", "/nowhere/report.json")

    assert added(host, ran) == OURS
    assert "/nowhere/report.json: cannot be written" in ran.lines[1]


def test_the_report_says_what_was_decided(host: LaunchHost, tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    run(host, "--report-file", str(path), environ=host.environ(NCCL_ALGO="allreduce:Tree"))

    report = json.loads(path.read_text())
    assert (report["schema"], report["status"]) == ("nccltune.cli/1", "ok")
    assert report["data"]["kept_from_operator"] == {"NCCL_ALGO": "allreduce:Tree"}
    assert report["data"]["match"] == "identical"
    assert report["warnings"] == ["NCCL_ALGO=allreduce:Tree is the operator's and stays"]


def test_a_run_inside_a_run_takes_nothing_for_the_operators(host: LaunchHost) -> None:
    run(host)
    inner = (str(host.root / "nccltune"), "run", "--", *host.command)

    ran = run(host, command=inner)

    assert added(host, ran) == OURS
    assert not any("operator" in line for line in ran.lines)


def test_a_start_from_a_shell_of_an_earlier_profile_gets_the_active_one(host: LaunchHost) -> None:
    first = run(host)
    assert first.environ is not None
    save_candidate(host.profile("next", settings={"NCCL_NTHREADS": "256"}))
    activate("next", reason="manual")

    ran = run(host, environ={n: v for n, v in first.environ.items() if n != "STANDIN_REPORT"})
    assert "NCCL_ALGO" not in (ran.environ or {})
    assert (ran.environ or {})["NCCL_NTHREADS"] == "256"

    deactivate()
    off = run(host, environ={n: v for n, v in first.environ.items() if n != "STANDIN_REPORT"})
    assert not SETTINGS.keys() & (off.environ or {}).keys()
    assert (off.environ or {})[MARKER] == NOTHING_APPLIED


def test_python_m_is_found_like_the_script(host: LaunchHost) -> None:
    flags = host.command[2:]
    (host.site / "sglang" / "launch_server.py").write_text(
        "import os\nopen(os.environ['STANDIN_REPORT'], 'wb').write(\n"
        "    open('/proc/self/environ', 'rb').read())\n"
    )

    ran = run(host, command=(sys.executable, "-m", "sglang.launch_server", *flags))

    assert added(host, ran) == OURS


def test_nothing_heavy_is_loaded(host: LaunchHost) -> None:
    heavy = ("click", "rich", "torch", "optuna", "numpy", "httpx", "yaml")
    shadow = host.root / "shadow"
    shadow.mkdir()
    for name in heavy:
        (shadow / f"{name}.py").write_text(f"raise SystemExit('{name} was loaded')")
    before = f"sys.path.insert(0, {str(shadow)!r})"

    assert added(host, run(host, before=before)) == OURS
    shutil.rmtree(shadow)
