"""The mutants of a module. Annotations, decorators, imports, printing and the text of errors are not mutated."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
SKIPPED = (cst.Annotation, cst.Decorator, cst.Raise, cst.Import, cst.ImportFrom, cst.Assert)
UNTESTED_CALLS = ("print", "warn", "cast")  # their arguments are for readers and for mypy


class Mutant(NamedTuple):
    path: str
    key: str  # a hash of the diff
    diff: str
    source: str
    lines: range | None  # of the mutated statement; None where it runs on import

    @property
    def change(self) -> tuple[str, ...]:
        """The lines that differ, as in equivalent.txt."""
        return tuple(f"{line[0]} {line[1:].strip()}" for line in self.diff.splitlines()[2:] if line[0] in "+-")


class Visitor(MutationVisitor):
    """Collect mutations, in decorated functions too, but none that only a reader can notice."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False
        return isinstance(node, SKIPPED) or super()._skip_node_and_children(node)

    def _should_mutate_node(self, node: cst.CSTNode) -> bool:
        function = node.func if isinstance(node, cst.Call) else None
        name = function.attr if isinstance(function, cst.Attribute) else function
        return not (isinstance(name, cst.Name) and name.value in UNTESTED_CALLS)


def mutants(path: str) -> list[Mutant]:
    """Return the mutants of a module that compile."""
    source = Path(path).read_text()
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    module = cst.MetadataWrapper(cst.parse_module(source)).visit(visitor)
    spans, found = list(statements(ast.parse(source))), {}
    place = {id(node): i for i, statement in enumerate(module.body) for node in _nodes(statement)}
    parts = [module.code_for_node(part) for part in (*module.header, *module.body, *module.footer)]
    for mutation in visitor.mutations:
        i = place[id(mutation.original_node)]  # to replace a node in one statement is faster than in the module
        part = module.code_for_node(deep_replace(module.body[i], mutation.original_node, mutation.mutated_node))
        i += len(module.header)
        text = "".join([*parts[:i], part, *parts[i + 1 :]])
        with contextlib.suppress(SyntaxError):
            if compile(text, path, "exec") and part != parts[i]:
                found[text] = _mutant(path, source, text, spans)
    return list(found.values())


def save_mutants(path: str, file: Path) -> None:
    file.write_bytes(pickle.dumps(mutants(path)))


@functools.cache
def equivalent() -> dict[str, set[tuple[str, ...]]]:
    """Return the changes that no test can notice, by module."""
    found: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for entry in EQUIVALENT.read_text().split("\n\n")[1:]:
        path, *lines = entry.strip().splitlines()
        found[path.removesuffix(":")].add(tuple(line.strip() for line in lines if line.lstrip()[0] in "+-"))
    return found


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _mutant(path: str, source: str, text: str, spans: list[tuple[range, bool]]) -> Mutant:
    before, after = source.splitlines(), text.splitlines()
    diff = "\n".join(difflib.unified_diff(before, after, path, path, lineterm="", n=1))
    changed = next(i for i, (a, b) in enumerate(zip([*before, ""], [*after, ""], strict=False), 1) if a != b)
    lines, on_import = min((span for span in spans if changed in span[0]), key=lambda span: len(span[0]))
    return Mutant(path, hashlib.sha256(diff.encode()).hexdigest()[:16], diff, text, None if on_import else lines)


def statements(node: ast.AST, on_import: bool = True) -> Iterator[tuple[range, bool]]:
    """Yield the lines of each statement, without those of its body, and whether it runs on import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            body = getattr(child, "body", None)
            end = body[0].lineno - 1 if body else child.end_lineno
            yield range(child.lineno, max(end or 0, child.lineno) + 1), on_import
        yield from statements(child, on_import and not isinstance(child, ast.FunctionDef))
