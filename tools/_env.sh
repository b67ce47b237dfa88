# Sourced by the tools in this folder: one virtual environment in the checkout for all of them.
# The newest Python that is found makes it, pyenv's versions included. Set PYTHON to choose another
# interpreter, STREAMKERN_VENV to keep the environment elsewhere.
# shellcheck shell=sh

venv=${STREAMKERN_VENV:-.venv}

fail() {
    echo "${0##*/}: $1" >&2
    exit 1
}

# Whether $1 runs, is new enough, and can make a virtual environment with pip in it.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer with venv and ensurepip; set PYTHON to one that is."
        return
    fi
    pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for version in 3.14 3.13 3.12 3.11; do
        for PYTHON in "python$version" "$pyenv/$version".*/bin/python; do
            usable "$PYTHON" && return
        done
    done
    PYTHON=python3
    usable "$PYTHON" && return
    fail "no Python 3.11 or newer with venv and ensurepip was found; install one, or set PYTHON to its path."
}

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

# Make the environment where it is missing, and install this checkout with the extras $1 and the
# dependency group $2, if any, unless the same was installed from the same pyproject.toml before.
ensure_env() {
    extras=$1
    group=${2:-}
    what=streamkern${extras:+[$extras]}${group:+ with the group $group}
    if [ ! -e "$venv" ]; then
        find_python
        echo "${0##*/}: making $venv with $("$PYTHON" --version)"
        # Made aside and half-made never: an interrupted run leaves nothing to trip over.
        trap 'rm -rf "$venv"' EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM
        "$PYTHON" -m venv "$venv" || fail "could not make a virtual environment in $venv."
        trap - EXIT INT TERM
    fi
    python=$venv/bin/python
    "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 ||
        fail "$venv is not a working environment of Python 3.11 or newer; remove it and run this again."
    stamp=$venv/.streamkern-$extras-$group
    wanted=$("$python" -c '
import hashlib, os
print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest(), os.getcwd())
') || fail "could not read pyproject.toml."
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "${0##*/}: installing $what into $venv"
        # The pip that comes with Python 3.11 to 3.13 may know no dependency groups.
        [ -z "$group" ] || pip_install "pip>=25.1" || fail "could not install pip 25.1 or newer."
        pip_install -e ".${extras:+[$extras]}" ${group:+--group "$group"} ||
            fail "could not install $what; see pip's message above."
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
