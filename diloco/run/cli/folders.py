"""Makes folders that the command line names."""

from pathlib import Path

from diloco.common.protocol.errors import ConfigError


def make_folder(path: Path) -> None:
    """Makes a folder and its parents; an existing one is no error.

    Raises:
        ConfigError: the folder cannot be made there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {str(path)!r}: {error.strerror}",
            hint="name a folder in which you may write",
        ) from error
