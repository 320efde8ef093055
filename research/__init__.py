"""research: questions that take hundreds of training runs on a GPU, and what docs/ shows of them.

stacked/       many training runs as one model
studies/       the questions; each is an experiment as attemper_lab.engine has them
run.py         measures a study, and packs its rows into docs/data/
full_size.py   the rows of experiments that `attemper run --preset full` measured elsewhere, and their pages
hopper/        the forward of attention for Hopper GPUs, on the way to attemper.kernels
figures.py     the figures, numbers.md (numbers.py) and the table of claims; protects.py draws what the scale protects
notes.py       docs/notes.md from the sentences, the judged claims and reading.py
page_data.py   the documents that come with the page
crossings.py   where the medians of the gradients cross, from many draws
"""
