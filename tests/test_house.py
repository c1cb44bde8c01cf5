"""The house stands as designed: who imports whom, what a kernel file holds, how long files are, what is importable."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import monograph
from tests.engines import write_model

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "monograph"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
LINKS = ("arena", "kernels", "model")

# What a part may import of ours, and, where that is limited, of others.
OURS = {
    "errors": set(),
    "arena": {"arena", "errors"},
    "kernels": {"kernels"},
    "model": {"model", "arena", "kernels", "errors"},
    "chat": {"chat", "model", "errors"},
    "cli": {"chat", "model", "errors", ""},
    "__main__": {"cli"},
    "": {"model", "errors"},
}
OTHERS = {"errors": set(), "arena": {"torch"}, "kernels": {"torch", "triton"}, "chat": {"readline"}, "cli": set()}


def module_files() -> dict[str, Path]:
    """Every module of the package by its name, and the real file behind it."""
    files: dict[str, Path] = {}
    folders = [PACKAGE, PACKAGE / "chat", *(ROOT / name for name in LINKS)]
    for folder in folders:
        prefix = "monograph" if folder == PACKAGE else f"monograph.{folder.name}"
        for path in sorted(folder.glob("*.py")):
            files[prefix if path.stem == "__init__" else f"{prefix}.{path.stem}"] = path
    return files


FILES = module_files()
PYTHON_FILES = [
    path for folder in (*LINKS, "src", "tests", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
]


def part_of(module: str) -> str:
    """Which part of the house a module of ours is in: "arena", "cli", or "" for the package itself."""
    return module.removeprefix("monograph").removeprefix(".").partition(".")[0]


def imports(tree: ast.Module, *, only_at_import: bool = False) -> Iterator[str]:
    """The modules a file names in import statements; of ``from m import n`` both m and m.n.

    Args:
        tree: The file.
        only_at_import: Leave out what runs later (in functions) and what type checkers alone see.
    """
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif only_at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif only_at_import and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def kernel_files() -> list[Path]:
    """The files of kernels/ that hold a kernel: the program launches it, or it is named like one. Others are shared."""
    launched = set(imports(ast.parse((ROOT / "model" / "program.py").read_text())))
    return [
        path
        for name, path in FILES.items()
        if name.startswith("monograph.kernels.") and (name in launched or "_kernel(" in path.read_text())
    ]


def test_every_part_is_known() -> None:
    assert len(FILES) > 40
    assert {part_of(module) for module in FILES} == set(OURS)


@pytest.mark.parametrize("module", FILES)
def test_import_direction(module: str) -> None:
    part = part_of(module)
    for name in imports(ast.parse(FILES[module].read_text())):
        top = name.partition(".")[0]
        if top == "monograph":
            known = name in FILES or name in ("monograph.kernels",)
            target = part_of(name if known else name.rpartition(".")[0])
            assert target in OURS[part], f"{module} may not import {name}"
        else:
            assert top not in LINKS, f"{module} imports {name} by its top-level name"
            if part in OTHERS and top not in sys.stdlib_module_names:
                assert top in OTHERS[part], f"{module} may not import {name}"


def test_no_import_cycles() -> None:
    graph = {}
    for module, path in FILES.items():
        named = imports(ast.parse(path.read_text()), only_at_import=True)
        # A package's own modules name its __init__ by being in it; that alone is no cycle.
        graph[module] = {name for name in named if name in FILES and not module.startswith(f"{name}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_modules_have_one_name() -> None:
    """Imported from the repository's root, where arena, kernels and model are importable by accident, all modules are
    loaded once, under monograph."""
    code = (
        "import importlib, pathlib, sys\n"
        f"modules = [importlib.import_module(name) for name in {sorted(FILES)!r} if name != 'monograph.__main__']\n"
        f"stray = {set(LINKS)!r} & {{name.partition('.')[0] for name in sys.modules}}\n"
        "assert not stray, stray\n"
        "files = [pathlib.Path(m.__file__).resolve() for m in modules]\n"
        "assert len(set(files)) == len(files)\n"
        f"assert all(file.is_relative_to({str(ROOT)!r}) for file in files), files\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, check=True, timeout=120)


def test_kernels_is_no_regular_package() -> None:
    """With an __init__.py, a top-level `kernels` would be taken for Hugging Face's package of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "arena" / "__init__.py").exists()
    assert (ROOT / "model" / "__init__.py").exists()


