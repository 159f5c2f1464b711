#!/usr/bin/env python3
"""Runs a command on a terminal and writes its screen as an HTML page, for pictures.

    terminal.py COLUMNSxROWS OUT.html TEXT COMMAND...

Waits until the screen contains TEXT, at most 20 s. tmux is the terminal. The page follows the reader's light or dark theme.
"""

import html
import os
import re
import shlex
import subprocess
import sys
import time

#: The sixteen colours of a terminal, on a light and on a dark background.
LIGHT = "000000 b01010 107010 806000 1040b0 902090 007080 505050 606060 c02020 188018 907000 2050d0 a030a0 008090 303030".split()
DARK = "303030 f07070 70c070 d8b048 70a0f0 d080d0 50c0c8 c8c8c8 909090 ff8080 80e080 f0d060 90b8ff f0a0f0 70e0e8 ffffff".split()
STYLES = r"\x1b\[([0-9;]*)m"
PAGE = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><style>
body {{ margin: 8px; background: light-dark(#fff, #14171b); color: light-dark(#16191d, #e8eaed); }}
/* The height of a line is that of the font's blocks, so that bars have no gaps. */
pre {{ margin: 0; font: 13px/1.164 "DejaVu Sans Mono", monospace; }}
.bold {{ font-weight: bold }} .dim {{ opacity: .65 }}
.reverse {{ background: light-dark(#16191d, #e8eaed); color: light-dark(#fff, #14171b) }}
{colors}
</style><pre>{screen}</pre>
"""


def tmux(*arguments):
    command = ["tmux", "-u", "-f", "/dev/null", "-L", f"gpumem-{os.getpid()}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def screen_of(size, text, command):
    """Returns the screen, with escape sequences for its styles, once it contains the text."""
    columns, rows = size.split("x")
    tmux("new-session", "-d", "-x", columns, "-y", rows, shlex.join(command) + "; exec sleep 60")
    try:
        screen, end = None, time.monotonic() + 20
        while True:
            before, screen = screen, tmux("capture-pane", "-p", "-e")
            shown = re.sub(STYLES, "", screen)
            # A screen that changes may be written in this moment.
            if text in shown and screen == before:
                return screen
            if time.monotonic() > end:
                sys.exit(f"terminal.py: {shlex.join(command)} does not show {text!r} in 20 s, but:\n{shown}")
            time.sleep(0.05)
    finally:
        tmux("kill-server")


def styled(codes, style):
    """Returns the style after a list of SGR codes: letters c and g with the number of a colour are foreground and background."""
    for code in [int(code or 0) for code in codes.split(";")]:
        if code == 0:
            style = set()
        elif code in (1, 2, 7):
            style = style | {{1: "bold", 2: "dim", 7: "reverse"}[code]}
        for letter, base in [("c", 30), ("g", 40)]:
            dark, bright = code - base, code - base - 60
            if dark in (*range(8), 9) or bright in range(8):
                style = {name for name in style if not name.startswith(letter)}
                style |= set() if dark == 9 else {f"{letter}{dark if dark in range(8) else bright + 8}"}
    return style


def page(screen):
    style, out = set(), []
    for at, piece in enumerate(re.split(STYLES, screen.rstrip("\n"))):
        if at % 2:
            style = styled(piece, style)
        elif piece:
            out.append(f'<span class="{" ".join(sorted(style))}">{html.escape(piece)}</span>')
    colors = "\n".join(f".{letter}{at} {{ {part}: light-dark(#{light}, #{dark}) }}" for letter, part in [("c", "color"), ("g", "background")]
                       for at, (light, dark) in enumerate(zip(LIGHT, DARK)))
    return PAGE.format(colors=colors, screen="".join(out))


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    size, out, text, *command = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as file:
        file.write(page(screen_of(size, text, command)))
