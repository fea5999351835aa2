"""Opens a page in headless Chromium, without network, and tells what became of it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
MISSING = "no Chromium here; apt-get install chromium-headless-shell"


@dataclass(frozen=True)
class Opened:
    answers: dict[str, Any]
    """The results of the script."""
    console: list[str]
    """Lines of errors and warnings."""


def open_page(page: Path, script: str, *, size: tuple[int, int] = (1280, 900)) -> Opened:
    """Open ``page`` in a window of ``size``, run ``script`` in it at last, and read what it returns.

    ``script`` is the body of an asynchronous function that returns an object.
    """
    text = page.read_text(encoding="utf-8")
    # Not at once: the figures are drawn in promises.
    message = f"""
    addEventListener('error', event => console.error('uncaught: ' + event.message));
    addEventListener('unhandledrejection', event => console.error('unhandled: ' + event.reason));
    setTimeout(async () => {{
      const found = await (async () => {{ {script} }})();
      const place = document.createElement('pre');
      place.id = 'answers';
      place.textContent = JSON.stringify(found);
      document.body.append(place);
    }}, 1500);"""
    digest = base64.b64encode(hashlib.sha256(message.encode()).digest()).decode()
    policy = re.compile("script-src ")
    assert policy.search(text), "the page has no policy for scripts"
    text = policy.sub(f"script-src 'sha256-{digest}' ", text, count=1)
    copy = page.with_name(f"{page.stem}-asked.html")
    copy.write_text(text.replace("</body>", f"<script>{message}</script></body>"), encoding="utf-8")
    done = _run(copy, size)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    match = re.search(r'<pre id="answers">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert match, f"the script has not ended\n{done.stderr[-4000:]}"
    return Opened(answers=json.loads(unescape(match[1])), console=console)


def _run(page: Path, size: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None, MISSING
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
        *(f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=8000", "--enable-logging=stderr"),
        "--dump-dom",
        page.absolute().as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
