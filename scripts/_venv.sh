# shellcheck shell=bash
# Sourced by search and check: makes .venv in the checkout and installs the project into it.
# Nothing is ever installed anywhere else.

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python=""
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

# Exit status 5 means, as everywhere in the project: this host cannot do it.
die() {
    say "$*"
    exit 5
}

# Print the full path of interpreter $1 where it is new enough; fail where it is not.
# While .venv is active, the interpreter that made it is meant.
python_path() {
    "$1" -c '
import os, sys, venv
if sys.version_info < (3, 11):
    sys.exit(1)
is_ours = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
print(sys._base_executable if is_ours else sys.executable)' "$venv" 2>/dev/null
}

# Looked for from /, so that no folder named torch in the way is taken for it.
has_torch() {
    (cd / && "$1" -c '
import sys
from importlib.util import find_spec
sys.exit(find_spec("torch") is None)') >/dev/null 2>&1
}

# Set $python: $PYTHON, else an interpreter that has torch, else the newest known one.
find_python() {
    local name path found=()
    if [[ -n "${PYTHON:-}" ]]; then
        python="$(python_path "$PYTHON")" ||
            die "PYTHON=$PYTHON is not a Python 3.11 or newer; name one or unset PYTHON"
        return
    fi
    for name in python3.13 python3.12 python3.11 python3; do
        path="$(python_path "$name")" && found+=("$path")
    done
    ((${#found[@]})) ||
        die "no Python 3.11 or newer on PATH; install one, or name it: PYTHON=/path/to/python3 $0"
    python="${found[0]}"
    for path in "${found[@]}"; do
        if has_torch "$path"; then
            python="$path"
            return
        fi
    done
}

# Make a virtual environment in $1, with the further options given to venv.
make_venv() {
    local target="$1"
    shift
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$@" "$target"
    elif "$python" -m pip --python "$python" --version >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$@" "$target"
    else
        die "$python has neither ensurepip nor pip 22.3 or newer; install one of them" \
            "(Debian and Ubuntu: apt-get install python3-venv)"
    fi
}

# Run pip on the virtual environment in $1, with its own pip or else with the one of $python.
pip_in() {
    local target="$1"
    shift
    if "$target/bin/python" -c 'import pip' 2>/dev/null; then
        "$target/bin/python" -m pip "$@"
    else
        [[ -n "$python" ]] || find_python
        "$python" -m pip --python "$target/bin/python" "$@"
    fi
}

# Let .venv see the packages of $python even where that is a virtual environment itself:
# --system-site-packages reaches only the interpreter below.
link_parent_venv() {
    "$python" -c '
import sys, sysconfig
if sys.prefix != sys.base_prefix:
    for path in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        print(f"import site; site.addsitedir({path!r})")' >"$venv/parent.pth"
    mv -- "$venv/parent.pth" \
        "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_parent.pth"
}

make_project_venv() {
    find_python
    say "making .venv with $python"
    trap 'rm -rf -- "$venv"' EXIT # no half-made folder stays behind
    if has_torch "$python"; then
        say "its torch is used as it is"
        make_venv "$venv" --clear --system-site-packages
        link_parent_venv
    else
        make_venv "$venv" --clear
    fi
    trap - EXIT
}

# Say that $PYTHON does nothing where .venv was made with another interpreter, $1.
say_if_python_is_not() {
    local wanted
    [[ -n "${PYTHON:-}" ]] || return 0
    wanted="$(python_path "$PYTHON")" || wanted=""
    if [[ -z "$wanted" || "$(realpath -- "$wanted")" != "$(realpath -- "$1")" ]]; then
        say "PYTHON=$PYTHON does nothing: .venv is there already, made with $1;" \
            "to make it with that one, remove it first: rm -r -- $venv"
    fi
}

# Have the project with extra $1 (none: the core) in .venv. Quick where nothing has changed.
set_up() {
    local extra="${1:-}" state stamp path
    stamp="$venv/nccltune-${extra:-core}.stamp"
    state="$root $(cksum <"$root/pyproject.toml")"
    if path="$(python_path "$venv/bin/python")"; then
        say_if_python_is_not "$path"
    else
        make_project_venv
    fi
    if [[ -x "$venv/bin/nccltune" && -f "$stamp" && "$(<"$stamp")" == "$state" ]]; then
        return
    fi
    say "installing nccltune${extra:+[$extra]} into .venv"
    pip_in "$venv" install --quiet --editable "$root${extra:+[$extra]}" >&2 ||
        die "pip could not install the project; see its message above, and run this again"
    printf '%s' "$state" >"$stamp"
    printf '%s' "$state" >"$venv/nccltune-core.stamp"
}
