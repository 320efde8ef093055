"""Makes docs/reference.md from the signatures and docstrings of the public names; --check exits 1 when it is stale."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import attemper
from attemper import errors
from attemper.health.faults import ATTENTION_FAULTS, FAULTS
from attemper.health.thresholds import TABLE

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# API reference

Made by `make docs` from the signatures and docstrings; a test fails when it is stale. Every name below is read as
`attemper.NAME`. Letters: B batch, H query heads, G key/value heads, Lq and Lk lengths, E head dim (d_k), Ev value dim.
A *logit* is the score after scale, softcap and bias, before softmax.
"""

KERNELS_HEAD = """What each accepts, fastest first, from `kernels.KERNELS`. Every kernel takes all masks, windows, softcap,
dropout, scale tensors, dtypes and grouped heads.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([HEAD, contents(), *[part for group in attemper.GROUPS for part in group_sections(group)]])


def contents() -> str:
    """The public names by what a person wants."""
    lines = [
        f"- **{group}**: {', '.join(f'[`{name}`](#{anchor(name)})' for name in names)}"
        for group, names in attemper.GROUPS.items()
    ]
    return "\n".join(lines) + "\n"


def anchor(name: str) -> str:
    """Where a name's heading is: `Scan` cannot have the anchor of `scan`."""
    taken = name != name.lower() and any(name.lower() in names for names in attemper.GROUPS.values())
    return f"class-{name.lower()}" if taken else name.lower()


def group_sections(group: str) -> list[str]:
    public = {name: getattr(attemper, name) for name in attemper.GROUPS[group]}
    found = [function_section(name, thing) for name, thing in public.items() if inspect.isfunction(thing)]
    found += [class_section(name, thing) for name, thing in public.items() if inspect.isclass(thing)]
    return found + [OTHERS[name]() for name in public if name in OTHERS]


def function_section(name: str, function: object) -> str:
    return f"## {name}\n\n```python\n{signature(name, function)}\n```\n\n{prose(function)}\n"


def class_section(name: str, cls: type) -> str:
    fields = getattr(cls, "_fields", None)
    shape = f"`{name}({', '.join(fields)})`. " if fields else ""
    target = "" if anchor(name) == name.lower() else f'<a id="{anchor(name)}"></a>\n\n'
    parts = [f"{target}## {name}\n\n{shape}{prose(cls)}\n"]
    rows = [(key, thing) for key, thing in vars(cls).items() if isinstance(thing, property) and thing.__doc__]
    if rows:
        lines = [f"| `{key}` | {tidy(inspect.cleandoc(thing.__doc__ or ''))} |" for key, thing in rows]
        parts.append("\n".join(["| read | meaning |", "|---|---|", *lines]) + "\n")
    for key, thing in vars(cls).items():
        method = thing.__func__ if isinstance(thing, classmethod) else thing
        if inspect.isfunction(method) and not key.startswith("_") and fields is None:
            parts.append(f"### {name}.{key}\n\n```python\n{signature(key, method)}\n```\n\n{prose(method)}\n")
    return "\n".join(parts)


def rules_section() -> str:
    lines = ["| rule | logit | needs | learns | who uses it | source |", "|---|---|---|---|---|---|"]
    for rule in attemper.RULES.values():
        needs = ", ".join(f"`{need}`" for need in rule.needs) or "nothing"
        learns = "nothing" if rule.gain is None else f"one number per head, from {rule.gain:g}"
        lines.append(f"| `{rule.name}` | {rule.formula} | {needs} | {learns} | {rule.used_by} | {rule.source} |")
    says = "\n".join(f"- `{rule.name}`: {rule.description}" for rule in attemper.RULES.values())
    return "## RULES\n\n" + "\n".join(lines) + f"\n\n{says}\n"


