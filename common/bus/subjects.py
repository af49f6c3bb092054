"""The grammar of subjects: tokens joined by '.', '*' for one token, a last '>' for the rest."""

from functools import lru_cache

from diloco.common.errors import BusError


@lru_cache(maxsize=1 << 14)
def subject_matches(pattern: str, subject: str) -> bool:
    """Whether `subject` (without wildcards) is one that `pattern` stands for."""
    patterns, tokens = pattern.split("."), subject.split(".")
    if patterns[-1] == ">":
        patterns.pop()
        if len(tokens) <= len(patterns):
            return False
        tokens = tokens[: len(patterns)]
    return len(patterns) == len(tokens) and all(
        p in {"*", t} for p, t in zip(patterns, tokens, strict=True)
    )


def subjects_overlap(first: str, second: str) -> bool:
    """Whether some subject matches both patterns."""
    a, b = first.split("."), second.split(".")
    for left, right in zip(a, b, strict=False):
        if ">" in {left, right}:
            return True
        if left != right and "*" not in {left, right}:
            return False
    return len(a) == len(b)


def check_subject(subject: str, *, wildcards: bool = False) -> None:
    """Refuse what is not a subject, or (unless allowed) one with wildcards.

    A server would store a message under the literal subject 'a.*', hence a check of our own.

    Raises:
        BusError: `subject` breaks the grammar.
    """
    tokens = subject.split(".")
    refused = {">"} if wildcards else {"*", ">"}
    literal = tokens[:-1] if wildcards else tokens
    if refused & {*literal} or not all(tokens) or not subject.isprintable() or " " in subject:
        raise BusError(f"{subject!r} is not a subject{' pattern' if wildcards else ''}")


def check_patterns(subjects: list[str]) -> None:
    """Refuse an empty list of subjects, one with bad grammar, or two that overlap.

    Raises:
        BusError: a server would refuse them too.
    """
    if not subjects:
        raise BusError("no subjects given")
    for index, subject in enumerate(subjects):
        check_subject(subject, wildcards=True)
        for other in subjects[:index]:
            if subjects_overlap(other, subject):
                raise BusError(f"subjects {other!r} and {subject!r} overlap")
