"""attach: intercepted functions and a dispatch mode show the attention calls of a watched forward; they are measured.

Data passes the files in this order:

    names         names the modules of a model, without the wrappers around it
    attachment    sees which module runs; passes each call to its measurement; keeps errors of attemper's own from the model
    dispatch      the mode that gets each op of a full pass and passes it to a route
    dynamo        makes torch.compile run eagerly while a step is measured
    running       holds the modules in their forward and the state of one pass, per thread
    plan          keeps the calls that a full pass showed, for the intercepted passes that follow
    guards        compares a call of SDPA with those that the plan was made of
    intercept     intercepts the functions that models call for attention, so that an intercepted pass needs no mode
    overrides     puts torch's functions back while a class or a mode answers a call of one
    storages      keeps facts about tensors, by the memory behind them
    modes         runs code without autograd, autocast and dispatch modes
    measuring     finds which rows of a call count, computes their vitals and folds these into heads
    gradients     sums |dq| and |dk| when the backward computes them
"""
