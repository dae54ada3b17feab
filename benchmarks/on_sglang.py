"""The experiments on a real SGLang, each one command: what runs there becomes docs/results/.

    python benchmarks/on_sglang.py --out DIR --model DIR [--stage NAME]... [-- SGLANG FLAG...]

``--model`` holds ``target`` and ``draft``, an EAGLE-3 pair; benchmarks/kimi_shaped_model.py writes
one without weights, to be served with ``--load-format dummy``. What a build of SGLang needs of its
environment is set by the caller; what it needs of its command line stands after ``--``.

Stages; each writes its raw data under --out and prints a short table:

routes   run, launch and the hook, each at tensor parallel 1 and with two ranks that share one GPU
         (--lane tp2: with a GPU each): is the profile in every rank, by ``nccltune status`` and by
         NCCL's own log
steps    tensor parallel 1: 2 against 5 draft steps
again    tensor parallel 1: the defaults against themselves
profile  tensor parallel 1: the defaults against a profile, which can change nothing there
table    tensor parallel 1: no speculation, 5 steps and 2 steps
url      two ranks that share one GPU, measured as they run: with the profile in both ranks, and
         with one rank that was started without it
killed   SIGKILL of the server, of a rank and of nccltune verify itself, in the middle
search   --tp GPUs: nccltune search for this very launch; host memory with --shm
tuned    --tp GPUs: the defaults, what a search found (--found FILE, else by the stage search under
         the same --out), with what was predicted beside what is measured; host memory with
         --shm; further arms with --arms
story    --tp GPUs: no speculation, 5 steps and 2 steps, with the defaults and with what was found
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from sglang_servers import (
    Run,
    generate,
    left_of,
    nodes_of,
    started,
    through,
    tree_of,
    wait_up,
)

from nccltune.bench.nccl_log import parse_nccl_log
from nccltune.sglang.endpoints import Endpoint

VERIFY_BYTES = 43008
"""One verify pass at batch size 1: 3 draft tokens x hidden 7168 x 2 bytes."""
PROFILE = "routes-proof"
SETTINGS = {
    "NCCL_ALGO": "allreduce:ring",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NTHREADS": "256",
    "NCCL_PROTO": "allreduce:LL",
}
"""Chosen to be seen in NCCL's log, not to be fast."""
LOPSIDED = {"NCCL_CGA_CLUSTER_SIZE": "2"}
"""Ranks may disagree on it; with another algorithm or protocol in one of them they hang."""
ROUTES = ("run", "launch", "hook")
LANES = ("tp1", "shared", "tp2")


def routes(run: Run) -> None:
    """Put a profile into servers by every route, and look whether it arrived."""
    keep_profile(run)
    run.call("activate", "profile", "activate", PROFILE, "--any-host")
    run.call("install", "install", "--no-units", "--python", run.python)
    try:
        lanes = run.options.lane or LANES[:2]
        names = run.options.route or ROUTES
        with ThreadPoolExecutor(len(lanes) * len(names)) as pool:
            servers = [pool.submit(try_route, run, lane, name) for lane in lanes for name in names]
            for server in servers:
                server.result()
    finally:
        run.call("uninstall", "uninstall", "--python", run.python)


def try_route(run: Run, lane: str, route: str) -> None:
    """Try one route in one lane; a failure is told, and leaves the others alone."""
    port = run.port(10 * ROUTES.index(route) + 100 * LANES.index(lane))
    try:
        one_route(run, lane, route, port)
    except (OSError, ValueError, KeyError) as error:
        print(f"{lane:6} {route:6} FAILED: {type(error).__name__}: {error}", flush=True)


