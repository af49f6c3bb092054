"""`diloco run show` and `diloco config check`: settings as they are, and what is known of them."""

import json as jsonlib
import sys
from pathlib import Path

import tomli_w

from diloco.cli.opening import open_run
from diloco.common.bus.jetstream import check_url
from diloco.common.config import Config, load_config, warnings
from diloco.common.tape import effective_settings


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


def checked(path: Path) -> tuple[Config, list[str]]:
    """A file that can be understood, and what is known to train badly.

    Raises:
        ConfigError: it cannot; every key that is wrong is named, or a URL that is none.
    """
    config = load_config(path)
    check_url(config.bus.url)
    return config, warnings(config.settings())
