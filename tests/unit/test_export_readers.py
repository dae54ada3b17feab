"""The readers that judge exports, held against examples of each grammar and the real programs."""

from __future__ import annotations

import ctypes
import json
import random
import re
import shutil
import socketserver
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest

from nccltune.export import EXPORTS, format_lines
from tests.support.random_profiles import random_text
from tests.support.readers import (
    docker_env_file,
    kubernetes_env,
    nccl_conf,
    posix_shell,
    systemd_environment_file,
)

SYSTEMD_LIBRARIES = sorted(Path("/usr/lib").glob("*/systemd/libsystemd-shared-*.so"))
HARSH_LINES = "# comment\n  # another\nA=\"kept\"\n B=b # kept \nC='x' y\nD=\nE=a=b\r\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A="kept"\n', {"A": '"kept"'}),
        ("A=x # kept\n", {"A": "x # kept"}),
        ("  A=x  \n", {"A": "x  "}),
        ("# no\n  # no\n\nA=1\nB\n", {"A": "1"}),
        ("A=a=b;c\r\n", {"A": "a=b;c"}),
    ],
)
def test_docker_reader_takes_values_as_they_stand(text: str, expected: dict[str, str]) -> None:
    assert docker_env_file.read(text) == expected


@pytest.mark.parametrize("text", ["=x\n", "export A=x\n", "A B=x\n", "A =x\n"])
def test_docker_reader_refuses_what_docker_refuses(text: str) -> None:
    with pytest.raises(docker_env_file.DockerRefusalError):
        docker_env_file.read(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("; no\n# no\nA=1\n", {"A": "1"}),
        ("A=x # kept ; kept\n", {"A": "x # kept ; kept"}),
        ("A=\"a b\" 'c'\n", {"A": "a bc"}),
        ('A="a\\"b\\$\\n"\n', {"A": 'a"b$\\n'}),
        ("A='a\\b'\n", {"A": "a\\b"}),
        ("A=a\\ b\\\nc\n", {"A": "a bc"}),
        ("# hidden \\\nA=1\nB=2\n", {"B": "2"}),
        ("A=1\nA=2\nNO\n3B=x\nexport C=x\n", {"A": "2"}),
        ("A =x  \n", {"A": "x"}),
        ("A=", {"A": ""}),
    ],
)
def test_systemd_reader_follows_quotes_and_escapes(text: str, expected: dict[str, str]) -> None:
    assert systemd_environment_file.read(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('env:\n  - name: A\n    value: "$(B) $$(B) $$ $"\n', {"A": "$(B) $(B) $ $"}),
        ("env:\n- {name: B, value: b}\n- {name: A, value: $(B)}\n", {"B": "b", "A": "b"}),
        ("env: []\n", {}),
    ],
)
def test_kubernetes_reader_substitutes(text: str, expected: dict[str, str]) -> None:
    assert kubernetes_env.read(text) == expected


@pytest.mark.parametrize(
    "text", ["env:\n  - name: A\n    value: 16\n", "A: 1\n", "env:\n  - A: 1\n", "[]\n"]
)
def test_kubernetes_reader_refuses_what_is_no_text(text: str) -> None:
    with pytest.raises(kubernetes_env.KubernetesRefusalError):
        kubernetes_env.read(text)


def test_shell_reader_is_a_shell() -> None:
    text = "# no\nexport A='x y' # no\nB=not-exported\nexport C=\"$A!\"\n"

    assert posix_shell.read(text) == {"A": "x y", "C": "x y!"}


def test_shell_reader_refuses_a_file_that_fails() -> None:
    with pytest.raises(ValueError, match="/bin/sh"):
        posix_shell.read("export A='x\n")


def test_nccl_reader_refuses_what_would_be_misread() -> None:
    with pytest.raises(ValueError, match="comment"):
        nccl_conf.read("NCCL_PROTO=LL # small\n")


