"""A page on which you drag the scale and see attention change: served, as one offline file, or in a notebook.

joined.py    its script, style sheet and HTML; the modules are joined by attemper.report.joined
data/        what the panels read, as one document of plain data
offline.py   the page as one HTML file that needs nothing else
widget.py    the page in a notebook
server/      the page served on this machine
draws.py     the page's random numbers, in Python: the same as those that its panels draw
modules/     the page itself: page.html, page.css, maths/, draw/, shell/ and a folder for each panel
"""

from __future__ import annotations

from typing import Any

from .draws import normal as normal
from .offline import html as html
from .offline import write as write


def page() -> Any:
    """The page in a notebook: drag the scale and see attention change. Needs ``pip install 'attemper[notebook]'``.

    The same page as ``attemper serve`` opens and ``attemper page -o why.html`` writes. It computes in the browser and asks for
    nothing from outside.

    Example:
        >>> attemper.page()  # doctest: +SKIP
    """
    from .widget import widget

    return widget()


# `attemper.page` is the function above, so the other public names of this module are its attributes
page.html, page.normal, page.write = html, normal, write  # type: ignore[attr-defined]