def one_route(run: Run, lane: str, route: str, port: int) -> None:
    """Start one server by one route, and keep what status and NCCL say of it."""
    name = f"{lane}-{route}"
    logs: list[Path] = []
    with ExitStack() as stack:
        for number, (command, own) in enumerate(nodes_of(run, lane, port)):
            log = run.out / f"{name}-node{number}.log"
            report = run.out / f"{name}-node{number}-report.json"
            environ = {**run.environ, **own}
            if route == "hook":
                environ["NCCLTUNE_ANY_HOST"] = "1"
            logs.append(log)
            stream = stack.enter_context(log.open("w"))
            line = through(run, route, command, report)
            stack.enter_context(started(line, environ, stream))
        endpoint = Endpoint(port=port)
        ready_s = wait_up(endpoint)
        meta = generate(endpoint, 40)
        envelope = run.call(f"{name}-status", "status")
        text = subprocess.run(
            run.nccltune("status"), env=run.environ, capture_output=True, text=True, check=False
        )
        (run.out / f"{name}-status.txt").write_text(text.stdout + text.stderr)
    # Ports of the lanes differ, and every command names its own.
    servers = [
        s for s in envelope["data"]["servers"] if f"--port {port // 10}" in " ".join(s["command"])
    ]
    for server in servers:
        for rank in server["ranks"]:
            states = ", ".join(sorted({key["state"] for key in rank["keys"]}))
            what = f"{rank['rank'] or 'scheduler'}: {len(rank['keys'])} keys {states}"
            print(
                f"{lane:6} {route:6} up after {ready_s:5.1f} s, {meta['completion_tokens']} tokens;"
                f" status: {server['verdict']}, {what}",
                flush=True,
            )
    for log in logs:
        nccl = parse_nccl_log(log.read_text(errors="replace").splitlines())
        ours = {key: value for key, value in nccl.confirmed.items() if key in SETTINGS}
        print(
            f"{lane:6} {route:6} {log.name}: set by environment {ours};"
            f" AllReduce {VERIFY_BYTES} B: {nccl.used.get(VERIFY_BYTES, 'none')}",
            flush=True,
        )


def verify(run: Run, name: str, *words: str, environ: Mapping[str, str] | None = None) -> None:
    """Run ``nccltune verify``; keep its envelope and its table, print the table."""
    markdown = run.out / f"{name}.md"
    began = time.monotonic()
    more = ["--markdown", str(markdown)]
    if "--url" not in words and run.options.resume:
        more.append("--resume")
    envelope = run.call(name, "verify", *more, *words, environ=environ)
    wall_s = time.monotonic() - began
    data = envelope["data"]
    print(
        f"{name}: {data.get('verdict')}, exit {envelope['exit_code']}, {wall_s:.0f} s;"
        f" effect {data.get('effect_pct')} % {data.get('effect_ci_pct')}",
        flush=True,
    )
    for error in envelope["errors"]:
        print(f"{name}: {error['code']}: {error['message']}", flush=True)
    if markdown.exists():
        print(markdown.read_text(), flush=True)


def boots_of(run: Run) -> list[str]:
    """Return the option that says how many starts an arm has."""
    return ["--boots", str(run.options.boots)]


def steps(run: Run) -> None:
    """Compare two numbers of draft steps."""
    verify(
        run, "steps", "--num-steps", "2,5", *boots_of(run), "--", *run.sglang(run.port(200), tp=1)
    )


def again(run: Run) -> None:
    """Compare the defaults with themselves."""
    command = run.sglang(run.port(210), tp=1)
    verify(run, "again", "--arms", "default,again", *boots_of(run), "--", *command)


def profile(run: Run) -> None:
    """Compare with a profile where no all-reduce is made."""
    keep_profile(run)
    arms = ["--arms", f"default,{PROFILE}", "--any-host"]
    verify(run, "profile", *arms, *boots_of(run), "--", *run.sglang(run.port(220), tp=1))


def table(run: Run) -> None:
    """Lay out the table of the story."""
    arms = ["--arms", "no-speculation", "--num-steps", "5,2"]
    verify(run, "table", *arms, *boots_of(run), "--", *run.sglang(run.port(230), tp=1))


