"""The cache of a region: runs nginx, and renews the token by which nginx reads the bucket.

nginx's configuration comes from Terraform (modules/cache/nginx.conf.tftpl) and includes the file
`TOKEN`. Google's metadata server gives a new token some minutes before the old one expires; nginx
then loads its configuration again, which breaks no connection.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from diloco.infra.cloud import Google
from diloco.infra.install_release import say, write

TOKEN = Path("/run/diloco-cache/token.conf")
# Its errors go to the journal from the first line on.
NGINX = (
    "/usr/sbin/nginx", "-e", "stderr", "-c", "/etc/diloco/cache.conf", "-g", "daemon off;",
)  # fmt: skip
_EVERY_S = 60.0


def renew(google: Google, path: Path) -> bool:
    """Writes the machine's token for nginx to `path`, of mode 0600; returns whether it changed.

    Raises:
        OSError: the metadata server does not answer.
    """
    line = f'proxy_set_header Authorization "Bearer {google.token()}";\n'
    return write(path, line.encode(), 0o600)


def serve(google: Google, path: Path, nginx: Sequence[str], every_s: float = _EVERY_S) -> int:
    """Runs nginx until it ends, and returns its exit status; has it load each new token.

    Args:
        google: gives the token.
        path: the file that nginx's configuration includes.
        nginx: the command that runs nginx in the foreground.
        every_s: seconds between two looks at the token.
    """
    renew(google, path)
    process = subprocess.Popen(nginx)  # noqa: S603 - ours
    # systemd ends this program; nginx ends with it.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    say("nginx serves")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(every_s)
        try:
            changed = renew(google, path)
        except (OSError, HTTPException, ValueError, LookupError) as error:
            say(f"no token: {error!r}; is asked again")
        else:
            if changed:
                process.send_signal(signal.SIGHUP)


def main() -> None:
    """Serves; until the first token is there, tries again."""
    while True:
        try:
            sys.exit(serve(Google(), TOKEN, NGINX))
        except (HTTPException, OSError, ValueError, LookupError) as error:
            say(f"not yet: {error!r}")
            time.sleep(_EVERY_S / 12)


if __name__ == "__main__":
    main()
