#!/bin/sh
# Draws the pictures of README.md and the pages, in light and dark, from the program's own --svg.
# Run it on an idle machine: trace, layer and plan-bench measure. pxn.svg is drawn by hand, and
# megatron-loss by a training that needs the Python package, torch and Megatron-core.
#
#   docs/pictures.sh [trace|layer|plan|plan-bench|routing|simulate]..       these without a name
#   SIDELANE_PYTHON=.venv/bin/python docs/pictures.sh megatron-loss
set -eu
cd "$(dirname "$0")/.."
for name in ${*:-trace}; do
    case $name in
    trace | layer | plan | plan-bench | routing | simulate | megatron-loss) ;;
    *) echo "docs/pictures.sh: no picture $name" >&2; exit 2 ;;
    esac
done
case ${*:-all} in
megatron-loss) ;;
*) cargo build --release --package sidelane-cli ;;
esac
program=${CARGO_TARGET_DIR:-target}/release/sidelane
for name in ${*:-trace layer plan plan-bench routing simulate}; do
    picture="--svg docs/$name.svg"
    case $name in
    megatron-loss)
        "${SIDELANE_PYTHON:-python3}" -m torch.distributed.run --nproc-per-node 4 \
            bindings/python/examples/train_megatron.py --steps 200 --plot "docs/$name.svg"
        continue
        ;;
    trace) set -- --nodes 2 --ranks-per-node 2 --tokens 512 --out "$(mktemp)" ;;
    plan) set -- --model llama-3-70b --devices 1024 --tokens 1M --overlap all ;;
    simulate) set -- --nodes 128 --ranks-per-node 8 --model deepseek-v3 --hardware h100-cx7 ;;
    *) set -- ;;
    esac
    # shellcheck disable=SC2086
    "$program" "$name" "$@" $picture > /dev/null
done