def url(run: Run) -> None:
    """Measure running servers: once as it should be, once with a rank that was left out."""
    for name, tuned, settings in (("url-both", (0, 1), SETTINGS), ("url-one", (0,), LOPSIDED)):
        port = run.port(240 + 10 * len(tuned))
        keep_profile(run, settings=settings)
        run.call("activate", "profile", "activate", PROFILE, "--any-host")
        with ExitStack() as stack:
            for number, (command, own) in enumerate(nodes_of(run, "shared", port)):
                route = "run" if number in tuned else "hook"
                report = run.out / f"{name}-node{number}-report.json"
                log = stack.enter_context((run.out / f"{name}-node{number}.log").open("w"))
                environ = {**run.environ, **own, "NCCLTUNE_HOOK": "0", "SPT_NOENV": "1"}
                stack.enter_context(started(through(run, route, command, report), environ, log))
            wait_up(Endpoint(port=port))
            words = ["--url", f"http://127.0.0.1:{port}", "--tokens", "40", "--runs", "2"]
            verify(run, name, *words)


def killed(run: Run) -> None:
    """Kill what can be killed in the middle of a verify, and look for what is left."""
    for number, victim in enumerate(("server", "rank", "verify")):
        port = run.port(270 + number)
        words = ["verify", "--num-steps", "2,5", "--boots", "2", "--json", "--"]
        log = (run.out / f"killed-{victim}.log").open("w")
        answer = (run.out / f"killed-{victim}.json").open("w")
        process = subprocess.Popen(
            run.nccltune(*words, *run.sglang(port, tp=1)),
            env=run.environ,
            stdout=answer,
            stderr=log,
        )
        wait_up(Endpoint(port=port))
        time.sleep(3.0)
        tree = tree_of(process.pid)
        before = left_of(tree)
        os.kill(victim_of(victim, process.pid, tree), signal.SIGKILL)
        began = time.monotonic()
        code = process.wait(120.0)
        ended_s = time.monotonic() - began
        time.sleep(10.0 if victim == "verify" else 2.0)
        answer.close()
        text = (run.out / f"killed-{victim}.json").read_text()
        errors = [each["message"] for each in json.loads(text)["errors"]] if text else []
        print(
            f"killed {victim}: verify ended with {code} after {ended_s:.1f} s; {errors}\n"
            f"  before: {before}\n  after: {left_of(tree)}",
            flush=True,
        )


def victim_of(name: str, verify_pid: int, tree: Mapping[int, str]) -> int:
    """Return which process to kill: verify, or the first of its tree with the title."""
    if name == "verify":
        return verify_pid
    title = {"server": "sglang.launch_server", "rank": "sglang::scheduler"}[name]
    # Processes of nccltune name the server's command in their own.
    return min(pid for pid, each in tree.items() if title in each and "nccltune" not in each)


def keep_profile(
    run: Run, path: Path | None = None, *, settings: Mapping[str, str] = SETTINGS
) -> None:
    """Have a profile in the store: a file's, or one of these settings."""
    if path is None:
        path = run.out / f"{PROFILE}.json"
        document = {"schema": "nccltune.profile/1", "name": PROFILE, "settings": settings}
        path.write_text(json.dumps(document))
    envelope = run.call("import", "profile", "import", str(path), "--replace")
    if envelope["exit_code"]:
        raise SystemExit(f"{path} is no profile: {envelope['errors']}")


def transport_of(run: Run) -> dict[str, str]:
    """Return what the operator's environment says of the transport."""
    return {"NCCL_P2P_DISABLE": "1"} if run.options.shm else {}


def named(run: Run, what: str) -> str:
    """Name a file by its transport and, beyond two, its ranks."""
    tp = run.options.tp
    return f"{what}-{'shm' if run.options.shm else 'nvlink'}{'' if tp == 2 else f'-{tp}'}"


