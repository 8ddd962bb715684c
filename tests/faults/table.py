"""All faults, one after the other: how many were tried, and how many were silent, hung or unnamed.

python tests/faults/table.py [--kinds kill freeze ...] [--every 1]
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import harness


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="of faults; all of them without")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth fault of the grid")
    arguments = parser.parse_args()
    faults = [fault for fault in harness.grid() if not arguments.kinds or fault.kind in arguments.kinds]
    counts: dict[str, Counter[str]] = {}
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = harness.run(Path(folder))
    begin = time.time()
    for fault in faults[:: arguments.every]:
        with tempfile.TemporaryDirectory() as folder:
            outcome = harness.run(Path(folder), fault)
        verdict = harness.judge(fault, outcome, undisturbed)
        counts.setdefault(fault.kind, Counter())[verdict] += 1
        slowest[fault.kind] = max(slowest.get(fault.kind, 0.0), outcome.seconds)
        if verdict != "ok":
            print(f"{verdict}: {fault}: {outcome}", file=sys.stderr)
    names = ("silent", "hung", "unnamed", "disturbed")
    print(f"{'fault':<22} {'tried':>6} " + " ".join(f"{name:>9}" for name in names) + f" {'slowest':>9}")
    for kind, found in counts.items():
        row = " ".join(f"{found[name]:>9}" for name in names)
        print(f"{kind:<22} {sum(found.values()):>6} {row} {slowest[kind]:>7.1f} s")
    total = sum(counts.values(), Counter())
    row = " ".join(f"{total[name]:>9}" for name in names)
    print(f"{'all':<22} {sum(total.values()):>6} {row} {max(slowest.values()):>7.1f} s")
    print(f"limit of a wait {harness.LIMIT:g} s; {time.time() - begin:.0f} s in all")
    return int(set(total) != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
