"""The engine of `attemper run`: from an experiment and its options to rows, a verdict and files.

In the order in which a run passes them:

    command.py       the options of a run, how many processes, the progress bar
    experiment.py    the contract: parameters, cells, rows, expectations, verdict
    sweep.py         every cell measured, here, in processes or on a cluster; failures reported
    orphans.py       ends a worker process whose caller is gone
    fingerprint.py   a hash of the code that measures, so that results of edited code are not mixed in
    store.py         finished cells in a file, from which a killed run continues
    render.py        the finding and its numbers for a terminal
    output.py        the rows or the figure as a file
"""
