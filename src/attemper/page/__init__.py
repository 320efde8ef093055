"""page: a page on which one drags the scale and sees attention change; served, as one offline file, or in a notebook.

joined.py    finds the page's ES modules from their imports, and joins them into one, each in a scope of its own
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


# `attemper.page` is the function above, as with attention and watch; what one uses beside it is found there too
for _name, _value in {"html": html, "normal": normal, "write": write}.items():
    setattr(page, _name, _value)
