"""page: the page on which the scale is a slider."""
