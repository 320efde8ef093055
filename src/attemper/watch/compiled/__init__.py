"""compiled: vitals of a compiled model, added up inside its graph and read when a step ends.

Data passes the files in this order:

    find          which modules of a model attend, and by which function
    instrument    gives each of them a tally, to which its calls are added from then on
    interface     the attention function that an instrumented Hugging Face model calls
    reading       a watch's source of calls: the tallies of a step, read in one transfer
"""
