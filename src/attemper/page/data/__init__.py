"""What the page's panels read, as one document of plain data.

bundle.py   every panel's key of the document
"""

from .bundle import bundle as bundle
