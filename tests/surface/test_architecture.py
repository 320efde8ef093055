"""The arrows of docs/design.md §2, read from the imports of both packages."""

import ast
import functools
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import attemper

ROOT = Path(attemper.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A part may import parts of the lines below its own, and itself.
LAYERS = [
    {"__main__"},
    {"extension"},
    {"cli"},
    {"testing"},
    {"integrations"},
    {"scan"},
    {"report", "demo"},
    {"env"},
    {"health"},
    {"treat"},
    {"watch"},
    {"modules", "flash"},
    {"scores", "attention"},
    {"operation"},
    {"kernels"},
    {"vitals"},
    {"heads", "scale", "_files", "_display"},
    {"errors", "_torch_private"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# an upward import, made inside a function, and why
EXCEPTIONS = {
    ("attemper.kernels", "attemper.operation.call"): "why() takes what attention() takes and checks it the same way"
}

# what a part may import of a part below it, where that is less than everything
DOORS = {
    ("scan", "operation"): set(),
    ("scan", "kernels"): {"attemper.kernels", "attemper.kernels.contract"},
    ("scan", "watch"): {"attemper.watch", "attemper.watch.examine"},
}

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


def imported(path: Path) -> set[str]:
    """What a file imports by absolute names, anywhere in it, with the names that it takes."""
    found = set()
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


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
    if not other:  # the package itself: the public names
        return (
            None if part and RANK[part] < RANK["attention"] else f"{module} imports attemper: name the module instead"
        )
    if not part:
        return None  # __init__ offers every public name
    if part == other == "kernels":
        ours, theirs = (f"{name}..".split(".")[2] for name in (module, target))
        if ours and theirs not in (ours, "contract", "guard", ""):  # the last: the package, for what is compiled
            return f"{module} imports {target}: a kernel knows the contract, the guard, what is compiled and itself"
    elif part != other and RANK[part] >= RANK[other]:
        return f"{module} imports {target}: arrows point from {part} to what is below it"
    elif target not in DOORS.get((part, other), {target}):
        return f"{module} imports {target}: {part} may import {sorted(DOORS[part, other]) or 'nothing'} of {other}"
    return None


def offences(source: str, module: str, is_package: bool = False) -> list[str]:
    found = (offence(module, target) for target in sorted(imports(source, module, is_package)))
    return [words for words in found if words]


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


LIBRARY = re.compile(r"(?:from|import) (attemper(?:\.\w+)*)(?: import (\w+))?")
OUTSIDE = [
    path
    for folder in ("src/attemper_lab", "research")
    for path in sorted((ROOT.parents[1] / folder).rglob("*"))
    if path.suffix in (".py", ".js", ".toml", ".html")
    and "hopper" not in path.parts  # a kernel to come, which knows the contract as kernels do
]


@functools.cache
def offered():
    """The names that a package beside this one may take: public names, those of public modules, and `attemper.extension`."""
    names = {"attemper", *(f"attemper.{name}" for name in (*attemper.__all__, "__version__", "extension"))}
    names |= {f"attemper.errors.{name}" for name, value in vars(attemper.errors).items() if isinstance(value, type)}
    names |= {"attemper.kernels.KERNELS", "attemper.kernels.why"}
    for path in (ROOT / "health" / "__init__.py", *(ROOT / "extension").glob("*.py")):
        module = module_name(path)
        names |= {module, *(f"{module}.{name}" for name in re.findall(r" as (\w+)$", path.read_text(), re.MULTILINE))}
    return names


def taken(source):
    """The names of the library that a Python file takes, by imports, as attributes of what it imported, or by importlib."""
    tree, aliases, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    modules = {name for name in offered() if f"{name}.".startswith(("attemper.extension.", "attemper.health."))}
    modules = modules - {"attemper.health.thresholds"} | {"attemper", "attemper.errors", "attemper.kernels"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and aliases.get(node.value.id) in modules
        ):
            whole = f"{aliases[node.value.id]}.{node.attr}"
            if isinstance(sys.modules.get(aliases[node.value.id]), ModuleType):
                found.add(whole)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__", "resolve_name")
        ):
            words = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            found |= {word for word in words if str(word).split(".")[0] == "attemper"}
    return {name for name in found if name.split(".")[0] == "attemper"}


def test_the_lab_uses_public_names_and_the_extension_alone():
    importlib.import_module("attemper.kernels")
    for path in (ROOT / "extension").glob("*.py"):
        importlib.import_module(module_name(path))
    seen, wrong = set(), set()
    for path in OUTSIDE:
        text = path.read_text(encoding="utf-8")
        # also in code that is shown or run elsewhere, as text
        names = {".".join(filter(None, pair)) for pair in LIBRARY.findall(text)}
        names |= taken(text) if path.suffix == ".py" else set()
        wrong |= {f"{path.name}: {name}" for name in names - offered()}
        seen |= names
    assert wrong == set()
    assert "attemper.extension.calls.AttentionCall" in seen


@pytest.mark.parametrize(
    "source",
    [
        "from attemper.scan.run import run",
        "from attemper.kernels.contract import Problem",
        "from attemper.kernels import choose",
        "from attemper.health.judging import findings",
        "from attemper.extension.files import Path",
        "from attemper.errors import functools",
        "import attemper.scan.run",
        "import attemper\nattemper._HOMES",
        "import attemper.kernels as kernels\nkernels.contract",
        "from attemper import kernels\nkernels.contract",
        "from attemper.extension import files\nfiles._mode",
        "import importlib\nimportlib.import_module('attemper.scan.run')",
        "import importlib\nimportlib.import_module(f'attemper.{name}')",
        "__import__('attemper.scan.run')",
    ],
)
def test_the_checker_of_the_lab_can_fail(source):
    assert taken(source) - offered()


def test_the_library_does_not_know_the_lab():
    """But for its commands and two public names, which are there if the package is."""
    found = {path.relative_to(ROOT).as_posix() for path in FILES
             if any(name.split(".")[0] in ("attemper_lab", "research") for name in imported(path))}  # fmt: skip
    assert found == {"__init__.py", "cli/commands.py"}


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


def test_every_tensor_that_is_made_says_where():
    """torch.set_default_device, and `with torch.device("meta")`, are for the caller's tensors and not for ours."""
    silent = []
    for module in MODULES:
        for node in ast.walk(parsed(MODULES[module].read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            makes = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in MAKERS
            if makes and not any(keyword.arg in (None, "device") for keyword in node.keywords):
                silent.append(f"{module}:{node.lineno}: torch.{node.func.attr}() without device=")
    assert silent == []


# A file may import those of the lines below its own, and of its own line; a folder stands for its files that have no line.
WATCH = [
    ["examine"],
    ["session"],
    ["compiled"],
    ["routes.replace", "alter"],
    ["routes.registered"],
    ["attach.attachment"],
    ["attach.intercept", "attach.dispatch"],
    ["attach.plan", "attach.guards", "attach.overrides", "trace.trace"],
    ["routes"],
    ["attach.measuring", "weights"],
    ["observer", "options", "source"],
    ["record"],
    ["attach.gradients", "bias"],
    ["call"],
    ["attach", "trace", "routes.handwritten.layout"],
]
# types that are imported for their names alone: what holds the state of a pass names all that is in it
FOR_TYPES = {
    "attach.running": {
        "attach.attachment",
        "attach.plan",
        "call",
        "observer",
        "routes.exchanged",
        "routes.handwritten.chain",
        "routes.kind",
        "routes.transformers",
        "trace.trace",
    },
    "attach.names": {"call", "observer"},
    "attach.dispatch": {"attach.attachment"},
    "attach.intercept": {"attach.attachment"},
    "routes.ragged": {"attach.intercept"},
}
TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:    .*\n)+", re.MULTILINE)
INSIDE = {
    name.removeprefix("attemper.watch."): path
    for name, path in MODULES.items()
    if name.startswith("attemper.watch.") and path.name != "__init__.py"
}


def line_of(name):
    """The line of a file, or of the nearest folder around it."""
    places = {part: number for number, parts in enumerate(WATCH) for part in parts}
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def upward(name, source):
    """The imports of a file that point up."""
    found = {target.removeprefix("attemper.watch.") for target in imports(source, f"attemper.watch.{name}", False)}
    return {target for target in found & set(INSIDE) if line_of(target) < line_of(name)}


def test_imports_inside_the_watch_point_one_way():
    sources = {name: path.read_text(encoding="utf-8") for name, path in INSIDE.items()}
    assert {name: found for name, text in sources.items() if (found := upward(name, TYPES.sub("", text)))} == {}
    assert {name: found for name, text in sources.items() if (found := upward(name, text))} == FOR_TYPES


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("call", "from .session import Watch"),
        ("routes.sdpa", "from ..attach.attachment import attachment"),
        ("record.sums", "def f():\n    from ..observer import Observer"),
    ],
)
def test_the_checker_of_the_watch_can_fail(name, source):
    assert upward(name, source)


FOREIGN = re.compile(
    r"_(parameters|modules|call_impl|compiled_call_impl|(forward|backward)_(pre_)?hooks|schema|is_view|base|version|cdata"
    r"|(free_)?weak_ref|expired|device_types|get_sequence_number_for_group"  # torch
    r"|attn_implementation(_internal)?|(global|local)_mapping"  # transformers
    r"|getframe|current_frames|replace|asdict|make|fields)"  # sys, and named tuples
)
STILL = {"_add", "_forget", "_lse_low", "_with_low"}
"""Of Record, which grows under a watch, and of Vitals. This list only gets shorter."""


def read_privately(source):
    """The private names that a file reads of objects that are neither its own nor made by a class of it."""
    tree = parsed(source)
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    fields = [node for each in nodes if isinstance(each, ast.ClassDef) for node in each.body]
    own |= {node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            else:
                found.add(node.attr)
    return found - own


def test_no_module_reads_the_private_fields_of_another():
    found = {}
    for path in (one for part in ("watch", "treat", "integrations") for one in (ROOT / part).rglob("*.py")):
        names = read_privately(path.read_text(encoding="utf-8"))
        found |= {name: path.name for name in names if not FOREIGN.fullmatch(name)}
    assert set(found) == STILL, found
    assert read_privately("watch._sums") == {"_sums"}
    assert read_privately("class A:\n    def f(self, other):\n        self._x = other._x") == set()
