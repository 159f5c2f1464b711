#!/usr/bin/env python3
"""Checks texts that people read: `prose.py` prints each fault and ends with 1 if there is one.

- A sentence of README, docs, help and the other pages has at most 30 words. A code span is one word, and so is a list of them.
- No comment, page or text in the source has a phrase of PHRASES. CONTRIBUTING.md says how to write instead.
"""
import re
import subprocess
import sys

LONGEST = 30
PHRASES = {
    r"(?<!there )(?<!There )(?<!^ )\b(?:is|are|was|were) no (?!longer|more|less|other|such|one)[a-z]+": "is not a ...",
    r"\b(?:liars?|sick|guilty|innocent)\b": "name the fault: false claim, correct, failing, responsible",
    r"\b(?:went on|goes on|go on) (?!to|with)": "continues",
    r"\bwithout end\b": "for ever, without limit",
    r"\b(?:is|are|was|were) (?:let in|believed|heard|spoken)\b": "accepted, used, received",
    r"\bin the open\b": "name the open thing",
}
CODE = (".rs", ".py", ".c", ".h", ".js", ".sh", ".toml", ".yml", ".yaml", ".service", ".socket")
SKIPPED = re.compile(r"(^|/)(golden|seeds|data|recordings|words)/|Cargo\.lock|LICENSE|tests/tools/prose\.py|CHANGELOG")


def tracked():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [path for path in listed if path.endswith(CODE + (".md",)) and not SKIPPED.search(path)]


def text_of_line(path, line):
    """Returns the part of a line of source that a person reads."""
    stripped = line.strip()
    for mark in ("//!", "///", "//", "#", "/*", "*"):
        if stripped.startswith(mark):
            return stripped[len(mark):]
    texts = [text for text in re.findall(r'"((?:[^"\\]|\\.){12,})"', line) if " " in text]
    comment = re.search(r"(?<!:)//\s(.*)$", line)
    return " ".join(texts) + (" " + comment.group(1) if comment else "")


def paragraphs(text):
    """Yields (line number, paragraph) of a page: list items and cells of tables are paragraphs of their own."""
    begun, parts, in_code = 0, [], False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        line = "" if line.startswith("    ") and not parts else line.strip()
        if line.startswith("```"):
            in_code = not in_code
            line = ""
        is_break = in_code or not line or line[0] in "#|<" or re.match(r"(?:[-*]|\d+\.)\s", line)
        if is_break and parts:
            yield begun, " ".join(parts)
            parts = []
        if in_code or not line or line[0] in "#<":
            continue
        if line[0] == "|":
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))
            continue
        begun = begun if parts else number
        parts.append(re.sub(r"^(?:[-*]|\d+\.)\s+", "", line))


def sentences(paragraph):
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    plain = re.sub(r"`[^`]*`", "CODE", plain)
    plain = re.sub(r"CODE(?: \([^()]*\))?(?:(?:,| and| or|, and|, or|;| =| \+)\s+CODE(?: \([^()]*\))?)+", "CODE", plain)
    return re.split(r"(?<=[.!?:;])\s+", plain)


def main():
    faults = 0
    for path in tracked():
        with open(path, encoding="utf8", errors="replace") as file:
            text = file.read()
        is_page = path.endswith(".md")
        if is_page:
            for number, paragraph in paragraphs(text):
                for sentence in sentences(paragraph):
                    if len(sentence.split()) > LONGEST:
                        faults += 1
                        print(f"{path}:{number}: {len(sentence.split())} words, at most {LONGEST}: {sentence[:100]} ...")
        for number, line in enumerate(text.split("\n"), 1):
            for phrase, instead in PHRASES.items():
                for found in re.finditer(phrase, line if is_page else text_of_line(path, line)):
                    faults += 1
                    print(f"{path}:{number}: `{found.group()}`; write: {instead}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
