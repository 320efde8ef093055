"""compiled: vitals of a compiled model, added up inside its graph and read when a step ends.

Data passes the files in this order:

    find          which modules of a model attend, and by which function
    instrument    gives each of them a tally, to which its calls are added from then on
    interface     the attention function that an instrumented Hugging Face model calls
    reading       the watch of such a model: reads the tallies of a step in one transfer
"""
