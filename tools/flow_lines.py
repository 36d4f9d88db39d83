"""Counts the lines of code that a reader needs to follow a gradient.

    python tools/flow_lines.py [ROOT]

The numbered lines of a flow in docs/architecture.md name functions. To
understand a step, a reader needs these functions, and everything in the package
that they use, recursively:

- a name that the function's module defines or imports: the function, the
  constant, or the attributes and `__init__` of the class;
- `self.name` and `super().name`: the method of the class, or of its nearest
  base class that has this method. For `self.name` in a base class of the flow's
  optimizer, the search begins at the optimizer;
- `optimizer.name` and `self._optimizer.name`: the method of the flow's
  optimizer;
- `other.name(...)`, or `other.name` if this is a property: the methods of this
  name in all classes that the function's module, or a constant in it, names.
  If `other` is an attribute of `self`, the search includes the modules of the
  base classes.

Functions of `_compat` and `checks` count, but not the functions that they call,
since these modules stand for TensorFlow, Keras and errors. A call to a function
that is an argument adds no lines, since the code does not show which function
this is. The flow may name the function.

Docstrings, comments, imports and blank lines do not count, and no line counts
twice.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Sequence

PACKAGE = "tf_optimizers"
BELOW = (f"{PACKAGE}/_compat/", f"{PACKAGE}/checks.py")
LINK = re.compile(rf"\[`([\w.]+)`\]\(\.\./({PACKAGE}/[\w/]+\.py)\)")
SECTION = re.compile(r"^### `(\w+)`.*?(?=^##)", re.M | re.S)
STEP = re.compile(r"^\d+\. .*(?:\n   .*)*", re.M)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> set[int]:
    """Return the numbers of lines of code, without docstrings and comments."""
    code, said = set(), {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    said |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in said:
            code.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            first = node.body[0]
            code.difference_update(range(first.lineno, first.end_lineno + 1))
    return code


class Module:
    """The definitions and imports of a file, by name."""

    def __init__(self, root: pathlib.Path, path: str) -> None:
        text = (root / path).read_text()
        self.path, self.code = path, code_lines(text)
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = alias.asname or alias.name
                    self.imported[name] = (node.module, alias.name)
            for name in _names_of(node):
                self.defined[name] = node


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, Function)):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [t.id for t in targets if isinstance(t, ast.Name)]


# A module's path, and a dotted name in it.
Place = tuple[str, str]


class Reader:
    """Follows names through the package.

    Args:
        root: The repository's folder.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._modules: dict[str, Module] = {}

    def module(self, path: str) -> Module:
        """Return a file of the package."""
        if path not in self._modules:
            self._modules[path] = Module(self._root, path)
        return self._modules[path]

    def read(self, starts: Sequence[Place], owner: Place) -> set[Place]:
        """Return all lines to read, as paths and numbers.

        Args:
            starts: The functions that a flow names.
            owner: The class of the flow's optimizer.
        """
        self._family = self._classes_below(owner)
        lines: set[Place] = set()
        waiting, seen = list(starts), set()
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            module = self.module(place[0])
            is_below = place[0].startswith(BELOW)
            for node in self._parts(place):
                first = [*getattr(node, "decorator_list", ()), node][0]
                own = range(first.lineno, node.end_lineno + 1)
                lines |= {(module.path, n) for n in module.code & set(own)}
                waiting += [] if is_below else self._named(place, node)
        return lines

    def _parts(self, place: Place) -> list[ast.stmt]:
        """Return the statements to read for a name."""
        path, name = place
        first, _, rest = name.partition(".")
        node = self.module(path).defined[first]
        if rest:
            return [self._methods(node)[rest]]
        if not isinstance(node, ast.ClassDef):
            return [node]
        return [
            part
            for part in node.body
            if not isinstance(part, Function) or part.name == "__init__"
        ]

    @staticmethod
    def _methods(node: ast.stmt) -> dict[str, Function]:
        body = node.body if isinstance(node, ast.ClassDef) else []
        return {part.name: part for part in body if isinstance(part, Function)}

    def _resolve(self, path: str, name: str) -> Place | None:
        """Return the place in the package to which a name in a file refers."""
        module = self.module(path)
        if name in module.defined:
            return path, name
        source, original = module.imported.get(name, ("", ""))
        if not source.startswith(PACKAGE):
            return None
        for end in (".py", "/__init__.py"):
            found = source.replace(".", "/") + end
            if (self._root / found).exists():
                return self._resolve(found, original)
        return None

    def _classes_below(self, place: Place) -> list[Place]:
        """Return a class and its bases in the package, nearest first."""
        node = self.module(place[0]).defined[place[1]]
        found = [place]
        for base in getattr(node, "bases", ()):
            below = isinstance(base, ast.Name) and self._resolve(
                place[0], base.id
            )
            found += self._classes_below(below) if below else []
        return found

    def _in_classes(self, classes: Sequence[Place], name: str) -> list[Place]:
        return [
            (path, f"{owner}.{name}")
            for path, owner in classes
            if name in self._methods(self.module(path).defined[owner])
        ]

    def _named(self, place: Place, node: ast.AST) -> list[Place]:
        """Return the places that a piece of code names."""
        path, name = place
        owner = name.partition(".")[0]
        place = path, owner
        bases = self._classes_below(place) if self._is_class(place) else []
        own = self._family if place in self._family else bases
        called = {
            id(part.func)
            for part in ast.walk(node)
            if isinstance(part, ast.Call)
        }
        found: list[Place] = []
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                to = self._resolve(path, part.id)
                found += [to] if to else []
            if not isinstance(part, ast.Attribute):
                continue
            holder, attribute = ast.unparse(part.value), part.attr
            if holder == "self":
                found += self._in_classes(own, attribute)[:1]
            elif holder == "super()":
                found += self._in_classes(bases[1:], attribute)[:1]
            elif holder in ("optimizer", "self._optimizer"):
                found += self._in_classes(self._family, attribute)[:1]
            else:
                below = bases if holder.startswith("self.") else []
                found += [
                    method
                    for seen in {path, *(base for base, _ in below)}
                    for method in self._in_classes(self._seen(seen), attribute)
                    if id(part) in called or self._is_property(method)
                ]
        return found

    def _seen(self, path: str) -> list[Place]:
        """Return the classes that a module, or a constant in it, names."""
        module = self.module(path)
        found = [
            self._resolve(path, name)
            for name in [*module.defined, *module.imported]
        ]
        places = [place for place in found if place]
        for constant, name in list(places):
            node = self.module(constant).defined[name]
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                held = [
                    self._resolve(constant, part.id)
                    for part in ast.walk(node)
                    if isinstance(part, ast.Name)
                ]
                places += [place for place in held if place]
        return [
            each
            for place in dict.fromkeys(places)
            if self._is_class(place)
            for each in self._classes_below(place)
        ]

    def _is_class(self, place: Place) -> bool:
        path, name = place
        return isinstance(self.module(path).defined[name], ast.ClassDef)

    def _is_property(self, place: Place) -> bool:
        (function,) = self._parts(place)
        return any(
            "property" in ast.unparse(d) for d in function.decorator_list
        )


