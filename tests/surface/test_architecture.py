"""The arrows of docs/design.md §2, read from the imports; and how long files and functions may be."""

import ast
import functools
import re
from pathlib import Path

import pytest

import attemper

ROOT = Path(attemper.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A part may import parts of the lines below its own, and itself.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"page"},
    {"lab", "testing"},
    {"integrations"},
    {"scan"},
    {"report", "demo"},
    {"bench"},
    {"env"},
    {"health"},
    {"treat"},
    {"watch"},
    {"explain"},
    {"modules"},
    {"scores", "attention"},
    {"operation"},
    {"kernels"},
    {"vitals"},
    {"heads", "scale", "_files", "_display", "_memory", "_timing"},
    {"errors", "_torch_private"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# an upward import, made inside a function, and why
EXCEPTIONS = {
    ("attemper.kernels", "attemper.operation.checks"): "why() takes what attention() takes and checks it the same way"
}

# what a part may import of a part below it, where that is less than everything
DOORS = {
    ("lab", "bench"): set(),
    ("scan", "bench"): set(),
    ("scan", "operation"): set(),
    ("scan", "kernels"): {"attemper.kernels", "attemper.kernels.contract"},
    ("scan", "watch"): {"attemper.watch", "attemper.watch.examine"},
}

MAX_FILE, MAX_FUNCTION, MAX_FOLDER = 400, 80, 14
SOURCES = {".py", ".c", ".h", ".js", ".css", ".html", ".json"}


pytestmark = pytest.mark.xdist_group("architecture")  # in one process: each file is parsed once
parsed = functools.cache(ast.parse)


def module_name(path: Path) -> str:
    parts = ["attemper", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """The attemper modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = module.split(".")[: (-node.level or None) if not is_package else (1 - node.level or None)]
            base = ".".join([*(home if node.level else []), *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {_nearest_module(name) for name in found if name.split(".")[0] == "attemper"}


def _nearest_module(name: str) -> str:
    """attemper.vitals.SIGNS → attemper.vitals, a module on disk or in the table."""
    while "." in name and name not in MODULES and name.removeprefix("attemper.") not in RANK:
        name = name.rpartition(".")[0]
    return name


def offence(module: str, target: str) -> str | None:
    """Why a module may not import a target; None when it may."""
    if (module, target) in EXCEPTIONS:
        return None
    part, other = (f"{name}.".split(".")[1] for name in (module, target))
    if other == "cli" and part not in ("__main__", "cli"):
        return f"{module} imports {target}: nothing imports cli"
    if not other:  # the package itself: the public names
        return (
            None if part and RANK[part] < RANK["attention"] else f"{module} imports attemper: name the module instead"
        )
    if not part:
        return None  # __init__ offers every public name
    if part == other == "kernels":
        ours, theirs = (f"{name}..".split(".")[2] for name in (module, target))
        if ours and theirs not in (ours, "contract"):
            return f"{module} imports {target}: a kernel knows the contract and itself"
    elif part != other and RANK[part] >= RANK[other]:
        return f"{module} imports {target}: arrows point from {part} to what is below it"
    elif target not in DOORS.get((part, other), {target}):
        return f"{module} imports {target}: {part} may import {sorted(DOORS[part, other]) or 'nothing'} of {other}"
    return None


def offences(source: str, module: str, is_package: bool = False) -> list[str]:
    found = (offence(module, target) for target in sorted(imports(source, module, is_package)))
    return [words for words in found if words]


def long_functions(source: str) -> list[str]:
    functions = (n for n in ast.walk(parsed(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [f.name for f in functions if f.end_lineno - f.lineno + 1 > MAX_FUNCTION]


def test_every_part_has_a_place():
    parts = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert parts <= set(RANK), f"give {parts - set(RANK)} a line in LAYERS and in docs/design.md §2"


def test_arrows():
    found = [
        words
        for module, path in MODULES.items()
        for words in offences(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    ]
    assert found == []


def test_every_exception_is_still_needed():
    for module, target in EXCEPTIONS:
        path = MODULES[module]
        assert target in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attemper.kernels.reference", "from ..attention import attention"),
        ("attemper.kernels.reference", "def f():\n    import attemper.cli"),
        ("attemper.kernels.reference", "from .blockwise import forward"),
        ("attemper.kernels.blockwise.forward", "from ..reference import define"),
        ("attemper.kernels.blockwise.forward", "from .. import load"),
        ("attemper.kernels.contract", "from . import reference"),
        ("attemper.vitals", "from .operation.ops import attend"),
        ("attemper.errors", "if TYPE_CHECKING:\n    from .vitals import Vitals"),
        ("attemper.bench.speed", "from ..cli import main"),
        ("attemper.lab.exact.parallel", "from ...bench.speed import rows"),
        ("attemper.scan.run", "from ..kernels.reference import logits"),
        ("attemper.scan.run", "from ..operation.checks import prepare"),
        ("attemper.scan.run", "from ..watch.session import Watch"),
        ("attemper.attention", "import attemper"),
        ("attemper.attention", "from .watch.record import Record"),
        ("attemper.operation.ops", "from ..attention import attention"),
    ],
)
def test_the_arrow_checker_can_fail(module, source):
    assert offences(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attemper.kernels.blockwise.forward", "from ..contract import BIT\nfrom .plan import Plan\nimport torch"),
        ("attemper.kernels.reference", "from ..errors import InputError\nfrom ..vitals import SIGNS"),
        (
            "attemper.cli.bench",
            "import attemper\nfrom ..bench import speed\nfrom .. import __version__\nfrom .app import note",
        ),
        ("attemper.operation.ops", "from .. import kernels\nfrom ..kernels import reference"),
    ],
)
def test_the_arrow_checker_can_pass(module, source):
    assert offences(source, module) == []


def test_files_are_short_and_say_what_they_are():
    found = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if not ast.get_docstring(parsed(source)):
            found.append(f"{path}: open the file by saying what it is")
        if len(source.splitlines()) > MAX_FILE:
            found.append(f"{path}: more than {MAX_FILE} lines")
        found += [f"{path}: {name}() has more than {MAX_FUNCTION} lines" for name in long_functions(source)]
    assert found == []


def test_folders_are_small():
    """A folder is read as a whole: `ls` shows the order of the work."""
    counts = {
        folder: sum(file.suffix in SOURCES for file in folder.iterdir())
        for folder in {path.parent for path in ROOT.rglob("*.*")}
    }
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FOLDER} == {}


def test_no_class_name_or_type_alias_occurs_twice():
    """A type alias is a name in CamelCase that is assigned a type at the top of a module."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        tree = parsed(path.read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        assigned = [target.id for node in tree.body if isinstance(node, ast.Assign)
                    for target in node.targets if isinstance(target, ast.Name)]  # fmt: skip
        names += [name for name in assigned if re.fullmatch("[A-Z][a-z]+([A-Z][a-z]+)*", name)]
        for name in names:
            places.setdefault(name, []).append(module)
    assert "Row" in places
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w|^\s*from torch\S* import .*\b_[a-zA-Z]|forward_ad\._|_dynamo_")


def test_private_names_of_torch_are_in_one_file():
    found = []
    for module, path in MODULES.items():
        tree = parsed(path.read_text(encoding="utf-8"))
        words = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        lines = path.read_text(encoding="utf-8").splitlines()
        strings = {
            line for node in ast.walk(tree) if id(node) in words and isinstance(node.value, str)
            for line in range(node.lineno, node.end_lineno + 1)
        }  # fmt: skip
        if module != "attemper._torch_private":
            found += [
                f"{module}:{number}: {line.strip()}"
                for number, line in enumerate(lines, 1)
                if number not in strings and PRIVATE.search(line.partition("#")[0])
            ]
    assert found == []
    assert all(map(PRIVATE.search, ["torch._C._x()", "from torch._ops import OpOverload", "from torch.a import b, _c"]))


def test_the_length_checker_can_fail():
    def lines(count: int) -> str:
        return "def f():\n" + "    x = 1\n" * (count - 1)

    assert long_functions(lines(MAX_FUNCTION)) == []
    assert long_functions(lines(MAX_FUNCTION + 1)) == ["f"]


# what torch makes on the default device; a layer of a model is made where the caller wants it
MAKERS = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
    ),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
