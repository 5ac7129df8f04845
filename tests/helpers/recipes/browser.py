"""A real browser, headless, and a probe that looks at a page from inside it."""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
OFFLINE = [
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--disable-background-networking",
    "--no-first-run",
]
DARK = "--blink-settings=preferredColorScheme=0"
PROBE = (Path(__file__).parent / "probe.js").read_text()


def find_browser():
    """The browser's path. A machine of a user may lack one: then the test is skipped; in CI it
    fails.
    """
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"no browser ({', '.join(NAMES)}); install one: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def run_browser(browser, page, profile, *flags):
    command = [browser, *FLAGS, *OFFLINE, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def look(browser, page, folder):
    """What the probe found in `page`, 1000 pixels wide, after its scripts ran."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
    dom = run_browser(browser, probed, folder / "profile", "--window-size=1000,900", "--dump-dom")
    found = re.search(r'data-probe="(.*?)"', dom)
    assert found, f"the probe did not run:\n{dom[-2000:]}"
    return json.loads(unescape(found[1]))


def screenshot(browser, page, folder, width, height, *flags):
    file = folder / "page.png"
    run_browser(
        browser,
        page,
        folder / "profile",
        f"--window-size={width},{height}",
        f"--screenshot={file}",
        *flags,
    )
    return file
