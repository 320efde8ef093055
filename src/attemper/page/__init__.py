"""page: a page on which one drags the scale and sees attention change; served, as one offline file, or in a notebook.

joined.py    finds the page's ES modules from their imports, and joins them into one, each in a scope of its own
data/        what the panels read, as one document of plain data
offline.py   the page as one HTML file that needs nothing else
draws.py     the page's random numbers, in Python: the same as those that its panels draw
modules/     the page itself: page.html, page.css, maths/, draw/, shell/ and a folder for each panel
"""

from __future__ import annotations

from .draws import normal as normal
from .offline import html as html
from .offline import write as write