def found_file(run: Run) -> Path:
    """Return where the stage search keeps its profile."""
    return run.out / f"{named(run, 'found')}.json"


def found_name(run: Run) -> str:
    """Keep the found profile here; return its name."""
    path: Path = run.options.found or found_file(run)
    keep_profile(run, path)
    name: str = json.loads(path.read_text())["name"]
    return name


def search(run: Run) -> None:
    """Find a profile for the launch that the stages after this one start."""
    path = found_file(run)
    limit = ["--name", path.stem, "--timeout-s", str(run.options.search_s)]
    command = run.sglang(run.port(300), tp=run.options.tp)
    began = time.monotonic()
    envelope = run.call("search", "search", *limit, "--", *command, environ=transport_of(run))
    data = envelope["data"]
    print(
        f"search: {data.get('verdict')}, exit {envelope['exit_code']},"
        f" {time.monotonic() - began:.0f} s; score {data.get('score_ratio')}"
        f" {data.get('score_ci')}, {data.get('trial_count')} trials;"
        f" all-gathers {data.get('gathers')}",
        flush=True,
    )
    for error in envelope["errors"]:
        print(f"search: {error['code']}: {error['message']}", flush=True)
    if data.get("profile"):
        path.write_bytes(Path(data["profile"]["path"]).read_bytes())
        print(f"search: {data['profile']['settings']}", flush=True)


def tuned(run: Run) -> None:
    """Compare the defaults with what a search found."""
    found = found_name(run)
    arms = run.options.arms or f"default,{found}"
    command = run.sglang(run.port(300), tp=run.options.tp)
    words = ["--arms", arms.replace("FOUND", found), "--any-host", *boots_of(run)]
    verify(run, named(run, "tuned"), *words, "--", *command, environ=transport_of(run))


def story(run: Run) -> None:
    """Lay out the story's table: speculation off, 5 and 2 steps, untuned and tuned."""
    for word in (run.options.arms or "default,FOUND").split(","):
        settings = found_name(run) if word == "FOUND" else word
        arms = ["--arms", f"no-speculation,{settings}", "--num-steps", "5,2", "--any-host"]
        name = f"story-{'tuned' if word == 'FOUND' else word}"
        command = run.sglang(run.port(310), tp=run.options.tp)
        verify(run, name, *arms, *boots_of(run), "--", *command, environ=transport_of(run))


STAGES: dict[str, Callable[[Run], None]] = {
    "routes": routes,
    "steps": steps,
    "again": again,
    "profile": profile,
    "table": table,
    "url": url,
    "killed": killed,
    "search": search,
    "tuned": tuned,
    "story": story,
}


def main() -> int:
    """Run the stages asked for, in their order."""
    words = sys.argv[1:]
    flags: list[str] = []
    if "--" in words:
        idx = words.index("--")
        words, flags = words[:idx], words[idx + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="the interpreter with SGLang")
    parser.add_argument("--stage", action="append", choices=list(STAGES))
    parser.add_argument("--lane", action="append", choices=LANES)
    parser.add_argument("--route", action="append", choices=ROUTES)
    parser.add_argument("--boots", type=int, default=4, help="an arm")
    parser.add_argument("--resume", action="store_true", help="go on with verifies under --out")
    parser.add_argument("--found", type=Path, help="the profile that a search saved")
    parser.add_argument("--tp", type=int, default=2, help="GPUs of search, tuned and story")
    parser.add_argument("--search-s", type=float, default=165.0, help="limit of the stage search")
    parser.add_argument("--arms", help="of tuned and story; FOUND stands for that profile")
    parser.add_argument("--first-port", type=int, default=30200, help="of 700 that are used")
    parser.add_argument("--shm", action="store_true", help="NCCL_P2P_DISABLE=1: host memory")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out.resolve(), options.model, options.python, tuple(flags), options)
    for name in options.stage or ["routes"]:
        print(f"== {name}", flush=True)
        STAGES[name](run)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