def flows(root: pathlib.Path) -> dict[str, list[Place]]:
    """Return the functions that docs/architecture.md names, by optimizer."""
    page = (root / "docs" / "architecture.md").read_text()
    return {
        match[1]: [
            (path, name)
            for step in STEP.findall(match[0])
            for name, path in LINK.findall(step)
        ]
        for match in SECTION.finditer(page)
    }


def count(root: pathlib.Path, optimizer: str) -> dict[str, int]:
    """Return the number of lines to read in each file of a flow."""
    (path,) = [
        path
        for path in (root / PACKAGE).glob("*.py")
        if f"\nclass {optimizer}(" in path.read_text()
    ]
    reader, owner = Reader(root), (f"{PACKAGE}/{path.name}", optimizer)
    counts: dict[str, int] = {}
    for path, _ in reader.read(flows(root)[optimizer], owner):
        counts[path] = counts.get(path, 0) + 1
    return counts


def main() -> None:
    """Print the lines of all flows, by file."""
    here = pathlib.Path(__file__).parent.parent
    root = pathlib.Path(sys.argv[1]) if sys.argv[1:] else here
    for optimizer in flows(root):
        counts = count(root, optimizer)
        print(f"{sum(counts.values()):5} {optimizer}, {len(counts)} files")
        for path, lines in sorted(counts.items(), key=lambda each: -each[1]):
            print(f"      {lines:5} {path}")


if __name__ == "__main__":
    main()
