"""What every section of the configuration is made of.

Each field says in its description what it means: docs/configuration.md is generated from them.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A section of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
