"""How long one rank of 64 takes to plan: cold, with every cache empty, and from the cache.

python benchmarks/bench_plan.py
"""

import sys
from typing import Any

from common import Benchmark, Errors

from ringattn import schedule
from ringattn.layout import LAYOUTS, make_shards, shard_positions
from ringattn.mask import CAUSAL, FULL, Band, window
from ringattn.plan import make_plan

WORLD, RANK, TOKENS = 64, 17, 64 * 4096 + 1
MASKS = (FULL, CAUSAL, window(4095), window(4096, 4096))
COLD, CACHED = 5e-3, 10e-6
"""Seconds that planning may take."""


def plan(layout: str, mask: Band) -> Any:
    place = (layout, mask, (TOKENS,), WORLD, RANK)
    return make_plan(*place), schedule.make_schedule("ring", *place)


def plan_cold(layout: str, mask: Band) -> Any:
    for cached in (make_plan, make_shards, schedule.make_schedule, schedule._distances):
        cached.cache_clear()
    return plan(layout, mask)


def check(layout: str, mask: Band) -> Any:
    """The tiles hold exactly the pairs that the mask allows, counted position by position."""
    positions = shard_positions(make_shards(layout, (TOKENS,), WORLD)[RANK])
    allowed = sum(max(0, min(TOKENS - 1, i - mask.lo) - max(0, i - mask.hi) + 1) for i in positions)

    def checked(result: Any) -> Errors:
        missing = abs(sum(tile.pairs for tiles in result[0] for tile in tiles) - allowed)
        return Errors(missing, missing / allowed, missing == 0)

    return checked


def main() -> int:
    bench, late = Benchmark("plan", device="cpu"), []
    for layout in LAYOUTS:
        for mask in MASKS:
            medians = bench.compare(
                shape=f"{layout} {mask}, rank {RANK} of {WORLD}",
                dtype="int",
                variants={
                    "cold": lambda turn, place=(layout, mask): plan_cold(*place),
                    "cached": lambda turn, place=(layout, mask): plan(*place),
                },
                check=check(layout, mask),
            )
            if medians["cold"] > COLD or medians["cached"] > CACHED:
                late.append(f"{layout} {mask}")
    print(f"over {COLD * 1e3:.0f} ms cold or {CACHED * 1e6:.0f} us cached: {', '.join(late) or 'none'}")
    return bench.finish(late=late) or bool(late)


if __name__ == "__main__":
    sys.exit(main())
