#!/usr/bin/env python3
"""Lists the numbers that a change adds to or removes from the expected output below tests/golden.

    golden_numbers.py BASE [HEAD]    compares two git revisions; without HEAD, BASE with the working tree

A reviewer sees that a rewording changed no figure: the list is then empty. Each text file that differs has one line for each number
with another count: `- 721.0` was removed, `+ 721.0` was added, and `x2` follows a count of two. Moved lines and changed words print
nothing. Exits with 1 if a number differs.
"""
import collections
import os
import re
import subprocess
import sys

FOLDER = "tests/golden"
# A number with its sign, digit groups, decimals and exponent. `h.3` and `v2` hold numbers too; `0x1f` is one.
NUMBER = re.compile(r"0x[0-9a-f]+|(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?|\d+(?:\.\d+)?", re.IGNORECASE)


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def text_of(revision, path):
    """Returns the file's text in a revision (None: in the working tree); "" if it is missing there, None if it is binary."""
    try:
        content = git("show", f"{revision}:{path}") if revision else open(path, "rb").read()
    except (subprocess.CalledProcessError, FileNotFoundError):
        return ""
    return None if b"\0" in content else content.decode(errors="replace")


def numbers(text):
    return collections.Counter(NUMBER.findall(text))


def differences(before, after):
    """Yields (sign, number, count): `-` for numbers that `after` lacks, `+` for numbers that `before` lacks."""
    old, new = numbers(before), numbers(after)
    for sign, extra in (("-", old - new), ("+", new - old)):
        yield from ((sign, number, count) for number, count in sorted(extra.items()))


def main(arguments):
    if len(arguments) not in (1, 2):
        sys.exit(__doc__)
    base, head = arguments[0], arguments[1] if len(arguments) == 2 else None
    os.chdir(git("rev-parse", "--show-toplevel").decode().strip())
    changed = git("diff", "--name-only", "--no-renames", base, *([head] if head else []), "--", FOLDER).decode().splitlines()
    changed_numbers = 0
    for path in changed:
        before, after = text_of(base, path), text_of(head, path)
        if before is None or after is None:
            print(f"{path}: binary, not compared")
            continue
        found = list(differences(before, after))
        changed_numbers += len(found)
        if found:
            print(path)
        for sign, number, count in found:
            print(f"  {sign} {number}" + (f" x{count}" if count > 1 else ""))
    print(f"{len(changed)} files differ, {changed_numbers} numbers differ")
    return 1 if changed_numbers else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr.decode().strip())
