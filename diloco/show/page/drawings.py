"""The figures of a run's page in their order, each with its title and its caption. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.show.page import figures
from diloco.show.page.numbers import Shown
from diloco.show.page.svg import Panel


@dataclass(frozen=True)
class Drawing:
    """A figure of the page: what it shows, in words, and its panels, if there is anything."""

    key: str
    title: str
    caption: str
    panels: Callable[[Shown], Sequence[Panel]]
    nothing: str = "The tape has nothing of it."


DRAWINGS = (
    Drawing(
        "loss", "Is it learning?",
        "Loss of the updates that learners sent (each learner's, or of the eight that stand out; "
        "median, and the middle 80 % as a band), and of the global model on held-out data.",
        figures.loss,
    ),
    Drawing(
        "timeline", "What each learner did",
        "A lane for each learner, with its merged updates below. The first lane has a mark for "
        "each new version of a fragment.",
        figures.timeline,
    ),
    Drawing(
        "time", "Where the learners' time went",
        "The share of each learner's time whose work is in the model is its goodput.",
        figures.time_spent,
    ),
    Drawing(
        "throughput", "Tokens per second",
        "Trained, as updates announce it, and merged into the model. What is trained and not "
        "merged was rejected, lost with a learner, or is on its way.",
        figures.throughput,
    ),
    Drawing(
        "traffic", "Bytes per second",
        "Of all learners together. Up by the sizes of shards; down as each live learner reads "
        "each record and delta once, without first views of those that join.",
        figures.traffic,
    ),
    Drawing(
        "staleness", "How stale and how heavy updates are",
        "Staleness is how many versions came between the one an update was made on and the one "
        "it went into.",
        figures.staleness,
    ),
    Drawing(
        "phases", "Anatomy of a round",
        "wait: no update is in, or the pace does not allow it yet; open: until the quorum; grace: "
        "for those that are slower; merge: the outer step; publish: storing the version and "
        "committing its record.",
        figures.anatomy,
    ),
    Drawing(
        "agreement", "Do learners agree?",
        "Cosine between the updates that were merged in one round: 1 when they point the same "
        "way, 0 when they have nothing in common.",
        figures.agreement, "No round merged two updates by radial averaging.",
    ),
    Drawing(
        "beside", "Is a learner apart from the others?",
        "The eight learners that stand out most by loss and norm. A learner whose loss or norm is "
        "several times the others', or whose updates point elsewhere, is looked into with `diloco "
        "replay RUN --blame`.",
        figures.learner_panels,
    ),
    Drawing(
        "fragments", "Fragment by fragment",
        "How far an update moves its fragment in one inner step; and cosines as above: fragments "
        "that are averaged plainly, such as the embedding, have none.",
        figures.fragments,
    ),
    Drawing(
        "rejected", "Rejected updates",
        "Updates that the aggregator did not merge, and why.",
        figures.rejected, "No update was rejected.",
    ),
)  # fmt: skip
