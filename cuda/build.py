#!/usr/bin/env python3
"""Compiles the kernels without a GPU, by NVRTC from PyPI.

    cuda/build.py            writes cuda/{exchange,audit,layer}.ptx and the table in docs/kernels.md
    cuda/build.py --check    fails if one of them is not what the sources give

The PTX is of version 8.5 for compute capability 8.0: every driver for CUDA 12.5 or later makes code
of it for every GPU from that capability on. A newer NVRTC makes machine code too, which shows what
each kernel takes: registers, spills, shared memory.
"""

import argparse
import ctypes
import itertools
import pathlib
import re
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "cuda" / f"{module}.cu" for module in ("exchange", "audit", "layer")]
# Kernels whose sources fuse by name, as what they are compared with does.
FUSED = {"matmul"}
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- written by cuda/build.py -->", "<!-- end -->"

FOR_PTX, FOR_MACHINE_CODE = "12.5.82", "12.9.86"
MACHINES = ["sm_80", "sm_90", "sm_100"]
# Bits: nothing is fused, denormals are kept, divisions are rounded as IEEE says.
OPTIONS = ["-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-std=c++17", f"-I{ROOT / 'cuda'}"]


class Nvrtc:
    """One version of the compiler, in a virtual environment of its own under target/."""

    def __init__(self, version):
        home = ROOT / "target" / f"nvrtc-{version}"
        if not list(home.glob("lib/python*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")):
            venv.create(home, with_pip=True)
            pip = [home / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, f"nvidia-cuda-nvrtc-cu12=={version}"], check=True)
        [folder] = home.glob("lib/python*/site-packages/nvidia/cuda_nvrtc/lib")
        # The compiler looks for its builtins by the loader's path alone: they are there already
        # when it does.
        for builtins in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(folder / "libnvrtc.so.12"))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def text(self, name, program):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{name}", program, buffer)
        return buffer.raw.rstrip(b"\0")

    def compile(self, source, architecture, *more):
        """The result for an architecture, real or virtual, and the log."""
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self.call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        options = [option.encode() for option in [f"-arch={architecture}", *OPTIONS, *more]]
        code = self.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self.text("ProgramLog", program).decode()
        if code != 0:
            sys.exit(f"{source.name}, {architecture}: {self.library.nvrtcGetErrorString(code).decode()}\n{log}")
        return self.text("CUBIN" if architecture.startswith("sm_") else "PTX", program), log


def ptx(source):
    """A module, without what depends on the build of the compiler."""
    text, log = Nvrtc(FOR_PTX).compile(source, "compute_80")
    if log.strip():
        sys.exit(f"warnings:\n{log}")
    lines = [line.rstrip() for line in text.decode().splitlines() if not line.startswith("//")]
    body = "\n".join(lines).strip()
    # The driver's compiler may fuse products with sums unless both name their rounding.
    for entry in re.split(r"\.entry ", body):
        plain = re.sub(r"\bfma\.rn\.f32\b", "", entry) if re.match(r"\w*", entry)[0] in FUSED else entry
        loose = r"\b(?:(?:add|sub|mul|div)\.(?!rn\.f\d\d)\S*f(?:32|64)|(?:fma|mad)\S*f(?:32|64)|\S+\.(?:ftz|approx|full)\S*)"
        if loose := re.findall(loose, plain):
            sys.exit(f"arithmetic that is not IEEE's: {sorted(set(loose))}")
    return f"// Made from cuda/*.cu by cuda/build.py with NVRTC {FOR_PTX}.\n{body}\n"


def table():
    """What each kernel takes on each machine."""
    compiler, rows = Nvrtc(FOR_MACHINE_CODE), {}
    for source, machine in itertools.product(SOURCES, MACHINES):
        _, log = compiler.compile(source, machine, "--ptxas-options=-v")
        pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
        for name, stack, stores, loads, registers, more in re.findall(pattern, log, re.S):
            shared = re.search(r"(\d+) bytes smem", more)
            rows.setdefault(name, {})[machine] = (registers, stores, loads, stack, shared.group(1) if shared else "0")
    lines = ["| kernel | registers: " + " / ".join(MACHINES) + " | spilled bytes | stack bytes | shared bytes |", "|---|---|---|---|---|"]
    for name in sorted(rows):
        of = [rows[name][machine] for machine in MACHINES]
        registers, stores, loads, stack, shared = (list(column) for column in zip(*of))
        spilled = [int(store) + int(load) for store, load in zip(stores, loads)]
        one = lambda values: str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))
        lines.append(f"| `{name}` | {' / '.join(registers)} | {one(spilled)} | {one(stack)} | {one(shared)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where something is stale")
    check = parser.parse_args().check
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    measured = table()
    print(measured)
    fresh = {source.with_suffix(".ptx"): ptx(source) for source in SOURCES}
    fresh[PAGE] = f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}"
    stale = [path for path, text in fresh.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run cuda/build.py", file=sys.stderr)
        else:
            path.write_text(fresh[path])
            print(f"wrote {path.relative_to(ROOT)}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