@pytest.mark.skipif(not SYSTEMD_LIBRARIES, reason="no systemd library on this machine")
def test_systemd_reader_agrees_with_systemd_itself(tmp_path: Path) -> None:
    rng = random.Random(3)
    pieces = ["A", "B", "=", "=", " ", "\t", "\n", "\n", '"', "'", "\\", "#", ";", "$", "`", "\r"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 40))) for _ in range(2000)]
    for _ in range(200):
        settings = {f"NCCL_X{i}": random_text(rng) for i in range(3)}
        texts.append("\n".join(format_lines(settings, EXPORTS["systemd"])) + "\n")

    for text in texts:
        assert systemd_environment_file.read(text) == read_with_systemd(tmp_path / "env", text)


def read_with_systemd(path: Path, text: str) -> dict[str, str]:
    """Call the function that reads EnvironmentFile= in systemd."""
    path.write_text(text)
    load = ctypes.CDLL(str(SYSTEMD_LIBRARIES[-1])).load_env_file
    load.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    pairs = ctypes.POINTER(ctypes.c_char_p)()
    assert load(None, str(path).encode(), ctypes.byref(pairs)) >= 0
    found: dict[str, str] = {}
    idx = 0
    while pairs and (pair := pairs[idx]):
        name, _, value = pair.decode().partition("=")
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            found[name] = value
        idx += 1
    return found


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
def test_kubernetes_reader_agrees_with_kubectl_itself(tmp_path: Path) -> None:
    rng = random.Random(5)
    settings = {f"NCCL_X{i}": random_text(rng) for i in range(60)}
    lines = format_lines(settings, EXPORTS["k8s"])
    container = ["  - name: server", "    image: sglang", *(f"    {line}" for line in lines)]
    head = ["apiVersion: v1", "kind: Pod", "metadata: {name: one}", "spec:", "  containers:"]
    path = tmp_path / "pod.yaml"
    path.write_text("\n".join([*head, *container]) + "\n")

    command = ["kubectl", "set", "env", "--local", "-f", str(path), "X=x", "-o", "json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)

    found = json.loads(done.stdout)["spec"]["containers"][0]["env"]
    # kubectl decodes; it is the node that replaces $$.
    decoded = {entry["name"]: entry["value"] for entry in found if entry["name"] != "X"}
    assert decoded == {name: value.replace("$", "$$") for name, value in settings.items()}


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker client on this machine")
def test_docker_reader_agrees_with_docker_itself(tmp_path: Path) -> None:
    rng = random.Random(4)
    settings = {f"NCCL_X{i}": random_text(rng) for i in range(60)}
    text = HARSH_LINES + "\n".join(format_lines(settings, EXPORTS["docker"])) + "\n"

    found = read_with_docker(tmp_path, text)

    assert found == docker_env_file.read(text)
    assert settings.items() <= found.items()


def read_with_docker(folder: Path, text: str) -> dict[str, str]:
    """Let the docker client send a container's environment to an engine that is only pretended."""
    path = folder / "settings.env"
    path.write_text(text)
    received: list[dict[str, object]] = []
    # The path of a socket has to be short.
    with TemporaryDirectory() as short, PretendedEngine(f"{short}/s", received):
        subprocess.run(
            ["docker", "--host", f"unix://{short}/s", "create", "--env-file", str(path), "image"],
            capture_output=True,
            check=False,
            timeout=30,
        )
    assert received, "the docker client asked for no container"
    pairs = received[0]["Env"]
    assert isinstance(pairs, list)
    split = (pair.partition("=") for pair in pairs)
    return {name: value for name, _, value in split}


class PretendedEngine:
    """Listens where a docker engine would, and keeps what containers are asked of it."""

    def __init__(self, path: str, received: list[dict[str, object]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer({})

            def do_GET(self) -> None:
                self._answer({"ApiVersion": "1.45"})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if "/containers/create" in self.path:
                    received.append(json.loads(body))
                self._answer({"Id": "0" * 64, "Warnings": []})

            def _answer(self, data: dict[str, object]) -> None:
                content = json.dumps(data).encode()
                self.send_response(200)
                self.send_header("Api-Version", "1.45")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def address_string(self) -> str:
                return "client"

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self._server = socketserver.UnixStreamServer(path, Handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
