"""Tables of what users set in Python: the fields of a task, the options of tasks and of data.

The descriptions are those of the docstrings' sections `Args` or `Attributes`.
"""

import inspect
import json
import re
from collections.abc import Callable

from diloco import GrainData, Task
from diloco.models import bytes_lm, decoders, nnx
from diloco.models.decoders.families import FAMILY_FILES
from diloco.models.decoders.image_text import TEXT_FAMILIES
from diloco.models.decoders.sizes import SIZES
from docs.generate.markdown import table

# The run gives these to every task.
GIVEN = {"steps", "seed"}


def _described(of: Callable[..., object]) -> dict[str, str]:
    """Returns the description of each argument or attribute by its name, from the docstring."""
    text = inspect.cleandoc(of.__doc__ or "")
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"{of} describes no arguments"
    return {
        name: re.sub(r"\s+", " ", meaning).strip().removesuffix(".")
        for name, meaning in re.findall(r"^    (\w+): ((?:.|\n {8})*)", section[1], re.MULTILINE)
    }


def _default(value: object) -> str:
    """Returns a default as TOML writes it, or `None`; "" if there is none or it is a function."""
    if value is inspect.Parameter.empty or callable(value):
        return ""
    return "`None`" if value is None else f"`{json.dumps(value)}`"


def _rows(of: Callable[..., object], without: set[str]) -> list[tuple[str, str, str]]:
    meanings = _described(of)
    return [
        (f"`{name}`", _default(one.default), meanings[name])
        for name, one in inspect.signature(of).parameters.items()
        if name not in without
    ]


def blocks() -> dict[str, str]:
    """Returns the blocks: a table for each class or function, and one of decoders' families."""
    tables: dict[str, tuple[Callable[..., object], set[str]]] = {
        "fields of a task": (Task, set()),
        "options of bytes": (bytes_lm.build, GIVEN),
        "options of decoders": (decoders.build, GIVEN),
        "options of modules": (nnx.build, GIVEN),
        "options of data": (GrainData, {"dataset"}),
    }
    found = {
        name: table(["name", "default", "meaning"], _rows(of, without))
        for name, (of, without) in tables.items()
    }
    return found | {"families of decoders": _families()}


def _families() -> str:
    rows = []
    for family, files in FAMILY_FILES.items():
        sizes = [name for name, size in SIZES.items() if size["model_type"] == family]
        types = [family, *(whole for whole, text in TEXT_FAMILIES.items() if text == family)]
        named = [", ".join(f"`{name}`" for name in names) for names in (types, sizes)]
        rows.append((files.title, *named))
    return table(["family", "`model_type`", "published sizes"], rows)
