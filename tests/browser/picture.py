"""Makes docs/report.png of a local run: python tests/browser/picture.py RUN."""

import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "docs" / "report.png"
HEAD = 1700


def main(run: str) -> None:
    command = [sys.executable, "-m", "diloco", "dashboard", run, "--port", "0"]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        url = "http://" + served.stdout.readline().split("http://")[1].strip()
        try:
            subprocess.run(["node", HERE / "picture.mjs", url, chromium, OUT], check=True)
        finally:
            served.terminate()
    # The head says enough; a page has few colours: well under half of the bytes.
    with Image.open(OUT) as picture:
        head = picture.convert("RGB").crop((0, 0, picture.width, HEAD))
        head.quantize(160).save(OUT, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
