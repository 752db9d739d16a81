#!/bin/sh
# Draws the pictures of README.md and the pages, in light and dark, from the program's own --svg.
# Run it on an idle machine: trace, layer and plan-bench measure. pxn.svg is drawn by hand, and
# megatron-loss.svg by bindings/python/examples/loss_plot.py.
#
#   docs/pictures.sh [trace|layer|plan-bench|routing|simulate]..       all without a name
set -eu
cd "$(dirname "$0")/.."
for name in ${*:-trace}; do
    case $name in
    trace | layer | plan-bench | routing | simulate) ;;
    *) echo "docs/pictures.sh: no picture $name" >&2; exit 2 ;;
    esac
done
cargo build --release --package sidelane-cli
program=${CARGO_TARGET_DIR:-target}/release/sidelane
for name in ${*:-trace layer plan-bench routing simulate}; do
    picture="--svg docs/$name.svg"
    case $name in
    trace) set -- --nodes 2 --ranks-per-node 2 --tokens 512 --out "$(mktemp)" ;;
    simulate) set -- --nodes 128 --ranks-per-node 8 --model deepseek_v3 --hardware h100-cx7 ;;
    *) set -- ;;
    esac
    # shellcheck disable=SC2086
    "$program" "$name" "$@" $picture > /dev/null
done
