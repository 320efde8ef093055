"""The page in a notebook, through anywidget: the same modules in one file, the same data, and no server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from attemper.errors import MissingExtra
from attemper.extension.files import installed

from .data import bundle
from .joined import ENTRY, script, style
from .offline import PICTURED

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
"""What a notebook's host calls. Each page keeps its state to itself, since the address is the notebook's."""


def module() -> str:
    """The page as the one ES module that a widget's host loads."""
    return script() + HOST


def widget(data: Mapping[str, Any] | None = None) -> Any:
    """The page as a widget. Its panels read ``data``, or that of :func:`attemper_lab.page.data.bundle`."""
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

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """The widget; and a picture for what shows a notebook without running it: nbconvert, a page of a code host."""
            from ..explain import explain

            bundle = super()._repr_mimebundle_(**options)
            data, *metadata = bundle if isinstance(bundle, tuple) else (bundle,)
            shown = {**data, "image/svg+xml": explain(PICTURED).flow()}
            return (shown, *metadata) if metadata else shown

    return PageWidget
