"""Learners whose updates point elsewhere than the fleet's: cosines of the newest rounds' shards."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import nlargest
from operator import itemgetter
from statistics import fmean, median

import numpy as np

from diloco.check.fleet import LOSS_SPIKE
from diloco.check.symptoms import Finding
from diloco.common import wire
from diloco.common.config import SyncSection
from diloco.common.layout import Layout
from diloco.common.store import ObjectStore
from diloco.projections.agreement import pair_cosines
from diloco.projections.history import History

# Newest rounds that are looked into, and bytes of shards that are read for it.
ROUNDS = 8
ROUND_BYTES = 64 << 20
# A learner agrees with the others this much less than they do with each other.
APART = 0.3
FEWEST = 4


def strangers(history: History) -> Iterator[Finding]:
    """Learners that agree with nobody, where the others agree.

    Raises:
        StoreUnavailableError: the store is away.
    """
    cosines = mean_cosines(history)
    if len(cosines) < 3:
        return
    for name, own in sorted(cosines.items()):
        others = median(fmean(found) for other, found in cosines.items() if other != name)
        if len(own) >= FEWEST and others > 0 and fmean(own) < APART * others:
            yield Finding(
                severity="warning",
                about=f"learner {name}",
                sentence=f"its updates point elsewhere: cosine to the others' {fmean(own):.2f}, "
                f"where the others have {others:.2f}",
                advice="it may train on other data or labels; `diloco replay RUN --blame` says "
                "what its updates did",
                runbook=LOSS_SPIKE,
            )


def mean_cosines(history: History) -> dict[str, list[float]]:
    """Of each learner, in each of the newest rounds, the mean cosine to the others' updates."""
    every = (at for chain in history.records.values() for at in chain if len(at[1].inputs) > 2)
    newest = nlargest(ROUNDS, every, key=itemgetter(0))
    rounds = [record for _, record in newest[::-1]]
    return cosines_of(history.layout, history.settings.sync, history.store, rounds)


def cosines_of(
    layout: Layout, sync: SyncSection, store: ObjectStore, rounds: Iterable[wire.Record]
) -> dict[str, list[float]]:
    """As `mean_cosines`, of these rounds; of those whose shards are gone there is none. Blocks.

    Raises:
        StoreUnavailableError: the store is away.
    """
    found: dict[str, list[float]] = defaultdict(list)
    left = ROUND_BYTES
    for record in rounds:
        left -= sum(shard.size_bytes for taken in record.inputs for shard in taken.shards)
        if left < 0:
            break
        matrix = pair_cosines(layout, sync, store, record)
        if matrix is None:
            continue
        for row, taken in zip(range(len(matrix)), record.inputs, strict=False):
            found[taken.learner].append(float(np.delete(matrix[row], row).mean()))
    return found