def test_transformers_imports_from_the_root(tmp_path: Path) -> None:
    """transformers probes `kernels` as it is imported. From our root it must find Hugging Face's package, here its
    outline, and not our folder; that it finds nothing where nothing is installed, every test with an oracle shows."""
    package, metadata = tmp_path / "kernels", tmp_path / "kernels-0.16.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.16.0\n")
    (package / "__init__.py").write_text(
        "class Anything:\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def __call__(self, target): return target\n"
        "def __getattr__(name): return Anything\n"
    )
    code = (
        "import transformers; from transformers import LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "assert is_kernels_available()\n"
        f"import kernels; assert kernels.__file__ == {str(package / '__init__.py')!r}\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=240)


def test_links() -> None:
    for name in LINKS:
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", "..", name)


def test_broken_links_say_the_way_out(tmp_path: Path) -> None:
    """A git checkout without symbolic links has text files in their place."""
    package = tmp_path / "monograph"
    package.mkdir()
    for name in ("__init__.py", "errors.py"):
        (package / name).write_text((PACKAGE / name).read_text())
    for name in LINKS:
        (package / name).write_text(f"../../{name}")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import monograph"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    message = result.stderr.splitlines()[-1]
    assert message.startswith("ImportError: monograph is incomplete")
    assert str(package / "model") in message
    assert "git config core.symlinks true" in message


def test_public_names() -> None:
    """What is promised is there, under the name and from the home that type checkers are told."""
    assert sorted(monograph.__all__) == monograph.__all__
    for name in monograph.__all__:
        value = getattr(monograph, name)
        if name != "__version__":
            assert value.__module__.startswith("monograph."), name
            assert value.__name__ == name
    assert set(monograph.__all__) <= set(dir(monograph))
    checked = [
        node
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen_by_checkers = {
        alias.name: node.module
        for block in checked
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen_by_checkers == monograph._HOME
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        monograph.nonsense  # noqa: B018


def test_import_is_cheap() -> None:
    code = "import sys, monograph; sys.exit(' '.join({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == ""


@pytest.mark.parametrize(
    ("action", "unneeded"),
    [
        ("plan_model", {"triton", "tokenizers", "jinja2", "gguf", "huggingface_hub", "httpx", "transformers"}),
        ("load", {"jinja2", "gguf", "huggingface_hub", "httpx", "transformers"}),
    ],
)
def test_imports_wait_until_they_are_needed(action: str, unneeded: set[str], tmp_path: Path) -> None:
    """For a model in a folder here; each of these takes a tenth of a second or more, or is for others alone."""
    write_model(tmp_path)
    code = (
        f"import sys, monograph; monograph.{action}({str(tmp_path)!r}, device='cpu')\n"
        f"sys.exit(' '.join({unneeded!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == ""


def test_file_lengths() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PYTHON_FILES}
    too_long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 600}
    assert not too_long
    assert statistics.median(lengths.values()) < 250


@pytest.mark.parametrize("path", [path for path in FILES.values() if path.name != "__main__.py"], ids=FILES.get)
def test_module_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_kernel_files_are_found() -> None:
    names = {path.stem for path in kernel_files()}
    assert {"attention", "embed", "gate_up", "head", "linear_add", "qkv", "sample"} <= names
    assert "device" not in names


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.stem)
def test_form_of_a_kernel_file(path: Path) -> None:
    """A kernel file `x.py` holds `_x_kernel`, its wrapper `x`, its reference `x_torch`, and what those alone need."""
    tree = ast.parse(path.read_text())
    name = path.stem
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    jit = {n for n, f in functions.items() if any("jit" in ast.unparse(d) for d in f.decorator_list)}
    assert f"_{name}_kernel" in jit
    assert {name, f"{name}_torch"} <= set(functions) - jit
    assert not [n for n in functions if not n.startswith("_") and n != name and not n.endswith("_torch")]
    assert not [node for node in tree.body if isinstance(node, ast.ClassDef)]

    wrapper, reference = functions[name], functions[f"{name}_torch"]
    assert _arguments(wrapper) == _arguments(reference)
    options = {a.arg for a in wrapper.args.kwonlyargs} - {a.arg for a in reference.args.kwonlyargs}
    assert {"pdl"} <= options <= {"pdl", "tile"}
    for function in (wrapper, reference):
        assert ast.get_docstring(function), function.name
        assert function.returns is not None
        assert ast.unparse(function.returns) == "None"
    # The live length and all else that changes between launches comes through a pointer.
    plain = [a.arg for a in functions[f"_{name}_kernel"].args.args if a.annotation is None and a.arg.islower()]
    assert not {"seq_len", "position", "prefill_end", "rows", "token"} & set(plain)


def _arguments(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
