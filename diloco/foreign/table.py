"""Which leaf of the run each tensor of another framework is. Pure.

Frameworks name and lay out the same parameter differently: PyTorch's `hidden.weight` has a row for
each output, where JAX's `hidden/kernel` has a column. A table says so, once, and learners of both
train one model.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from diloco.common.errors import ConfigError


class Leaf(NamedTuple):
    """A leaf of the run.

    Attributes:
        name: in the run.
        axes: of the tensor, in the leaf's order, as `numpy.transpose` has them; None: as it is.
    """

    name: str
    axes: tuple[int, ...] | None = None


Table = Mapping[str, Leaf | str]


def leaf_of(tensor: str, table: Table) -> Leaf:
    """What the run calls a tensor; one that the table does not name keeps its own, with slashes."""
    said = table.get(tensor, tensor.replace(".", "/"))
    return Leaf(said) if isinstance(said, str) else Leaf(*said)


def check_table(tensors: Iterable[str], table: Table) -> None:
    """Refuse a table that cannot be.

    Raises:
        ConfigError: it names tensors that are none, or two with one name.
    """
    known = list(tensors)
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(
            f"the table names tensors that are not here: {', '.join(unknown[:6])}",
            hint=f"there are {', '.join(sorted(known)[:12])}",
        )
    names = [leaf_of(tensor, table).name for tensor in known]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the table gives two tensors one name: {', '.join(twice)}")
