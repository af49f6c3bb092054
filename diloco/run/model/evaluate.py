"""`diloco evaluate`: how well the global view does on held-out data, now or as it moves."""

from rich.console import Console

from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import say_json, working
from diloco.run.cli.units import human_count
from diloco.run.cli.versions import find_targets
from diloco.run.model.scores import Scorer
from diloco.run.model.scores import keep as keep_score


async def run_evaluate(
    target: str, *, version: str | None = None, follow: bool, every_s: float, keep: bool, json: bool
) -> None:
    """Score RUN's view and print it; arguments as the command's options.

    Raises:
        DilocoError: no such run; bus or store are away; the task cannot be built.
    """
    if follow and version is not None:
        raise ConfigError("--follow scores what is new, --version what was: give one of them")
    console = Console(soft_wrap=True, highlight=False)
    async with open_run(target, name="evaluate", reads=True) as run:

        async def tell(score: wire.Score) -> None:
            if keep and not run.alone:
                await keep_score(run.context, score)
            if json:
                say_json(score.model_dump())
            else:
                console.print(sentence(score))

        with working("loading the task and its held-out data"):
            scorer = await Scorer.of_run(run.context)
        if version is not None:
            at = await find_targets(run.context, version, option="--version")
            found = [at[fragment] for fragment in sorted(at)]
            records, seqs = [one.record for one in found], [one.record_seq for one in found]
            with working("evaluating"):
                score = await scorer.of(records, seqs)
            await tell(score)
        elif follow:
            await scorer.follow(tell, every_s)
        else:
            with working("evaluating"):
                score = await scorer.newest()
            await tell(score)


def sentence(score: wire.Score) -> str:
    """A score in words, for rich."""
    low, high = min(score.versions), max(score.versions)
    versions = str(low) if low == high else f"{low}-{high}"
    return (
        f"step {score.global_step:>7,}  versions {versions:>9}  "
        f"tokens {human_count(score.tokens):>7}  held-out loss [bold]{score.loss:.4f}[/]"
        + "".join(f"  {name} {value:.4g}" for name, value in score.metrics.items())
    )
