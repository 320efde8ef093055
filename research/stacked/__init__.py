"""Many training runs of one shape as one model: every tensor has a leading dimension of runs, so a GPU is busy with small
models.

In the order in which a run passes the files:

    study.py        which stack comes next, until everything is measured or the time is over
    parameters.py   the parameters of all runs in one tensor
    adam.py         Adam over that tensor, each run with its own rate, clipped by its own norm
    repeated.py     one step, recorded once and replayed on a GPU
    recall.py       the recall task of lab/training, stacked
    text.py         the standard library's sources as bytes
    treatments.py   what a run gets beside its rule, from which step on
    surrogate.py    a softmax whose backward has another temperature's Jacobian; the rates of W_Q and W_K
    probe.py        the signs of every head, kept on the device
    language.py     a causal language model, stacked
    fit.py          a stack of them, trained to its end

research/studies/ asks the questions.
"""
