"""Computes the credit of an update, and its sender's `MemberRecord` after the update.

Source: docs/design/design.md, "Trust". No code is shared with the aggregator.
"""

import math
from dataclasses import dataclass

from diloco.common.process.config import BoundsSection
from diloco.common.protocol import wire
from diloco.judge.oracle import numbers
from diloco.judge.oracle.memory import MemberRecord, OracleCredit, PolicyMemory


@dataclass(frozen=True)
class CreditBasis:
    """The facts that determine the credit of one update.

    Attributes:
        memory: the owner's memory, with the sender among its members.
        stored_at_s: when the server stored the update, in seconds since the epoch by its clock.
        now_s: when the owner read it, in seconds since the epoch by the owner's clock.
        averaged: True if the fragment holds averaged state, such as batch statistics.
        others: True for `run.trust = "others"`: learners may lie.
    """

    bounds: BoundsSection
    memory: PolicyMemory
    manifest: wire.Manifest
    stored_at_s: float
    now_s: float
    averaged: bool
    others: bool

    @property
    def _member(self) -> MemberRecord:
        return self.memory.members[self.manifest.learner]

    @property
    def _others(self) -> list[MemberRecord]:
        here = self.memory.waited_for()
        return [member for name, member in here.items() if name != self.manifest.learner]

    def _time_s(self) -> float:
        """Returns the seconds in which the learner can have done the update's steps.

        These are the time since its last update, and the unused time before that (`unused_s`).
        """
        return min(numbers.LONGEST_S, self._passed_s() + self._member.unused_s)

    def _passed_s(self) -> float:
        """Returns the seconds since the learner's last update.

        They are by the server's clock; by the owner's, if the server's was set back meanwhile.
        """
        member = self._member
        if member.read_at_s and self.stored_at_s < member.heard_at_s:
            return numbers.between_s(member.read_at_s, self.now_s)
        return numbers.between_s(member.heard_at_s, self.stored_at_s)

    def _fastest(self) -> float:
        """Returns the greatest number of steps per second that is credited to the learner."""
        known = self.bounds.of(self.manifest.learner)
        if known.max_steps_per_s:
            return known.max_steps_per_s
        limits = [self.bounds.max_steps_per_s]
        median = numbers.upper_median([_speed(other) for other in self._others])
        if self._member.speed:
            seen = (self._member.speed, median or 0.0)
            limits.append(numbers.TWICE * max(seen))
        if median is not None:
            limits.append(numbers.BELIEVED * median)
        return min(limits)

    def credit(self) -> OracleCredit:
        """Returns the steps, tokens and weight that the update counts for."""
        sent, known = self.manifest, self.bounds.of(self.manifest.learner)
        limit = self._fastest() * self._time_s() * (1 + numbers.SAME)
        steps = sent.steps if sent.steps <= limit else max(1, math.floor(limit))
        per_step = known.max_tokens_per_step or self.bounds.max_tokens_per_step
        tokens = max(1, min(sent.tokens * steps // sent.steps, per_step * steps))
        heaviest = self._heaviest_per_s()
        cap = math.inf if heaviest is None else heaviest * self._time_s()
        if numbers.weight(tokens, steps) > cap * (1 + numbers.SAME):
            tokens = max(1, math.floor(math.sqrt(cap * steps)))
        return OracleCredit(steps, tokens, numbers.weight(tokens, steps, averaged=self.averaged))

    def _heaviest_per_s(self) -> float | None:
        known = self.bounds.of(self.manifest.learner)
        if known.max_steps_per_s and known.max_tokens_per_step:
            return None
        rates = [
            _speed(other) * min(numbers.FINITE, other.tokens_per_step) ** 2
            for other in self._others
        ]
        median = numbers.upper_median(rates)
        if median is None:
            return None
        share = numbers.GREATEST_SHARE_OF_OTHERS if self.others else numbers.GREATEST_SHARE
        return share * min(numbers.FINITE, median)

    def known_after(self, credit: OracleCredit) -> MemberRecord:
        """Returns the sender's member record after the owner has read the update."""
        sent, member, time_s, fastest = self.manifest, self._member, self._time_s(), self._fastest()
        told = 1 / sent.step_time_s if sent.step_time_s > 1 / numbers.FINITE else 0.0
        seen = credit.steps / time_s if time_s > credit.steps / numbers.FINITE else fastest
        return member._replace(
            final=member.final or sent.final,
            step_time_s=numbers.moved(member.step_time_s, sent.step_time_s),
            tokens_per_step=numbers.moved(
                member.tokens_per_step, min(numbers.FINITE, sent.tokens / sent.steps)
            ),
            weight=numbers.moved(member.weight, credit.weight),
            heard_at_s=self.stored_at_s,
            read_at_s=self.now_s,
            speed=min(fastest, max(told, seen, numbers.REMEMBERED * member.speed)),
            unused_s=max(0.0, min(self._passed_s(), time_s - self._least_s(credit))),
        )

    def _least_s(self, credit: OracleCredit) -> float:
        """Returns the least seconds in which the credited steps and tokens can have been done."""
        steps_s, heaviest = credit.steps / self._fastest(), self._heaviest_per_s()
        if heaviest is None:
            return steps_s
        return max(steps_s, numbers.weight(credit.tokens, credit.steps) / heaviest)


def _speed(member: MemberRecord) -> float:
    told_s = member.step_time_s
    told = min(numbers.FINITE, 1 / told_s) if told_s > 1 / numbers.FINITE else 0.0
    return max(told, member.speed)


def shortened(
    bounds: BoundsSection, norms: dict[str, float], learner: str, credit: OracleCredit, norm: float
) -> float:
    """Returns the factor, at most 1, by which an update is clipped.

    Args:
        bounds: the section `bounds` of the settings.
        norms: by learner, norm per credited step.
        learner: the update's sender, whose norm in `norms` does not count.
        credit: the update's credit.
        norm: the update's norm.
    """
    median = numbers.upper_median([said for name, said in norms.items() if name != learner])
    if median is None or norm <= bounds.norm_clip * median * credit.steps:
        return 1.0
    return bounds.norm_clip * median * credit.steps / norm
