#!/usr/bin/env python3
"""Takes pictures of a page in Chromium, and checks its layout (layout.js).

    pages.py URL OUT SIZE...

SIZE: a width in pixels for the whole page, or WIDTHxHEIGHT for what a window shows. OUT: path of the pictures; {size} and {theme}
in it are replaced, and without {theme} there is only the light one. Exits with 1 when a page has a fault in its layout.
"""

import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
LAYOUT = pathlib.Path(__file__).with_name("layout.js").read_text(encoding="utf-8")
#: A page of the project is complete when its script has drawn a table, another one when it is loaded.
DRAWN = "document.readyState === 'complete' && (document.querySelector('main') === null || document.querySelector('#panel table') !== null)"
FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
#: A window's height, for pictures of the whole page.
HEIGHT = 900


class Browser:
    """A Chromium without a window, controlled over a pipe: JSON messages, each terminated by a zero byte."""

    def __init__(self, folder):
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            sys.exit("needs Chromium: apt-get install chromium")
        # It reads from descriptor 3 and writes to 4. --no-sandbox: the pages are the caller's own, and a container may forbid the sandbox.
        script = 'exec "$0" "$@" 3<&0 4>&1 < /dev/null > /dev/null 2>&1'
        options = ["--remote-debugging-pipe", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}"]
        self.child = subprocess.Popen(["sh", "-c", script, program, *options, "about:blank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.to, self.come = self.child.stdin.fileno(), self.child.stdout.fileno()
        self.rest, self.number, self.session = b"", 0, None
        page = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.come, 1 << 16)
                if not part:
                    sys.exit("pages.py: Chromium has ended")
                self.rest += part
            answer, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("id") == self.number:
                if "error" in answer:
                    sys.exit(f"pages.py: {method}: {answer['error']}")
                return answer["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            sys.exit(f"pages.py: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url=url)
        end = time.monotonic() + 60
        while not self.value(DRAWN):
            if time.monotonic() > end:
                sys.exit(f"pages.py: {url} draws no table in a minute")
            time.sleep(0.05)

    def picture(self, width, height, theme, whole):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.value(FRAME)
        options = {}
        if whole:
            options = {"captureBeyondViewport": True, "clip": {**self.call("Page.getLayoutMetrics")["cssContentSize"], "scale": 1}}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"])

    def close(self):
        self.child.kill()
        self.child.wait()


def main(url, out, sizes):
    faults = []
    with tempfile.TemporaryDirectory(prefix="gpumem-browser.", ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        try:
            browser.open(url)
            for size in sizes:
                width, _, height = size.partition("x")
                for theme in ["light", "dark"] if "{theme}" in out else ["light"]:
                    picture = browser.picture(int(width), int(height or HEIGHT), theme, not height)
                    pathlib.Path(out.replace("{size}", size).replace("{theme}", theme)).write_bytes(picture)
                faults += [f"{url} at {size}: {fault}" for fault in browser.value(LAYOUT)]
        finally:
            browser.close()
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
