"""Run all benchmarks one after another, or those named: python -m benchmarks [NAME ...]."""

from __future__ import annotations

import subprocess
import sys

NAMES = (
    "tree",
    "trace_replay",
    "session_replay",
    "metadata",
    "disk_layout",
    "overhead",
    "decode",
    "kernels",
    "itl_jitter",
    "speculation",
    "structured",
    "shared_prefix",
    "pressure",
    "fairness",
    "kv_cache_dtype",
    "gateway",
    "churn",
    "peers",
    "control_plane",
)
# Only where they are named: they refuse to run on a machine that lacks what they measure.
NAMED_ONLY = ("gpu", "attention_backends")


def main(names: list[str]) -> int:
    unknown = sorted({*names} - {*NAMES, *NAMED_ONLY})
    if unknown:
        print(
            f"unknown benchmark {unknown[0]}; there are {', '.join((*NAMES, *NAMED_ONLY))}",
            file=sys.stderr,
        )
        return 2
    for name in names or NAMES:
        print(f"== {name}", flush=True)
        # A process of its own, so that none measures what another left behind.
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
