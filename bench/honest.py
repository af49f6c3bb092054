"""An honest fleet over many steps: whose updates are refused, shortened or credited less.

    .venv/bin/python -m bench.honest [--steps 100000] [--speeds 1,1,1,1]

The digits of `examples/digits.py` in virtual time, through the daemons' own machine and merge
(`bench/emulate.py`). Norms fall by orders of magnitude while such a model converges, and nobody is
to be punished for that.
"""

import argparse
from collections import Counter
from typing import Any

from bench.emulate import Start, Weather, World, begin
from diloco.common import wire
from diloco.common.config import RunSettings, make_config
from diloco.learner.contract import build_task


class Counted(World):
    """A world that counts what its records say."""

    def __init__(self, run: RunSettings, start: Start, weather: Weather) -> None:
        super().__init__(run, start, weather)
        self.counts: Counter[str] = Counter()
        for owner in self.owners:
            close = owner.arrays.close_round

            def counting(admitted: Any, share: float, close: Any = close) -> Any:
                made = close(admitted, share)
                for taken in made.inputs:
                    self._count(taken)
                return made

            owner.arrays.close_round = counting  # type: ignore[method-assign]

    def _count(self, taken: wire.Input) -> None:
        self.counts["merged"] += 1
        self.counts.update(taken.less_for)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.honest", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--speeds", default="1,1,1,1", help="of each learner")
    arguments = parser.parse_args()
    run = make_config(
        {"run": {"name": "digits", "steps": arguments.steps}, "store": {"url": "unused"}},
        source="bench/honest.py",
    ).settings()
    speeds = tuple(float(speed) for speed in arguments.speeds.split(","))
    task = build_task("examples.digits:build", steps=run.run.steps, seed=run.run.seed, options={})
    world = Counted(run, begin(run, task), Weather(speeds))
    outcome = world.run()
    assert outcome is not None
    counts = world.counts
    # A rejection ends the emulation: there was none.
    print(
        f"{len(speeds)} learners, {arguments.steps:,} steps: {counts['merged']:,} updates merged, "
        f"0 refused; credited fewer steps {counts['steps']:,}, less weight {counts['weight']:,}, "
        f"shortened {counts['norm']:,}; held-out loss {outcome.loss:.4f}"
    )


if __name__ == "__main__":
    main()