def kernels_section() -> str:
    kernels = attemper.kernels
    rows = {name: serves.row() for name, serves in kernels.KERNELS.items()}
    columns = list(next(iter(rows.values())))
    lines = [
        f"| {' | '.join(['kernel', *(c.replace('_', ' ') for c in columns)])} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    lines += [f"| `{name}` | {' | '.join(row[c] for c in columns)} |" for name, row in rows.items()]
    table = "\n".join(lines)
    why = function_section("kernels.why", kernels.why)
    return f"## kernels\n\n{KERNELS_HEAD}\n{table}\n\n#{why}"


def health_section() -> str:
    health = attemper.health
    lines = ["| finding | what is compared | with | level | source |", "|---|---|---|---|---|"]
    for kind, (words, rungs) in TABLE.items():
        lines += [f"| {kind} | {words} | {rung.value:g} | {rung.level} | {rung.source} |" for rung in rungs]
    lines += [f"| scale | `{name}`: {one.title} | | {one.level} | {one.source} |" for name, one in FAULTS.items()]
    lines += [
        f"| attention | `{name}`: {one.title} | | {one.level} | {one.source} |"
        for name, one in ATTENTION_FAULTS.items()
    ]
    summary = inspect.cleandoc(health.__doc__ or "").split("\n\n", 1)
    parts = [
        f"## health\n\n{summary[0].removeprefix('health: ').capitalize()}\n\n{summary[1]}\n",
        "\n".join(lines) + "\n",
    ]
    for name in ("check", "findings", "verdict"):
        parts.append("#" + function_section(f"health.{name}", getattr(health, name)))
    parts.append("#" + class_section("Finding", health.Finding).replace("## Finding", "## health.Finding"))
    return "\n".join(parts)


def integrations_section() -> str:
    """The functions, and the callbacks as their source has them: their trainers need not be installed."""
    home = attemper.integrations
    summary = inspect.cleandoc(home.__doc__ or "").split("\n\n")
    parts = [f"## integrations\n\n{summary[0].removeprefix('integrations: ').capitalize()}\n\n{summary[-1]}\n"]
    for file in ("huggingface", "lightning"):
        source = Path(home.__file__ or "").with_name(f"{file}.py").read_text(encoding="utf-8")
        cls = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        parts.append(
            f"### integrations.{cls.name}\n\n{prose(type(cls.name, (), {'__doc__': ast.get_docstring(cls)}))}\n"
        )
    for name in ("alerts", "as_logger", "monitor", "output_attentions", "picture", "register_attention", "summary"):
        parts.append("#" + function_section(f"integrations.{name}", getattr(home, name)))
    parts.append("#" + class_section("Monitor", home.Monitor).replace("## Monitor", "## integrations.Monitor"))
    return "\n".join(parts)


def testing_section() -> str:
    testing = attemper.testing
    summary = inspect.cleandoc(testing.__doc__ or "").split("\n\n")
    names = [name for name in vars(testing) if name.startswith("assert_")]
    parts = [f"## testing\n\n{summary[0].removeprefix('testing: ').capitalize()}\n\n{summary[3]}\n"]
    return "\n".join(
        [*parts, *("#" + function_section(f"testing.{name}", getattr(testing, name)) for name in sorted(names))]
    )


def errors_section() -> str:
    summary, tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n", 1)
    return f"## errors\n\n{summary} Import them from `attemper.errors`.\n\n```text\n{tree}\n```\n"


OTHERS = {
    "RULES": rules_section,
    "errors": errors_section,
    "health": health_section,
    "integrations": integrations_section,
    "kernels": kernels_section,
    "testing": testing_section,
}
"""The public names that are neither functions nor classes."""


def signature(name: str, function: object) -> str:
    """The signature with annotations as written, one parameter a line where it is long."""
    found = inspect.signature(function)
    parts, keyword_only = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only = keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = star + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}" if ":" in text else f"={parameter.default!r}"
        parts.append(text)
    result = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def prose(thing: object) -> str:
    """A docstring as Markdown: arguments as a list, examples as code."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    body, *rest = re.split(r"^(Args|Returns|Example):\n", text, flags=re.MULTILINE)
    parts = [tidy(body.strip())]
    for title, block in zip(rest[::2], rest[1::2], strict=True):
        block = inspect.cleandoc("\n" + block).strip()
        if title == "Example":
            parts.append(f"```pycon\n{block}\n```")
        elif title == "Args":
            parts.append(re.sub(r"^(\w+): ", r"- `\1`: ", tidy(block), flags=re.MULTILINE))
        else:
            parts.append(f"Returns {tidy(block)}")
    return "\n\n".join(parts)


def tidy(text: str) -> str:
    """reStructuredText's roles and double backticks as Markdown's."""
    return re.sub(r":\w+:`([^`]+)`|``([^`]+)``", lambda m: f"`{m[1] or m[2]}`", text)


def main(arguments: list[str]) -> int:
    page = render()
    if "--check" not in arguments:
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == page:
        return 0
    print(f"{TARGET.name} is stale. Run make docs.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
