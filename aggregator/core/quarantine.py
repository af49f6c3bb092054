"""The rules of quarantine: whose updates are refused, and from when on."""

from diloco.aggregator.core.policy import FragmentRules
from diloco.aggregator.core.state import Quarantine, State
from diloco.aggregator.core.updates import RejectedUpdate, Resolved
from diloco.common.protocol import wire
from diloco.common.protocol.reasons import Reason


def quarantined(state: State, manifest: wire.Manifest) -> tuple[Reason, str] | None:
    """Returns (reason, detail) if an update's sender is quarantined, else None."""
    if manifest.learner in state.quarantined:
        return (
            Reason.QUARANTINED,
            f"{manifest.learner} is quarantined until an operator releases it",
        )
    return None


def offenders(
    rules: FragmentRules, state: State, resolved: Resolved[RejectedUpdate]
) -> tuple[Quarantine, ...]:
    """Returns the learners to quarantine once a record with the `resolved` rejections stands."""
    # Offences are rejected less merged updates: an honest learner with a rare fault is never shut
    # out, and a learner that only offends soon is.
    limit = rules.bounds.quarantine_offences
    found = {}
    for refused in resolved:
        learner = refused.manifest.learner
        member = state.members.get(learner)
        if limit and member and member.offences >= limit and learner not in state.quarantined:
            found[learner] = Quarantine(
                learner,
                f"{member.offences} more updates of fragment {rules.fragment} rejected than "
                f"merged, the last one for {refused.reason!r}: {refused.detail}"[:1000],
            )
    return tuple(found.values())
