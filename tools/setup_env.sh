#!/usr/bin/env bash
# Makes .venv at the repository root with the package (editable) and the tools of its `dev` extra.
#
# Finds a Python >= 3.12 that really runs, installs with the versions of requirements-lock.txt, and notes what it
# installed in .venv/.installed: nothing is done again until pyproject.toml, the lock file or the place changes.
# PYTHON=/path/to/python chooses the interpreter. Prints two lines when it works, the end of the log when not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp="$venv/.installed"
log="$venv/install.log"
check='import sys, ssl, venv, ensurepip; sys.exit(sys.version_info < (3, 12))'

runs() { [ -n "$1" ] && "$1" -c "$check" >/dev/null 2>&1; }

fingerprint() { { cat pyproject.toml requirements-lock.txt; pwd -P; } | cksum; }

# Candidates, best first. A name on PATH may be a version manager's stub that does not run: each one is tried.
candidates() {
    local root
    printf '%s\n' python3.12 python3.13 python3.14 python3 python
    for root in "$(pyenv root 2>/dev/null || true)" "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -n "$root" ] && printf '%s\n' "$root"/versions/3.1[2-4]*/bin/python
    done
    uv python find --no-project '>=3.12' 2>/dev/null || true
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        if runs "$PYTHON"; then echo "$PYTHON" && return; fi
        echo "setup_env: PYTHON=$PYTHON is not a working Python >= 3.12 with venv and ensurepip." >&2
        return 1
    fi
    while read -r candidate; do
        if runs "$candidate"; then echo "$candidate" && return; fi
    done < <(candidates)
    echo "setup_env: no working Python >= 3.12 with venv and ensurepip was found (tried PATH, pyenv and uv)." >&2
    echo "setup_env: install one, for example with 'pyenv install 3.12', or name one: PYTHON=/path/to/python make ..." >&2
    return 1
}

install() {
    runs "$venv/bin/python" || "$1" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
        --constraint requirements-lock.txt --editable '.[dev]'
    # Megatron-Bridge's pins exclude our transformers, and Python above 3.12.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
        --constraint requirements-lock.txt --no-deps --ignore-requires-python megatron-bridge
}

if runs "$venv/bin/python" && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then exit 0; fi

python=$(find_python)
mkdir -p "$venv"
echo "setup_env: installing into $venv with $("$python" --version) (a first time downloads PyTorch: minutes, 5 GB) ..."
rm -f "$stamp"
started=$SECONDS
# The log lies beside the environment until that exists: making the environment clears its folder.
partial_log=$(mktemp)
trap 'rm -f "$partial_log"' EXIT
if ! install "$python" >"$partial_log" 2>&1; then
    mkdir -p "$venv" && cp "$partial_log" "$log"
    tail -n 25 "$log" >&2
    echo "setup_env: the installation failed; the whole log is $log" >&2
    exit 1
fi
cp "$partial_log" "$log"
fingerprint >"$stamp"
echo "setup_env: $venv is ready after $((SECONDS - started)) s."
