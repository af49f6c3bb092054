"""`diloco run show`: settings as they are."""

import json as jsonlib
import sys

import tomli_w

from diloco.common.storage.tape import effective_settings
from diloco.run.cli.opening import open_run


async def show(target: str, *, created: bool, json: bool) -> None:
    """Print a run's settings, those of now or those that it was created with.

    Raises:
        DilocoError: there is no such run.
    """
    async with open_run(target, reads=True) as opened:
        settings = opened.context.settings
        if not created:
            settings, _ = await effective_settings(opened.context)
    document = settings.model_dump(mode="json")
    text = jsonlib.dumps(document, indent=2) + "\n" if json else tomli_w.dumps(document)
    sys.stdout.write(text)
