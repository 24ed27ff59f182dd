"""What the running Python says about itself: one fact per documented name of the standard library.

Source of the text: docstrings of the standard library and `pydoc_data.topics` (the language reference),
both under the PSF-2.0 licence. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

# Names that people ask about first. They are read from live objects, because many are written in C.
WELL_KNOWN_MODULES = (Path(__file__).parent / "well_known_modules.txt").read_text("utf-8").split()
_SKIPPED_PARTS = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "__pycache__",
}
_ANSWER_CHARS_MAX = 700


@dataclass(frozen=True, slots=True)
class Fact:
    """One documented name. `kind` is module, class, function or method; `call` is "name(arguments)" or ""."""

    kind: str
    module: str
    name: str
    call: str
    doc: str
    well_known: bool

    @property
    def path(self) -> str:
        """The dotted name a person would type: `os.path.join`, `len`, `str.join`."""
        if self.kind == "module":
            return self.module
        return self.name if self.module == "builtins" else f"{self.module}.{self.name}"

    @property
    def summary(self) -> str:
        """First paragraph of the docstring on one line, at most 700 characters; "" when it says nothing."""
        paragraphs = [" ".join(part.split()) for part in self.doc.split("\n\n")]
        useful = [part for part in paragraphs if _is_prose(part)]
        return useful[0] if useful and len(useful[0]) <= _ANSWER_CHARS_MAX else ""


@dataclass(frozen=True, slots=True)
class Topic:
    """One chapter of the language reference."""

    key: str
    title: str
    paragraphs: tuple[str, ...]


def read_facts() -> list[Fact]:
    """Every documented public name, well-known modules first, each dotted name once."""
    facts: dict[str, Fact] = {}
    for fact in [*_live_facts(), *_source_facts()]:
        if fact.doc and len(fact.path) < 80:
            facts.setdefault(fact.path, fact)
    return list(facts.values())


def read_topics() -> list[Topic]:
    """The language reference as paragraphs, headings and underlines removed."""
    found = []
    for key, text in sorted(topics.topics.items()):
        lines = [line for line in text.strip().split("\n") if not re.fullmatch(r"[*=\-~^]{3,}", line.strip())]
        paragraphs = [part.strip("\n") for part in "\n".join(lines[1:]).split("\n\n") if part.strip()]
        found.append(Topic(key, lines[0].strip(), tuple(paragraphs)))
    return found


def _is_prose(paragraph: str) -> bool:
    looks_like_signature = re.match(r"^[\w.]+\([^)]*\)( --?>.*)?$", paragraph)
    return len(paragraph) > 15 and not looks_like_signature and not paragraph.startswith((">>>", "==", "--"))


def _live_facts() -> Iterator[Fact]:
    for module_name in WELL_KNOWN_MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(module_name)
        yield Fact("module", module_name, module_name, "", inspect.getdoc(module) or "", True)
        public = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        for name in sorted(public):
            value = getattr(module, name, None)
            if inspect.isclass(value):
                yield Fact("class", module_name, name, "", _own_doc(value), True)
                yield from _live_methods(module_name, name, value)
            elif inspect.isroutine(value):
                yield Fact("function", module_name, name, _call(name, value), _own_doc(value), True)


def _live_methods(module_name: str, class_name: str, owner: type) -> Iterator[Fact]:
    for name, value in sorted(vars(owner).items()):
        if inspect.isroutine(value) and not name.startswith("_"):
            path = f"{class_name}.{name}"
            yield Fact("method", module_name, path, _call(path, value), _own_doc(value), True)


def _own_doc(value: object) -> str:
    doc = getattr(value, "__doc__", None)
    return inspect.cleandoc(doc) if isinstance(doc, str) else ""


def _call(name: str, value: object) -> str:
    try:
        # A default such as <object object at 0x7f...> would differ from run to run.
        return re.sub(r" at 0x[0-9a-f]+", "", f"{name}{inspect.signature(value)}") if callable(value) else ""
    except (ValueError, TypeError):
        return ""


def _source_facts() -> Iterator[Fact]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_PARTS & set(parts) or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text("utf-8", errors="replace"))
        module = ".".join(part for part in parts if part != "__init__")
        yield Fact("module", module, module, "", ast.get_docstring(tree) or "", False)
        yield from _tree_facts(module, "", tree)


def _tree_facts(module: str, owner: str, tree: ast.Module | ast.ClassDef) -> Iterator[Fact]:
    for node in tree.body:
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) or node.name.startswith("_"):
            continue
        name, doc = f"{owner}{node.name}", ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            yield Fact("class", module, name, "", doc, False)
            yield from _tree_facts(module, f"{name}.", node)
        else:
            call = f"{name}({ast.unparse(node.args)})"
            yield Fact("method" if owner else "function", module, name, call, doc, False)
