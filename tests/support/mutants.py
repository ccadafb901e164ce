"""Small changes of a source file, one at a time: a test that sees none of them holds nothing."""

from __future__ import annotations

import ast
import copy
import zlib
from collections.abc import Iterator
from typing import NamedTuple

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# A change in these alters a text, or nothing that runs.
PASSED_OVER = (ast.Raise, ast.Assert, ast.JoinedStr)


class Change(NamedTuple):
    kind: str
    function: str  # "Class.method"
    line: int
    before: str
    after: str
    source: str  # of the whole file, changed

    def key(self, path: str) -> str:
        """The same for the same change, wherever other code moves it in its file."""
        return f"{path} {self.function}: {self.kind} {self.before} -> {self.after}"

    def draw(self, path: str) -> int:
        """A number by which to choose: code that stays as it is keeps its changes in a sample."""
        return zlib.crc32(self.key(path).encode())


def changes(source: str) -> Iterator[Change]:
    """Every small change of a file's functions."""
    seen = set()
    for function, node in _of_functions(ast.parse(source), ""):
        for kind, changed in _changed(node):
            after = "pass" if changed is None else ast.unparse(changed)
            if isinstance(changed, ast.expr):
                after = f"({after})"
            before = ast.unparse(node)
            edited = _replaced(source, node, after)
            try:
                compile(edited, "<mutant>", "exec")
            except SyntaxError:
                continue
            change = Change(kind, function, node.lineno, before, after, edited)
            if change.key("") not in seen:
                seen.add(change.key(""))
                yield change


Node = ast.expr | ast.stmt


def _of_functions(node: ast.AST, name: str) -> Iterator[tuple[str, Node]]:
    """The statements and expressions in functions, each with the name of its function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, PASSED_OVER):
            continue
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{name}.{child.name}".removeprefix(".")
            for part in child.body:
                yield from _of_functions(ast.Module([part], []), inner)
        elif isinstance(child, ast.expr | ast.stmt):
            if name:
                yield name, child
            yield from _of_functions(child, name)
        else:
            yield from _of_functions(child, name)


def _changed(node: Node) -> Iterator[tuple[str, Node | None]]:
    """What to write in the node's place; None: nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return | ast.Continue):
        yield "delete", None
    other = copy.deepcopy(node)
    if isinstance(other, ast.AugAssign | ast.BinOp) and type(other.op) in ARITHMETIC:
        other.op = ARITHMETIC[type(other.op)]()
        yield "operator", other
    elif isinstance(other, ast.If | ast.IfExp | ast.While):
        negated = ast.UnaryOp(ast.Not(), other.test)
        if isinstance(other, ast.IfExp):
            other.test = negated
            yield "negate", other
    elif isinstance(other, ast.Compare) and type(other.ops[0]) in COMPARISONS:
        other.ops[0] = COMPARISONS[type(other.ops[0])]()
        yield "compare", other
    elif isinstance(other, ast.BoolOp):
        other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
        yield "and/or", other
    elif isinstance(other, ast.Constant) and type(other.value) in (int, bool):
        assert isinstance(other.value, int)
        other.value = not other.value if isinstance(other.value, bool) else other.value + 1
        yield "constant", other
    elif isinstance(other, ast.Call) and other.keywords:
        other.keywords.pop()
        yield "keyword", other


def _replaced(source: str, node: Node, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    head = b"".join(lines[:first]) + lines[first][: node.col_offset]
    tail = lines[last][node.end_col_offset :] + b"".join(lines[last + 1 :])
    return (head + text.encode() + tail).decode()
