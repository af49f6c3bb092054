"""The command line of `diloco plan`; `diloco/plan/run.py` does the work."""

from diloco.plan.options import PlanOptions
from diloco.run.cli.command import command, group

app = group()


@command(app)
def plan(options: PlanOptions) -> None:
    """Predict goodput, traffic, links, aggregators and training time.

    Compares with data-parallel training on the same fleet, elastic and not. Lists have one
    value per learner, joined by commas; times are written as 300s, 20m, 6h, 90d or 1y, numbers as
    5000, 1.2M or 5B. docs/plan.md explains the simulation and its constants.
    """
    from diloco.plan.run import run_plan

    run_plan(options)
