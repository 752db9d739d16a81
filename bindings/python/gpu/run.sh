#!/usr/bin/env bash
# On a machine with a GPU: the checks of tests/checks_*cuda.py with torch's own CUDA tensors, in two
# and in four processes that share the device. It prints a table and writes it to
# target/python-gpu.md. What is missing is said with exit code 2; a check that fails, with 1.
#
#   bindings/python/gpu/run.sh                 # installs the package into the active Python
#   SIDELANE_PYTHON=.venv/bin/python bindings/python/gpu/run.sh --installed
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${SIDELANE_PYTHON:-python3}
# Megatron compiles small functions when they are first called, for longer than all checks take.
export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1

if [ "${1:-}" = "--installed" ]; then
    shift
else
    "$python" -m pip install --quiet --disable-pip-version-check ./bindings/python
fi
mkdir -p target
exec "$python" bindings/python/gpu/run.py --table target/python-gpu.md "$@"
