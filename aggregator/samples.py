"""What is no update: counted, and shown to people now and then."""

from collections import Counter

from diloco.aggregator.context import Context
from diloco.common import log, metrics, names, wire
from diloco.common.errors import DilocoError

# Seconds between two samples of messages that are no updates, for each reason.
SAMPLE_S = 1.0


class Samples:
    """Counts what is no update of a fragment, and shows one of a kind now and then."""

    def __init__(self, context: Context, fragment: int, logger: log.Logger) -> None:
        self._context = context
        self._fragment = fragment
        self._logger = logger
        self._sampled_at_s: dict[str, float] = {}
        self._unseen: Counter[str] = Counter()

    async def take(self, subject: str, reason: str, detail: str) -> None:
        """Count a message; show it unless one of its kind was shown just now."""
        self._context.metrics.add(metrics.IGNORED, 1, reason)
        now_s = self._context.runtime.clock()
        self._unseen[reason] += 1
        if now_s - self._sampled_at_s.get(reason, 0.0) < SAMPLE_S:
            return
        self._sampled_at_s[reason] = now_s
        count = self._unseen.pop(reason)
        self._logger.warning("ignored", subject=subject, reason=reason, detail=detail, count=count)
        learner = names.subject_learner(subject) or "operator"
        await self.show(learner, 0, 0, reason, detail)

    async def show(
        self, learner: str, incarnation: int, seq: int, reason: str, detail: str
    ) -> None:
        """A copy for people; the record has the verdict, so a lost copy is only logged."""
        rejection = wire.Rejection(
            fragment=self._fragment,
            learner=learner,
            incarnation=incarnation,
            seq=seq,
            reason=reason,
            detail=detail,
        )
        subject = names.rejected(self._context.run, learner)
        try:
            await self._context.bus.publish(subject, wire.encode(rejection))
        except DilocoError as error:
            self._logger.warning("rejection_not_shown", error=error.message)
