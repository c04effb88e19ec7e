"""Which of Lightning's two roots a program means, read off what it imports.

A program says it in the imports of its files, and often after ours: sorted imports put ``lightning_moeclip`` before
``pytorch_lightning``. So the files are read on whose behalf ours are imported, from the innermost outward.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from importlib.util import find_spec

__all__ = ["ROOTS", "choose_root"]

# pytorch root -> fabric root
ROOTS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_PACKAGE = __name__.partition(".")[0]
_ROOT_OF = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def choose_root() -> str:
    """The root that the importing program names, else the only one loaded, else the first that is installed."""
    loaded = [root for root in ROOTS if root in sys.modules]
    for named in _named_from_within():
        found = [root for root in named if _is_installed(root)]
        if found:
            # a file that names both tries one and falls back to the other, or moves from one to the other
            return loaded[0] if len(loaded) == 1 and loaded[0] in found else found[0]
    if len(loaded) == 1:
        return loaded[0]
    return next((root for root in ROOTS if _is_installed(root)), "lightning.pytorch")


def _is_installed(root: str) -> bool:
    return root in sys.modules or find_spec(root.partition(".")[0]) is not None


def _named_from_within() -> Iterator[list[str]]:
    """Roots that each file on the stack names, from the importing one to the program's first."""
    seen = set()
    for name, path in _callers():
        if path in seen or name.partition(".")[0] == _PACKAGE:
            continue
        seen.add(path)
        own = _ROOT_OF.get(name.partition(".")[0])
        yield [own] if own else _named_in(linecache.getlines(path))


def _callers() -> Iterator[tuple[str, str]]:
    """Module name and file of each frame, innermost first; last the main module, which spawned processes import."""
    frame = sys._getframe()
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    yield "__main__", str(getattr(sys.modules.get("__main__"), "__file__", None) or "")


def _named_in(lines: list[str]) -> list[str]:
    """Roots that a source imports anywhere in it, in its order; none where it is no Python or out of reach."""
    source = "".join(lines)
    if "lightning" not in source:  # most files, unparsed
        return []
    tree = _parsed(source) or _parsed("".join(line for line in lines if not line.lstrip().startswith(("%", "!"))))
    if tree is None:
        return []
    imported: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.append((node.lineno, node.module))
    tops = [module.partition(".")[0] for _, module in sorted(imported)]
    return list(dict.fromkeys(_ROOT_OF[top] for top in tops if top in _ROOT_OF))


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