ON_THE_DEFAULT_DEVICE = {"attemper.lab.training.layers"}


def test_every_tensor_that_is_made_says_where():
    """torch.set_default_device, and `with torch.device("meta")`, are for the caller's tensors and not for ours."""
    silent = []
    for module in set(MODULES) - ON_THE_DEFAULT_DEVICE:
        for node in ast.walk(parsed(MODULES[module].read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            makes = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in MAKERS
            if makes and not any(keyword.arg in (None, "device") for keyword in node.keywords):
                silent.append(f"{module}:{node.lineno}: torch.{node.func.attr}() without device=")
    assert silent == []


GUIDE = ROOT.parents[1] / "docs" / "architecture.md"
LISTED = re.compile(r"^ {0,4}([\w.]+/?(?:, [\w.]+/?)*)(?: {2,}|$)", re.MULTILINE)


def walks():
    """The title of each walk of docs/architecture.md, and its files in order."""
    for section in GUIDE.read_text(encoding="utf-8").split("\n### ")[1:]:
        found = []
        for item in re.split(r"^\d+\. ", section.partition("\n## ")[0], flags=re.MULTILINE)[1:]:
            folder = ROOT
            for word in re.findall(r"`([^`\n]+)`", item):
                path = next((place for place in (folder / word, ROOT / word) if place.exists()), None)
                if path is None or (path.suffix != ".py" and not path.is_dir()):
                    continue
                folder = path if path.is_dir() else path.parent
                found += [path] if path.is_file() else []
        yield section.splitlines()[0], found


def listed(package):
    """What the docstring of a package lists, in order: modules and folders on the disk."""
    words = ast.get_docstring(parsed((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = [name for match in LISTED.finditer(words) for name in match[1].split(", ")]
    places = [
        next((place for place in (package / name, package / f"{name}.py") if place.exists()), None) for name in names
    ]
    return [place for place in places if place is not None]


def test_every_package_lists_its_files_in_the_order_of_the_walks():
    assert [len(files) > 8 for _, files in walks()] == [True] * 4
    offenders = []
    for package in sorted({path.parent for path in FILES} - {ROOT}):
        names = listed(package)
        there = {path for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        missing = there - set(names) - {package / "__init__.py"}
        offenders += [f"{package.name}/__init__.py does not list {path.name}" for path in sorted(missing)]
        for title, files in walks():
            inside = [file.relative_to(package).parts[0] for file in files if file.is_relative_to(package)]
            order = list(dict.fromkeys(package / name for name in inside if package / name in names))
            expected = sorted(order, key=names.index)
            if order != expected:
                offenders.append(f"{package.name}/__init__.py: {title} passes {[file.name for file in order]}")
    assert offenders == []
