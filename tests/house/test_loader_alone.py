"""Only loader.py and making.py know the loader: all other functions take the values they need."""

from __future__ import annotations

import ast
from pathlib import Path

import fastamp

FOLDER = Path(fastamp.__file__).parent / "data"
OF_THE_LOADER = ("loader.py", "making.py")
OF_ANY_LOADER = {
    ("order.py", "find_samplers")
}  # also of torch's and Accelerate's: reads public names


def functions(path):
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def takes_a_loader(function):
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    hints = {ast.unparse(a.annotation) for a in arguments if a.annotation is not None}
    return any("loader" in a.arg for a in arguments) or any("DataLoader" in h for h in hints)


def test_no_function_outside_of_loader_takes_the_loader():
    found = {
        (path.name, getattr(function, "name", "lambda"))
        for path in FOLDER.glob("*.py")
        if path.name not in OF_THE_LOADER
        for function in functions(path)
        if takes_a_loader(function)
    }
    assert found == OF_ANY_LOADER


def test_no_module_reads_private_names_of_a_loader():
    for path in FOLDER.glob("*.py"):
        if path.name not in OF_THE_LOADER:
            names = {
                ast.unparse(n)
                for n in ast.walk(ast.parse(path.read_text()))
                if isinstance(n, ast.Attribute)
            }
            assert not [name for name in names if name.startswith("loader._")], path.name


def test_nothing_is_made_ahead_by_the_number_of_cores():
    """That number stands in the call of the compiled gather alone."""
    for path in FOLDER.glob("*.py"):
        if path.name not in ("sources.py", "runners.py"):
            assert "get_num_threads" not in path.read_text(), path.name
