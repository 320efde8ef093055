"""widget: the page in a notebook, through anywidget: the same modules as one file, the same data, and no server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from .._files import installed
from ..errors import MissingExtra
from .data import bundle
from .joined import ENTRY, script, style

HOST = f"""
export default {{
  render({{ model, el }}) {{
    const root = document.createElement("div");
    el.replaceChildren(root);
    const {{ start, ownAddress }} = needed["{ENTRY}"];
    const shown = start(root, model.get("data"), {{ address: ownAddress() }});
    return () => shown.unmount();
  }},
}};
"""
"""What a notebook's host calls; the state of a page is its own, since the address is the notebook's."""


def module() -> str:
    """The page as the one ES module that a widget's host loads."""
    return script() + HOST


def widget(data: Mapping[str, Any] | None = None) -> Any:
    """The page as a widget; ``data`` is what its panels read, that of :func:`attemper.page.data.bundle` where None is given."""
    return _kind()(data=dict(bundle() if data is None else data))


@cache
def _kind() -> Any:
    anywidget, traitlets = (installed("page():", package) for package in ("anywidget", "traitlets"))
    if anywidget is None or traitlets is None:
        raise MissingExtra(
            "page(): a page in a notebook needs anywidget, which is not installed. Type pip install 'attemper[notebook]'. "
            "Without it, `attemper serve` opens the page in a browser, and `attemper page -o why.html` writes it to a file."
        )

    class PageWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        """The page in a cell."""

        _esm = module()
        _css = style()
        data = traitlets.Dict().tag(sync=True)

    return PageWidget
