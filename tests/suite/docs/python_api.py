"""Generates docs/reference-python.md from signatures and docstrings of the package, which is parsed and not imported."""

import ast
import os
import re
import sys
from typing import Dict, Iterator, List, Optional, Union

HEAD = """# Every call of the Python package

<!-- made by tests/suite/docs/python_api.py from agent-lib/python/gpumem: UPDATE_GOLDEN=1 -->

After this page you know every call of the package, from its docstrings. By task: [agent-lib/python](../agent-lib/python/README.md); other
frameworks: [frameworks.md](frameworks.md). Amounts are bytes, times nanoseconds.
"""
NOT_RUN = "<!-- not run: needs the framework -->"
MODULES = ("torch", "cupy", "rmm", "jax", "tensorflow")
Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
missing: List[str] = []


def module(folder: str, name: str) -> ast.Module:
    path = os.path.join(folder, name + ".py")
    if not os.path.exists(path):
        path = os.path.join(folder, name, "__init__.py")
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read(), path)


def table(lines: List[str]) -> List[str]:
    """Converts a simple reStructuredText table: its first line has a gap where the second column starts."""
    second = lines[0].index(" ") + 1
    rows: List[List[str]] = []
    for line in lines[1:-1]:
        first, rest = line[:second].strip(), line[second:].strip()
        if first or not rows:
            rows.append([first, rest])
        else:
            rows[-1][1] += " " + rest
    return ["| | |", "|---|---|"] + ["| {} | {} |".format(*(cell.replace("|", "\\|") for cell in row)) for row in rows]


def prose(doc: str) -> List[str]:
    """Converts a docstring to Markdown: inline code, tables, indented code."""
    out: List[str] = []
    lines = doc.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if re.match(r"=+ =+$", line):
            end = next(n for n in range(at + 1, len(lines)) if re.match(r"=+ =+$", lines[n]))
            out += table(lines[at : end + 1])
            at = end + 1
        elif line.startswith("    ") and (not out or out[-1] == ""):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
                end += 1
            code = "\n".join(text[4:] for text in lines[at:end]).rstrip("\n")
            out += ["```text", code, "```", ""] if re.match(r"\S+\(.*  +", code) else [NOT_RUN, "```python", code, "```", ""]
            at = end
        else:
            # A list of terms: one row for each.
            if re.match(r"``[a-z_]+``(, ``[a-z_]+``)*  ", line):
                rows = [re.split(r"  +", line, maxsplit=1)]
                while at + 1 < len(lines) and lines[at + 1]:
                    at += 1
                    if lines[at].startswith("    "):
                        rows[-1][1] += " " + lines[at].strip()
                    else:
                        rows.append(re.split(r"  +", lines[at], maxsplit=1))
                out += ([""] if out and out[-1] else []) + ["| | |", "|---|---|"] + ["| {} | {} |".format(*(cell.replace("|", "\\|") for cell in row)) for row in rows]
            else:
                out.append(line[:-1] if line.endswith("::") else line)
            at += 1
    return [line.replace("``", "`") if not line.startswith("```") else line for line in out]


def doc(node: Union[ast.Module, ast.ClassDef, Function], name: str) -> str:
    found = ast.get_docstring(node)
    if not found:
        missing.append(name)
    return "\n".join(prose(found or "")).rstrip("\n")


def signature(name: str, node: Function, bound: bool) -> str:
    arguments = node.args
    if bound:
        arguments.args = arguments.args[1:]
    if any(ast.unparse(mark) == "contextlib.contextmanager" for mark in node.decorator_list):
        return "{}({}): a context manager".format(name, ast.unparse(arguments))
    result = "" if node.returns is None or bound and node.name == "__init__" else " -> " + ast.unparse(node.returns)
    for argument in arguments.args + arguments.kwonlyargs + [arguments.vararg]:
        if argument is not None and argument.annotation is not None:
            argument.annotation = ast.Name(ast.unparse(argument.annotation).replace("'", ""))
    return "{}({}){}".format(name, ast.unparse(arguments), result)


def methods(node: ast.ClassDef) -> Iterator[Function]:
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and not part.name.startswith("_"):
            yield part


def described(name: str, node: Union[ast.ClassDef, Function]) -> List[str]:
    if not isinstance(node, ast.ClassDef):
        return ["### {}".format(name), "", "```text", signature(name, node, False), "```", "", doc(node, name), ""]
    makers = [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    head = signature(name, makers[0], True) if makers else name
    out = ["### {}".format(name), "", "```text", head, "```", "", doc(node, name), ""]
    for part in methods(node):
        is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in part.decorator_list)
        shown = "." + part.name if is_property else signature("." + part.name, part, True)
        text = doc(part, "{}.{}".format(name, part.name))
        out.append("- `{}`: {}".format(shown, text.replace("\n", " ")))
    return out + [""] if next(methods(node), None) else out


def definitions(tree: ast.Module) -> Dict[str, Union[ast.ClassDef, Function]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def main(folder: str) -> Optional[str]:
    top = module(folder, "__init__")
    origin: Dict[str, Union[ast.ClassDef, Function]] = dict(definitions(top))
    names: List[str] = []
    for node in top.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            inner = definitions(module(folder, node.module))
            origin.update({alias.name: inner[alias.name] for alias in node.names if alias.name in inner})
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    out = [HEAD, "## gpumem", "", doc(top, "gpumem"), ""]
    for name in names:
        out += described("gpumem." + name, origin[name])
    for name in MODULES:
        tree = module(folder, name)
        out += ["## gpumem.{}".format(name), "", doc(tree, name), ""]
        for inner, node in definitions(tree).items():
            if not inner.startswith("_"):
                out += described("gpumem.{}.{}".format(name, inner), node)
    if missing:
        return "no docstring: " + ", ".join(missing)
    print("\n".join(out).rstrip("\n"))
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
