"""The golden bits of each numeric: how they are computed on this machine, and the command that records them.

`.venv/bin/python tests/engine/numerics/record.py` writes `golden.json` for this machine's processor and all lesser ones
that it can stand in for. It records changed bits once `pagestream_engine.numerics_versions` has a new version for them.

The libraries below torch and NumPy compute with AVX2 on every processor; the engine's own C++ computes with what the
processor has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pagestream_engine.native_build import find_compiler
from pagestream_engine.numerics_versions import NUMERICS

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.json"
COMMAND = "run: .venv/bin/python tests/engine/numerics/record.py"
LIMIT_S = 500.0


class Processor(NamedTuple):
    """A class of processors by their instructions, and how a better one stands in for it."""

    flags: frozenset[str]
    """What /proc/cpuinfo shows."""
    onednn: str
    """Value of ONEDNN_MAX_CPU_ISA, by which the engine's linears are limited too."""
    march: str
    """What compilers call a processor of the class."""


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROCESSORS = {
    "amx": Processor(_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "ALL", "sapphirerapids"),
    "avx512-bf16": Processor(_AVX512 | {"avx512_bf16"}, "AVX512_CORE_BF16", "cooperlake"),
    "avx512": Processor(_AVX512, "AVX512_CORE", "skylake-avx512"),
    "avx2": Processor(_AVX2, "AVX2", "haswell"),
}
"""By name, the best first."""
PINS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
}
"""Environment in which the libraries compute alike on all processors with AVX2."""

Computed = dict[str, tuple[str, dict[str, str]]]
"""By numeric: what its bits depend on beside this project, and the digest of each computation."""


def usable_processors() -> list[str]:
    """Return the classes that this processor belongs to or can stand in for, the best first; none of an unknown one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    has = next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
    return [name for name, each in PROCESSORS.items() if each.flags <= has]


def compute(processor: str) -> Computed:
    """Compute as a processor of a class, this machine's own or a lesser one."""
    with tempfile.TemporaryDirectory() as name:
        pins = dict(PINS)
        if processor != usable_processors()[0]:
            pins |= _stand_in(processor, Path(name))
        command = [sys.executable, str(HERE / "computations.py")]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **pins}, timeout=LIMIT_S
        )
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout)
    by_torch = f"torch {found['torch']} with bits {found['libraries']}"
    if find_compiler() is None:  # other code draws
        by_torch += ", no compiler"
    keys = {"native": f"{processor}, {_compiler()}", "text": "all"}
    return {numeric: (keys.get(numeric, by_torch), bits) for numeric, bits in found["bits"].items()}


def _stand_in(processor: str, folder: Path) -> dict[str, str]:
    """Return the environment that keeps the engine's C++ from what a lesser class has not; writes into `folder`."""
    wrapper, kind = folder / "c++", PROCESSORS[processor]
    wrapper.write_text(f'#!/bin/bash\nexec "{find_compiler()}" "${{@/#-march=native/-march={kind.march}}}"\n')
    wrapper.chmod(0o755)
    return {"ONEDNN_MAX_CPU_ISA": kind.onednn, "CXX": str(wrapper), "XDG_CACHE_HOME": str(folder / "cache")}


def _compiler() -> str:
    """Return name and major version of the C++ compiler: each may fuse operations in its own way."""
    path = find_compiler()
    if path is None:
        return "no compiler"
    said, number = (
        subprocess.run([path, option], capture_output=True, text=True, check=True, timeout=60).stdout
        for option in ("--version", "-dumpversion")
    )
    return f"{'clang' if 'clang' in said else 'gcc'} {number.partition('.')[0].strip()}"


def recorded() -> dict[str, Any]:
    """Return by numeric the `version` of its recordings, and `bits` by what they depend on."""
    entries: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    return entries


def changed(numeric: str, computed: Computed, entries: Mapping[str, Any], versions: Mapping[str, int]) -> list[str]:
    """Return the computations of a numeric whose bits have changed under an unchanged version."""
    key, bits = computed[numeric]
    entry = entries.get(numeric)
    if entry is None or entry["version"] != versions[numeric]:
        return []
    before = entry["bits"].get(key, {})
    return [name for name, digest in bits.items() if name in before and before[name] != digest]


def complaint(numeric: str, names: list[str]) -> str:
    """Return what to do where bits have changed under an unchanged version."""
    return (
        f"the bits of {numeric} have changed ({', '.join(names)}): raise its version in "
        f"pagestream_engine/numerics_versions.py, then {COMMAND}"
    )


def _merged(entries: dict[str, Any], computed: Computed) -> Iterator[str]:
    """Add what was computed; yield complaints."""
    for numeric, (key, bits) in computed.items():
        if names := changed(numeric, computed, entries, NUMERICS):
            yield complaint(numeric, names)
            continue
        if entries.get(numeric, {}).get("version") != NUMERICS[numeric]:
            entries[numeric] = {"version": NUMERICS[numeric], "bits": {}}
        entries[numeric]["bits"][key] = bits


def main() -> int:
    """Record; return the exit status."""
    entries = recorded()
    complaints: list[str] = []
    for processor in usable_processors():
        complaints += _merged(entries, compute(processor))
    for each in dict.fromkeys(complaints):
        print(each, file=sys.stderr)
    if complaints:
        return 1
    GOLDEN.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
