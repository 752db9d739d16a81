# Steps of the quick gate and of the full run, one function each. `.ci/run` and `.ci/full` source
# this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CARGO_TERM_COLOR=never

# The trainer alone needs candle, whose packages take as long to build as all others.
readonly PACKAGES=(--workspace --exclude moe-lm)
readonly TARGET="${CARGO_TARGET_DIR:-target}"
readonly TORCH="$PWD/target/torch"

# Parts of the full run, and the seconds that each takes on two cores after the quick gate.
readonly PARTS=(worlds testbed faults trainer fuzz miri oracles python baselines packages)
declare -rA PART_SECONDS=(
    [worlds]=600 [testbed]=420 [faults]=420 [trainer]=420 [fuzz]=90 [miri]=480 [oracles]=330 [python]=720 [baselines]=330 [packages]=300
)

step() { printf '\n== %4d s: %s\n' "$SECONDS" "$*"; }

is_root() { [ "$(id -u)" = 0 ]; }

# Installs packages of the distribution that are missing.
install() {
    local missing=() package
    for package; do
        dpkg-query -W -f='${db:Status-Status}\n' "$package" 2> /dev/null | grep -qx installed || missing+=("$package")
    done
    if [ ${#missing[@]} = 0 ]; then
        return
    fi
    if ! is_root; then
        echo "not installed, and only root can install it: ${missing[*]}"
        return
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
}

step_system() {
    step "system: headers of libibverbs, valgrind, CMake, network namespaces"
    install iproute2 nftables pkg-config libibverbs-dev librdmacm-dev libclang-14-dev gcc g++ python3-venv valgrind cmake
    local probe="sidelane-probe-$$"
    if ip netns add "$probe"; then
        ip netns del "$probe"
        export SIDELANE_NEED_NAMESPACES=1
    elif is_root; then
        echo "root cannot make network namespaces, which tests between two machines need" >&2
        exit 1
    else
        echo "this user cannot make network namespaces: tests between two machines are skipped"
    fi
}

step_format() {
    step format
    cargo fmt --all --check
}

step_lints() {
    step lints
    cargo clippy "${PACKAGES[@]}" --all-targets -- -D warnings
}

# A change of the public face shows in a review: its text is part of the tree.
step_documentation() {
    step "documentation, and the public face of the library"
    python3 .ci/public_face.py
}

# NVRTC comes from PyPI and needs no GPU.
step_kernels() {
    step "kernels: the PTX is what the sources give"
    python3 cuda/build.py --check
}

# All packages at once: each choice of packages has its own features, so another choice would build
# the library again. So tests of C take the program that this builds.
step_tests() {
    step "tests: all packages but the trainer, one world per process test"
    SIDELANE_PROGRAM="$(realpath -m "$TARGET")/debug/sidelane" SIDELANE_NEED_VALGRIND=1 SIDELANE_NEED_CMAKE=1 \
        SIDELANE_RANDOM_SECONDS=3 \
        cargo test "${PACKAGES[@]}" --no-fail-fast
}

# The tests have built the program and the example.
step_bench() {
    step "the main job, in small"
    "$TARGET/debug/sidelane" bench --tokens 64 --hidden 1024 --rounds 20
    "$TARGET/debug/sidelane" bench --tokens 64 --hidden 1024 --rounds 20 --ranks-per-node 8
    "$TARGET/debug/sidelane" bench --tokens 64 --hidden 1024 --rounds 5 --ranks-per-node 3,5 --sum-order node --partial-dtype bf16
    "$TARGET/debug/sidelane" bench --tokens 64 --hidden 1024 --rounds 5 --ranks-per-node 2,2 --route direct \
        --backward --align 16
    "$TARGET/debug/sidelane" bench --tokens 64 --hidden 1024 --rounds 5 --ranks-per-node 2,2 --strategy all-gather
    "$TARGET/debug/sidelane" routing
    "$TARGET/debug/examples/one_sided"
}

# The tests have built the program. A cell that has begun is finished. Ranks that only lack a core
# are not lost: with a longer limit no rebuild of a trial could wait its full window.
step_faults() {
    step "faults: a few cells of the matrix, drawn anew in each run"
    "$TARGET/debug/faults" --sample 6 --seconds 8 --liveness-ms 3300
}

# In the profile of the tests: it builds sooner than as users build it.
step_python() {
    step "package for Python, without torch"
    python3 -m venv target/python
    MATURIN_PEP517_ARGS="--profile dev" target/python/bin/pip install --quiet --disable-pip-version-check \
        ./bindings/python pytest numpy mypy
    target/python/bin/python -m pytest -q -rs bindings/python
    target/python/bin/python -m mypy.stubtest sidelane._native --ignore-disjoint-bases
}

# Without root the packages of the test bed may be missing.
has_testbed() {
    if is_root || command -v qemu-system-x86_64 > /dev/null; then
        return
    fi
    echo "no QEMU, and only root can install it: the test bed is skipped"
    return 1
}

# The test bed builds no more than its machines: cargo has built its program with all others, where
# `cargo run -p testbed` would build them again, because the fake CUDA driver has one file for all
# choices of packages.
testbed() {
    cargo test "${PACKAGES[@]}" --no-run
    "$TARGET/debug/testbed" --all-packages "$@"
}

step_conformance() {
    step "two machines with RDMA NICs: the contract of a lane"
    if has_testbed; then
        testbed --only conformance
    fi
}

part_worlds() {
    step "worlds: all cases of the tests that run one case otherwise"
    SIDELANE_TEST_WORLDS=all cargo test --no-fail-fast --test process --test device --test layer --test ep \
        --test schedule --test plan
}

part_testbed() {
    step "test bed: two machines with RDMA NICs, all steps"
    if has_testbed; then
        testbed --rounds 2
    fi
}

# A soak of the length that one wants: target/debug/faults soak 60
part_faults() {
    step "faults: all cells of the matrix, and a soak of a minute"
    cargo test "${PACKAGES[@]}" --test program
    "$TARGET/debug/faults"
    "$TARGET/debug/faults" soak 1
}

# Its ranks are threads and processes: each computes on one core.
part_trainer() {
    step "trainer: ranks learn what one process learns in their place"
    cargo clippy -p moe-lm --all-targets -- -D warnings
    RAYON_NUM_THREADS=1 cargo test -p moe-lm
}

part_fuzz() {
    step "fuzz: a minute of random bytes at the functions of C"
    SIDELANE_RANDOM_SECONDS=60 cargo test "${PACKAGES[@]}" --test random
}

# Components of nightly toolchains: miri and rust-src. Tests of many cases take too long there.
part_miri() {
    step "Miri: frames, extents, rows, expert maps, tickets of C"
    if ! cargo +nightly miri --version > /dev/null 2>&1; then
        echo "no nightly toolchain with miri and rust-src: Miri is skipped"
        return
    fi
    local -x CARGO_TARGET_DIR=target/miri MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=4
    cargo +nightly miri test -p sidelane --lib -- bootstrap::wire::frame bootstrap::wire::message memory::pool \
        rows::fp8 rows::vector --skip every_sixteenth --skip value_between
    cargo +nightly miri test -p sidelane-testkit --test rows -- bits::a_ partials::a_partial_that_vanishes partials::the_wire
    cargo +nightly miri test -p sidelane-core --lib -- plan::expert_map plan::bins plan::counts
    cargo +nightly miri test -p sidelane-c --lib -- handles:: ffi::memory ffi::versioned
}

# Megatron-core needs a torch that PyPI has with CUDA only: 4.8 GB on the disk, one to three
# minutes.
torch() {
    if [ ! -e "$TORCH/complete" ]; then
        python3 -m venv "$TORCH"
        "$TORCH/bin/pip" install --quiet --no-compile --disable-pip-version-check -r tests/gate/oracles/requirements.txt
        touch "$TORCH/complete"
    fi
}

part_oracles() {
    step "oracles of the gate: Megatron-core and DeepSpeed as published"
    torch
    "$TORCH/bin/python" tests/gate/oracles/judge.py --cases 2200 --seed 1 --out target/gate-cases.jsonl
    SIDELANE_GATE_CASES="$PWD/target/gate-cases.jsonl" cargo test --test gate oracles -- --nocapture
}

# Prints where Megatron-LM's repository lies, whose tests are in no package: at a checkout that the
# caller names, or fetched; nothing where the network does not reach it.
megatron_source() {
    local release="core_v$(sed -n 's/^megatron-core==//p' tests/gate/oracles/requirements.txt)"
    local checkout="${SIDELANE_MEGATRON_SOURCE:-$PWD/target/megatron-$release}"
    if [ ! -e "$checkout/tests" ]; then
        git clone --quiet --depth 1 --branch "$release" https://github.com/NVIDIA/Megatron-LM "$checkout" || return 0
    fi
    echo "$checkout"
}

part_python() {
    step "package for Python, with torch and Megatron-core, built as users build it"
    torch
    local own_tests
    own_tests="$(megatron_source)"
    if [ -z "$own_tests" ]; then
        echo "Megatron-LM's repository cannot be reached: its own tests are skipped"
    fi
    "$TORCH/bin/pip" install --quiet --disable-pip-version-check --force-reinstall --no-deps ./bindings/python
    # The last three are for Megatron's tests.
    "$TORCH/bin/pip" install --quiet --disable-pip-version-check pytest numpy cloudpickle mypy six regex pyyaml
    "$TORCH/bin/mypy" --config-file bindings/python/pyproject.toml
    SIDELANE_NEED_TORCH=1 SIDELANE_NEED_MEGATRON=1 SIDELANE_NEED_DEVICES=1 SIDELANE_MEGATRON_SOURCE="$own_tests" \
        "$TORCH/bin/python" -m pytest -q -rs bindings/python
}

# The third of the baselines is torch.
part_baselines() {
    step "baselines: MPI, UCX and torch beside the program"
    install openmpi-bin libopenmpi-dev ucx-utils
    torch
    SIDELANE_NEED_BASELINES=1 SIDELANE_PYTHON="$TORCH/bin/python" cargo test --no-fail-fast --test cli
}

# Each package is built from what would be published.
part_packages() {
    step "packages: the crates as they would be published"
    cargo publish --workspace --dry-run --allow-dirty
}

# Prints a path prefix and the parts that it asks for, by lines of the table in CONTRIBUTING.md.
table() {
    sed -nE 's/^\| `([^`]+)` +\| (.*[^ ]) +\|$/\1 \2/p' CONTRIBUTING.md | tr -d '`,'
}

# Prints the parts that paths on standard input ask for, in the order of PARTS.
parts_of() {
    local path prefix parts wanted=" " part
    while read -r path; do
        while read -r prefix parts; do
            case "$path" in "$prefix"*) wanted+="$parts " ;; esac
        done < <(table)
    done
    for part in "${PARTS[@]}"; do
        case "$wanted" in *" $part "*) echo "$part" ;; esac
    done
}

# The commit that a change began at: where it left the main branch, or on that branch the commit
# before the last.
base_of_change() {
    local head upstream base
    head="$(git rev-parse HEAD)"
    for upstream in '@{upstream}' origin/HEAD origin/main main; do
        base="$(git merge-base HEAD "$upstream" 2> /dev/null)" || continue
        if [ "$base" != "$head" ]; then
            echo "$base"
            return
        fi
    done
    git rev-parse --verify --quiet HEAD^
}
